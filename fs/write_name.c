/* SPDX-License-Identifier: MIT */
/* fs/write_name.c - names that come: mkdir(2), creat(2), link(2), symlink(2). */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "fs/lookup.h"
#include "fs/node.h"
#include "fs/over.h"
#include "fs/plain.h"
#include "fs/save.h"
#include "fs/slot.h"
#include "fs/stage_room.h"
#include "fs/staged.h"
#include "fs/write.h"
#include "save/staging.h"

enum { TENSOR_MEMORY = 16 << 20 };

static int reply_entry(const struct request *r, const struct fuse_entry_param *entry)
{
    if (fuse_reply_entry(r->req, entry) < 0)
        entry_forget(r->fs, entry->ino, 1);
    return 0;
}

/* Rights of a directory in which something is made. */
struct rights {
    mode_t mode;
    gid_t gid;
};

static struct rights rights_of(const struct staged *dir)
{
    const struct slot *slot = dir->parent ? NULL : dir->stage->slot;

    return slot ? (struct rights){slot->dir.mode, slot->dir.gid}
                : (struct rights){dir->mode, dir->gid};
}

/* Its maker's, but for the group in a directory that gives its own (S_ISGID). */
static void own(const struct request *r, const struct rights *dir, struct staged *n)
{
    const struct fuse_ctx *c = fuse_req_ctx(r->req);
    bool given = dir->mode & S_ISGID;

    n->uid = c->uid;
    n->gid = given ? dir->gid : c->gid;
    if (given && n->kind == STAGED_DIR)
        n->mode |= S_ISGID;
}

/* ---- making ---- */

/* A new directory of the source: a checkpoint in the making. With the lock. */
static int new_stage(struct request *r, struct node *dir, struct staged **out,
                     struct err *e)
{
    struct entry_stat in;
    struct stage *s;
    char path[PATH_MAX];
    int rc = store_join(dir->path, r->name, path, sizeof path) < 0 ? -ENAMETOOLONG : 0;

    if (rc == 0 && stage_at(r->fs, path))
        rc = -EEXIST;
    if (rc == 0)
        rc = r->fs->store->ops->stat(r->fs->store, dir->path, &in, e);
    if (rc == 0)
        rc = stage_new(r->fs, path, NULL, &s, e);
    if (rc == 0) {
        s->root->mode = r->mode & 07777;
        own(r, &(struct rights){in.mode, in.gid}, s->root);
        *out = s->root;
    }
    return rc;
}

/* With the lock: something of this name that was hidden makes room. */
static int make_room(struct fs *fs, struct staged *dir, const char *name)
{
    struct staged *n = staged_find(dir, name);

    if (n && n->kind != STAGED_GONE)
        return -EEXIST;
    if (n)
        staged_remove(fs, n);
    return 0;
}

/* With the lock. */
static int new_dir(struct request *r, struct staged *dir, struct staged **out,
                   struct err *e)
{
    const struct rights rights = rights_of(dir);
    int rc = make_room(r->fs, dir, r->name);

    if (rc == 0)
        rc = staged_add(r->fs, dir, r->name, STAGED_DIR, r->mode, out, e);
    if (rc == 0)
        own(r, &rights, *out);
    return rc;
}

/* A view's, in a directory of the source that has nothing yet. With the lock. */
static int new_dir_over(struct request *r, struct node *dir, struct staged **out,
                        struct err *e)
{
    struct stage *s;
    int rc = over_begin(r->fs, dir, &s, e);

    return rc == 0 ? new_dir(r, s->root, out, e) : rc;
}

int write_check_name(const char *name, struct err *e)
{
    if (!staging_is_named(name))
        return 0;
    err_set(e, EACCES, "%s: such names are kept for saves that are under way", name);
    return err_hint(e, "take another one");
}

int write_mkdir(struct request *r, struct err *e)
{
    struct fuse_entry_param entry;
    struct staged *n = NULL;
    struct where w = {.mkdir = r->name};
    int rc = write_check_name(r->name, e);

    if (rc == 0)
        rc = where_find(r->fs, r->ino, &w, e);
    if (rc < 0)
        return rc;
    if (w.dir)
        rc = new_dir(r, w.dir, &n, e);
    else if (over_takes_dir(r->fs, w.node, r->name))
        rc = new_dir_over(r, w.node, &n, e);
    else
        rc = new_stage(r, w.node, &n, e);
    if (rc == 0)
        staged_entry(n, &entry);
    stages_unlock(r->fs);
    return rc < 0 ? rc : reply_entry(r, &entry);
}
/* With the lock. */
int write_new_file(struct request *r, struct staged *dir, const char *name,
                   struct staged **out, struct err *e)
{
    const struct rights rights = rights_of(dir);
    int rc = make_room(r->fs, dir, name);

    if (rc == 0)
        rc = staged_add(r->fs, dir, name, STAGED_FILE, r->mode, out, e);
    if (rc == 0)
        own(r, &rights, *out);
    return rc;
}

/*
 * Formats of which no writer makes the same again take no new tensors: that is told when
 * the name is made, which is known here for tensors/.
 */
static int check_new_tensor(const struct request *r, const struct staged *dir,
                            struct err *e)
{
    const struct slot *slot = dir->stage->slot;
    const char *end = strrchr(r->name, '.');
    CLEANUP(arena_freep) struct arena *a = NULL;
    struct tensor_info t;
    int rc;

