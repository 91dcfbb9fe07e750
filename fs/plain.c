/* SPDX-License-Identifier: MIT */
/* fs/plain.c - the source's own files beside checkpoints, changed in place. */
#include "fs/plain.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/attr.h"
#include "fs/lookup.h"
#include "fs/node.h"
#include "fs/stage.h"
#include "fs/staged.h"
#include "fs/write.h"
#include "save/incoming.h"
#include "save/staging.h"

static int fail(const char *name, struct err *e)
{
    return err_set(e, errno, "%s: %s", name, strerror(errno));
}

/* The directory that holds it, beneath the source's root. */
static int open_dir(struct fs *fs, const struct node *dir, const char *name,
                    struct err *e)
{
    char path[PATH_MAX];
    const char *last;

    if (store_join(dir->path, name, path, sizeof path) < 0)
        return -ENAMETOOLONG;
    return staging_is_named(name) ? -EACCES : stage_parent(fs, path, &last, e);
}

static int open_node(struct fs *fs, const struct node *n, int flags, struct err *e)
{
    const char *name;
    CLEANUP_FD int dir = stage_parent(fs, n->path, &name, e);
    CLEANUP_FD int fd = -1;
    struct stat st;

    if (dir < 0)
        return dir;
    fd = openat(dir, name, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st) < 0)
        return fail(n->path, e);
    if (n->inode && !node_stands_for(n, st.st_dev, st.st_ino))
        return -ESTALE;
    return steal_fd(&fd);
}

/* A shard that grows under its reader is no checkpoint: those come in whole. */
static int check_name(const struct node *dir, const char *name, struct err *e)
{
    enum incoming_kind kind = incoming_kind(name);

    if (kind != INCOMING_SAFETENSORS && kind != INCOMING_INDEX)
        return 0;
    err_set(e, EROFS, "%s%s%s: tensors are saved in a directory of their own",
            dir->path, dir->path[0] ? "/" : "", name);
    return err_hint(e, "make one, and write there: mkdir DIR");
}

static int entry_of(struct request *r, struct node *dir, struct fuse_entry_param *out,
                    struct err *e)
{
    const struct shown_entry *entry;
    struct shown *shown;
    int rc;

    nodes_look_again(r->fs, dir->path);
    rc = tree_shown(r->fs, dir, true, &shown, e);
    if (rc != 0)
        return rc;
    entry = shown_find(shown, r->name);
    rc = entry && entry->kind == SHOWN_FILE
             ? entry_shown(r->fs, dir, shown, entry, out, e)
             : where_refused(e, r->name);
    shown_put(r->fs, shown);
    return rc;
}

int plain_create(struct request *r, struct node *dir, struct err *e)
{
    const struct fuse_ctx *c = fuse_req_ctx(r->req);
    CLEANUP_FD int parent = -1;
    CLEANUP_FD int fd = -1;
    struct fuse_entry_param entry;
    int rc = check_name(dir, r->name, e);

    if (rc < 0)
        return rc;
    parent = open_dir(r->fs, dir, r->name, e);
    if (parent < 0)
        return parent;
    fd = openat(parent, r->name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
                r->mode & 07777);
    if (fd < 0 || fchmod(fd, r->mode & 07777) < 0 ||
        (geteuid() == 0 && fchown(fd, c->uid, c->gid) < 0))
        return fail(r->name, e);
    rc = entry_of(r, dir, &entry, e);
    if (rc < 0) {
        unlinkat(parent, r->name, 0);
        return rc;
    }
    return write_reply_plain(r, steal_fd(&fd), &entry);
}

int plain_open(struct request *r, const struct node *n, struct err *e)
{
    int fd = open_node(r->fs, n, O_RDWR | (r->fi.flags & O_TRUNC), e);

    return fd < 0 ? fd : write_reply_plain(r, fd, NULL);
}

int plain_remove(struct request *r, const struct node *dir, int flags, struct err *e)
{
    CLEANUP_FD int parent = open_dir(r->fs, dir, r->name, e);

    if (parent < 0)
        return parent;
    if (unlinkat(parent, r->name, flags) < 0)
        return fail(r->name, e);
    nodes_look_again(r->fs, dir->path);
    fuse_reply_err(r->req, 0);
    return 0;
}

int plain_rename(struct request *r, const struct node *from, const struct node *to,
                 struct err *e)
{
    CLEANUP_FD int old = open_dir(r->fs, from, r->name, e);
    CLEANUP_FD int new = old < 0 ? -1 : open_dir(r->fs, to, r->as, e);

    if (old < 0 || new < 0)
        return e->code ? -e->code : -EACCES;
    if (check_name(to, r->as, e) < 0)
        return -e->code;
    if (renameat2(old, r->name, new, r->as, r->flags) < 0)
        return fail(r->name, e);
    if (fsync(old) < 0 || fsync(new) < 0)
        return fail(r->as, e);
    nodes_look_again(r->fs, from->path);
    nodes_look_again(r->fs, to->path);
    fuse_reply_err(r->req, 0);
    return 0;
}

static int set_owner(int fd, const struct stat *attr, int to_set)
{
    uid_t uid = to_set & FUSE_SET_ATTR_UID ? attr->st_uid : (uid_t)-1;
    gid_t gid = to_set & FUSE_SET_ATTR_GID ? attr->st_gid : (gid_t)-1;

    return to_set & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID) ? fchown(fd, uid, gid) : 0;
}

static int set_all(int fd, const struct stat *attr, int to_set)
{
    struct timespec t[2];

    attr_times(attr, to_set, t);
    if ((to_set & FUSE_SET_ATTR_SIZE) && ftruncate(fd, attr->st_size) < 0)
        return -1;
    if ((to_set & FUSE_SET_ATTR_MODE) && fchmod(fd, attr->st_mode & 07777) < 0)
        return -1;
    return set_owner(fd, attr, to_set) < 0 ? -1 : futimens(fd, t);
}

int plain_setattr(struct request *r, const struct node *n, int fd,
                  const struct stat *attr, int to_set, struct err *e)
{
    CLEANUP_FD int own = -1;

    if (fd < 0) {
        own = open_node(r->fs, n, to_set & FUSE_SET_ATTR_SIZE ? O_RDWR : O_RDONLY, e);
        if (own < 0)
            return own;
        fd = own;
    }
    return set_all(fd, attr, to_set) < 0 ? fail(n ? n->path : "setattr", e) : 0;
}
