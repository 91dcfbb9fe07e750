/* SPDX-License-Identifier: MIT */
/* fs/bucket_ops.c - the operation table of a mount for writing to an object store. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>

#include "base/interrupt.h"
#include "fs/attr.h"
#include "fs/bucket.h"
#include "fs/dir.h"
#include "fs/disk_view.h"
#include "fs/handle.h"
#include "fs/lookup.h"
#include "fs/ops.h"
#include "fs/read.h"
#include "fs/xattr.h"
#include "save/publish.h"

static struct request request(fuse_req_t req, request_fn *fn, fuse_ino_t ino)
{
    struct request r = {.fs = fuse_req_userdata(req), .req = req, .fn = fn, .ino = ino};

    counter_add(&r.fs->counters, COUNT_REQUESTS, 1);
    return r;
}

static void run_here(struct request *r)
{
    r->may_block = true;
    request_run(r);
}

static bool is_stored(const struct fuse_file_info *fi)
{
    return ((struct opened *)(uintptr_t)fi->fh)->kind == OPENED_FILE;
}

static void finish(const struct request *r, int rc, const struct err *e)
{
    if (rc < 0)
        request_fail(r, rc, e);
}

static int reply_done(const struct request *r, int rc)
{
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

/* A view is many objects or a part of one. */
static int refuse_view(struct err *e)
{
    err_set(e, EROFS, "a view of a checkpoint in an object store cannot be changed");
    return err_hint(e, "write the checkpoint's files, or unshard convert it");
}

/*
 * The path of a name in a directory. `optimizer/` that is a view may get a file of its own:
 * it is a directory of the store then.
 */
static int path_in(struct request *r, fuse_ino_t dir, const char *name,
                   char path[PATH_MAX], struct err *e)
{
    char below[NAME_MAX + sizeof "optimizer/"];
    struct generation *gen;
    int rc;

    if (publish_is_staging(name) || strcmp(name, ".unshard") == 0)
        return err_set(e, EACCES, "%s: this name is kept for unshardfs", name);
    if (!ino_is_inside(dir))
        return bucket_path(r->fs, dir, name, path, e);
    if (ino_kind(dir) != INSIDE_OPTIMIZER)
        return refuse_view(e);
    gen = generation_of_ino(r->fs, dir);
    if (!gen)
        return -ESTALE;
    rc = snprintf(below, sizeof below, "optimizer/%s", name) < (int)sizeof below
             ? store_join(gen->path, below, path, PATH_MAX)
             : -ENAMETOOLONG;
    generation_unref(r->fs, gen, 1);
    return rc < 0 ? err_set(e, ENAMETOOLONG, "%s: the path is too long", name) : 0;
}

/* ---- lookup ---- */

static void forget(struct fs *fs, fuse_ino_t ino, uint64_t n)
{
    if (ino == FUSE_ROOT_ID)
        return;
    if (ino_is_inside(ino))
        generation_forget(fs, ino, n);
    else
        bucket_node_forget(fs, ino, n);
}

static int reply_entry(const struct request *r, const struct fuse_entry_param *entry)
{
    if (fuse_reply_entry(r->req, entry) < 0 && entry->ino)
        forget(r->fs, entry->ino, 1);
    return 0;
}

static int find_stored(struct request *r, const char *path,
                       struct fuse_entry_param *out, struct err *e)
{
    struct bucket_node *n;
    int rc = bucket_stat(r->fs, path, &out->attr, e);

    if (rc == 0)
        rc = bucket_intern(r->fs, path, out->attr.st_mode & S_IFMT, &n, e);
    if (rc < 0)
        return rc;
    out->ino = n->ino;
    out->generation = 1;
    return 0;
}

static int find_inside(struct request *r, struct generation *gen, enum inside kind,
                       struct fuse_entry_param *out, struct err *e)
{
    int rc = attr_inside(r->fs, gen, kind, 0, &out->attr, e);

    if (rc == 0)
        entry_inside(r->fs, gen, kind, 0, out);
    return rc;
}

