/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_decode.c - from the stored bytes of a chunk to its elements. */
#include <bzlib.h>
#include <errno.h>
#include <limits.h>
#include <lz4.h>
#include <lzma.h>
#include <string.h>
#include <zlib.h>
#include <zstd.h>

#include "base/crc32c.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/guard.h"
#include "index/formats/zarr/zarr_decode.h"
#include "index/formats/zarr/zarr_priv.h"
#include "index/formats/zstd_fail.h"
#include "remote/source.h"

enum {
    BLOCK = 256 << 10,
    /*
     * Stored bytes up to here are had at once. Longer ones stream through a block, where
     * the codec can; so memory does not grow with chunks of gigabytes.
     */
    ONE_SHOT_MAX = 64 << 20,
    SLACK = 1 << 20,
    ZSTD_WINDOW_LOG = 27,    /* 128 MiB; level 22 needs no more */
    LZMA_MEMORY = 160 << 20, /* preset 9 has a dictionary of 64 MiB */
};

/* ---- bytes in ---- */

void zarr_input_release(struct zarr_input *in)
{
    free(in->owned);
    *in = (struct zarr_input){0};
}

int zarr_input_all(struct zarr_input *in, struct err *e)
{
    if (in->data || in->len == 0)
        return 0;
    in->owned = malloc(in->len);
    if (!in->owned)
        return err_nomem(e);
    in->data = in->owned;
    return source_read(in->src, 0, in->len, in->owned, e);
}

/* The next bytes for a codec that streams: *n is 0 at the end. */
static int input_next(struct zarr_input *in, const unsigned char **p, size_t *n,
                      struct err *e)
{
    size_t left = in->len - in->at;

    if (in->data) {
        *p = in->data + in->at;
        *n = MIN(left, (size_t)INT_MAX);
        in->at += *n;
        return 0;
    }
    if (!in->owned && !(in->owned = malloc(BLOCK)))
        return err_nomem(e);
    *n = MIN(left, (size_t)BLOCK);
    *p = in->owned;
    if (*n > 0)
        TRY(source_read(in->src, in->at, *n, in->owned, e));
    in->at += *n;
    return 0;
}

/* ---- bytes out ---- */

void zarr_output_release(struct zarr_output *out)
{
    if (!out->fixed)
        free(out->data);
    *out = (struct zarr_output){0};
}

int zarr_output_room(struct zarr_output *out, size_t need, struct err *e)
{
    size_t cap = MAX(out->cap * 2, out->len + need);
    unsigned char *bigger;

    if (need <= out->cap - out->len)
        return 0;
    if (out->fixed || need > out->max - out->len)
        return err_set(e, EBADMSG, "more than %zu bytes come out", out->max);
    cap = MIN(cap, out->max);
    bigger = realloc(out->data, cap);
    if (!bigger)
        return err_nomem(e);
    out->data = bigger;
    out->cap = cap;
    return 0;
}

/* Some room for a codec that streams; none is left when the output is full. */
static int output_some(struct zarr_output *out, size_t *n, struct err *e)
{
    if (out->len == out->cap && !out->fixed)
        TRY(zarr_output_room(out, MIN((size_t)BLOCK, out->max - out->len), e));
    *n = MIN(out->cap - out->len, (size_t)INT_MAX);
    return 0;
}

/* ---- codecs that stream ---- */

enum step { STEP_MORE, STEP_END, STEP_BAD, STEP_MEMORY };

/* What zlib, bzip2, lzma and zstd have in common. */
struct stream {
    const unsigned char *in;
    size_t in_len;
    unsigned char *out;
    size_t out_len;
    union {
        z_stream z;
        bz_stream bz;
        lzma_stream lzma;
        ZSTD_DStream *zstd;
    } u;
};

struct stream_ops {
    const char *name;
    bool padded; /* zero bytes may follow */
    bool (*begin)(struct stream *s);
    /* Takes from in and gives to out; `last`: nothing will follow what is in `in`. */
    enum step (*step)(struct stream *s, bool last);
    /*
     * Several streams, one behind the other, are one. NULL: what follows is not looked at
     * (Python's zlib stops at the stream's end), or the codec has read to the end itself.
     */
    bool (*again)(struct stream *s);
    void (*end)(struct stream *s);
};

