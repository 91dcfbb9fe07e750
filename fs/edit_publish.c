/* SPDX-License-Identifier: MIT */
/* fs/edit_publish.c - when transactions are complete, and their publication. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/dir.h"
#include "base/fsutil.h"
#include "base/keyset.h"
#include "base/log.h"
#include "base/vec.h"
#include "fs/edit_priv.h"
#include "index/formats/hf/hf_index.h"
#include "save/incoming.h"
#include "save/merge.h"
#include "save/patch.h"
#include "save/publish.h"

enum {
    LIST_MEMORY = 512 << 20,
    GATHER_NS = 1000000000, /* after the last file */
};
/* After the first file: at most five seconds by contract. */
#define GATHER_MOST_NS INT64_C(2000000000)
/* close(2) returns before the kernel tells us of it. */
#define LATE_NS INT64_C(5000000000)

/* ---- what is complete ---- */

/* One publication. */
struct work {
    struct fs *fs;
    struct target *t;
    struct generation *gen; /* the checkpoint that is there, or NULL */
    struct save_format format;
    struct edit_node **node; /* that are published */
    size_t nodes, published;
    bool all;       /* removals too */
    struct err bad; /* of a file that cannot be published as it is */
    struct arena *arena;
    struct merge_file *file;
    size_t files;
    const char **removed;
    size_t removals;
    struct publish_file *step;
    size_t steps, steps_cap;
    uid_t uid;
    gid_t gid;
    mode_t mode;
};

/* With the lock: somebody has it open, or opens it. */
static bool is_open(const struct edits *x, const struct edit_node *n)
{
    return n->handles > 0 || n->follows || n->fresh_ns || edit_is_coming(x, n);
}

/* Of a numbered set: are all of its files there and complete? */
static bool is_set_whole(const struct edits *x, const struct target *t,
                         const struct edit_node *of)
{
    unsigned number, count, found = 0;
    size_t stem, other;

    count = incoming_set(of->path, &number, &stem);
    if (!count)
        return true;
    for (const struct edit_node *n = t->nodes; n; n = n->next)
        found += n->complete && !is_open(x, n) &&
                 incoming_set(n->path, &number, &other) == count && other == stem &&
                 strncmp(n->path, of->path, stem) == 0;
    return found == count;
}

/* An index goes with the set that it names; alone it waits for it. */
static bool is_ready(const struct edits *x, const struct target *t,
                     const struct edit_node *n)
{
    if (n->is_dir || !n->complete || is_open(x, n))
        return false;
    if (incoming_kind(n->path) != INCOMING_INDEX)
        return is_set_whole(x, t, n);
    for (const struct edit_node *of = t->nodes; of; of = of->next)
        if (incoming_kind(of->path) == INCOMING_SAFETENSORS)
            return of->complete && !is_open(x, of) && is_set_whole(x, t, of);
    return false;
}

static int by_close(const void *a, const void *b)
{
    const struct edit_node *x = *(struct edit_node *const *)a,
                           *y = *(struct edit_node *const *)b;

    return (x->closed > y->closed) - (x->closed < y->closed);
}

/* Judges all files again: what a raw/ file waits for may have come. With `busy`. */
static void judge_all(struct work *w)
{
    for (struct edit_node *n = w->t->nodes; n; n = n->next) {
        struct err e = {0};

        if (!n->is_dir)
            n->complete = edit_judge(w->fs, n, w->gen, &e) == 1;
        edits_lock(w->fs);
        if (e.code && !is_open(w->fs->edits, n) && !w->bad.code)
            w->bad = e;
        edits_unlock(w->fs);
    }
}

static int list_ready(struct work *w, struct err *e)
{
    size_t count = 0;

    for (const struct edit_node *n = w->t->nodes; n; n = n->next)
        count++;
    w->node = calloc(count + 1, sizeof *w->node);
    if (!w->node)
        return err_nomem(e);
    edits_lock(w->fs);
    for (struct edit_node *n = w->t->nodes; n; n = n->next)
        if (is_ready(w->fs->edits, w->t, n)) {
            edit_node_ref(n);
            w->node[w->nodes++] = n;
        }
    edits_unlock(w->fs);
    if (w->nodes)
        qsort(w->node, w->nodes, sizeof *w->node, by_close);
    return 0;
}

