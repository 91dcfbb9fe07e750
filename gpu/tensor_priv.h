/* SPDX-License-Identifier: MIT */
/* gpu/tensor_priv.h - an open tensor, and one window of it, as the files of it see them. */
#ifndef UFS_GPU_TENSOR_PRIV_H
#define UFS_GPU_TENSOR_PRIV_H

#include <pthread.h>
#include <stdatomic.h>

#include "gpu/tensor.h"

struct arena;
struct source;

/* A chunk once it is known where it lies. */
struct resolved {
    struct source *src; /* owned; NULL: got anew for each window */
    uint64_t size;      /* of the source */
    struct plan_op op;
};

struct shard {
    uint32_t number;
    struct source *src; /* NULL: opened when it is needed */
    const char *path;   /* then: as it was scanned */
    struct file_id id;
};

struct tensor {
    struct reader_env env;
    int64_t checkpoint;
    atomic_uint refs;
    struct arena *arena; /* guarded by lock once the tensor is open */
    pthread_mutex_t lock;
    struct tensor_info info;
    struct shape units;
    unsigned unit;
    const struct plan *plan;
    bool decodes;         /* some chunk's place is a decoded copy */
    struct shard *shards; /* sorted by number */
    size_t nshards;
    bool keeps_shards;                    /* they are few: all are open */
    _Atomic(struct resolved *) *resolved; /* one a chunk of the plan */
    atomic_size_t ahead; /* chunks before this one were decoded ahead of their reader */
    atomic_size_t wanted; /* the first chunk of the window that it wants next */
    atomic_bool ahead_busy;
};

/*
 * The source of chunk i of the plan, with a reference. Where in it the chunk lies is in
 * t->resolved[i] from then on. Any thread.
 */
int tensor_resolve(struct tensor *t, size_t i, struct source **out, struct err *e);

/* Is the place of chunk i known, and its shard at hand? */
bool tensor_is_placed(const struct tensor *t, size_t i);

/*
 * Where chunk i would lie if its elements stood row by row from the first byte of its piece
 * of the file on, and that file, with a reference. Nothing is read. The loops live in `a`.
 */
int tensor_guess(struct tensor *t, size_t i, struct arena *a, struct plan_op *op,
                 struct source **out, struct err *e);

/*
 * Asks a server for what of a window lies in chunk i, and for what tells where that is, all
 * at once. False: it is known already (or not to be known without decoding).
 */
bool tensor_ask_unplaced(struct tensor *t, size_t i, uint64_t off, uint64_t len);

/* Are the places of chunk i decoded copies? */
bool tensor_decodes(const struct tensor *t, size_t i);

/*
 * The chunks of one window of stored bytes, batch after batch: of some thousand small
 * files or decoded chunks no more than fit are held at once.
 */
struct cut {
    struct tensor *t;
    size_t *chunk; /* all of the window: indices in the plan */
    size_t n, cap;
    size_t first, count; /* the batch: chunk[first], ... */
    struct source **src; /* of the batch, by tag; owned */
    struct run_list runs;
    bool flags;   /* any work on elements of the batch */
    uint64_t end; /* of the window */
    bool done;    /* the bytes of the batch were had */
};

void cut_release(struct cut *c);

/* Finds the chunks of [off, off + len); there is no batch yet. */
int cut_begin(struct cut *c, uint64_t off, uint64_t len, struct err *e);

/* Resolves the next batch: 1; 0: there is none. The runs of it are made by the second. */
int cut_next(struct cut *c, struct err *e);
int cut_runs(struct cut *c, uint64_t off, uint64_t len, struct err *e);

/* Would one batch be all of it? */
bool cut_is_small(const struct cut *c);

/* Are all files of the batch still those that were scanned? */
int cut_check(const struct cut *c, struct err *e);

static inline bool tensor_is_cast(const struct tensor *t)
{
    return t->info.dtype != t->info.stored;
}

#endif
