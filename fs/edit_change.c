/* SPDX-License-Identifier: MIT */
/* fs/edit_change.c - view names of a mount for writing that are made, opened for writing,
 * removed and renamed. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arena.h"
#include "fs/dir_page.h"
#include "fs/edit_meta.h"
#include "fs/edit_priv.h"
#include "fs/lookup.h"
#include "index/names.h"
#include "save/incoming.h"

enum { TENSOR_MEMORY = 16 << 20 };

/* ---- where saves are transactions ---- */

/* Does save= hold in this directory? */
static bool saves(struct fs *fs, struct disk_node *dir)
{
    struct target *t = target_get(fs, dir, false);
    bool set = fs->options.save != NULL;

    if (t) {
        edits_lock(fs);
        set |= t->save != NULL;
        edits_unlock(fs);
    }
    target_put(fs, t);
    return set;
}

/*
 * Is writing this name of the disk a transaction? Then the directory whose view name it is,
 * pinned, and the path there; an index of a set is one too. Else NULL.
 */
static struct disk_node *transaction_of(struct fs *fs, struct disk_node *dir,
                                        const char *name, char path[PATH_MAX])
{
    char own[NAME_MAX + 1];
    struct disk_node *up = disk_place(fs, dir, own), *of = dir;

    if (up && strcmp(own, "optimizer") == 0) {
        snprintf(path, PATH_MAX, "optimizer/%s", name);
        of = up;
    } else {
        snprintf(path, PATH_MAX, "%s", name);
    }
    of = (edit_is_received(path) || incoming_kind(path) == INCOMING_INDEX) &&
                 saves(fs, of)
             ? disk_pin(fs, of->ino)
             : NULL;
    disk_unpin(fs, up);
    return of;
}

/* The place of a name of the disk that is a transaction; EDIT_NONE: it is none. */
static int place_of_stored(struct request *r, struct disk_node *dir, const char *name,
                           struct edit_place *out, struct err *e)
{
    int rc;

    out->fs = r->fs;
    out->dir = transaction_of(r->fs, dir, name, out->path);
    if (!out->dir)
        return EDIT_NONE;
    rc = disk_generation(r->fs, out->dir, true, &out->gen, e);
    if (rc != -ENOENT)
        return rc;
    *e = (struct err){0};
    return 0;
}

/* ---- new files ---- */

static int create_at(struct request *r, const struct edit_place *p, struct err *e)
{
    struct edit_node *n;
    struct target *t;
    int rc = edit_begin_at(r, p, &t, &n, e);

    if (rc < 0)
        return rc;
    if (!n)
        rc = edit_file_new(r, t, p->path, r->mode, &n, e);
    else if (r->fi.flags & O_EXCL && !n->fresh_ns)
        rc = -EEXIST;
    else if (r->fi.flags & O_TRUNC)
        rc = edit_cut(n, 0, e);
    if (rc == 0)
        txn_unremove(t->txn, p->path, &(struct err){0});
    if (rc == 0)
        edit_wrote(r->fs, t, p->path);
    target_begun(t);
    if (rc == 0) {
        rc = edit_reply_created(r, n, e);
    } else {
        edit_node_put(r->fs, n, 1);
    }
    target_put(r->fs, t);
    return rc;
}

int edit_create_disk(struct request *r, struct disk_node *dir, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {.fs = r->fs};
    int rc;

    edit_came_back(r->fs, r);
    rc = place_of_stored(r, dir, r->name, &p, e);
    return rc == 0 ? create_at(r, &p, e) : rc;
}

/*
 * Without save= the first file in a made-up optimizer/ makes it a directory of the disk;
 * the program comes back by the path.
 */
static int store_optimizer(struct request *r, const struct edit_place *p, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    CLEANUP(as_server) struct acting acting = {0};
    int rc = disk_ref(r->fs, p->dir->ino, &dir, e);

    if (rc == 0)
        rc = as_caller(r, &acting, e);
    if (rc < 0)
        return rc;
    if (mkdirat(dir.fd, "optimizer", 0777) < 0 && errno != EEXIST)
        return err_set(e, errno, "optimizer: %s", strerror(errno));
    disk_changed(r->fs, dir.node);
    return -ESTALE;
}

static bool is_in_optimizer(const char *path)
{
    return strncmp(path, "optimizer/", 10) == 0;
}

int edit_create(struct request *r, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {0};

    TRY(edit_place(r, r->ino, r->name, &p, e));
    if (p.drops)
        return edit_meta_create(r, &p, e);
    if (is_in_optimizer(p.path) && !saves(r->fs, p.dir))
        return store_optimizer(r, &p, e);
    return create_at(r, &p, e);
}

