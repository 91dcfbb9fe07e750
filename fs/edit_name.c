/* SPDX-License-Identifier: MIT */
/* fs/edit_name.c - view names of a mount for writing: looked up, made, removed, renamed. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arena.h"
#include "fs/attr.h"
#include "fs/edit_meta.h"
#include "fs/edit_priv.h"
#include "fs/lookup.h"
#include "fs/tree.h"
#include "save/incoming.h"

enum { TENSOR_MEMORY = 16 << 20 };

/* ---- which view name it is ---- */

static int too_long(const char *name, struct err *e)
{
    return err_set(e, ENAMETOOLONG, "%s: the path is longer than %d bytes", name,
                   PATH_MAX - 1);
}

static int join(char dst[PATH_MAX], const char *dir, const char *name, struct err *e)
{
    int len = snprintf(dst, PATH_MAX, "%s%s%s", dir, dir[0] ? "/" : "", name);

    return len < 0 || len >= PATH_MAX ? too_long(name, e) : 0;
}

void edit_place_release(struct edit_place *p)
{
    disk_unpin(p->fs, p->dir);
    generation_unref(p->fs, p->gen, 1);
}

/* The name of a directory of tree/ in the one above it. */
struct tree_name {
    uint32_t dir;
    char *name;
};

static int see_tree_entry(void *user, const struct tree_entry *t)
{
    struct tree_name *x = user;

    if (t->dir != x->dir)
        return 0;
    x->name = strdup(t->name);
    return 1;
}

/* "tree/a/b" of a directory of tree/. */
static int tree_path(struct fs *fs, const struct generation *gen, uint32_t dir,
                     char dst[PATH_MAX], struct err *e)
{
    char below[PATH_MAX] = "";

    while (dir) {
        struct tree_name x = {.dir = dir};
        CLEANUP_FREE char *name = NULL;
        char path[PATH_MAX];
        uint32_t up;
        int rc = catalog_tree_parent(fs->catalog, gen->info.id, dir, &up, e);

        if (rc == 0)
            rc = catalog_tree_list(fs->catalog, gen->info.id, up, 0, see_tree_entry, &x,
                                   e);
        name = x.name;
        if (rc < 0)
            return rc;
        if (!name)
            return err_nomem(e);
        TRY(join(path, name, below, e));
        if (!below[0])
            path[strlen(name)] = '\0';
        memcpy(below, path, sizeof below);
        dir = up;
    }
    return below[0] ? join(dst, "tree", below, e) : (memcpy(dst, "tree", 5), 0);
}

/* A tensor has one file of a transaction, whichever of its .npy names is used. */
static int npy_path(struct fs *fs, const struct generation *gen, uint32_t ord,
                    char dst[PATH_MAX], struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    struct tensor_info t;
    int rc =
        a ? catalog_tensor(fs->catalog, gen->info.id, ord, a, &t, e) : err_nomem(e);

    return rc == 0 ? join(dst, "tensors", t.name_npy, e) : rc;
}

int edit_npy_path(struct fs *fs, const struct edit_place *p, char dst[PATH_MAX],
                  struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    bool raw = strncmp(p->path, "raw/", 4) == 0;
    struct tensor_info t;
    int rc;

    if (!p->gen || (!raw && strncmp(p->path, "tensors/", 8) != 0))
        return -ENOENT;
    rc = a ? catalog_tensor_by_name(fs->catalog, p->gen->info.id,
                                    strchr(p->path, '/') + 1, !raw, a, &t, e)
           : err_nomem(e);
    return rc == 0 ? join(dst, "tensors", t.name_npy, e) : rc;
}

static int place_in_tree(struct request *r, const struct generation *gen, uint32_t dir,
                         const char *name, char dst[PATH_MAX], struct err *e)
{
    struct tree_entry entry;
    char path[PATH_MAX];
    int rc = catalog_tree_find(r->fs->catalog, gen->info.id, dir, name, &entry, e);

    if (rc == 0 && !entry.dir)
        return npy_path(r->fs, gen, entry.tensor, dst, e);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    *e = (struct err){0};
    rc = tree_path(r->fs, gen, dir, path, e);
    return rc == 0 ? join(dst, path, name, e) : rc;
}

