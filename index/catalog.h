/* SPDX-License-Identifier: MIT */
/* index/catalog.h - the sqlite index of one source: what its checkpoints contain. */
#ifndef UFS_INDEX_CATALOG_H
#define UFS_INDEX_CATALOG_H

#include "base/base.h"
#include "base/fsutil.h"
#include "index/chunk.h"
#include "index/chunk_list.h"
#include "index/shape.h"
#include "index/sink.h"

struct arena;
struct catalog;
struct err;

struct catalog_options {
    const char *dir; /* the cache directory; unused when memory */
    bool memory;     /* index=memory: nothing is written to disk */
};

/*
 * Opens (or makes) the index of the source that `identity` names (struct store). It lives
 * in DIR/index/HASH.sqlite, 0600. A file that is corrupt, foreign (application_id), of
 * another schema version or of another source is deleted and made anew, with a log line.
 * Safe for several processes and threads at once; connections are pooled inside.
 *
 * -ENOSPC, -EROFS, -EACCES: the directory cannot hold it, and the caller may open again
 * with `memory` (as index=memory does). Any call may find damage later (-EBADMSG): the next
 * call then makes the index anew and finds nothing in it, so that the caller scans again.
 */
int catalog_open(const struct catalog_options *options, const char *identity,
                 struct catalog **out, struct err *e);

/* The library that is in use ("3.40.1"), for `unshard version`. */
const char *catalog_sqlite_version(void);

void catalog_close(struct catalog *c); /* NULL is fine */
void catalog_closep(struct catalog **c);

/* Strings live in the arena that the call was given. */
struct checkpoint_info {
    int64_t id;       /* new with every scan that finds something else */
    const char *path; /* of its directory, relative to the store */
    const char *file; /* NULL, or the single file that is the checkpoint */
    const char *format, *framework, *version; /* framework and version may be NULL */
    const char *topology;                     /* JSON object or NULL */
    const char *header; /* __metadata__ of the model view, JSON object, or NULL */
    bool has_step, adapter;
    int64_t step;
    const char *error; /* NULL, or why the scan failed: no tensors then */
    const char *metadata_file;
    mode_t mode; /* permission bits: AND over the metadata and all storage files */
    uid_t uid;
    gid_t gid;
    int64_t mtime_ns; /* newest storage file */
    uint64_t tensors, chunks, bytes, faults, objects, files, warnings;
    uint64_t by_role[3]; /* tensors of each role */
    uint64_t bytes_by_role[3];
    struct file_id dir_id; /* of the directory when it was scanned */
    uint64_t print;        /* of all that the scan found; 0: it failed */
    /* Of the directory's names and kinds; 0: not to be relied on. They may come and go while
     * the id stays. */
    uint64_t names_hash;
};

/* By place; -ENOENT when the index does not have it. */
int catalog_checkpoint(struct catalog *c, const char *path, const char *file,
                       struct arena *a, struct checkpoint_info *out, struct err *e);
/* By id; -ESTALE when a newer scan has taken its place. */
int catalog_checkpoint_by_id(struct catalog *c, int64_t id, struct arena *a,
                             struct checkpoint_info *out, struct err *e);
/* Is it there? 0, or -ESTALE as above. */
int catalog_has(struct catalog *c, int64_t id, struct err *e);
/* Forgets it. */
int catalog_drop(struct catalog *c, int64_t id, struct err *e);
/* Remembers that the directory was looked at and found the same. */
int catalog_touch(struct catalog *c, int64_t id, const struct file_id *dir_id,
                  struct err *e);

struct catalog_file {
    uint32_t number;
    const char *path;  /* relative to the store */
    struct file_id id; /* all zero: missing when scanned */
    bool storage;      /* holds chunks (else: watched metadata) */
    bool copy;         /* holds the same tensors once more, see sink_copy() */
    mode_t mode;
};

/* Calls fn for each file of the checkpoint by number; stops at non-zero, returns it. */
int catalog_files(struct catalog *c, int64_t checkpoint,
                  int (*fn)(void *user, const struct catalog_file *f), void *user,
                  struct err *e);
int catalog_file(struct catalog *c, int64_t checkpoint, uint32_t number,
                 struct arena *a, struct catalog_file *out, struct err *e);

/* Is this name of the checkpoint's directory hidden (storage, machinery, a part)? */
int catalog_hidden(struct catalog *c, int64_t checkpoint,
                   int (*fn)(void *user, const char *name, bool part), void *user,
                   struct err *e);

struct tensor_info {
    uint32_t ord;    /* 0.. in byte order of `name` */
    const char *key; /* the full key as shown; NUL-terminated, may hold NUL inside */
    size_t key_len;
    const char *name;     /* in raw/ (and in tensors/ with ".npy" by name_of_key) */
    const char *name_npy; /* in tensors/ */
    const char *part;     /* or NULL */
    size_t wrapper;       /* see struct sink_tensor */
    bool modules; /* wrappers of modules are dropped from its name, and it has some */
    enum dtype dtype;
    enum dtype stored; /* of the pieces; another than dtype: what is read is cast */
    struct shape shape;
    enum role role;
    uint64_t bytes, chunks;
    const char *fault;     /* NULL: whole */
    const char *codec_key; /* the key inside the shard; often the same as key */
    size_t codec_key_len;
    const char *attributes; /* JSON object or NULL */
    uint32_t rule;          /* why it is taken from there: catalog_origin(); 0: none */
    int64_t first_file;     /* that it lies in, or whose absence is its fault; or -1 */
    uint64_t ino;           /* of the raw file; the .npy has ino + 1 */
    mode_t mode;
    uid_t uid;
    gid_t gid;
    int64_t mtime_ns;
};

