/* SPDX-License-Identifier: MIT */
/* fs/disk_ops.c - the operation table of a mount for writing. */
#include "fs/disk_ops.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "fs/dir.h"
#include "fs/disk_view.h"
#include "fs/edit.h"
#include "fs/handle.h"
#include "fs/lookup.h"
#include "fs/ops.h"
#include "fs/read.h"
#include "fs/xattr.h"
#include "save/publish.h"

/*
 * A node is one of three: of the source (fs/disk.h), inside a checkpoint (fs/generation.h), or of
 * a transaction (fs/edit.h). Its number says which.
 */
static bool is_disk(fuse_ino_t ino)
{
    return !ino_is_inside(ino) && !ino_is_edit(ino);
}

static struct request request(fuse_req_t req, request_fn *fn, fuse_ino_t ino)
{
    struct request r = {.fs = fuse_req_userdata(req), .req = req, .fn = fn, .ino = ino};

    counter_add(&r.fs->counters, COUNT_REQUESTS, 1);
    return r;
}

/* Runs it on this thread, also where it waits for a scan or for a publication. */
static void run_here(struct request *r)
{
    r->may_block = true;
    request_run(r);
}

static enum opened_kind opened_kind(const struct fuse_file_info *fi)
{
    return ((struct opened *)(uintptr_t)fi->fh)->kind;
}

/* The same system call on the source, which says what the errno is. */
static int on_disk(struct request *r, request_fn *fn, struct err *e)
{
    r->on_disk = true;
    return fn(r, e);
}

/* ---- lookup ---- */

static int reply_entry(struct request *r, const struct fuse_entry_param *entry)
{
    if (fuse_reply_entry(r->req, entry) < 0 && entry->ino)
        disk_ops_forget(r->fs, entry->ino, 1);
    return 0;
}

/* There is no such name now; the kernel asks again next time. */
static int reply_absent(struct request *r)
{
    const struct fuse_entry_param none = {0};

    return reply_entry(r, &none);
}

static int find_stored(struct request *r, struct disk_node *dir,
                       struct fuse_entry_param *out, struct err *e)
{
    CLEANUP(as_server) struct acting acting = {0};
    struct disk_node *n;
    struct stat st;
    int rc = as_caller(r, &acting, e);

    if (rc == 0)
        rc = disk_find(r->fs, dir, r->name, &n, &st, e);
    if (rc == 0)
        disk_entry(r->fs, n, &st, out);
    return rc;
}

static int lookup_disk(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    struct fuse_entry_param entry = {0};
    int rc = disk_ref(r->fs, r->ino, &dir, e);

    if (rc < 0)
        return rc;
    if (publish_is_staging(r->name))
        return reply_absent(r);
    rc = edit_lookup_disk(r, dir.node, &entry, e);
    if (rc == EDIT_NONE)
        rc = find_stored(r, dir.node, &entry, e);
    if (rc == -ENOENT) {
        *e = (struct err){0};
        rc = edit_lookup_view(r, dir.node, &entry, e);
    }
    if (rc == EDIT_ABSENT || rc == EDIT_NONE || rc == -ENOENT)
        return reply_absent(r);
    return rc == 0 ? reply_entry(r, &entry) : rc;
}

static int lookup_edit(struct request *r, struct err *e)
{
    struct fuse_entry_param entry = {0};
    int rc = edit_lookup(r, &entry, e);

    if (rc == EDIT_NONE && ino_is_inside(r->ino))
        return lookup_run(r, e);
    if (rc == EDIT_ABSENT || rc == EDIT_NONE || rc == -ENOENT)
        return reply_absent(r);
    return rc == 0 ? reply_entry(r, &entry) : rc;
}

static int do_lookup(struct request *r, struct err *e)
{
    if (strlen(r->name) > NAME_MAX)
        return -ENAMETOOLONG;
    return is_disk(r->ino) ? lookup_disk(r, e) : lookup_edit(r, e);
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct request r = request(req, do_lookup, parent);

    counter_add(&r.fs->counters, COUNT_LOOKUPS, 1);
    r.name = name;
    request_run(&r);
}

void disk_ops_forget(struct fs *fs, fuse_ino_t ino, uint64_t n)
{
    if (ino == FUSE_ROOT_ID)
        return;
    if (ino_is_inside(ino))
        generation_forget(fs, ino, n);
    else if (ino_is_edit(ino))
        edit_forget(fs, ino, n);
    else
        disk_forget(fs, ino, n);
}

static void op_forget(fuse_req_t req, fuse_ino_t ino, uint64_t n)
{
    disk_ops_forget(fuse_req_userdata(req), ino, n);
    fuse_reply_none(req);
}

