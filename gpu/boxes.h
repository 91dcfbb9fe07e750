/* SPDX-License-Identifier: MIT */
/* gpu/boxes.h - copies of a plan as boxes for the kernel's body, cut to slots. */
#ifndef UFS_GPU_BOXES_H
#define UFS_GPU_BOXES_H

#include "base/base.h"
#include "gpu/core.h"

struct err;
struct gather;
struct gather_copy;
struct source;

/* A box whose `src` counts from byte 0 of a source until its bytes are in a slot. */
struct work {
    struct core_box box;
    struct source *source; /* borrowed from its gather */
};

struct work_list {
    struct work *work; /* malloc */
    size_t count, cap;
};

void work_list_release(struct work_list *l);

/* Where results go: `scale` is the address of a cast_scale there, 0 when there is none. */
struct work_target {
    const struct gather *gather;
    uint64_t address, scale;
};

/*
 * Appends copy number i of a gather as boxes whose bytes, packed, fit in `room` bytes
 * each (box_footprint; room is 64 KiB at least). Dimensions over CORE_DIMS are unrolled.
 */
int work_add(struct work_list *l, const struct work_target *t, size_t i, uint64_t room,
             struct err *e);

/*
 * How the bytes of a box lie in its source: lines of `length` bytes with gaps between
 * that are not worth reading. `sparse` has a bit for each dimension that goes from line to
 * line; none: one line.
 */
struct box_lines {
    uint64_t first;  /* byte of the source where line 0 starts */
    uint64_t length; /* of a line */
    uint64_t count;
    uint32_t sparse;
};

struct box_lines box_lines_of(const struct core_box *b);

/* Bytes from line to line when packed: the length, on a multiple of CORE_ALIGN. */
#define CORE_ALIGN 16u
uint64_t box_pitch(const struct box_lines *l);

/* Room that the packed lines of a box take at most, wherever its slot begins. */
uint64_t box_footprint(const struct box_lines *l);

/* The byte of the source where line n begins; lines are packed in this order. */
uint64_t box_line(const struct core_box *b, const struct box_lines *l, uint64_t n);

/* The box as it reads its lines packed from address `at` on, line 0 first. */
void box_pack(struct core_box *b, const struct box_lines *l, uint64_t at);

/*
 * Is it plain bytes that lie in one piece on both sides, worth a copy of their own? Then
 * their number, else 0.
 */
uint64_t box_direct(const struct core_box *b);

/* Chooses units, lanes and tiles for the addresses that the box has; numbers its tiles
 * from *tiles on, which is moved behind them. */
void box_finish(struct core_box *b, uint64_t *tiles);

#endif
