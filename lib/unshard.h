/* SPDX-License-Identifier: MIT */
/* lib/unshard.h - libunshard: tensors of a training checkpoint, whole or a part, into memory. */
#ifndef UNSHARD_H
#define UNSHARD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Functions return 0 or a negative errno; `error` (or NULL) then has the words for it in
 * UNSHARD_ERROR bytes: what, where, why, and what can be done. Any thread may call, several
 * at once on one handle; only unshard_close() must come last. The library prints nothing,
 * handles no signal and leaves no thread behind once all is closed. After a fork() only
 * the parent goes on with what is open.
 *
 * Structs that callers fill begin with their size, so that they can grow: fields that a
 * caller does not know are 0.
 */
enum { UNSHARD_ERROR = 1536, UNSHARD_DIMENSIONS = 64, UNSHARD_HOST = -1 };

struct unshard; /* an open checkpoint */

/* All zero but the size: as `unshard ls SOURCE` sees it. */
struct unshard_options {
    size_t size;           /* sizeof(struct unshard_options) */
    const char *cache_dir; /* where indexes lie; NULL: as the command has it */
    int index_memory;      /* not 0: write nothing */
    int follow_symlinks;   /* not 0: links may lead out of the source */
    unsigned jobs;         /* threads that read; 0: one a core */
    const char *map, *hf;  /* as the options of `unshard mount`, or NULL */
    const char *dtype;     /* of the model's floating-point tensors, or NULL */
    int module_weights;    /* not 0: as weights=module */
    /* Bytes of blocks of a remote source, and of decoded pieces, in cache_dir; 0: as set. */
    uint64_t cache_size;
    int no_cache; /* not 0: neither of them on disk */
};

const char *unshard_version(void); /* "0.2.0" */

/*
 * Opens a checkpoint: its directory or file, or the directory that shows it in a mount of
 * unshardfs (then its map and options are those of the mount, and the server tells where
 * the bytes are). `options` may be NULL.
 */
int unshard_open(const char *source, const struct unshard_options *options,
                 struct unshard **out, char *error);
void unshard_close(struct unshard *u); /* NULL is fine */

/* Texts and numbers live until unshard_close(). */
struct unshard_tensor {
    const char *key; /* ends in NUL, and may hold NUL */
    size_t key_len;
    const char *dtype; /* "BF16": the names of safetensors */
    const char *role;  /* "model", "optimizer", "other" */
    const char *fault; /* NULL; or why it cannot be loaded */
    uint32_t nd;
    const uint64_t *shape;
    uint64_t bytes;
};

size_t unshard_count(const struct unshard *u);

/* The tensors by number, 0 to count - 1, in the byte order of their keys. */
int unshard_tensor(const struct unshard *u, size_t number, struct unshard_tensor *out);

/* The number of a key: -ENOENT. */
int unshard_find(const struct unshard *u, const char *key, size_t key_len,
                 size_t *number);

/*
 * A tensor, or a box of one, as it is wanted. Only the bytes of the box are read. Results
 * are row-major and little-endian, without gaps.
 */
struct unshard_part {
    size_t size; /* sizeof(struct unshard_part) */
    size_t tensor;
    const char *dtype;             /* NULL: as it is */
    const uint64_t *start, *count; /* the box, one number a dimension; NULL: all */
    /*
     * Factors of blocks of elements, or NULL: the row-major grid of ceil(shape / block), one
     * block length a dimension (0: all of it), each multiplied in F32 before rounding.
     */
    const float *scale;
    size_t scales;
    const uint64_t *scale_block;
    uint64_t address; /* where it goes: memory of the host, or of the device */
    uint64_t bytes;   /* of that memory: exactly what unshard_measure() tells */
};

/* Type, shape (nd numbers) and size of the result; nothing is read. */
struct unshard_result {
    const char *dtype;
    uint32_t nd;
    uint64_t shape[UNSHARD_DIMENSIONS];
    uint64_t bytes;
};
int unshard_measure(const struct unshard *u, const struct unshard_part *part,
                    struct unshard_result *out, char *error);

/* What a load did on its way to a device. */
struct unshard_stats {
    size_t size; /* sizeof(struct unshard_stats) */
    uint64_t read_bytes, sent_bytes, batches, direct, launches;
};

/*
 * Loads n parts in one go, to the host (device UNSHARD_HOST) or to CUDA's device of that
 * number: then -ENODEV with the reason where there is none, and the caller may take the
 * host. Complete on return: no transfer is under way, also after an error, when the memory
 * holds anything. `watch` (or NULL) is told now and then how many bytes are there; what
 * is not 0 stops the work, -ECANCELED. `stats` may be NULL.
 */
typedef int unshard_watch(void *user, uint64_t done, uint64_t total);
int unshard_load(struct unshard *u, const struct unshard_part *part, size_t n,
                 int device, unshard_watch *watch, void *user,
                 struct unshard_stats *stats, char *error);

/* Memory of a device, for those who have no allocator of their own; freed before close. */
int unshard_device_alloc(struct unshard *u, int device, uint64_t bytes,
                         uint64_t *address, char *error);
int unshard_device_free(struct unshard *u, int device, uint64_t address, char *error);
int unshard_device_read(struct unshard *u, int device, void *to, uint64_t from,
                        uint64_t bytes, char *error);

/*
 * What `unshard hold` keeps in the memory of a device, mapped into this process: one copy
 * for all. Whoever maps it can also write it, sharing is trust: it serves its own user.
 * All of it is gone with unshard_hold_close().
 */
struct unshard_hold;

/*
 * The holder of a source for a device of this process (or, in place of the source, the
 * socket that `unshard hold` has printed). -ENOENT, -ECONNREFUSED: there is none.
 */
int unshard_hold_open(const char *source, int device, struct unshard_hold **out,
                      char *error);
void unshard_hold_close(struct unshard_hold *h); /* NULL is fine */

/* A tensor, or a box of it, cast, as in struct unshard_part. -ENOSPC: over its budget. */
struct unshard_held {
    uint64_t address; /* of the device */
    struct unshard_result result;
};
int unshard_hold_get(struct unshard_hold *h, const char *key, size_t key_len,
                     const char *dtype, const uint64_t *start, const uint64_t *count,
                     uint32_t nd, struct unshard_held *out, char *error);
int unshard_hold_read(struct unshard_hold *h, void *to, uint64_t from, uint64_t bytes,
                      char *error);

#ifdef __cplusplus
}
#endif
#endif
