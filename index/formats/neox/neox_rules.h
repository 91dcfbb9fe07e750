/* SPDX-License-Identifier: MIT */
/* index/formats/neox/neox_rules.h - how GPT-NeoX and Megatron-DeepSpeed cut their tensors. */
#ifndef UFS_INDEX_FORMATS_NEOX_NEOX_RULES_H
#define UFS_INDEX_FORMATS_NEOX_NEOX_RULES_H

#include "index/formats/ranks/rank_merge.h"

struct rank_file;

/* Whose names they are: the biases of row-parallel layers mean different things. */
enum neox_dialect {
    NEOX_NEITHER,
    NEOX_GPT_NEOX, /* "attention.dense": summands */
    NEOX_MEGATRON, /* "self_attention.dense", BLOOM: copies */
};

/* By the name of one tensor; most tell nothing. */
enum neox_dialect neox_dialect(const char *name, size_t len);

/*
 * How the n ranks have cut the tensor `x` of one of them. Whether an up projection is gated
 * is told by how wide the down projection beside it is; where nothing tells a cut:
 * RANK_UNKNOWN.
 */
enum rank_rule neox_rule(const struct rank_tensor *x, const struct rank_file *file,
                         uint32_t n, enum neox_dialect dialect);

/* "layer_02-model_01-model_states.pt"; `digits` of the layer's number stand at byte 6. */
bool neox_layer_name(const char *name, uint32_t *layer, uint32_t *rank, int *digits);

/* "mp_rank_01_model_states.pt" */
bool neox_rank_name(const char *name, uint32_t *rank);

#endif
