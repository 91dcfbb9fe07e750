/* SPDX-License-Identifier: MIT */
/* remote/archives.h - a store in which tar archives can also be used as directories. */
#ifndef UFS_REMOTE_ARCHIVES_H
#define UFS_REMOTE_ARCHIVES_H

#include "base/base.h"

struct err;
struct store;

/* Is this the name of a file that archives_over() looks into: *.nemo? */
bool archive_is_named(const char *name);

/*
 * Puts a store over another one, which it owns from now on (also on failure). All is as
 * below, but for regular files called *.nemo that are tar archives, plain or packed by
 * gzip: they can also be listed, and paths may go on behind their names. stat() says of
 * them what they are, files.
 *
 * Members have the archive's identity, with an inode number and a size of their own, and
 * its rights. Links and devices in archives are ENTRY_OTHER. A plain archive's members
 * are windows onto it; those of a packed one are inflated from near where they are read
 * (remote/gunzip.h), for which the whole of it is read once, when it is first looked into.
 */
int archives_over(struct store *inner, struct store **out, struct err *e);

/* What a scan should tell of an archive that can be listed. */
struct archive_oddities {
    bool packed;    /* by gzip */
    bool unended;   /* without the empty block at its end: it may be cut off */
    size_t doubles; /* members that were there more than once: the last ones count */
};

/* -ENOENT, -EBADMSG, ... when it cannot be listed; all zero for a store without archives. */
int archives_oddities(struct store *s, const char *path, struct archive_oddities *out,
                      struct err *e);

#endif
