/* SPDX-License-Identifier: MIT */
/* fs/remove.c - unlink(2) and rmdir(2): names are hidden now, publication removes. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/node.h"
#include "fs/over.h"
#include "fs/plain.h"
#include "fs/remove_whole.h"
#include "fs/save.h"
#include "fs/slot.h"
#include "fs/staged.h"
#include "fs/tree.h"
#include "fs/write.h"
#include "save/staging.h"

/* With the lock: a name that a checkpoint shows is gone from now on. */
static int hide(struct fs *fs, struct staged *dir, const char *key, struct err *e)
{
    struct staged *n;

    return staged_find(dir, key) ? 0 : staged_add(fs, dir, key, STAGED_GONE, 0, &n, e);
}

/* With the lock, which it lets go: a file that is no checkpoint's. */
static int unlink_plain(struct request *r, struct node *dir, struct err *e)
{
    struct stage *over = over_at(r->fs, dir->path);
    int rc = over ? over_unlink(r->fs, over, r->name, e) : STAGED_NONE;

    stages_unlock(r->fs);
    if (rc == STAGED_NONE)
        return plain_remove(r, dir, 0, e);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

int write_unlink(struct request *r, struct err *e)
{
    char scratch[STAGED_KEY_MAX];
    const char *key = staged_key(r->ino, r->name, scratch, sizeof scratch);
    struct where w = {.remove = true, .pid = fuse_req_ctx(r->req)->pid};
    struct staged *n;
    int rc = where_find(r->fs, r->ino, &w, e);

    if (rc < 0)
        return rc;
    if (!w.dir)
        return unlink_plain(r, w.node, e);
    n = staged_find(w.dir, key);
    if (n && n->kind == STAGED_DIR)
        rc = -EISDIR;
    else if (n && n->kind == STAGED_GONE)
        rc = -ENOENT;
    else if (n)
        staged_remove(r->fs, n);
    if (rc == 0 && w.dir->stage->slot)
        rc = hide(r->fs, w.dir, key, e);
    stages_unlock(r->fs);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

/* ---- directories ---- */

/* Something of a directory of tree/ that is not hidden. */
struct rest {
    const struct staged *dir; /* tree/, or NULL: nothing is hidden */
    fuse_ino_t ino;
    bool any;
};

static int see_entry(void *user, const struct tree_entry *t)
{
    struct rest *rest = user;
    char scratch[STAGED_KEY_MAX];

    rest->any |= !rest->dir ||
                 !staged_find(rest->dir,
                              staged_key(rest->ino, t->name, scratch, sizeof scratch));
    return rest->any;
}

/* With the lock: is all of this directory of a checkpoint hidden? */
static bool is_emptied(struct fs *fs, const struct stage *s, enum inside kind,
                       uint32_t index)
{
    const struct checkpoint_info *info = &s->slot->info;
    const struct staged *dir = staged_find(s->root, staged_fixed_name(kind));
    struct rest rest = {.dir = dir, .ino = slot_ino(s->slot, kind, index)};
    struct err e = {0};

    if (kind == INSIDE_META)
        return true; /* reports: nothing is lost with them */
    if (kind == INSIDE_TREE)
        return catalog_tree_list(fs->catalog, info->id, index, 0, see_entry, &rest,
                                 &e) >= 0 &&
               !rest.any;
    return (dir ? dir->count : 0) >= (kind == INSIDE_OPTIMIZER ? 1 : info->tensors);
}

static enum inside fixed_kind(const char *name)
{
    for (enum inside k = INSIDE_TENSORS; k <= INSIDE_LAST_DIR; k++)
        if (strcmp(staged_fixed_name(k), name) == 0)
            return k;
    return 0;
}

/* With the lock: a directory of programs in a checkpoint, where nothing is left in it. */
static int remove_other(struct request *r, struct staged *dir, struct err *e)
{
    char path[PATH_MAX];
    struct listing *found;
    size_t left;
    int rc;

    if (dir != dir->stage->root)
        return where_refused(e, r->name);
    if (store_join(dir->stage->path, r->name, path, sizeof path) < 0)
        return -ENAMETOOLONG;
    if (stage_at(r->fs, path)) /* a checkpoint that came just now */
        return -ENOTEMPTY;
    rc = r->fs->store->ops->list(r->fs->store, path, &found, e);
    if (rc < 0)
        return rc;
    left = listing_count(found);
    listing_free(found);
    return left ? -ENOTEMPTY : hide(r->fs, dir, r->name, e);
}

/* A view's directory, or one below tree/. */
static int remove_view(struct request *r, struct staged *dir, struct err *e)
{
    struct stage *s = dir->stage;
    char scratch[STAGED_KEY_MAX];
    struct tree_entry entry;
    struct staged *n;
    enum inside kind;
    int rc;

    if (ino_is_inside(r->ino)) { /* below tree/ */
        rc = catalog_tree_find(r->fs->catalog, s->slot->info.id, ino_index(r->ino),
                               r->name, &entry, e);
        if (rc < 0 || !entry.dir)
            return rc < 0 ? rc : -ENOTDIR;
        if (!is_emptied(r->fs, s, INSIDE_TREE, entry.dir))
            return -ENOTEMPTY;
        return hide(r->fs, dir, staged_key(r->ino, r->name, scratch, sizeof scratch),
                    e);
    }
    kind = fixed_kind(r->name);
    n = staged_find(dir, r->name);
    if (!kind)
        return remove_other(r, dir, e);
    if (n && n->kind != STAGED_DIR)
        return -ENOTDIR;
    if (!is_emptied(r->fs, s, kind, 0))
        return -ENOTEMPTY;
    rc = n ? 0 : staged_add(r->fs, dir, r->name, STAGED_DIR, 0777, &n, e);
    if (rc == 0 && !n->covers)
        staged_cover(r->fs, n, slot_ino(s->slot, kind, 0));
    if (rc == 0)
        n->removed = true;
    return rc;
}

static int remove_staged(struct fs *fs, struct staged *n)
{
    if (n->kind != STAGED_DIR)
        return -ENOTDIR;
    if (n->count > 0)
        return -ENOTEMPTY;
    if (n->parent)
        staged_remove(fs, n);
    else
        stage_end(fs, n->stage, false);
    return 0;
}

/*
 * A checkpoint in the directory of another one, which need not be written for it; the checkpoint
 * around it is looked at anew, as it may have come to have a part there. STAGED_NONE: it is none.
 */
static int remove_inner(struct request *r, struct err *e)
{
    bool other = ino_is_staged(r->ino) || ino_is_inside(r->ino);
    struct node *dir = other ? NULL : node_of_ino(r->fs, r->ino);
    struct shown *shown = NULL;
    char path[PATH_MAX];
    const struct stage *s;
    int rc;

    if (!dir || dir->kind != NODE_DIR ||
        store_join(dir->path, r->name, path, sizeof path) < 0)
        return STAGED_NONE;
    rc = where_shown(r->fs, dir, &shown, e);
    if (rc != 0)
        return rc;
    stages_lock(r->fs);
    s = shown->slot ? stage_settled(r->fs, path) : NULL;
    if (s && s->slot)
        rc = remove_whole(r->fs, dir, r->name, path, e);
    else
        rc = s && !s->over ? remove_staged(r->fs, s->root) : STAGED_NONE;
    stages_unlock(r->fs);
    shown_put(r->fs, shown);
    return rc;
}

int write_rmdir(struct request *r, struct err *e)
{
    struct where w = {.remove = true, .pid = fuse_req_ctx(r->req)->pid};
    struct stage *over;
    char path[PATH_MAX];
    struct staged *n;
    int rc = remove_inner(r, e);

    if (rc == 0)
        fuse_reply_err(r->req, 0);
    if (rc != STAGED_NONE)
        return rc;
    rc = where_find(r->fs, r->ino, &w, e);
    if (rc < 0)
        return rc;
    if (!w.dir && store_join(w.node->path, r->name, path, sizeof path) < 0) {
        stages_unlock(r->fs);
        return -ENAMETOOLONG;
    }
    over = w.dir ? NULL : over_at(r->fs, w.node->path);
    rc = over ? over_rmdir(r->fs, over, r->name) : STAGED_NONE;
    if (rc != STAGED_NONE) {
        stages_unlock(r->fs);
        if (rc == 0)
            fuse_reply_err(r->req, 0);
        return rc;
    }
    n = w.dir ? staged_find(w.dir, r->name) : where_new_root(r->fs, w.node, r->name);
    if (n && !n->covers && n->kind != STAGED_GONE)
        rc = remove_staged(r->fs, n);
    else if (!w.dir && stage_at(r->fs, path))
        rc = remove_whole(r->fs, w.node, r->name, path, e);
    else if (!w.dir) {
        stages_unlock(r->fs);
        return plain_remove(r, w.node, AT_REMOVEDIR, e);
    } else
        rc = w.dir->stage->slot ? remove_view(r, w.dir, e) : -ENOENT;
    stages_unlock(r->fs);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}
