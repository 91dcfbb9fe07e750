/* SPDX-License-Identifier: MIT */
/* fs/permit.c - finds the files that are read, and has the kernel judge the way to each. */
#include "fs/permit.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "fs/caller.h"
#include "fs/overlay.h"
#include "index/formats/ranks/rank_copies.h"
#include "remote/access.h"

enum {
    KNOWN = 32,           /* callers and checkpoints that are remembered */
    FILES_MAX = 32 << 20, /* an index numbers no more */
    TENSOR_MEMORY = 1 << 30,
    BATCH = 256, /* files that are judged at a time */
};

/* ---- sets of files, by their numbers ---- */

struct bits {
    unsigned char *data;
    size_t size;
};

static bool bits_has(const struct bits *b, uint32_t i)
{
    return i / 8 < b->size && b->data[i / 8] >> i % 8 & 1;
}

static int bits_add(struct bits *b, uint32_t i)
{
    if (i / 8 >= b->size) {
        size_t size = MAX((size_t)i / 8 + 1, b->size * 2);
        unsigned char *data = realloc(b->data, size);

        if (!data)
            return -ENOMEM;
        memset(data + b->size, 0, size - b->size);
        b->data = data;
        b->size = size;
    }
    b->data[i / 8] |= (unsigned char)(1 << i % 8);
    return 0;
}

static void bits_release(struct bits *b)
{
    free(b->data);
    *b = (struct bits){0};
}

/* ---- what is known ---- */

struct known {
    int64_t checkpoint;
    struct caller who;
    int64_t until_ns; /* 0: free */
    struct bits may;
    bool metadata; /* so may the metadata file, or it is none of its own */
};

struct permits {
    pthread_mutex_t lock;
    struct known known[KNOWN]; /* guarded by lock */
};

int permits_new(struct permits **out, struct err *e)
{
    struct permits *p = calloc(1, sizeof *p);

    if (!p)
        return err_nomem(e);
    pthread_mutex_init(&p->lock, NULL);
    *out = p;
    return 0;
}

static void known_release(struct known *k)
{
    caller_release(&k->who);
    bits_release(&k->may);
    *k = (struct known){0};
}

