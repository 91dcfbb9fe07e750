/* SPDX-License-Identifier: MIT */
/* index/formats/npz/npz_member.c - the arrays of an .npz archive: headers and places. */
#include "index/formats/npz/npz_member.h"

#include <errno.h>
#include <string.h>
#include <zlib.h>

#include "base/err.h"
#include "index/formats/torch/zip.h"
#include "remote/source.h"

enum {
    FIRST = 512,        /* nearly every header, and no more than a page */
    PACKED_MORE = 1024, /* deflate may need a little more input than what comes out */
};

/* Gives the first `want` plain bytes, or fewer where there are no more. */
typedef int head_fn(void *user, size_t want, void *dst, size_t *got, struct err *e);

/* Reads a header of any length through fn and checks it against `size` plain bytes. */
static int read_header(head_fn *fn, void *user, uint64_t size, struct npy_layout *out,
                       struct err *e)
{
    CLEANUP_FREE unsigned char *head = malloc(FIRST);
    uint64_t header;
    size_t got;

    if (!head)
        return err_nomem(e);
    TRY(fn(user, FIRST, head, &got, e));
    TRY(npy_header_size(head, got, &header, e));
    if (header > size)
        return err_set(e, EBADMSG,
                       "the .npy header says that it has %" PRIu64
                       " bytes, the file has %" PRIu64,
                       header, size);
    if (header > got) {
        free(head);
        head = malloc((size_t)header);
        if (!head)
            return err_nomem(e);
        TRY(fn(user, (size_t)header, head, &got, e));
    }
    TRY(npy_parse(head, got, out, e));
    if (out->bytes > size - out->header)
        return err_set(e, EBADMSG,
                       "the elements need %" PRIu64 " bytes, %" PRIu64 " are there",
                       out->bytes, size - out->header);
    if (!out->line && out->bytes < size - out->header)
        return err_set(e, EBADMSG,
                       "no newline ends the .npy header at byte %" PRIu64
                       ", and %" PRIu64 " bytes are left behind the array: its length "
                       "is wrong",
                       out->header, size - out->header - out->bytes);
    return 0;
}

/* ---- plain bytes ---- */

struct plain {
    struct source *src;
    uint64_t off, size;
};

static int plain_head(void *user, size_t want, void *dst, size_t *got, struct err *e)
{
    const struct plain *p = user;

    *got = (size_t)MIN((uint64_t)want, p->size);
    return source_read(p->src, p->off, *got, dst, e);
}

static int read_plain(struct plain *p, struct npz_array *out, struct err *e)
{
    TRY(read_header(plain_head, p, p->size, &out->npy, e));
    out->offset = p->off + out->npy.header;
    out->length = out->npy.bytes;
    out->trailing = p->size - out->npy.header - out->npy.bytes;
    return 0;
}

int npy_file_read(struct source *s, struct npz_array *out, struct err *e)
{
    struct plain p = {.src = s, .size = s->size};

    *out = (struct npz_array){0};
    return read_plain(&p, out, e);
}

/* ---- deflated members ---- */

struct packed {
    struct source *src;
    uint64_t off, len;
};

/* Inflates from the member's start each time: that is once, or twice for long headers. */
static int inflate_some(z_stream *z, const void *in, size_t len, void *dst, size_t want,
                        size_t *got, struct err *e)
{
    int rc;

    z->next_in = (Bytef *)(uintptr_t)in;
    z->avail_in = (uInt)len;
    z->next_out = dst;
    z->avail_out = (uInt)want;
    rc = inflate(z, Z_SYNC_FLUSH);
    *got = want - z->avail_out;
    if (rc == Z_MEM_ERROR)
        return err_nomem(e);
    if (rc != Z_OK && rc != Z_STREAM_END && rc != Z_BUF_ERROR)
        return err_set(e, EBADMSG, "damaged deflate data");
    return 0;
}

static int packed_head(void *user, size_t want, void *dst, size_t *got, struct err *e)
{
    const struct packed *p = user;
    size_t len = (size_t)MIN((uint64_t)want + PACKED_MORE, p->len);
    CLEANUP_FREE void *in = malloc(len + 1);
    z_stream z = {0};
    int rc;

    if (!in || inflateInit2(&z, -MAX_WBITS) != Z_OK)
        return err_nomem(e);
    rc = source_read(p->src, p->off, len, in, e);
    if (rc == 0)
        rc = inflate_some(&z, in, len, dst, want, got, e);
    inflateEnd(&z);
    return rc;
}

static int read_packed(struct packed *p, const struct zip_entry *entry,
                       struct npz_array *out, struct err *e)
{
    TRY(read_header(packed_head, p, entry->size, &out->npy, e));
    out->packed = true;
    out->offset = p->off;
    out->length = p->len;
    out->plain = entry->size;
    out->crc = entry->crc;
    out->trailing = entry->size - out->npy.header - out->npy.bytes;
    return 0;
}

int npz_member_read(struct source *s, struct zip *z, const struct zip_entry *entry,
                    struct npz_array *out, struct err *e)
{
    uint64_t off;

    *out = (struct npz_array){0};
    TRY(zip_packed_offset(z, entry, &off, e));
    if (entry->method == 0) {
        struct plain p = {.src = s, .off = off, .size = entry->size};

        return read_plain(&p, out, e);
    }
    return read_packed(&(struct packed){s, off, entry->stored_size}, entry, out, e);
}
