/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_rules.h - what a parameter's name tells in Megatron-LM's rank files. */
#ifndef UFS_INDEX_FORMATS_MEGATRON_RULES_H
#define UFS_INDEX_FORMATS_MEGATRON_RULES_H

#include "base/base.h"

/* How tensor-parallel ranks have cut a parameter. */
enum megatron_rule {
    MEGATRON_UNKNOWN,
    MEGATRON_SAME,    /* every rank has all of it */
    MEGATRON_ROWS,    /* dimension 0 */
    MEGATRON_QKV,     /* dimension 0; before version 2.0 rows had another order */
    MEGATRON_KV,      /* the same, of cross attention */
    MEGATRON_FC1,     /* dimension 0; where it is gated each rank has [w; v] */
    MEGATRON_HALVES,  /* dimension 0; each rank has [a; b], the whole is [A; B] */
    MEGATRON_THIRDS,  /* the same of three */
    MEGATRON_COLUMNS, /* dimension 1 */
    MEGATRON_BLOCKS,  /* dimension 0; each rank has a part of each of several blocks */
    MEGATRON_UNLIKE,  /* by its name, but it is not as large as it should be */
};

/* A number within a name. */
struct megatron_number {
    size_t at, len; /* its digits; len 0: there is none */
    uint64_t value;
};

struct megatron_name {
    struct megatron_number layer; /* "decoder.layers.3." */
    struct megatron_number
        expert; /* "local_experts.3.", "experts.linear_fc1.weight3" */
    enum megatron_rule rule;
};

void megatron_name(const char *name, size_t len, struct megatron_name *out);

/*
 * Does a name end in `end`, at the beginning of a part of it? Norms and attention have
 * longer names: "input_layernorm", "self_attention".
 */
bool megatron_name_ends(const char *name, size_t len, const char *end);

#endif
