/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_zip.h - what torch.save wrote: an object graph and its storages. */
#ifndef UFS_INDEX_FORMATS_TORCH_ZIP_H
#define UFS_INDEX_FORMATS_TORCH_ZIP_H

#include "base/base.h"
#include "index/chunk.h"
#include "index/formats/pickle/pickle.h"
#include "index/shape.h"

struct buf;
struct err;
struct source;
struct torch_zip;
struct zip;
struct zip_entry;

/*
 * Opens the torch.save zip at bytes [off, off + len) of a source and unpickles its
 * data.pkl. Tensor data is not read. -EBADMSG when it is no such archive.
 */
int torch_zip_open(struct source *s, uint64_t off, uint64_t len, struct torch_zip **out,
                   struct err *e);
void torch_zip_free(struct torch_zip *t);
void torch_zip_freep(struct torch_zip **t);

/*
 * The same for a whole file, zip or legacy container (docs/formats/torch_file.md). Its
 * tensors may lie in deflated storages: torch_tensor.packed.
 */
int torch_open(struct source *s, struct torch_zip **out, struct err *e);

struct pv torch_zip_root(const struct torch_zip *t);

/* Is it an archive of torch.jit.save: code and attributes of a module? */
bool torch_zip_is_script(const struct torch_zip *t);

/* Its tensors that are no attributes but constants of the code (ROOT/constants/N). */
uint64_t torch_zip_constants(const struct torch_zip *t);

/* Bytes of the pickle: an honest graph has no more values than that. */
uint64_t torch_zip_pickle_len(const struct torch_zip *t);

/*
 * What is made of a pickle of that many bytes may have as many in objects.json: values that
 * are shared are written again at each reference.
 */
static inline uint64_t object_json_most(uint64_t pickle_len)
{
    return (64 << 10) + 128 * pickle_len;
}

/* How many more bytes its objects may have in objects.json, all together. */
uint64_t torch_zip_json_left(const struct torch_zip *t);
void torch_zip_spend_json(struct torch_zip *t, uint64_t len);

/* A class of storages ("torch.FloatStorage"); false when it is none. */
struct torch_class {
    enum dtype dtype; /* DTYPE_NONE: untyped, or several quantised elements a byte */
    unsigned size;    /* bytes of what the storage counts */
    bool quantized;
};
bool torch_storage_class(const struct pv *v, struct torch_class *out);

/*
 * Is this global the function that rebuilds a subclass of Tensor: (function, type,
 * arguments, state)? Its name and module were others before torch 1.11 and 1.9
 * (torch/_tensor.py, torch/tensor.py).
 */
bool torch_is_from_type(const struct pv *fn);

/*
 * The element type that a global of module torch names ("float32", "float8_e4m3fn"), or
 * DTYPE_NONE. torch.float4_e2m1fn_x2 is DTYPE_F4: torch counts pairs of elements, so the
 * last dimension of a shape that torch gives has to be doubled.
 */
enum dtype torch_dtype(const struct pv *v);

/* The same by its name alone. */
enum dtype torch_dtype_of_name(const char *name);

/*
 * A tensor of the graph, described by its rebuild call. For DTYPE_F4 the shape counts
 * elements (two of them where torch counts one) and strides count units, of a byte.
 */
struct torch_tensor {
    enum dtype dtype;
    struct shape shape;
    int64_t stride[SHAPE_MAX_DIMS]; /* elements */
    uint64_t storage_offset;        /* elements */
    uint64_t data;                  /* byte of the storage in the source */
    uint64_t data_len;              /* bytes of the storage */
    /* Bytes that it is deflated to, 0: it is not. Only of files that torch_open() opened. */
    uint64_t packed;
    uint32_t crc;  /* of the storage, as the zip tells it; 0 in legacy files */
    uint8_t flags; /* enum chunk_flags */
};

/*
 * 1 and the description when `v` is a tensor that can be read as plain strided elements
 * (_rebuild_tensor, _v2, _v3, _rebuild_parameter, Parameter), 0 when it is no tensor,
 * -EBADMSG when it is one whose numbers do not fit its storage, -ENOTSUP for kinds that
 * are no strided elements (sparse, quantised, meta): those go to objects.json.
 */
int torch_zip_tensor(struct torch_zip *t, const struct pv *v, struct torch_tensor *out,
                     struct err *e);

/*
 * The same for the stored integers of a quantised tensor; -ENOTSUP when they share bytes,
 * 0 when it is no quantised tensor.
 */
int torch_zip_integers(struct torch_zip *t, const struct pv *v,
                       struct torch_tensor *out, struct err *e);

/* The same for a storage by itself, which is shown as a tensor of one dimension. */
int torch_zip_storage(struct torch_zip *t, const struct pv *v, struct torch_tensor *out,
                      struct err *e);

/*
 * Reads all records of the archive and compares their CRC-32 with its directory's: 1 when
 * they hold, 0 when it has none to compare, -EBADMSG naming the first that does not.
 * torch can be told to leave CRCs out (save.compute_crc32): then none holds. `look` (or
 * NULL) sees what it wants of the record that holds it.
 */
int torch_zip_checksums(struct source *s, uint64_t off, uint64_t len,
                        struct chunk_look *look, struct err *e);

/*
 * -EBADMSG, naming the record and its byte, when the CRC-32 of this one does not hold while
 * the archive has such: for records that say what the others mean (data.pkl). Inflating
 * checks those that are deflated.
 */
int torch_zip_check_record(struct source *s, struct zip *zip,
                           const struct zip_entry *entry, struct err *e);

/* chunk_codec.resolve of CHUNK_TORCH_ZIP and CHUNK_TORCH_ZIP_ZSTD (see index/chunk.h). */
extern const struct chunk_codec codec_torch_zip;
extern const struct chunk_codec codec_torch_zip_zstd;

/*
 * An object graph as the JSON of CONTRACT.md, objects.json (one value, no newline). Each
 * tensor met is reported through on_tensor with its path in the object (parts joined by
 * dots, list positions as numbers), which returns the key to write, or NULL to write it
 * as opaque. Cycles and DAG bombs are cut: at most `budget` nodes are visited (0:
 * 1,000,000), what is beyond becomes {"$type":"opaque","class":"...","truncated":true}.
 * -EFBIG: it does not fit into `out`, or the file's objects have what its pickle allows.
 * `t` NULL: a graph without storages.
 */
typedef const char *object_tensor_fn(void *user, const char *path, size_t path_len,
                                     const struct torch_tensor *tensor);
int object_to_json(struct torch_zip *t, const struct pv *v, uint64_t budget,
                   object_tensor_fn *on_tensor, void *user, struct buf *out,
                   struct err *e);

/* The same, where distributed tensors (dist_tensor.h) have keys too. */
struct object_keys {
    object_tensor_fn *on_tensor;
    /* Optional: the key of the whole, or NULL: it is an object like others. */
    const char *(*on_shard)(void *user, const char *path, size_t path_len);
    void *user;
};
int object_to_json_keys(struct torch_zip *t, const struct pv *v, uint64_t budget,
                        const struct object_keys *keys, struct buf *out, struct err *e);

#endif
