/* SPDX-License-Identifier: MIT */
/* index/sink_priv.h - a running scan, as the files of the sink see it. */
#ifndef UFS_INDEX_SINK_PRIV_H
#define UFS_INDEX_SINK_PRIV_H

#include "base/buf.h"
#include "base/keyset.h"
#include "index/sink.h"
#include "index/sink_files.h"

struct catalog;

/* SECURITY budgets; a test lowers those of its scan. */
enum {
    SINK_MAX_TENSORS = 10 * 1000 * 1000, /* of one checkpoint */
    SINK_MAX_CHUNKS = 10 * 1000 * 1000,  /* of one tensor */
    /* Keys of all tensors together, and more for each: real ones have some 60 bytes. */
    SINK_MAX_KEYS = 64 << 20,
    SINK_KEY_EACH = 512,
};

/* The tensor between begin and end. */
struct open_tensor {
    bool open;
    struct buf key; /* part, NUL, key */
    size_t part_len;
    bool has_part;
    struct buf codec_key, attributes, fault;
    bool has_codec_key, has_attributes;
    size_t wrapper;
    bool modules;
    enum dtype dtype, stored;
    int role;
    struct shape shape, units;
    bool has_units; /* false: the shape is impossible, chunks are only counted */
    bool untyped;   /* and the only fault is that it has no element type */
    bool beyond;    /* a chunk lies where no file reaches: none is kept */
    uint64_t bytes;
    uint64_t chunks;
    uint64_t identity;
    struct stage_rights rights;
    /* Of each chunk; the numbers of all lie in `box`, and are pointed to at the end. */
    struct chunk *chunk; /* malloc */
    size_t nchunk, chunk_cap;
    uint64_t *box; /* malloc */
    size_t nbox, box_cap;
};

struct sink {
    struct catalog *catalog;
    struct stage *stage;
    struct sink_files files;
    char *path, *file;
    char *base; /* of names, below path; NULL: path itself */
    struct file_id dir_id;
    uint64_t names_hash;
    bool guarded; /* see struct catalog_place */
    int64_t seen;
    struct sink_checkpoint about;
    char *about_text[7]; /* what `about` points to */
    struct sink_filter *filter;
    struct keyset keys;          /* of what the driver (then the filter) reports */
    struct keyset passed;        /* with a filter: of what it let pass */
    bool tells_loss;             /* a warning, or a tensor's fault */
    uint64_t model, model_empty; /* tensors of the model, and weights of shape [0] */
    uint64_t first_part;         /* hash of the part of the first tensor */
    bool many_parts;
    struct buf rule; /* the texts of rules that were set, each with a NUL */
    uint32_t rules;  /* of origin rows: rules, and what was passed over */
    uint32_t rule_now;
    char rule_text[600]; /* of the rule that is to be used from now on */
    bool rule_waits;     /* it has no number yet */
    uint64_t tensors, warnings, dropped_warnings;
    uint64_t max_tensors, max_chunks, max_keys;
    uint64_t key_bytes; /* also of those that were there already */
    struct open_tensor t;
    struct buf pieces;
};

void tensor_release(struct open_tensor *t);

int sink_rule_settle(struct sink *s, struct err *e);

#endif
