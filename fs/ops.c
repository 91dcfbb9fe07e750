/* SPDX-License-Identifier: MIT */
/* fs/ops.c - the operation table: the kernel's requests as calls of our handlers. */
#include "fs/fs.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>

#include "fs/alias.h"
#include "fs/asked.h"
#include "fs/attr.h"
#include "fs/dir.h"
#include "fs/handle.h"
#include "fs/lookup.h"
#include "fs/passthrough.h"
#include "fs/read.h"
#include "fs/report.h"
#include "fs/request.h"
#include "fs/stage_room.h"
#include "fs/staged.h"
#include "fs/write.h"
#include "fs/xattr.h"

static struct request request(fuse_req_t req, request_fn *fn, fuse_ino_t ino)
{
    struct request r = {.fs = fuse_req_userdata(req), .req = req, .fn = fn};

    r.ino = alias_resolve(r.fs, ino);
    counter_add(&r.fs->counters, COUNT_REQUESTS, 1);
    return r;
}

static void change(struct request *r);

/* Newer libfuse has the flags as 64-bit numbers; those that are used here are of the first 32. */
static void want_not(struct fuse_conn_info *conn, uint64_t flags)
{
    conn->want &= ~(uint32_t)flags;
}

#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 17)
static void want_if_offered(struct fuse_conn_info *conn, uint64_t flag)
{
    conn->want |= conn->capable & (uint32_t)flag;
}
#endif

static void op_init(void *user, struct fuse_conn_info *conn)
{
    struct fs *fs = user;

    /* Splicing costs more than it saves, whatever the size (measured). */
    want_not(conn, FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE);
    fs->can_expire = conn->capable & FUSE_CAP_EXPIRE_ONLY;
    /*
     * find(1) and du(1) read a whole directory before they ask for the attributes of what
     * is in it. The kernel would take that for a plain listing and look up every name
     * (decision 022).
     */
    want_not(conn, FUSE_CAP_READDIRPLUS_AUTO);
#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 17)
    /* Older ones do not know these: fs/negotiate.c adds them to the answer. */
    want_if_offered(conn, FUSE_CAP_DIRECT_IO_ALLOW_MMAP);
    if (passthrough_wanted(fs)) {
        want_if_offered(conn, FUSE_CAP_PASSTHROUGH);
        conn->max_backing_stack_depth = 1;
    }
#endif
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct request r = request(req, lookup_run, parent);

    counter_add(&r.fs->counters, COUNT_LOOKUPS, 1);
    r.name = name;
    request_run(&r);
}

static void forget(struct fs *fs, fuse_ino_t ino, uint64_t n)
{
    if (ino != FUSE_ROOT_ID)
        entry_forget(fs, ino, n);
}

static void op_forget(fuse_req_t req, fuse_ino_t ino, uint64_t n)
{
    forget(fuse_req_userdata(req), ino, n);
    fuse_reply_none(req);
}

static void op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *list)
{
    for (size_t i = 0; i < count; i++)
        forget(fuse_req_userdata(req), list[i].ino, list[i].nlookup);
    fuse_reply_none(req);
}

static int getattr_inside(struct request *r, struct slot *slot, struct stat *st,
                          struct err *e)
{
    if (slot->stale && !inside_is_of_mount(ino_kind(r->ino)))
        return err_set(e, ESTALE, "%s: the checkpoint changed", slot->path);
    if (!r->may_block && !report_made(slot, ino_kind(r->ino)))
        return FS_LATER;
    return attr_inside(r->fs, slot, ino_kind(r->ino), ino_index(r->ino), st, e);
}

