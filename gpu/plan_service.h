/* SPDX-License-Identifier: MIT */
/* gpu/plan_service.h - what clients and the server of a mount say to each other. */
#ifndef UFS_GPU_PLAN_SERVICE_H
#define UFS_GPU_PLAN_SERVICE_H

/*
 * A stream socket of the Unix domain, one question a connection. All numbers are
 * little-endian.
 *
 *   question  "UFSASK1" and a NUL; i64 checkpoint, u32 tensor (as the extended attribute
 *             user.unshard.plan, "unix:SOCKET CHECKPOINT.TENSOR", tells them), u32 0
 *   answer    u32 errno (0: none), u32 0, u64 bytes that follow: the plan as
 *             gpu/plan_wire.h has it, or the words of the error
 *
 * The server answers processes of its own user, and of root, and no other.
 */
#define PLAN_ASK_MAGIC "UFSASK1"

enum { PLAN_ASK_BYTES = 24, PLAN_REPLY_BYTES = 16 };

#endif
