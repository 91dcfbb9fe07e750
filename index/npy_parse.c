/* SPDX-License-Identifier: MIT */
/* index/npy_parse.c - reads the header of an .npy file: a Python dict as text. */
#include "index/npy.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/utf8.h"

enum {
    MAGIC = 6,
    SHORT_PREFIX = 10, /* magic, version, 16 bits of length */
    LONG_PREFIX = 12,  /* the same with 32 bits: from version 2.0 on */
    MAX_STRING = 255,
};

/* ---- the prefix ---- */

int npy_header_size(const void *head, size_t len, uint64_t *size, struct err *e)
{
    const unsigned char *p = head;
    uint64_t text;

    if (len < SHORT_PREFIX || memcmp(p, "\x93NUMPY", MAGIC) != 0)
        return err_set(e, EBADMSG, "it does not start as an .npy file does");
    if (p[MAGIC] < 1 || p[MAGIC] > 3 || p[MAGIC + 1] != 0)
        return err_set(e, ENOTSUP,
                       ".npy version %u.%u is not known; 1.0, 2.0 and 3.0 are",
                       p[MAGIC], p[MAGIC + 1]);
    if (p[MAGIC] > 1 && len < LONG_PREFIX)
        return err_set(e, EBADMSG, "it ends in the header of an .npy file");
    text = p[MAGIC] == 1 ? get_le16(p + MAGIC + 2) : get_le32(p + MAGIC + 2);
    *size = (p[MAGIC] == 1 ? SHORT_PREFIX : LONG_PREFIX) + text;
    if (*size > NPY_MAX_HEADER)
        return err_set(e, EFBIG,
                       "an .npy header of %" PRIu64 " bytes, at most %d are read",
                       *size, NPY_MAX_HEADER);
    return 0;
}

/* ---- the text ---- */

struct cursor {
    const char *start, *at, *end;
};

static int PRINTF(3, 4)
    fail(const struct cursor *c, struct err *e, const char *fmt, ...)
{
    char why[200];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    return err_set(e, EBADMSG, "byte %td of the .npy header: %s", c->at - c->start,
                   why);
}

static void skip_blanks(struct cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t'))
        c->at++;
}

/* Takes this character, after blanks, when it comes next. */
static bool take(struct cursor *c, char want)
{
    skip_blanks(c);
    if (c->at == c->end || *c->at != want)
        return false;
    c->at++;
    return true;
}

static bool take_word(struct cursor *c, const char *word)
{
    size_t len = strlen(word);

    skip_blanks(c);
    if ((size_t)(c->end - c->at) < len || memcmp(c->at, word, len) != 0)
        return false;
    c->at += len;
    return true;
}

/* Quoted text without escapes: nothing that is read here needs them. */
static int take_string(struct cursor *c, char out[MAX_STRING + 1], struct err *e)
{
    size_t len = 0;
    char quote;

    skip_blanks(c);
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"'))
        return fail(c, e, "no string where one must be");
    quote = *c->at++;
    for (; c->at < c->end && *c->at != quote; c->at++) {
        if (len == MAX_STRING || *c->at == '\\' || (unsigned char)*c->at < ' ')
            return fail(c, e, "a string that numpy does not write");
        out[len++] = *c->at;
    }
    if (c->at == c->end)
        return fail(c, e, "a string that does not end");
    c->at++;
    out[len] = '\0';
    return 0;
}

/* Decimal digits, and the L that Python 2 put behind long ones. */
static int take_dim(struct cursor *c, uint64_t *out, struct err *e)
{
    const char *start;

    skip_blanks(c);
    if (c->at < c->end && *c->at == '-')
        return fail(c, e, "a negative dimension");
    start = c->at;
    for (*out = 0; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++)
        if (mul_overflows(*out, 10, out) ||
            add_overflows(*out, (uint64_t)(*c->at - '0'), out))
            return fail(c, e, "a dimension past 2^64");
    if (c->at == start || (*start == '0' && c->at - start > 1))
        return fail(c, e, "no number where one must be");
    if (c->at < c->end && *c->at == 'L')
        c->at++;
    return 0;
}

static int take_shape(struct cursor *c, struct shape *out, struct err *e)
{
    bool comma = true;

    if (!take(c, '('))
        return fail(c, e, "the shape is no tuple");
    for (out->nd = 0; !take(c, ')'); out->nd++) {
        if (!comma)
            return fail(c, e, "no comma between dimensions");
        if (out->nd == SHAPE_MAX_DIMS)
            return fail(c, e, "more than %d dimensions", SHAPE_MAX_DIMS);
        TRY(take_dim(c, &out->dim[out->nd], e));
        comma = take(c, ',');
    }
    if (out->nd == 1 && !comma)
        return fail(c, e, "the shape is a number and no tuple");
    return 0;
}

static int take_bool(struct cursor *c, bool *out, struct err *e)
{
    *out = take_word(c, "True");
    return *out || take_word(c, "False") ? 0 : fail(c, e, "neither True nor False");
}

/* ---- the type ---- */

/* Kind and bytes of an element, as in "<f4". */
static const struct {
    const char *text;
    enum dtype dtype;
} types[] = {
    {"b1", DTYPE_BOOL},
    {"u1", DTYPE_U8},
    {"i1", DTYPE_I8},
    {"u2", DTYPE_U16},
    {"i2", DTYPE_I16},
    {"u4", DTYPE_U32},
    {"i4", DTYPE_I32},
    {"u8", DTYPE_U64},
    {"i8", DTYPE_I64},
    {"f2", DTYPE_F16},
    {"f4", DTYPE_F32},
    {"f8", DTYPE_F64},
    {"c8", DTYPE_C64},
    {"c16", DTYPE_C128},
    /* ml_dtypes: two raw bytes are a bfloat16; of its 8-bit floats only this one has a
     * name of its own (ml_dtypes 0.6). */
    {"V2", DTYPE_BF16},
    {"f1", DTYPE_F8_E5M2},
};