/* -ENOENT: no such tensor; -ESTALE: no such checkpoint any more. */
int catalog_tensor(struct catalog *c, int64_t checkpoint, uint32_t ord, struct arena *a,
                   struct tensor_info *out, struct err *e);
int catalog_tensor_by_key(struct catalog *c, int64_t checkpoint, const char *key,
                          size_t len, struct arena *a, struct tensor_info *out,
                          struct err *e);
/* By file name in raw/ (npy false) or tensors/ (npy true). */
int catalog_tensor_by_name(struct catalog *c, int64_t checkpoint, const char *name,
                           bool npy, struct arena *a, struct tensor_info *out,
                           struct err *e);
/* Tensors from ord `from` on, in order; fn's info is valid during the call. */
int catalog_tensors(struct catalog *c, int64_t checkpoint, uint32_t from,
                    int (*fn)(void *user, const struct tensor_info *t), void *user,
                    struct err *e);

/*
 * The chunks of a tensor, unpacked into the arena, in the order of their first elements.
 * None when t->fault says that they do not cover it.
 */
int catalog_chunks(struct catalog *c, int64_t checkpoint, const struct tensor_info *t,
                   struct arena *a, const struct chunk **out, size_t *n, struct err *e);

/*
 * The same without unpacking them: fn sees each once, checked, and any of them is found
 * in *out, which lives in `a` (NULL for a tensor with a fault). Where fn fails with
 * -EBADMSG the index is damaged.
 */
int catalog_chunk_list(struct catalog *c, int64_t checkpoint,
                       const struct tensor_info *t, struct arena *a, chunk_list_fn *fn,
                       void *user, const struct chunk_list **out, struct err *e);

/* What the tensors of one role and dtype add up to. */
struct type_total {
    enum role role;
    enum dtype dtype;
    uint64_t tensors, elements, bytes;
};
/* Calls fn for each role and dtype that occurs, in order of both. */
int catalog_types(struct catalog *c, int64_t checkpoint,
                  int (*fn)(void *user, const struct type_total *t), void *user,
                  struct err *e);

/* tree/: directory 0 is its root. Entries of a directory by position from 0. */
struct tree_entry {
    uint32_t pos;
    const char *name;
    uint32_t dir;    /* id of the subdirectory, or 0 */
    uint32_t tensor; /* ord when dir is 0 */
    const struct tensor_info
        *info; /* of it, while catalog_tree_list() calls; or NULL */
};
int catalog_tree_find(struct catalog *c, int64_t checkpoint, uint32_t dir,
                      const char *name, struct tree_entry *out, struct err *e);
int catalog_tree_list(struct catalog *c, int64_t checkpoint, uint32_t dir,
                      uint32_t from, int (*fn)(void *user, const struct tree_entry *t),
                      void *user, struct err *e);
/* The parent of a tree directory (for ".."). */
int catalog_tree_parent(struct catalog *c, int64_t checkpoint, uint32_t dir,
                        uint32_t *parent, struct err *e);

/* Objects by key, and warnings in the order reported. */
int catalog_objects(struct catalog *c, int64_t checkpoint,
                    int (*fn)(void *user, const char *key, size_t key_len,
                              const char *json, size_t len),
                    void *user, struct err *e);
int catalog_warnings(struct catalog *c, int64_t checkpoint,
                     int (*fn)(void *user, const char *code, const char *text),
                     void *user, struct err *e);

/*
 * Why the files of the model are those, and what else might have been (`passed`), in the
 * order reported. Of one tensor: its rule, into `out`.
 */
int catalog_origins(struct catalog *c, int64_t checkpoint,
                    int (*fn)(void *user, const char *text, bool passed), void *user,
                    struct err *e);
int catalog_rule(struct catalog *c, int64_t checkpoint, const struct tensor_info *t,
                 struct arena *a, const char **out, struct err *e);

/* Does a warning of this code say that something of the checkpoint is lost? */
bool warning_is_loss(const char *code);

/* A scan in progress: one transaction. The sink's functions work on it. */
struct catalog_place {
    const char *path, *file; /* as in checkpoint_info */
    struct store *store;
    struct file_id dir_id;
    uint64_t names_hash;
    struct sink_filter *filter; /* or NULL; borrowed until the commit */
    /*
     * `guarded`: only the scan `seen` (0: none) of this place is replaced; sink_commit
     * gives -EAGAIN and keeps what is there when another process was faster.
     */
    bool guarded;
    int64_t seen;
};
int sink_begin(struct catalog *c, const struct catalog_place *place, struct sink **out,
               struct err *e);
/*
 * Something could not be read, and not for what stands in it: what is kept serves for now
 * and is never fresh (names_hash 0).
 */
void sink_unsure(struct sink *s);

/*
 * Names, roles, inodes, tree and views are settled, the old scan of this place is
 * replaced, the transaction ends. `failed` NULL, or why the scan failed: the checkpoint is
 * kept with that text and without tensors. Frees the sink in any case.
 */
int sink_commit(struct sink *s, const struct err *failed, int64_t *id, struct err *e);
void sink_abort(struct sink *s);

#endif
