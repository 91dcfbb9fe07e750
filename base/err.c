/* SPDX-License-Identifier: MIT */
/* base/err.c - an error: an errno value and a message that grows outward. */
#include "base/err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

/* Formats aside and copies, so that an argument may be the old text itself. */
static void PRINTF(3, 0) format(char *dst, size_t size, const char *fmt, va_list args)
{
    char text[sizeof(((struct err *)0)->text)];

    if (vsnprintf(text, sizeof text, fmt, args) < 0)
        text[0] = '\0';
    snprintf(dst, size, "%s", text);
}

int err_set(struct err *e, int code, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    format(e->text, sizeof e->text, fmt, args);
    va_end(args);
    e->code = code;
    e->cause_len = (unsigned)strlen(e->text);
    e->hint[0] = '\0';
    return -code;
}

int err_copy(struct err *e, const struct err *from)
{
    *e = *from;
    return -e->code;
}

const char *err_cause(const struct err *e)
{
    size_t len = strlen(e->text);

    return e->cause_len > 0 && e->cause_len < len ? e->text + len - e->cause_len
                                                  : e->text;
}

int err_wrap(struct err *e, const char *fmt, ...)
{
    char place[sizeof e->text], inner[sizeof e->text];
    va_list args;
    size_t len;

    va_start(args, fmt);
    format(place, sizeof place, fmt, args);
    va_end(args);
    len = strlen(place);
    if (strncmp(e->text, place, len) == 0 && e->text[len] == ':')
        return -e->code; /* it stands there already */
    memcpy(inner, e->text, sizeof inner);
    snprintf(e->text, sizeof e->text, "%s", place);
    len = strlen(e->text);
    snprintf(e->text + len, sizeof e->text - len, "%s%s", inner[0] ? ": " : "", inner);
    return -e->code;
}

int err_hint(struct err *e, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    format(e->hint, sizeof e->hint, fmt, args);
    va_end(args);
    return -e->code;
}

int err_nomem(struct err *e)
{
    return err_set(e, ENOMEM, "out of memory");
}

const char *err_line(const struct err *e, char *dst, size_t size)
{
    size_t used = text_escape(dst, size, e->text);

    if (e->hint[0] && size - used > 4) {
        memcpy(dst + used, " (", 2);
        used += 2;
        used += text_escape(dst + used, size - used - 1, e->hint);
        memcpy(dst + used, ")", 2);
    }
    return dst;
}

int err_for_reader(const struct err *e)
{
    switch (e->code) {
    case EBADMSG: /* damaged */
    case ENOENT:  /* a shard is missing: the tensor file itself is there */
    case ENOTDIR: /* the same */
    case EISDIR:  /* something else stands in a shard's place */
    case EXDEV:   /* a shard's name leads out of the source */
    case ELOOP:   /* the same */
    case EFBIG:   /* metadata over a ceiling: taken for damage */
    case EOVERFLOW:
    case EREMOTEIO: /* a server failed us: nothing is known of the bytes */
    case EPROTO:    /* or speaks another language */
        return EIO;
    default:
        return e->code;
    }
}