/* ---- the merge ---- */

static char *keep(struct work *w, const char *text)
{
    return arena_memdup(w->arena, text, strlen(text));
}

static int add_file(struct work *w, struct edit_node *n, struct err *e)
{
    CLEANUP_FREE char *dtype = txn_file_noted(n->file, "dtype");
    struct merge_file *f = &w->file[w->files++];

    *f = (struct merge_file){.path = keep(w, n->path),
                             .spool = n->in ? NULL : keep(w, disk_proc(n->fd).path),
                             .intake = n->in,
                             .dtype = dtype ? keep(w, dtype) : NULL};
    w->mode &= n->mode;
    w->uid = n->uid;
    w->gid = n->gid;
    return f->path && (n->in || f->spool) && (!dtype || f->dtype) ? 0 : err_nomem(e);
}

static int add_removal(void *user, const char *path)
{
    struct work *w = user;
    const char **grown = reallocarray(w->removed, w->removals + 1, sizeof *grown);

    if (!grown)
        return -ENOMEM;
    w->removed = grown;
    if (strncmp(path, "tensors/", 8) != 0)
        return 0;
    grown[w->removals] = keep(w, path + 8);
    return grown[w->removals] && ++w->removals ? 0 : -ENOMEM;
}

static const struct format_writer *made_by(const struct work *w)
{
    return w->gen && w->t->made.save ? w->format.writer : NULL;
}

static int make_merge(struct work *w, struct merge **out, struct err *e)
{
    struct merge_spec spec = {.spool = AT_FDCWD,
                              .env = &w->fs->reading.env,
                              .checkpoint = w->gen ? w->gen->info.id : 0,
                              .made_by = made_by(w),
                              .drop_objects = w->format.drop_objects};
    int rc = 0;

    w->file = calloc(w->nodes + 1, sizeof *w->file);
    if (!w->file)
        return err_nomem(e);
    for (size_t i = 0; rc == 0 && i < w->nodes; i++)
        rc = add_file(w, w->node[i], e);
    if (rc == 0 && w->all)
        rc = txn_each_removal(w->t->txn, add_removal, w, e);
    if (rc < 0)
        return e->code ? rc : err_nomem(e);
    spec.file = w->file;
    spec.files = w->files;
    spec.removed = w->removed;
    spec.removals = w->removals;
    memcpy(spec.drop_roles, w->format.drop_roles, sizeof spec.drop_roles);
    memcpy(spec.sets, w->t->made.sets, sizeof spec.sets);
    return merge_new(&spec, out, e);
}

/* ---- the files of the step ---- */

static struct publish_file *add_step(struct work *w, enum publish_kind kind,
                                     const char *path, unsigned stage, struct err *e)
{
    if (!VEC_ROOM(w->step, w->steps, w->steps_cap)) {
        err_nomem(e);
        return NULL;
    }
    path = keep(w, path);
    if (!path) {
        err_nomem(e);
        return NULL;
    }
    w->step[w->steps] = (struct publish_file){.kind = kind,
                                              .path = path,
                                              .stage = stage,
                                              .uid = w->uid,
                                              .gid = w->gid,
                                              .mode = w->mode};
    return &w->step[w->steps++];
}

static bool is_named(const struct work *w, const char *path)
{
    for (size_t i = 0; i < w->steps; i++)
        if (strcmp(w->step[i].path, path) == 0)
            return true;
    return false;
}

/* What of the checkpoint goes, or is out of sight during the step. */
struct leaving {
    struct work *w;
    int dir;
    bool rewritten;
    struct err *e;
};

