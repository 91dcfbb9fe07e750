/* SPDX-License-Identifier: MIT */
/* remote/access.h - what somebody else may do with local files, judged by their modes. */
#ifndef UFS_REMOTE_ACCESS_H
#define UFS_REMOTE_ACCESS_H

#include <sys/stat.h>

#include "base/base.h"

struct anchor;

struct access_by {
    uid_t uid;
    gid_t gid;
    const gid_t *groups; /* supplementary */
    size_t ngroups;
};

/*
 * May they have `bit` (4: read, 1: search) of an open file? As the kernel judges by mode and
 * groups. Where there is an ACL only the owner's bits are believed: what an ACL denies is
 * never granted here, and what it alone grants is not either.
 */
bool access_granted(int fd, const struct stat *st, const struct access_by *by,
                    unsigned bit);

/*
 * Goes the way of `path` from the anchor on as they would, links included: each directory on
 * it has to let them search it. With `leave` links may lead out of the anchor. Returns a
 * descriptor (O_PATH) of what it leads to, or -EACCES, -EXDEV, -ELOOP, -ENOENT, ...
 */
int access_walk(const struct anchor *a, const char *path, bool leave,
                const struct access_by *by);

#endif
