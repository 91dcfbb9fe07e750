/* SPDX-License-Identifier: MIT */
/* fs/caller.h - acting on the source as the process that sent a request. */
#ifndef UFS_FS_CALLER_H
#define UFS_FS_CALLER_H

#include <sys/types.h>

#include "base/base.h"

struct err;
struct fuse_ctx;

/* Who asks. Zero is nobody yet, for caller_release(). */
struct caller {
    uid_t uid;
    gid_t gid;
    bool is_other;   /* what it may do with files is not what the server may do */
    bool acts;       /* and the server can act as the caller: it is root */
    bool has_groups; /* else they cannot be told: only uid and gid count */
    size_t ngroups;
    gid_t *groups;
    uint64_t capabilities; /* of root, in files: what a container left it. Else 0 */
};

/*
 * Reads who asks: supplementary groups from /proc, as long as that thread still is the same
 * user (the pid of a request is a thread's; 0 is one of another pid namespace). A server that
 * is not root acts as itself whoever asks: what others may do it has to judge (fs/permit.h).
 */
int caller_of(const struct fuse_ctx *ctx, struct caller *out, struct err *e);
void caller_release(struct caller *c);

/* What a thread was before caller_enter(). */
struct caller_saved {
    bool entered;
    uid_t uid;
    gid_t gid;
    int ngroups;
    gid_t *groups;
    uint64_t effective;
};

/*
 * From here to caller_leave() the kernel judges what this thread does with files, ACLs
 * included, as if the caller did it, and what it makes is the caller's. Only of this thread:
 * what is handed to others is done by them as the server. It does nothing where !acts.
 * Between the two no backing file can be registered, no file of ours (cache, index, socket)
 * be reached, and no second caller entered. Also after an error `saved` may be left.
 *
 * The umask is the process's: whoever makes files for callers has it at 0.
 */
int caller_enter(const struct caller *c, struct caller_saved *saved, struct err *e);

/*
 * The thread is the server again: for CLEANUP, too. The process is aborted where that fails,
 * rather than that others are served with the wrong rights.
 */
void caller_leave(struct caller_saved *saved);

#endif
