/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_zip_write.c - archives of torch.save, byte by byte. */
#include "index/formats/torch/torch_zip_write.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/layout.h"

/* What torch calls its element types; without a storage class it is of torch 2.1 or later. */
static const struct {
    const char *name, *storage;
} types[DTYPE_COUNT] = {
    [DTYPE_BOOL] = {"bool", "BoolStorage"},
    [DTYPE_U8] = {"uint8", "ByteStorage"},
    [DTYPE_I8] = {"int8", "CharStorage"},
    [DTYPE_U16] = {"uint16", NULL},
    [DTYPE_I16] = {"int16", "ShortStorage"},
    [DTYPE_U32] = {"uint32", NULL},
    [DTYPE_I32] = {"int32", "IntStorage"},
    [DTYPE_U64] = {"uint64", NULL},
    [DTYPE_I64] = {"int64", "LongStorage"},
    [DTYPE_F16] = {"float16", "HalfStorage"},
    [DTYPE_BF16] = {"bfloat16", "BFloat16Storage"},
    [DTYPE_F32] = {"float32", "FloatStorage"},
    [DTYPE_F64] = {"float64", "DoubleStorage"},
    [DTYPE_C64] = {"complex64", "ComplexFloatStorage"},
    [DTYPE_C128] = {"complex128", "ComplexDoubleStorage"},
    [DTYPE_C32] = {"complex32", NULL},
    [DTYPE_F8_E4M3] = {"float8_e4m3fn", NULL},
    [DTYPE_F8_E5M2] = {"float8_e5m2", NULL},
    [DTYPE_F8_E8M0] = {"float8_e8m0fnu", NULL},
    [DTYPE_F8_E4M3FNUZ] = {"float8_e4m3fnuz", NULL},
    [DTYPE_F8_E5M2FNUZ] = {"float8_e5m2fnuz", NULL},
    [DTYPE_F4] = {"float4_e2m1fn_x2", NULL},
};

const char *torch_name_of_dtype(enum dtype d)
{
    return (unsigned)d < DTYPE_COUNT ? types[d].name : NULL;
}

bool torch_shape(enum dtype d, const struct shape *s, struct shape *out)
{
    struct err ignored = {0};
    uint64_t elements;

    return torch_name_of_dtype(d) && shape_elements(s, &elements, &ignored) == 0 &&
           shape_units(s, d, out, &ignored) == 0 && out->nd == s->nd;
}

/* ---- data.pkl ---- */

static void put_numbers(struct pickler *p, const uint64_t *v, uint32_t n)
{
    pickle_mark(p);
    for (uint32_t k = 0; k < n; k++)
        pickle_int(p, (int64_t)v[k]);
    pickle_tuple(p);
}

/* Row-major; an axis without elements counts as one, as torch has it. */
static void put_strides(struct pickler *p, const struct shape *s)
{
    uint64_t stride[SHAPE_MAX_DIMS], step = 1;

    for (uint32_t k = s->nd; k-- > 0;) {
        stride[k] = step;
        step *= MAX(s->dim[k], (uint64_t)1);
    }
    put_numbers(p, stride, s->nd);
}

/* The persistent id of a storage; an untyped one counts bytes. */
static void put_storage(struct pickler *p, enum dtype d, uint64_t elements,
                        const char *key)
{
    const char *class = types[d].storage;

    pickle_mark(p);
    pickle_string(p, "storage");
    pickle_global(p, class ? "torch" : "torch.storage",
                  class ? class : "UntypedStorage");
    pickle_string(p, key);
    pickle_string(p, "cpu");
    pickle_int(p, (int64_t)(class ? elements : elements * dtype_unit(d)));
    pickle_tuple(p);
    pickle_persistent(p);
}

void torch_pickle_tensor(struct pickler *p, enum dtype d, const struct shape *shape,
                         const char *key)
{
    bool old = types[d].storage;
    uint64_t elements = 1;

    for (uint32_t k = 0; k < shape->nd; k++)
        elements *= shape->dim[k];
    pickle_global(p, "torch._utils", old ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    pickle_mark(p);
    put_storage(p, d, elements, key);
    pickle_int(p, 0);
    put_numbers(p, shape->dim, shape->nd);
    put_strides(p, shape);
    pickle_bool(p, false); /* requires_grad */
    pickle_ordered_dict(p);
    if (!old)
        pickle_global(p, "torch", types[d].name);
    pickle_tuple(p);
    pickle_reduce(p);
}

/* ---- archives ---- */

static int put_member(struct zip_write *z, const char *name, const void *data,
                      size_t len, struct err *e)
{
    return zip_write_literal(z, name, strlen(name), data, len, e);
}

int torch_zip_marks(struct zip_write *z, bool full, struct err *e)
{
    if (full) {
        TRY(put_member(z, "archive/.format_version", "1", 1, e));
        TRY(put_member(z, "archive/.storage_alignment", "64", 2, e));
    }
    return put_member(z, "archive/byteorder", "little", 6, e);
}

int torch_zip_version(struct zip_write *z, struct err *e)
{
    return put_member(z, "archive/version", "3\n", 2, e);
}

static int put_pickle(struct zip_write *z, const struct buf *pickle, struct err *e)
{
    if (buf_failed(pickle))
        return err_nomem(e);
    return put_member(z, "archive/data.pkl", pickle->data, pickle->len, e);
}

int torch_zip_item(struct zip_write *z, struct layout_file *f,
                   const struct layout_input *in, size_t tensor, const uint64_t *start,
                   const uint64_t *size, uint64_t *len, struct err *e)
{
    static const char data[] = "archive/data/0";
    const struct layout_tensor *t = &in->tensor[tensor];
    struct pickler p = {0};
    struct shape box = {.nd = t->shape.nd};
    uint64_t bytes = dtype_unit(t->dtype);
    int ret;

    for (uint32_t k = 0; k < box.nd; k++) {
        box.dim[k] = size[k];
        bytes *= size[k];
    }
    pickle_begin(&p);
    torch_pickle_tensor(&p, t->dtype, &box, "0");
    pickle_end(&p);
    zip_write_begin(z, f, TORCH_ALIGN);
    ret = put_pickle(z, &p.out, e);
    pickle_release(&p);
    if (ret == 0)
        ret = torch_zip_marks(z, false, e);
    if (ret == 0)
        ret = zip_write_open(z, data, strlen(data), bytes, e);
    if (ret == 0)
        ret = layout_box(f, in, tensor, start, size, e);
    if (ret == 0)
        ret = torch_zip_version(z, e);
    return ret == 0 ? zip_write_end(z, len, e) : ret;
}

int torch_zip_object(struct zip_write *z, struct layout_file *f,
                     const struct buf *pickle, uint64_t *len, struct err *e)
{
    zip_write_begin(z, f, TORCH_ALIGN);
    TRY(put_pickle(z, pickle, e));
    TRY(torch_zip_marks(z, false, e));
    TRY(torch_zip_version(z, e));
    return zip_write_end(z, len, e);
}
