/* SPDX-License-Identifier: MIT */
/* index/map/shipped.c - the maps of the folder maps/, as text in the program. */
#include "index/map/map.h"

#include <string.h>

#include "index/shipped_maps.h"

static const struct {
    const char *name, *text;
} shipped[] = {SHIPPED_MAPS};

const char *map_shipped(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(shipped); i++)
        if (strcmp(shipped[i].name, name) == 0)
            return shipped[i].text;
    return NULL;
}

const char *map_shipped_name(size_t i)
{
    return i < ARRAY_SIZE(shipped) ? shipped[i].name : NULL;
}
