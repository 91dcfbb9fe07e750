/* SPDX-License-Identifier: MIT */
/* fs/write_rename.c - names that change: rename(2). */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "fs/node.h"
#include "fs/over.h"
#include "fs/plain.h"
#include "fs/save.h"
#include "fs/slot.h"
#include "fs/staged.h"
#include "fs/tree.h"
#include "fs/write.h"

enum { TENSOR_MEMORY = 16 << 20 };

static bool source_has(struct fs *fs, struct node *dir, const char *name)
{
    struct shown *shown;
    struct err e = {0};
    bool has = false;

    if (tree_shown(fs, dir, true, &shown, &e) == 0) {
        has = shown_find(shown, name) != NULL;
        shown_put(fs, shown);
    }
    return has;
}

/* With the lock: may a new directory get this name there? 0, -EEXIST, -EXDEV. */
static int check_free(struct fs *fs, struct node *dir, const char *name, struct err *e)
{
    struct shown *shown;
    int rc = tree_shown(fs, dir, true, &shown, e);

    if (rc != 0)
        return rc;
    if (shown_find(shown, name))
        rc = -EEXIST;
    else if (!where_is_free(fs, shown, name))
        rc = -EXDEV; /* it is copied into what the checkpoint changes there */
    shown_put(fs, shown);
    return rc;
}

/* May n take the place of what has this name there? */
static int check_target(const struct staged *n, const struct staged *there,
                        unsigned flags)
{
    if (flags & ~(unsigned)RENAME_NOREPLACE)
        return -EINVAL;
    if (!there || there == n || there->kind == STAGED_GONE)
        return 0;
    if (flags & RENAME_NOREPLACE)
        return -EEXIST;
    if (there->kind == STAGED_DIR)
        return n->kind != STAGED_DIR ? -EISDIR : there->count > 0 ? -ENOTEMPTY : 0;
    return n->kind == STAGED_DIR ? -ENOTDIR : 0;
}

/* "step5.tmp" becomes "step5": that is what it is published as, now. */
static int rename_root(struct request *r, struct staged *n, const struct node *to,
                       struct err *e)
{
    struct stage *s = n->stage;
    char path[PATH_MAX], *copy, *old;
    int rc;

    if (store_join(to->path, r->as, path, sizeof path) < 0)
        return -ENAMETOOLONG;
    if (stage_at(r->fs, path))
        return -EEXIST;
    copy = strdup(path);
    if (!copy)
        return err_nomem(e);
    old = s->path;
    s->path = copy;
    stage_touch(s);
    rc = save_publish(r->fs, s, e);
    if (rc == -EBUSY && n->stage == s && !s->failed)
        rc = 0;                    /* when it is closed */
    if (rc < 0 && n->stage == s) { /* it stays what it was */
        s->path = old;
        old = copy;
    }
    free(old);
    return rc;
}

static struct node *plain_dir(struct fs *fs, fuse_ino_t ino)
{
    struct node *n =
        ino_is_staged(ino) || ino_is_inside(ino) ? NULL : node_of_ino(fs, ino);

    return n && n->kind == NODE_DIR ? n : NULL;
}

/*
 * A new checkpoint gets another name, or another place in the source. STAGED_NONE: r->name is
 * none.
 */
static int rename_new(struct request *r, struct err *e)
{
    const struct node *from = plain_dir(r->fs, r->ino);
    struct node *to = plain_dir(r->fs, r->to);
    struct staged *n;
    int rc = STAGED_NONE;

    if (!from || !to)
        return rc;
    stages_lock(r->fs);
    n = where_new_root(r->fs, from, r->name);
    if (n) {
        rc = check_free(r->fs, to, r->as, e);
        n = rc == 0 ? where_new_root(r->fs, from, r->name)
                    : NULL; /* it was waited for */
        rc = n ? rename_root(r, n, to, e) : rc == 0 ? -ESTALE : rc;
    }
    stages_unlock(r->fs);
    return rc;
}

static int rename_within(struct request *r, struct staged *n, struct staged *to,
                         struct err *e)
{
    int rc = check_target(n, staged_find(to, r->as), r->flags);

    if (n->stage != to->stage)
        return -EXDEV;
    for (const struct staged *d = to; d; d = d->parent)
        if (d == n)
            return -EINVAL;
    return rc < 0 ? rc : staged_rename(r->fs, n, to, r->as, e);
}

/*
 * Finds both directories; the lock is held once when it returns 0. One that is both is looked
 * for once: published between two looks it would not be the same.
 */
static int find_both(struct request *r, struct where *from, struct where *to,
                     struct err *e)
{
    int rc = where_find(r->fs, r->to, to, e);

