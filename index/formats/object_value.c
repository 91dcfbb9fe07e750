/* SPDX-License-Identifier: MIT */
/* index/formats/object_value.c - how objects.json spells values that JSON has no word for. */
#include "index/formats/object_value.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/utf8.h"

static const int64_t EXACT = INT64_C(1) << 53; /* of doubles, which JSON readers use */

void object_value_int(struct buf *out, int64_t v)
{
    if (v >= -EXACT && v <= EXACT)
        buf_addf(out, "%" PRId64, v);
    else
        buf_addf(out, "{\"$type\":\"int\",\"value\":\"%" PRId64 "\"}", v);
}

void object_value_uint(struct buf *out, uint64_t v)
{
    if (v <= (uint64_t)EXACT)
        buf_addf(out, "%" PRIu64, v);
    else
        buf_addf(out, "{\"$type\":\"int\",\"value\":\"%" PRIu64 "\"}", v);
}

/* As few digits from 15 on as give the same double, with a point or an exponent. */
static void format_double(double f, char *dst, size_t size)
{
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(dst, size, "%.*g", digits, f);
        if (strtod(dst, NULL) == f)
            break;
    }
    for (char *c = strchr(dst, ','); c; c = strchr(dst, ',')) /* of some locales */
        *c = '.';
    if (!strpbrk(dst, ".e"))
        strncat(dst, ".0", size - strlen(dst) - 1);
}

void object_value_double(struct buf *out, double v)
{
    char text[40];

    if (isfinite(v)) {
        format_double(v, text, sizeof text);
        buf_adds(out, text);
        return;
    }
    buf_addf(out, "{\"$type\":\"float\",\"value\":\"%s\"}",
             isnan(v) ? "nan"
             : v > 0  ? "inf"
                      : "-inf");
}

void object_value_base64(struct buf *out, const void *data, size_t len)
{
    static const char digits[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *p = data;
    char *dst = buf_grow(out, (len + 2) / 3 * 4 + 2);

    if (!dst)
        return;
    *dst++ = '"';
    for (size_t i = 0; i < len; i += 3) {
        uint32_t b = (uint32_t)p[i] << 16 |
                     (i + 1 < len ? (uint32_t)p[i + 1] << 8 : 0) |
                     (i + 2 < len ? p[i + 2] : 0);

        *dst++ = digits[b >> 18];
        *dst++ = digits[b >> 12 & 63];
        *dst++ = i + 1 < len ? digits[b >> 6 & 63] : '=';
        *dst++ = i + 2 < len ? digits[b & 63] : '=';
    }
    *dst = '"';
}

void object_value_bytes(struct buf *out, const void *data, size_t len)
{
    buf_adds(out, "{\"$type\":\"bytes\",\"value\":");
    object_value_base64(out, data, len);
    buf_adds(out, "}");
}

bool object_text_is_utf8(const char *text, size_t len)
{
    for (size_t i = 0, n; i < len; i += n) {
        n = utf8_char(text + i, len - i);
        if (n == 0)
            return false;
    }
    return true;
}

/* Text with lone surrogates cannot be said in JSON that every reader takes. */
void object_value_text(struct buf *out, const char *text, size_t len)
{
    if (object_text_is_utf8(text, len)) {
        buf_add_json(out, text, len);
        return;
    }
    buf_adds(out,
             "{\"$type\":\"opaque\",\"class\":\"builtins.str\",\"surrogatepass\":");
    object_value_base64(out, text, len);
    buf_adds(out, "}");
}

void object_value_name(struct buf *out, const char *text, size_t len)
{
    size_t dollars = 0;

    while (dollars < len && text[dollars] == '$')
        dollars++;
    if (dollars == 0 || len - dollars != 4 || memcmp(text + dollars, "type", 4) != 0) {
        buf_add_json(out, text, len);
        return;
    }
    buf_adds(out, "\"$");
    buf_add(out, text, len);
    buf_adds(out, "\"");
}
