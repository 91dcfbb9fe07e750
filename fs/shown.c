/* SPDX-License-Identifier: MIT */
/* fs/shown.c - a snapshot of what a directory shows. */
#include "fs/shown.h"

#include <string.h>

#include "remote/listing.h"

struct shown *shown_make(void)
{
    struct shown *s = calloc(1, sizeof *s);

    if (s)
        s->refs = 1;
    return s;
}

struct shown *shown_get(struct shown *s)
{
    atomic_fetch_add(&s->refs, 1);
    return s;
}

void shown_put(struct fs *fs, struct shown *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) > 1)
        return;
    slot_unref(fs, s->slot, 1);
    listing_free(s->listing);
    free(s->latest);
    free(s->entry);
    free(s);
}

static int by_name(const void *a, const void *b)
{
    const struct shown_entry *left = a, *right = b;

    return strcmp(left->name, right->name);
}

void shown_sort(struct shown *s)
{
    if (s->count)
        qsort(s->entry, s->count, sizeof *s->entry, by_name);
}

const struct shown_entry *shown_find(const struct shown *s, const char *name)
{
    const struct shown_entry key = {.name = name};

    return s->count ? bsearch(&key, s->entry, s->count, sizeof key, by_name) : NULL;
}