void permits_free(struct permits *p)
{
    if (!p)
        return;
    for (size_t i = 0; i < KNOWN; i++)
        known_release(&p->known[i]);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

static bool is_same(const struct caller *a, const struct caller *b)
{
    return a->uid == b->uid && a->gid == b->gid && a->capabilities == b->capabilities &&
           a->ngroups == b->ngroups &&
           (a->ngroups == 0 ||
            memcmp(a->groups, b->groups, a->ngroups * sizeof *a->groups) == 0);
}

/* With the lock; NULL: nothing is known. */
static struct known *find_known(struct permits *p, int64_t checkpoint,
                                const struct caller *who)
{
    int64_t now = now_ns();

    for (size_t i = 0; i < KNOWN; i++) {
        struct known *k = &p->known[i];

        if (k->until_ns && k->until_ns <= now)
            known_release(k);
        if (k->until_ns && k->checkpoint == checkpoint && is_same(&k->who, who))
            return k;
    }
    return NULL;
}

/* In the place of what ends first. NULL: no memory. */
static struct known *add_known(struct permits *p, int64_t checkpoint,
                               const struct caller *who)
{
    struct known *k = &p->known[0];
    gid_t *groups = calloc(who->ngroups + 1, sizeof *groups);

    if (!groups)
        return NULL;
    for (size_t i = 1; i < KNOWN; i++)
        if (p->known[i].until_ns < k->until_ns)
            k = &p->known[i];
    known_release(k);
    if (who->ngroups)
        memcpy(groups, who->groups, who->ngroups * sizeof *groups);
    k->checkpoint = checkpoint;
    k->who = *who;
    k->who.groups = groups;
    k->until_ns = now_ns() + FRESH_NS;
    return k;
}

/* ---- one question ---- */

struct file {
    uint32_t number;
    const char *path;
    uint64_t dev, inode; /* 0: whatever it is */
};

struct question {
    struct fs *fs;
    const struct generation *gen;
    struct caller who;
    struct bits files;   /* that it takes */
    struct arena *arena; /* of the paths of a batch */
    struct file batch[BATCH];
    size_t count;
    bool metadata; /* that was judged too */
    struct err *e;
};

static void question_release(struct question *q)
{
    caller_release(&q->who);
    bits_release(&q->files);
    arena_free(q->arena);
}

/* Of files of that store. 1: there is something to ask; 0: no. */
static int question_begin(const struct request *r, const struct store *store,
                          const struct generation *gen, struct question *q,
                          struct err *e)
{
    int rc;

    q->fs = r->fs;
    q->gen = gen;
    q->e = e;
    if (!r->req || store->remote)
        return 0;
    rc = caller_of(fuse_req_ctx(r->req), &q->who, e);
    return rc < 0 ? rc : q->who.is_other;
}

static bool is_known(const struct question *q, uint32_t number)
{
    struct permits *p = q->fs->permits;
    const struct known *k;
    bool may;

    pthread_mutex_lock(&p->lock);
    k = find_known(p, q->gen->info.id, &q->who);
    may = k && bits_has(&k->may, number);
    pthread_mutex_unlock(&p->lock);
    return may;
}

static bool is_metadata_known(const struct question *q)
{
    struct permits *p = q->fs->permits;
    const struct known *k;
    bool may;

    pthread_mutex_lock(&p->lock);
    k = find_known(p, q->gen->info.id, &q->who);
    may = k && k->metadata;
    pthread_mutex_unlock(&p->lock);
    return may;
}

/* For want of memory it is asked again. */
static void note_batch(const struct question *q)
{
    struct permits *p = q->fs->permits;
    struct known *k;

    pthread_mutex_lock(&p->lock);
    k = find_known(p, q->gen->info.id, &q->who);
    if (!k)
        k = add_known(p, q->gen->info.id, &q->who);
    if (k)
        k->metadata |= q->metadata;
    for (size_t i = 0; k && i < q->count; i++)
        if (bits_add(&k->may, q->batch[i].number) < 0)
            break;
    pthread_mutex_unlock(&p->lock);
}

/* As the caller, or about it. */
static int judge(const struct caller *who, struct store *store, const struct file *f,
                 struct err *e)
{
    const struct access_by by = {.uid = who->uid,
                                 .gid = who->gid,
                                 .groups = who->groups,
                                 .ngroups = who->ngroups};
    struct file_id id = {0};
    int rc = store->ops->readable
                 ? store->ops->readable(store, f->path, who->acts ? NULL : &by, &id, e)
                 : 0;

    if (rc == -EACCES)
        return err_set(e, EACCES, "%s: user %u may not read it on the source", f->path,
                       (unsigned)who->uid);
    if (rc == 0 && f->inode && id.ino && (id.ino != f->inode || id.dev != f->dev))
        return err_set(e, ESTALE, "%s: is another file by now", f->path);
    return rc;
}

static int judge_files(const struct caller *who, struct store *store,
                       const struct file *file, size_t n, struct err *e)
{
    CLEANUP(caller_leave) struct caller_saved saved = {0};
    int rc = caller_enter(who, &saved, e);

    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = judge(who, store, &file[i], e);
    return rc;
}

/* Does the metadata file stand with a shard, in its directory or above? */
static bool is_told_by(const char *metadata, const char *path)
{
    const char *slash = strrchr(metadata, '/');
    size_t len = slash ? (size_t)(slash - metadata) + 1 : 0;

    return strncmp(path, metadata, len) == 0;
}

static bool tells_any(const char *metadata, const struct question *q)
{
    bool any = false;

    for (size_t i = 0; !any && i < q->count; i++)
        any = is_told_by(metadata, q->batch[i].path);
    return any;
}

static int is_stored(void *user, const struct catalog_file *f)
{
    return f->storage && strcmp(f->path, user) == 0;
}

/*
 * What the pieces of a tensor are is told by the metadata file: where there is one, and not
 * the first shard in its place.
 */
static int judge_metadata(struct question *q)
{
    const char *path = q->gen->info.metadata_file;
    const struct file f = {.path = path};
    struct store *store = q->fs->store;
    struct err ignored = {0};
    struct entry_stat st;
    int rc;

    if (!path || !path[0] || is_metadata_known(q) || !tells_any(path, q))
        return 0;
    q->metadata = true;
    rc = catalog_files(q->fs->catalog, q->gen->info.id, is_stored,
                       (void *)(uintptr_t)path, q->e);
    if (rc != 0)
        return MIN(rc, 0);
    if (store->ops->stat(store, path, &st, &ignored) < 0 || st.kind != ENTRY_FILE)
        return 0;
    return judge_files(&q->who, store, &f, 1, q->e);
}

static int judge_batch(struct question *q)
{
    int rc = judge_files(&q->who, q->fs->store, q->batch, q->count, q->e);

    if (rc == 0)
        rc = judge_metadata(q);
    if (rc == 0)
        note_batch(q);
    q->count = 0;
    arena_free(q->arena);
    q->arena = NULL;
    return rc;
}

/* Of a file that was not there, or could not be looked at, nothing is read. */
static int add_file(struct question *q, const struct catalog_file *f)
{
    char *path;

    if (!f->id.ino && !f->id.dev)
        return 0;
    if (!q->arena)
        q->arena = arena_new((size_t)BATCH * 2 * PATH_MAX);
    path = q->arena ? arena_memdup(q->arena, f->path, strlen(f->path)) : NULL;
    if (!path)
        return err_nomem(q->e);
    q->batch[q->count++] = (struct file){
        .number = f->number, .path = path, .dev = f->id.dev, .inode = f->id.ino};
    return q->count == BATCH ? judge_batch(q) : 0;
}

static int add_number(struct question *q, uint32_t number)
{
    CLEANUP(arena_freep) struct arena *a = NULL;
    struct catalog_file f;
    int rc;

    if (is_known(q, number))
        return 0;
    a = arena_new(2 * PATH_MAX);
    rc = a ? catalog_file(q->fs->catalog, q->gen->info.id, number, a, &f, q->e)
           : err_nomem(q->e);
    return rc < 0 ? rc : add_file(q, &f);
}

/* May all of q->files be read? */
static int answer(struct question *q)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < q->files.size * 8; i++)
        if (bits_has(&q->files, (uint32_t)i))
            rc = add_number(q, (uint32_t)i);
    return rc == 0 && q->count ? judge_batch(q) : rc;
}

