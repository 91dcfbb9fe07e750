/* SPDX-License-Identifier: MIT */
/* index/npy.c - writes the header of an .npy file. */
#include "index/npy.h"

#include "base/endian.h"
#include "base/err.h"

#include <errno.h>
#include <string.h>

enum {
    MAGIC = 6,
    ALIGN = 64, /* as NumPy: the data can be mapped */
};

/* A tuple: "()", "(3,)", "(2, 3)". */
static void add_tuple(struct buf *b, const struct shape *s)
{
    buf_addc(b, '(');
    for (uint32_t k = 0; k < s->nd; k++)
        buf_addf(b, "%s%" PRIu64, k ? ", " : "", s->dim[k]);
    buf_adds(b, s->nd == 1 ? ",)" : ")");
}

/* Packed elements show as bytes, for which `units` counts the last dimension. */
static int add_dict(struct buf *b, enum dtype d, const struct shape *s, struct err *e)
{
    struct shape units = *s;

    TRY(dtype_bits(d) % 8 == 0 ? 0 : shape_units(s, d, &units, e));
    buf_addf(b, "{'descr': '%s', 'fortran_order': False, 'shape': ", dtype_npy(d));
    add_tuple(b, &units);
    buf_adds(b, ", }");
    return 0;
}

int npy_header(enum dtype d, const struct shape *s, struct buf *out, struct err *e)
{
    static const char magic[] = "\x93NUMPY";
    struct buf dict = {.max = 1 << 16};
    int rc = add_dict(&dict, d, s, e);
    unsigned char version = 1, length[4];
    size_t prefix = MAGIC + 2 + 2, pad;

    if (prefix + dict.len + ALIGN > UINT16_MAX) {
        version = 2;
        prefix += 2;
    }
    pad = ALIGN - (prefix + dict.len + 1) % ALIGN;
    pad = pad == ALIGN ? 0 : pad;
    put_le32(length, (uint32_t)(dict.len + pad + 1));
    buf_add(out, magic, MAGIC);
    buf_addc(out, (char)version);
    buf_addc(out, 0);
    buf_add(out, length, version == 1 ? 2 : 4);
    buf_add(out, dict.data, dict.len);
    for (; pad > 0; pad--)
        buf_addc(out, ' ');
    buf_addc(out, '\n');
    if (rc == 0 && (buf_failed(&dict) || buf_failed(out)))
        rc = err_nomem(e);
    buf_release(&dict);
    return rc;
}
