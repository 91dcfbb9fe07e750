/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle_input.c - a pickle as a stream of opcodes and arguments. */
#include "index/formats/pickle/pickle_priv.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/endian.h"
#include "base/err.h"
#include "remote/source.h"

/* Large enough that a 200 MB pickle is a few hundred reads. */
enum { WINDOW = 1 << 20 };

/* Those of protocols 0 to 5, less EXT*, PERSID and out-of-band buffers. */
static const uint8_t arguments[256] = {
    [OP_MARK] = PARG_NONE,
    [OP_STOP] = PARG_NONE,
    [OP_POP] = PARG_NONE,
    [OP_POP_MARK] = PARG_NONE,
    [OP_DUP] = PARG_NONE,
    [OP_FLOAT] = PARG_LINE,
    [OP_INT] = PARG_LINE,
    [OP_BININT] = PARG_S4,
    [OP_BININT1] = PARG_U1,
    [OP_LONG] = PARG_LINE,
    [OP_BININT2] = PARG_U2,
    [OP_NONE] = PARG_NONE,
    [OP_BINPERSID] = PARG_NONE,
    [OP_REDUCE] = PARG_NONE,
    [OP_STRING] = PARG_LINE,
    [OP_BINSTRING] = PARG_BODY4S,
    [OP_SHORT_BINSTRING] = PARG_BODY1,
    [OP_UNICODE] = PARG_LINE,
    [OP_BINUNICODE] = PARG_BODY4,
    [OP_APPEND] = PARG_NONE,
    [OP_BUILD] = PARG_NONE,
    [OP_GLOBAL] = PARG_LINES,
    [OP_DICT] = PARG_NONE,
    [OP_EMPTY_DICT] = PARG_NONE,
    [OP_APPENDS] = PARG_NONE,
    [OP_GET] = PARG_LINE,
    [OP_BINGET] = PARG_U1,
    [OP_INST] = PARG_LINES,
    [OP_LONG_BINGET] = PARG_U4,
    [OP_LIST] = PARG_NONE,
    [OP_EMPTY_LIST] = PARG_NONE,
    [OP_OBJ] = PARG_NONE,
    [OP_PUT] = PARG_LINE,
    [OP_BINPUT] = PARG_U1,
    [OP_LONG_BINPUT] = PARG_U4,
    [OP_SETITEM] = PARG_NONE,
    [OP_TUPLE] = PARG_NONE,
    [OP_EMPTY_TUPLE] = PARG_NONE,
    [OP_SETITEMS] = PARG_NONE,
    [OP_BINFLOAT] = PARG_U8,
    [OP_PROTO] = PARG_U1,
    [OP_NEWOBJ] = PARG_NONE,
    [OP_TUPLE1] = PARG_NONE,
    [OP_TUPLE2] = PARG_NONE,
    [OP_TUPLE3] = PARG_NONE,
    [OP_NEWTRUE] = PARG_NONE,
    [OP_NEWFALSE] = PARG_NONE,
    [OP_LONG1] = PARG_BODY1,
    [OP_LONG4] = PARG_BODY4S,
    [OP_BINBYTES] = PARG_BODY4,
    [OP_SHORT_BINBYTES] = PARG_BODY1,
    [OP_SHORT_BINUNICODE] = PARG_BODY1,
    [OP_BINUNICODE8] = PARG_BODY8,
    [OP_BINBYTES8] = PARG_BODY8,
    [OP_EMPTY_SET] = PARG_NONE,
    [OP_ADDITEMS] = PARG_NONE,
    [OP_FROZENSET] = PARG_NONE,
    [OP_NEWOBJ_EX] = PARG_NONE,
    [OP_STACK_GLOBAL] = PARG_NONE,
    [OP_MEMOIZE] = PARG_NONE,
    [OP_FRAME] = PARG_U8,
    [OP_BYTEARRAY8] = PARG_BODY8,
};

static const uint8_t argument_bytes[] = {
    [PARG_BAD] = 0,   [PARG_NONE] = 0,   [PARG_U1] = 1,    [PARG_U2] = 2,
    [PARG_U4] = 4,    [PARG_S4] = 4,     [PARG_U8] = 8,    [PARG_BODY1] = 1,
    [PARG_BODY4] = 4, [PARG_BODY4S] = 4, [PARG_BODY8] = 8, [PARG_LINE] = 0,
    [PARG_LINES] = 0,
};

int pinput_init(struct pinput *in, struct source *src, uint64_t off, uint64_t len,
                struct err *e)
{
    if (range_outside(off, len, src->size))
        return err_set(e, EBADMSG,
                       "%s: a pickle at bytes %" PRIu64 "+%" PRIu64 " of %" PRIu64,
                       src->name, off, len, src->size);
    *in = (struct pinput){.src = src, .base = off, .len = len};
    in->cap = (size_t)MIN(len, (uint64_t)WINDOW);
    in->window = malloc(MAX(in->cap, (size_t)1));
    return in->window ? 0 : err_nomem(e);
}