/* Why a type is none of a tensor's. */
static const char *foreign_type(const char *descr)
{
    switch (descr[0] ? descr[1] : '\0') {
    case 'O':
        return "Python objects, which are pickles";
    case 'U':
    case 'S':
    case 'a':
        return "text";
    case 'M':
    case 'm':
        return "dates";
    case 'V':
        return "raw bytes, of which .npy does not keep what they mean";
    case 'f':
    case 'c':
        return "floats of an unusual width, which differ from machine to machine";
    default:
        return "of a type that is not known";
    }
}

static int type_of(const char *descr, struct npy_layout *out, struct err *e)
{
    enum dtype one_byte = out->dtype; /* see npy_parse_as() */
    char shown[64];

    if (one_byte && strcmp(descr, "|V1") == 0)
        return 0;
    for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
        if (strcmp(descr + (descr[0] && strchr("<>|=", descr[0])), types[i].text))
            continue;
        out->dtype = types[i].dtype;
        out->swap = descr[0] == '>' && dtype_component(out->dtype) > 1;
        return 0;
    }
    text_escape(shown, sizeof shown, descr);
    return err_set(e, ENOTSUP, "elements of type '%s': %s", shown, foreign_type(descr));
}

/* A list is a structure, a tuple an array in each element. */
static int take_type(struct cursor *c, struct npy_layout *out, struct err *e)
{
    char descr[MAX_STRING + 1];

    skip_blanks(c);
    if (c->at < c->end && (*c->at == '[' || *c->at == '('))
        return err_set(e, ENOTSUP,
                       "elements of a structured type (several fields each)");
    TRY(take_string(c, descr, e));
    return type_of(descr, out, e);
}

/* ---- the whole ---- */

enum field { FIELD_DESCR = 1, FIELD_ORDER = 2, FIELD_SHAPE = 4, FIELD_ALL = 7 };

static enum field field_of(const char *name)
{
    if (strcmp(name, "descr") == 0)
        return FIELD_DESCR;
    if (strcmp(name, "fortran_order") == 0)
        return FIELD_ORDER;
    return strcmp(name, "shape") == 0 ? FIELD_SHAPE : 0;
}

/* One entry: its name, a colon, its value. */
static int take_field(struct cursor *c, struct npy_layout *out, unsigned *seen,
                      struct err *e)
{
    char name[MAX_STRING + 1];
    enum field field;

    TRY(take_string(c, name, e));
    field = field_of(name);
    if (!field)
        return fail(c, e, "an entry that is none of descr, fortran_order and shape");
    if (*seen & field)
        return fail(c, e, "%s is there twice", name);
    *seen |= field;
    if (!take(c, ':'))
        return fail(c, e, "no colon behind %s", name);
    switch (field) {
    case FIELD_DESCR:
        return take_type(c, out, e);
    case FIELD_ORDER:
        return take_bool(c, &out->fortran, e);
    case FIELD_SHAPE:
    case FIELD_ALL:
        break;
    }
    return take_shape(c, &out->shape, e);
}

static int take_dict(struct cursor *c, struct npy_layout *out, struct err *e)
{
    bool comma = true;
    unsigned seen = 0;

    if (!take(c, '{'))
        return fail(c, e, "the header is no dict");
    while (!take(c, '}')) {
        if (!comma)
            return fail(c, e, "no comma between entries");
        TRY(take_field(c, out, &seen, e));
        comma = take(c, ',');
    }
    if (seen != FIELD_ALL)
        return fail(c, e, "descr, fortran_order and shape are not all there");
    skip_blanks(c);
    return c->at == c->end ? 0 : fail(c, e, "text behind the dict");
}

int npy_parse(const void *head, size_t len, struct npy_layout *out, struct err *e)
{
    return npy_parse_as(head, len, DTYPE_NONE, out, e);
}

int npy_parse_as(const void *head, size_t len, enum dtype one_byte,
                 struct npy_layout *out, struct err *e)
{
    const char *text = head;
    struct cursor c;

    *out = (struct npy_layout){.dtype = one_byte};
    TRY(npy_header_size(head, len, &out->header, e));
    if (out->header > len)
        return err_set(e, EBADMSG,
                       "the .npy header has %" PRIu64 " bytes, %zu are there",
                       out->header, len);
    c.start = text;
    c.at = text + (text[MAGIC] == 1 ? SHORT_PREFIX : LONG_PREFIX);
    c.end = text + out->header;
    TRY(take_dict(&c, out, e));
    out->line = text[out->header - 1] == '\n';
    return shape_bytes(&out->shape, out->dtype, &out->bytes, e) < 0
               ? err_set(e, EBADMSG, "a shape of more than 2^63 bytes")
               : 0;
}

void npy_steps(const struct npy_layout *x, int64_t step[SHAPE_MAX_DIMS])
{
    uint32_t nd = x->shape.nd;
    uint64_t unit = 1;

    for (uint32_t i = 0; i < nd; i++) {
        uint32_t k = x->fortran ? i : nd - 1 - i;

        step[k] = (int64_t)unit;
        if (__builtin_mul_overflow(unit, x->shape.dim[k], &unit))
            unit = 0; /* only beside a dimension of 0: there are no elements */
    }
}
