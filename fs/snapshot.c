/* SPDX-License-Identifier: MIT */
/* fs/snapshot.c - a snapshot of what a directory shows. */
#include "fs/snapshot.h"

#include <string.h>

#include "remote/listing.h"

struct snapshot *snapshot_make(void)
{
    struct snapshot *s = calloc(1, sizeof *s);

    if (s)
        s->refs = 1;
    return s;
}

struct snapshot *snapshot_get(struct snapshot *s)
{
    atomic_fetch_add(&s->refs, 1);
    return s;
}

void snapshot_put(struct fs *fs, struct snapshot *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) > 1)
        return;
    generation_unref(fs, s->gen, 1);
    listing_free(s->listing);
    free(s->latest);
    free(s->entry);
    free(s);
}

static int by_name(const void *a, const void *b)
{
    const struct snapshot_entry *left = a, *right = b;

    return strcmp(left->name, right->name);
}

void snapshot_sort(struct snapshot *s)
{
    if (s->count)
        qsort(s->entry, s->count, sizeof *s->entry, by_name);
}

const struct snapshot_entry *snapshot_find(const struct snapshot *s, const char *name)
{
    const struct snapshot_entry key = {.name = name};

    return s->count ? bsearch(&key, s->entry, s->count, sizeof key, by_name) : NULL;
}
