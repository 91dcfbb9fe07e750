/* SPDX-License-Identifier: MIT */
/* fs/ops.c - the operation table of a mount for reading. */
#include "fs/fs.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>

#include "fs/attr.h"
#include "fs/dir.h"
#include "fs/handle.h"
#include "fs/lookup.h"
#include "fs/ops.h"
#include "fs/passthrough.h"
#include "fs/read.h"
#include "fs/report.h"
#include "fs/request.h"
#include "fs/xattr.h"

static struct request request(fuse_req_t req, request_fn *fn, fuse_ino_t ino)
{
    struct request r = {.fs = fuse_req_userdata(req), .req = req, .fn = fn, .ino = ino};

    counter_add(&r.fs->counters, COUNT_REQUESTS, 1);
    return r;
}

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

void ops_init(void *user, struct fuse_conn_info *conn)
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
    if (fs_writable(
            fs)) /* nothing of it may be kept: attributes are asked for when needed */
        want_not(conn, FUSE_CAP_READDIRPLUS);
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

static int getattr_inside(struct request *r, struct generation *gen, struct stat *st,
                          struct err *e)
{
    if (gen->stale && !inside_is_of_mount(ino_kind(r->ino)))
        return err_set(e, ESTALE, "%s: the checkpoint changed", gen->path);
    if (!r->may_block && !report_made(gen, ino_kind(r->ino)))
        return FS_LATER;
    return attr_inside(r->fs, gen, ino_kind(r->ino), ino_index(r->ino), st, e);
}

int getattr_inside_run(struct request *r, struct err *e)
{
    struct generation *gen = generation_of_ino(r->fs, r->ino);
    struct stat st;
    int rc = gen ? getattr_inside(r, gen, &st, e) : -ESTALE;

    generation_unref(r->fs, gen, 1);
    if (rc == 0)
        fuse_reply_attr(r->req, &st,
                        ino_kind(r->ino) >= INSIDE_COUNTERS_JSON ? 0 : FROZEN_SECONDS);
    return rc;
}

static int getattr_run(struct request *r, struct err *e)
{
    const struct node *n;
    struct stat st;
    int rc;

    if (ino_is_inside(r->ino))
        return getattr_inside_run(r, e);
    n = node_of_ino(r->fs, r->ino);
    rc = n ? attr_node(r->fs, n, &st, e) : -ESTALE;
    if (rc == -ESTALE && n && n->parent) /* the kernel looks its name up again */
        nodes_look_again(r->fs, n->parent->path);
    if (rc == 0)
        fuse_reply_attr(r->req, &st, MIRROR_SECONDS);
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
    struct generation *gen = generation_of_ino(r->fs, r->ino);
    CLEANUP_FREE char *target = gen ? tracker_of_generation(r->fs, gen) : NULL;

    generation_unref(r->fs, gen, 1);
    if (!target)
        return err_set(e, ENOENT, "no tracker names a step any more");
    snprintf(text, size, "../%s", target);
    return 0;
}

int readlink_inside_run(struct request *r, struct err *e)
{
    char text[PATH_MAX];
    int rc = ino_kind(r->ino) == INSIDE_LATEST
                 ? readlink_inside(r, text, sizeof text, e)
                 : -EINVAL;

    if (rc == 0)
        fuse_reply_readlink(r->req, text);
    return rc;
}

static int readlink_run(struct request *r, struct err *e)
{
    const struct node *n;
    char text[PATH_MAX];
    int rc;

    if (ino_is_inside(r->ino))
        return readlink_inside_run(r, e);
    n = node_of_ino(r->fs, r->ino);
    rc = n ? attr_link_text(r->fs, n, text, sizeof text, e) : -ESTALE;
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
    request_run(&r);
}

/* Files and directories: their handles begin alike. */
static void op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    opened_end(fuse_req_userdata(req), (struct opened *)(uintptr_t)fi->fh);
    fuse_reply_err(req, 0);
}

