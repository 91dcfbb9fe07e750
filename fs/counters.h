/* SPDX-License-Identifier: MIT */
/* fs/counters.h - what a mount did so far, and its last error. */
#ifndef UFS_FS_COUNTERS_H
#define UFS_FS_COUNTERS_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"
#include "base/buf.h"

struct block_cache_counts;
struct err;

enum counter {
    COUNT_REQUESTS,
    COUNT_LOOKUPS,
    COUNT_LISTED, /* names that were looked at in directories */
    COUNT_OPENS,
    COUNT_OPENS_PASSTHROUGH, /* of those, read by the kernel itself */
    COUNT_READS,
    COUNT_BYTES_READ,
    COUNT_REPLIES_MAPPED, /* sent straight from mapped shards */
    COUNT_REPLIES_COPIED,
    COUNT_REPLIES_EARLY, /* of those: gathered before they were asked for */
    COUNT_GENERATIONS,   /* checkpoints (and new versions of them) taken up */
    COUNT_INVALIDATED,   /* of those, replaced by a newer one or gone */
    COUNT_MATERIALIZED,  /* files of which all is in a copy that the kernel reads */
    COUNT_BYTES_MATERIALIZED,
    COUNT_ERRORS,
    COUNTERS
};

/* What a state below is while the thing works; else "off: " and the reason. */
extern const char counters_on[];

struct counters {
    _Atomic(const char *) passthrough; /* NULL: the mount is not there yet */
    _Atomic(const char *) materialize; /* NULL: it was not asked for, or the same */
    atomic_uint_fast64_t materialized_bytes; /* of the disk, set aside for copies now */
    atomic_uint_fast64_t value[COUNTERS];
    atomic_uint_fast64_t known_bytes; /* of the checkpoints taken up now */
    /* Of the checkpoint whose tensors are being written; a total of 0: none is. */
    atomic_uint_fast64_t saving_done, saving_total;
};

static inline void counter_add(struct counters *c, enum counter which, uint64_t n)
{
    atomic_fetch_add_explicit(&c->value[which], n, memory_order_relaxed);
}

/* What came from a server. */
struct counters_remote {
    const struct block_cache_counts *blocks;
    uint64_t retries;
};

/* One JSON object with a newline behind it. `remote` is NULL for a local source. */
int counters_json(const struct counters *c, const struct counters_remote *remote,
                  struct buf *out);

/* One line to the log. */
void counters_log(const struct counters *c);

/* The last error that a reader met, and how often the log was spared a repetition. */
struct last_error {
    pthread_mutex_t lock;
    char text[1400]; /* guarded by lock; with a newline, empty: none yet */
    int64_t logged_s;
    uint64_t repeated;
};

void last_error_init(struct last_error *l);
void last_error_destroy(struct last_error *l);

/* Keeps it, and logs it unless the same line was logged within the last seconds. */
void last_error_report(struct last_error *l, const struct err *e);

int last_error_text(struct last_error *l, struct buf *out);

#endif
