/* SPDX-License-Identifier: MIT */
/* index/shape.c - dimensions of a tensor and what follows from them. */
#include "index/shape.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"

/* Byte offsets are also handed to off_t: nothing may pass 2^63 - 1. */
static bool too_large(uint64_t v)
{
    return v > INT64_MAX;
}

/* Sets the message "shape [..]: WHY". */
static int shape_err(const struct shape *s, int code, const char *why, struct err *e)
{
    struct buf text = {.max = 4096};

    if (shape_format(s, &text) < 0) {
        buf_release(&text);
        return err_set(e, code, "%s", why);
    }
    err_set(e, code, "shape %s: %s", text.data, why);
    buf_release(&text);
    return -code;
}

int shape_elements(const struct shape *s, uint64_t *out, struct err *e)
{
    uint64_t n = 1;

    assert(s->nd <= SHAPE_MAX_DIMS);
    for (uint32_t k = 0; k < s->nd; k++) {
        if (mul_overflows(n, s->dim[k], &n) || too_large(n))
            return shape_err(s, EOVERFLOW, "more than 2^63 elements", e);
    }
    *out = n;
    return 0;
}

int shape_bytes(const struct shape *s, enum dtype d, uint64_t *out, struct err *e)
{
    uint64_t n, bits = dtype_bits(d);

    TRY(shape_elements(s, &n, e));
    if (!bits)
        return shape_err(s, EBADMSG, "unknown element type", e);
    if (bits % 8 == 0) {
        if (mul_overflows(n, bits / 8, &n) || too_large(n))
            return shape_err(s, EOVERFLOW, "more than 2^63 bytes", e);
    } else {
        if (mul_overflows(n, bits, &n))
            return shape_err(s, EOVERFLOW, "more than 2^64 bits", e);
        if (n % 8)
            return shape_err(s, EBADMSG, "elements do not fill whole bytes", e);
        n /= 8;
    }
    *out = n;
    return 0;
}

int shape_units(const struct shape *s, enum dtype d, struct shape *out, struct err *e)
{
    uint64_t bytes, bits = dtype_bits(d), last;

    TRY(shape_bytes(s, d, &bytes, e));
    if (bits % 8 == 0) {
        *out = *s;
        return 0;
    }
    /* Here nd > 0: one element of 4 or 6 bits would not have filled whole bytes. */
    if (!mul_overflows(s->dim[s->nd - 1], bits, &last) && last % 8 == 0) {
        *out = *s;
        out->dim[s->nd - 1] = last / 8;
    } else {
        *out = (struct shape){.nd = 1, .dim = {bytes}};
    }
    return 0;
}

bool shape_equal(const struct shape *a, const struct shape *b)
{
    return a->nd == b->nd && !memcmp(a->dim, b->dim, a->nd * sizeof a->dim[0]);
}

int shape_format(const struct shape *s, struct buf *out)
{
    buf_addc(out, '[');
    for (uint32_t k = 0; k < s->nd; k++)
        buf_addf(out, "%s%" PRIu64, k ? ", " : "", s->dim[k]);
    buf_addc(out, ']');
    return buf_failed(out);
}
