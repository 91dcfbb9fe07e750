/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_zarr_write.c - the writer of Megatron Core's backend zarr. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/keyset.h"
#include "index/formats/megatron/megatron.h"
#include "index/formats/megatron/megatron_write.h"
#include "index/formats/object_value.h"
#include "index/names.h"
#include "remote/store.h"

/* More chunks than this of one tensor are more files than anyone wants. */
enum { MAX_RANKS = 100000 };

struct zarr_writing {
    struct mega_writing mega;
    const struct layout_tensor
        *known; /* the source's, by the names that the user knows */
    uint64_t ranks;
    bool blosc;
};

/*
 * The names of types in `.zarray` (NumPy's; bfloat16 as Megatron patches it in). What is
 * not here Megatron cannot read: float8 has no NumPy type.
 */
static const char *const type_names[DTYPE_COUNT] = {
    [DTYPE_BOOL] = "|b1", [DTYPE_U8] = "|u1",  [DTYPE_I8] = "|i1",
    [DTYPE_U16] = "<u2",  [DTYPE_I16] = "<i2", [DTYPE_U32] = "<u4",
    [DTYPE_I32] = "<i4",  [DTYPE_U64] = "<u8", [DTYPE_I64] = "<i8",
    [DTYPE_F16] = "<f2",  [DTYPE_F32] = "<f4", [DTYPE_BF16] = "bfloat16",
    [DTYPE_F64] = "<f8",  [DTYPE_C64] = "<c8", [DTYPE_C128] = "<c16",
};

/* ---- what can be written ---- */

/* A key is the name of a directory, beside the files that a checkpoint has. */
static bool is_name(const char *key, size_t len)
{
    static const char *const taken[] = {"common.pt", "metadata.json", "train_state.pt",
                                        "run_config.yaml", ".metadata"};

    if (len > NAME_MAX_BYTES || memchr(key, '/', len) ||
        !store_name_is_safe(key, len) || !object_text_is_utf8(key, len))
        return false;
    for (size_t i = 0; i < ARRAY_SIZE(taken); i++)
        if (len == strlen(taken[i]) && memcmp(key, taken[i], len) == 0)
            return false;
    return true;
}

/* A tensor without an axis is one that Megatron can neither write nor load. */
static bool fits(const struct layout_tensor *t)
{
    int role = megatron_role(t->key, t->key_len);

    if (role < 0)
        role = (int)role_of(NULL, t->key, t->key_len);
    return type_names[t->dtype] && t->shape.nd > 0 && is_name(t->key, t->key_len) &&
           role == (int)t->role;
}

/* ---- arrays ---- */

/* Rows of a chunk; at least one, also where the tensor has none. */
static uint64_t rows_of(const struct zarr_writing *w, const struct layout_tensor *t)
{
    uint64_t rows = t->shape.dim[0];

    return MAX(rows / w->ranks + (rows % w->ranks != 0), (uint64_t)1);
}

static void add_numbers(struct buf *out, const char *name, const struct shape *s,
                        uint64_t first, uint64_t least)
{
    buf_addf(out, "\"%s\": [%" PRIu64, name, first);
    for (uint32_t k = 1; k < s->nd; k++)
        buf_addf(out, ", %" PRIu64, MAX(s->dim[k], least));
    buf_adds(out, "], ");
}

static int put_metadata(struct zarr_writing *w, const struct layout_tensor *t,
                        struct err *e)
{
    CLEANUP(buf_release) struct buf text = {0};
    char path[NAME_MAX_BYTES + 16];
    struct layout_file *f;

    buf_addc(&text, '{');
    add_numbers(&text, "chunks", &t->shape, rows_of(w, t), 1);
    buf_addf(&text, "\"compressor\": %s, \"dimension_separator\": \".\", ",
             w->blosc ? "{\"blocksize\": 0, \"clevel\": 5, \"cname\": \"lz4\", "
                        "\"id\": \"blosc\", \"shuffle\": 1}"
                      : "null");
    buf_addf(&text,
             "\"dtype\": \"%s\", \"fill_value\": null, \"filters\": null, "
             "\"order\": \"C\", ",
             type_names[t->dtype]);
    add_numbers(&text, "shape", &t->shape, t->shape.dim[0], 0);
    buf_adds(&text, "\"zarr_format\": 2}");
    if (buf_failed(&text))
        return err_nomem(e);
    snprintf(path, sizeof path, "%.*s/.zarray", (int)t->key_len, t->key);
    TRY(layout_file_new(w->mega.out, path, 1, &f, e));
    return layout_bytes(f, text.data, text.len, e);
}

/* Chunks are whole, also the last: zeros stand behind the tensor's end. */
static int put_chunk(struct zarr_writing *w, size_t i, uint64_t n, uint64_t bytes,
                     struct err *e)
{
    const struct layout_tensor *t = &w->mega.in.tensor[i];
    uint64_t start[SHAPE_MAX_DIMS] = {0}, size[SHAPE_MAX_DIMS], rows = rows_of(w, t);
    char path[NAME_MAX_BYTES + 32 + 2 * SHAPE_MAX_DIMS];
    struct layout_file *f;
    int at;