/* A view of the checkpoint that the directory is, where no object has the name. */
static int find_view(struct request *r, struct fuse_entry_param *out, struct err *e)
{
    const struct disk_view *view = disk_view_named(r->name);
    bool meta = strcmp(r->name, ".unshard") == 0;
    struct bucket_node *dir;
    struct generation *gen = NULL;
    int rc;

    if (!view && !meta)
        return -ENOENT;
    dir = bucket_pin(r->fs, r->ino);
    if (!dir)
        return -ESTALE;
    rc = bucket_generation(r->fs, dir, r->may_block, &gen, e);
    bucket_unpin(r->fs, dir);
    if (rc != 0)
        return rc;
    if (view && (rc = disk_has_view(r->fs, gen, view, e)) <= 0)
        rc = rc < 0 ? rc : -ENOENT;
    else
        rc = find_inside(r, gen, view ? view->kind : INSIDE_META, out, e);
    generation_unref(r->fs, gen, 1);
    return rc;
}

static int do_lookup(struct request *r, struct err *e)
{
    struct fuse_entry_param entry = {0};
    char path[PATH_MAX];
    int rc;

    if (ino_is_inside(r->ino))
        return lookup_run(r, e);
    if (strlen(r->name) > NAME_MAX)
        return -ENAMETOOLONG;
    rc = bucket_path(r->fs, r->ino, r->name, path, e);
    if (rc == 0 && !publish_is_staging(r->name) && strcmp(r->name, ".unshard") != 0)
        rc = find_stored(r, path, &entry, e);
    else if (rc == 0)
        rc = -ENOENT;
    if (rc == -ENOENT) {
        *e = (struct err){0};
        rc = find_view(r, &entry, e);
    }
    if (rc == -ENOENT || rc == -EINVAL)
        return reply_entry(r, &(struct fuse_entry_param){0});
    return rc == 0 ? reply_entry(r, &entry) : rc;
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct request r = request(req, do_lookup, parent);

    counter_add(&r.fs->counters, COUNT_LOOKUPS, 1);
    r.name = name;
    request_run(&r);
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

/* ---- attributes ---- */

static int do_getattr(struct request *r, struct err *e)
{
    struct bucket_node *n;
    struct stat st;
    int rc;

    if (ino_is_inside(r->ino))
        return getattr_inside_run(r, e);
    n = bucket_pin(r->fs, r->ino);
    rc = n ? bucket_node_stat(r->fs, n, &st, e) : -ESTALE;
    bucket_unpin(r->fs, n);
    if (rc == 0)
        fuse_reply_attr(r->req, &st, 0);
    return rc;
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, do_getattr, ino);

    (void)fi;
    request_run(&r);
}

/* Mode, owner and times are taken and not kept: programs that copy files set them. */
static void op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set,
                       struct fuse_file_info *fi)
{
    struct request r = request(req, NULL, ino);
    struct err e = {0};
    int rc = 0;

    if (fi)
        r.fi = *fi;
    r.has_fi = fi && is_stored(fi);
    r.may_block = true;
    if (to_set & FUSE_SET_ATTR_SIZE)
        rc = ino_is_inside(ino) && !r.has_fi ? refuse_view(&e)
                                             : bucket_truncate(&r, attr->st_size, &e);
    if (rc == 0)
        rc = do_getattr(&r, &e);
    finish(&r, rc, &e);
}

static void op_readlink(fuse_req_t req, fuse_ino_t ino)
{
    struct request r = request(req, readlink_inside_run, ino);

    if (ino_is_inside(ino))
        request_run(&r);
    else
        fuse_reply_err(req, EINVAL);
}

/* A store has room for everything; what is written passes through the disk of the spool. */
static void op_statfs(fuse_req_t req, fuse_ino_t ino)
{
    struct request r = request(req, NULL, ino);
    struct statvfs st;

    if (statvfs(r.fs->cache_dir ? r.fs->cache_dir : "/tmp", &st) < 0) {
        fuse_reply_err(req, errno);
        return;
    }
    st.f_namemax = NAME_MAX;
    fuse_reply_statfs(req, &st);
}

