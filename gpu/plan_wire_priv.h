/* SPDX-License-Identifier: MIT */
/* gpu/plan_wire_priv.h - sizes that the reader and the writer of plans share. */
#ifndef UFS_GPU_PLAN_WIRE_PRIV_H
#define UFS_GPU_PLAN_WIRE_PRIV_H

#define WIRE_MAGIC "UFSPLAN1"

enum {
    WIRE_NAME = 16,
    WIRE_HEAD = 96,
    WIRE_SOURCE = 24, /* at least */
    WIRE_PIECE = 32,  /* and three rows of numbers */
};

#endif
