/* SPDX-License-Identifier: MIT */
/* index/formats/registry.c - the table of all formats, and a look-up over their codecs. */
#include "index/formats/format.h"

#include <string.h>

#include "registry_table.h"

const struct format_driver *const format_drivers[] = {FORMAT_TABLE};

const struct format_writer *format_writer_at(size_t i)
{
    for (const struct format_driver *const *d = format_drivers; *d; d++)
        for (const struct format_writer *const *w = (*d)->writers; w && *w; w++)
            if (i-- == 0)
                return *w;
    return NULL;
}

const struct format_writer *format_writer(const char *name)
{
    const struct format_writer *w;

    for (size_t i = 0; (w = format_writer_at(i)); i++)
        if (strcmp(w->name, name) == 0)
            return w;
    return NULL;
}

const struct chunk_codec *format_codec(enum chunk_encoding encoding)
{
    for (const struct format_driver *const *d = format_drivers; *d; d++)
        for (const struct chunk_codec *const *c = (*d)->codecs; c && *c; c++)
            if ((*c)->encoding == encoding)
                return *c;
    return NULL;
}
