/* SPDX-License-Identifier: MIT */
/* fs/disk_name.c - names of the source that come, go and change in a mount for writing. */
#include "fs/disk_ops.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/edit.h"
#include "save/publish.h"

static int fail(const char *name, struct err *e)
{
    return err_set(e, errno, "%s: %s", name, strerror(errno));
}

void disk_entry(const struct fs *fs, const struct disk_node *n, const struct stat *st,
                struct fuse_entry_param *out)
{
    *out = (struct fuse_entry_param){
        .ino = n->ino, .generation = n->generation, .attr = *st};
    out->attr.st_ino = disk_number(fs, st->st_dev, st->st_ino);
}

int disk_reply(struct request *r, struct disk_node *dir, const char *name,
               struct err *e)
{
    struct fuse_entry_param entry;
    struct disk_node *n;
    struct stat st;

    TRY(disk_find(r->fs, dir, name, &n, &st, e));
    disk_entry(r->fs, n, &st, &entry);
    if (fuse_reply_entry(r->req, &entry) < 0)
        disk_forget(r->fs, entry.ino, 1);
    return 0;
}

int disk_readlink(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref ref = {0};
    int rc = disk_ref(r->fs, r->ino, &ref, e);
    char text[PATH_MAX];
    ssize_t n;

    if (rc < 0)
        return rc;
    n = readlinkat(ref.fd, "", text, sizeof text - 1);
    if (n < 0)
        return fail("readlink", e);
    text[n] = '\0';
    fuse_reply_readlink(r->req, text);
    return 0;
}

/* ---- new names ---- */

/* Makes it in the directory; 0 or -1 with errno. */
typedef int make_fn(const struct request *r, int dir);

static int make_dir(const struct request *r, int dir)
{
    return mkdirat(dir, r->name, r->mode & 07777);
}

static int make_file(const struct request *r, int dir)
{
    return mknodat(dir, r->name, S_IFREG | (r->mode & 07777), 0);
}

static int make_symlink(const struct request *r, int dir)
{
    return symlinkat(r->as, dir, r->name);
}

static int make_as_caller(struct request *r, const struct disk_ref *dir, make_fn *make,
                          struct err *e)
{
    CLEANUP(as_server) struct acting acting = {0};

    TRY(as_caller(r, &acting, e));
    return make(r, dir->fd) < 0 ? fail(r->name, e) : 0;
}

static int make(struct request *r, make_fn *fn, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    int rc = disk_ref(r->fs, r->ino, &dir, e);

    if (rc == 0)
        rc = make_as_caller(r, &dir, fn, e);
    if (rc < 0)
        return rc;
    disk_changed(r->fs, dir.node);
    return disk_reply(r, dir.node, r->name, e);
}

int disk_mkdir(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    struct disk_node *made;
    int rc = disk_ref(r->fs, r->ino, &dir, e);

    if (rc == 0)
        rc = make_as_caller(r, &dir, make_dir, e);
    if (rc < 0)
        return rc;
    disk_changed(r->fs, dir.node);
    if (edit_saves(r->fs, dir.node)) {
        struct stat st;

        TRY(disk_find(r->fs, dir.node, r->name, &made, &st, e));
        edit_made(r, made);
        disk_unpin(r->fs, made);
    }
    return disk_reply(r, dir.node, r->name, e);
}

