/* SPDX-License-Identifier: MIT */
/* index/formats/name_take.c - names of files, taken apart from left to right. */
#include "index/formats/name_take.h"

#include <ctype.h>
#include <string.h>

enum { MAX_DIGITS = 8 };

bool name_take(const char **p, const char *text)
{
    size_t n = strlen(text);

    if (strncmp(*p, text, n) != 0)
        return false;
    *p += n;
    return true;
}

bool name_take_number(const char **p, uint32_t *out)
{
    const char *start = *p;

    for (*out = 0; isdigit((unsigned char)**p) && *p - start < MAX_DIGITS; ++*p)
        *out = *out * 10 + (uint32_t)(**p - '0');
    return *p > start && !isdigit((unsigned char)**p);
}
