/* SPDX-License-Identifier: MIT */
/* cli/origin.h - where a tensor comes from, and what of a checkpoint is missing. */
#ifndef UFS_CLI_ORIGIN_H
#define UFS_CLI_ORIGIN_H

#include "base/buf.h"
#include "index/catalog.h"

struct cli;
struct reading;

/* Which file a tensor comes from, and by what rule. `struct cli_origin o = {0};` */
struct cli_origin {
    struct buf file; /* of its first chunk, relative to the source; empty: none */
    struct buf rule;
};
int cli_origin_of(struct cli *c, struct reading *s, const struct checkpoint_info *info,
                  const struct tensor_info *t, struct cli_origin *out);
void cli_origin_release(struct cli_origin *o);

/* "FILE: RULE"; non-zero: no memory. */
int cli_origin_text(const struct cli_origin *o, const struct tensor_info *t,
                    struct buf *out);
/* `, "origin": {...}` to standard output. */
void cli_origin_json(const struct cli_origin *o);

/* How many warnings of a checkpoint tell of something that is lost; the first one's text. */
int cli_origin_losses(struct cli *c, struct reading *s, int64_t checkpoint,
                      uint64_t *count, struct buf *first);

#endif