    if (rc == 0 && r->to == r->ino)
        *from = *to;
    if (rc < 0 || r->to == r->ino)
        return rc;
    stages_unlock(r->fs); /* what the second look finds may end the first: look again */
    rc = where_find(r->fs, r->ino, from, e);
    if (rc < 0 || !to->dir)
        return rc;
    if (ino_is_staged(r->to)) {
        to->dir = staged_of_ino(r->fs, r->to);
    } else {
        struct slot *slot = NULL;

        if (!ino_is_inside(r->to)) {
            struct node *n = node_of_ino(r->fs, r->to);

            slot = n ? node_slot(r->fs, n) : NULL;
        } else {
            slot = slot_of_ino(r->fs, r->to);
        }
        to->dir = staged_dir_of(r->fs, r->to, slot);
        slot_unref(r->fs, slot, 1);
    }
    if (to->dir && to->dir->stage)
        return 0;
    stages_unlock(r->fs);
    return -ESTALE;
}

/*
 * With the lock: what is staged at this name and below it is published before it moves. Of
 * names that are hidden in this mount only there is nothing to publish: they show again.
 */
static int settle_first(struct fs *fs, const struct node *dir, const char *name,
                        struct err *e)
{
    char path[PATH_MAX];
    struct stage *s;

    if (store_join(dir->path, name, path, sizeof path) < 0)
        return -ENAMETOOLONG;
    while ((s = stage_below(fs, path))) {
        uint64_t number = s->number;

        if (!stage_wait(fs, s))
            continue;
        if (save_publish(fs, s, e) < 0)
            return -e->code;
        s = stage_below(fs, path);
        if (s && s->number == number)
            stage_end(fs, s, false);
    }
    return 0;
}

/* With the lock: has the directory of that name tensors that are not published? */
static bool is_over(struct fs *fs, const struct node *dir, const char *name)
{
    char path[PATH_MAX];

    return store_join(dir->path, name, path, sizeof path) == 0 && over_at(fs, path);
}

/* With the lock: a new directory of that name, which only the stage knows, is in the way. */
static int check_new(const struct request *r, const struct node *to)
{
    struct staged *there = where_new_root(r->fs, to, r->as);

    if (!there)
        return is_over(r->fs, to, r->as) ? -ENOTEMPTY : 0;
    if (r->flags & RENAME_NOREPLACE)
        return -EEXIST;
    if (there->count > 0)
        return -ENOTEMPTY;
    stage_end(r->fs, there->stage, false);
    return 0;
}

static int settle_both(const struct request *r, const struct node *from,
                       const struct node *to, struct err *e)
{
    int rc = settle_first(r->fs, from, r->name, e);

    return rc == 0 && (r->flags & RENAME_EXCHANGE) ? settle_first(r->fs, to, r->as, e)
                                                   : rc;
}

/* With the lock: does the checkpoint itself have the old name, which is staged over? */
static bool shows_below(struct request *r, const struct where *from,
                        const struct staged *n)
{
    CLEANUP(arena_freep) struct arena *a = NULL;
    const struct slot *slot = from->dir->stage->slot;
    enum inside kind = ino_is_inside(r->ino) ? ino_kind(r->ino) : 0;
    struct err ignored = {0};
    struct tensor_info t;

    if (!slot)
        return false;
    if (from->node)
        return source_has(r->fs, from->node, r->name);
    if (kind != INSIDE_TENSORS && kind != INSIDE_RAW)
        return n->covers != 0;
    a = arena_new(TENSOR_MEMORY);
    return a && catalog_tensor_by_name(r->fs->catalog, slot->info.id, r->name,
                                       kind == INSIDE_TENSORS, a, &t, &ignored) == 0;
}

/* What was below it must not come to light again under the old name. */
static int rename_away(struct request *r, const struct where *from, struct staged *n,
                       struct staged *to, struct err *e)
{
    bool below = shows_below(r, from, n);
    struct staged *dir = from->dir, *gone;
    int rc = rename_within(r, n, to, e);

    if (rc < 0 || !below || staged_find(dir, r->name))
        return rc;
    return staged_add(r->fs, dir, r->name, STAGED_GONE, 0, &gone, e);
}

int write_rename(struct request *r, struct err *e)
{
    struct where from = {0}, to = {0};
    struct staged *n;
    int rc = write_check_name(r->as, e);

    if (rc == 0)
        rc = rename_new(r, e);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    if (rc != STAGED_NONE)
        return rc;
    rc = find_both(r, &from, &to, e);
    if (rc < 0)
        return rc;
    n = from.dir ? staged_find(from.dir, r->name) : NULL;
    if (!n && !from.dir && !to.dir) {
        rc = over_rename(r, from.node, to.node, e);
        if (rc != STAGED_NONE) {
            stages_unlock(r->fs);
            if (rc == 0)
                fuse_reply_err(r->req, 0);
            return rc;
        }
        rc = settle_both(r, from.node, to.node, e);
        if (rc == 0)
            rc = check_new(r, to.node);
        stages_unlock(r->fs);
        return rc < 0 ? rc : plain_rename(r, from.node, to.node, e);
    }
    if (!n || n->kind == STAGED_GONE)
        rc = -EXDEV; /* what is published is copied, then removed */
    else
        rc = to.dir ? rename_away(r, &from, n, to.dir, e) : -EXDEV;
    stages_unlock(r->fs);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}
