/* SPDX-License-Identifier: MIT */
/* base/utf8.c - which bytes are well-formed UTF-8, and text made safe for a terminal. */
#include "base/utf8.h"

#include <string.h>

/* The ranges of RFC 3629: only the second byte's range depends on the first. */
static size_t char_shape(unsigned char first, unsigned char *low, unsigned char *high)
{
    *low = 0x80;
    *high = 0xbf;
    if (first < 0x80)
        return 1;
    if (first >= 0xc2 && first <= 0xdf)
        return 2;
    if (first >= 0xe0 && first <= 0xef) {
        if (first == 0xe0)
            *low = 0xa0; /* below: overlong */
        if (first == 0xed)
            *high = 0x9f; /* above: surrogates */
        return 3;
    }
    if (first >= 0xf0 && first <= 0xf4) {
        if (first == 0xf0)
            *low = 0x90; /* below: overlong */
        if (first == 0xf4)
            *high = 0x8f; /* above: past U+10FFFF */
        return 4;
    }
    return 0;
}

size_t utf8_char(const void *s, size_t len)
{
    const unsigned char *p = s;
    unsigned char low, high;
    size_t need = len ? char_shape(p[0], &low, &high) : 0;

    if (need == 0 || need > len)
        return 0;
    if (need > 1 && (p[1] < low || p[1] > high))
        return 0;
    for (size_t i = 2; i < need; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    return need;
}

/* What would move the cursor, start a terminal sequence or break the line. */
static bool is_control(const unsigned char *p, size_t len)
{
    if (len == 1)
        return p[0] < 0x20 || p[0] == 0x7f;
    if (len == 2)
        return p[0] == 0xc2 && p[1] < 0xa0;
    return len == 3 && p[0] == 0xe2 && p[1] == 0x80 && (p[2] == 0xa8 || p[2] == 0xa9);
}

size_t text_escape(char *dst, size_t size, const char *text)
{
    static const char hex[] = "0123456789ABCDEF";
    const unsigned char *p = (const unsigned char *)text;
    size_t left = strlen(text), used = 0;

    if (size == 0)
        return 0;
    while (left > 0) {
        size_t len = utf8_char(p, left);
        bool plain = len > 0 && !is_control(p, len);
        size_t room = plain ? len : 3;

        if (room >= size - used)
            break;
        if (plain) {
            memcpy(dst + used, p, len);
        } else {
            dst[used] = '%';
            dst[used + 1] = hex[p[0] >> 4];
            dst[used + 2] = hex[p[0] & 15];
            len = 1;
        }
        used += room;
        p += len;
        left -= len;
    }
    dst[used] = '\0';
    return used;
}
