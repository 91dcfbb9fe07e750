/* SPDX-License-Identifier: MIT */
/* remote/resolve.h - where a path with links in it leads below a directory. */
#ifndef UFS_REMOTE_RESOLVE_H
#define UFS_REMOTE_RESOLVE_H

#include "base/base.h"

/* The directory that links must not leave. */
struct anchor {
    int fd;
    char *path; /* absolute, without links */
    char *
        alias; /* NULL, or absolute as its user wrote it: absolute links may say that */
};

/* What the absolute path `text` says behind the anchor's own path; NULL: it leads elsewhere. */
const char *anchor_tail(const struct anchor *a, const char *text);

/*
 * Follows every link of `path` (relative to the anchor) and puts the path without links
 * into dst (size bytes), relative to the anchor, "" for the anchor itself. A link as
 * the last part stays as it is with `keep_last`. The kernel refuses absolute links
 * below a directory; here those whose text begins with the anchor's own path are
 * followed too. -EXDEV, -ELOOP, -ENOENT, -ENAMETOOLONG, ...
 *
 * The tree may change meanwhile: open the result with links refused.
 */
int resolve_below(const struct anchor *a, const char *path, bool keep_last, char *dst,
                  size_t size);

/*
 * The text of a link in directory `from` that leads to `to`: both relative to the same
 * directory and without links. "." where they are the same.
 */
int relative_path(const char *from, const char *to, char *dst, size_t size);

#endif