/* Formats watch directories too; only files are put, moved and removed. */
static bool is_file(int dir, const char *path)
{
    struct stat st;

    return fstatat(dir, path, &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISDIR(st.st_mode);
}

static int see_stored(void *user, const struct catalog_file *f)
{
    const struct leaving *l = user;
    struct work *w = l->w;
    const char *dir = w->gen->path, *path;
    size_t len = strlen(dir);

    if (strncmp(f->path, dir, len) != 0 || (len && f->path[len] != '/') || !f->id.ino)
        return 0;
    path = f->path + len + (len > 0);
    if (is_named(w, path) || (!f->storage && !generation_hides_in(w->gen, path)) ||
        !is_file(l->dir, path))
        return 0;
    if (l->rewritten)
        return add_step(w, PUBLISH_REMOVE, path, !f->storage, l->e) ? 0 : -ENOMEM;
    return f->storage || add_step(w, PUBLISH_HOLD, path, 1, l->e) ? 0 : -ENOMEM;
}

static int add_leaving(struct work *w, bool rewritten, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    struct leaving l = {.w = w, .rewritten = rewritten, .e = e};
    int rc = w->gen ? disk_ref(w->fs, w->t->dir->ino, &dir, e) : 0;

    l.dir = dir.fd;
    return rc == 0 && w->gen
               ? catalog_files(w->fs->catalog, w->gen->info.id, see_stored, &l, e)
               : rc;
}

/* ---- other bytes for tensors that stay what they are ---- */

/* Each file that a patch has made in data/. */
static int add_patched(struct work *w, int dir, const char *path, struct err *e)
{
    int fd = openat(dir, path[0] ? path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    const char *name;
    int rc = 0, more = 0;

    if (!d)
        return err_set(e, errno, "%s: %s", path, strerror(errno));
    while (rc == 0 && (more = dir_next(d, &name)) > 0) {
        char below[PATH_MAX];
        struct stat st;

        if (store_join(path, name, below, sizeof below) < 0 ||
            fstatat(dir, below, &st, AT_SYMLINK_NOFOLLOW) < 0)
            rc = err_set(e, errno ? errno : ENAMETOOLONG, "%s/%s", path, name);
        else if (S_ISDIR(st.st_mode))
            rc = add_patched(w, dir, below, e);
        else
            rc = add_step(w, PUBLISH_PUT, below, 0, e) ? 0 : -ENOMEM;
    }
    closedir(d);
    return rc == 0 && more < 0 ? err_set(e, -more, "%s: %s", path, strerror(-more))
                               : rc;
}

/* 1: done; 0: it takes more than that; -ENOTSUP: not for these tensors. */
static int patch_tensors(struct work *w, struct merge *m, struct err *e)
{
    CLEANUP_FREE struct patch_change *change = NULL;
    CLEANUP(patch_freep) struct patch *patch = NULL;
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    struct patch_spec spec = {.env = &w->fs->reading.env,
                              .checkpoint = w->gen->info.id,
                              .source = merge_incoming(m)};
    int data = txn_data_dir(w->t->txn), rc;

    rc = merge_patch(m, &change, &spec.changes, e);
    if (rc < 0 || !change)
        return rc;
    TRY(disk_ref(w->fs, w->t->dir->ino, &dir, e));
    spec.change = change;
    spec.old = dir.fd;
    rc = patch_new(&spec, &patch, e);
    if (rc == 0)
        rc = patch_write(patch, data, e);
    if (rc == 0)
        rc = add_patched(w, data, "", e);
    if (rc == 0 && w->steps > 1)
        rc = add_leaving(w, false, e);
    return rc == 0 ? 1 : rc;
}

/* ---- a checkpoint that is written again ---- */

static int rewrite(struct work *w, struct merge *m, struct intake_output *out,
                   struct err *e)
{
    int rc;

    if (!w->format.writer) {
        err_set(e, EINVAL,
                "a %s checkpoint takes other bytes for its tensors, but none is added, "
                "removed or given another shape or dtype",
                w->gen->info.format);
        return err_hint(e, "save to a new directory");
    }
    if (!w->t->intake) {
        struct intake_spec spec = {.dir = txn_dir(w->t->txn),
                                   .pool = w->fs->reading.pool,
                                   .writer = w->format.writer,
                                   .options = w->format.options,
                                   .drop_objects = w->format.drop_objects,
                                   .env = &w->fs->reading.env,
                                   .checkpoint = w->gen ? w->gen->info.id : 0,
                                   .made_by = made_by(w)};

        memcpy(spec.drop_roles, w->format.drop_roles, sizeof spec.drop_roles);
        memcpy(spec.sets, w->t->made.sets, sizeof spec.sets);
        TRY(intake_open(&spec, &w->t->intake, e));
    }
    rc = intake_finish(w->t->intake, m, out, e);
    for (size_t i = 0; rc == 0 && i < out->count; i++)
        rc = add_step(w, PUBLISH_PUT, out->file[i].path, out->file[i].stage, e)
                 ? 0
                 : -ENOMEM;
    return rc == 0 ? add_leaving(w, true, e) : rc;
}

/* ---- the step ---- */

static int step(struct work *w, const struct intake_output *out, struct err *e)
{
    CLEANUP_FREE struct txn_file **done = calloc(w->nodes + 1, sizeof *done);
    struct publish_spec rest = {.uid = w->uid,
                                .gid = w->gid,
                                .directory = (const char *const *)out->directory,
                                .directories = out->directories};

    if (!done)
        return err_nomem(e);
    for (size_t i = 0; i < w->nodes; i++)
        done[i] = w->node[i]->file;
    return txn_publish(w->t->txn, w->step, w->steps, &rest, done, w->nodes, w->all, e);
}

/* The files are published, or hold nothing new: they leave the transaction. */
static void end_nodes(struct work *w)
{
    struct err ignored = {0};

    for (size_t i = 0; i < w->nodes; i++) {
        struct edit_node *n = w->node[i];

        if (n->in)
            intake_remove(steal(&n->in), &ignored);
        edits_lock(w->fs);
        disk_unpin(w->fs, steal(&n->follows));
        edit_node_unlink(w->fs, n);
        edits_unlock(w->fs);
    }
}

/* Nothing that arrived differs from what is there. */
static int drop_all(struct work *w, struct err *e)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < w->nodes; i++)
        rc = txn_drop(w->t->txn, w->node[i]->file, e);
    return rc;
}

