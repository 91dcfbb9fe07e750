/* SPDX-License-Identifier: MIT */
/* index/formats/key_list.h - names in the order of their bytes, to be looked up by how they begin. */
#ifndef UFS_INDEX_FORMATS_KEY_LIST_H
#define UFS_INDEX_FORMATS_KEY_LIST_H

#include "base/base.h"

struct err;

struct key {
    const char *name; /* borrowed */
    size_t len;
};

struct key_list {
    struct key *at; /* malloc; in order, each once, after key_list_sort */
    size_t count, room;
};

void key_list_release(struct key_list *keys);
int key_compare(const void *a, const void *b); /* as qsort(3) takes it */
bool key_starts_with(const struct key *key, const struct key *start);

/* -ENOMEM, or 0. */
int key_list_add(struct key_list *keys, const char *name, size_t len, struct err *e);
void key_list_sort(struct key_list *keys);

/* Of a sorted one: the first key that is not before this one. */
size_t key_list_from(const struct key_list *keys, const struct key *key);
bool key_list_has(const struct key_list *keys, const struct key *key);
/* Is there one that starts with these bytes? */
bool key_list_has_start(const struct key_list *keys, const struct key *start);

#endif