/* ---- what a file of the mount is made of ---- */

static int take(struct question *q, uint32_t number)
{
    if (number >= FILES_MAX)
        return err_set(q->e, EBADMSG, "the index has no file %u", (unsigned)number);
    return bits_add(&q->files, number) < 0 ? err_nomem(q->e) : 0;
}

/* Where other ranks have a part or a copy of a chunk (index/formats/ranks). */
static int take_places(struct question *q, const char *list, size_t len)
{
    const char *end = list + len;
    uint64_t offset;
    uint32_t number;
    int more, rc = 0;

    while (rc == 0 && (more = rank_copies_next(&list, end, &number, &offset)) != 0)
        rc = more < 0 ? err_set(q->e, EBADMSG, "the index does not say where it is")
                      : take(q, number);
    return rc;
}

struct tensor_files {
    struct question *q;
    const struct tensor_info *t;
};

static int take_chunk(void *user, const struct chunk *c, size_t i, size_t n,
                      struct err *e)
{
    const struct tensor_files *f = user;
    const char *list = c->param ? c->param : f->t->codec_key;
    size_t len = c->param ? c->param_len : f->t->codec_key_len;
    int rc = take(f->q, c->file);

    (void)i;
    (void)n;
    (void)e;
    if (rc == 0 && list &&
        (c->encoding == CHUNK_COPIES || c->encoding == CHUNK_SUM ||
         c->encoding == CHUNK_MEAN))
        rc = take_places(f->q, list, len);
    return rc;
}