static bool zlib_begin(struct stream *s)
{
    return inflateInit2(&s->u.z, MAX_WBITS) == Z_OK;
}

static bool gzip_begin(struct stream *s)
{
    return inflateInit2(&s->u.z, MAX_WBITS + 16) == Z_OK;
}

static enum step zlib_step(struct stream *s, bool last)
{
    int rc;

    (void)last;
    s->u.z.next_in = (unsigned char *)(uintptr_t)s->in;
    s->u.z.avail_in = (uInt)s->in_len;
    s->u.z.next_out = s->out;
    s->u.z.avail_out = (uInt)s->out_len;
    rc = inflate(&s->u.z, Z_NO_FLUSH);
    s->in += s->in_len - s->u.z.avail_in;
    s->in_len = s->u.z.avail_in;
    s->out_len = s->u.z.avail_out;
    if (rc == Z_STREAM_END)
        return STEP_END;
    if (rc == Z_MEM_ERROR)
        return STEP_MEMORY;
    return rc == Z_OK || rc == Z_BUF_ERROR ? STEP_MORE : STEP_BAD;
}

static bool gzip_again(struct stream *s)
{
    return inflateReset(&s->u.z) == Z_OK;
}

static void zlib_end(struct stream *s)
{
    inflateEnd(&s->u.z);
}

static bool bz2_begin(struct stream *s)
{
    s->u.bz = (bz_stream){0};
    return BZ2_bzDecompressInit(&s->u.bz, 0, 0) == BZ_OK;
}

static enum step bz2_step(struct stream *s, bool last)
{
    int rc;

    (void)last;
    s->u.bz.next_in = (char *)(uintptr_t)s->in;
    s->u.bz.avail_in = (unsigned)s->in_len;
    s->u.bz.next_out = (char *)s->out;
    s->u.bz.avail_out = (unsigned)s->out_len;
    rc = BZ2_bzDecompress(&s->u.bz);
    s->in += s->in_len - s->u.bz.avail_in;
    s->in_len = s->u.bz.avail_in;
    s->out_len = s->u.bz.avail_out;
    if (rc == BZ_STREAM_END)
        return STEP_END;
    if (rc == BZ_MEM_ERROR)
        return STEP_MEMORY;
    return rc == BZ_OK ? STEP_MORE : STEP_BAD;
}

static void bz2_end(struct stream *s)
{
    BZ2_bzDecompressEnd(&s->u.bz);
}

static bool bz2_again(struct stream *s)
{
    bz2_end(s);
    return bz2_begin(s);
}

static bool lzma_begin(struct stream *s)
{
    s->u.lzma = (lzma_stream)LZMA_STREAM_INIT;
    /* So that it ends only with all of the input, and bytes behind are damage to it. */
    return lzma_auto_decoder(&s->u.lzma, LZMA_MEMORY, LZMA_CONCATENATED) == LZMA_OK;
}

static enum step lzma_step(struct stream *s, bool last)
{
    lzma_ret rc;

    s->u.lzma.next_in = s->in;
    s->u.lzma.avail_in = s->in_len;
    s->u.lzma.next_out = s->out;
    s->u.lzma.avail_out = s->out_len;
    rc = lzma_code(&s->u.lzma, last ? LZMA_FINISH : LZMA_RUN);
    s->in += s->in_len - s->u.lzma.avail_in;
    s->in_len = s->u.lzma.avail_in;
    s->out_len = s->u.lzma.avail_out;
    if (rc == LZMA_STREAM_END)
        return STEP_END;
    if (rc == LZMA_MEM_ERROR || rc == LZMA_MEMLIMIT_ERROR)
        return STEP_MEMORY;
    return rc == LZMA_OK || rc == LZMA_BUF_ERROR ? STEP_MORE : STEP_BAD;
}

static void lzma_finish(struct stream *s)
{
    lzma_end(&s->u.lzma);
}

static bool zstd_begin(struct stream *s)
{
    s->u.zstd = ZSTD_createDStream();
    return s->u.zstd && !ZSTD_isError(ZSTD_DCtx_setParameter(
                            s->u.zstd, ZSTD_d_windowLogMax, ZSTD_WINDOW_LOG));
}

