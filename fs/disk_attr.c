/* SPDX-License-Identifier: MIT */
/* fs/disk_attr.c - attributes of files of the source in a mount for writing. */
#include "fs/disk_ops.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "fs/attr.h"

int as_caller(const struct request *r, struct acting *a, struct err *e)
{
    int rc = caller_of(fuse_req_ctx(r->req), &a->caller, e);

    return rc == 0 ? caller_enter(&a->caller, &a->saved, e) : rc;
}

void as_server(struct acting *a)
{
    int code = errno;

    caller_leave(&a->saved);
    caller_release(&a->caller);
    errno = code;
}

int disk_ref(struct fs *fs, fuse_ino_t ino, struct disk_ref *out, struct err *e)
{
    out->fs = fs;
    out->node = disk_pin(fs, ino);
    if (!out->node)
        return -ESTALE;
    out->fd = disk_get(fs, out->node, e);
    if (out->fd >= 0)
        return 0;
    disk_unpin(fs, steal(&out->node));
    return out->fd;
}

void disk_unref(struct disk_ref *ref)
{
    int code = errno;

    if (ref->node) {
        disk_put(ref->fs, ref->node);
        disk_unpin(ref->fs, ref->node);
    }
    errno = code;
}

uint64_t disk_number(const struct fs *fs, uint64_t dev, uint64_t inode)
{
    return dev == fs->disk_dev ? inode : attr_path_ino("", "", dev, inode);
}

int disk_getattr(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref ref = {0};
    int rc = disk_ref(r->fs, r->ino, &ref, e);
    struct stat st;

    if (rc < 0)
        return rc;
    if (fstatat(ref.fd, "", &st, AT_EMPTY_PATH) < 0)
        return err_set(e, errno, "stat: %s", strerror(errno));
    st.st_ino = disk_number(r->fs, st.st_dev, st.st_ino);
    fuse_reply_attr(r->req, &st, 0);
    return 0;
}

static int set_owner(int fd, const struct stat *attr, int to_set)
{
    uid_t uid = to_set & FUSE_SET_ATTR_UID ? attr->st_uid : (uid_t)-1;
    gid_t gid = to_set & FUSE_SET_ATTR_GID ? attr->st_gid : (gid_t)-1;

    return !to_set || to_set & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID)
               ? fchownat(fd, "", uid, gid, AT_EMPTY_PATH)
               : 0;
}

static int set_mode(int fd, const struct stat *attr, int to_set)
{
    return to_set & FUSE_SET_ATTR_MODE
               ? fchmodat(AT_FDCWD, disk_proc(fd).path, attr->st_mode & 07777, 0)
               : 0;
}

static int set_size(int fd, const struct fuse_file_info *fi, const struct stat *attr,
                    int to_set)
{
    int open = disk_file_fd(fi);

    if (!(to_set & FUSE_SET_ATTR_SIZE))
        return 0;
    return open >= 0 ? ftruncate(open, attr->st_size)
                     : truncate(disk_proc(fd).path, attr->st_size);
}

static int set_times(int fd, const struct disk_node *n, const struct stat *attr,
                     int to_set)
{
    enum {
        TIMES = FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME | FUSE_SET_ATTR_ATIME_NOW |
                FUSE_SET_ATTR_MTIME_NOW
    };
    struct timespec t[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_OMIT}};

    if (!(to_set & TIMES))
        return 0;
    if (to_set & FUSE_SET_ATTR_ATIME)
        t[0] = attr->st_atim;
    if (to_set & FUSE_SET_ATTR_MTIME)
        t[1] = attr->st_mtim;
    if (to_set & FUSE_SET_ATTR_ATIME_NOW)
        t[0].tv_nsec = UTIME_NOW;
    if (to_set & FUSE_SET_ATTR_MTIME_NOW)
        t[1].tv_nsec = UTIME_NOW;
    return S_ISLNK(n->type) ? utimensat(fd, "", t, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW)
                            : utimensat(AT_FDCWD, disk_proc(fd).path, t, 0);
}

/*
 * A request that sets nothing is a chown(2) that names neither owner nor group; or the
 * kernel, which leaves set-id bits to us (FUSE_HANDLE_KILLPRIV_V2, fs/negotiate), is about
 * to write the file for someone. chown is right for both: it sets the time of the change and
 * clears the bits. But a writer need not own the file.
 */
static int as_changer(const struct request *r, const struct disk_ref *ref, int to_set,
                      struct acting *a, struct err *e)
{
    TRY(caller_of(fuse_req_ctx(r->req), &a->caller, e));
    if (!to_set && disk_writers(r->fs, ref->node, 0) > 0)
        a->caller.capabilities |= 1ull << CAP_FOWNER;
    return caller_enter(&a->caller, &a->saved, e);
}

static int change(struct request *r, const struct disk_ref *ref,
                  const struct stat *attr, int to_set, struct err *e)
{
    CLEANUP(as_server) struct acting acting = {0};

    TRY(as_changer(r, ref, to_set, &acting, e));
    if (set_mode(ref->fd, attr, to_set) < 0 || set_owner(ref->fd, attr, to_set) < 0 ||
        set_size(ref->fd, r->has_fi ? &r->fi : NULL, attr, to_set) < 0 ||
        set_times(ref->fd, ref->node, attr, to_set) < 0)
        return err_set(e, errno, "change attributes: %s", strerror(errno));
    return 0;
}

int disk_setattr(struct request *r, const struct stat *attr, int to_set, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref ref = {0};
    int rc = disk_ref(r->fs, r->ino, &ref, e);

    if (rc == 0)
        rc = change(r, &ref, attr, to_set, e);
    if (rc < 0)
        return rc;
    disk_changed(r->fs, ref.node);
    return disk_getattr(r, e);
}

int disk_statfs(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref root = {0};
    int rc = disk_ref(r->fs, FUSE_ROOT_ID, &root, e);
    struct statvfs st;

    if (rc < 0)
        return rc;
    if (statvfs(disk_proc(root.fd).path, &st) < 0)
        return err_set(e, errno, "statfs: %s", strerror(errno));
    fuse_reply_statfs(r->req, &st);
    return 0;
}
