/* SPDX-License-Identifier: MIT */
/* fs/edit.c - targets of transactions, and the nodes of what was written to view names. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "fs/edit_priv.h"
#include "save/incoming.h"

enum { FIRST_TABLE = 64, VERDICT_LOOKUPS = 2 };
#define VERDICT_NS INT64_C(5000000000)

#define EDIT_INO ((fuse_ino_t)1 << 62)
#define NOTE_FORMAT "format"

void edits_lock(struct fs *fs)
{
    pthread_mutex_lock(&fs->edits->lock);
}

void edits_unlock(struct fs *fs)
{
    pthread_mutex_unlock(&fs->edits->lock);
}

/* ---- targets ---- */

void made_release(struct made *m)
{
    free(m->save);
    free(m->format);
    *m = (struct made){0};
}

static void target_free(struct fs *fs, struct target *t)
{
    struct err e = {0};

    intake_free(t->intake);
    if (txn_close(t->txn, &e) < 0)
        last_error_report(&fs->last_error, &e);
    pthread_rwlock_destroy(&t->busy);
    pthread_mutex_destroy(&t->begin);
    disk_unpin(fs, t->dir);
    edit_maker_release(t);
    free(t->save);
    made_release(&t->made);
    free(t);
}

static struct target *target_new(struct fs *fs, struct disk_node *dir)
{
    struct target *t = calloc(1, sizeof *t);

    if (!t)
        return NULL;
    t->dir = disk_pin(fs, dir->ino);
    pthread_rwlock_init(&t->busy, NULL);
    pthread_mutex_init(&t->begin, NULL);
    t->next = fs->edits->targets;
    fs->edits->targets = t;
    return t;
}

struct target *target_get(struct fs *fs, struct disk_node *dir, bool make)
{
    struct target *t;

    edits_lock(fs);
    for (t = fs->edits->targets; t && t->dir != dir; t = t->next)
        ;
    if (!t && make)
        t = target_new(fs, dir);
    if (t)
        t->users++;
    edits_unlock(fs);
    return t;
}

/* Nobody needs it any more, and nothing is staged: takes it off the list. With the lock. */
static bool is_over(struct edits *x, struct target *t)
{
    struct target **at = &x->targets;

    if (t->users > 0 || t->txn || t->save || t->nodes || t->maker || t->made.save)
        return false;
    while (*at != t)
        at = &(*at)->next;
    *at = t->next;
    return true;
}

void target_put(struct fs *fs, struct target *t)
{
    bool over;

    if (!t)
        return;
    edits_lock(fs);
    t->users--;
    over = is_over(fs->edits, t);
    edits_unlock(fs);
    if (over)
        target_free(fs, t);
}

void target_place_release(struct target_place *p)
{
    if (p->fd >= 0)
        close(p->fd);
}

int target_place(struct fs *fs, struct target *t, struct target_place *out,
                 struct err *e)
{
    struct disk_node *parent = disk_place(fs, t->dir, out->name);
    struct disk_node *in = parent ? parent : disk_pin(fs, t->dir->ino);
    int at, rc = disk_path(fs, t->dir, out->path, e);

    out->fd = -1;
    at = rc < 0 ? rc : disk_get(fs, in, e);
    if (at >= 0) {
        out->fd = openat(at, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (out->fd < 0)
            rc = err_set(e, errno, "%s: %s", out->path, strerror(errno));
        disk_put(fs, in);
    } else {
        rc = at;
    }
    disk_unpin(fs, in);
    out->at = (struct publish_place){.dir = out->fd,
                                     .name = parent ? out->name : ".",
                                     .path = out->path[0] ? out->path : "the root"};
    return rc;
}

/* ---- which format ---- */

char *target_save(struct fs *fs, struct target *t)
{
    char *noted = t->txn ? txn_noted(t->txn, NOTE_FORMAT) : NULL;
    const char *text;

    if (noted)
        return noted;
    edits_lock(fs);
    text = t->save ? t->save : fs->options.save;
    noted = text ? strdup(text) : NULL;
    edits_unlock(fs);
    return noted;
}

/* Is the checkpoint still what this mount has made? With `busy`, for writing. */
static bool is_made(struct fs *fs, struct target *t, const struct generation *gen)
{
    struct made *m = &t->made;

    edits_lock(fs);
    if (m->save && !m->format)
        m->format = strdup(gen->info.format);
    if (m->save && m->format && strcmp(m->format, gen->info.format) != 0)
        made_release(m);
    edits_unlock(fs);
    return m->save;
}

void target_end_made(struct fs *fs, struct target *t)
{
    pthread_rwlock_wrlock(&t->busy);
    edits_lock(fs);
    made_release(&t->made);
    edits_unlock(fs);
    pthread_rwlock_unlock(&t->busy);
}

/* With the lock of edits. */
static void note_set(struct made *m, const char *path)
{
    enum role role;

    if (incoming_kind(path) == INCOMING_SAFETENSORS && incoming_is_whole(path, &role))
        m->sets[role] = true;
}

void target_note_made(struct fs *fs, struct target *t, bool new,
                      struct edit_node *const *node, size_t nodes)
{
    CLEANUP_FREE char *save = target_save(fs, t);

