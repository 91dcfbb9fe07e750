/* SPDX-License-Identifier: MIT */
/* index/formats/layer_name.c - the layer that a parameter's name puts it into. */
#include "index/formats/layer_name.h"

#include <ctype.h>

bool layer_name(const char *name, size_t len, size_t *layer, size_t *all)
{
    for (size_t i = 0; i + 1 < len; i++) {
        size_t end = i + 1;

        while (name[i] == '.' && end < len && isdigit((unsigned char)name[end]))
            end++;
        if (end == i + 1 || end == len || name[end] != '.')
            continue;
        *layer = end + 1;
        *all = i + 1;
        return true;
    }
    return false;
}