static int build(struct work *w, struct err *e)
{
    CLEANUP(merge_freep) struct merge *m = NULL;
    struct intake_output out = {0};
    struct err why = {0};
    int rc = target_format(w->fs, w->t, w->gen, &w->format, e);

    if (rc == 0)
        rc = make_merge(w, &m, e);
    for (size_t i = 0; rc == 0 && i < w->files; i++)
        if (incoming_kind(w->file[i].path) == INCOMING_INDEX &&
            merge_check_keys(m, i, e) < 0) {
            e->code = EAGAIN; /* it waits for the tensor, or for another index */
            rc = -EAGAIN;
        }
    if (rc < 0)
        return rc;
    if (w->gen && !merge_changes(m))
        return drop_all(w, e);
    rc = w->gen ? patch_tensors(w, m, &why) : 0;
    if (rc == 0 || (rc == -ENOTSUP && w->format.writer)) {
        rc = rewrite(w, m, &out, e);
    } else if (rc < 0) {
        *e = why;
        e->code = rc == -ENOTSUP ? EINVAL : -rc;
    }
    rc = rc < 0 ? -e->code : 0;
    if (rc == 0)
        rc = w->steps ? step(w, &out, e) : drop_all(w, e);
    intake_output_release(&out);
    return rc;
}

/* What a publication that failed has made in data/ is of no use to the next. */
static void clear_data(struct work *w)
{
    struct err ignored = {0};

    txn_clear_data(w->t->txn, &ignored);
}

/* With `busy` held for writing. */
static int publish_ready(struct work *w, struct err *e)
{
    int rc;

    clear_data(w);
    rc = build(w, e);
    w->t->begun = rc == -EINPROGRESS;
    if (rc < 0)
        return err_wrap(e, "save %s", w->t->dir->name ? w->t->dir->name : "the root");
    target_note_made(w->fs, w->t, !w->gen, w->node, w->nodes);
    end_nodes(w);
    w->published = w->nodes;
    disk_changed(w->fs, w->t->dir);
    log_msg(LOG_FS, LOG_INFO, "published %zu file(s)", w->nodes);
    return 0;
}

static void work_release(struct work *w)
{
    for (size_t i = 0; i < w->nodes; i++)
        edit_node_put(w->fs, w->node[i], 1);
    free(w->node);
    free(w->file);
    free(w->removed);
    free(w->step);
    generation_unref(w->fs, w->gen, 1);
    arena_free(w->arena);
}

/* With the lock: a file that was closed, and of whose close the kernel has not told yet. */
static bool closes_late(const struct target *t)
{
    for (const struct edit_node *n = t->nodes; n; n = n->next)
        if (n->flushed > 0 || n->follows)
            return true;
    return false;
}

