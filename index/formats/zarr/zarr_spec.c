/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_spec.c - how chunks are decoded, as the index keeps it with a tensor. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/zarr/zarr_priv.h"

static const char HEAD[] = "zarr1 ";

static const char *const words[] = {
    [ZARR_BLOSC] = "blosc",     [ZARR_LZ4] = "lz4",       [ZARR_ZSTD] = "zstd",
    [ZARR_GZIP] = "gzip",       [ZARR_ZLIB] = "zlib",     [ZARR_BZ2] = "bz2",
    [ZARR_LZMA] = "lzma",       [ZARR_CRC32C] = "crc32c", [ZARR_DELTA] = "delta",
    [ZARR_SHUFFLE] = "shuffle", [ZARR_CAST] = "cast",     [ZARR_SCALE] = "scale",
    [ZARR_PACKBITS] = "bits",
};

static uint64_t bits_of(double v)
{
    uint64_t bits;

    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static unsigned args_of(uint8_t kind)
{
    switch (kind) {
    case ZARR_DELTA:
    case ZARR_CAST:
    case ZARR_SCALE:
        return 2;
    case ZARR_SHUFFLE:
        return 1;
    default:
        return 0;
    }
}

int zarr_spec_write(const struct zarr_array *a, struct buf *out, struct err *e)
{
    buf_addf(out, "%s%" PRIu64 " ", HEAD, a->bytes);
    for (uint32_t i = 0; i < a->chain.n; i++) {
        const struct zarr_codec *c = &a->chain.codec[i];

        buf_addf(out, "%s%s", i ? "," : "", words[c->kind]);
        for (unsigned k = 0; k < args_of(c->kind); k++)
            buf_addf(out, ":%s", c->arg[k]);
        if (c->kind == ZARR_SCALE)
            buf_addf(out, ":%016" PRIx64 ":%016" PRIx64, bits_of(c->scale),
                     bits_of(c->offset));
    }
    return buf_failed(out) ? err_nomem(e) : 0;
}

/* ---- reading ---- */

struct cursor {
    const char *p, *end;
};

static bool take_char(struct cursor *c, char want)
{
    if (c->p == c->end || *c->p != want)
        return false;
    c->p++;
    return true;
}

static bool take_number(struct cursor *c, uint64_t *out)
{
    const char *start = c->p;

    for (*out = 0; c->p < c->end && *c->p >= '0' && *c->p <= '9'; c->p++)
        if (__builtin_mul_overflow(*out, 10, out) ||
            __builtin_add_overflow(*out, (uint64_t)(*c->p - '0'), out))
            return false;
    return c->p > start;
}

/* Up to the next separator. */
static bool take_word(struct cursor *c, char *out, size_t size)
{
    size_t n = 0;

    while (c->p + n < c->end && !strchr(" ,:\n", c->p[n]))
        n++;
    if (n == 0 || n >= size)
        return false;
    memcpy(out, c->p, n);
    out[n] = '\0';
    c->p += n;
    return true;
}

/* The bits of a double as 16 digits, which no locale changes. */
static bool take_double(struct cursor *c, double *out)
{
    char word[17], *end;
    uint64_t bits;

    if (!take_char(c, ':') || !take_word(c, word, sizeof word))
        return false;
    bits = strtoull(word, &end, 16);
    memcpy(out, &bits, sizeof bits);
    return end == word + 16;
}

static bool take_codec(struct cursor *c, struct zarr_codec *out)
{
    char word[8];

    *out = (struct zarr_codec){0};
    if (!take_word(c, word, sizeof word))
        return false;
    for (size_t i = 1; i < ARRAY_SIZE(words); i++)
        if (strcmp(words[i], word) == 0)
            out->kind = (uint8_t)i;
    for (unsigned k = 0; k < args_of(out->kind); k++)
        if (!take_char(c, ':') || !take_word(c, out->arg[k], sizeof out->arg[k]))
            return false;
    return out->kind == ZARR_SCALE
               ? take_double(c, &out->scale) && take_double(c, &out->offset)
               : out->kind != 0;
}

static bool take_spec(struct cursor *c, struct zarr_spec *out)
{
    *out = (struct zarr_spec){0};
    for (const char *p = HEAD; *p; p++)
        if (!take_char(c, *p))
            return false;
    if (!take_number(c, &out->bytes) || !take_char(c, ' '))
        return false;
    if (c->p == c->end || *c->p == '\n')
        return true;
    do {
        if (out->chain.n == ZARR_MAX_CODECS ||
            !take_codec(c, &out->chain.codec[out->chain.n++]))
            return false;
    } while (take_char(c, ','));
    return c->p == c->end || *c->p == '\n';
}

int zarr_spec_read(const char *text, size_t len, struct zarr_spec *out, struct err *e)
{
    struct cursor c = {text, text + len};

    if (!take_spec(&c, out))
        return err_set(e, EBADMSG, "the index does not say how chunks are stored");
    if (take_char(&c, '\n')) {
        out->literal = c.p;
        out->literal_len = (size_t)(c.end - c.p);
    }
    return 0;
}
