/* SPDX-License-Identifier: MIT */
/* save/patch.h - tensors whose bytes alone have changed, written into copies of their files. */
#ifndef UFS_SAVE_PATCH_H
#define UFS_SAVE_PATCH_H

#include "gpu/reader.h"
#include "save/write.h"

struct err;
struct patch;

/* A tensor that keeps its dtype and shape: its number in the index, and in the source. */
struct patch_change {
    uint32_t ord;
    size_t tensor;
};

struct patch_spec {
    const struct reader_env *env;
    int64_t checkpoint;
    int old; /* a descriptor of its directory */
    const struct patch_change *change;
    size_t changes;
    struct save_source source; /* of the new bytes */
};

/*
 * A patch keeps everything of a checkpoint but the bytes of some tensors: which files there
 * are, how they are cut, what else stands in them. Tensors that turn out to have the bytes
 * that are there are left out; files in which nothing changes are none of it. Checksums
 * that a container keeps of those bytes (zip) or of whole files (Megatron's integrity.json)
 * are made anew. -ENOTSUP with words: these tensors lie in no plain bytes of their own
 * (compressed, one tensor's bytes are another's too, not stored at all).
 */
int patch_new(const struct patch_spec *spec, struct patch **out, struct err *e);
void patch_free(struct patch *p); /* NULL is fine */
void patch_freep(struct patch **p);

/*
 * Writes them below the directory `dir`, at their paths in the checkpoint, with the rights
 * that they have, durably. -ENOSPC before anything is written when there is not the room.
 */
int patch_write(struct patch *p, int dir, struct err *e);

#endif
