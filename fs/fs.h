/* SPDX-License-Identifier: MIT */
/* fs/fs.h - the root object of a mount, and what every file of this room needs. */
#ifndef UFS_FS_FS_H
#define UFS_FS_FS_H

#define FUSE_USE_VERSION 314
#include <fuse_lowlevel.h>

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "base/base.h"
#include "base/err.h"
#include "fs/counters.h"
#include "fs/early.h"
#include "fs/habit.h"
#include "fs/mount.h"
#include "fs/opened.h"
#include "fs/way.h"
#include "index/formats/scan.h"
#include "lib/reading.h"
#include "remote/store.h"

struct bucket_mount;
struct materialized;
struct disk;
struct edits;
struct queue;
struct nodes;
struct overlay;
struct permits;
struct plans;
struct session;
struct generations;
struct watch;

/*
 * How long the kernel may keep what a mirrored directory shows, and how long we keep our
 * own look at it: together less than the second within which changes must show.
 */
#define MIRROR_SECONDS 0.4
enum { MIRROR_NS = 400000000 };
/* Inside a checkpoint names and attributes never change; a new scan has new nodes. */
#define FROZEN_SECONDS 3600.0
/* A checkpoint counts as unchanged for this long after it was looked at. */
enum { FRESH_NS = 1000000000 };

struct fs {
    struct mount_options options;
    struct reading reading;  /* the source; and of it, for short: */
    struct store *store;     /* its files */
    struct catalog *catalog; /* its index */
    struct scanner *scanner;
    const char *cache_dir;   /* NULL: there is none, nothing is written to disk */
    struct overlay *overlay; /* or NULL */
    int64_t begun_ns; /* the mount's, as time(2): what a store without times shows */

    struct session *owner; /* the server that runs it */
    struct fuse_session *session;
    bool can_expire;         /* the kernel knows FUSE_EXPIRE_ONLY */
    bool can_mix_direct;     /* it drops its pages where direct I/O writes the file */
    atomic_bool warned_link; /* of one in place of weights, which is not followed */

    struct nodes *nodes;
    struct generations *generations;
    struct disk *disk;             /* NULL: mounted for reading only */
    atomic_uint_fast64_t disk_dev; /* the device of the source's root */
    struct edits *edits;           /* with disk */
    struct bucket_mount *bucket;   /* NULL: not for writing, or to a disk */
    struct queue *queue, *fills;
    struct permits *permits;
    struct materialized *materialized; /* NULL: nothing is materialised */
    struct watch *watch;
    struct plans *plans; /* NULL: there is no place for its socket */
    struct opened_list opened;
    struct early_room early;
    struct habits habits;
    struct ways ways;
    struct counters counters;
    struct last_error last_error;
    pthread_key_t buffers; /* one reply buffer a thread */
};

static inline int64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline unsigned fs_views(const struct fs *fs)
{
    return fs->options.views ? fs->options.views : (unsigned)SHOW_ALL;
}

static inline bool fs_writable(const struct fs *fs)
{
    return fs->disk || fs->bucket;
}

/* All but the session: opened after the fork, since neither sqlite nor threads survive one. */
int fs_open(const struct mount_options *options, struct fs **out, struct err *e);
void fs_close(struct fs *fs);
void fs_closep(struct fs **fs);

#endif