    edits_lock(fs);
    if (new) {
        made_release(&t->made);
        t->made.save = steal(&save);
    }
    for (size_t i = 0; t->made.save && i < nodes; i++)
        note_set(&t->made, node[i]->path);
    edits_unlock(fs);
}

int target_format(struct fs *fs, struct target *t, const struct generation *gen,
                  struct save_format *out, struct err *e)
{
    CLEANUP_FREE char *text = NULL;

    if (gen && is_made(fs, t, gen))
        return save_format_parse(t->made.save, out, e);
    if (gen)
        return save_format_own(fs->catalog, &gen->info, out, e);
    text = target_save(fs, t);
    if (!text) {
        err_set(e, ENOTSUP, "no format is set for saves here");
        return err_hint(e, "mount with save=FORMAT, or set user.unshard.save");
    }
    return save_format_parse(text, out, e);
}

bool edit_is_received(const char *path)
{
    enum role role;

    return incoming_kind(path) == INCOMING_SAFETENSORS &&
           incoming_is_whole(path, &role);
}

/* ---- nodes ---- */

/* Gives it a number. With the lock. */
static bool table_add(struct edits *x, struct edit_node *n)
{
    size_t at = MAX(x->free, (size_t)1);

    while (at < x->cap && x->table[at])
        at++;
    if (at >= x->cap) {
        size_t cap = x->cap ? 2 * x->cap : FIRST_TABLE;
        struct edit_node **grown = reallocarray(x->table, cap, sizeof *grown);

        if (!grown)
            return false;
        memset(grown + x->cap, 0, (cap - x->cap) * sizeof *grown);
        x->table = grown;
        x->cap = cap;
    }
    x->table[at] = n;
    x->free = at + 1;
    n->ino = EDIT_INO | at;
    n->generation = ++x->generation;
    return true;
}

struct edit_node *edit_node_find(struct target *t, const char *path)
{
    struct edit_node *n = t->nodes;

    while (n && strcmp(n->path, path) != 0)
        n = n->next;
    if (n)
        n->refs++;
    return n;
}

void edit_node_ref(struct edit_node *n)
{
    n->refs++;
}

int edit_node_new(struct fs *fs, struct target *t, const char *path, bool is_dir,
                  struct edit_node **out, struct err *e)
{
    struct edit_node *n = calloc(1, sizeof *n);

    if (n)
        n->path = strdup(path);
    if (!n || !n->path || !table_add(fs->edits, n)) {
        free(n ? n->path : NULL);
        free(n);
        return err_nomem(e);
    }
    n->target = t;
    n->is_dir = is_dir;
    n->refs = 2; /* its name's, and the caller's */
    clock_gettime(CLOCK_REALTIME, &n->mtime);
    n->next = t->nodes;
    t->nodes = n;
    t->users++;
    *out = n;
    return 0;
}

void edit_node_unlink(struct fs *fs, struct edit_node *n)
{
    struct edit_node **at = &n->target->nodes;

    if (!n->path)
        return;
    while (*at != n)
        at = &(*at)->next;
    *at = n->next;
    fs->edits->charged -= n->charged;
    n->charged = 0;
    free(n->path);
    n->path = NULL;
    n->refs--;
}

struct edit_node *edit_node_of(struct fs *fs, fuse_ino_t ino)
{
    struct edits *x = fs->edits;
    size_t at = (size_t)(ino & ~EDIT_INO);
    struct edit_node *n;

