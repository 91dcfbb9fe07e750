/* SPDX-License-Identifier: MIT */
/* fs/side.h - files of the source that the mount shows byte for byte. */
#ifndef UFS_FS_SIDE_H
#define UFS_FS_SIDE_H

#include "base/base.h"

struct err;
struct side;
struct source;
struct store;

/*
 * Opens the file that has this identity: -ESTALE when the name went to another one. What
 * is read follows the file as it grows, as through any other path to it (logs are side
 * files too); a name that goes to another file makes no difference to who has it open.
 */
int side_open(struct store *store, const char *path, uint64_t dev, uint64_t inode,
              struct side **out, struct err *e);

/* A source that does not change; takes the reference over. */
int side_open_source(struct source *src, struct side **out, struct err *e);

void side_close(struct side *s); /* NULL is fine */

/* These bytes will be read soon. Any thread. */
void side_will_need(struct side *s, uint64_t off, uint64_t len);

/*
 * The file of the source that it follows, where that is a local one of its own: -1 if not.
 * The descriptor is the side's.
 */
int side_fd(struct side *s);

/* Up to len bytes; *got is less at the end of the file only. Any thread. */
int side_read(struct side *s, uint64_t off, size_t len, void *dst, size_t *got,
              struct err *e);

#endif