static int place_inside(struct request *r, fuse_ino_t parent, const char *name,
                        struct edit_place *out, struct err *e)
{
    static const char *const dirs[] = {[INSIDE_TENSORS] = "tensors",
                                       [INSIDE_RAW] = "raw",
                                       [INSIDE_OPTIMIZER] = "optimizer",
                                       [INSIDE_META] = ".unshard"};
    enum inside kind = ino_kind(parent);

    out->gen = generation_of_ino(r->fs, parent);
    if (!out->gen)
        return -ESTALE;
    out->dir = disk_pin(r->fs, out->gen->dir_ino);
    if (!out->dir || !S_ISDIR(out->dir->type))
        return -ESTALE;
    if (!inside_is_dir(kind))
        return -ENOTDIR;
    out->drops = kind == INSIDE_META;
    if (kind == INSIDE_TREE)
        return place_in_tree(r, out->gen, ino_index(parent), name, out->path, e);
    return join(out->path, dirs[kind], name, e);
}

static int place_in_edit(struct request *r, fuse_ino_t parent, const char *name,
                         struct edit_place *out, struct err *e)
{
    struct edit_node *n = edit_node_of(r->fs, parent);
    char dir[PATH_MAX] = "";
    int rc = n && n->is_dir ? 0 : -ESTALE;

    edits_lock(r->fs);
    if (rc == 0 && n->path)
        snprintf(dir, sizeof dir, "%s", n->path);
    else if (rc == 0)
        rc = -ESTALE; /* it was removed, or published */
    edits_unlock(r->fs);
    if (rc == 0) {
        out->dir = disk_pin(r->fs, n->target->dir->ino);
        rc = join(out->path, dir, name, e);
    }
    edit_node_put(r->fs, n, 1);
    return rc;
}

int edit_place(struct request *r, fuse_ino_t parent, const char *name,
               struct edit_place *out, struct err *e)
{
    out->fs = r->fs;
    if (ino_is_inside(parent))
        return place_inside(r, parent, name, out, e);
    if (edit_meta_is(parent)) {
        out->drops = true;
        out->dir = edit_meta_dir(r->fs, parent);
        return out->dir ? join(out->path, ".unshard", name, e) : -ESTALE;
    }
    return place_in_edit(r, parent, name, out, e);
}

/* ---- what is staged is taken up where it is first looked for ---- */

int edit_take_up(struct fs *fs, struct disk_node *dir, struct err *e)
{
    struct target *t;
    bool first;
    int rc;

    disk_lock(fs);
    first = !dir->looked_for_staged;
    dir->looked_for_staged = true;
    disk_unlock(fs);
    if (!first)
        return 0;
    t = target_get(fs, dir, true);
    if (!t)
        return err_nomem(e);
    rc = target_enter(fs, t, false, e);
    if (rc == 0)
        target_leave(t);
    else if (rc == -ENOENT)
        *e = (struct err){0};
    else
        last_error_report(&fs->last_error, e); /* another mount's: the disk is shown */
    target_put(fs, t);
    return 0;
}

/* ---- lookup ---- */

/*
 * Readers see the file while a writer has it open, and once it is complete. Until then they
 * see what is there otherwise; only if that is nothing, the file that is incomplete.
 */
static bool is_visible(const struct edit_node *n)
{
    return n->is_dir || n->handles > 0 || n->closing || n->complete ||
           incoming_kind(n->path) == INCOMING_SIDE;
}

/* The node of a path that this request may see, with a reference. */
static struct edit_node *find_node(struct request *r, struct disk_node *dir,
                                   const char *path, bool any)
{
    struct target *t = target_get(r->fs, dir, false);
    struct edit_node *n = NULL;
    bool wanted;

    if (!t)
        return NULL;
    wanted = edit_verdict_is(r->fs, r, dir->ino, path, VERDICT_EDIT);
    edits_lock(r->fs);
    n = edit_node_find(t, path);
    if (n && !any && !is_visible(n) && !wanted) {
        n->refs--; /* its name has another */
        n = NULL;
    }
    edits_unlock(r->fs);
    target_put(r->fs, t);
    return n;
}

