/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_config.h - what a model's config.json tells of its tensors. */
#ifndef UFS_INDEX_FORMATS_HF_CONFIG_H
#define UFS_INDEX_FORMATS_HF_CONFIG_H

#include "base/base.h"

struct err;
struct listing;
struct sink;

/* 0, false and "" where it says nothing. */
struct hf_config {
    bool tied; /* tie_word_embeddings */
    uint64_t hidden_size, vocab_size;
    char transformers[32]; /* the version that wrote it */
};

/*
 * Reads config.json of the directory and watches it; `dir` is the directory in the
 * checkpoint ("" for itself). Where there is none, or what nobody can read, *out is
 * all zero: it is a side file. Only errors that stop a scan are returned.
 */
int hf_config_read(struct listing *l, const char *dir, struct sink *sink,
                   struct hf_config *out, struct err *e);

/* Is it the key of the output layer that is not stored when it is tied? */
bool hf_is_head(const char *key, size_t len);

/* Is it the input embedding of a model whose output layer is lm_head.weight? */
bool hf_is_embedding(const char *key, size_t len);

/* Tells that the output layer is tied and not stored, as an object. */
int hf_tell_tied(struct sink *sink, struct err *e);

#endif
