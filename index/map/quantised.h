/* SPDX-License-Identifier: MIT */
/* index/map/quantised.h - tells from names, types and config.json that weights are quantised. */
#ifndef UFS_INDEX_MAP_QUANTISED_H
#define UFS_INDEX_MAP_QUANTISED_H

#include "base/keyset.h"
#include "index/sink.h"

struct json;

/*
 * What was seen of a checkpoint. `struct quantised q = {0};` is empty. Codes are known by
 * a name that only a quantising library gives, by a type that only codes have, or by a
 * tensor of scales beside them.
 */
struct quantised {
    struct keyset codes, scales; /* names of modules that have such tensors */
    char found[160];             /* the first evidence; "": none */
};

/* Looks at one tensor of the model. -ENOMEM. */
int quantised_note(struct quantised *q, const struct sink_taken *t);

/* Looks at the model's own config.json. */
void quantised_note_config(struct quantised *q, const struct json *config);

void quantised_release(struct quantised *q);

#endif
