/* SPDX-License-Identifier: MIT */
/* gpu/fetch.h - makes the source bytes of runs addressable: mapped, or read in spans. */
#ifndef UFS_GPU_FETCH_H
#define UFS_GPU_FETCH_H

#include "base/base.h"
#include "index/plan.h"

struct err;
struct pool;
struct source;

/* Which source the runs of a tag read from. */
struct fetch_sources {
    struct source *const *src; /* by tag */
    size_t count;
    /* Each byte is wanted once: pages of files are not mapped for it, but read. */
    bool once;
};

/*
 * Fills window[0..size) with what the runs say. Resident ranges of sources that map are
 * copied from the mapping under the SIGBUS guard; others are read, joined to few spans,
 * in parallel on the pool (NULL: one after the other), long runs straight into the window.
 * Where nobody guards (guard_install), all of it is read; with `once` what lies in files is,
 * on the calling thread: its caller has windows of others on the pool.
 */
int fetch_window(const struct run_list *runs, const struct fetch_sources *sources,
                 struct pool *pool, void *window, size_t size, struct err *e);

/* Is every byte of the runs in a mapping that is resident now? */
bool fetch_all_mapped(const struct run_list *runs, const struct fetch_sources *sources);

/* Asks the sources to start reading what the runs need. */
void fetch_will_need(const struct run_list *runs, const struct fetch_sources *sources);

#endif
