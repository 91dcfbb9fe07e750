/* SPDX-License-Identifier: MIT */
/* fs/plain.c - the source's own files beside checkpoints, changed in place. */
#include "fs/plain.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/amend.h"
#include "fs/attr.h"
#include "fs/lookup.h"
#include "fs/node.h"
#include "fs/stage.h"
#include "fs/staged.h"
#include "fs/write.h"
#include "fs/written.h"
#include "index/formats/scan.h"
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

/* -EROFS: what was made is not shown as what it is. */
static int entry_of(struct request *r, struct node *dir, enum shown_kind kind,
                    struct fuse_entry_param *out, struct err *e)
{
    const struct shown_entry *entry;
    struct shown *shown;
    int rc;

    amend_name(r->fs, dir->path, r->name);
    rc = tree_shown(r->fs, dir, true, &shown, e);
    if (rc != 0)
        return rc;
    entry = shown_find(shown, r->name);
    rc = entry && entry->kind == kind ? entry_shown(r->fs, dir, shown, entry, out, e)
                                      : where_refused(e, r->name);
    shown_put(r->fs, shown);
    return rc;
}

/* The maker's, but for the group in a directory that gives its own (S_ISGID). */
static int set_maker(const struct request *r, int parent)
{
    const struct fuse_ctx *c = fuse_req_ctx(r->req);
    struct stat st;

    if (geteuid() != 0)
        return 0;
    if (fstat(parent, &st) < 0)
        return -1;
    return fchownat(parent, r->name, c->uid, st.st_mode & S_ISGID ? st.st_gid : c->gid,
                    AT_SYMLINK_NOFOLLOW);
}

/* What was made and cannot be shown. */
static void take_back(const struct request *r, const struct node *dir, int parent)
{
    unlinkat(parent, r->name, 0);
    amend_name(r->fs, dir->path, r->name);
}

/* It is written through this mount. */
static int note(struct fs *fs, int fd)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return -1;
    written_add(fs->written, &st);
    return 0;
}

/* A descriptor of it, and of its directory. */
static int create(const struct request *r, const struct node *dir, int *out_parent,
                  struct err *e)
{
    CLEANUP_FD int parent = open_dir(r->fs, dir, r->name, e);
    CLEANUP_FD int fd = -1;

    if (parent < 0)
        return parent;
    fd = openat(parent, r->name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
                r->mode & 07777);
    if (fd < 0)
        return fail(r->name, e);
    if (set_maker(r, parent) < 0 || fchmod(fd, r->mode & 07777) < 0 ||
        note(r->fs, fd) < 0) {
        fail(r->name, e);
        take_back(r, dir, parent);
        return -e->code;
    }
    *out_parent = steal_fd(&parent);
    return steal_fd(&fd);
}

int plain_create(struct request *r, struct node *dir, struct err *e)
{
    CLEANUP_FD int parent = -1;
    CLEANUP_FD int fd = -1;
    struct fuse_entry_param entry;
    int rc;

    stages_plain_begin(r->fs);
    fd = create(r, dir, &parent, e);
    stages_plain_end(r->fs);
    if (fd == -EEXIST && !(r->fi.flags & O_EXCL)) { /* since it was looked for: again */
        amend_name(r->fs, dir->path, r->name);
        *e = (struct err){0};
        return -ESTALE;
    }
    if (fd < 0)
        return fd;
    rc = entry_of(r, dir, SHOWN_FILE, &entry, e);
    if (rc < 0) {
        take_back(r, dir, parent);
        return rc;
    }
    return write_reply_plain(r, steal_fd(&fd), &entry);
}

/* Does the text of a link in this directory lead out of the source, as it is written? */
static bool leads_out(const char *dir, const char *text)
{
    size_t depth = dir[0] != '\0';

    for (const char *c = dir; *c; c++)
        depth += *c == '/';
    for (size_t len; *text; text += len + strspn(text + len, "/")) {
        bool up;

        len = strcspn(text, "/");
        up = len == 2 && memcmp(text, "..", 2) == 0;
        if (len == 0 || (up && depth == 0))
            return true; /* absolute, or too far up */
        depth += up ? -1 : !(len == 1 && text[0] == '.');
    }
    return false;
}

