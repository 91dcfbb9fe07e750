/* SPDX-License-Identifier: MIT */
/* index/formats/fairscale/fairscale_metadata.h - shard_metadata: what flat parameters are made of. */
#ifndef UFS_INDEX_FORMATS_FAIRSCALE_FAIRSCALE_METADATA_H
#define UFS_INDEX_FORMATS_FAIRSCALE_FAIRSCALE_METADATA_H

#include "index/formats/pickle/pickle.h"
#include "index/shape.h"

struct arena;
struct err;

/* One parameter of the model, a range of a flat one. */
struct flat_member {
    const char *name; /* in full: the path of the FSDP unit before it */
    size_t len;
    uint64_t begin, count; /* elements of the flat parameter */
    uint32_t nd;
    const uint64_t *dim;
    size_t param; /* that it is a range of */
};

/*
 * A parameter as FSDP has it: flat, padded at the end and cut into equal parts, one a rank.
 * The others that are not flattened are cut in the same way.
 */
struct flat_param {
    const char *key; /* in the rank's model: "decoder.layers.0.flat_param_0" */
    size_t key_len;
    struct flat_member *member;
    size_t members;
    uint64_t total;   /* elements of all members */
    uint64_t padding; /* elements at the end of this rank's part that are none */
    bool own; /* no_broadcast_optim_state: each rank has a parameter of its own */
    uint64_t layout; /* hash of everything but the padding: equal on all ranks */
};

struct flat_alias {
    const char *stored, *alias;
    size_t stored_len, alias_len;
};

struct flat_name {
    const char *name;
    size_t len;
};

struct fairscale_metadata {
    struct flat_param *param; /* in the order in which the optimizer numbers them */
    size_t params;
    struct flat_alias *alias; /* parameters that have two names */
    size_t aliases;
    struct flat_name *buffer;
    size_t buffers;
    const struct flat_member **by_name; /* all members */
    size_t members;
};

/*
 * Reads what fairscale's FullyShardedDataParallel.local_metadata_dict() gave (0.4.6 and
 * later). All is in the arena and stands without the graph. -EBADMSG.
 */
int fairscale_metadata_read(const struct pv *v, struct arena *a,
                            struct fairscale_metadata *out, struct err *e);

const struct flat_member *fairscale_member(const struct fairscale_metadata *m,
                                           const char *name, size_t len);

#endif