static enum step zstd_step(struct stream *s, bool last)
{
    ZSTD_inBuffer in = {s->in, s->in_len, 0};
    ZSTD_outBuffer out = {s->out, s->out_len, 0};
    size_t rc = ZSTD_decompressStream(s->u.zstd, &out, &in);

    (void)last;
    s->in += in.pos;
    s->in_len -= in.pos;
    s->out_len -= out.pos;
    if (ZSTD_isError(rc))
        return ZSTD_getErrorCode(rc) == ZSTD_error_memory_allocation ? STEP_MEMORY
                                                                     : STEP_BAD;
    return rc == 0 ? STEP_END : STEP_MORE;
}

static bool zstd_again(struct stream *s)
{
    return !ZSTD_isError(ZSTD_DCtx_reset(s->u.zstd, ZSTD_reset_session_only));
}

static void zstd_end(struct stream *s)
{
    ZSTD_freeDStream(s->u.zstd);
}

static const struct stream_ops zlib_ops = {"zlib",    false, zlib_begin,
                                           zlib_step, NULL,  zlib_end};
static const struct stream_ops gzip_ops = {"gzip",    true,       gzip_begin,
                                           zlib_step, gzip_again, zlib_end};
static const struct stream_ops bz2_ops = {"bz2",    false,     bz2_begin,
                                          bz2_step, bz2_again, bz2_end};
static const struct stream_ops lzma_ops = {"lzma",    false, lzma_begin,
                                           lzma_step, NULL,  lzma_finish};
static const struct stream_ops zstd_ops = {"zstd",    false,      zstd_begin,
                                           zstd_step, zstd_again, zstd_end};

static int cannot(const struct stream_ops *ops, enum step step, struct err *e)
{
    if (step == STEP_MEMORY)
        return err_set(e, ENOMEM, "%s: out of memory", ops->name);
    return err_set(e, EBADMSG, "damaged %s data", ops->name);
}

/* More input where there is none in s; *ended: there is no more. */
static int refill(struct stream *s, struct zarr_input *in, bool *ended, struct err *e)
{
    if (s->in_len == 0)
        TRY(input_next(in, &s->in, &s->in_len, e));
    *ended = s->in_len == 0;
    return 0;
}

static bool only_zeros(const struct stream *s)
{
    for (size_t i = 0; i < s->in_len; i++)
        if (s->in[i] != 0)
            return false;
    return true;
}

/* Behind the end of one stream: 1: nothing follows, 0: the next one begins. */
static int behind_end(struct stream *s, const struct stream_ops *ops,
                      struct zarr_input *in, struct err *e)
{
    bool ended;

    for (;;) {
        TRY(refill(s, in, &ended, e));
        if (ended)
            return 1;
        if (!ops->padded || !only_zeros(s))
            break;
        s->in_len = 0;
    }
    if (!ops->again)
        return 1;
    return ops->again(s) ? 0 : err_nomem(e);
}

/* One call of the codec. *full: no room was left, and it may want some. */
static int run_step(struct stream *s, const struct stream_ops *ops,
                    struct zarr_input *in, struct zarr_output *out, enum step *step,
                    struct err *e)
{
    unsigned char spare[16]; /* so that what is too much is seen */
    size_t in_before, room = 0;
    bool ended = false, full;

    TRY(refill(s, in, &ended, e));
    TRY(output_some(out, &room, e));
    full = room == 0;
    in_before = s->in_len;
    s->out = full ? spare : out->data + out->len;
    s->out_len = room = full ? sizeof spare : room;
    *step = ops->step(s, in->at == in->len);
    if (*step == STEP_BAD || *step == STEP_MEMORY)
        return cannot(ops, *step, e);
    if (full && s->out_len < room)
        return err_set(e, EBADMSG, "more than %zu bytes come out of %s", out->max,
                       ops->name);
    if (!full)
        out->len += room - s->out_len;
    if (*step == STEP_MORE && ended && s->out_len == room && s->in_len == in_before)
        return err_set(e, EBADMSG, "the %s data is cut", ops->name);
    return 0;
}

