/* SPDX-License-Identifier: MIT */
/* gpu/assemble.h - executors that run a plan's copies, forward and backward. */
#ifndef UFS_GPU_ASSEMBLE_H
#define UFS_GPU_ASSEMBLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct err;

/*
 * `count` copies of `len` bytes; the k-th between piece + k * piece_step (a shard's bytes)
 * and tensor byte at + k * at_step (of the window). Work on elements by flags (enum
 * chunk_flags) with components of `component` bytes, of which len is then a multiple.
 */
struct assemble_run {
    unsigned char *piece; /* only read by gather; only written by scatter */
    uint64_t at;
    uint64_t len, count;
    int64_t piece_step;
    uint64_t at_step;
    uint8_t flags, component;
};

struct assembler {
    const char *name;

    /* Pieces to window: fills window[0..size). Runs never overlap in the window. */
    int (*gather)(const struct assembler *a, const struct assemble_run *run, size_t n,
                  void *window, size_t size, struct err *e);

    /* Window to pieces, the mirror of gather: what a save does. */
    int (*scatter)(const struct assembler *a, const struct assemble_run *run, size_t n,
                   const void *window, size_t size, struct err *e);
};

/*
 * The reference, on the calling thread; always built. Runs are executed window by window
 * (a few KiB of destination) so that short rows of many pieces stay in cache. Bounds
 * of the window are checked for each run: -EINVAL, nothing written.
 */
extern const struct assembler assembler_cpu;

#ifdef __cplusplus
}
#endif
#endif