static int getattr_run(struct request *r, struct err *e)
{
    double seconds = MIRROR_SECONDS;
    struct stat st;
    int rc;

    if (r->fs->stages && (rc = staged_getattr(r, e)) != STAGED_NONE)
        return rc;
    if (ino_is_inside(r->ino)) {
        struct slot *slot = slot_of_ino(r->fs, r->ino);
        enum inside kind = ino_kind(r->ino);

        rc = slot ? getattr_inside(r, slot, &st, e) : -ESTALE;
        slot_unref(r->fs, slot, 1);
        seconds = kind >= INSIDE_COUNTERS_JSON ? 0 : FROZEN_SECONDS;
    } else {
        const struct node *n = node_of_ino(r->fs, r->ino);

        rc = n ? attr_node(r->fs, n, &st, e) : -ESTALE;
        if (n && (rc == -ENOENT || rc == -ESTALE) && attr_unlinked(r->fs, n, &st) == 0)
            rc = 0;
        if (rc == -ESTALE && n && n->parent) /* the kernel looks its name up again */
            nodes_look_again(r->fs, n->parent->path);
    }
    if (rc == 0)
        fuse_reply_attr(r->req, &st, seconds);
    return rc;
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, getattr_run, ino);

    (void)fi;
    request_run(&r);
}

static int readlink_inside(const struct request *r, char *text, size_t size,
                           struct err *e)
{
    struct slot *slot = slot_of_ino(r->fs, r->ino);
    CLEANUP_FREE char *target = slot ? tracker_of_slot(r->fs, slot) : NULL;

    slot_unref(r->fs, slot, 1);
    if (!target)
        return err_set(e, ENOENT, "no tracker names a step any more");
    snprintf(text, size, "../%s", target);
    return 0;
}

static int readlink_run(struct request *r, struct err *e)
{
    char text[PATH_MAX];
    int rc;

    if (ino_is_inside(r->ino)) {
        rc = ino_kind(r->ino) == INSIDE_LATEST
                 ? readlink_inside(r, text, sizeof text, e)
                 : -EINVAL;
    } else {
        const struct node *n = node_of_ino(r->fs, r->ino);

        rc = n ? attr_link_text(r->fs, n, text, sizeof text, e) : -ESTALE;
    }
    if (rc == 0)
        fuse_reply_readlink(r->req, text);
    return rc;
}

static void op_readlink(fuse_req_t req, fuse_ino_t ino)
{
    struct request r = request(req, readlink_run, ino);

    request_run(&r);
}

static void op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, open_run, ino);

    r.fi = *fi;
    request_run(&r);
}

static void op_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                    struct fuse_file_info *fi)
{
    struct request r = request(req, read_run, ino);

    r.size = size;
    r.off = off;
    r.fi = *fi;
    if (staged_handle_of(fi))
        r.fn = staged_read;
    request_run(&r);
}

/* Files and directories: their handles begin alike. */
static void op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    opened_end(fuse_req_userdata(req), (struct opened *)(uintptr_t)fi->fh);
    fuse_reply_err(req, 0);
}

/*
 * What is written goes to its file at once. A file is judged at the last release: close(2) of
 * a part is no error.
 */
static void op_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct fs *fs = fuse_req_userdata(req);
    struct staged_handle *h = staged_handle_of(fi);

    (void)ino;
    if (h && h->writes) {
        stages_lock(fs);
        h->killed = staged_lacks(h) && asked_was_killed(fuse_req_ctx(req)->pid);
        if (h->node)
            staged_closed(h);
        stages_unlock(fs);
    }
    fuse_reply_err(req, 0);
}

static void op_fsync(fuse_req_t req, fuse_ino_t ino, int datasync,
                     struct fuse_file_info *fi)
{
    struct request r = request(req, write_fsync, ino);

    (void)datasync;
    r.fi = *fi;
    request_run(&r);
}

static void op_fsyncdir(fuse_req_t req, fuse_ino_t ino, int datasync,
                        struct fuse_file_info *fi)
{
    struct request r = request(req, write_fsyncdir, ino);

    (void)datasync;
    (void)fi;
    if (r.fs->stages)
        change(&r);
    else
        fuse_reply_err(req, 0);
}

static void op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, opendir_run, ino);

    if (ino_is_staged(r.ino))
        r.fn = staged_opendir;
    r.fi = *fi;
    request_run(&r);
}