static int run_stream(struct stream *s, const struct stream_ops *ops,
                      struct zarr_input *in, struct zarr_output *out, struct err *e)
{
    enum step step;
    int rc = 0;

    while (rc == 0) {
        rc = run_step(s, ops, in, out, &step, e);
        if (rc == 0 && step == STEP_END)
            rc = behind_end(s, ops, in, e);
    }
    return rc < 0 ? rc : 0;
}

static int decode_stream(const struct stream_ops *ops, struct zarr_input *in,
                         struct zarr_output *out, struct err *e)
{
    struct stream s = {0};
    int rc = ops->begin(&s) ? run_stream(&s, ops, in, out, e) : err_nomem(e);

    ops->end(&s);
    return rc;
}

/* ---- codecs that want all at once ---- */

/* Frames of known total size, without the window that streaming needs. */
static int decode_zstd(struct zarr_input *in, struct zarr_output *out, struct err *e)
{
    size_t rc;

    if (!out->fixed || in->len > ONE_SHOT_MAX)
        return decode_stream(&zstd_ops, in, out, e);
    TRY(zarr_input_all(in, e));
    rc = ZSTD_decompress(out->data, out->cap, in->data, in->len);
    if (ZSTD_isError(rc))
        return zstd_fail(rc, e);
    out->len = rc;
    return 0;
}

/* int32 length, then one block. */
static int decode_lz4(struct zarr_input *in, struct zarr_output *out, struct err *e)
{
    uint32_t want;
    int rc;

    TRY(zarr_input_all(in, e));
    if (in->len < 4 || in->len > INT_MAX)
        return err_set(e, EBADMSG, "%zu bytes are no lz4 chunk", in->len);
    want = get_le32(in->data);
    if (want > INT_MAX)
        return err_set(e, EBADMSG, "lz4: length %" PRIu32 ", the chunk has %zu bytes",
                       want, out->max);
    TRY(zarr_output_room(out, want, e));
    rc = LZ4_decompress_safe((const char *)in->data + 4, (char *)out->data,
                             (int)(in->len - 4), (int)want);
    if (rc < 0 || (uint32_t)rc != want)
        return err_set(e, EBADMSG, "damaged lz4 data");
    out->len = want;
    return 0;
}

/*
 * The library reads lengths a second time and trusts them: not out of the page cache,
 * where somebody may write a new chunk over the one that was checked.
 */
static int decode_blosc(struct zarr_input *in, struct zarr_output *out, struct err *e)
{
    if (!in->owned)
        in->data = NULL;
    TRY(zarr_input_all(in, e));
    return zarr_blosc(in, out, e);
}

/* ---- checksums ---- */

static int copy_out(const struct zarr_input *in, struct zarr_output *out, struct err *e)
{
    TRY(zarr_output_room(out, in->len, e));
    if (in->len > 0)
        memcpy(out->data, in->data, in->len);
    out->len = in->len;
    return 0;
}

static int decode_crc32c(struct zarr_input *in, struct zarr_output *out, struct err *e)
{
    TRY(zarr_input_all(in, e));
    if (in->len < 4)
        return err_set(e, EBADMSG, "%zu bytes have no CRC-32C", in->len);
    in->len -= 4;
    if (crc32c(0, in->data, in->len) != get_le32(in->data + in->len))
        return err_set(e, EBADMSG, "a wrong CRC-32C");
    return copy_out(in, out, e);
}

/* ---- the chain ---- */

static int decode_one(const struct zarr_codec *c, struct zarr_input *in,
                      struct zarr_output *out, struct err *e)
{
    switch ((enum zarr_codec_kind)c->kind) {
    case ZARR_BLOSC:
        return decode_blosc(in, out, e);
    case ZARR_LZ4:
        return decode_lz4(in, out, e);
    case ZARR_ZSTD:
        return decode_zstd(in, out, e);
    case ZARR_GZIP:
        return decode_stream(&gzip_ops, in, out, e);
    case ZARR_ZLIB:
        return decode_stream(&zlib_ops, in, out, e);
    case ZARR_BZ2:
        return decode_stream(&bz2_ops, in, out, e);
    case ZARR_LZMA:
        return decode_stream(&lzma_ops, in, out, e);
    case ZARR_CRC32C:
        return decode_crc32c(in, out, e);
    case ZARR_DELTA:
    case ZARR_SHUFFLE:
    case ZARR_CAST:
    case ZARR_SCALE:
    case ZARR_PACKBITS:
        return zarr_filter(c, in, out, e);
    }
    return err_set(e, EBADMSG, "an unknown codec");
}