/* ---- files ---- */

static bool writes(const struct request *r)
{
    return (r->fi.flags & O_ACCMODE) != O_RDONLY || (r->fi.flags & O_TRUNC);
}

/* A view that is one file may be replaced by a stored file of its name. */
static int open_over_view(struct request *r, struct err *e)
{
    enum inside kind = ino_kind(r->ino);
    char path[PATH_MAX];
    struct generation *gen;
    const char *name;
    int rc;

    if (!(r->fi.flags & O_TRUNC) ||
        (kind != INSIDE_MODEL && kind != INSIDE_OPTIMIZER_FILE))
        return refuse_view(e);
    gen = generation_of_ino(r->fs, r->ino);
    if (!gen)
        return -ESTALE;
    name = kind == INSIDE_OPTIMIZER_FILE ? "optimizer/optimizer.safetensors"
           : gen->info.adapter           ? "adapter_model.safetensors"
                                         : "model.safetensors";
    rc = store_join(gen->path, name, path, sizeof path);
    generation_unref(r->fs, gen, 1);
    return rc < 0 ? rc : bucket_open_new(r, path, e);
}

static int do_open(struct request *r, struct err *e)
{
    if (!ino_is_inside(r->ino))
        return bucket_open_run(r, e);
    return writes(r) ? open_over_view(r, e) : open_run(r, e);
}

static void op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, do_open, ino);

    r.fi = *fi;
    if (ino_is_inside(ino) && !writes(&r))
        request_run(&r); /* it may wait for a scan, or for a copy */
    else
        run_here(&r);
}

static int do_create(struct request *r, struct err *e)
{
    char path[PATH_MAX];
    int rc = path_in(r, r->ino, r->name, path, e);

    return rc == 0 ? bucket_create_file(r, path, e) : rc;
}

static void op_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
                      struct fuse_file_info *fi)
{
    struct request r = request(req, do_create, parent);

    (void)mode;
    r.name = name;
    r.fi = *fi;
    run_here(&r);
}

static int do_read(struct request *r, struct err *e)
{
    return is_stored(&r->fi) ? bucket_read_run(r, e) : read_run(r, e);
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

    r.size = size;
    r.off = off;
    r.fi = *fi;
    finish(&r, is_stored(fi) ? bucket_write(&r, data, &e) : -EBADF, &e);
}

static int do_flush(struct request *r, struct err *e)
{
    return is_stored(&r->fi) ? bucket_flush_run(r, e) : reply_done(r, 0);
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
    return is_stored(&r->fi) ? bucket_fsync_run(r, e) : reply_done(r, 0);
}

static void op_fsync(fuse_req_t req, fuse_ino_t ino, int datasync,
                     struct fuse_file_info *fi)
{
    struct request r = request(req, do_fsync, ino);

    (void)datasync;
    r.fi = *fi;
    run_here(&r);
}

static void op_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t off, off_t len,
                         struct fuse_file_info *fi)
{
    struct request r = request(req, NULL, ino);
    struct err e = {0};

    r.flags = (unsigned)mode;
    r.off = off;
    r.fi = *fi;
    finish(&r, is_stored(fi) ? bucket_fallocate(&r, len, &e) : -EOPNOTSUPP, &e);
}

/* ---- names ---- */

typedef int change_fn(struct fs *fs, const char *path, struct err *e);

static int change(struct request *r, change_fn *fn, char path[PATH_MAX], struct err *e)
{
    int rc = path_in(r, r->ino, r->name, path, e);
    struct interrupt *before;

    if (rc < 0)
        return rc;
    before = bucket_begin_change(r->fs);
    rc = fn(r->fs, path, e);
    bucket_end_change(r->fs, before);
    return rc;
}

static int do_mkdir(struct request *r, struct err *e)
{
    struct fuse_entry_param entry = {0};
    char path[PATH_MAX];
    int rc = change(r, bucket_mkdir, path, e);

    if (rc == 0)
        rc = find_stored(r, path, &entry, e);
    return rc == 0 ? reply_entry(r, &entry) : rc;
}