static struct edit_node *find_visible(struct request *r, struct disk_node *dir,
                                      const char *path)
{
    return find_node(r, dir, path, false);
}

int edit_lookup_disk(struct request *r, struct disk_node *dir,
                     struct fuse_entry_param *out, struct err *e)
{
    struct edit_node *n;

    if (strcmp(r->name, ".unshard") == 0)
        return edit_is_absent(r, dir, r->name) ? EDIT_ABSENT
                                               : edit_meta_lookup(r, dir, out, e);
    if (!edit_is_received(r->name) && incoming_kind(r->name) != INCOMING_INDEX)
        return disk_view_named(r->name) &&
                       edit_verdict_is(r->fs, r, dir->ino, r->name, VERDICT_ABSENT)
                   ? EDIT_ABSENT
                   : EDIT_NONE;
    if (edit_is_absent(r, dir, r->name))
        return EDIT_ABSENT;
    TRY(edit_take_up(r->fs, dir, e));
    n = find_visible(r, dir, r->name);
    if (n)
        return edit_entry(r->fs, n, out);
    return edit_verdict_is(r->fs, r, dir->ino, r->name, VERDICT_ABSENT) ? EDIT_ABSENT
                                                                        : EDIT_NONE;
}

/* What waits is published before a view of the whole checkpoint is looked at. */
static int publish_waiting(struct request *r, struct disk_node *dir, struct err *e)
{
    struct target *t = target_get(r->fs, dir, false);
    int rc = 0;

    if (t && edit_waits(r->fs, t))
        rc = r->may_block ? edit_publish(r->fs, t, false, e) : FS_LATER;
    target_put(r->fs, t);
    if (rc < 0) { /* the old tensors are still there */
        *e = (struct err){0};
        rc = 0;
    }
    return rc;
}

static int entry_view(struct request *r, struct generation *gen,
                      const struct disk_view *view, struct fuse_entry_param *out,
                      struct err *e)
{
    int rc = disk_has_view(r->fs, gen, view, e);

    if (rc <= 0)
        return rc < 0 ? rc : EDIT_ABSENT;
    rc = attr_inside(r->fs, gen, view->kind, 0, &out->attr, e);
    if (rc == 0)
        entry_inside(r->fs, gen, view->kind, 0, out);
    return rc;
}

int edit_lookup_view(struct request *r, struct disk_node *dir,
                     struct fuse_entry_param *out, struct err *e)
{
    const struct disk_view *view = disk_view_named(r->name);
    struct edit_node *n;
    struct generation *gen = NULL;
    int rc;

    if (!view && incoming_kind(r->name) != INCOMING_SAFETENSORS &&
        incoming_kind(r->name) != INCOMING_INDEX)
        return edit_latest_lookup(r, dir, out, e);
    if (!view) {
        n = find_node(r, dir, r->name, true);
        return n ? edit_entry(r->fs, n, out) : EDIT_ABSENT;
    }
    if (edit_is_absent(r, dir, r->name))
        return EDIT_ABSENT;
    rc = edit_take_up(r->fs, dir, e);
    if (rc == 0 && !edit_is_maker(r, dir)) /* which has more to come */
        rc = publish_waiting(r, dir, e);
    if (rc == 0)
        rc = disk_generation(r->fs, dir, r->may_block, &gen, e);
    if (rc == 0) {
        rc = entry_view(r, gen, view, out, e);
        generation_unref(r->fs, gen, 1);
    }
    if (rc != -ENOENT && rc != EDIT_ABSENT)
        return rc;
    *e = (struct err){0};
    n = find_node(r, dir, r->name, true);
    return n ? edit_entry(r->fs, n, out) : EDIT_ABSENT;
}

