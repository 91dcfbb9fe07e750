/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_deflate.c - storages that somebody's zip tool has deflated. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/crc32.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "base/inflate.h"
#include "index/formats/torch/torch_file.h"
#include "remote/decoded.h"
#include "remote/source.h"

enum {
    BLOCK = 256 << 10,
    DEFLATE_TIMES = 1032, /* at most: two bits for a copy of 258 bytes */
};

/* What the archive promises of the plain bytes; it stands in the tensor's codec_key. */
struct promise {
    uint64_t bytes;
    uint64_t skip; /* plain bytes before the first element: a header of their own */
    uint32_t crc;
};

static bool take_number(const char **p, const char *end, unsigned base, uint64_t *out)
{
    const char *start = *p;

    *out = 0;
    for (; *p < end; (*p)++) {
        unsigned digit = **p >= '0' && **p <= '9'   ? (unsigned)(**p - '0')
                         : **p >= 'a' && **p <= 'f' ? (unsigned)(**p - 'a') + 10
                                                    : 99;

        if (digit >= base)
            break;
        if (mul_overflows(*out, base, out) || add_overflows(*out, digit, out))
            return false;
    }
    return *p > start;
}

/* "BYTES CRC" or "BYTES CRC SKIP": decimal, eight hexadecimal digits, decimal. */
static bool read_promise(const struct chunk_tensor *t, struct promise *out)
{
    const char *p = t->key, *end = t->key + t->key_len, *digits;
    uint64_t crc;

    out->skip = 0;
    if (!take_number(&p, end, 10, &out->bytes) || p == end || *p++ != ' ' ||
        end - p < 8)
        return false;
    digits = p;
    if (!take_number(&p, digits + 8, 16, &crc) || p != digits + 8)
        return false;
    out->crc = (uint32_t)crc;
    if (p < end && (*p++ != ' ' || !take_number(&p, end, 10, &out->skip)))
        return false;
    return p == end && out->skip <= out->bytes;
}

struct inflating {
    const struct promise *want;
    struct source *in;
    uint64_t at; /* next byte of `in` */
    int fd;
    uint64_t written;
    uint32_t crc;
    struct inflate *stream;
    unsigned char *packed, *plain; /* BLOCK bytes each */
};

static int wrong_size(const struct inflating *x, const char *more, uint64_t bytes,
                      struct err *e)
{
    return err_set(e, EBADMSG,
                   "%s%" PRIu64 " bytes come out of deflate, the archive says %" PRIu64,
                   more, bytes, x->want->bytes);
}

static int put(struct inflating *x, size_t n, struct err *e)
{
    if (n > x->want->bytes - x->written)
        return wrong_size(x, "more than ", x->want->bytes, e);
    x->crc = crc32_zip(x->crc, x->plain, n);
    x->written += n;
    return write_all(x->fd, x->plain, n, e);
}

/* Inflates packed[0..n), which is next in `in`. */
static int step(struct inflating *x, size_t n, bool *ended, struct err *e)
{
    size_t done = 0, got;

    do {
        size_t used = n - done;

        got = BLOCK;
        TRY(inflate_some(x->stream, x->packed + done, &used, x->plain, &got, ended, e));
        TRY(put(x, got, e));
        done += used;
        if (used == 0 && got == 0)
            break;
    } while (!*ended && (done < n || got == BLOCK));
    x->at += done;
    return done > 0 || *ended ? 0 : err_set(e, EBADMSG, "damaged deflate data");
}

static int inflate_all(struct inflating *x, struct err *e)
{
    bool ended = false;
    uint64_t length;

    while (!ended) {
        size_t n = (size_t)MIN((uint64_t)BLOCK, x->in->size - x->at);

        if (n == 0)
            return err_set(e, EBADMSG, "the deflate data is cut");
        TRY(source_read(x->in, x->at, n, x->packed, e));
        TRY(step(x, n, &ended, e));
    }
    length = inflate_length(x->stream);
    if (length != x->in->size)
        return err_set(e, EBADMSG, "%" PRIu64 " bytes behind the deflate data",
                       x->in->size - length);
    if (x->written != x->want->bytes)
        return wrong_size(x, "", x->written, e);
    return x->crc == x->want->crc ? 0 : err_set(e, EBADMSG, "a wrong checksum");
}

