/* SPDX-License-Identifier: MIT */
/* gpu/gather.h - a tensor, or a part of one, as pieces to be gathered by an executor. */
#ifndef UFS_GPU_GATHER_H
#define UFS_GPU_GATHER_H

#include "base/base.h"
#include "index/dtype.h"
#include "index/shape.h"

struct err;
struct gather;
struct pool;
struct source;
struct tensor;

/*
 * A box of the tensor that lies in one source: the element (i0, i1, ...) of it at byte
 * base + sum(i[k] * step[k]). `start`, `size` and `step` have one entry a dimension of
 * the tensor in storage units (shape_units); step is in bytes and may be negative or 0.
 */
struct gather_piece {
    const uint64_t *start, *size;
    const int64_t *step;
    uint64_t base;
    uint32_t source; /* index in gather_request.source */
    uint8_t flags;   /* enum chunk_flags */
};

/*
 * Factors of blocks of elements: `value` is the row-major grid of ceil(dim[k] / block[k])
 * entries a dimension of the whole tensor. block[k] 0: one block for all of the
 * dimension. So a factor for the tensor has blocks {0, 0}, one a row {1, 0}, one a tile
 * {128, 128}. An element is multiplied in F32, before it is rounded to its new type.
 */
struct gather_scale {
    const float *value;
    size_t count;          /* must be that of the grid: -EINVAL */
    const uint64_t *block; /* one a dimension */
};

/*
 * What is wanted. Everything is borrowed for the call of gather_new(). The part that is
 * wanted is a box as well, [start, start + size), in storage units; NULL: all.
 */
struct gather_request {
    const struct shape *shape; /* of the whole tensor, in elements */
    enum dtype stored, dtype;  /* as it lies there; as it is wanted (cast_possible) */
    const struct gather_piece *piece;
    size_t pieces;
    struct source *const *source; /* NULL where nothing of it is wanted */
    size_t sources;
    const uint64_t *start, *size;
    const struct gather_scale *scale; /* NULL: none */
};

/*
 * Checks all of it before a byte is read, whoever made it: each piece within its source
 * and the tensor, the part covered exactly once (-EBADMSG names the first hole or
 * overlap), the cast possible (-EINVAL). Sources keep a reference until gather_free().
 * The result never changes, any number of threads may run it at once.
 */
int gather_new(const struct gather_request *r, struct gather **out, struct err *e);

/*
 * The same of an open tensor (its whole shape, its own pieces). Where pieces must be
 * decoded, or lie in more files than are kept open, it reads the tensor assembled, window
 * by window, as tensor_read() does. `dtype` DTYPE_NONE: as the tensor is shown.
 */
struct gather_part {
    const uint64_t *start, *size; /* both NULL: all */
    enum dtype dtype;
    const struct gather_scale *scale;
};
int gather_new_tensor(struct tensor *t, const struct gather_part *part,
                      struct gather **out, struct err *e);

void gather_free(struct gather *g); /* NULL is fine */
void gather_freep(struct gather **g);

uint64_t gather_size(const struct gather *g); /* bytes of the result */

/*
 * Told now and then, from one thread at a time, how many bytes of the results are there.
 * Non-zero (or NULL fn: never) stops the work: -ECANCELED.
 */
struct gather_watch {
    int (*fn)(void *user, uint64_t done, uint64_t total);
    void *user;
};

/* One result: a gather and the memory, of gather_size() bytes, that takes it. */
struct gather_job {
    const struct gather *gather;
    uint64_t address; /* of the host, or of a device */
};

/*
 * The executor of the CPU, window by window, side by side on the pool (NULL: one after the
 * other). Results are row-major and little-endian. Installs no signal handler: where the
 * process has called guard_install(), mapped shards are used; else they are read. On an
 * error the memory holds anything.
 */
int gather_run_host(const struct gather_job *job, size_t n, struct pool *pool,
                    const struct gather_watch *watch, struct err *e);

#endif