/* ---- opening what is there for writing ---- */

/* Which file of a checkpoint a node is. */
static int path_of(struct fs *fs, const struct generation *gen, fuse_ino_t ino,
                   char dst[PATH_MAX], struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    enum inside kind = ino_kind(ino);
    struct tensor_info t;

    if (!a)
        return err_nomem(e);
    switch (kind) {
    case INSIDE_MODEL:
        return snprintf(dst, PATH_MAX, "%s",
                        gen->info.adapter ? "adapter_model.safetensors"
                                          : "model.safetensors") < 0;
    case INSIDE_OPTIMIZER_FILE:
        return snprintf(dst, PATH_MAX, "optimizer/optimizer.safetensors") < 0;
    case INSIDE_NPY:
    case INSIDE_BARE:
        TRY(catalog_tensor(fs->catalog, gen->info.id, ino_index(ino), a, &t, e));
        snprintf(dst, PATH_MAX, "%s/%s", kind == INSIDE_NPY ? "tensors" : "raw",
                 kind == INSIDE_NPY ? t.name_npy : t.name);
        return 0;
    case INSIDE_TENSORS:
    case INSIDE_TREE:
    case INSIDE_RAW:
    case INSIDE_OPTIMIZER:
    case INSIDE_META:
    case INSIDE_CHECKPOINT_JSON:
    case INSIDE_OBJECTS_JSON:
    case INSIDE_COUNTERS_JSON:
    case INSIDE_LAST_ERROR:
    case INSIDE_LATEST:
    case INSIDE_INDEX:
    case INSIDE_OVERLAY:
    default:
        return -EROFS;
    }
}

/* The made-up file gives way to one that the program creates. */
static int give_way(struct request *r, const struct edit_place *p, struct err *e)
{
    if (!(r->fi.flags & O_TRUNC)) {
        err_set(e, EROFS, "%s is made up from the checkpoint's shards", p->path);
        return err_hint(e, "mount with save=FORMAT to change it, or write a new file");
    }
    if (is_in_optimizer(p->path))
        return store_optimizer(r, p, e);
    edit_turn_away(r->fs, r, p->dir->ino, p->path, VERDICT_ABSENT);
    return -ESTALE;
}

static bool is_report(fuse_ino_t ino)
{
    return ino_kind(ino) >= INSIDE_CHECKPOINT_JSON &&
           ino_kind(ino) <= INSIDE_LAST_ERROR;
}

/*
 * A newer checkpoint was published since the name was looked up. The kernel comes back by the
 * path only once, and that is needed for the transaction: so the view is found here.
 */
static int newer_view(struct request *r, struct edit_place *p, fuse_ino_t *view,
                      struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    bool raw;
    struct generation *gen = NULL;
    struct tensor_info t;
    fuse_ino_t dir;
    int rc;

    if (!edit_noted_lookup(r, &dir, p->path) || dir != p->dir->ino || !a)
        return -ESTALE;
    raw = strncmp(p->path, "raw/", 4) == 0;
    if (!raw && strncmp(p->path, "tensors/", 8) != 0)
        return -ESTALE;
    *e = (struct err){0};
    rc = disk_generation(r->fs, p->dir, true, &gen, e);
    if (rc < 0)
        return -ESTALE;
    generation_unref(r->fs, p->gen, 1);
    p->gen = gen;
    rc = catalog_tensor_by_name(r->fs->catalog, gen->info.id, strchr(p->path, '/') + 1,
                                !raw, a, &t, e);
    if (rc == 0)
        *view = generation_ino(gen, raw ? INSIDE_BARE : INSIDE_NPY, t.ord);
    return rc < 0 ? -ESTALE : 0;
}

int edit_open_published(struct request *r, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {.fs = r->fs};
    fuse_ino_t dir, view;
    int rc;

    if (!edit_noted_lookup(r, &dir, p.path))
        return -ESTALE;
    p.dir = disk_pin(r->fs, dir);
    rc = p.dir ? newer_view(r, &p, &view, e) : -ESTALE;
    if (rc == 0)
        rc = edit_begin(r, &p, view, -1, e);
    return rc == 0 ? -ESTALE : rc;
}