static void read_dir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                     const struct fuse_file_info *fi, bool plus)
{
    struct request r =
        request(req, staged_handle_of(fi) ? staged_readdir : readdir_run, ino);

    r.size = size;
    r.off = off;
    r.fi = *fi;
    r.plus = plus;
    request_run(&r);
}

static void op_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                       struct fuse_file_info *fi)
{
    read_dir(req, ino, size, off, fi, false);
}

static void op_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                           struct fuse_file_info *fi)
{
    read_dir(req, ino, size, off, fi, true);
}

/* Programs that save look whether there is room. */
static bool statfs_of_source(const struct fs *fs, struct statvfs *out)
{
    if (!fs->stages || statvfs(fs->store->url, out) < 0)
        return false;
    stage_room_left(fs, out);
    return true;
}

/* From memory, so that df(1) never waits: what is known so far, and no room. */
static void op_statfs(fuse_req_t req, fuse_ino_t ino)
{
    struct request r = request(req, NULL, ino);
    uint64_t bytes = atomic_load(&r.fs->counters.known_bytes);
    struct statvfs st = {.f_bsize = 4096,
                         .f_frsize = 4096,
                         .f_blocks = bytes / 4096 + (bytes % 4096 > 0),
                         .f_namemax = NAME_MAX};

    statfs_of_source(r.fs, &st);
    fuse_reply_statfs(req, &st);
}

static void op_getxattr(fuse_req_t req, fuse_ino_t ino, const char *name, size_t size)
{
    struct request r = request(req, getxattr_run, ino);

    r.name = name;
    r.size = size;
    request_run(&r);
}

static void op_listxattr(fuse_req_t req, fuse_ino_t ino, size_t size)
{
    struct request r = request(req, listxattr_run, ino);

    r.size = size;
    request_run(&r);
}

/* ---- what changes something ---- */

/* Of a mount for reading only: the kernel refuses most by itself. */
static bool refused(fuse_req_t req)
{
    const struct fs *fs = fuse_req_userdata(req);

    if (!fs->stages)
        fuse_reply_err(req, EROFS);
    return !fs->stages;
}

static void finish(struct request *r, int rc, const struct err *e)
{
    if (rc < 0)
        request_fail(r, rc, e);
}

/* These may wait for a scan on their own thread: who saves has few of them. */
static void change(struct request *r)
{
    struct err e = {0};

    r->may_block = true;
    finish(r, r->fn(r, &e), &e);
}

static void op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set,
                       struct fuse_file_info *fi)
{
    struct request r;
    struct err e = {0};
    int rc;

    if (refused(req))
        return;
    r = request(req, NULL, ino);
    if (fi)
        r.fi = *fi;
    r.may_block = true;
    rc = write_setattr(&r, attr, to_set, &e);
    if (rc == STAGED_NONE)
        op_getattr(req, ino, NULL);
    else
        finish(&r, rc, &e);
}

static void op_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode)
{
    struct request r;

    if (refused(req))
        return;
    r = request(req, write_mkdir, parent);
    r.name = name;
    r.mode = mode;
    change(&r);
}

static void op_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct request r;

    if (refused(req))
        return;
    r = request(req, write_unlink, parent);
    r.name = name;
    change(&r);
}

static void op_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct request r;

    if (refused(req))
        return;
    r = request(req, write_rmdir, parent);
    r.name = name;
    change(&r);
}

static void op_rename(fuse_req_t req, fuse_ino_t parent, const char *name,
                      fuse_ino_t newparent, const char *newname, unsigned int flags)
{
    struct request r;

    if (refused(req))
        return;
    r = request(req, write_rename, parent);
    r.name = name;
    r.to = alias_resolve(r.fs, newparent);
    r.as = newname;
    r.flags = flags;
    change(&r);
}

static void op_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
                      struct fuse_file_info *fi)
{
    struct request r;

    if (refused(req))
        return;
    r = request(req, write_create, parent);
    r.name = name;
    r.mode = mode;
    r.fi = *fi;
    change(&r);
}