/* Does a change of this tensor wait under another of its names? */
static bool waits_elsewhere(struct fs *fs, struct target *t, const char *path)
{
    const char *name = strchr(path, '/');
    bool waits = false;

    if (!name)
        return false;
    edits_lock(fs);
    for (const struct edit_node *n = t->nodes; n && !waits; n = n->next) {
        const char *other = strchr(n->path, '/');
        size_t len = strlen(name);

        /* raw/NAME and tensors/NAME.npy are one tensor, where neither was cut. */
        waits = n->complete && n->handles == 0 && other && strcmp(n->path, path) != 0 &&
                (strncmp(name, other, MIN(len, strlen(other))) == 0);
    }
    edits_unlock(fs);
    return waits;
}

/* A tensor that was removed has none of its names any more. */
static bool is_hidden(struct fs *fs, struct target *t, const struct edit_place *p)
{
    char path[PATH_MAX];
    struct err ignored = {0};
    bool hidden;

    if (edit_npy_path(fs, p, path, &ignored) < 0 ||
        target_enter(fs, t, false, &ignored) < 0)
        return false;
    hidden = txn_is_removed(t->txn, path);
    target_leave(t);
    return hidden;
}

/* Has the checkpoint a view of this name, in the directory that is asked? */
static bool has_old(struct request *r, const struct edit_place *p)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    const char *name = strchr(p->path, '/') + 1;
    struct err ignored = {0};
    struct tensor_info t;

    if (!p->gen || !a)
        return p->gen;
    if (strncmp(p->path, "optimizer/", 10) == 0)
        return strcmp(name, "optimizer.safetensors") == 0;
    return catalog_tensor_by_name(r->fs->catalog, p->gen->info.id, name,
                                  strncmp(p->path, "raw/", 4) != 0, a, &t,
                                  &ignored) != -ENOENT;
}

/* The same name in the checkpoint that was published just now. */
static int lookup_published(struct request *r, const struct edit_place *p,
                            struct fuse_entry_param *out, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    enum inside dir = ino_kind(r->ino), kind;
    struct generation *gen = NULL;
    struct tensor_info t;
    int rc = a ? disk_generation(r->fs, p->dir, true, &gen, e) : err_nomem(e);

    if (rc < 0)
        return rc;
    kind = dir == INSIDE_RAW ? INSIDE_BARE : INSIDE_NPY;
    rc = dir == INSIDE_RAW || strncmp(p->path, "tensors/", 8) == 0
             ? catalog_tensor_by_name(r->fs->catalog, gen->info.id,
                                      strchr(p->path, '/') + 1, kind == INSIDE_NPY, a,
                                      &t, e)
             : -ESTALE;
    if (rc == 0)
        rc = attr_tensor(r->fs, kind, &t, &out->attr, e);
    if (rc == 0)
        entry_inside(r->fs, gen, kind, t.ord, out);
    generation_unref(r->fs, gen, 1);
    return rc;
}

int edit_lookup(struct request *r, struct fuse_entry_param *out, struct err *e)
{
    CLEANUP(edit_place_release) struct edit_place p = {0};
    struct target *t;
    struct edit_node *n;
    int rc = edit_place(r, r->ino, r->name, &p, e);

    if (rc < 0)
        return rc;
    if (edit_is_absent(r, p.dir, p.path))
        return EDIT_ABSENT;
    edit_note_lookup(r, p.dir->ino, p.path);
    if (p.drops)
        return edit_meta_lookup_in(r, &p, out, e);
    n = find_visible(r, p.dir, p.path);
    if (!n && !has_old(r, &p))
        n = find_node(r, p.dir, p.path, true);
    if (n)
        return edit_entry(r->fs, n, out);
    t = target_get(r->fs, p.dir, false);
    if (!t)
        return EDIT_NONE;
    rc = EDIT_NONE;
    if (is_hidden(r->fs, t, &p))
        rc = EDIT_ABSENT;
    else if (p.gen && waits_elsewhere(r->fs, t, p.path) && !edit_is_maker(r, p.dir))
        rc = r->may_block ? edit_publish(r->fs, t, false, e) : FS_LATER;
    target_put(r->fs, t);
    if (rc == 0 || rc == -EAGAIN) {
        *e = (struct err){0};
        rc = lookup_published(r, &p, out, e);
    }
    return rc;
}

