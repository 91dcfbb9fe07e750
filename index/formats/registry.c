/* SPDX-License-Identifier: MIT */
/* index/formats/registry.c - the table of all formats, and a look-up over their codecs. */
#include "index/formats/format.h"

#include "registry_table.h"

const struct format_driver *const format_drivers[] = {FORMAT_TABLE};

const struct chunk_codec *format_codec(enum chunk_encoding encoding)
{
    for (const struct format_driver *const *d = format_drivers; *d; d++)
        for (const struct chunk_codec *const *c = (*d)->codecs; c && *c; c++)
            if ((*c)->encoding == encoding)
                return *c;
    return NULL;
}