static void await_closed(struct fs *fs, struct target *t)
{
    int64_t until = now_ns() + LATE_NS;

    edits_lock(fs);
    while (closes_late(t) && now_ns() < until) {
        struct timespec wait;

        clock_gettime(CLOCK_MONOTONIC, &wait);
        wait.tv_nsec += 20000000;
        if (wait.tv_nsec >= 1000000000) {
            wait.tv_nsec -= 1000000000;
            wait.tv_sec++;
        }
        pthread_cond_timedwait(&fs->edits->wake, &fs->edits->lock, &wait);
    }
    edits_unlock(fs);
}

static bool has_number(const struct target *t, const struct edit_node *of,
                       unsigned number)
{
    unsigned is, count = incoming_set(of->path, &is, &(size_t){0});

    for (const struct edit_node *n = t->nodes; n; n = n->next)
        if (incoming_set(n->path, &is, &(size_t){0}) == count && is == number)
            return true;
    return false;
}

/* The files of a numbered set of which nothing has arrived. */
static void say_missing(const struct target *t, struct buf *out)
{
    const struct edit_node *n = t->nodes;
    unsigned number, count = 0;
    size_t stem = 0;

    while (n && !(count = incoming_set(n->path, &number, &stem)))
        n = n->next;
    for (unsigned i = 1; i <= count && out->len < out->max / 2; i++)
        if (!has_number(t, n, i))
            buf_addf(out, "%.*s%05u-of-%05u.safetensors is missing\n", (int)stem,
                     n->path, i, count);
}

/* A message is one line. */
static void join_lines(const struct buf *lines, struct buf *out)
{
    char *rest = NULL;

    for (char *l = lines->data ? strtok_r(lines->data, "\n", &rest) : NULL; l;
         l = strtok_r(NULL, "\n", &rest))
        buf_addf(out, "%s%s", out->len ? "; " : "", l);
}

/* -EAGAIN, with what is missing: something is still staged. */
static int say_incomplete(struct work *w, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {.max = 900};
    CLEANUP(buf_release) struct buf line = {.max = 900};
    struct target *t = w->t;

    if (!t->txn || txn_is_empty(t->txn))
        return 0;
    say_missing(t, &text);
    txn_describe(t->txn, &text);
    join_lines(&text, &line);
    return err_set(e, EAGAIN, "%s: not complete: %s",
                   t->dir->name ? t->dir->name : "the root",
                   line.data ? line.data : "see unshard doctor");
}

/* ---- an index that arrives when its set is published already ---- */

static int add_view_key(void *user, const struct tensor_info *t)
{
    struct keyset *keys = user;

    return MIN(keyset_add(keys, t->key, t->key_len), 0) < 0 ||
                   keyset_add(keys, t->key + t->wrapper, t->key_len - t->wrapper) < 0
               ? -ENOMEM
               : 0;
}

/* Are the keys that it lists those of the checkpoint? */
static int check_index(struct work *w, const struct edit_node *n, struct err *e)
{
    CLEANUP(keyset_release) struct keyset keys = {0};
    CLEANUP_FREE char *text = NULL;
    struct hf_index index;
    struct stat st;
    int rc = fstat(n->fd, &st) < 0 ? err_set(e, errno, "%s", strerror(errno)) : 0;

    text = rc == 0 ? malloc((size_t)st.st_size + 1) : NULL;
    if (rc == 0)
        rc = text ? read_exact(n->fd, text, (size_t)st.st_size, 0, e) : err_nomem(e);
    if (rc == 0)
        rc =
            catalog_tensors(w->fs->catalog, w->gen->info.id, 0, add_view_key, &keys, e);
    if (rc == 0)
        rc = hf_index_parse(text, (size_t)st.st_size, ".safetensors", &index, e);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < index.count && rc == 0; i++)
        if (!keyset_has(&keys, index.entry[i].key, strlen(index.entry[i].key)))
            rc = err_set(e, EINVAL, "it lists %s, which did not arrive",
                         index.entry[i].key);
    hf_index_release(&index);
    return rc;
}

