/* SPDX-License-Identifier: MIT */
/* gpu/plan_wire.h - the plan of one tensor as bytes, for other processes. */
#ifndef UFS_GPU_PLAN_WIRE_H
#define UFS_GPU_PLAN_WIRE_H

#include "base/base.h"
#include "index/dtype.h"
#include "index/shape.h"

struct arena;
struct buf;
struct err;
struct tensor;

/*
 * What `unshard plan --binary` prints and the plan service of a mount answers. All numbers
 * are little-endian; texts are padded with zeros to 8 bytes; nothing follows the pieces.
 *
 *      0  "UFSPLAN1"
 *      8  u64 bytes of all this
 *     16  u64 1: no sources and pieces, the tensor is to be read out of its file; else 0
 *     24  u64 bytes of the tensor, as it is shown
 *     32  its type as it is shown, 16 bytes, and as it is stored, 16 bytes (dtype_name)
 *     64  u32 dimensions of its shape, u32 dimensions of its pieces
 *     72  u64 sources, u64 pieces, u64 bytes of the key
 *     96  u64 a dimension of the shape; the key
 *   then  a source: u64 size, i64 mtime in ns, u64 bytes of the path; the absolute path
 *   then  a piece: u32 source, u8 kind, u8 flags (enum chunk_flags), u16 0, u64 base,
 *         16 bytes value; u64 start, u64 size, i64 step, each one a dimension of a piece
 *
 * A piece is the box [start, start + size) in storage units (shape_units: bytes of types
 * that pack several elements into one). Kind 0: element (i0, i1, ...) of it lies at byte
 * base + sum(i[k] * step[k]) of the source. Kind 1: every element is the first bytes of
 * `value`, and the source only tells it. Pieces cover the tensor, without overlap.
 */
enum { WIRE_MAX = 256 << 20, WIRE_VALUE = 16 };

struct wire_source {
    const char *path;
    uint64_t size;
    int64_t mtime_ns;
};

struct wire_piece {
    uint32_t source;
    bool fill;
    uint8_t flags;
    uint64_t base;
    unsigned char value[WIRE_VALUE];
    const uint64_t *start, *size;
    const int64_t *step;
};

struct plan_wire {
    const char *key; /* NUL-terminated, may hold NUL inside */
    size_t key_len;
    enum dtype dtype, stored;
    struct shape shape, units;
    uint64_t bytes;
    bool through; /* no sources, no pieces */
    struct wire_source *source;
    size_t sources;
    struct wire_piece *piece;
    size_t pieces;
};

/*
 * Writes the plan of an open tensor whose store's root is the local directory `root`.
 * What cannot be read as bytes of local files (compressed, in an archive, remote, more than
 * WIRE_MAX) becomes a plan that says `through`.
 */
int wire_write(struct tensor *t, const char *root, struct buf *out, struct err *e);

/*
 * Reads one, whoever wrote it: -EBADMSG. Everything but what a gather proves (pieces within
 * their sources, whole, without overlap) is checked here. All of *out is in the arena.
 */
int wire_parse(struct arena *a, const void *data, size_t len, struct plan_wire *out,
               struct err *e);

#endif