    edits_lock(fs);
    n = at < x->cap ? x->table[at] : NULL;
    if (n)
        n->refs++;
    edits_unlock(fs);
    return n;
}

void edit_node_put(struct fs *fs, struct edit_node *n, uint64_t refs)
{
    struct edits *x = fs->edits;
    bool last;

    if (!n)
        return;
    edits_lock(fs);
    n->refs -= MIN(refs, n->refs);
    last = n->refs == 0;
    if (last) {
        size_t at = (size_t)(n->ino & ~EDIT_INO);

        x->table[at] = NULL;
        x->free = MIN(x->free, at);
    }
    edits_unlock(fs);
    if (!last)
        return;
    txn_file_put(n->file);
    target_put(fs, n->target);
    free(n);
}

/* ---- what is staged ---- */

/* The storage files that a step may replace, as they are now. */
struct base {
    struct txn *txn;
    const char *dir; /* of the checkpoint */
    struct err *e;
};

static int add_base(void *user, const struct catalog_file *f)
{
    const struct base *b = user;
    size_t len = strlen(b->dir);
    struct file_id id = f->id;

    if (strncmp(f->path, b->dir, len) != 0 || (len && f->path[len] != '/'))
        return 0;    /* a link leads out of the directory */
    id.ctime_ns = 0; /* links and renames by others change it, and no byte */
    return txn_base_add(b->txn, f->path + len + (len > 0), &id, b->e);
}

int edit_base(struct fs *fs, struct target *t, struct err *e)
{
    struct generation *gen = NULL;
    struct base b = {.txn = t->txn, .e = e};
    int rc = disk_generation(fs, t->dir, true, &gen, e);

    if (rc == -ENOENT) {
        *e = (struct err){0};
        return 0;
    }
    if (rc == 0) {
        b.dir = gen->path;
        rc = catalog_files(fs->catalog, gen->info.id, add_base, &b, e);
    }
    generation_unref(fs, gen, 1);
    return rc;
}

/* Files of safetensors are received into shards. `busy` is held for writing. */
static int open_intake(struct fs *fs, struct target *t, struct err *e)
{
    struct intake_spec spec = {.dir = txn_dir(t->txn), .pool = fs->reading.pool};
    CLEANUP_FREE char *text = target_save(fs, t);
    struct save_format format;
    struct generation *gen = NULL;
    int64_t checkpoint;
    int rc;

    if (t->intake)
        return 0;
    rc = disk_generation(fs, t->dir, true, &gen, e);
    if (rc == -ENOENT) {
        *e = (struct err){0};
        rc = 0;
    }
    if (rc == 0)
        rc = target_format(fs, t, gen, &format, e);
    if (rc == 0 && !gen)
        rc = txn_note(t->txn, NOTE_FORMAT, text, e);
    checkpoint = gen ? gen->info.id : 0;
    generation_unref(fs, gen, 1);
    if (rc < 0)
        return rc;
    spec.writer = format.writer;
    spec.options = format.options;
    memcpy(spec.drop_roles, format.drop_roles, sizeof spec.drop_roles);
    spec.drop_objects = format.drop_objects;
    spec.env = &fs->reading.env;
    spec.checkpoint = checkpoint;
    spec.made_by = checkpoint && t->made.save ? format.writer : NULL;
    memcpy(spec.sets, t->made.sets, sizeof spec.sets);
    return intake_open(&spec, &t->intake, e);
}

/* The bytes of it that had arrived, by the journal. */
static int restore(struct edit_node *n, struct err *e)
{
    CLEANUP(ranges_release) struct ranges missing = {0};
    CLEANUP(ranges_release) struct ranges arrived = {0};
    uint64_t size = txn_expected(n->file), end = size ? size : INT64_MAX;
    int rc = txn_missing(n->file, end, &missing);

    if (rc == 0)
        rc = ranges_add(&arrived, 0, end);
    for (size_t i = 0; rc == 0 && i < missing.count; i++)
        rc = ranges_remove(&arrived, missing.range[i].from, missing.range[i].to);
    if (!size && arrived.count) /* its header has not arrived */
        size = arrived.range[arrived.count - 1].to;
    return rc < 0 ? err_nomem(e) : intake_restore(n->in, &arrived, size, e);
}

struct taking {
    struct fs *fs;
    struct target *target;
    struct err *e;
};

/* A file that an earlier mount has left. */
static int take_file(void *user, struct txn_file *f)
{
    struct taking *k = user;
    CLEANUP_FREE char *path = txn_file_path(f);
    struct edit_node *n;
    int rc;

    if (!path)
        return err_nomem(k->e);
    edits_lock(k->fs);
    rc = edit_node_new(k->fs, k->target, path, false, &n, k->e);
    edits_unlock(k->fs);
    if (rc < 0)
        return rc;
    n->file = txn_file_get(f);
    n->fd = -1;
    txn_file_owner(f, &n->uid, &n->gid, &n->mode);
    if (!edit_is_received(path)) {
        n->fd = txn_file_fd(f, k->e);
        rc = MIN(n->fd, 0);
    } else {
        rc = open_intake(k->fs, k->target, k->e);
        if (rc == 0)
            rc = intake_get(k->target->intake, path, &n->in, k->e);
        if (rc == 0)
            rc = restore(n, k->e);
    }
    n->complete = rc == 0 && edit_judge(k->fs, n, NULL, k->e) == 1;
    edit_node_put(k->fs, n, 1);
    return rc;
}

/* Shards of files that were published when a crash came. */
static int drop_published(struct target *t, struct err *e)
{
    int rc = 0;

    for (size_t i = t->intake ? intake_count(t->intake) : 0; rc == 0 && i-- > 0;) {
        struct intake_file *f = intake_at(t->intake, i);
        struct txn_file *staged = txn_find(t->txn, intake_path(f));

        if (!staged)
            rc = intake_remove(f, e);
        txn_file_put(staged);
    }
    return rc;
}

/* `busy` is held for writing. */
static int open_txn(struct fs *fs, struct target *t, bool make, struct err *e)
{
    CLEANUP(target_place_release) struct target_place place = {.fd = -1};
    struct taking k = {.fs = fs, .target = t, .e = e};
    int rc = target_place(fs, t, &place, e);

    if (rc == 0)
        rc = txn_open(&place.at, make ? TXN_ANY : TXN_EXISTING, &t->txn, e);
    if (rc == -EBADMSG) { /* nobody knows whose it is: it is left */
        e->code = EBUSY;
        rc = -EBUSY;
    }
    if (rc < 0)
        return rc;
    if (!txn_was_taken_up(t->txn)) {
        disk_changed(fs, t->dir); /* what others changed up to now is looked at first */
        return edit_base(fs, t, e);
    }
    log_msg(LOG_FS, LOG_INFO, "%s: goes on with what an earlier mount staged",
            place.at.path);
    rc = txn_each(t->txn, take_file, &k, e);
    return rc == 0 ? drop_published(t, e) : rc;
}

int target_settle(struct fs *fs, struct target *t, struct err *e)
{
    int rc;

    if (!txn_is_empty(t->txn))
        return edit_base(fs, t, e);
    intake_free(steal(&t->intake));
    rc = txn_close(steal(&t->txn), e);
    disk_lock(fs);
    t->dir->looked_for_staged &=
        rc == 0; /* what could not be removed is staged still */
    disk_unlock(fs);
    return rc;
}

/* The first node whose file has left the transaction, with a user; or NULL. */
static struct edit_node *ended_node(struct fs *fs, struct target *t)
{
    struct edit_node *n;

