/* SPDX-License-Identifier: MIT */
/* fs/passthrough.c - files that the kernel reads by itself, behind files of the mount. */
#include "fs/passthrough.h"

#include <errno.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/utsname.h>

#include "base/log.h"

/* Linux 6.9, include/uapi/linux/fuse.h: what Debian 12's headers do not have. */
struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};
#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)

static const char off_rights[] =
    "off: the server has no CAP_SYS_ADMIN in the initial user namespace";
static const char off_kernel[] = "off: the kernel does not offer it (6.9 and later do)";
static const char off_refused[] = "off: the kernel refused it";

/* The capability in our own user namespace. Only the kernel knows whether that counts. */
static bool has_admin(void)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];

    if (syscall(SYS_capget, &head, data) < 0)
        return false;
    return data[CAP_TO_INDEX(CAP_SYS_ADMIN)].effective & CAP_TO_MASK(CAP_SYS_ADMIN);
}

bool passthrough_wanted(const struct fs *fs)
{
    (void)fs;
    return has_admin();
}

static bool kernel_is_old(void)
{
    struct utsname u;
    unsigned major, minor;

    return uname(&u) == 0 && sscanf(u.release, "%u.%u", &major, &minor) == 2 &&
           (major < 6 || (major == 6 && minor < 9));
}

const char *fs_passthrough_lacks(const char *dir)
{
    struct statfs st;

    if (kernel_is_old())
        return "Linux 6.9 or later";
    if (!has_admin())
        return "CAP_SYS_ADMIN";
    if (dir && statfs(dir, &st) == 0 && st.f_type == OVERLAYFS_SUPER_MAGIC)
        return "a cache directory that is not on an overlay";
    return NULL;
}

static int backing_open(const struct fs *fs, int fd)
{
    struct backing_map map = {.fd = fd};
    int id = ioctl(fuse_session_fd(fs->session), BACKING_OPEN, &map);

    return id < 0 ? -errno : id;
}

/* A file of memory lies on no overlay: what is refused is the thing itself. */
static const char *try_it(struct fs *fs)
{
    CLEANUP_FD int fd = memfd_create("unshard-probe", MFD_CLOEXEC);
    int id = fd < 0 ? -errno : backing_open(fs, fd);

    if (id > 0) {
        passthrough_close(fs, id);
        return counters_on;
    }
    return id == -EPERM ? off_rights : off_refused;
}

void passthrough_begin(struct fs *fs, bool offered)
{
    const char *state;

    if (!has_admin())
        state = off_rights;
    else
        state = offered ? try_it(fs) : off_kernel;
    fs->counters.passthrough = state;
    log_msg(LOG_FS, LOG_INFO, "passthrough is %s", state);
}

int passthrough_open(struct fs *fs, int fd)
{
    int id;

    if (fd < 0 || fs->counters.passthrough != counters_on)
        return 0;
    id = backing_open(fs, fd);
    if (id > 0)
        return id;
    log_msg(LOG_FS, LOG_DEBUG, "a file is read by the server: errno %d", -id);
    return 0;
}

void passthrough_close(struct fs *fs, int id)
{
    uint32_t number = (uint32_t)id;

    if (id > 0)
        ioctl(fuse_session_fd(fs->session), BACKING_CLOSE, &number);
}

#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 17)

int passthrough_reply(fuse_req_t req, struct fuse_file_info *fi, int id)
{
    fi->backing_id = id;
    fi->direct_io = fi->keep_cache = 0;
    return fuse_reply_open(req, fi);
}

int passthrough_reply_create(fuse_req_t req, const struct fuse_entry_param *entry,
                             struct fuse_file_info *fi, int id)
{
    fi->backing_id = id;
    return fuse_reply_create(req, entry, fi);
}

#else

/* struct fuse_open_out of protocol 7.40, and its flags. */
struct open_out {
    uint64_t fh;
    uint32_t flags;
    int32_t backing_id;
};
enum { OPEN_NOFLUSH = 1 << 5, OPEN_PASSTHROUGH = 1 << 7 };

static struct open_out open_out(const struct fuse_file_info *fi, int id)
{
    return (struct open_out){.fh = fi->fh,
                             .flags = OPEN_PASSTHROUGH |
                                      (fi->noflush ? (uint32_t)OPEN_NOFLUSH : 0),
                             .backing_id = id};
}

int passthrough_reply(fuse_req_t req, struct fuse_file_info *fi, int id)
{
    const struct open_out out = open_out(fi, id);

    return fuse_reply_buf(req, (const char *)&out, sizeof out);
}

/* struct fuse_entry_out and struct fuse_attr of the protocol. */
struct entry_out {
    uint64_t nodeid, generation, entry_valid, attr_valid;
    uint32_t entry_valid_nsec, attr_valid_nsec;
    uint64_t ino, size, blocks, atime, mtime, ctime;
    uint32_t atimensec, mtimensec, ctimensec, mode, nlink, uid, gid, rdev, blksize,
        flags;
};

int passthrough_reply_create(fuse_req_t req, const struct fuse_entry_param *entry,
                             struct fuse_file_info *fi, int id)
{
    const struct stat *st = &entry->attr;
    struct {
        struct entry_out entry;
        struct open_out open;
    } out = {.entry = {.nodeid = entry->ino,
                       .generation = entry->generation,
                       .ino = st->st_ino,
                       .size = (uint64_t)st->st_size,
                       .blocks = (uint64_t)st->st_blocks,
                       .atime = (uint64_t)st->st_atim.tv_sec,
                       .mtime = (uint64_t)st->st_mtim.tv_sec,
                       .ctime = (uint64_t)st->st_ctim.tv_sec,
                       .atimensec = (uint32_t)st->st_atim.tv_nsec,
                       .mtimensec = (uint32_t)st->st_mtim.tv_nsec,
                       .ctimensec = (uint32_t)st->st_ctim.tv_nsec,
                       .mode = st->st_mode,
                       .nlink = (uint32_t)st->st_nlink,
                       .uid = st->st_uid,
                       .gid = st->st_gid,
                       .rdev = (uint32_t)st->st_rdev,
                       .blksize = (uint32_t)st->st_blksize},
             .open = open_out(fi, id)};

    if (!id)
        return fuse_reply_create(req, entry, fi);
    return fuse_reply_buf(req, (const char *)&out, sizeof out);
}

#endif