int edit_open_view(struct request *r, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {.fs = r->fs};
    fuse_ino_t view = r->ino;
    int rc;

    p.gen = generation_of_ino(r->fs, r->ino);
    if (!p.gen)
        return -ESTALE;
    p.dir = disk_pin(r->fs, p.gen->dir_ino);
    if (!p.dir)
        return -ESTALE;
    if (is_report(r->ino)) /* cp -r of a mount: it keeps nothing */
        return edit_meta_drop(r, NULL, e);
    rc = generation_ready(r, p.gen, e);
    if (rc == 0)
        rc = path_of(r->fs, p.gen, r->ino, p.path, e);
    if (rc == -ESTALE)
        rc = newer_view(r, &p, &view, e);
    if (rc < 0)
        return rc;
    if (edit_is_received(p.path) && !saves(r->fs, p.dir))
        return give_way(r, &p, e);
    rc = edit_begin(r, &p, view, -1, e);
    if (rc == -ESTALE) { /* its shards changed on the disk just now */
        atomic_fetch_add(&p.gen->suspect, 1);
        disk_changed(r->fs, p.dir);
        rc = newer_view(r, &p, &view, e);
        if (rc == 0)
            rc = edit_begin(r, &p, view, -1, e);
    }
    return rc == 0 ? -ESTALE : rc;
}

/*
 * A view has the owner, mode and times of the files behind it: programs that set them on a
 * copy they made (shutil.copy, cp -p) are let through, and nothing changes.
 */
int edit_setattr_view(struct request *r, const struct stat *attr, int to_set,
                      struct err *e)
{
    if (!(to_set & FUSE_SET_ATTR_SIZE))
        return getattr_inside_run(r, e);
    r->fi.flags = O_WRONLY | (attr->st_size == 0 ? O_TRUNC : 0);
    return edit_open_view(r, e);
}

