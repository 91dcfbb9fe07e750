/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_rules.h - how NeMo 1's tensor ranks cut a parameter, by name and sizes. */
#ifndef UFS_INDEX_FORMATS_NEMO_RULES_H
#define UFS_INDEX_FORMATS_NEMO_RULES_H

#include "index/formats/megatron/megatron_rules.h"
#include "index/formats/nemo/nemo_config.h"

/*
 * The cut of a parameter of which each of config->tensor ranks has a part of this shape, or
 * MEGATRON_UNKNOWN: neither name nor configuration tell it; MEGATRON_UNLIKE: they do, and
 * the part does not have the size that the configuration tells. `rule` is what Megatron-LM
 * has by the name.
 */
enum megatron_rule nemo_rule(const struct nemo_config *config, const char *name,
                             size_t len, const uint64_t *dim, uint32_t nd,
                             enum megatron_rule rule);

#endif
