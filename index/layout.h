/* SPDX-License-Identifier: MIT */
/* index/layout.h - a checkpoint that is to be written: its files, and what stands in them. */
#ifndef UFS_INDEX_LAYOUT_H
#define UFS_INDEX_LAYOUT_H

#include "base/base.h"
#include "base/buf.h"
#include "index/dtype.h"
#include "index/shape.h"
#include "index/sink.h"

struct arena;
struct err;
struct layout;

/*
 * A format's writer does no input or output: from the list of tensors it makes a layout,
 * which says for each file of the new checkpoint how long it is and what stands where:
 * literal bytes (headers, metadata), boxes of tensors, checksums of what was written. The
 * same input gives the same layout, byte for byte, on every machine: that is what makes a
 * save resumable, and lets several processes share one. The engine (save/) runs it: it
 * reads each tensor once, cuts it to its boxes and writes them to their places.
 */

/* How a tensor is cut in the checkpoint that it comes from: all of it, without overlap. */
struct layout_cuts {
    size_t count;
    const struct layout_cut {
        uint32_t rank;                /* that has written the box, */
        uint32_t number;              /* to this one of its files */
        const uint64_t *start, *size; /* units */
    } * cut;
};

/*
 * What arrived in one safetensors file. Its tensors are laid out as if there were no others,
 * in storage files of their own where the format has several: so the places of its bytes are
 * known before other files of the same checkpoint arrive (save/intake.h).
 */
struct layout_batch {
    unsigned number; /* of its storage files, where the format numbers them */
    size_t tensors;  /* that the file has; fewer may be left to be written */
    /* The file's first bytes up to its data, where it may be kept as it is; or NULL. */
    const char *header;
    size_t header_len;
};

/* A tensor that is to be written. Strings are borrowed for as long as the layout. */
struct layout_tensor {
    const char *key; /* in full, as the mount shows it */
    size_t key_len;
    size_t
        wrapper; /* leading bytes that a saver put on: the model's own name is without */
    /* The model's own name of it, where that is not just the key behind the wrapper. */
    const char *own;
    size_t own_len;
    const char *part; /* of the checkpoint that it comes from, or NULL */
    enum role role;
    enum dtype dtype;
    struct shape shape;
    const struct layout_cuts *cuts;   /* to be kept where the format can; or NULL */
    const struct layout_batch *batch; /* or NULL; those of one follow each other */
    uint64_t batch_at;                /* where it was in the data of its file */
};

/* The name of the framework's own module, as model.safetensors has it. */
static inline const char *layout_own_name(const struct layout_tensor *t, size_t *len)
{
    *len = t->own ? t->own_len : t->key_len - t->wrapper;
    return t->own ? t->own : t->key + t->wrapper;
}

/* State that is no tensor: the values of objects.json (docs/formats/objects-json.md). */
struct layout_object {
    const char *key;
    size_t key_len;
    const char *json;
    size_t json_len;
};

/* All that a writer knows of what it is to write. */
struct layout_input {
    const struct layout_tensor *tensor;
    size_t tensors;
    const struct layout_object *object;
    size_t objects;
    const char *format; /* that it comes from, a driver's name; "" when it is new */
    const char *framework, *version;
    bool adapter; /* a PEFT adapter, by itself */
    bool has_step;
    int64_t step;
};

/* What a user asks for (CONTRACT.md, "The command"); 0: the writer's default. */
struct layout_options {
    unsigned ranks;
    unsigned mesh[2];        /* ranks along dim 0 and dim 1; overrides ranks */
    uint64_t max_shard_size; /* bytes */
    const char *codec;       /* "none", "blosc-lz4"; NULL: the default */
    bool index; /* of a single safetensors file too: others come beside it */
};

/* A file in the making; belongs to the layout. */
struct layout_file;

int layout_new(struct layout **out, struct err *e);
void layout_free(struct layout *l); /* NULL is fine */
void layout_freep(struct layout **l);

/* The layout's memory, for what a writer makes on the way. */
struct arena *layout_arena(struct layout *l);

/*
 * A new file at this path of the checkpoint ("a/b"; directories are made). `stage` orders
 * files: those of a higher stage are written when all of lower stages are durable, so that
 * the file which makes a checkpoint complete (an index, .metadata) comes last. -EEXIST,
 * -EINVAL for names that are not safe (store_name_is_safe).
 */
int layout_file_new(struct layout *l, const char *path, unsigned stage,
                    struct layout_file **out, struct err *e);

/* Where the next piece will stand. */
uint64_t layout_file_at(const struct layout_file *f);

/* Literal bytes; they are copied. */
int layout_bytes(struct layout_file *f, const void *data, size_t len, struct err *e);

/* Zero bytes up to this offset, which must not lie behind. */
int layout_pad(struct layout_file *f, uint64_t to, struct err *e);

/*
 * A box of tensor number `tensor` of the input, in row-major order: start and size count
 * units of its shape (shape_units), whose bounds are checked. NULL, NULL: all of it.
 */
int layout_box(struct layout_file *f, const struct layout_input *in, size_t tensor,
               const uint64_t *start, const uint64_t *size, struct err *e);

/*
 * Four bytes here, little-endian: the CRC-32 (zlib's) of bytes [from, from + len) of the
 * file, which must be made of whole pieces and hold no checksum itself; it may stand
 * before or behind them.
 */
int layout_crc32(struct layout_file *f, uint64_t from, uint64_t len, struct err *e);

/*
 * The file's pieces are not written as they are but as one compressed block; its length
 * is known afterwards only. To be called when the file has all its pieces. `type_size`:
 * bytes of an element, for a shuffle.
 */
enum layout_codec { LAYOUT_PLAIN = 0, LAYOUT_BLOSC_LZ4 };
int layout_encode(struct layout_file *f, enum layout_codec codec, unsigned type_size,
                  struct err *e);

/* An empty directory that has to be there. */
int layout_directory(struct layout *l, const char *path, struct err *e);

/*
 * What could not be taken along, for the user: "objects", a key. The engine fails before
 * it writes anything unless the user has said that it may be dropped.
 */
enum layout_loss { LOSS_OBJECT, LOSS_TENSOR, LOSS_ROLE };
int layout_loss(struct layout *l, enum layout_loss kind, const char *what, size_t len,
                struct err *e);

/* ---- what the engine sees ---- */

enum layout_kind { LAYOUT_LITERAL, LAYOUT_ZERO, LAYOUT_BOX, LAYOUT_CRC32 };

struct layout_piece {
    enum layout_kind kind;
    uint64_t at, len; /* in the file */
    const void *data; /* LITERAL */
    uint32_t tensor;  /* BOX */
    uint32_t nd;
    const uint64_t *start, *size; /* units, nd of each */
    uint64_t from, sum;           /* CRC32: of these bytes: from, length */
};

struct layout_file_info {
    const char *path;
    unsigned stage;
    uint64_t size; /* before it is encoded */
    enum layout_codec codec;
    unsigned type_size;
    const struct layout_piece *piece; /* in order of `at`, without a hole */
    size_t pieces;
};

size_t layout_files(const struct layout *l);
void layout_file_info(const struct layout *l, size_t i, struct layout_file_info *out);
size_t layout_directories(const struct layout *l);
const char *layout_directory_at(const struct layout *l, size_t i);
size_t layout_losses(const struct layout *l);
const char *layout_loss_at(const struct layout *l, size_t i, enum layout_loss *kind);

/* Sum over all files and literal bytes: two layouts with one digest are the same. */
int layout_digest(const struct layout *l, uint64_t out[2], struct err *e);

#endif
