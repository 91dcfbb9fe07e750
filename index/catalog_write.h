/* SPDX-License-Identifier: MIT */
/* index/catalog_write.h - rows of one scan: staged beside the index, then put into it. */
#ifndef UFS_INDEX_CATALOG_WRITE_H
#define UFS_INDEX_CATALOG_WRITE_H

#include <sys/types.h>

#include "base/base.h"
#include "base/buf.h"
#include "index/sink.h"

struct catalog;
struct err;
struct stage;

/*
 * A scan can take minutes, so its rows are kept beside the index first, in memory and, where
 * they are many, in a private temporary database: nobody waits for a lock meanwhile, several
 * scans run at once, and what stays in memory does not grow with the checkpoint. The index is
 * written in one go at the end.
 */
int stage_open(bool memory, struct stage **out, struct err *e);
void stage_close(struct stage *st); /* NULL is fine */

/* Numbers count from 0. `path` is relative to the store. */
int stage_file(struct stage *st, uint32_t number, const char *path,
               const struct entry_stat *stat, struct err *e);
int stage_file_path(struct stage *st, uint32_t number, struct buf *out, struct err *e);
int stage_file_id(struct stage *st, uint32_t number, struct file_id *out,
                  struct err *e);

/* 1 and the file that is there and comes first in byte order of paths, or 0. */
int stage_first_file(struct stage *st, uint32_t *number, struct err *e);

/* A name twice is one row; `part` wins. */
int stage_hidden(struct stage *st, const char *name, size_t len, bool part,
                 struct err *e);
int stage_object(struct stage *st, const char *key, size_t key_len, const char *json,
                 size_t len, struct err *e);
int stage_warning(struct stage *st, const char *code, const char *text, struct err *e);

/* A rule, or what was passed over; the first one has number 1. */
int stage_origin(struct stage *st, const char *text, bool passed, struct err *e);

/* Who the files of a tensor belong to, and what all of them allow. */
struct stage_rights {
    bool any;   /* false: no file contributes */
    bool mixed; /* of several owners */
    bool mixed_groups;
    uint32_t mode, uid, gid;
    int64_t mtime_ns; /* the newest */
};

void rights_add(struct stage_rights *r, const struct stage_rights *file);

struct stage_tensor {
    const char *key; /* as the part stores it */
    size_t key_len;
    const char *part; /* or NULL */
    size_t wrapper;
    enum dtype dtype, stored;
    const struct shape *shape;
    enum role role;
    uint64_t bytes, chunks;
    const char *fault;     /* or NULL */
    const char *codec_key; /* or NULL: key */
    size_t codec_key_len;
    const char *attributes;
    uint64_t identity; /* hash of its shards and the places in them, in any order */
    struct stage_rights rights;
    int64_t single_file; /* or -1 */
    uint32_t rule;       /* number of stage_origin(), from 1; 0: none */
    int64_t first_file;  /* or -1 */
    const char *pieces;
    size_t pieces_len;
};

int stage_tensor(struct stage *st, const struct stage_tensor *t, struct err *e);

/* What a file is, in the index. */
enum { FILE_WATCHED = 0, FILE_STORAGE = 1, FILE_COPY = 2 };

/* What the sink counted for a file. */
struct stage_use {
    bool storage, whole, copy;
    uint32_t tensors;
};

/* What the index keeps of the scan as a whole. */
struct stage_result {
    const char *path, *file; /* of the place; file may be NULL */
    const struct sink_checkpoint *about;
    const char *error;         /* NULL, or why the scan failed */
    struct stage_rights owner; /* the metadata file's */
    struct stage_rights all;   /* of all storage files */
    struct file_id dir_id;
    uint64_t names_hash;
    uint32_t files;
    bool many_parts; /* keys of different parts may meet */
    bool guarded;    /* see struct catalog_place */
    int64_t seen;

    void (*file_use)(const void *user, uint32_t number, struct stage_use *out);
    const void *user;
};

/*
 * Settles final keys, file names, order, inodes, the tree and the views, and replaces the
 * old scan of the place: all in one transaction. -EAGAIN: see struct catalog_place.
 */
int stage_commit(struct stage *st, struct catalog *c, const struct stage_result *r,
                 int64_t *id, struct err *e);

#endif
