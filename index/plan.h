/* SPDX-License-Identifier: MIT */
/* index/plan.h - the copy program that turns pieces of shards into one full tensor. */
#ifndef UFS_INDEX_PLAN_H
#define UFS_INDEX_PLAN_H

#include "base/base.h"
#include "index/chunk.h"
#include "index/chunk_list.h"
#include "index/shape.h"

struct arena;
struct err;
struct plan;
struct plan_builder;

/*
 * A plan is a set of chunks (boxes of the tensor), complete and without overlap. Where the
 * bytes of a chunk lie may be known only when it is first needed (chunk_codec); then it
 * is lowered to a plan_op, and windows of ops are cut to runs, which executors copy.
 */

/* Starts a plan of a tensor of this shape in units of `unit` bytes. Memory is in `a`. */
int plan_begin(struct arena *a, const struct shape *units, unsigned unit,
               struct plan_builder **out, struct err *e);

/* Adds a chunk; all of it is copied into `a`. Bounds are checked here: -EBADMSG. */
int plan_add(struct plan_builder *b, const struct chunk *c, struct err *e);

/* Adds n chunks that live in `a` already, as chunks_unpack gives them: no copy is made. */
int plan_take(struct plan_builder *b, const struct chunk *c, size_t n, struct err *e);

/*
 * A plan of many chunks that stay packed (index/chunk_list.h), in some 30 bytes a
 * chunk: plan_packer_add() is the chunk_list_fn of the list, plan_packer_finish() takes
 * the list. Its chunks are the boxes of a grid, in order: then one look at each proves
 * that every element is covered exactly once. add returns 1 at the first chunk that is
 * of no grid, finish 0 where some lack, and there is no such plan; else finish returns
 * 1.
 */
enum { PLAN_PACKED_MIN = 1024 }; /* with fewer chunks it saves nothing */
struct plan_packer;
int plan_packer_new(struct arena *a, const struct shape *units, unsigned unit,
                    struct plan_packer **out, struct err *e);
void plan_packer_freep(struct plan_packer **k);
int plan_packer_add(void *packer, const struct chunk *c, size_t i, size_t n,
                    struct err *e);
int plan_packer_finish(struct plan_packer *k, const struct chunk_list *list,
                       const struct plan **out, struct err *e);

/*
 * Checks that every element is covered exactly once, sorts and freezes. Empty chunks are
 * left out. Work is n log n for boxes that a straight cut can separate, and within a
 * fixed budget for others. A frozen plan never changes, readers share it without a lock.
 * -EBADMSG names the first hole or overlap by its indices: the checkpoint is damaged.
 */
int plan_finish(struct plan_builder *b, const struct plan **out, struct err *e);

uint64_t plan_size(const struct plan *p);             /* bytes of the tensor */
unsigned plan_unit(const struct plan *p);             /* bytes of a unit */
const struct shape *plan_shape(const struct plan *p); /* in units */
size_t plan_chunks(const struct plan *p);

/*
 * Chunk i, in order of dst. Of a plan whose chunks stay packed it lies in `room` (zero
 * at first) until that is used again; of others it lives as long as the plan, and the
 * room may be NULL.
 */
const struct chunk *plan_chunk(const struct plan *p, size_t i, struct chunk_room *room);

/*
 * Calls fn(user, i) for each chunk that holds any of the bytes [off, off + len) of the
 * tensor, in order; stops at and returns the first non-zero value. Costs a binary search
 * and a look at few boxes beside those of these chunks, however the tensor is cut: the
 * others are passed over in groups (of columns as of rows or tiles).
 */
int plan_touched(const struct plan *p, uint64_t off, uint64_t len,
                 int (*fn)(void *user, size_t i), void *user);

/*
 * Copy `run` bytes from byte `src` of the source to byte `dst` of the tensor, once for
 * each step of the nested loops, outermost first. Dimensions that are contiguous on both
 * sides are merged; destination steps fall from loop to loop.
 */
struct plan_loop {
    uint64_t count;
    int64_t src_step;
    uint64_t dst_step;
};

struct plan_op {
    uint64_t src, dst, run;
    uint32_t nloops;
    uint8_t flags;     /* enum chunk_flags */
    uint8_t component; /* bytes of a component, for flags */
    const struct plan_loop *loop;
};

/* Lowers a chunk of the plan, whose bytes are at `place`; the loops live in `a`. */
int plan_lower(const struct plan *p, const struct chunk *c,
               const struct chunk_place *place, unsigned component, struct arena *a,
               struct plan_op *out, struct err *e);

/*
 * `count` copies of `len` bytes: the k-th from byte src + k * src_step of the source to
 * byte dst + k * dst_step of the window.
 */
struct plan_run {
    uint64_t src, dst, len;
    uint64_t count;
    int64_t src_step;
    uint64_t dst_step;
    uint32_t tag; /* the caller's: which source */
    uint8_t flags, component;
};

struct run_list {
    struct plan_run *run; /* malloc */
    size_t count, cap;
};

void run_list_release(struct run_list *l);

/*
 * Appends the runs of `op` that write bytes [off, off + len) of the tensor; dst becomes
 * relative to off. Runs with flags start and end on component boundaries as far as the
 * window allows (a window may cut a component: then whole components are fetched by
 * the caller widening the window, see plan_widen).
 */
int plan_op_cut(const struct plan_op *op, uint64_t off, uint64_t len, uint32_t tag,
                struct run_list *out, struct err *e);

/* Widens a window to unit boundaries of the tensor. */
void plan_widen(const struct plan *p, uint64_t *off, uint64_t *len);

#endif