static void end_late_index(struct work *w, struct edit_node *n)
{
    struct err e = {0}, ignored = {0};

    if (check_index(w, n, &e) < 0) {
        err_wrap(&e, "%s/%s", w->gen->path, n->path);
        last_error_report(&w->fs->last_error, &e);
    }
    txn_drop(w->t->txn, n->file, &ignored);
    edits_lock(w->fs);
    edit_node_unlink(w->fs, n);
    edits_unlock(w->fs);
}

static bool receives_set(const struct target *t)
{
    for (const struct edit_node *n = t->nodes; n; n = n->next)
        if (incoming_kind(n->path) == INCOMING_SAFETENSORS)
            return true;
    return false;
}

static void end_late_indexes(struct work *w)
{
    struct edit_node *n, *next;

    if (!w->gen || receives_set(w->t))
        return;
    for (n = w->t->nodes; n; n = next) {
        bool late;

        next = n->next;
        edits_lock(w->fs);
        late = incoming_kind(n->path) == INCOMING_INDEX && n->complete &&
               !is_open(w->fs->edits, n);
        edits_unlock(w->fs);
        if (late)
            end_late_index(w, n);
    }
}

/* An open that was announced long ago and never came has left an empty file. */
static void drop_fresh(struct work *w)
{
    int64_t before = now_ns() - LATE_NS;
    struct err ignored = {0};
    struct edit_node *n, *next;

    for (n = w->t->nodes; n; n = next) {
        next = n->next;
        if (n->is_dir || !n->fresh_ns || n->fresh_ns > before || n->handles > 0)
            continue;
        txn_drop(w->t->txn, n->file, &ignored);
        if (n->in)
            intake_remove(steal(&n->in), &ignored);
        edits_lock(w->fs);
        edit_node_unlink(w->fs, n);
        edits_unlock(w->fs);
    }
}

static int publish_locked(struct work *w, struct err *e)
{
    int rc = target_end_step(w->fs, w->t, e);

    if (rc < 0 || !w->t->txn)
        return rc;
    rc = disk_generation(w->fs, w->t->dir, true, &w->gen, e);
    if (rc == -ENOENT) {
        *e = (struct err){0};
        rc = 0;
    }
    if (rc < 0)
        return rc;
    judge_all(w);
    end_late_indexes(w);
    rc = list_ready(w, e);
    if (rc == 0 && (w->nodes > 0 || w->all))
        rc = publish_ready(w, e);
    if (rc == 0)
        rc = target_settle(w->fs, w->t, e);
    if (rc == 0 && w->bad.code) {
        *e = w->bad;
        e->code = EINVAL;
        return -EINVAL;
    }
    return rc == 0 ? say_incomplete(w, e) : rc;
}

static void note_tried(struct fs *fs, struct target *t, int rc)
{
    edits_lock(fs);
    t->complete_ns = t->last_ns = 0;
    t->failed = rc < 0 && rc != -EAGAIN;
    edits_unlock(fs);
}

/* *published: how many files. */
static int publish_once(struct fs *fs, struct target *t, bool all, size_t *published,
                        struct err *e)
{
    struct work w = {.fs = fs, .t = t, .all = all, .mode = 0666};
    int rc = 0;

    if (t->txn) {
        w.arena = arena_new(LIST_MEMORY);
        if (w.all && txn_each_removal(t->txn, add_removal, &w, e) == 0)
            w.all = w.removals > 0;
        w.removals = 0;
        if (!t->begun)
            drop_fresh(&w);
        rc = w.arena ? publish_locked(&w, e) : err_nomem(e);
    }
    *published = w.published;
    work_release(&w);
    return rc;
}

/* What was published may be what a raw/ file waited for. */
int edit_publish(struct fs *fs, struct target *t, bool all, struct err *e)
{
    size_t published;
    int rc;

    await_closed(fs, t);
    pthread_rwlock_wrlock(&t->busy);
    do {
        *e = (struct err){0};
        rc = publish_once(fs, t, all, &published, e);
    } while (rc == -EAGAIN && published > 0);
    pthread_rwlock_unlock(&t->busy);
    note_tried(fs, t, rc);
    if (rc < 0)
        last_error_report(&fs->last_error, e);
    return rc;
}

/* ---- when ---- */

