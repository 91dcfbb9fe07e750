/* SPDX-License-Identifier: MIT */
/* fs/report.h - the generated files in .unshard. */
#ifndef UFS_FS_REPORT_H
#define UFS_FS_REPORT_H

#include "fs/fs.h"
#include "fs/generation.h"

/* checkpoint.json or objects.json of a generation, made the first time. A reference. */
int report_get(struct fs *fs, struct generation *gen, enum inside kind,
               struct source **out, struct err *e);

/* Is it there, so that its size costs nothing? */
bool report_made(struct generation *gen, enum inside kind);

/* The text of counters.json or last-error as of now. */
int report_text(struct fs *fs, enum inside kind, struct buf *out);

int report_size(struct fs *fs, struct generation *gen, enum inside kind, uint64_t *size,
                struct err *e);

#endif