static int take_tensor(struct question *q, uint32_t ord)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    struct catalog *c = q->fs->catalog;
    int64_t id = q->gen->info.id;
    const struct chunk_list *list;
    struct tensor_info t;
    struct tensor_files f = {.q = q, .t = &t};
    int rc = a ? catalog_tensor(c, id, ord, a, &t, q->e) : err_nomem(q->e);

    return rc < 0 ? rc : catalog_chunk_list(c, id, &t, a, take_chunk, &f, &list, q->e);
}

static int take_members(struct question *q, const struct view_info *v)
{
    CLEANUP_FREE struct view_member *member = NULL;
    size_t n = 0;
    int rc = view_members(q->fs->catalog, v, &member, &n, q->e);

    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = take_tensor(q, member[i].ord);
    return rc;
}

static int take_view(struct question *q, enum view_kind kind)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    struct view_info v;
    int rc = a ? view_get(q->fs->catalog, q->gen->info.id, kind, q->fs->options.prefix,
                          a, &v, q->e)
               : err_nomem(q->e);

    if (rc < 0 || v.fault)
        return rc; /* a broken one is not opened */
    return v.whole_file >= 0 ? take(q, (uint32_t)v.whole_file) : take_members(q, &v);
}

static int take_file(void *user, const struct catalog_file *f)
{
    return take(user, f->number);
}

static int take_stored(void *user, const struct catalog_file *f)
{
    return f->storage ? take(user, f->number) : 0;
}

/*
 * Who may read all shards may read every view: that is told quickly. Of others it is found
 * out which shards the view takes.
 */
static int answer_view(struct question *q, enum view_kind kind)
{
    int rc = catalog_files(q->fs->catalog, q->gen->info.id, take_stored, q, q->e);

    if (rc == 0)
        rc = answer(q);
    if (rc != -EACCES)
        return rc;
    *q->e = (struct err){0};
    q->count = 0;
    bits_release(&q->files);
    rc = take_view(q, kind);
    return rc < 0 ? rc : answer(q);
}

static int answer_overlay(const struct question *q, uint32_t index)
{
    const struct overlay_file *f = overlay_at(q->fs->overlay, index);
    const struct file file = {
        .path = f->name, .dev = f->st.id.dev, .inode = f->st.id.ino};

    return judge_files(&q->who, overlay_store(q->fs->overlay), &file, 1, q->e);
}

/* Of a scan that failed there is only the reason. */
static int answer_report(struct question *q)
{
    int rc = 0;

    if (!q->gen->info.error)
        rc = catalog_files(q->fs->catalog, q->gen->info.id, take_file, q, q->e);
    return rc < 0 ? rc : answer(q);
}

static int answer_tensor(struct question *q, uint32_t ord)
{
    int rc = take_tensor(q, ord);

    return rc < 0 ? rc : answer(q);
}

int permit_open(const struct request *r, const struct generation *gen, struct err *e)
{
    CLEANUP(question_release) struct question q = {0};
    enum inside kind = ino_kind(r->ino);
    const struct store *store =
        kind == INSIDE_OVERLAY ? overlay_store(r->fs->overlay) : r->fs->store;
    int rc = question_begin(r, store, gen, &q, e);

    if (rc <= 0)
        return rc;
    switch (kind) {
    case INSIDE_NPY:
    case INSIDE_BARE:
        return answer_tensor(&q, ino_index(r->ino));
    case INSIDE_MODEL:
        return answer_view(&q, VIEW_MODEL);
    case INSIDE_OPTIMIZER_FILE:
        return answer_view(&q, VIEW_OPTIMIZER);
    case INSIDE_CHECKPOINT_JSON:
    case INSIDE_OBJECTS_JSON:
    case INSIDE_INDEX:
        return answer_report(&q);
    case INSIDE_OVERLAY:
        return answer_overlay(&q, ino_index(r->ino));
    case INSIDE_TENSORS:
    case INSIDE_TREE:
    case INSIDE_RAW:
    case INSIDE_OPTIMIZER:
    case INSIDE_META:
    case INSIDE_COUNTERS_JSON:
    case INSIDE_LAST_ERROR:
    case INSIDE_LATEST:
    default:
        return 0;
    }
}