/* Until it is noted the target stays held: a publication in between would judge it too. */
void edit_closed(struct fs *fs, struct edit_node *n)
{
    struct generation *gen = NULL;
    struct err e = {0};
    bool complete = false, held = target_enter(fs, n->target, false, &e) == 0;

    if (held && n->file && n->path) {
        disk_generation(fs, n->target->dir, true, &gen, &e);
        e = (struct err){0};
        complete = edit_judge(fs, n, gen, &e) == 1;
    }
    edits_lock(fs);
    n->target->closed_ns = now_ns();
    n->complete = complete && n->path;
    n->closing = false;
    if (n->complete) {
        n->target->failed = false;
        n->target->last_ns = now_ns();
        if (!n->target->complete_ns)
            n->target->complete_ns = n->target->last_ns;
    }
    pthread_cond_broadcast(&fs->edits->wake);
    edits_unlock(fs);
    if (held)
        target_leave(n->target);
    generation_unref(fs, gen, 1);
    if (e.code)
        last_error_report(&fs->last_error, &e);
}

bool edit_waits(struct fs *fs, struct target *t)
{
    bool waits = false;

    edits_lock(fs);
    for (const struct edit_node *n = t->nodes; n && !waits; n = n->next)
        waits = is_ready(fs->edits, t, n);
    waits &= !t->failed;
    edits_unlock(fs);
    return waits;
}

/*
 * With the lock. Of a tree that is copied into a new directory all files are published together,
 * so that a tensor that comes by two names is one: until a second after the last, and not while
 * another is being written.
 */
static bool is_due(const struct target *t, int64_t now)
{
    if (!t->complete_ns)
        return false;
    if (!t->maker)
        return now >= t->last_ns + GATHER_NS || now >= t->complete_ns + GATHER_MOST_NS;
    for (const struct edit_node *n = t->nodes; n; n = n->next)
        if (n->writers > 0)
            return false;
    return now >= t->last_ns + GATHER_NS;
}

/* With the lock: the target whose files have waited long enough, with a user; or NULL. */
static struct target *next_due(struct edits *x, int64_t now)
{
    for (struct target *t = x->targets; t; t = t->next) {
        if (!is_due(t, now))
            continue;
        t->users++;
        return t;
    }
    return NULL;
}

static void *publisher_thread(void *user)
{
    struct edits *x = user;
    struct timespec wait;

    edits_lock(x->fs);
    while (!x->stop) {
        struct target *t = next_due(x, now_ns());
        struct err e = {0};

        if (t) {
            edits_unlock(x->fs);
            edit_publish(x->fs, t, false, &e);
            target_put(x->fs, t);
            edits_lock(x->fs);
            continue;
        }
        clock_gettime(CLOCK_MONOTONIC, &wait);
        wait.tv_nsec += 200000000;
        if (wait.tv_nsec >= 1000000000) {
            wait.tv_nsec -= 1000000000;
            wait.tv_sec++;
        }
        pthread_cond_timedwait(&x->wake, &x->lock, &wait);
    }
    edits_unlock(x->fs);
    return NULL;
}

int edits_start(struct fs *fs, struct err *e)
{
    struct edits *x = fs->edits;
    int rc = pthread_create(&x->publisher, NULL, publisher_thread, x);

    x->running = rc == 0;
    return rc ? err_set(e, rc, "start a thread: %s", strerror(rc)) : 0;
}

void edits_stop(struct fs *fs)
{
    struct edits *x = fs->edits;

    if (!x || !x->running)
        return;
    edits_lock(fs);
    x->stop = true;
    pthread_cond_broadcast(&x->wake);
    edits_unlock(fs);
    pthread_join(x->publisher, NULL);
    x->running = false;
}

/* With the lock: the target with this number, or the first behind it, with a user. */
static struct target *nth_target(struct edits *x, size_t n)
{
    struct target *t = x->targets;

    while (t && n-- > 0)
        t = t->next;
    if (t)
        t->users++;
    return t;
}

/* The mount ends: opens that were announced need not come any more. */
static void end_fresh(struct fs *fs, struct target *t)
{
    edits_lock(fs);
    for (size_t i = 0; i < TURNED; i++)
        fs->edits->turned[i].comes = false;
    for (struct edit_node *n = t->nodes; n; n = n->next)
        n->fresh_ns = MIN(n->fresh_ns, 1);
    edits_unlock(fs);
}

