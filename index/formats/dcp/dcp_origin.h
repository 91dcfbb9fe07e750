/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_origin.h - which trainer saved a DCP checkpoint, and when. */
#ifndef UFS_INDEX_FORMATS_DCP_DCP_ORIGIN_H
#define UFS_INDEX_FORMATS_DCP_DCP_ORIGIN_H

#include "base/base.h"

/* As its objects tell; all zero where they do not. */
struct dcp_origin {
    const char *framework; /* static */
    char version[32];      /* of it, or "" */
    bool has_step, has_epoch;
    int64_t step, epoch;
};

/* dcp_how.on_object, with a struct dcp_origin as user: torchtitan, Composer, Megatron-LM. */
void dcp_origin_note(void *user, const char *key, size_t len, const char *json,
                     size_t json_len);

/*
 * dcp_how.role_of: enum role, or -1 where the key's first part tells what it is. Megatron-LM
 * has the states of random numbers, which are tensors, beside model and optimizer.
 */
int dcp_origin_role(const char *key, size_t len);

#endif