static void op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *list)
{
    for (size_t i = 0; i < count; i++)
        disk_ops_forget(fuse_req_userdata(req), list[i].ino, list[i].nlookup);
    fuse_reply_none(req);
}

/* ---- attributes ---- */

static int do_getattr(struct request *r, struct err *e)
{
    if (ino_is_edit(r->ino))
        return edit_getattr(r, e);
    return ino_is_inside(r->ino) ? getattr_inside_run(r, e)
                                 : on_disk(r, disk_getattr, e);
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, do_getattr, ino);

    (void)fi;
    request_run(&r);
}

/* A change of attributes takes more than a request has room for. */
struct setattr {
    const struct stat *attr;
    int to_set;
};

static void op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set,
                       struct fuse_file_info *fi)
{
    struct request r = request(req, NULL, ino);
    struct err e = {0};
    int rc;

    if (fi)
        r.fi = *fi;
    r.has_fi = fi != NULL;
    r.may_block = true;
    r.on_disk = is_disk(ino);
    if (is_disk(ino))
        rc = disk_setattr(&r, attr, to_set, &e);
    else
        rc = edit_setattr(&r, attr, to_set, &e);
    if (rc < 0)
        request_fail(&r, rc, &e);
}

static int do_readlink(struct request *r, struct err *e)
{
    if (ino_is_edit(r->ino))
        return edit_readlink(r, e);
    return ino_is_inside(r->ino) ? readlink_inside_run(r, e)
                                 : on_disk(r, disk_readlink, e);
}

static void op_readlink(fuse_req_t req, fuse_ino_t ino)
{
    struct request r = request(req, do_readlink, ino);

    request_run(&r);
}

static void op_statfs(fuse_req_t req, fuse_ino_t ino)
{
    struct request r = request(req, disk_statfs, ino);

    request_run(&r);
}

/* ---- files ---- */

static bool writes(const struct request *r)
{
    return (r->fi.flags & O_ACCMODE) != O_RDONLY || (r->fi.flags & O_TRUNC);
}

static int do_open(struct request *r, struct err *e)
{
    int rc;

    if (is_disk(r->ino)) {
        rc = writes(r) ? edit_open_disk(r, e) : EDIT_NONE;
        return rc == EDIT_NONE ? on_disk(r, disk_open, e) : rc;
    }
    if (ino_is_edit(r->ino) || writes(r))
        return edit_open(r, e);
    rc = edit_before_read(r, e);
    return rc == 0 ? open_run(r, e) : rc;
}

static void op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, do_open, ino);

    r.fi = *fi;
    if (!is_disk(ino) && !writes(&r) && !ino_is_edit(ino))
        request_run(&r); /* it may wait for a scan, or for a copy */
    else
        run_here(&r);
}

static int do_create(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    int rc;

    if (!is_disk(r->ino))
        return edit_create(r, e);
    if (publish_is_staging(r->name))
        return err_set(e, EACCES, "%s: this name is kept for staging", r->name);
    rc = disk_ref(r->fs, r->ino, &dir, e);
    if (rc == 0)
        rc = edit_create_disk(r, dir.node, e);
    return rc == EDIT_NONE ? on_disk(r, disk_create, e) : rc;
}

static void op_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
                      struct fuse_file_info *fi)
{
    struct request r = request(req, do_create, parent);

    r.name = name;
    r.mode = mode;
    r.fi = *fi;
    run_here(&r);
}

static int do_read(struct request *r, struct err *e)
{
    switch (opened_kind(&r->fi)) {
    case OPENED_FILE:
        return on_disk(r, disk_read, e);
    case OPENED_EDIT:
        return edit_read(r, e);
    case OPENED_VIEW:
    case OPENED_DIR:
    case OPENED_LIST:
    default:
        return read_run(r, e);
    }
}

static void op_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                    struct fuse_file_info *fi)
{
    struct request r = request(req, do_read, ino);

    r.size = size;
    r.off = off;
    r.fi = *fi;
    request_run(&r);
}

static void op_write(fuse_req_t req, fuse_ino_t ino, const char *data, size_t size,
                     off_t off, struct fuse_file_info *fi)
{
    struct request r = request(req, NULL, ino);
    struct err e = {0};
    int rc = -EBADF;

    r.size = size;
    r.off = off;
    r.fi = *fi;
    r.on_disk = opened_kind(fi) == OPENED_FILE;
    if (r.on_disk)
        rc = disk_write(&r, data, &e);
    else if (opened_kind(fi) == OPENED_EDIT)
        rc = edit_write(&r, data, &e);
    if (rc < 0)
        request_fail(&r, rc, &e);
}

static int do_flush(struct request *r, struct err *e)
{
    if (opened_kind(&r->fi) == OPENED_FILE)
        return on_disk(r, disk_flush, e);
    if (opened_kind(&r->fi) == OPENED_EDIT)
        return edit_flush(r, e);
    fuse_reply_err(r->req, 0);
    return 0;
}

