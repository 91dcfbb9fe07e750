/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_dcp.h - shards of torch's HuggingFaceStorageWriter, alone or as a part. */
#ifndef UFS_INDEX_FORMATS_HF_DCP_H
#define UFS_INDEX_FORMATS_HF_DCP_H

#include <limits.h>

#include "base/base.h"
#include "index/sink.h"

struct err;
struct listing;
struct scan_context;

/* Where the shards of a directory lie; all is borrowed from the listing. */
struct hf_dcp_found {
    const char *first;    /* name of a shard; NULL: there are none */
    const char *dir;      /* "" or "sharded" */
    struct listing *list; /* of it */
    uint32_t shards;
    bool magic; /* the first shard begins as a safetensors file */
};

/* Is the directory one of shards? They lie in it, or in `sharded/` below full files. */
bool hf_dcp_find(struct listing *l, struct hf_dcp_found *out);

/* How they are shown; all zero but `role`: the directory is the whole checkpoint. */
struct hf_dcp_how {
    const char *dir;  /* relative to the checkpoint's directory; NULL or "": itself */
    const char *part; /* sink_tensor.part of all tensors, or NULL */
    int role;         /* enum role of all tensors, or -1: by part and key */
    /* sink_tensor.wrapper of a key, or NULL: 0 */
    size_t (*wrapper)(const char *key, size_t len);
    /* Does something else (an optimizer) tell the full shape of this key? NULL: nothing. */
    bool (*size)(void *user, const char *key, size_t len, struct shape *out);
    /* The i-th parameter that it knows, by the name without a wrapper; NULL: no more. */
    const char *(*name)(void *user, size_t i, size_t *len);
    void *user;
};

/* What was found. */
struct hf_dcp_told {
    const char *format; /* "hf-dcp-sharded", "hf-dcp-sharded+consolidated"; static */
    uint64_t ranks, files, shards; /* files: of the model, as the names count them */
    char metadata[PATH_MAX];       /* the first shard, relative to the store */
};

/*
 * Reports all tensors and oddities of the directory, hides its files, and declares the
 * directories in it that belong to it as parts (not itself). `told` is filled in as far as
 * it got.
 */
int hf_dcp_report(const struct scan_context *c, struct sink *sink,
                  const struct hf_dcp_how *how, struct hf_dcp_told *told,
                  struct err *e);

extern const struct format_writer writer_dcp_hf; /* hf_dcp_write.c */

#endif