static void op_write(fuse_req_t req, fuse_ino_t ino, const char *data, size_t size,
                     off_t off, struct fuse_file_info *fi)
{
    struct request r;
    struct err e = {0};

    if (refused(req))
        return;
    r = request(req, NULL, ino);
    r.size = size;
    r.off = off;
    r.fi = *fi;
    finish(&r, write_bytes(&r, data, &e), &e);
}

static void op_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t off, off_t len,
                         struct fuse_file_info *fi)
{
    struct request r;
    struct err e = {0};

    if (refused(req))
        return;
    r = request(req, NULL, ino);
    r.flags = (unsigned)mode;
    r.off = off;
    r.fi = *fi;
    finish(&r, write_fallocate(&r, len, &e), &e);
}

static void op_setxattr(fuse_req_t req, fuse_ino_t ino, const char *name,
                        const char *value, size_t size, int flags)
{
    struct request r;
    struct err e = {0};

    (void)flags;
    if (refused(req))
        return;
    r = request(req, NULL, ino);
    r.name = name;
    r.size = size;
    r.may_block = true;
    finish(&r, write_setxattr(&r, value, &e), &e);
}

static void op_removexattr(fuse_req_t req, fuse_ino_t ino, const char *name)
{
    (void)ino;
    (void)name;
    if (!refused(req))
        fuse_reply_err(req, EOPNOTSUPP);
}

/* Programs copy by reading and writing then. */
static void op_copy_file_range(fuse_req_t req, fuse_ino_t in, off_t off_in,
                               struct fuse_file_info *fi_in, fuse_ino_t out,
                               off_t off_out, struct fuse_file_info *fi_out, size_t len,
                               int flags)
{
    (void)in;
    (void)off_in;
    (void)fi_in;
    (void)out;
    (void)off_out;
    (void)fi_out;
    (void)len;
    (void)flags;
    if (!refused(req))
        fuse_reply_err(req, EOPNOTSUPP);
}

/* Devices and sockets: no checkpoint has them. mknod(2) of a file comes as create. */
static void op_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
                     dev_t rdev)
{
    (void)parent;
    (void)name;
    (void)mode;
    (void)rdev;
    if (!refused(req))
        fuse_reply_err(req, EPERM);
}

static void op_symlink(fuse_req_t req, const char *link, fuse_ino_t parent,
                       const char *name)
{
    struct request r;

    if (refused(req))
        return;
    r = request(req, write_symlink, parent);
    r.name = name;
    r.as = link;
    change(&r);
}

static void op_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t newparent,
                    const char *newname)
{
    struct request r;

    if (refused(req))
        return;
    r = request(req, write_link, ino);
    r.to = alias_resolve(r.fs, newparent);
    r.as = newname;
    change(&r);
}

const struct fuse_lowlevel_ops fs_operations = {
    .init = op_init,
    .lookup = op_lookup,
    .forget = op_forget,
    .forget_multi = op_forget_multi,
    .getattr = op_getattr,
    .readlink = op_readlink,
    .open = op_open,
    .read = op_read,
    .release = op_release,
    .flush = op_flush,
    .fsync = op_fsync,
    .opendir = op_opendir,
    .readdir = op_readdir,
    .readdirplus = op_readdirplus,
    .releasedir = op_release,
    .fsyncdir = op_fsyncdir,
    .statfs = op_statfs,
    .getxattr = op_getxattr,
    .listxattr = op_listxattr,
    .setattr = op_setattr,
    .mknod = op_mknod,
    .mkdir = op_mkdir,
    .unlink = op_unlink,
    .rmdir = op_rmdir,
    .symlink = op_symlink,
    .rename = op_rename,
    .link = op_link,
    .create = op_create,
    .write = op_write,
    .fallocate = op_fallocate,
    .setxattr = op_setxattr,
    .removexattr = op_removexattr,
    .copy_file_range = op_copy_file_range,
};
