/* SPDX-License-Identifier: MIT */
/* gpu/slots.h - which boxes travel together, and reading what they need into a slot. */
#ifndef UFS_GPU_SLOTS_H
#define UFS_GPU_SLOTS_H

#include "base/base.h"
#include "gpu/boxes.h"

struct err;

/*
 * Boxes that read the same bytes of a source, or bytes near to each other: all of them
 * in one line, or one box with lines of its own. `at` is where line 0 goes in the slot; it
 * is chosen so that the first box has its bytes aligned as its result is.
 */
struct slot_part {
    size_t first, count; /* in the work list */
    struct box_lines lines;
    uint64_t at;
};

/* What one slot holds at a time. */
struct slot_batch {
    size_t first, count; /* parts */
    size_t boxes;
    uint64_t used;   /* bytes of the slot */
    uint64_t result; /* bytes of results that come of it */
    bool direct;     /* each box is a copy to its place (box_direct) */
};

struct slot_plan {
    struct slot_part *part; /* malloc */
    struct slot_batch *batch;
    size_t parts, batches;
};

void slot_plan_release(struct slot_plan *p);

/*
 * Sorts the boxes by source and place and packs them into batches of at most `room` bytes
 * and `boxes` boxes. Slots begin at multiples of CORE_ALIGN.
 */
int slot_plan_make(struct work_list *w, uint64_t room, size_t boxes,
                   struct slot_plan *out, struct err *e);

/* Memory that slot_read() needs beside the slot. */
enum { SLOT_BOUNCE = 256 << 10 };

/* Fills the slot; adds to *read what was read of sources. */
int slot_read(const struct work_list *w, const struct slot_plan *p, size_t batch,
              unsigned char *slot, unsigned char *bounce, uint64_t *read,
              struct err *e);

#endif
