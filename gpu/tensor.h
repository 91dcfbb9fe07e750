/* SPDX-License-Identifier: MIT */
/* gpu/tensor.h - an open tensor: its plan, its shards, and windows of its bytes. */
#ifndef UFS_GPU_TENSOR_H
#define UFS_GPU_TENSOR_H

#include "base/base.h"
#include "gpu/reader.h"
#include "index/plan.h"

struct tensor;

/*
 * Opens all shards of the tensor and checks that they are the files that were scanned.
 * Errors as reader_open_tensor. One reference is the caller's.
 */
int tensor_open(const struct reader_env *env, int64_t checkpoint, uint32_t ord,
                struct tensor **out, struct err *e);
struct tensor *tensor_get(struct tensor *t);
void tensor_put(struct tensor *t); /* NULL is fine */
void tensor_putp(struct tensor **t);

const struct tensor_info *tensor_info_of(const struct tensor *t);
/* Of the stored elements; of a cast tensor their type is not the one that is shown. */
const struct plan *tensor_plan(const struct tensor *t);
uint64_t tensor_size(const struct tensor *t); /* bytes, as shown */

/* Bytes [off, off + len) of the bare tensor; see reader_read and reader_map. */
int tensor_read(struct tensor *t, uint64_t off, size_t len, void *dst, struct err *e);
int tensor_map(struct tensor *t, uint64_t off, size_t len, struct reader_iov *v,
               struct err *e);
void tensor_will_need(struct tensor *t, uint64_t off, uint64_t len);

/*
 * See reader_gathers and reader_unchanged; both are for a tensor that vouches: whose shards
 * are few, and the places of its chunks in them.
 */
bool tensor_vouches(const struct tensor *t);
bool tensor_gathers(struct tensor *t, uint64_t off, size_t len);
int tensor_unchanged(struct tensor *t, uint64_t off, size_t len, struct err *e);

/*
 * Begins to decode a tensor that is one packed piece, once, without waiting for it. False:
 * it is none.
 */
bool tensor_decode_ahead(struct tensor *t);

/* Where chunk i lies; `path` of its shard is the tensor's. */
int tensor_place(struct tensor *t, size_t i, struct chunk_place *out, const char **path,
                 struct err *e);

/* Chunk i's own checksums, as chunk_codec.verify tells. */
int tensor_verify(struct tensor *t, size_t i, struct chunk_look *look, struct err *e);

/* Chunk i against copies of it in other files, as chunk_codec.compare tells; 0: none. */
int tensor_compare(struct tensor *t, size_t i, struct err *e);

/* Adds `len` bytes at `p` to the pieces, joining them to the last one when they touch.
 * False when there is no room. `src` (or NULL) is kept by the pieces. */
bool iov_add(struct reader_iov *v, const void *p, size_t len, struct source *src);

#endif
