/* SPDX-License-Identifier: MIT */
/* index/formats/key_list.c - names in the order of their bytes, to be looked up by how they begin. */
#include "index/formats/key_list.h"

#include <string.h>

#include "base/err.h"
#include "base/vec.h"

void key_list_release(struct key_list *keys)
{
    free(keys->at);
}

int key_compare(const void *a, const void *b)
{
    const struct key *x = a, *y = b;
    int order = memcmp(x->name, y->name, MIN(x->len, y->len));

    return order ? order : (x->len > y->len) - (x->len < y->len);
}

bool key_starts_with(const struct key *key, const struct key *start)
{
    return key->len >= start->len && memcmp(key->name, start->name, start->len) == 0;
}

int key_list_add(struct key_list *keys, const char *name, size_t len, struct err *e)
{
    if (!VEC_ROOM(keys->at, keys->count, keys->room))
        return err_nomem(e);
    keys->at[keys->count++] = (struct key){name, len};
    return 0;
}

void key_list_sort(struct key_list *keys)
{
    size_t n = 0;

    if (keys->count > 0)
        qsort(keys->at, keys->count, sizeof *keys->at, key_compare);
    for (size_t i = 0; i < keys->count; i++)
        if (n == 0 || key_compare(&keys->at[n - 1], &keys->at[i]) != 0)
            keys->at[n++] = keys->at[i];
    keys->count = n;
}

size_t key_list_from(const struct key_list *keys, const struct key *key)
{
    size_t low = 0, high = keys->count;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (key_compare(&keys->at[mid], key) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

bool key_list_has(const struct key_list *keys, const struct key *key)
{
    size_t i = key_list_from(keys, key);

    return i < keys->count && key_compare(&keys->at[i], key) == 0;
}

bool key_list_has_start(const struct key_list *keys, const struct key *start)
{
    size_t i = key_list_from(keys, start);

    return i < keys->count && key_starts_with(&keys->at[i], start);
}
