/* SPDX-License-Identifier: MIT */
/* lib/hold.h - the holder of tensors in device memory: its words, its table, its server. */
#ifndef UFS_LIB_HOLD_H
#define UFS_LIB_HOLD_H

#include "base/buf.h"
#include "gpu/device.h"
#include "lib/unshard.h"

struct err;
struct hold_table;

/*
 * A connection of base/local_socket.h, for as long as the client maps what it was given.
 * All numbers are little-endian. The server begins:
 *
 *   greeting  "UFSHOLD1", 16 bytes UUID of the device
 *   question  u32 bytes of the key, u32 dimensions of the box (0xffffffff: all of the
 *             tensor), u64 0, 16 bytes type (all zero: as it is); u64 start, u64 count,
 *             each one a dimension; the key
 *   answer    u32 errno, u32 n, u64 block, u64 its bytes, u64 offset in it, u64 bytes,
 *             16 bytes type, u32 1: a descriptor of the block goes with the first byte
 *             (for each block once), u32 0; then n bytes of words with an errno, else n
 *             dimensions of u64
 */
#define HOLD_MAGIC "UFSHOLD1"

enum {
    HOLD_HELLO = 24,
    HOLD_ASK = 32,
    HOLD_REPLY = 64,
    HOLD_KEY_MAX = 64 << 10,
    HOLD_WORDS_MAX = 2048,
    HOLD_NAME = 16,
};
#define HOLD_WHOLE UINT32_MAX

/* Where the holder of a source for a device listens. */
int hold_path(const char *source, const unsigned char uuid[16], struct buf *out,
              struct err *e);

/* ---- the table ---- */

struct hold_options {
    const char *source;
    const struct unshard_options *options;
    int device;
    uint64_t budget; /* bytes of device memory; 0: what is free, less a reserve */
};

/* Opens source and device. -ENOTSUP: the device's memory cannot be shared. */
int hold_table_new(const struct hold_options *o, struct hold_table **out,
                   struct err *e);
/* Nobody uses it any more. */
void hold_table_free(struct hold_table *t);

const struct device_info *hold_table_device(const struct hold_table *t);

/* What one client maps: blocks stay for as long as it is there. */
struct hold_client {
    struct hold_block **block;
    size_t n, cap;
};

struct hold_place {
    struct hold_block *block;
    uint64_t offset;
    struct unshard_result result;
    bool first; /* of this block, to this client */
};

/*
 * The part, loaded now or before; any thread. `part` names no memory; its box, if it has
 * one, has `nd` numbers. -ENOSPC: it does not fit the budget beside what clients map.
 */
int hold_table_get(struct hold_table *t, struct hold_client *c, const char *key,
                   size_t key_len, const struct unshard_part *part, uint32_t nd,
                   struct hold_place *out, struct err *e);

/* A descriptor of a block that a client maps; the caller's to close. */
int hold_table_export(struct hold_table *t, const struct hold_block *b, int *fd,
                      struct err *e);
uint64_t hold_block_number(const struct hold_block *b);
uint64_t hold_block_size(const struct hold_block *b);

/* The client is gone. */
void hold_client_release(struct hold_table *t, struct hold_client *c);

/* ---- the server ---- */

/*
 * Serves until `stop` (a descriptor) can be read. `ready` is called once it listens, with
 * the path.
 */
int hold_serve(struct hold_table *t, const char *path, int stop,
               void (*ready)(void *user, const char *path), void *user, struct err *e);

#endif