/* ---- directories, and files of the source ---- */

int permit_list(const struct request *r, const struct generation *gen, struct err *e)
{
    const char *metadata = gen->info.metadata_file;
    CLEANUP(question_release) struct question q = {0};
    const struct file f = {.path = metadata && metadata[0] ? metadata : gen->place};
    int rc = ino_kind(r->ino) == INSIDE_META
                 ? 0
                 : question_begin(r, r->fs->store, gen, &q, e);

    return rc <= 0 ? rc : judge_files(&q.who, r->fs->store, &f, 1, e);
}

int permit_node(const struct request *r, const char *path, uint64_t dev, uint64_t inode,
                struct err *e)
{
    CLEANUP(question_release) struct question q = {0};
    const struct file f = {.path = path, .dev = dev, .inode = inode};
    int rc = question_begin(r, r->fs->store, NULL, &q, e);

    return rc <= 0 ? rc : judge_files(&q.who, r->fs->store, &f, 1, e);
}

/* ---- side files of parts ---- */

void permit_parts_release(struct permit_parts *p)
{
    free(p->at);
    *p = (struct permit_parts){0};
}

static const struct permit_part *find_part(const struct permit_parts *p,
                                           const char *part)
{
    for (size_t i = 0; i < p->count; i++)
        if (strcmp(p->at[i].part, part) == 0)
            return &p->at[i];
    return NULL;
}

bool permit_lists(const struct permit_parts *p, const char *part)
{
    const struct permit_part *found = part && p->asked ? find_part(p, part) : NULL;

    return !part || !p->asked || (found && found->may);
}

/* The directory that a side file lies in. */
static bool may_list_parent(struct question *q, const struct node *dir,
                            const struct snapshot_entry *entry)
{
    char path[PATH_MAX];
    const struct file f = {.path = path};
    struct err ignored = {0};
    char *slash;

    if (snapshot_path(dir, entry, path, sizeof path, &ignored) < 0)
        return false;
    slash = strrchr(path, '/');
    *(slash ? slash : path) = '\0';
    return judge_files(&q->who, q->fs->store, &f, 1, &ignored) == 0;
}

static int add_part(struct question *q, const struct node *dir,
                    const struct snapshot_entry *entry, struct permit_parts *out)
{
    struct permit_part *at = reallocarray(out->at, out->count + 1, sizeof *at);

    if (!at)
        return err_nomem(q->e);
    out->at = at;
    at[out->count++] = (struct permit_part){.part = entry->part,
                                            .may = may_list_parent(q, dir, entry)};
    return 0;
}

int permit_parts(const struct request *r, const struct node *dir,
                 struct snapshot *snapshot, struct permit_parts *out, struct err *e)
{
    CLEANUP(question_release) struct question q = {0};
    int rc = snapshot->gen ? question_begin(r, r->fs->store, snapshot->gen, &q, e) : 0;

    *out = (struct permit_parts){.asked = rc == 1};
    for (size_t i = 0; rc == 1 && i < snapshot->count; i++) {
        const struct snapshot_entry *entry = &snapshot->entry[i];

        if (entry && entry->part && !find_part(out, entry->part) &&
            add_part(&q, dir, entry, out) < 0)
            rc = -ENOMEM;
    }
    return MIN(rc, 0);
}
