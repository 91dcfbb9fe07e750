/* SPDX-License-Identifier: MIT */
/* tests/kernels/driver/standin.h - what tests may ask the stand-in for a CUDA driver. */
#ifndef UFS_TESTS_STANDIN_H
#define UFS_TESTS_STANDIN_H

/*
 * A libcuda.so.1 of ours: LD_LIBRARY_PATH=build/tests/kernels/driver makes any program
 * find it, device_options.driver names it. Its devices are the processor: memory is the
 * heap's (so that an address sanitizer sees what a kernel does), the kernel is gpu/core.h.
 * What goes into a stream is done as late as a driver may do it, when somebody waits: a
 * slot that is used again too early gives wrong bytes here every time. A pinned buffer
 * is read then, not when the copy is asked for.
 *
 * Environment, read at each call that it matters to:
 *   STANDIN_FAIL=NAME:N     the N-th call of NAME (cuMemAlloc_v2, ...; "any": of whatever)
 *                           from when this was set fails: out of memory
 *   STANDIN_DEVICES=N       so many devices (1); with 0 cuInit says that there is none
 *   STANDIN_MEMORY=BYTES    of each device (1 GiB)
 *   STANDIN_NO_SHARING=1    the device has no descriptors for its memory
 *
 * Two functions of its own, found by dlsym(3):
 */

/* Objects that are alive: allocations, streams, events, contexts, modules, blocks. */
typedef long standin_live_fn(void);

/*
 * Calls that no driver would forgive, told on stderr: no context current, memory that is
 * none of the device's, freed in use, not pinned. Counted since the start.
 */
typedef long standin_misuse_fn(void);

#endif