/* decode_fn: exactly what the archive promises. */
static int inflate_to_file(void *user, struct source *in, int fd, uint64_t limit,
                           uint64_t *size, struct err *e)
{
    CLEANUP(inflate_freep) struct inflate *stream = NULL;
    CLEANUP_FREE unsigned char *blocks = malloc(2 * BLOCK);
    struct inflating x = {
        .want = user, .in = in, .fd = fd, .packed = blocks, .plain = blocks + BLOCK};
    int rc;

    if (!blocks)
        return err_nomem(e);
    if (x.want->bytes > limit)
        return err_set(e, EFBIG, "%" PRIu64 " bytes come out of deflate",
                       x.want->bytes);
    rc = inflate_new(INFLATE_BEST, &stream, e);
    x.stream = stream;
    if (rc == 0)
        rc = inflate_all(&x, e);
    *size = x.written;
    return rc;
}

/* A promise that no deflate data of this length can keep would set much room aside. */
static int check_promise(const struct promise *want, uint64_t packed, struct err *e)
{
    if (want->bytes / DEFLATE_TIMES > packed)
        return err_set(e, EBADMSG,
                       "%" PRIu64 " bytes cannot come out of %" PRIu64 " of deflate",
                       want->bytes, packed);
    return 0;
}

/* Steps in bytes; every element must lie within the plain bytes. */
static int place(const struct chunk *c, const struct chunk_tensor *t,
                 const struct promise *plain, struct chunk_place *out, struct err *e)
{
    unsigned unit = dtype_unit(t->dtype);

    TRY(chunk_steps(c, t->units->nd, (plain->bytes - plain->skip) / unit, out->step,
                    e));
    for (uint32_t k = 0; k < t->units->nd; k++)
        if (__builtin_mul_overflow(out->step[k], (int64_t)unit, &out->step[k]))
            return err_set(e, EBADMSG, "a stride over 2^63 bytes");
    out->base = plain->skip + c->first * unit;
    return 0;
}

static int decode(struct source *shard, const struct chunk *c,
                  const struct chunk_tensor *t, struct decoded_cache *decoded,
                  struct chunk_place *out, struct err *e)
{
    CLEANUP(source_putp) struct source *window = NULL, *plain = NULL;
    struct promise want;
    struct decoded_key key = decoded_key_of(shard, c->offset, c->length, c->encoding);

    if (!decoded)
        return err_set(e, ENOTSUP, "compressed, and there is no place to decode it");
    if (!read_promise(t, &want))
        return err_set(e, EBADMSG, "the index does not say what comes out of deflate");
    if (range_outside(c->offset, c->length, shard->size))
        return err_set(e, EBADMSG, "the file has only %" PRIu64 " bytes", shard->size);
    TRY(check_promise(&want, c->length, e));
    TRY(source_window(shard, c->offset, c->length, &window, e));
    TRY(decoded_get(decoded, &key, window, want.bytes, inflate_to_file, &want, &plain,
                    e));
    if (plain->size != want.bytes)
        return err_set(e, EBADMSG, "the index says two things of what comes out");
    TRY(place(c, t, &want, out, e));
    out->flags = c->flags;
    out->decoded = true;
    out->src = source_get(plain);
    return 0;
}

static int resolve(struct source *shard, const struct chunk *c,
                   const struct chunk_tensor *t, struct decoded_cache *decoded,
                   struct chunk_place *out, struct err *e)
{
    if (decode(shard, c, t, decoded, out, e) < 0)
        return err_wrap(e, "%s, deflated bytes %" PRIu64 "+%" PRIu64, shard->name,
                        c->offset, c->length);
    return 0;
}

const struct chunk_codec codec_zip_deflate = {
    .encoding = CHUNK_ZIP_DEFLATE,
    .name = "zip-deflate",
    .decodes = true,
    .resolve = resolve,
};
