/* SPDX-License-Identifier: MIT */
/* base/inflate.c - deflate data without a header, by ISA-L or by zlib. */
#include "base/inflate.h"

#include <errno.h>
#include <zlib.h>

#ifdef UFS_HAVE_ISAL
#include <isa-l/igzip_lib.h>
#endif

#include "base/err.h"

struct inflate {
    uint64_t taken;
    unsigned behind; /* bytes that were taken and lie behind the end */
    bool by_zlib;
    z_stream z;
#ifdef UFS_HAVE_ISAL
    struct inflate_state isal;
#endif
};

int inflate_new(enum inflate_by by, struct inflate **out, struct err *e)
{
    CLEANUP_FREE struct inflate *s = calloc(1, sizeof *s);

    if (!s)
        return err_nomem(e);
#ifdef UFS_HAVE_ISAL
    isal_inflate_init(&s->isal);
    s->by_zlib = by == INFLATE_ZLIB;
#else
    (void)by;
    s->by_zlib = true;
#endif
    if (s->by_zlib && inflateInit2(&s->z, -MAX_WBITS) != Z_OK)
        return err_nomem(e);
    *out = steal(&s);
    return 0;
}

void inflate_free(struct inflate *s)
{
    if (s && s->by_zlib)
        inflateEnd(&s->z);
    free(s);
}

void inflate_freep(struct inflate **s)
{
    inflate_free(*s);
    *s = NULL;
}

static int damaged(struct err *e)
{
    return err_set(e, EBADMSG, "damaged deflate data");
}

static int by_zlib(struct inflate *s, const void *in, uint32_t *in_len, void *dst,
                   uint32_t *dst_len, bool *ended, struct err *e)
{
    int rc;

    s->z.next_in = (void *)(uintptr_t)in; /* which it only reads */
    s->z.avail_in = *in_len;
    s->z.next_out = dst;
    s->z.avail_out = *dst_len;
    rc = inflate(&s->z, Z_NO_FLUSH);
    if (rc == Z_MEM_ERROR)
        return err_nomem(e);
    if (rc != Z_OK && rc != Z_STREAM_END && rc != Z_BUF_ERROR)
        return damaged(e);
    *in_len -= s->z.avail_in;
    *dst_len -= s->z.avail_out;
    *ended = rc == Z_STREAM_END;
    return 0;
}

#ifdef UFS_HAVE_ISAL
static int by_isal(struct inflate *s, const void *in, uint32_t *in_len, void *dst,
                   uint32_t *dst_len, bool *ended, struct err *e)
{
    s->isal.next_in = (void *)(uintptr_t)in;
    s->isal.avail_in = *in_len;
    s->isal.next_out = dst;
    s->isal.avail_out = *dst_len;
    if (isal_inflate(&s->isal) < 0)
        return damaged(e);
    *in_len -= s->isal.avail_in;
    *dst_len -= s->isal.avail_out;
    *ended = s->isal.block_state == ISAL_BLOCK_FINISH;
    /* Whole bytes of its bit buffer come from behind the end. */
    s->behind = *ended ? (unsigned)s->isal.read_in_length / 8 : 0;
    return 0;
}
#endif

int inflate_some(struct inflate *s, const void *in, size_t *in_len, void *dst,
                 size_t *dst_len, bool *ended, struct err *e)
{
    uint32_t take = (uint32_t)MIN(*in_len, (size_t)1 << 30);
    uint32_t put = (uint32_t)MIN(*dst_len, (size_t)1 << 30);
    int rc;

    *ended = false;
#ifdef UFS_HAVE_ISAL
    rc = s->by_zlib ? by_zlib(s, in, &take, dst, &put, ended, e)
                    : by_isal(s, in, &take, dst, &put, ended, e);
#else
    rc = by_zlib(s, in, &take, dst, &put, ended, e);
#endif
    if (rc < 0)
        return rc;
    s->taken += take;
    *in_len = take;
    *dst_len = put;
    return 0;
}

uint64_t inflate_length(const struct inflate *s)
{
    return s->taken - s->behind;
}
