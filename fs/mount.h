/* SPDX-License-Identifier: MIT */
/* fs/mount.h - mounting a source and unmounting it again: what the command line calls. */
#ifndef UFS_FS_MOUNT_H
#define UFS_FS_MOUNT_H

#include <sys/types.h>

#include "base/base.h"
#include "index/map/mapping.h"
#include "index/view.h"

struct err;

/* The views of a checkpoint that a mount shows. Bits. */
enum mount_show {
    SHOW_TENSORS = 1,
    SHOW_TREE = 2,
    SHOW_RAW = 4,
    SHOW_OPTIMIZER = 8,
    SHOW_MODEL = 16,
    SHOW_ALL = 31
};

/* Zero is the default of every field. Strings are borrowed until fs_mount returns. */
struct mount_options {
    const char *source, *mountpoint;
    bool foreground; /* stay, log to stderr */
    bool debug;      /* libfuse prints every request; implies foreground */
    bool allow_other, follow_symlinks;
    bool memory_index;
    bool has_uid, has_gid, has_refresh;
    uid_t uid;
    gid_t gid;
    mode_t umask;
    const char *cache_dir; /* NULL: cache_dir() of base/fsutil.h */
    /* Bytes of blocks of a remote source, and of decoded pieces; 0: 8 GiB of the latter, and
     * of blocks what the directory was last told. */
    uint64_t cache_size;
    bool no_cache; /* cache_size=0: neither of them on disk */
    /* Bytes of disk for whole copies of what is opened, 0: none; and for how many seconds
     * its shards must have been left alone before. */
    uint64_t materialize;
    unsigned settled;
    unsigned jobs;    /* threads of the pool; 0: one a core */
    unsigned refresh; /* seconds between looks at the source; 0: 0.4 s */
    enum view_prefix prefix;
    unsigned views;                /* enum mount_show; 0: all */
    struct mapping_choice mapping; /* map=, hf=, dtype= */
    bool rw;
    uint64_t stage_size; /* bytes that may be staged at a time; 0: what the disk has */
    const char *save; /* save=: the format of saves (save/save_format.h); NULL: none */
    unsigned gpu;     /* gpu=N: a holder for device N - 1; 0: none */
};

/* "tensors,raw" as bits; -EINVAL names the word that is no view. */
int mount_views_parse(const char *text, unsigned *out, struct err *e);

/* Is this a value of save=? -EINVAL with words. */
int mount_save_check(const char *text, struct err *e);

/*
 * Mounts. In the background (the default) it returns 0 in the calling process once the
 * mount can be used, or an error when it cannot; the server is a child process. In the
 * foreground it returns when the file system was unmounted or a signal ended it.
 */
int fs_mount(const struct mount_options *options, struct err *e);

/*
 * Publishes all complete transactions of MNT. Returns 0 where there is nothing to publish or
 * nobody to ask; -EAGAIN: something is incomplete, and stays staged.
 */
int fs_publish(const char *mountpoint, struct err *e);
/* Bytes written of the checkpoint that is being published; false: none is. */
bool fs_publishing(const char *mountpoint, uint64_t *done, uint64_t *total);

/*
 * Unmounts MNT when it is one of ours and returns when it is gone. -EINVAL: it is no
 * mount of unshardfs; -EBUSY: it is in use.
 */
int fs_umount(const char *mountpoint, struct err *e);

/*
 * What this process and machine lack for the kernel to read files of a mount by itself,
 * in words; NULL: nothing that can be told without a mount. `dir` is for copies.
 */
const char *fs_passthrough_lacks(const char *dir);

/* "3.14.0": the version of libfuse that runs. */
const char *fs_fuse_version(void);

#endif