void pinput_release(struct pinput *in)
{
    free(in->window);
    in->window = NULL;
}

void pinput_rewind(struct pinput *in)
{
    in->pos = 0;
    if (in->start == 0) /* the window still holds the beginning */
        return;
    in->start = 0;
    in->fill = 0;
}

static int ends_early(struct err *e)
{
    return err_set(e, EBADMSG, "the pickle ends in the middle");
}

/* Moves what is unread to the front and reads on; at least one byte more or an error. */
static int refill(struct pinput *in, struct err *e)
{
    size_t kept = in->fill - in->pos, room = in->cap - kept, want;
    uint64_t left = in->len - in->start - in->fill;

    memmove(in->window, in->window + in->pos, kept);
    in->start += in->pos;
    in->pos = 0;
    in->fill = kept;
    want = (size_t)MIN((uint64_t)room, left);
    if (want == 0)
        return ends_early(e);
    TRY(source_read(in->src, in->base + in->start + kept, want, in->window + kept, e));
    in->fill += want;
    return 0;
}

/* n <= 9 bytes at the read position. */
static int need(struct pinput *in, size_t n, struct err *e)
{
    if (n > pinput_left(in))
        return ends_early(e);
    while (in->fill - in->pos < n) {
        TRY(refill(in, e));
    }
    return 0;
}

int pinput_skip(struct pinput *in, uint64_t n, struct err *e)
{
    size_t have = in->fill - in->pos;

    if (n > pinput_left(in))
        return ends_early(e);
    if (n <= have) {
        in->pos += (size_t)n;
        return 0;
    }
    in->start += in->pos + n;
    in->pos = in->fill = 0;
    return 0;
}

int pinput_copy(struct pinput *in, void *dst, size_t n, struct err *e)
{
    size_t have = MIN(n, in->fill - in->pos);

    if (n > pinput_left(in))
        return ends_early(e);
    if (have > 0)
        memcpy(dst, in->window + in->pos, have);
    in->pos += have;
    if (have == n)
        return 0;
    if (n - have < in->cap) {
        TRY(need(in, 1, e));
        /* One refill gives as much as the window holds, or all that is left. */
        memcpy((char *)dst + have, in->window + in->pos, n - have);
        in->pos += n - have;
        return 0;
    }
    TRY(source_read(in->src, in->base + pinput_tell(in), n - have, (char *)dst + have,
                    e));
    return pinput_skip(in, n - have, e);
}

int pinput_line(struct pinput *in, struct buf *out, struct err *e)
{
    for (;;) {
        const unsigned char *from = in->window + in->pos;
        size_t have = in->fill - in->pos;
        const unsigned char *end = have ? memchr(from, '\n', have) : NULL;
        size_t n = end ? (size_t)(end - from) : have;

        if (out && n > 0 && buf_add(out, from, n) < 0)
            return out->failed == EFBIG
                       ? err_set(e, EBADMSG, "a text argument over %zu bytes", out->max)
                       : err_nomem(e);
        in->pos += n;
        if (end) {
            in->pos++;
            return 0;
        }
        TRY(refill(in, e));
    }
}

static uint64_t get_number(const unsigned char *p, unsigned parg)
{
    switch (argument_bytes[parg]) {
    case 1:
        return p[0];
    case 2:
        return get_le16(p);
    case 4:
        if (parg == PARG_S4 || parg == PARG_BODY4S)
            return (uint64_t)(int64_t)(int32_t)get_le32(p);
        return get_le32(p);
    case 8:
        return get_le64(p);
    default:
        return 0;
    }
}

/* An honest FRAME length is within the file; a body that is not is never allocated. */
static int check_length(const struct pinput *in, const struct pop *op, struct err *e)
{
    uint64_t left = pinput_left(in);

    if (op->parg == PARG_BODY4S && (int64_t)op->arg < 0)
        return err_set(e, EBADMSG, "a length of %" PRId64 " bytes", (int64_t)op->arg);
    if (op->arg > left)
        return err_set(e, EBADMSG,
                       "a length of %" PRIu64 " bytes where %" PRIu64 " are left",
                       op->arg, left);
    return 0;
}

int pinput_op(struct pinput *in, struct pop *op, struct err *e)
{
    const unsigned char *p;
    size_t n;

    op->at = pinput_tell(in);
    if (in->pos == in->fill)
        TRY(need(in, 1, e));
    op->code = in->window[in->pos];
    op->parg = arguments[op->code];
    if (op->parg == PARG_BAD)
        return err_set(e, EBADMSG, "opcode 0x%02x is unknown or not supported",
                       op->code);
    n = argument_bytes[op->parg];
    if (in->fill - in->pos < n + 1)
        TRY(need(in, n + 1, e));
    p = in->window + in->pos + 1;
    op->arg = get_number(p, op->parg);
    in->pos += n + 1;
    if ((op->parg >= PARG_BODY1 && op->parg <= PARG_BODY8) || op->code == OP_FRAME)
        return check_length(in, op, e);
    return 0;
}
