/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle_write.c - opcodes of protocol 2 (CPython, Lib/pickletools.py). */
#include "index/formats/pickle/pickle_write.h"

#include <assert.h>
#include <string.h>

enum { FIRST_MEMO = 64 };

static void add_le(struct buf *b, uint64_t v, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++)
        buf_addc(b, (char)(v >> 8 * i));
}

void pickle_begin(struct pickler *p)
{
    buf_add(&p->out, "\x80\x02", 2);
}

void pickle_end(struct pickler *p)
{
    buf_addc(&p->out, '.');
}

void pickle_release(struct pickler *p)
{
    buf_release(&p->out);
    *p = (struct pickler){0};
}

void pickle_none(struct pickler *p)
{
    buf_addc(&p->out, 'N');
}

void pickle_bool(struct pickler *p, bool v)
{
    buf_add(&p->out, v ? "\x88" : "\x89", 1);
}

/* BININT1, BININT2, BININT, or LONG1 of eight bytes. */
void pickle_int(struct pickler *p, int64_t v)
{
    if (v >= 0 && v <= UINT8_MAX) {
        buf_addc(&p->out, 'K');
        add_le(&p->out, (uint64_t)v, 1);
    } else if (v >= 0 && v <= UINT16_MAX) {
        buf_addc(&p->out, 'M');
        add_le(&p->out, (uint64_t)v, 2);
    } else if (v >= INT32_MIN && v <= INT32_MAX) {
        buf_addc(&p->out, 'J');
        add_le(&p->out, (uint64_t)v, 4);
    } else {
        buf_add(&p->out, "\x8a\x08", 2);
        add_le(&p->out, (uint64_t)v, 8);
    }
}

void pickle_long(struct pickler *p, const unsigned char *v, size_t len)
{
    assert(len <= UINT8_MAX);
    while (len > 1 && v[len - 1] == (v[len - 2] & 0x80 ? UINT8_MAX : 0))
        len--;
    buf_addc(&p->out, (char)0x8a);
    add_le(&p->out, len, 1);
    buf_add(&p->out, v, len);
}

/* BINFLOAT is big-endian. */
void pickle_double(struct pickler *p, double v)
{
    uint64_t bits;

    memcpy(&bits, &v, sizeof bits);
    buf_addc(&p->out, 'G');
    add_le(&p->out, __builtin_bswap64(bits), 8);
}

void pickle_text(struct pickler *p, const char *text, size_t len)
{
    buf_addc(&p->out, 'X');
    add_le(&p->out, len, 4);
    buf_add(&p->out, text, len);
}

void pickle_string(struct pickler *p, const char *text)
{
    pickle_text(p, text, strlen(text));
}

/* ---- the memo ---- */

/* Globals have numbers below 64 and take one byte; all else four. */
static void put(struct pickler *p, uint32_t memo)
{
    buf_addc(&p->out, memo < FIRST_MEMO ? 'q' : 'r');
    add_le(&p->out, memo, memo < FIRST_MEMO ? 1 : 4);
}

void pickle_again(struct pickler *p, uint32_t memo)
{
    buf_addc(&p->out, memo < FIRST_MEMO ? 'h' : 'j');
    add_le(&p->out, memo, memo < FIRST_MEMO ? 1 : 4);
}

uint32_t pickle_remember(struct pickler *p)
{
    put(p, FIRST_MEMO + p->memos);
    return FIRST_MEMO + p->memos++;
}

void pickle_global(struct pickler *p, const char *module, const char *name)
{
    for (unsigned i = 0; i < p->globals; i++) {
        if (strcmp(p->global[i].module, module) == 0 &&
            strcmp(p->global[i].name, name) == 0) {
            pickle_again(p, i);
            return;
        }
    }
    buf_addf(&p->out, "c%s\n%s\n", module, name);
    if (p->globals == ARRAY_SIZE(p->global))
        return;
    p->global[p->globals] = (struct pickled_global){.module = module, .name = name};
    put(p, p->globals++);
}

void pickle_bytes(struct pickler *p, const void *data, size_t len)
{
    const unsigned char *from = data;
    size_t text = len;

    for (size_t i = 0; i < len; i++)
        text += from[i] >> 7;
    pickle_global(p, "_codecs", "encode");
    pickle_mark(p);
    buf_addc(&p->out, 'X');
    add_le(&p->out, text, 4);
    for (size_t i = 0; i < len; i++) {
        if (from[i] & 0x80)
            buf_addc(&p->out, (char)(0xc0 | from[i] >> 6));
        buf_addc(&p->out, (char)(from[i] & 0x80 ? 0x80 | (from[i] & 0x3f) : from[i]));
    }
    pickle_string(p, "latin1");
    pickle_tuple(p);
    pickle_reduce(p);
}

/* ---- containers and objects ---- */

void pickle_mark(struct pickler *p)
{
    buf_addc(&p->out, '(');
}

void pickle_tuple(struct pickler *p)
{
    buf_addc(&p->out, 't');
}

void pickle_empty_tuple(struct pickler *p)
{
    buf_addc(&p->out, ')');
}

void pickle_list(struct pickler *p)
{
    buf_addc(&p->out, ']');
}

void pickle_append(struct pickler *p)
{
    buf_addc(&p->out, 'e');
}

void pickle_dict(struct pickler *p)
{
    buf_addc(&p->out, '}');
}

void pickle_set(struct pickler *p)
{
    buf_addc(&p->out, 'u');
}

void pickle_reduce(struct pickler *p)
{
    buf_addc(&p->out, 'R');
}

void pickle_new(struct pickler *p)
{
    buf_add(&p->out, "\x81", 1);
}

void pickle_build(struct pickler *p)
{
    buf_addc(&p->out, 'b');
}

void pickle_persistent(struct pickler *p)
{
    buf_addc(&p->out, 'Q');
}

void pickle_torch_size(struct pickler *p, const uint64_t *dim, uint32_t nd)
{
    pickle_global(p, "torch", "Size");
    pickle_mark(p); /* the arguments: one tuple */
    pickle_mark(p);
    for (uint32_t k = 0; k < nd; k++)
        pickle_int(p, (int64_t)dim[k]);
    pickle_tuple(p);
    pickle_tuple(p);
    pickle_reduce(p);
}

void pickle_ordered_dict(struct pickler *p)
{
    pickle_global(p, "collections", "OrderedDict");
    pickle_empty_tuple(p);
    pickle_reduce(p);
}