/* ---- may it be written? ---- */

static int refused(const char *path, const char *why, const char *hint, struct err *e)
{
    err_set(e, EROFS, "%s: %s", path, why);
    return err_hint(e, "%s", hint);
}

static int check_generation(const struct fs *fs, const struct generation *gen,
                            const char *path, struct err *e)
{
    if (gen->info.error)
        return refused(path, "the checkpoint cannot be read", "see unshard verify", e);
    if (fs->reading.mapping || fs->options.prefix == PREFIX_DROP)
        return refused(
            path, "what map=, dtype=, weights= or prefix=drop show is not written back",
            "mount without these options, or save to a new directory", e);
    if (save_format_changes(gen->info.format))
        return 0;
    err_set(e, EROFS, "%s: tensors of a %s checkpoint cannot be changed", path,
            gen->info.format ? gen->info.format : "checkpoint of this kind");
    return err_hint(e, "unshard convert makes one that can be");
}

/* Paths of storage files, relative to the checkpoint, with a NUL behind each. */
struct stored {
    const char *dir;
    struct buf paths;
};

static int add_stored(void *user, const struct catalog_file *f)
{
    struct stored *s = user;
    size_t len = strlen(s->dir);

    if (!f->storage || strncmp(f->path, s->dir, len) != 0 ||
        (len && f->path[len] != '/'))
        return 0;
    return buf_add(&s->paths, f->path + len + (len > 0),
                   strlen(f->path + len + (len > 0)) + 1);
}

static int try_files(struct request *r, int dir, const struct buf *paths, struct err *e)
{
    CLEANUP(as_server) struct acting acting = {0};

    TRY(as_caller(r, &acting, e));
    if (faccessat(dir, ".", W_OK | X_OK, AT_EACCESS) < 0)
        return err_set(e, errno, "the checkpoint's directory: %s", strerror(errno));
    for (size_t at = 0; at < paths->len; at += strlen(paths->data + at) + 1)
        if (faccessat(dir, paths->data + at, W_OK, AT_EACCESS) < 0)
            return errno == ENOTDIR
                       ? refused(paths->data + at,
                                 "what lies in an archive is not changed",
                                 "unpack it, or save to a new directory", e)
                       : err_set(e, errno, "%s: %s", paths->data + at, strerror(errno));
    return 0;
}

static bool is_growing(struct fs *fs, struct disk_node *dir)
{
    struct target *t = target_get(fs, dir, false);
    bool growing;

    edits_lock(fs);
    growing = t && t->made.save;
    edits_unlock(fs);
    target_put(fs, t);
    return growing;
}

/* Formats that are only patched take no tensor more, but for what is made here. */
static int check_new(struct request *r, const struct edit_place *p, struct err *e)
{
    if (is_growing(r->fs, p->dir))
        return 0;
    if (!strchr(p->path, '/') || save_format_of(p->gen->info.format) || has_old(r, p))
        return 0;
    err_set(e, EROFS, "%s: a %s checkpoint takes no new tensors", p->path,
            p->gen->info.format);
    return err_hint(e, "unshard convert makes one that does");
}

int edit_may_write(struct request *r, const struct edit_place *p, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref ref = {0};
    struct stored stored = {.dir = p->gen ? p->gen->path : ""};
    int rc = p->gen ? check_generation(r->fs, p->gen, p->path, e) : 0;

    if (rc == 0 && p->gen)
        rc = check_new(r, p, e);
    if (rc == 0)
        rc = disk_ref(r->fs, p->dir->ino, &ref, e);
    if (rc == 0 && p->gen)
        rc = catalog_files(r->fs->catalog, p->gen->info.id, add_stored, &stored, e);
    if (rc == 0)
        rc = try_files(r, ref.fd, &stored.paths, e);
    buf_release(&stored.paths);
    return rc;
}