int disk_mknod(struct request *r, struct err *e)
{
    if (!S_ISREG(r->mode) && (r->mode & S_IFMT) != 0)
        return err_set(e, ENOTSUP, "%s: fifos, sockets and devices are not made here",
                       r->name);
    return make(r, make_file, e);
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

int disk_symlink(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    char path[PATH_MAX];
    int rc = disk_ref(r->fs, r->ino, &dir, e);

    if (rc == 0)
        rc = disk_path(r->fs, dir.node, path, e);
    if (rc < 0)
        return rc;
    if (leads_out(path, r->as)) {
        err_set(e, EPERM, "%s: a link to %s would lead out of the source", r->name,
                r->as);
        return err_hint(e, "use a relative path that stays inside");
    }
    return make(r, make_symlink, e);
}

/* A link has no descriptor that linkat(2) takes from others than root: by its name. */
static int link_it(struct request *r, const struct disk_ref *from,
                   const struct disk_ref *dir, struct err *e)
{
    CLEANUP(as_server) struct acting acting = {0};
    CLEANUP(disk_unref) struct disk_ref old = {.fs = r->fs, .fd = -1};
    char name[NAME_MAX + 1];
    int rc = 0;

    if (S_ISLNK(from->node->type)) {
        old.node = disk_place(r->fs, from->node, name);
        old.fd = old.node ? disk_get(r->fs, old.node, e) : -ESTALE;
        if (old.fd < 0) {
            disk_unpin(r->fs, steal(&old.node));
            return old.fd;
        }
    }
    TRY(as_caller(r, &acting, e));
    rc = old.node ? linkat(old.fd, name, dir->fd, r->as, 0)
                  : linkat(AT_FDCWD, disk_proc(from->fd).path, dir->fd, r->as,
                           AT_SYMLINK_FOLLOW);
    return rc < 0 ? fail(r->as, e) : 0;
}

int disk_link(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref from = {0};
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    int rc = disk_ref(r->fs, r->ino, &from, e);

    if (rc == 0)
        rc = disk_ref(r->fs, r->to, &dir, e);
    if (rc == 0)
        rc = link_it(r, &from, &dir, e);
    if (rc < 0)
        return rc;
    disk_changed(r->fs, dir.node);
    return disk_reply(r, dir.node, r->as, e);
}

/* ---- names that go ---- */

static int remove_name(struct request *r, const struct disk_ref *dir, int flags,
                       struct err *e)
{
    CLEANUP(as_server) struct acting acting = {0};

    TRY(as_caller(r, &acting, e));
    return unlinkat(dir->fd, r->name, flags) < 0 ? fail(r->name, e) : 0;
}

static int take_away(struct request *r, int flags, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    CLEANUP(disk_unref) struct disk_ref gone = {.fs = r->fs};
    int rc = disk_ref(r->fs, r->ino, &dir, e);

    if (rc < 0)
        return rc;
    /* Who has it open goes on using it, by the descriptor that it has now. */
    gone.node = disk_known(r->fs, dir.node, r->name);
    if (gone.node && disk_get(r->fs, gone.node, e) < 0)
        disk_unpin(r->fs, steal(&gone.node));
    if (gone.node)
        disk_keep(r->fs, gone.node);
    TRY(remove_name(r, &dir, flags, e));
    disk_changed(r->fs, dir.node);
    fuse_reply_err(r->req, 0);
    return 0;
}

int disk_unlink(struct request *r, struct err *e)
{
    return take_away(r, 0, e);
}

int disk_rmdir(struct request *r, struct err *e)
{
    return take_away(r, AT_REMOVEDIR, e);
}

/* ---- names that change ---- */

static int rename_name(struct request *r, int from, int to, struct err *e)
{
    CLEANUP(as_server) struct acting acting = {0};

    TRY(as_caller(r, &acting, e));
    return renameat2(from, r->name, to, r->as, r->flags) < 0 ? fail(r->name, e) : 0;
}

/* The nodes that a rename is about, if the kernel knows them; NULL: not. */
struct moving {
    struct fs *fs;
    struct disk_node *moved, *other;
};

static void moving_release(struct moving *m)
{
    disk_unpin(m->fs, m->moved);
    disk_unpin(m->fs, m->other);
}

static void hold(struct fs *fs, struct disk_node *n)
{
    struct err ignored = {0};

    if (n && disk_get(fs, n, &ignored) >= 0) {
        disk_keep(fs, n);
        disk_put(fs, n);
    }
}

int disk_rename(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref from = {0};
    CLEANUP(disk_unref) struct disk_ref to = {0};
    CLEANUP(moving_release) struct moving m = {.fs = r->fs};
    int rc;

    if (r->flags & RENAME_WHITEOUT)
        return err_set(e, EINVAL, "%s: a whiteout is a device, and none are made here",
                       r->name);
    rc = disk_ref(r->fs, r->ino, &from, e);
    if (rc == 0)
        rc = disk_ref(r->fs, r->to, &to, e);
    if (rc < 0)
        return rc;
    m.moved = disk_known(r->fs, from.node, r->name);
    m.other = disk_known(r->fs, to.node, r->as);
    hold(r->fs, m.other);
    TRY(rename_name(r, from.fd, to.fd, e));
    if (m.moved && m.moved != m.other)
        disk_moved(r->fs, m.moved, to.node, r->as);
    if (m.other && m.moved != m.other && (r->flags & RENAME_EXCHANGE))
        disk_moved(r->fs, m.other, from.node, r->name);
    disk_changed(r->fs, from.node);
    disk_changed(r->fs, to.node);
    fuse_reply_err(r->req, 0);
    return 0;
}
