/* SPDX-License-Identifier: MIT */
/* fs/materialized.h - whole copies of tensors and views, for the kernel to read by itself. */
#ifndef UFS_FS_MATERIALIZED_H
#define UFS_FS_MATERIALIZED_H

#include "fs/fs.h"
#include "fs/generation.h"

struct materialized;
struct materialized_file;
struct reader;

/*
 * materialize=: unnamed files of the cache directory, gone with the process however it
 * ends. At most so many bytes of the disk are taken as the option says; what nobody has
 * open or mapped goes first, least recently used. NULL stays NULL where it was not asked for.
 */
int materialized_new(struct fs *fs, struct materialized **out, struct err *e);

/* The mount is there: can the kernel read files of that directory? Notes it for the counters. */
void materialized_begin(struct fs *fs);

/* Fills that are under way end soon, with -EINTR. */
void materialized_stop(struct materialized *c);
void materialized_free(struct materialized *c); /* NULL is fine */

/*
 * The copy of a file inside a checkpoint of which `reader` was opened just now, so that
 * its shards are what was scanned. It is made when it is not there: several who ask for
 * one wait for one filler. *out is NULL when the server has to read: there is no room,
 * the file is too small to be worth it, a part of it cannot be read, or somebody may
 * still be writing to the shards: a file has its new times when a write begins, so that
 * a copy could keep half of it.
 *
 * FS_FILL: it has to be made, and `may_fill` is false. -ESTALE: a shard changed
 * meanwhile. -EINTR: who asked gave up; what is filled by then stays for the next one.
 */
struct materialized_of {
    struct generation *gen;
    enum inside kind;
    uint32_t index;
    struct reader *reader;
};
int materialized_get(struct materialized *c, const struct materialized_of *what,
                     bool may_fill, struct materialized_file **out, struct err *e);

/* A file of all its bytes, valid until materialized_put. */
int materialized_fd(const struct materialized_file *copy);
void materialized_put(struct materialized *c,
                      struct materialized_file *copy); /* NULL is fine */

/* The checkpoint changed: nobody opens copies of this scan any more. */
void materialized_forget(struct materialized *c, int64_t checkpoint); /* NULL is fine */

/* Gives back what is forgotten and nobody reads. Takes long for large files. */
void materialized_tidy(struct materialized *c); /* NULL is fine */

#endif