static void op_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, do_flush, ino);

    r.fi = *fi;
    run_here(&r);
}

/* Files and directories: their handles begin alike. */
static void op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    opened_end(fuse_req_userdata(req), (struct opened *)(uintptr_t)fi->fh);
    fuse_reply_err(req, 0);
}

static int do_fsync(struct request *r, struct err *e)
{
    r->on_disk = opened_kind(&r->fi) == OPENED_FILE;
    if (r->on_disk)
        return disk_fsync(r, r->plus, e);
    if (opened_kind(&r->fi) == OPENED_EDIT)
        return edit_fsync(r, e);
    fuse_reply_err(r->req, 0);
    return 0;
}

static void op_fsync(fuse_req_t req, fuse_ino_t ino, int datasync,
                     struct fuse_file_info *fi)
{
    struct request r = request(req, do_fsync, ino);

    r.fi = *fi;
    r.plus = datasync;
    run_here(&r);
}

static void op_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t off, off_t len,
                         struct fuse_file_info *fi)
{
    struct request r = request(req, NULL, ino);
    struct err e = {0};
    int rc = -EOPNOTSUPP;

    r.flags = (unsigned)mode;
    r.off = off;
    r.fi = *fi;
    r.on_disk = opened_kind(fi) == OPENED_FILE;
    if (r.on_disk)
        rc = disk_fallocate(&r, len, &e);
    else if (opened_kind(fi) == OPENED_EDIT)
        rc = edit_fallocate(&r, len, &e);
    if (rc < 0)
        request_fail(&r, rc, &e);
}

static void op_lseek(fuse_req_t req, fuse_ino_t ino, off_t off, int whence,
                     struct fuse_file_info *fi)
{
    struct request r = request(req, NULL, ino);
    struct err e = {0};
    int rc;

    r.off = off;
    r.fi = *fi;
    r.on_disk = opened_kind(fi) == OPENED_FILE;
    rc = r.on_disk ? disk_lseek(&r, whence, &e) : -EINVAL;
    if (rc < 0)
        request_fail(&r, rc, &e);
}

static void op_copy_file_range(fuse_req_t req, fuse_ino_t in, off_t off_in,
                               struct fuse_file_info *fi_in, fuse_ino_t out,
                               off_t off_out, struct fuse_file_info *fi_out, size_t len,
                               int flags)
{
    struct request r = request(req, NULL, in);
    struct err e = {0};
    int rc;

    (void)out;
    (void)flags;
    r.off = off_in;
    r.size = len;
    r.fi = *fi_in;
    r.on_disk = true;
    rc = disk_copy(&r, fi_out, off_out, &e);
    if (rc < 0)
        request_fail(&r, rc, &e);
}

/* ---- names ---- */

static int do_mkdir(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    int rc;

    if (!is_disk(r->ino))
        return edit_mkdir(r, e);
    if (publish_is_staging(r->name))
        return err_set(e, EACCES, "%s: this name is kept for staging", r->name);
    rc = disk_ref(r->fs, r->ino, &dir, e);
    if (rc == 0)
        rc = edit_mkdir_disk(r, dir.node, e);
    return rc == EDIT_NONE ? on_disk(r, disk_mkdir, e) : rc;
}

static void op_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode)
{
    struct request r = request(req, do_mkdir, parent);

    r.name = name;
    r.mode = mode;
    run_here(&r);
}

static int do_mknod(struct request *r, struct err *e)
{
    return is_disk(r->ino) && !publish_is_staging(r->name) ? on_disk(r, disk_mknod, e)
                                                           : -ENOTSUP;
}

static void op_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
                     dev_t rdev)
{
    struct request r = request(req, do_mknod, parent);

    (void)rdev;
    r.name = name;
    r.mode = mode;
    run_here(&r);
}

static int do_symlink(struct request *r, struct err *e)
{
    if (!is_disk(r->ino))
        return -ENOTSUP;
    return publish_is_staging(r->name) ? -EACCES : on_disk(r, disk_symlink, e);
}

static void op_symlink(fuse_req_t req, const char *link, fuse_ino_t parent,
                       const char *name)
{
    struct request r = request(req, do_symlink, parent);

    r.name = name;
    r.as = link;
    run_here(&r);
}

static int do_link(struct request *r, struct err *e)
{
    if (!is_disk(r->ino) || !is_disk(r->to))
        return -EXDEV;
    return publish_is_staging(r->as) ? -EACCES : on_disk(r, disk_link, e);
}

static void op_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t newparent,
                    const char *newname)
{
    struct request r = request(req, do_link, ino);

    r.to = newparent;
    r.as = newname;
    run_here(&r);
}

