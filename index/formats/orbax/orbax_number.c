/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_number.c - Python numbers, which Orbax keeps as arrays. */
#include "index/formats/orbax/orbax_number.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/endian.h"
#include "base/err.h"
#include "index/formats/object_value.h"
#include "index/formats/zarr/zarr_array.h"
#include "index/formats/zarr/zarr_priv.h"
#include "remote/source.h"

enum {
    INDEX = 16,    /* offset and length of the only chunk in a shard */
    INDEX_CRC = 4, /* behind it, with codec crc32c */
    MAX_ELEMENT = 8,
};

bool orbax_is_number(const struct zarr_array *z)
{
    static const enum dtype types[] = {
        DTYPE_BOOL, DTYPE_I8,  DTYPE_I16, DTYPE_I32,  DTYPE_I64, DTYPE_U8, DTYPE_U16,
        DTYPE_U32,  DTYPE_U64, DTYPE_F16, DTYPE_BF16, DTYPE_F32, DTYPE_F64};

    if (z->why[0] || z->numpy_dtype || z->shape.nd != 0 ||
        z->bytes != dtype_unit(z->dtype))
        return false;
    for (size_t i = 0; i < ARRAY_SIZE(types); i++)
        if (z->dtype == types[i])
            return true;
    return false;
}

/* The bytes of the chunk in a shard of one. */
static int open_shard(const struct zarr_array *z, struct source *shard,
                      struct source **out, struct err *e)
{
    CLEANUP(source_putp) struct source *index = NULL;
    uint64_t size = INDEX + (z->index_chain.n > 0 ? INDEX_CRC : 0), off, len;
    unsigned char place[INDEX];

    if (shard->size < size)
        return err_set(e, EBADMSG, "a shard of %" PRIu64 " bytes", shard->size);
    TRY(source_window(shard, z->index_at_start ? 0 : shard->size - size, size, &index,
                      e));
    TRY(zarr_decode(&z->index_chain, index, place, INDEX, e));
    off = z->index_big_endian ? get_be64(place) : get_le64(place);
    len = z->index_big_endian ? get_be64(place + 8) : get_le64(place + 8);
    if (range_outside(off, len, shard->size))
        return err_set(e, EBADMSG, "the shard's index leads out of it");
    return source_window(shard, off, len, out, e);
}

static int decode(const struct zarr_array *z, struct source *stored,
                  unsigned char element[MAX_ELEMENT], struct err *e)
{
    CLEANUP(source_putp) struct source *chunk = NULL;
    size_t size = dtype_unit(z->dtype);

    if (z->sharded)
        TRY(open_shard(z, stored, &chunk, e));
    TRY(zarr_decode(&z->chain, chunk ? chunk : stored, element, size, e));
    for (size_t i = 0; z->big_endian && i < size / 2; i++) {
        unsigned char swap = element[i];

        element[i] = element[size - 1 - i];
        element[size - 1 - i] = swap;
    }
    return 0;
}

/* The bits of a half as those of a double, which holds every one. */
static double of_half(uint16_t half)
{
    int exponent = half >> 10 & 31;
    double m = half & 1023, v;

    if (exponent == 31)
        v = m > 0 ? (double)NAN : (double)INFINITY;
    else
        v = exponent > 0 ? ldexp(m + 1024, exponent - 25) : ldexp(m, -24);
    return half >> 15 ? -v : v;
}

static double of_float(uint32_t bits)
{
    float v;

    memcpy(&v, &bits, sizeof v);
    return (double)v;
}

static double of_double(uint64_t bits)
{
    double v;

    memcpy(&v, &bits, sizeof v);
    return v;
}

static void append(enum dtype dtype, const unsigned char *element, struct buf *out)
{
    uint16_t v16 = get_le16(element);
    uint32_t v32 = get_le32(element);
    uint64_t v64 = get_le64(element);

    if (dtype == DTYPE_BOOL)
        buf_adds(out, element[0] ? "true" : "false");
    else if (dtype == DTYPE_F64)
        object_value_double(out, of_double(v64));
    else if (dtype == DTYPE_F32)
        object_value_double(out, of_float(v32));
    else if (dtype == DTYPE_BF16)
        object_value_double(out, of_float((uint32_t)v16 << 16));
    else if (dtype == DTYPE_F16)
        object_value_double(out, of_half(v16));
    else if (dtype == DTYPE_U64 || dtype == DTYPE_U32 || dtype == DTYPE_U16 ||
             dtype == DTYPE_U8)
        object_value_uint(out, v64); /* what is not of the element is 0 */
    else if (dtype == DTYPE_I64)
        object_value_int(out, (int64_t)v64);
    else if (dtype == DTYPE_I32)
        object_value_int(out, (int32_t)v32);
    else
        object_value_int(out, dtype == DTYPE_I16 ? (int16_t)v16 : (int8_t)element[0]);
}

int orbax_number(const struct zarr_array *z, struct source *stored, struct buf *out,
                 struct err *e)
{
    unsigned char element[MAX_ELEMENT] = {0};

    TRY(decode(z, stored, element, e));
    append(z->dtype, element, out);
    return buf_failed(out) ? err_nomem(e) : 0;
}