    at = snprintf(path, sizeof path, "%.*s/%" PRIu64, (int)t->key_len, t->key, n);
    for (uint32_t k = 1; k < t->shape.nd; k++)
        at += snprintf(path + at, sizeof path - (size_t)at, ".0");
    memcpy(size, t->shape.dim, sizeof size);
    start[0] = n * rows;
    size[0] = MIN(rows, t->shape.dim[0] - start[0]);
    TRY(layout_file_new(w->mega.out, path, 0, &f, e));
    TRY(layout_box(f, &w->mega.in, i, start, size, e));
    TRY(layout_pad(f, bytes, e));
    return w->blosc ? layout_encode(f, LAYOUT_BLOSC_LZ4, dtype_unit(t->dtype), e) : 0;
}

static int put_array(struct zarr_writing *w, size_t i, struct err *e)
{
    const struct layout_tensor *t = &w->mega.in.tensor[i];
    uint64_t rows = rows_of(w, t), bytes, all = t->shape.dim[0];
    struct shape chunk = t->shape;

    TRY(put_metadata(w, t, e));
    chunk.dim[0] = rows;
    TRY(shape_bytes(&chunk, t->dtype, &bytes, e));
    for (uint64_t n = 0; bytes > 0 && n < all / rows + (all % rows != 0); n++)
        TRY(put_chunk(w, i, n, bytes, e));
    return 0;
}

static int put_arrays(struct zarr_writing *w, struct keyset *keys, struct err *e)
{
    for (size_t i = 0; i < w->mega.in.tensors; i++) {
        const struct layout_tensor *t = &w->mega.in.tensor[i];
        int rc = 0;

        if (w->mega.objects.taken[i])
            continue;
        if (fits(t))
            rc = keyset_add(keys, t->key, t->key_len);
        if (rc < 0)
            return err_nomem(e);
        if (rc > 0)
            rc = put_array(w, i, e);
        else
            rc = layout_loss(w->mega.out, LOSS_TENSOR, w->known[i].key,
                             w->known[i].key_len, e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- sharded objects: a file a cell ---- */

static int put_cell(struct zarr_writing *w, const struct layout_object *o,
                    const struct keyset *keys, struct err *e)
{
    struct megatron_cell cell;
    struct torch_object x;
    char path[PATH_MAX];
    int rc;

    megatron_cell(o->key, o->key_len, &cell);
    if (!is_name(o->key, cell.key) || keyset_has(keys, o->key, cell.key) ||
        o->key_len - cell.key > NAME_MAX_BYTES)
        return err_set(
            e, ENOTSUP,
            "zarr: the object %.200s cannot be a file, or a tensor is called so",
            o->key);
    rc = torch_object_make(&w->mega.objects, o, false, &x, e);
    snprintf(path, sizeof path, "%.*s.pt", (int)o->key_len, o->key);
    if (rc > 0)
        rc = torch_object_file(&x, w->mega.out, path, e);
    torch_object_release(&x);
    return rc;
}

/* ---- all of it ---- */

static int take_options(const struct layout_options *o, struct zarr_writing *w,
                        struct err *e)
{
    if (o->max_shard_size || o->mesh[0] || o->ranks > MAX_RANKS)
        return err_set(e, EINVAL,
                       "zarr: tensors are cut by rows, for 1 to %d ranks: no mesh, no "
                       "shard size",
                       MAX_RANKS);
    if (o->codec && strcmp(o->codec, "none") != 0 && strcmp(o->codec, "blosc-lz4") != 0)
        return err_set(e, EINVAL, "zarr: codec %s: there are none and blosc-lz4",
                       o->codec);
    w->ranks = o->ranks ? o->ranks : 1;
    w->blosc = o->codec && strcmp(o->codec, "blosc-lz4") == 0;
    return 0;
}

static int layout_zarr(const struct layout_input *in, const struct layout_options *o,
                       struct layout *out, struct err *e)
{
    CLEANUP(keyset_release) struct keyset keys = {0};
    struct zarr_writing w = {.known = in->tensor};
    int ret = take_options(o, &w, e);

    if (ret == 0)
        ret = mega_write_begin(in, out, &w.mega, e);
    if (ret == 0)
        ret = put_arrays(&w, &keys, e);
    for (size_t i = 0; ret == 0 && i < w.mega.cells; i++)
        ret = put_cell(&w, &w.mega.cell[i], &keys, e);
    return ret == 0 ? mega_write_end(&w.mega, "zarr", e) : ret;
}

const struct format_writer writer_zarr = {
    .name = "zarr",
    .title = "Megatron Core, backend zarr",
    .layout = layout_zarr,
};