/* A descriptor of its directory. */
static int make_link(const struct request *r, const struct node *dir, struct err *e)
{
    CLEANUP_FD int parent = open_dir(r->fs, dir, r->name, e);

    if (parent < 0)
        return parent;
    if (symlinkat(r->as, parent, r->name) < 0)
        return fail(r->name, e);
    if (set_maker(r, parent) == 0)
        return steal_fd(&parent);
    fail(r->name, e);
    take_back(r, dir, parent);
    return -e->code;
}

int plain_symlink(struct request *r, struct node *dir, struct err *e)
{
    CLEANUP_FD int parent = -1;
    struct fuse_entry_param entry;
    int rc = leads_out(dir->path, r->as) ? -EROFS : 0;

    if (rc == 0) {
        stages_plain_begin(r->fs);
        parent = make_link(r, dir, e);
        stages_plain_end(r->fs);
        if (parent < 0)
            return parent;
        rc = entry_of(r, dir, SHOWN_LINK, &entry, e);
        if (rc < 0)
            take_back(r, dir, parent);
    }
    if (rc == -EROFS) {
        *e = (struct err){0};
        err_set(e, EPERM, "%s: a link leads to a directory of the source, not to %s",
                r->name, r->as);
        return err_hint(e, "name one that is published, by a relative path");
    }
    if (rc == 0 && fuse_reply_entry(r->req, &entry) < 0)
        entry_forget(r->fs, entry.ino, 1);
    return rc;
}

/* The server's own kernel leaves these bits to root, and it is root who asks there. */
int plain_written(const struct request *r, int fd)
{
    struct stat st;

    if (fuse_req_ctx(r->req)->uid == 0)
        return 0;
    if (fstat(fd, &st) < 0)
        return -1;
    return attr_written_mode(st.st_mode) == st.st_mode
               ? 0
               : fchmod(fd, attr_written_mode(st.st_mode) & 07777);
}

static int open_plain(const struct request *r, const struct node *n, struct err *e)
{
    int cut = r->fi.flags & O_TRUNC, fd = open_node(r->fs, n, O_RDWR | cut, e);

    if (fd >= 0 && (note(r->fs, fd) < 0 || (cut && plain_written(r, fd) < 0))) {
        fail(n->path, e);
        close(fd);
        return -e->code;
    }
    return fd;
}

int plain_open(struct request *r, const struct node *n, struct err *e)
{
    int fd;

    stages_plain_begin(r->fs);
    fd = open_plain(r, n, e);
    stages_plain_end(r->fs);
    return fd < 0 ? fd : write_reply_plain(r, fd, NULL);
}

/* Which file has the name now, that is to go? */
static void look_at(int parent, const char *name, struct stat *st)
{
    if (fstatat(parent, name, st, AT_SYMLINK_NOFOLLOW) < 0)
        *st = (struct stat){0};
}

/* That was its last name. */
static void forget(struct fs *fs, const struct stat *st)
{
    if (S_ISREG(st->st_mode) && st->st_nlink == 1)
        written_remove(fs->written, st);
}

static int remove_name(const struct request *r, const struct node *dir, int flags,
                       struct err *e)
{
    CLEANUP_FD int parent = open_dir(r->fs, dir, r->name, e);
    struct stat st;

    if (parent < 0)
        return parent;
    look_at(parent, r->name, &st);
    if (unlinkat(parent, r->name, flags) < 0)
        return fail(r->name, e);
    forget(r->fs, &st);
    return 0;
}

int plain_remove(struct request *r, const struct node *dir, int flags, struct err *e)
{
    int rc;

    stages_plain_begin(r->fs);
    rc = remove_name(r, dir, flags, e);
    stages_plain_end(r->fs);
    if (rc < 0)
        return rc;
    amend_name(r->fs, dir->path, r->name);
    fuse_reply_err(r->req, 0);
    return 0;
}

/* Another directory has the name: nobody goes on believing what was there before. */
static void suspect(struct fs *fs, const struct node *dir, const char *name,
                    const struct stat *now)
{
    char path[PATH_MAX];

    if (S_ISDIR(now->st_mode) && store_join(dir->path, name, path, sizeof path) == 0)
        scanner_suspect_all(fs->scanner, path);
}

