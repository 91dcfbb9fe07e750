/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_experts.h - experts whose biases their saver lost, told by names. */
#ifndef UFS_INDEX_FORMATS_DCP_DCP_EXPERTS_H
#define UFS_INDEX_FORMATS_DCP_DCP_EXPERTS_H

#include "base/base.h"

/*
 * How many experts have weights, and how many biases, by the largest numbers in names.
 * Megatron-FSDP gives a rank's weights their numbers in the whole model, but not the biases
 * of grouped experts: those of all expert-parallel ranks are saved under the first one's names.
 */
struct dcp_experts {
    uint64_t weights, biases;
};

void dcp_experts_note(struct dcp_experts *x, const char *key, size_t len);

#endif