    edits_lock(fs);
    for (n = t->nodes; n; n = n->next) {
        struct txn_file *staged = n->file ? txn_find(t->txn, n->path) : NULL;
        bool ended = n->file && staged != n->file;

        txn_file_put(staged);
        if (ended) {
            n->refs++;
            break;
        }
    }
    edits_unlock(fs);
    return n;
}

int target_end_step(struct fs *fs, struct target *t, struct err *e)
{
    struct publish_spec none = {0};
    struct edit_node *n;
    int rc;

    if (!t->begun)
        return 0;
    rc = txn_publish(t->txn, NULL, 0, &none, NULL, 0, false, e);
    if (rc == -EINPROGRESS)
        return rc;
    t->begun = false;
    if (rc < 0)
        return rc;
    while ((n = ended_node(fs, t))) {
        edits_lock(fs);
        disk_unpin(fs, n->follows);
        n->follows = NULL;
        n->in = NULL; /* drop_published() removes it */
        edit_node_unlink(fs, n);
        edits_unlock(fs);
        edit_node_put(fs, n, 1);
    }
    disk_changed(fs, t->dir);
    rc = drop_published(t, e);
    return rc == 0 ? target_settle(fs, t, e) : rc;
}

int target_enter(struct fs *fs, struct target *t, bool make, struct err *e)
{
    int rc = 0;

    pthread_rwlock_rdlock(&t->busy);
    while ((!t->txn || t->begun) && rc == 0) {
        pthread_rwlock_unlock(&t->busy);
        pthread_rwlock_wrlock(&t->busy);
        if (!t->txn)
            rc = open_txn(fs, t, make, e);
        else
            rc = target_end_step(fs, t, e);
        pthread_rwlock_unlock(&t->busy);
        pthread_rwlock_rdlock(&t->busy);
    }
    if (rc < 0)
        pthread_rwlock_unlock(&t->busy);
    return rc;
}

void target_leave(struct target *t)
{
    pthread_rwlock_unlock(&t->busy);
}

void target_begun(struct target *t)
{
    target_leave(t);
    pthread_mutex_unlock(&t->begin);
}

/* ---- new files ---- */

static int receive(struct fs *fs, struct target *t, struct edit_node *n,
                   const char *path, struct err *e)
{
    int rc = 0;

    /* Others only read until this file is received: its number is not known yet. */
    if (!t->intake) {
        pthread_rwlock_unlock(&t->busy);
        pthread_rwlock_wrlock(&t->busy);
        rc = t->txn ? open_intake(fs, t, e) : -ESTALE;
        pthread_rwlock_unlock(&t->busy);
        pthread_rwlock_rdlock(&t->busy);
    }
    if (rc == 0 && !t->intake)
        rc = -ESTALE;
    return rc == 0 ? intake_get(t->intake, path, &n->in, e) : rc;
}

int edit_file_new(struct request *r, struct target *t, const char *path, mode_t mode,
                  struct edit_node **out, struct err *e)
{
    const struct fuse_ctx *c = fuse_req_ctx(r->req);
    const struct txn_new what = {.path = path,
                                 .uid = c->uid,
                                 .gid = c->gid,
                                 .mode = mode & 0777,
                                 .elsewhere = edit_is_received(path)};
    struct txn_file *file;
    struct edit_node *n;
    int rc = txn_new(t->txn, &what, &file, e);

