/* SPDX-License-Identifier: MIT */
/* cli/out.c - text, sizes and errors as people read them. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/buf.h"
#include "base/utf8.h"
#include "cli/cli.h"

/* One character at *text: its bytes, or 0 when it must be escaped as one byte. */
static size_t plain_char(const char *text, size_t len)
{
    unsigned char first = (unsigned char)*text;
    size_t n;

    if (first < 0x20 || first == 0x7f || first == '%')
        return first == '%' ? 1 : 0;
    n = utf8_char((const unsigned char *)text, len);
    /* C1 controls steer terminals too. */
    if (n == 2 && first == 0xc2 && (unsigned char)text[1] < 0xa0)
        return 0;
    return n;
}

int out_width(const char *text, size_t len)
{
    int width = 0;

    for (size_t i = 0, n; i < len; i += n ? n : 1) {
        n = plain_char(text + i, len - i);
        width += n ? 1 : 3;
    }
    return width;
}

void out_text(FILE *f, const char *text, size_t len, int width)
{
    for (size_t i = 0, n; i < len; i += n ? n : 1) {
        n = plain_char(text + i, len - i);
        if (n)
            fwrite(text + i, 1, n, f);
        else
            fprintf(f, "%%%02X", (unsigned char)text[i]);
    }
    for (int w = width ? out_width(text, len) : 0; w < width; w++)
        fputc(' ', f);
}

void out_json(FILE *f, const char *text, size_t len)
{
    CLEANUP(buf_release) struct buf b = {0};

    if (buf_add_json(&b, text, len) == 0)
        fwrite(b.data, 1, b.len, f);
}

const char *out_size(uint64_t bytes, char dst[16])
{
    static const char unit[] = "KMGTPE";
    double v = (double)bytes;
    int u = -1;

    if (bytes < 1024) {
        snprintf(dst, 16, "%u B", (unsigned)bytes);
        return dst;
    }
    while (v >= 1024 && u < 5) {
        v /= 1024;
        u++;
    }
    snprintf(dst, 16,
             v < 10    ? "%.2f %ciB"
             : v < 100 ? "%.1f %ciB"
                       : "%.0f %ciB",
             v, unit[u]);
    return dst;
}

static int status_of(int code)
{
    switch (code) {
    case ENOSPC:
    case EDQUOT:
    case EROFS:
    case EACCES:
    case EPERM:
        return STATUS_ROOM;
    default:
        return STATUS_SOURCE;
    }
}

int cli_usage(struct cli *c)
{
    c->usage = true;
    return -EINVAL;
}

int cli_fail(struct cli *c, int ret)
{
    char line[1400];

    if (!c->err.code)
        err_set(&c->err, -ret, "%s", strerror(-ret));
    fflush(stdout);
    fprintf(stderr, "unshard: %s\n", err_line(&c->err, line, sizeof line));
    return c->usage ? STATUS_USAGE : status_of(c->err.code);
}

char *option_next(char **text)
{
    char *from = *text, *to = *text, *start = *text;

    if (!from || !*from)
        return NULL;
    while (*from && *from != ',') {
        if (*from == '\\' && from[1])
            from++;
        *to++ = *from++;
    }
    *text = *from ? from + 1 : from;
    *to = '\0';
    return start;
}

bool parse_jobs(const char *text, unsigned *out)
{
    char *end;
    unsigned long v;

    errno = 0;
    v = strtoul(text, &end, 10);
    *out = (unsigned)v;
    return !errno && end != text && !*end && *text != '-' && v >= 1 && v <= 1024;
}

bool parse_bytes(const char *text, uint64_t *out)
{
    static const char unit[] = "KMGT";
    unsigned long long v, factor = 1;
    const char *u;
    char *end;

    errno = 0;
    v = strtoull(text, &end, 10);
    if (errno || end == text || *text == '-')
        return false;
    u = *end ? strchr(unit, *end) : NULL;
    if (u) {
        bool decimal = end[1] == 'B' && !end[2];

        if (!decimal && end[1] && strcmp(end + 1, "iB") != 0)
            return false;
        for (long i = u - unit; i >= 0; i--)
            factor *= decimal ? 1000 : 1024;
    } else if (*end) {
        return false;
    }
    *out = v * factor;
    return !__builtin_mul_overflow(v, factor, &v);
}

void out_json_number(const char *name, double v)
{
    if (isfinite(v))
        printf(", \"%s\": %.17g", name, v);
    else
        printf(", \"%s\": \"%g\"", name, v);
}
