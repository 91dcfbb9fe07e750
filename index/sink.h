/* SPDX-License-Identifier: MIT */
/* index/sink.h - where a format driver reports what it finds in one checkpoint. */
#ifndef UFS_INDEX_SINK_H
#define UFS_INDEX_SINK_H

#include "base/base.h"
#include "index/chunk.h"
#include "index/shape.h"
#include "remote/store.h"

struct err;
struct sink;

enum role { ROLE_MODEL = 0, ROLE_OPTIMIZER = 1, ROLE_OTHER = 2 };

/* What is known of the checkpoint as a whole; NULL where unknown. Strings are copied. */
struct sink_checkpoint {
    const char *format;    /* "torch-dcp", "hf-safetensors", ... */
    const char *framework; /* "PyTorch" */
    const char *version;   /* of the framework, when the files tell */
    bool has_step;
    int64_t step;
    const char *topology; /* JSON object: {"ranks": 4, ...} */
    /* The file that decides about owner, group and freshness; relative to the store. */
    const char *metadata_file;
    bool adapter; /* the model view is called adapter_model.safetensors */
    /* Settings of the model, a JSON object, for maps (source.NAME); it is not stored. */
    const char *settings;
    /* __metadata__ of the model view, a JSON object of texts; NULL: {"format": "pt"}. */
    const char *header;
};

int sink_checkpoint(struct sink *s, const struct sink_checkpoint *c, struct err *e);

/* What was told last; valid until the next time. */
const struct sink_checkpoint *sink_told(const struct sink *s);

/*
 * From now on names of files and parts are relative to this directory, which is itself
 * relative to the checkpoint's ("": the checkpoint's own). For a driver that has another
 * one scan a part of its checkpoint.
 */
int sink_enter(struct sink *s, const char *dir, struct err *e);

/*
 * Registers a storage file (path relative to the checkpoint's directory) and gives its
 * number for chunks. The same path gives the same number. A file that is missing is
 * registered too (-ENOENT is not returned): tensors with chunks in it get a fault. A name
 * that is not safe (store_name_is_safe) gives -EBADMSG. Registered files are hidden from
 * the mount when they lie in the checkpoint's directory, and are watched for freshness.
 */
int sink_file(struct sink *s, const char *path, size_t len, uint32_t *number,
              struct err *e);

/* The same for one that stays visible as it is: an adapter beside its base model. */
int sink_file_shown(struct sink *s, const char *path, size_t len, uint32_t *number,
                    struct err *e);

/*
 * Watches a side file that the scan has read (config.json): a change of it makes the
 * index stale. It stays visible. Also a directory below the checkpoint's, where names
 * that come or go change what is found (the checkpoint's own is watched anyhow).
 */
int sink_watch(struct sink *s, const char *name, struct err *e);

/* The size and identity of a registered file; false when it is missing. */
bool sink_file_id(const struct sink *s, uint32_t number, struct file_id *out);

/*
 * Calls fn for the registered storage files below the checkpoint's directory that have `min` to
 * `max` bytes, of which it looks at some hundred.
 */
int sink_small_files(struct sink *s, uint64_t min, uint64_t max,
                     int (*fn)(void *user, const char *name, struct err *e), void *user,
                     struct err *e);

/*
 * Hides a name of the checkpoint's directory that is format machinery and no shard (an
 * index, stale .distcp files, lock files); `watch`: a change of it makes the index stale.
 */
int sink_hide(struct sink *s, const char *name, bool watch, struct err *e);

/*
 * A safetensors file of full tensors that are there already, under the same keys, as
 * chunks: it is hidden and watched, and `verify` compares it with them.
 */
int sink_copy(struct sink *s, const char *path, struct err *e);

/*
 * Declares a part of a composite (a subdirectory): hidden, side files lifted to the top. It is
 * watched: names that come into it change what is found.
 */
int sink_part(struct sink *s, const char *dir, struct err *e);