static int do_unlink(struct request *r, struct err *e)
{
    char path[PATH_MAX];

    return ino_is_inside(r->ino) ? refuse_view(e)
                                 : reply_done(r, change(r, bucket_unlink, path, e));
}

/* A name of a view is no directory of the store. */
static int do_rmdir(struct request *r, struct err *e)
{
    char path[PATH_MAX];
    int rc;

    if (ino_is_inside(r->ino))
        return refuse_view(e);
    rc = change(r, bucket_rmdir, path, e);
    if (rc == -ENOENT && disk_view_named(r->name))
        return refuse_view(e);
    return reply_done(r, rc);
}

static void op_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode)
{
    struct request r = request(req, do_mkdir, parent);

    (void)mode;
    r.name = name;
    run_here(&r);
}

static void op_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct request r = request(req, do_unlink, parent);

    r.name = name;
    run_here(&r);
}

static void op_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct request r = request(req, do_rmdir, parent);

    r.name = name;
    run_here(&r);
}

static int do_rename(struct request *r, struct err *e)
{
    char from[PATH_MAX], to[PATH_MAX];
    struct interrupt *before;
    int rc;

    if (r->flags & ~(unsigned)RENAME_NOREPLACE)
        return -EINVAL;
    if (ino_is_inside(r->ino))
        return -EXDEV;
    rc = path_in(r, r->ino, r->name, from, e);
    if (rc == 0)
        rc = path_in(r, r->to, r->as, to, e);
    if (rc < 0)
        return rc;
    before = bucket_begin_change(r->fs);
    rc = bucket_rename(r->fs, from, to, r->flags, e);
    bucket_end_change(r->fs, before);
    if (rc == -ENOENT && disk_view_named(r->name))
        return -EXDEV;
    return reply_done(r, rc);
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

/* Objects are files and nothing else. */
static void op_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
                     dev_t rdev)
{
    (void)parent;
    (void)name;
    (void)mode;
    (void)rdev;
    fuse_reply_err(req, ENOTSUP);
}

static void op_symlink(fuse_req_t req, const char *link, fuse_ino_t parent,
                       const char *name)
{
    (void)link;
    (void)parent;
    (void)name;
    fuse_reply_err(req, ENOTSUP);
}

static void op_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t newparent,
                    const char *newname)
{
    (void)ino;
    (void)newparent;
    (void)newname;
    fuse_reply_err(req, ENOTSUP);
}

/* ---- directories ---- */

static int do_opendir(struct request *r, struct err *e)
{
    return ino_is_inside(r->ino) ? opendir_run(r, e) : bucket_opendir_run(r, e);
}

static int do_readdir(struct request *r, struct err *e)
{
    return ino_is_inside(r->ino) ? readdir_run(r, e) : bucket_readdir_run(r, e);
}

static void op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    struct request r = request(req, do_opendir, ino);

    r.fi = *fi;
    request_run(&r);
}

static void op_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off,
                       struct fuse_file_info *fi)
{
    struct request r = request(req, do_readdir, ino);

    r.size = size;
    r.off = off;
    r.fi = *fi;
    if (ino_is_inside(ino))
        request_run(&r);
    else
        run_here(&r);
}

/* An object is safe when close(2) has returned; a directory has nothing besides. */
static void op_fsyncdir(fuse_req_t req, fuse_ino_t ino, int datasync,
                        struct fuse_file_info *fi)
{
    (void)ino;
    (void)datasync;
    (void)fi;
    fuse_reply_err(req, 0);
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
    (void)ino;
    (void)name;
    (void)value;
    (void)size;
    (void)flags;
    fuse_reply_err(req, ENOTSUP);
}

static void op_removexattr(fuse_req_t req, fuse_ino_t ino, const char *name)
{
    (void)ino;
    (void)name;
    fuse_reply_err(req, ENOTSUP);
}

const struct fuse_lowlevel_ops bucket_operations = {
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