    if (!slot || dir->parent != dir->stage->root || strcmp(dir->name, "tensors") != 0 ||
        !end || strcmp(end, ".npy") != 0 || save_format_of(slot->info.format))
        return 0;
    a = arena_new(TENSOR_MEMORY);
    if (!a)
        return err_nomem(e);
    rc = catalog_tensor_by_name(r->fs->catalog, slot->info.id, r->name, true, a, &t, e);
    if (rc != -ENOENT)
        return rc;
    err_set(e, EROFS, "%s: checkpoints of format %s take no new tensors: tensors/%s",
            slot->path, slot->info.format, r->name);
    return err_hint(e, "save to a new directory");
}

static int new_file_in(struct request *r, struct staged *dir, struct staged **out,
                       struct err *e)
{
    int rc = check_new_tensor(r, dir, e);

    return rc == 0 ? write_new_file(r, dir, r->name, out, e) : rc;
}

/* In a directory of the source that is no checkpoint. */
static int new_file_over(struct request *r, struct node *dir, struct staged **out,
                         struct err *e)
{
    struct stage *s;
    int rc = over_begin(r->fs, dir, &s, e);

    if (rc == 0)
        rc = over_new_file(r, s, r->name, out, e);
    return rc;
}

int write_create(struct request *r, struct err *e)
{
    struct staged_handle *h = NULL;
    struct fuse_entry_param entry;
    struct staged *n;
    struct where w = {0};
    int rc = write_check_name(r->name, e);

    if (rc == 0)
        rc = where_find(r->fs, r->ino, &w, e);
    if (rc < 0)
        return rc;
    if (!w.dir && !over_takes(r->fs, w.node, r->name)) {
        stages_unlock(r->fs);
        return plain_create(r, w.node, e);
    }
    rc = w.dir ? new_file_in(r, w.dir, &n, e) : new_file_over(r, w.node, &n, e);
    if (rc == 0) {
        rc = staged_open_handle(r->fs, n, r->fi.flags | O_CREAT | O_TRUNC, &h, e);
        if (rc < 0)
            staged_remove(r->fs, n);
        else
            staged_entry(n, &entry);
    }
    stages_unlock(r->fs);
    return rc < 0 ? rc : write_reply_opened(r, h, &entry);
}

/* ---- links ---- */

/*
 * Savers write a step and link to it at once: what is staged under that name, beside the
 * link, is published first. An empty directory is none yet, and not to be linked to.
 */
static int publish_linked(struct request *r, const struct node *dir, struct err *e)
{
    const char *text = strncmp(r->as, "./", 2) == 0 ? r->as + 2 : r->as;
    size_t len = strcspn(text, "/");
    char name[NAME_MAX + 1], path[PATH_MAX];
    struct stage *s;
    int rc = 0;

    if (len == 0 || len > NAME_MAX || text[len + strspn(text + len, "/")])
        return 0;
    memcpy(name, text, len);
    name[len] = '\0';
    if (store_join(dir->path, name, path, sizeof path) < 0)
        return 0;
    stages_lock(r->fs);
    s = stage_at(r->fs, path);
    if (s && !s->slot && s->root->count > 0 && stage_wait(r->fs, s))
        rc = save_publish(r->fs, s, e);
    stages_unlock(r->fs);
    return rc;
}

/* `latest` beside a run's steps; in a checkpoint there is nothing to link. */
int write_symlink(struct request *r, struct err *e)
{
    struct where w = {0};
    int rc = where_find(r->fs, r->ino, &w, e);

    if (rc < 0)
        return rc;
    stages_unlock(r->fs);
    if (w.dir)
        return -EPERM;
    rc = publish_linked(r, w.node, e);
    return rc < 0 ? rc : plain_symlink(r, w.node, e);
}

/*
 * One file: whose it is, when it was closed, and what the disk did not take of it, are those
 * of both names. Of one that is open the last close has yet to come.
 */
static int link_to(const struct staged *from, struct staged *n, struct err *e)
{
    n->order = from->changing ? ++n->stage->closes : from->order;
    n->since = from->since;
    n->uid = from->uid;
    n->gid = from->gid;
    came_put(n->came);
    n->came = came_get(from->came);
    if (from->dtype && !(n->dtype = strdup(from->dtype)))
        return err_nomem(e);
    return staged_link(from, n, e);
}

/* cp -a makes one of two names of a tensor a link to the other. */
int write_link(struct request *r, struct err *e)
{
    struct fuse_entry_param entry;
    struct staged *from, *n;
    struct where w = {0};
    int rc = where_find(r->fs, r->to, &w, e);

    if (rc < 0)
        return rc;
    from = staged_of_ino(r->fs, r->ino);
    if (!w.dir || !from || from->kind != STAGED_FILE || from->stage != w.dir->stage)
        rc = -EPERM;
    if (rc == 0) {
        r->mode = from->mode;
        rc = write_new_file(r, w.dir, r->as, &n, e);
    }
    if (rc == 0) {
        rc = stage_room_take(r->fs, n, from->room, e);
        if (rc == 0)
            rc = link_to(from, n, e);
        if (rc < 0)
            staged_remove(r->fs, n);
        else
            staged_entry(n, &entry);
    }
    stages_unlock(r->fs);
    return rc < 0 ? rc : reply_entry(r, &entry);
}