int edit_publish_all(struct fs *fs, struct err *e)
{
    struct target *t;
    size_t n = 0;
    int first = 0;

    while (edits_lock(fs), t = nth_target(fs->edits, n++), edits_unlock(fs), t) {
        struct err here = {0};
        int rc;

        end_fresh(fs, t);
        rc = edit_publish(fs, t, false, &here);
        if (rc < 0 && first == 0) {
            *e = here;
            first = rc;
        }
        target_put(fs, t);
    }
    return first;
}

int edit_fsyncdir(struct request *r, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {.fs = r->fs};
    struct target *t;
    int rc = 0;

    if (!ino_is_inside(r->ino) && !ino_is_edit(r->ino))
        p.dir = disk_pin(r->fs, r->ino);
    else
        rc = edit_place(r, r->ino, "x", &p, e);
    if (rc == 0 && p.dir)
        rc = edit_take_up(r->fs, p.dir, e);
    if (rc < 0 || !p.dir)
        return rc;
    t = target_get(r->fs, p.dir, false);
    if (t) {
        rc = edit_publish(r->fs, t, true, e);
        edit_settle_maker(r->fs, t);
        if (rc == 0)
            target_end_made(r->fs, t);
    }
    target_put(r->fs, t);
    return rc;
}

int edit_before_read(struct request *r, struct err *e)
{
    enum inside kind = ino_kind(r->ino);
    struct generation *gen;
    struct disk_node *dir;
    struct target *t = NULL;
    int rc = 0;

    if (kind != INSIDE_MODEL && kind != INSIDE_OPTIMIZER_FILE &&
        kind != INSIDE_CHECKPOINT_JSON && kind != INSIDE_OBJECTS_JSON)
        return 0;
    gen = generation_of_ino(r->fs, r->ino);
    dir = gen ? disk_pin(r->fs, gen->dir_ino) : NULL;
    if (dir)
        edit_maker_read(r, dir);
    t = dir ? target_get(r->fs, dir, false) : NULL;
    if (t && edit_waits(r->fs, t))
        rc = r->may_block ? edit_publish(r->fs, t, false, e) : FS_LATER;
    target_put(r->fs, t);
    disk_unpin(r->fs, dir);
    generation_unref(r->fs, gen, 1);
    if (rc == 0 || rc == FS_LATER)
        return rc;
    *e = (struct err){0}; /* the old tensors are still there */
    return 0;
}

int edit_before_move(struct request *r, struct disk_node *dir, bool gone, struct err *e)
{
    struct target *t;
    bool staged;
    int rc = edit_take_up(r->fs, dir, e);

    if (rc < 0)
        return rc;
    t = target_get(r->fs, dir, false);
    if (!t)
        return 0;
    rc = edit_publish(r->fs, t, false, e);
    pthread_rwlock_rdlock(&t->busy);
    staged = t->txn && !txn_is_empty(t->txn);
    pthread_rwlock_unlock(&t->busy);
    target_put(r->fs, t);
    if (staged && gone)
        return err_set(e, ENOTEMPTY, "something is staged for this directory");
    if (rc < 0 && rc != -EAGAIN)
        return rc;
    *e = (struct err){0};
    return staged;
}

/* Renames the directory with what is staged for it. It answers the request. */
int edit_move_target(struct request *r, struct disk_node *moved, struct disk_node *to,
                     struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    struct publish_place at = {.name = r->as, .path = r->as};
    struct target *t = target_get(r->fs, moved, false);
    struct err ignored = {0};
    int rc = t ? disk_ref(r->fs, to->ino, &dir, e) : -ESTALE;

    if (rc == 0) {
        at.dir = openat(dir.fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        rc = at.dir < 0 ? err_set(e, errno, "%s: %s", r->as, strerror(errno)) : 0;
    }
    if (rc == 0) {
        pthread_rwlock_wrlock(&t->busy);
        rc = disk_rename(r, e);
        if (rc == 0 && t->txn && txn_moved(t->txn, &at, &ignored) < 0)
            last_error_report(&r->fs->last_error, &ignored);
        pthread_rwlock_unlock(&t->busy);
        close(at.dir);
    }
    target_put(r->fs, t);
    return rc;
}
