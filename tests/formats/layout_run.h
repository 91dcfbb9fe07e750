/* SPDX-License-Identifier: MIT */
/* tests/formats/layout_run.h - runs a layout over given tensors: short, slow, and right. */
#ifndef UFS_TESTS_FORMATS_LAYOUT_RUN_H
#define UFS_TESTS_FORMATS_LAYOUT_RUN_H

#include "base/buf.h"
#include "index/layout.h"
#include "made.h"

/*
 * Another opinion on what save/ writes: every file is put together in memory, boxes
 * element by element, checksums at the end. bytes[i] are all of tensor i of the input.
 * The files are those of `to`; the test fails when the layout makes no sense.
 */
void layout_run(const struct layout *l, const struct layout_input *in,
                const struct buf *bytes, const struct made *to);

/* The file's bytes alone (encoded where it says so). */
void layout_run_file(const struct layout_file_info *f, const struct layout_input *in,
                     const struct buf *bytes, struct buf *out);

#endif
