/* SPDX-License-Identifier: MIT */
/* fs/stage_room.c - how many bytes of the disk a mount may stage (stage_size=), and are there. */
#include "fs/stage_room.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "fs/stage.h"

static uint64_t left(const struct fs *fs)
{
    uint64_t used = fs->staged_bytes, limit = fs->options.stage_size;

    return used < limit ? limit - used : 0;
}

int stage_room_take(struct fs *fs, struct staged *n, uint64_t size, struct err *e)
{
    if (size <= n->room)
        return 0;
    if (fs->options.stage_size && size - n->room > left(fs)) {
        err_set(e, EDQUOT,
                "%s: %" PRIu64 " bytes: the mount may stage %" PRIu64
                " in all, and has %" PRIuFAST64,
                n->name, size, fs->options.stage_size, fs->staged_bytes);
        return err_hint(e, "publish what is there first (sync DIR), or "
                           "mount with a larger stage_size=");
    }
    fs->staged_bytes += size - n->room;
    n->room = size;
    return 0;
}

void stage_room_give(struct fs *fs, struct staged *n, uint64_t size)
{
    if (size >= n->room)
        return;
    fs->staged_bytes -= n->room - size;
    n->room = size;
}

/* False: these bytes are more than all that is free, and what the file has. */
static bool may_have(int fd, uint64_t len)
{
    struct statvfs disk;
    struct stat st;
    uint64_t has, blocks;

    if (fstat(fd, &st) < 0 || fstatvfs(fd, &disk) < 0 || disk.f_blocks == 0)
        return true;
    has = (uint64_t)st.st_blocks * 512;
    blocks = geteuid() == 0 ? disk.f_bfree : disk.f_bavail;
    return len <= has || (len - has) / disk.f_frsize <= blocks;
}

int stage_room_reserve(int fd, int flags, uint64_t off, uint64_t len)
{
    bool may = may_have(fd, len);

    /* A disk that reserves nothing may have room for more than it says (it compresses). */
    if (fallocate(fd, may ? flags : flags | FALLOC_FL_KEEP_SIZE, (off_t)off,
                  may ? (off_t)len : 1) < 0)
        return errno;
    return may ? 0 : ENOSPC;
}

void stage_room_left(const struct fs *fs, struct statvfs *st)
{
    fsblkcnt_t blocks = (fsblkcnt_t)(left(fs) / st->f_frsize);

    if (!fs->options.stage_size)
        return;
    st->f_bavail = MIN(st->f_bavail, blocks);
    st->f_bfree = MIN(st->f_bfree, blocks);
}
