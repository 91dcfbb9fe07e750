/* SPDX-License-Identifier: MIT */
/* cli/verify_copy.h - full copies of sharded tensors, compared with what the shards give. */
#ifndef UFS_CLI_VERIFY_COPY_H
#define UFS_CLI_VERIFY_COPY_H

#include "cli/cli.h"

struct copy_totals {
    uint64_t tensors, compared, other, differ;
};

/*
 * Compares all copies of the checkpoint: small tensors, or with --deep all bytes of all.
 * Calls tell() for each one that differs. A copy in another element type (consolidation
 * can cast) is counted as `other` and not compared. What cannot be read is told as well.
 */
int verify_copies(struct cli *c, struct reading *s, int64_t checkpoint,
                  void (*tell)(void *user, const char *key, size_t key_len,
                               const char *why),
                  void *user, struct copy_totals *out);

#endif
