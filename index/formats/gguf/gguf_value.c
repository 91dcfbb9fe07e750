/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf_value.c - one value of a GGUF file's metadata as JSON. */
#include "index/formats/gguf/gguf_value.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/gguf/gguf_input.h"
#include "index/formats/object_value.h"
#include "remote/source.h"

enum {
    MAX_DEPTH = 8, /* arrays in arrays: ggml itself refuses any */
    MAX_TEXT = 16 << 20,
    MAX_JSON = 256 << 20, /* vocabularies have under 20 MiB */
};

/* Bytes of one element, at least, in the file. */
static const uint8_t least[GGUF_KINDS] = {
    [GGUF_U8] = 1,     [GGUF_I8] = 1,     [GGUF_U16] = 2, [GGUF_I16] = 2,
    [GGUF_U32] = 4,    [GGUF_I32] = 4,    [GGUF_F32] = 4, [GGUF_BOOL] = 1,
    [GGUF_STRING] = 8, [GGUF_ARRAY] = 12, [GGUF_U64] = 8, [GGUF_I64] = 8,
    [GGUF_F64] = 8,
};

/* An array whose values are being read. */
struct level {
    uint64_t kind, left;
    bool first;
};

void gguf_value_release(struct gguf_value *v)
{
    buf_release(&v->json);
    buf_release(&v->text);
}

static void write_int(struct gguf_value *v, uint64_t bits, unsigned size)
{
    unsigned shift = 64 - 8 * size;
    int64_t i = (int64_t)(bits << shift) >> shift;

    v->is_number = i >= 0;
    v->number = (uint64_t)i;
    object_value_int(&v->json, i);
}

static void write_uint(struct gguf_value *v, uint64_t u)
{
    v->is_number = true;
    v->number = u;
    object_value_uint(&v->json, u);
}

static void write_float(struct gguf_value *v, uint64_t bits, unsigned size)
{
    uint32_t narrow = (uint32_t)bits;
    double d;
    float f;

    memcpy(&f, &narrow, sizeof f);
    memcpy(&d, &bits, sizeof d);
    object_value_double(&v->json, size == sizeof f ? (double)f : d);
}

static void write_bool(struct gguf_value *v, uint64_t byte)
{
    v->odd_bools += byte > 1;
    buf_adds(&v->json, byte ? "true" : "false");
}

static int write_string(struct gguf_input *in, struct gguf_value *v, struct err *e)
{
    TRY(gguf_take_string(in, MAX_TEXT, &v->text, e));
    v->is_text = true;
    object_value_text(&v->json, v->text.data, v->text.len);
    return 0;
}

/* Anything but an array. */
static int write_scalar(struct gguf_input *in, uint64_t kind, struct gguf_value *v,
                        struct err *e)
{
    uint64_t bits;

    v->is_number = v->is_text = false;
    if (kind == GGUF_STRING)
        return write_string(in, v, e);
    TRY(gguf_take(in, least[kind], &bits, e));
    if (kind == GGUF_F32 || kind == GGUF_F64)
        write_float(v, bits, least[kind]);
    else if (kind == GGUF_BOOL)
        write_bool(v, bits);
    else if (kind == GGUF_I8 || kind == GGUF_I16 || kind == GGUF_I32 ||
             kind == GGUF_I64)
        write_int(v, bits, least[kind]);
    else
        write_uint(v, bits);
    return 0;
}

static int check_kind(const struct gguf_input *in, uint64_t kind, struct err *e)
{
    return kind < GGUF_KINDS ? 0
                             : gguf_bad(in, "a value of a type that is not known", e);
}

static int enter(struct gguf_input *in, struct level *l, struct gguf_value *v,
                 struct err *e)
{
    *l = (struct level){.first = true};
    TRY(gguf_take(in, 4, &l->kind, e));
    TRY(check_kind(in, l->kind, e));
    TRY(gguf_take(in, 8, &l->left, e));
    if (l->left > gguf_input_left(in) / least[l->kind])
        return gguf_bad(in, "an array has more values than the file bytes", e);
    buf_addc(&v->json, '[');
    return 0;
}

static int write_array(struct gguf_input *in, struct gguf_value *v, struct err *e)
{
    struct level level[MAX_DEPTH], *l = level;

    TRY(enter(in, l, v, e));
    for (;;) {
        if (l->left == 0) {
            buf_addc(&v->json, ']');
            if (l == level)
                break;
            l--;
            continue;
        }
        l->left--;
        if (!l->first)
            buf_addc(&v->json, ',');
        l->first = false;
        if (buf_failed(&v->json))
            break;
        if (l->kind != GGUF_ARRAY) {
            TRY(write_scalar(in, l->kind, v, e));
        } else if (++l == level + MAX_DEPTH) {
            return gguf_bad(in, "arrays are more than 8 deep in each other", e);
        } else {
            TRY(enter(in, l, v, e));
        }
    }
    v->is_number = v->is_text = false;
    return 0;
}

int gguf_value_read(struct gguf_input *in, uint64_t kind, struct gguf_value *v,
                    struct err *e)
{
    int rc;

    buf_clear(&v->json);
    v->json.max = MAX_JSON;
    TRY(check_kind(in, kind, e));
    rc = kind == GGUF_ARRAY ? write_array(in, v, e) : write_scalar(in, kind, v, e);
    if (rc == 0 && buf_failed(&v->json) == -EFBIG)
        return err_set(e, EFBIG, "%s: a value of more than 256 MiB of JSON",
                       in->src->name);
    return rc < 0 ? rc : buf_failed(&v->json) ? err_nomem(e) : 0;
}