/* A stored file of a set is read as on the disk; written, it is a transaction. */
int edit_open_disk(struct request *r, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {.fs = r->fs};
    CLEANUP(disk_unref) struct disk_ref file = {0};
    CLEANUP_FD int fd = -1;
    char name[NAME_MAX + 1];
    struct disk_node *dir;
    int rc = disk_ref(r->fs, r->ino, &file, e);

    if (rc < 0)
        return rc;
    dir = disk_place(r->fs, file.node, name);
    rc = dir && S_ISREG(file.node->type) ? place_of_stored(r, dir, name, &p, e)
                                         : EDIT_NONE;
    disk_unpin(r->fs, dir);
    if (rc != 0)
        return rc;
    if (!(r->fi.flags & O_TRUNC)) {
        fd = open(disk_proc(file.fd).path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return err_set(e, errno, "%s: %s", name, strerror(errno));
    }
    rc = edit_begin(r, &p, 0, fd, e);
    return rc == 0 ? -ESTALE : rc;
}

/* ---- directories ---- */

static int make_dir(struct request *r, const struct edit_place *p, struct err *e)
{
    struct target *t = target_get(r->fs, p->dir, true);
    struct fuse_entry_param entry;
    struct edit_node *n;
    int rc = t ? 0 : err_nomem(e);

    if (rc < 0)
        return rc;
    edit_wrote(r->fs, t, p->path);
    edits_lock(r->fs);
    n = edit_node_find(t, p->path);
    rc = n ? -EEXIST : edit_node_new(r->fs, t, p->path, true, &n, e);
    if (rc == 0) {
        n->mode = r->mode & 0777;
        n->uid = fuse_req_ctx(r->req)->uid;
        n->gid = fuse_req_ctx(r->req)->gid;
    }
    edits_unlock(r->fs);
    target_put(r->fs, t);
    if (rc < 0) {
        edit_node_put(r->fs, n, 1);
        return rc;
    }
    edit_entry(r->fs, n, &entry);
    if (fuse_reply_entry(r->req, &entry) < 0)
        edit_forget(r->fs, entry.ino, 1);
    return 0;
}

/* `.unshard` is there anyway; who copies a tree makes it. */
static int make_meta(struct request *r, struct disk_node *dir, struct err *e)
{
    struct target *t = target_get(r->fs, dir, false);
    struct fuse_entry_param entry;
    int rc;

    if (t)
        edit_wrote(r->fs, t, r->name);
    target_put(r->fs, t);
    rc = edit_meta_lookup(r, dir, &entry, e);
    if (rc == 0 && fuse_reply_entry(r->req, &entry) < 0)
        disk_ops_forget(r->fs, entry.ino, 1);
    return rc;
}

bool edit_saves(struct fs *fs, struct disk_node *dir)
{
    return saves(fs, dir);
}

int edit_mkdir_disk(struct request *r, struct disk_node *dir, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {.fs = r->fs};
    const struct disk_view *view = disk_view_named(r->name);

    if (strcmp(r->name, ".unshard") == 0)
        return make_meta(r, dir, e);
    if (!view || !view->is_dir || !saves(r->fs, dir))
        return EDIT_NONE;
    p.dir = disk_pin(r->fs, dir->ino);
    snprintf(p.path, sizeof p.path, "%s", r->name);
    return make_dir(r, &p, e);
}

int edit_mkdir(struct request *r, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {0};

    TRY(edit_place(r, r->ino, r->name, &p, e));
    if (!p.drops && is_in_optimizer(p.path) && !saves(r->fs, p.dir))
        return store_optimizer(r, &p, e);
    if (p.drops || strncmp(p.path, "tree/", 5) != 0)
        return err_set(e, EROFS, "%s: only tree/ of a checkpoint has directories",
                       r->name);
    return make_dir(r, &p, e);
}

/* With the lock: does a file or directory of the transaction lie below this path? */
static bool has_below(const struct target *t, const char *path)
{
    size_t len = strlen(path);

    for (const struct edit_node *n = t->nodes; n; n = n->next)
        if (strncmp(n->path, path, len) == 0 && n->path[len] == '/')
            return true;
    return false;
}

/* Drops the removals: all of them are names of tensors/. */
struct removals {
    struct txn *txn;
    struct err *e;
};

static int take_back(void *user, const char *path)
{
    const struct removals *x = user;

    return txn_unremove(x->txn, path, x->e);
}

static int rmdir_at(struct request *r, struct disk_node *dir, const char *path,
                    struct err *e)
{
    struct target *t = target_get(r->fs, dir, false);
    struct edit_node *n = NULL;
    int rc = 0;

    if (t) {
        edits_lock(r->fs);
        rc = has_below(t, path) ? -ENOTEMPTY : 0;
        n = rc == 0 ? edit_node_find(t, path) : NULL;
        if (n)
            edit_node_unlink(r->fs, n);
        edits_unlock(r->fs);
        edit_node_put(r->fs, n, 1);
    }
    if (t && rc == 0 && target_enter(r->fs, t, false, &(struct err){0}) == 0) {
        struct removals x = {.txn = t->txn, .e = e};

        rc = txn_each_removal(t->txn, take_back, &x, e);
        target_leave(t);
    }
    target_put(r->fs, t);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

int edit_rmdir_disk(struct request *r, struct disk_node *dir, struct err *e)
{
    const struct disk_view *view = disk_view_named(r->name);
    struct disk_node *stored = disk_known(r->fs, dir, r->name);
    struct err ignored = {0};
    struct stat st;
    int rc = EDIT_NONE;

    if (strcmp(r->name, ".unshard") == 0)
        rc = 0;
    else if (!stored && view && view->is_dir &&
             disk_find(r->fs, dir, r->name, &stored, &st, &ignored) == -ENOENT)
        rc = rmdir_at(r, dir, r->name, e);
    else if (stored && S_ISDIR(stored->type))
        rc = edit_before_move(r, stored, true, e) < 0 ? -ENOTEMPTY : EDIT_NONE;
    disk_unpin(r->fs, stored);
    if (rc == 0 && strcmp(r->name, ".unshard") == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

int edit_rmdir(struct request *r, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {0};

    TRY(edit_place(r, r->ino, r->name, &p, e));
    if (p.drops)
        return -ENOTEMPTY;
    return rmdir_at(r, p.dir, p.path, e);
}

/* ---- names that go ---- */

/* The file leaves its transaction, unpublished. True: there was one. */
static int drop_file(struct request *r, struct target *t, const char *path,
                     bool *dropped, struct err *e)
{
    struct edit_node *n;
    bool alone = false;
    int rc;

    *dropped = false;
    pthread_rwlock_wrlock(&t->busy);
    edits_lock(r->fs);
    n = t->txn ? edit_node_find(t, path) : NULL;
    edits_unlock(r->fs);
    if (!n || n->is_dir) {
        pthread_rwlock_unlock(&t->busy);
        edit_node_put(r->fs, n, 1);
        return n ? -EISDIR : 0;
    }
    rc = txn_drop(t->txn, n->file, e);
    if (rc == 0 && n->in) {
        edits_lock(r->fs);
        alone = n->handles == 0;
        edits_unlock(r->fs);
        if (alone)
            rc = intake_remove(steal(&n->in), e);
    }
    edits_lock(r->fs);
    if (rc == 0)
        edit_node_unlink(r->fs, n);
    edits_unlock(r->fs);
    pthread_rwlock_unlock(&t->busy);
    edit_node_put(r->fs, n, 1);
    *dropped = rc == 0;
    return rc;
}

static int remove_tensor(struct request *r, const struct edit_place *p, struct err *e)
{
    struct target *t = target_get(r->fs, p->dir, true);
    char path[PATH_MAX];
    int rc = t ? edit_npy_path(r->fs, p, path, e) : err_nomem(e);

    if (rc == 0)
        rc = edit_may_write(r, p, e);

    if (rc == 0)
        rc = target_enter(r->fs, t, true, e);
    if (rc == 0) {
        rc = txn_remove(t->txn, path, e);
        target_leave(t);
    }
    target_put(r->fs, t);
    return rc;
}

/* What waits is published first: it was complete before the name went. */
static int unlink_at(struct request *r, struct edit_place *p, struct err *e)
{
    struct target *t = target_get(r->fs, p->dir, false);
    struct edit_node *n = NULL;
    bool dropped = false, complete = false;
    int rc = 0;

    if (t) {
        edits_lock(r->fs);
        n = edit_node_find(t, p->path);
        complete = n && n->complete && n->handles == 0 && p->gen;
        edits_unlock(r->fs);
        edit_node_put(r->fs, n, 1);
        if (complete)
            rc = edit_publish(r->fs, t, false, e);
        if (rc < 0 && rc != -EAGAIN) { /* it goes all the same */
            *e = (struct err){0};
            complete = false;
            rc = 0;
        }
        if (rc == 0 && !complete)
            rc = drop_file(r, t, p->path, &dropped, e);
        target_put(r->fs, t);
    }
    if (complete)
        return -ESTALE;
    if (rc == 0 && !dropped)
        rc = remove_tensor(r, p, e);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

int edit_unlink_disk(struct request *r, struct disk_node *dir, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {.fs = r->fs};
    struct target *t = target_get(r->fs, dir, false);
    bool dropped = false;
    int rc = EDIT_NONE;

    if (t && (edit_is_received(r->name) || incoming_kind(r->name) == INCOMING_INDEX))
        rc = drop_file(r, t, r->name, &dropped, e);
    target_put(r->fs, t);
    if (dropped)
        fuse_reply_err(r->req, 0);
    if (rc < 0 || dropped)
        return rc;
    return EDIT_NONE; /* a stored name; or a view, which the disk does not have */
}

int edit_unlink(struct request *r, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {0};

    TRY(edit_place(r, r->ino, r->name, &p, e));
    if (!p.drops)
        return unlink_at(r, &p, e);
    fuse_reply_err(r->req, 0); /* .unshard stores nothing */
    return 0;
}

/* ---- names that change ---- */

static bool is_disk(fuse_ino_t ino)
{
    return !ino_is_inside(ino) && !ino_is_edit(ino);
}

/* A file of the transaction gets another name of the same directory. */
static int rename_file(struct request *r, const struct edit_place *from,
                       const struct edit_place *to, struct err *e)
{
    struct target *t = target_get(r->fs, from->dir, false);
    struct edit_node *n = NULL, *over = NULL;
    char *path = strdup(to->path);
    int rc = 0;

    if (!t || from->dir != to->dir || !path) {
        target_put(r->fs, t);
        free(path);
        return path ? -EXDEV : err_nomem(e);
    }
    pthread_rwlock_wrlock(&t->busy);
    edits_lock(r->fs);
    n = edit_node_find(t, from->path);
    over = edit_node_find(t, to->path);
    edits_unlock(r->fs);
    if (!t->txn || !n || n->is_dir ||
        edit_is_received(from->path) != edit_is_received(to->path) || n->in)
        rc = -EXDEV; /* programs copy then */
    if (rc == 0 && over && over != n && (r->flags & RENAME_NOREPLACE))
        rc = -EEXIST;
    if (rc == 0)
        rc = txn_rename(t->txn, n->file, to->path, e);
    edits_lock(r->fs);
    if (rc == 0 && over && over != n)
        edit_node_unlink(r->fs, over);
    if (rc == 0) {
        free(n->path);
        n->path = steal(&path);
    }
    edits_unlock(r->fs);
    pthread_rwlock_unlock(&t->busy);
    edit_node_put(r->fs, over, 1);
    if (rc == 0)
        edit_closed(r->fs, n);
    edit_node_put(r->fs, n, 1);
    target_put(r->fs, t);
    free(path);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

/*
 * A file of the disk becomes one of the transaction: its bytes are copied, and its old name
 * goes. What an open file still writes follows when that is closed.
 */
static int move_stored(struct request *r, const struct edit_place *to, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    CLEANUP_FD int fd = -1;
    struct disk_node *stored;
    int rc = disk_ref(r->fs, r->ino, &dir, e);

    if (rc < 0)
        return rc;
    fd = openat(dir.fd, r->name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_set(e, errno, "%s: %s", r->name, strerror(errno));
    stored = disk_known(r->fs, dir.node, r->name);
    rc = edit_receive_copy(r, to, fd, stored, e);
    disk_unpin(r->fs, stored);
    return rc < 0 ? rc : disk_unlink(r, e);
}

static int rename_place(struct request *r, fuse_ino_t parent, const char *name,
                        struct edit_place *out, struct err *e)
{
    struct disk_node *dir;
    int rc;

    if (!is_disk(parent))
        return edit_place(r, parent, name, out, e);
    dir = disk_pin(r->fs, parent);
    rc = dir ? place_of_stored(r, dir, name, out, e) : -ESTALE;
    disk_unpin(r->fs, dir);
    return rc;
}

/* Is there a file of the transaction under this name? */
static bool has_file(struct fs *fs, const struct edit_place *p)
{
    struct target *t = p->dir ? target_get(fs, p->dir, false) : NULL;
    struct edit_node *n = NULL;

    if (t) {
        edits_lock(fs);
        n = edit_node_find(t, p->path);
        edits_unlock(fs);
    }
    edit_node_put(fs, n, 1);
    target_put(fs, t);
    return n != NULL;
}

/* Is the name a view, and not on the disk? */
static bool is_view(struct request *r, struct disk_node *dir)
{
    struct err ignored = {0};
    struct disk_node *n = NULL;
    struct stat st;
    int rc = disk_view_named(r->name) || strcmp(r->name, ".unshard") == 0
                 ? disk_find(r->fs, dir, r->name, &n, &st, &ignored)
                 : 0;

    disk_unpin(r->fs, n);
    return rc == -ENOENT;
}

/* A directory of the disk: what is staged for it goes along. */
static int rename_dir(struct request *r, struct err *e)
{
    struct disk_node *from = disk_pin(r->fs, r->ino), *to = disk_pin(r->fs, r->to);
    struct disk_node *moved = from ? disk_known(r->fs, from, r->name) : NULL;
    struct disk_node *over = to ? disk_known(r->fs, to, r->as) : NULL;
    int rc = from && to ? EDIT_NONE : -ESTALE;

    if (rc == EDIT_NONE && !moved && is_view(r, from))
        rc = -EXDEV; /* a view does not leave its directory: programs copy it */

    if (rc == EDIT_NONE && over && S_ISDIR(over->type) && over != moved &&
        edit_before_move(r, over, true, e) < 0)
        rc = -ENOTEMPTY;
    if (rc == EDIT_NONE && moved && S_ISDIR(moved->type)) {
        int moves = edit_before_move(r, moved, false, e);

        if (moves == 1)
            rc = edit_move_target(r, moved, to, e);
        else if (moves < 0)
            rc = moves;
    }
    disk_unpin(r->fs, over);
    disk_unpin(r->fs, moved);
    disk_unpin(r->fs, from);
    disk_unpin(r->fs, to);
    return rc;
}

int edit_rename(struct request *r, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place from = {.fs = r->fs};
    CLEANUP(edit_place_release) struct edit_place to = {.fs = r->fs};
    int rc_from = rename_place(r, r->ino, r->name, &from, e);
    int rc_to = rc_from < 0 ? rc_from : rename_place(r, r->to, r->as, &to, e);

    if (rc_to < 0)
        return rc_to;
    if (rc_from == EDIT_NONE && rc_to == EDIT_NONE)
        return rename_dir(r, e);
    if (r->flags & RENAME_EXCHANGE)
        return -EINVAL;
    if (rc_from == EDIT_NONE || (is_disk(r->ino) && !has_file(r->fs, &from)))
        return rc_to == 0 && !to.drops ? move_stored(r, &to, e) : EDIT_NONE;
    if (rc_to == EDIT_NONE || from.drops || to.drops || !has_file(r->fs, &from))
        return -EXDEV; /* a view does not leave its directory: programs copy it */
    return rename_file(r, &from, &to, e);
}

/* ---- listing ---- */

int edit_names_add(struct edit_names *l, const char *name, uint64_t ino, mode_t type,
                   struct err *e)
{
    struct edit_name *grown = reallocarray(l->name, l->count + 1, sizeof *grown);
    char *copy = strdup(name);

    if (grown)
        l->name = grown;
    if (!grown || !copy) {
        free(copy);
        return err_nomem(e);
    }
    l->name[l->count++] = (struct edit_name){.name = copy, .ino = ino, .type = type};
    return 0;
}

void edit_names_release(struct edit_names *l)
{
    for (size_t i = 0; i < l->count; i++)
        free(l->name[i].name);
    free(l->name);
    *l = (struct edit_names){0};
}

static int by_name(const void *a, const void *b)
{
    const struct edit_name *x = a, *y = b;

    return strcmp(x->name, y->name);
}

const struct edit_name *edit_names_find(const struct edit_names *l, const char *name)
{
    const struct edit_name key = {.name = (char *)(uintptr_t)name};

    return l->count ? bsearch(&key, l->name, l->count, sizeof key, by_name) : NULL;
}

/* The name of `path` in the directory `dir` of views, or NULL. */
static const char *name_in(const char *dir, const char *path)
{
    size_t len = strlen(dir);

    if (strncmp(path, dir, len) != 0 || path[len] != '/' || strchr(path + len + 1, '/'))
        return NULL;
    return path + len + 1;
}

struct listing {
    struct request *r;
    const struct edit_place *place;
    struct edit_names *out;
    struct err *e;
};

/* The name in tree/ of a tensor's last part. */
static int leaf_name(const struct tensor_info *t, struct buf *out)
{
    const char *part = "", *last = "";
    size_t pos = 0, len = 0, last_len = 0;

    while (key_part(t->key, t->key_len, &pos, &part, &len)) {
        last = part;
        last_len = len;
    }
    return name_of_part(last, last_len, true, out) < 0 || buf_addc(out, '\0') < 0
               ? -ENOMEM
               : 0;
}

/* A tensor that was removed is hidden in each directory that has a name of it. */
static int hide(void *user, const char *path)
{
    struct listing *l = user;
    struct fs *fs = l->r->fs;
    const struct generation *gen = l->place->gen;
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    CLEANUP(buf_release) struct buf leaf = {0};
    struct err ignored = {0};
    struct tensor_info t;
    struct tree_entry entry;

    if (!a)
        return err_nomem(l->e);
    if (!gen || catalog_tensor_by_name(fs->catalog, gen->info.id, strchr(path, '/') + 1,
                                       true, a, &t, &ignored) < 0)
        return 0;
    if (ino_kind(l->r->ino) == INSIDE_TENSORS)
        return edit_names_add(l->out, t.name_npy, 0, 0, l->e);
    if (ino_kind(l->r->ino) == INSIDE_RAW)
        return edit_names_add(l->out, t.name, 0, 0, l->e);
    if (ino_kind(l->r->ino) != INSIDE_TREE)
        return 0;
    if (leaf_name(&t, &leaf) < 0)
        return err_nomem(l->e);
    return catalog_tree_find(fs->catalog, gen->info.id, ino_index(l->r->ino), leaf.data,
                             &entry, &ignored) == 0 &&
                   !entry.dir && entry.tensor == t.ord
               ? edit_names_add(l->out, leaf.data, 0, 0, l->e)
               : 0;
}

static int list_target(struct request *r, struct target *t, const struct edit_place *p,
                       struct edit_names *out, struct err *e)
{
    struct listing l = {.r = r, .place = p, .out = out, .e = e};
    struct fs *fs = r->fs;
    int rc = 0;

    if (target_enter(fs, t, false, &(struct err){0}) == 0) {
        rc = txn_each_removal(t->txn, hide, &l, e);
        target_leave(t);
    }
    edits_lock(fs);
    for (const struct edit_node *n = t->nodes; n && rc == 0; n = n->next) {
        const char *name = name_in(p->path, n->path);

        if (name)
            rc = edit_names_add(out, name, n->ino & ~((fuse_ino_t)1 << 62),
                                n->is_dir ? S_IFDIR : S_IFREG, e);
    }
    edits_unlock(fs);
    return rc;
}

int edit_list(struct request *r, struct edit_names *out, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {0};
    struct target *t;
    int rc;

    if (edit_meta_is(r->ino))
        return edit_meta_list(r, out, e);
    rc = edit_place(r, r->ino, "x", &p, e);
    if (rc < 0 || p.drops)
        return rc;
    *strrchr(p.path, '/') = '\0';
    t = target_get(r->fs, p.dir, false);
    if (t)
        rc = list_target(r, t, &p, out, e);
    target_put(r->fs, t);
    if (out->count)
        qsort(out->name, out->count, sizeof *out->name, by_name);
    return rc;
}

int edit_opendir(struct request *r, struct err *e)
{
    struct edit_handle *h = calloc(1, sizeof *h);

    if (!h)
        return err_nomem(e);
    h->fd = -1;
    return edit_reply_handle(r, h, NULL);
}

int edit_readdir(struct request *r, struct err *e)
{
    struct opened *o = (struct opened *)(uintptr_t)r->fi.fh;
    struct edit_handle *h = container_of(o, struct edit_handle, opened);
    struct dir_page page;
    int rc = 0;

    if (r->off < 0)
        return -EINVAL;
    if (r->off == 0) {
        edit_names_release(&h->names);
        rc = edit_list(r, &h->names, e);
    }
    if (rc == 0)
        rc = dir_page_init(&page, r->size, r->off, false, e);
    if (rc < 0)
        return rc;
    for (size_t i = (size_t)r->off; i < h->names.count; i++) {
        const struct edit_name *x = &h->names.name[i];
        const struct fuse_entry_param entry = {
            .attr = {.st_ino = x->ino, .st_mode = x->type}};

        if (!dir_page_has_room(&page, x->name))
            break;
        if (x->type)
            dir_page_put(&page, x->name, &entry, (off_t)i + 1);
    }
    fuse_reply_buf(r->req, page.data, page.used);
    dir_page_free(&page);
    return 0;
}

/* ---- extended attributes ---- */

#define SAVE_NAME "user.unshard.save"
#define DTYPE_NAME "user.unshard.dtype"

static int set_save(struct request *r, const char *value, struct err *e)
{
    struct disk_node *dir = is_disk(r->ino) ? disk_pin(r->fs, r->ino) : NULL;
    struct save_format format;
    char *copy = strdup(value), *old = NULL;
    struct target *t = NULL;
    int rc =
        dir && S_ISDIR(dir->type) ? save_format_parse(value, &format, e) : -ENOTSUP;

    if (rc == 0 && !copy)
        rc = err_nomem(e);
    if (rc == 0) {
        t = target_get(r->fs, dir, true);
        rc = t ? 0 : err_nomem(e);
    }
    if (rc == 0) {
        edits_lock(r->fs);
        old = t->save;
        t->save = steal(&copy);
        edits_unlock(r->fs);
    }
    free(old);
    free(copy);
    target_put(r->fs, t);
    disk_unpin(r->fs, dir);
    return rc;
}

static int set_dtype(struct request *r, const char *value, struct err *e)
{
    struct edit_node *n = ino_is_edit(r->ino) && !edit_meta_is(r->ino)
                              ? edit_node_of(r->fs, r->ino)
                              : NULL;
    int rc = -ENOTSUP;

    if (n && !n->is_dir && dtype_from_name(value) == DTYPE_NONE)
        rc = err_set(e, EINVAL, "%s: not a dtype", value);
    else if (n && !n->is_dir && (rc = target_enter(r->fs, n->target, false, e)) == 0) {
        rc = txn_file_note(n->file, "dtype", value, e);
        target_leave(n->target);
    }
    edit_node_put(r->fs, n, 1);
    return rc;
}

int edit_setxattr(struct request *r, const char *value, size_t size, struct err *e)
{
    CLEANUP_FREE char *text = strndup(value, size);
    int rc = -ENOTSUP;

    if (!text)
        return err_nomem(e);
    if (strcmp(r->name, PUBLISH_ATTRIBUTE) == 0 && r->ino == FUSE_ROOT_ID) {
        rc = edit_publish_all(r->fs, e);
        if (rc == -EAGAIN) { /* which the kernel takes for "no attributes here" */
            e->code = EBUSY;
            rc = -EBUSY;
        }
    }
    if (strcmp(r->name, SAVE_NAME) == 0)
        rc = set_save(r, text, e);
    if (strcmp(r->name, DTYPE_NAME) == 0)
        rc = set_dtype(r, text, e);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

static int get_save(struct request *r, struct buf *out)
{
    struct disk_node *dir = disk_pin(r->fs, r->ino);
    struct target *t = dir ? target_get(r->fs, dir, false) : NULL;
    int rc = -ENODATA;

    if (t) {
        edits_lock(r->fs);
        if (t->save)
            rc = buf_adds(out, t->save);
        edits_unlock(r->fs);
    }
    target_put(r->fs, t);
    disk_unpin(r->fs, dir);
    return rc;
}

static int get_dtype(struct request *r, struct buf *out)
{
    struct edit_node *n = edit_node_of(r->fs, r->ino);
    int rc = -ENODATA;

    if (n && !n->is_dir &&
        target_enter(r->fs, n->target, false, &(struct err){0}) == 0) {
        CLEANUP_FREE char *text = txn_file_noted(n->file, "dtype");

        if (text)
            rc = buf_adds(out, text);
        target_leave(n->target);
    }
    edit_node_put(r->fs, n, 1);
    return rc;
}

int edit_getxattr(struct request *r, struct buf *out, struct err *e)
{
    (void)e;
    if (is_disk(r->ino) && strcmp(r->name, SAVE_NAME) == 0)
        return get_save(r, out);
    if (!ino_is_edit(r->ino))
        return EDIT_NONE;
    return !edit_meta_is(r->ino) && strcmp(r->name, DTYPE_NAME) == 0 ? get_dtype(r, out)
                                                                     : -ENODATA;
}
