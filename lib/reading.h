/* SPDX-License-Identifier: MIT */
/* lib/reading.h - a source that is open, with everything that reads it. */
#ifndef UFS_LIB_READING_H
#define UFS_LIB_READING_H

#include "base/base.h"
#include "base/buf.h"
#include "base/err.h"
#include "gpu/reader.h"
#include "index/catalog.h"
#include "index/map/mapping.h"

struct arena;
struct block_cache;
struct decoded_cache;
struct open_files;
struct pool;
struct scanner;
struct store;

/* Zero is the default of every field. Strings are borrowed for the call. */
struct reading_options {
    const char *cache_dir; /* NULL: cache_dir() of base/fsutil.h */
    /*
     * A cache directory that was asked for and cannot be used is done without, as any other
     * is: for who has to come up whatever its disk is like.
     */
    bool cache_optional;
    bool index_memory; /* index=memory: the cache directory is not touched */
    bool no_cache;     /* cache_size=0: neither blocks nor decoded pieces on disk */
    uint64_t
        cache_size; /* bytes of each; 0: READING_DECODED, and blocks as they were set */
    bool follow_symlinks;
    unsigned refresh;   /* of a remote source, seconds: struct store_options */
    unsigned jobs;      /* threads; 0: one a core, POOL_REMOTE for a server */
    unsigned keep_open; /* shards that nobody reads now; 0: READING_KEEP_OPEN */
    bool once;          /* struct reader_env */
    struct mapping_choice mapping; /* map=, hf=, dtype=, weights= */
};

#define READING_DECODED ((uint64_t)8 << 30)
enum { READING_KEEP_OPEN = 512 };

/* Made by reading_open(), and not changed until reading_close(). */
struct reading {
    const char *name; /* for words: the store's url, or what its user wrote; borrowed */
    struct store *store;
    struct block_cache *blocks; /* of a remote source, or NULL */
    struct mapping *mapping;    /* or NULL */
    struct catalog *catalog;
    struct pool *pool;
    struct scanner *scanner;
    struct open_files *files;
    struct decoded_cache *decoded;
    struct reader_env env; /* what readers of its tensors are opened with */
    char *cache_dir;       /* absolute; NULL: there is none, the index is in memory */
    bool below;            /* the checkpoint is the only one below a tree */
    struct err why_memory; /* why, where nobody asked for that; code 0: it is not */
};

/*
 * Opens a local path or a URL. A cache directory that cannot be used (no home, a full disk)
 * keeps nobody from reading: the index is then kept in memory. After a failure too *out is
 * to be closed; its store is NULL when the source itself could not be opened.
 */
int reading_open(const char *source, const struct reading_options *options,
                 struct reading *out, struct err *e);

/* Ends all that waits for a server first. Whatever was opened with its parts is closed. */
void reading_close(struct reading *r);

/* Where reading_open() will write, for who gives up all other places before. */
int reading_writes_to(const struct reading_options *options, struct buf *dir);

/*
 * The source's own checkpoint, scanned or from the index; of a tree with one checkpoint, and
 * nothing unfinished beside it, that one. 1: it is none (a tree of some, or nothing that a
 * driver recognises); no words are set then. -EBADMSG: its scan failed.
 */
int reading_checkpoint(struct reading *r, struct arena *a, struct checkpoint_info *out,
                       struct err *e);

/* 1: no one checkpoint stands for it (none, or several); 0: one does. */
int reading_is_tree(struct reading *r, struct err *e);

#endif