static void op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, opendir_run, ino);

    r.fi = *fi;
    request_run(&r);
}

static void read_dir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                     const struct fuse_file_info *fi, bool plus)
{
    struct request r = request(req, readdir_run, ino);

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

/* From memory, so that df(1) never waits: what is known so far, and no room. */
static void op_statfs(fuse_req_t req, fuse_ino_t ino)
{
    struct request r = request(req, NULL, ino);
    uint64_t bytes = atomic_load(&r.fs->counters.known_bytes);
    struct statvfs st = {.f_bsize = 4096,
                         .f_frsize = 4096,
                         .f_blocks = bytes / 4096 + (bytes % 4096 > 0),
                         .f_namemax = NAME_MAX};

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

/* ---- changes, which the kernel asks for where its own read-only flag was taken away ---- */

static void op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set,
                       struct fuse_file_info *fi)
{
    (void)ino;
    (void)attr;
    (void)to_set;
    (void)fi;
    fuse_reply_err(req, EROFS);
}

static void op_mknod(fuse_req_t req, fuse_ino_t dir, const char *name, mode_t mode,
                     dev_t dev)
{
    (void)dir;
    (void)name;
    (void)mode;
    (void)dev;
    fuse_reply_err(req, EROFS);
}

static void op_mkdir(fuse_req_t req, fuse_ino_t dir, const char *name, mode_t mode)
{
    (void)dir;
    (void)name;
    (void)mode;
    fuse_reply_err(req, EROFS);
}

static void op_unlink(fuse_req_t req, fuse_ino_t dir, const char *name)
{
    (void)dir;
    (void)name;
    fuse_reply_err(req, EROFS);
}

static void op_symlink(fuse_req_t req, const char *link, fuse_ino_t dir,
                       const char *name)
{
    (void)link;
    (void)dir;
    (void)name;
    fuse_reply_err(req, EROFS);
}

static void op_rename(fuse_req_t req, fuse_ino_t dir, const char *name, fuse_ino_t to,
                      const char *as, unsigned int flags)
{
    (void)dir;
    (void)name;
    (void)to;
    (void)as;
    (void)flags;
    fuse_reply_err(req, EROFS);
}

static void op_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t dir, const char *name)
{
    (void)ino;
    (void)dir;
    (void)name;
    fuse_reply_err(req, EROFS);
}

static void op_create(fuse_req_t req, fuse_ino_t dir, const char *name, mode_t mode,
                      struct fuse_file_info *fi)
{
    (void)dir;
    (void)name;
    (void)mode;
    (void)fi;
    fuse_reply_err(req, EROFS);
}

static void op_setxattr(fuse_req_t req, fuse_ino_t ino, const char *name,
                        const char *value, size_t size, int flags)
{
    (void)ino;
    (void)name;
    (void)value;
    (void)size;
    (void)flags;
    fuse_reply_err(req, EROFS);
}

static void op_removexattr(fuse_req_t req, fuse_ino_t ino, const char *name)
{
    (void)ino;
    (void)name;
    fuse_reply_err(req, EROFS);
}

const struct fuse_lowlevel_ops fs_operations = {
    .init = ops_init,
    .lookup = op_lookup,
    .forget = op_forget,
    .forget_multi = op_forget_multi,
    .getattr = op_getattr,
    .setattr = op_setattr,
    .readlink = op_readlink,
    .mknod = op_mknod,
    .mkdir = op_mkdir,
    .unlink = op_unlink,
    .rmdir = op_unlink,
    .symlink = op_symlink,
    .rename = op_rename,
    .link = op_link,
    .create = op_create,
    .open = op_open,
    .read = op_read,
    .release = op_release,
    .opendir = op_opendir,
    .readdir = op_readdir,
    .readdirplus = op_readdirplus,
    .releasedir = op_release,
    .statfs = op_statfs,
    .getxattr = op_getxattr,
    .setxattr = op_setxattr,
    .listxattr = op_listxattr,
    .removexattr = op_removexattr,
};
