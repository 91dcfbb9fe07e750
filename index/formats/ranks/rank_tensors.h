/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/rank_tensors.h - the tensors that the file of one rank holds, by name. */
#ifndef UFS_INDEX_FORMATS_RANKS_RANK_TENSORS_H
#define UFS_INDEX_FORMATS_RANKS_RANK_TENSORS_H

#include "index/formats/torch/torch_zip.h"

struct arena;
struct err;

/* A tensor of a torch.save file, in as few bytes as it takes: a rank may have 100,000. */
struct rank_tensor {
    const char *name; /* path within the object that was looked through */
    size_t len;
    enum dtype dtype;
    uint8_t flags;
    uint32_t nd, crc;
    uint64_t data, data_len, first, packed;
    const char *param; /* of a deflated storage: what its codec has to know */
    uint64_t *dim;
    int64_t *stride;
    const char *why; /* NULL, or why it cannot be read */
};

struct rank_tensors {
    struct rank_tensor *tensor; /* malloc; by name */
    size_t count;
};

/*
 * All tensors in the value `v` of a graph. Names and shapes are in the arena and stand
 * without the graph. -EBADMSG when two of them have one name, or one is nested too deep.
 */
int rank_tensors_collect(struct torch_zip *zip, const struct pv *v, struct arena *a,
                         struct rank_tensors *out, struct err *e);
void rank_tensors_release(struct rank_tensors *t);

const struct rank_tensor *rank_tensors_find(const struct rank_tensors *t,
                                            const char *name, size_t len);

/* As the rest of the code wants it. */
void rank_tensor_open(const struct rank_tensor *x, struct torch_tensor *out);

/* All of it as a chunk of file `number`, without a box. It borrows from the tensor. */
void rank_tensor_chunk(const struct rank_tensor *x, uint32_t number, struct chunk *out);

#endif