    if (rc < 0)
        return rc;
    edits_lock(r->fs);
    rc = edit_node_new(r->fs, t, path, false, &n, e);
    edits_unlock(r->fs);
    if (rc < 0) {
        txn_drop(t->txn, file, e);
        txn_file_put(file);
        return rc;
    }
    n->file = file;
    n->mode = what.mode;
    n->uid = what.uid;
    n->gid = what.gid;
    n->fresh_ns = now_ns();
    n->fd = what.elsewhere ? -1 : txn_file_fd(file, e);
    if (what.elsewhere)
        rc = receive(r->fs, t, n, path, e);
    else
        rc = MIN(n->fd, 0);
    if (rc < 0) {
        txn_drop(t->txn, file, e);
        edits_lock(r->fs);
        edit_node_unlink(r->fs, n);
        edits_unlock(r->fs);
        edit_node_put(r->fs, n, 1);
        return rc;
    }
    *out = n;
    return 0;
}

/* ---- threads that look a name up again ---- */

void edit_turn_away(struct fs *fs, const struct request *r, fuse_ino_t dir,
                    const char *path, enum verdict verdict)
{
    struct edits *x = fs->edits;
    pid_t tid = fuse_req_ctx(r->req)->pid;
    size_t i = 0;

    edits_lock(fs);
    while (i < TURNED && x->turned[i].tid != tid)
        i++;
    if (i == TURNED)
        i = x->next_turned++ % TURNED;
    x->turned[i] = (struct turned){.tid = tid,
                                   .dir = dir,
                                   .verdict = verdict,
                                   .lookups = VERDICT_LOOKUPS,
                                   .comes = verdict == VERDICT_EDIT,
                                   .until_ns = now_ns() + VERDICT_NS};
    strncpy(x->turned[i].path, path, sizeof x->turned[i].path - 1);
    edits_unlock(fs);
}

bool edit_verdict_is(struct fs *fs, const struct request *r, fuse_ino_t dir,
                     const char *path, enum verdict verdict)
{
    struct edits *x = fs->edits;
    pid_t tid = fuse_req_ctx(r->req)->pid;
    bool is = false;

    edits_lock(fs);
    for (size_t i = 0; i < TURNED; i++) {
        struct turned *t = &x->turned[i];

        if (t->tid != tid || t->dir != dir || t->lookups == 0 ||
            t->verdict != verdict || t->until_ns < now_ns() ||
            strcmp(t->path, path) != 0)
            continue;
        t->lookups--;
        is = true;
    }
    edits_unlock(fs);
    return is;
}

void edit_came_back(struct fs *fs, const struct request *r)
{
    pid_t tid = fuse_req_ctx(r->req)->pid;

    edits_lock(fs);
    for (size_t i = 0; i < TURNED; i++)
        if (fs->edits->turned[i].tid == tid)
            fs->edits->turned[i] = (struct turned){0};
    edits_unlock(fs);
}

bool edit_is_coming(const struct edits *x, const struct edit_node *n)
{
    for (size_t i = 0; i < TURNED; i++) {
        const struct turned *t = &x->turned[i];

        if (t->comes && t->dir == n->target->dir->ino && t->until_ns >= now_ns() &&
            strcmp(t->path, n->path) == 0)
            return true;
    }
    return false;
}

/* With the lock: the entry of the thread that asks, or the one to be used for it. */
static struct looked_up *lookup_of(struct edits *x, pid_t tid)
{
    for (size_t i = 0; i < TURNED; i++)
        if (x->looked_up[i].tid == tid)
            return &x->looked_up[i];
    return &x->looked_up[x->next_looked_up++ % TURNED];
}

void edit_note_lookup(struct request *r, fuse_ino_t dir, const char *path)
{
    pid_t tid = fuse_req_ctx(r->req)->pid;
    struct looked_up *l;

    edits_lock(r->fs);
    l = lookup_of(r->fs->edits, tid);
    l->tid = tid;
    l->dir = dir;
    snprintf(l->path, sizeof l->path, "%s", path);
    edits_unlock(r->fs);
}

bool edit_noted_lookup(struct request *r, fuse_ino_t *dir, char path[PATH_MAX])
{
    pid_t tid = fuse_req_ctx(r->req)->pid;
    bool noted = false;

    edits_lock(r->fs);
    for (size_t i = 0; i < TURNED && !noted; i++) {
        const struct looked_up *l = &r->fs->edits->looked_up[i];

        noted = tid && l->tid == tid;
        if (noted) {
            *dir = l->dir;
            memcpy(path, l->path, PATH_MAX);
        }
    }
    edits_unlock(r->fs);
    return noted;
}

/* ---- begin and end ---- */

int edits_new(struct fs *fs, struct edits **out, struct err *e)
{
    struct edits *x = calloc(1, sizeof *x);
    pthread_condattr_t monotonic;

    if (!x)
        return err_nomem(e);
    x->fs = fs;
    pthread_mutex_init(&x->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&x->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *out = x;
    return 0;
}

/* Nobody asks any more: what is incomplete is left staged. */
void edits_free(struct fs *fs)
{
    struct edits *x = fs->edits;

    if (!x)
        return;
    for (size_t i = 0; i < x->cap; i++) {
        struct edit_node *n = x->table[i];

        if (!n)
            continue;
        txn_file_put(n->file);
        free(n->path);
        free(n);
    }
    for (struct target *t = x->targets, *next; t; t = next) {
        next = t->next;
        target_free(fs, t);
    }
    free(x->table);
    pthread_cond_destroy(&x->wake);
    pthread_mutex_destroy(&x->lock);
    free(x);
    fs->edits = NULL;
}