static int do_unlink(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    int rc;

    if (!is_disk(r->ino))
        return edit_unlink(r, e);
    rc = disk_ref(r->fs, r->ino, &dir, e);
    if (rc == 0)
        rc = edit_unlink_disk(r, dir.node, e);
    return rc == EDIT_NONE ? on_disk(r, disk_unlink, e) : rc;
}

static void op_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct request r = request(req, do_unlink, parent);

    r.name = name;
    run_here(&r);
}

static int do_rmdir(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    int rc;

    if (!is_disk(r->ino))
        return edit_rmdir(r, e);
    rc = disk_ref(r->fs, r->ino, &dir, e);
    if (rc == 0)
        rc = edit_rmdir_disk(r, dir.node, e);
    return rc == EDIT_NONE ? on_disk(r, disk_rmdir, e) : rc;
}

static void op_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct request r = request(req, do_rmdir, parent);

    r.name = name;
    run_here(&r);
}

static int do_rename(struct request *r, struct err *e)
{
    int rc = edit_rename(r, e);

    if (rc != EDIT_NONE)
        return rc;
    return publish_is_staging(r->name) || publish_is_staging(r->as)
               ? -EACCES
               : on_disk(r, disk_rename, e);
}

static void op_rename(fuse_req_t req, fuse_ino_t parent, const char *name,
                      fuse_ino_t newparent, const char *newname, unsigned int flags)
{
    struct request r = request(req, do_rename, parent);

    r.name = name;
    r.to = newparent;
    r.as = newname;
    r.flags = flags;
    run_here(&r);
}

/* ---- directories ---- */

static int do_opendir(struct request *r, struct err *e)
{
    if (ino_is_edit(r->ino))
        return edit_opendir(r, e);
    return ino_is_inside(r->ino) ? opendir_run(r, e) : disk_opendir(r, e);
}

static void op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, do_opendir, ino);

    r.fi = *fi;
    request_run(&r);
}

static int do_readdir(struct request *r, struct err *e)
{
    if (ino_is_edit(r->ino))
        return edit_readdir(r, e);
    return ino_is_inside(r->ino) ? readdir_run(r, e) : disk_readdir(r, e);
}

static void op_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                       struct fuse_file_info *fi)
{
    struct request r = request(req, do_readdir, ino);

    r.size = size;
    r.off = off;
    r.fi = *fi;
    request_run(&r);
}

static int do_fsyncdir(struct request *r, struct err *e)
{
    TRY(edit_fsyncdir(r, e));
    r->on_disk = is_disk(r->ino);
    if (r->on_disk)
        return disk_fsyncdir(r, r->plus, e);
    fuse_reply_err(r->req, 0);
    return 0;
}

static void op_fsyncdir(fuse_req_t req, fuse_ino_t ino, int datasync,
                        struct fuse_file_info *fi)
{
    struct request r = request(req, do_fsyncdir, ino);

    r.fi = *fi;
    r.plus = datasync;
    run_here(&r);
}

/* ---- extended attributes ---- */

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

static void op_setxattr(fuse_req_t req, fuse_ino_t ino, const char *name,
                        const char *value, size_t size, int flags)
{
    struct request r = request(req, NULL, ino);
    struct err e = {0};
    int rc;

    (void)flags;
    r.name = name;
    r.may_block = true;
    rc = edit_setxattr(&r, value, size, &e);
    if (rc < 0)
        request_fail(&r, rc, &e);
}

static void op_removexattr(fuse_req_t req, fuse_ino_t ino, const char *name)
{
    (void)ino;
    (void)name;
    fuse_reply_err(req, EOPNOTSUPP);
}

const struct fuse_lowlevel_ops disk_operations = {
    .init = ops_init,
    .lookup = op_lookup,
    .forget = op_forget,
    .forget_multi = op_forget_multi,
    .getattr = op_getattr,
    .setattr = op_setattr,
    .readlink = op_readlink,
    .statfs = op_statfs,
    .open = op_open,
    .create = op_create,
    .read = op_read,
    .write = op_write,
    .flush = op_flush,
    .release = op_release,
    .fsync = op_fsync,
    .fallocate = op_fallocate,
    .lseek = op_lseek,
    .copy_file_range = op_copy_file_range,
    .mkdir = op_mkdir,
    .mknod = op_mknod,
    .symlink = op_symlink,
    .link = op_link,
    .unlink = op_unlink,
    .rmdir = op_rmdir,
    .rename = op_rename,
    .opendir = op_opendir,
    .readdir = op_readdir,
    .releasedir = op_release,
    .fsyncdir = op_fsyncdir,
    .getxattr = op_getxattr,
    .listxattr = op_listxattr,
    .setxattr = op_setxattr,
    .removexattr = op_removexattr,
};