struct sink_tensor {
    const char *key; /* as the part stores it; any bytes */
    size_t key_len;
    const char
        *part; /* NULL: the main (model) part; else "optim": used when keys meet */
    /*
     * Leading bytes of the key that are a wrapper put on by the saver ("model." of a DCP
     * with planner_data): dropped in model.safetensors by the prefix rule. 0: none.
     */
    size_t wrapper;
    bool modules; /* parts that wrappers of modules left in the name are dropped too */
    enum dtype dtype;
    enum dtype stored; /* of the pieces where it differs (a cast); DTYPE_NONE: dtype */
    const struct shape *shape;
    int role; /* enum role, or -1: by the rule of CONTRACT.md on part and key */
    const char *codec_key; /* key inside the shard when it differs; NULL: key */
    const char
        *attributes; /* NULL or a JSON object: more xattrs {"gguf_type": "Q4_K"} */
};

/*
 * Starts a tensor, takes its chunks, ends it. At the end coverage is checked (plan) and
 * whether each chunk's file is there and long enough; what is wrong becomes the tensor's
 * fault: it is listed, reading it gives EIO. Only errors of the index itself are returned
 * (a full disk, out of memory), and a key that is there already in the same part
 * (-EEXIST, nothing added).
 */
int sink_tensor_begin(struct sink *s, const struct sink_tensor *t, struct err *e);
/* Parameter and piece's shape stay the caller's and must last until the tensor's end. */
int sink_chunk(struct sink *s, const struct chunk *c, struct err *e);
/*
 * A fault that the driver found itself; the first one is kept. It stands in the place of the
 * sink's own words for a tensor of DTYPE_NONE, whose type the driver knows by name.
 */
int sink_fault(struct sink *s, const char *fmt, ...) PRINTF(2, 3);
int sink_tensor_end(struct sink *s, struct err *e);

/* The whole tensor as one plain piece: begin, chunk, end. */
int sink_tensor_plain(struct sink *s, const struct sink_tensor *t, uint32_t file,
                      uint64_t offset, struct err *e);

/* Non-tensor state: a key and its JSON value (object_to_json) for objects.json. */
int sink_object(struct sink *s, const char *key, size_t key_len, const char *json,
                size_t len, struct err *e);

/*
 * An oddity that a user should know; the scan goes on. `code` is a stable short word
 * ("missing-file", "stale-file", ...).
 */
int sink_warning(struct sink *s, const char *code, const char *fmt, ...) PRINTF(3, 4);

/*
 * Why tensors that come from now on are taken from where they are: "the files that
 * model.safetensors.index.json names, read whole". Kept with each of them (origin).
 */
int sink_rule(struct sink *s, const char *fmt, ...) PRINTF(2, 3);

/* From now on no rule is known but the format's own. */
void sink_rule_end(struct sink *s);

/* What might have been the model and is not: "FILE: WHY". */
int sink_passed_over(struct sink *s, const char *fmt, ...) PRINTF(2, 3);

/*
 * What may stand between a driver and the index: a map, which takes tensors aside and
 * gives others back. take() sees each tensor when it ends (texts are valid during the
 * call; `pieces` are its packed chunks, none where it has a fault): 1: it is not kept as it
 * is, 0: it is. finish() is called before the commit, and reports tensors to the sink.
 */
struct sink_taken {
    const char *key;
    size_t key_len;
    const char *part; /* or NULL */
    size_t wrapper;
    bool modules;
    enum dtype dtype;
    const struct shape *shape;
    enum role role;
    const char *codec_key; /* or NULL */
    size_t codec_key_len;
    const char *attributes; /* or NULL */
    const char *fault;      /* or NULL */
    const char *pieces;
    size_t pieces_len;
};

struct sink_filter {
    int (*take)(struct sink_filter *f, const struct sink_taken *t, struct err *e);
    int (*finish)(struct sink_filter *f, struct sink *s, struct err *e);
};

/*
 * A file of the source that is by itself a safetensors file: if its keys turn out to be
 * exactly those of the model (or optimizer) view under unchanged names, the view is that
 * file, byte for byte.
 */
int sink_whole_file(struct sink *s, uint32_t file, struct err *e);

#endif
