/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_index.h - the index of a sharded model: which file holds which tensor. */
#ifndef UFS_INDEX_FORMATS_HF_INDEX_H
#define UFS_INDEX_FORMATS_HF_INDEX_H

#include "base/base.h"

struct arena;
struct err;

struct hf_index_file {
    const char *name;
    const char *fault; /* NULL, or why a file of this name is never opened */
};

struct hf_index_entry {
    const char *key; /* of the tensor; NUL-terminated, holds no NUL */
    uint32_t file;
};

/* Entries sorted by key, files by name. */
struct hf_index {
    struct hf_index_entry *entry;
    size_t count;
    struct hf_index_file *file;
    size_t nfiles;
    struct arena *arena; /* holds it all */
};

/*
 * Reads {"metadata": {...}, "weight_map": {key: file}} of which only weight_map counts
 * (total_size is wrong in many files). -EBADMSG when it is no such thing, when a key comes
 * twice, or when it names files of another kind than `suffix` (".safetensors"). A name that
 * must not be opened (with a directory, "..", ...) is that file's fault only.
 */
int hf_index_parse(const char *text, size_t len, const char *suffix,
                   struct hf_index *out, struct err *e);

void hf_index_release(struct hf_index *x);

/* STEM.safetensors.index.json taken apart. */
struct hf_index_name {
    size_t stem_len;
    const char *variant; /* within the name, not terminated; NULL: none */
    size_t variant_len;
};

/*
 * Is it the name of an index of files of this suffix? Also that of a variant:
 * STEM.safetensors.index.fp16.json, as transformers and diffusers write it for
 * save_pretrained(variant="fp16").
 */
bool hf_index_name(const char *name, const char *suffix, struct hf_index_name *out);

/* Position of a key, or -1. */
ptrdiff_t hf_index_find(const struct hf_index *x, const char *key, size_t len);

#endif
