/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf_input.c - numbers and texts of a GGUF header, one after another. */
#include "index/formats/gguf/gguf_input.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "remote/source.h"

int gguf_input_begin(struct gguf_input *in, struct source *src, struct err *e)
{
    *in = (struct gguf_input){.src = src, .window = malloc(GGUF_WINDOW)};
    return in->window ? 0 : err_nomem(e);
}

void gguf_input_end(struct gguf_input *in)
{
    free(in->window);
    in->window = NULL;
}

uint64_t gguf_input_left(const struct gguf_input *in)
{
    return in->src->size - in->pos;
}

int gguf_bad(const struct gguf_input *in, const char *what, struct err *e)
{
    return err_set(e, EBADMSG, "%s: byte %" PRIu64 ": %s", in->src->name, in->pos,
                   what);
}

static int fill(struct gguf_input *in, struct err *e)
{
    size_t len = (size_t)MIN((uint64_t)GGUF_WINDOW, gguf_input_left(in));
    int rc = source_read(in->src, in->pos, len, in->window, e);

    in->start = in->pos;
    in->have = rc < 0 ? 0 : len;
    return rc;
}

int gguf_take(struct gguf_input *in, unsigned size, uint64_t *out, struct err *e)
{
    const unsigned char *p;

    *out = 0;
    if (size > gguf_input_left(in))
        return gguf_bad(in, "the header is cut off", e);
    if (in->pos + size > in->start + in->have)
        TRY(fill(in, e));
    p = in->window + (in->pos - in->start);
    for (unsigned i = 0; i < size; i++)
        *out = *out << 8 | p[in->big_endian ? i : size - 1 - i];
    in->pos += size;
    return 0;
}

int gguf_take_string(struct gguf_input *in, uint64_t max, struct buf *out,
                     struct err *e)
{
    uint64_t len;
    void *dst;

    buf_clear(out);
    TRY(gguf_take(in, 8, &len, e));
    if (len > gguf_input_left(in))
        return gguf_bad(in, "a text is longer than the file", e);
    if (len > max)
        return gguf_bad(in, "a text is too long", e);
    dst = buf_grow(out, (size_t)len);
    if (!dst)
        return err_nomem(e);
    if (in->pos + len <= in->start + in->have)
        memcpy(dst, in->window + (in->pos - in->start), (size_t)len);
    else
        TRY(source_read(in->src, in->pos, (size_t)len, dst, e));
    in->pos += len;
    return 0;
}