/* Does every codec of it take its input block by block? */
static bool chain_streams(const struct zarr_chain *chain)
{
    return chain->n == 1 && chain->codec[0].kind != ZARR_BLOSC &&
           chain->codec[0].kind != ZARR_LZ4 && chain->codec[0].kind < ZARR_CRC32C;
}

/*
 * The most bytes that stand before a chunk of `size`, some more or less: a byte of it may
 * have been an element of eight.
 */
static size_t most_before(const struct zarr_chain *chain, size_t size)
{
    size_t times = 2;

    for (uint32_t i = 0; i < chain->n; i++)
        if (chain->codec[i].kind >= ZARR_DELTA)
            times = 8;
    return size > SIZE_MAX / times - SLACK ? SIZE_MAX : times * (size + SLACK);
}

/* What came out of one codec goes into the next. */
static void hand_over(struct zarr_output *out, struct zarr_input *in)
{
    zarr_input_release(in);
    *in = (struct zarr_input){.data = out->data, .owned = out->data, .len = out->len};
    *out = (struct zarr_output){0};
}

static int decode_chain(const struct zarr_chain *chain, struct zarr_input *in,
                        unsigned char *dst, size_t size, struct err *e)
{
    for (uint32_t i = 0; i < chain->n; i++) {
        bool last = i + 1 == chain->n;
        CLEANUP(zarr_output_release)
        struct zarr_output out = {.max = last ? size : most_before(chain, size)};

        if (last)
            out = (struct zarr_output){
                .data = dst, .cap = size, .max = size, .fixed = true};
        TRY(decode_one(&chain->codec[i], in, &out, e));
        if (last)
            return out.len == size
                       ? 0
                       : err_set(e, EBADMSG, "%zu bytes come out, the chunk has %zu",
                                 out.len, size);
        hand_over(&out, in);
    }
    if (in->len != size)
        return err_set(e, EBADMSG, "%zu bytes are stored, the chunk has %zu", in->len,
                       size);
    TRY(zarr_input_all(in, e));
    memcpy(dst, in->data, size);
    return 0;
}

struct decoding {
    const struct zarr_chain *chain;
    struct zarr_input in;
    unsigned char *dst;
    size_t size;
    struct err *e;
};

static int decode_guarded(void *user)
{
    struct decoding *d = user;

    return decode_chain(d->chain, &d->in, d->dst, d->size, d->e);
}

/*
 * Out of the page cache without a copy. When somebody cuts the file meanwhile the call is
 * left in the middle, and what a codec has allocated is lost: some MiB, once.
 */
static int decode_mapped(struct decoding *d)
{
    int rc = guard_run(decode_guarded, d);

    if (rc == -EIO && d->e->code == 0)
        return err_set(d->e, EBADMSG, "the file was cut short while it was read");
    return rc;
}

int zarr_decode(const struct zarr_chain *chain, struct source *src, unsigned char *dst,
                size_t size, struct err *e)
{
    struct decoding d = {
        .chain = chain,
        .in = {.src = src, .len = src->size},
        .dst = dst,
        .size = size,
        .e = e,
    };
    bool in_place = chain->n > 0 && chain->codec[0].kind != ZARR_BLOSC;
    const void *map = in_place && src->size > 0 ? source_map(src) : NULL;
    int rc;

    /* No codec makes data much longer; a file that says so has something else in it. */
    if (!chain_streams(chain) && src->size > most_before(chain, size))
        return err_set(e, EBADMSG,
                       "%" PRIu64 " bytes are stored of a chunk that has %zu",
                       src->size, size);
    if (map && source_resident(src, 0, src->size))
        d.in.data = map;
    rc = d.in.data ? decode_mapped(&d) : decode_guarded(&d);
    zarr_input_release(&d.in);
    return rc;
}
