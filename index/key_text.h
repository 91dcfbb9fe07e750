/* SPDX-License-Identifier: MIT */
/* index/key_text.h - keys and names of any bytes, made fit for a message. */
#ifndef UFS_INDEX_KEY_TEXT_H
#define UFS_INDEX_KEY_TEXT_H

#include <string.h>

#include "base/base.h"
#include "base/utf8.h"

/* Escaped and cut to `size` with its NUL; a NUL in it is shown as '?'. Returns dst. */
static inline const char *key_text(char *dst, size_t size, const char *key, size_t len)
{
    char copy[256];
    size_t n = MIN(len, sizeof copy - 1);

    if (n > 0)
        memcpy(copy, key, n);
    for (size_t i = 0; i < n; i++)
        if (copy[i] == '\0')
            copy[i] = '?';
    copy[n] = '\0';
    text_escape(dst, size, copy);
    return dst;
}

#endif