static int rename_name(const struct request *r, const struct node *from,
                       const struct node *to, struct err *e)
{
    CLEANUP_FD int old = open_dir(r->fs, from, r->name, e);
    CLEANUP_FD int new = old < 0 ? -1 : open_dir(r->fs, to, r->as, e);
    struct stat was, st;

    if (old < 0 || new < 0)
        return e->code ? -e->code : -EACCES;
    look_at(old, r->name, &st);
    look_at(new, r->as, &was);
    if (renameat2(old, r->name, new, r->as, r->flags) < 0)
        return errno == EXDEV ? -EXDEV /* mv copies then */ : fail(r->name, e);
    if (!(r->flags & RENAME_EXCHANGE) && was.st_ino != st.st_ino)
        forget(r->fs, &was);
    suspect(r->fs, to, r->as, &st);
    if (r->flags & RENAME_EXCHANGE)
        suspect(r->fs, from, r->name, &was);
    amend_name(r->fs, from->path, r->name);
    amend_name(r->fs, to->path, r->as);
    return fsync(old) < 0 || fsync(new) < 0 ? fail(r->as, e) : 0;
}

int plain_rename(struct request *r, const struct node *from, const struct node *to,
                 struct err *e)
{
    int rc;

    stages_plain_begin(r->fs);
    rc = rename_name(r, from, to, e);
    stages_plain_end(r->fs);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
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

/* Of a link itself; its mode is no one's to set. */
static int set_link(struct request *r, const struct node *n, const struct stat *attr,
                    int to_set, struct err *e)
{
    uid_t uid = to_set & FUSE_SET_ATTR_UID ? attr->st_uid : (uid_t)-1;
    gid_t gid = to_set & FUSE_SET_ATTR_GID ? attr->st_gid : (gid_t)-1;
    const char *name;
    CLEANUP_FD int dir = stage_parent(r->fs, n->path, &name, e);
    struct timespec t[2];

    if (dir < 0)
        return dir;
    if (to_set & FUSE_SET_ATTR_MODE)
        return -EOPNOTSUPP;
    attr_times(attr, to_set, t);
    if (fchownat(dir, name, uid, gid, AT_SYMLINK_NOFOLLOW) < 0 ||
        utimensat(dir, name, t, AT_SYMLINK_NOFOLLOW) < 0)
        return fail(n->path, e);
    return 0;
}

/* *now: of a file that got another length. */
static int set_attributes(struct request *r, const struct node *n, int fd,
                          const struct stat *attr, int to_set, struct stat *now,
                          struct err *e)
{
    CLEANUP_FD int own = -1;

    if (n && n->kind == NODE_LINK)
        return set_link(r, n, attr, to_set, e);
    if (fd < 0) {
        own = open_node(r->fs, n, to_set & FUSE_SET_ATTR_SIZE ? O_RDWR : O_RDONLY, e);
        if (own == -ENOENT || own == -ESTALE) /* unlinked, and open */
            own = staged_plain_open(r->fs, n->ino);
        if (own < 0)
            return own;
        fd = own;
    }
    if (set_all(fd, attr, to_set) < 0 ||
        ((to_set & FUSE_SET_ATTR_SIZE) &&
         (plain_written(r, fd) < 0 || fstat(fd, now) < 0)))
        return fail(n ? n->path : "setattr", e);
    return 0;
}

int plain_setattr(struct request *r, const struct node *n, int fd,
                  const struct stat *attr, int to_set, struct err *e)
{
    struct stat now = {0};
    int rc;

    stages_plain_begin(r->fs);
    rc = set_attributes(r, n, fd, attr, to_set, &now, e);
    stages_plain_end(r->fs);
    if (rc == 0 && now.st_ino)
        paging_cut(r->fs, now.st_dev, now.st_ino, (uint64_t)now.st_size);
    return rc;
}

/* One that is gone by now has no names. */
int plain_fsyncdir(struct fs *fs, const struct node *dir, struct err *e)
{
    CLEANUP_FD int fd = fs->store->remote ? -1 : open_dir(fs, dir, "name", e);

    if (fd < 0)
        return fs->store->remote || fd == -ENOENT ? 0 : fd;
    return fsync(fd) < 0 ? fail(dir->path, e) : 0;
}
