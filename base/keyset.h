/* SPDX-License-Identifier: MIT */
/* base/keyset.h - remembers which keys were seen, at 16 bytes each, however long they are. */
#ifndef UFS_BASE_KEYSET_H
#define UFS_BASE_KEYSET_H

#include "base/base.h"

/*
 * `struct keyset s = {0};` is empty. Keys are kept as 128-bit hashes: a key seen before is
 * always found; that one is taken for another has a chance of about n^2 / 2^129 (10^-26
 * for a million keys), and then a good file is refused, no wrong one accepted.
 */
struct keyset {
    struct keyset_slot *slots;
    size_t cap, count;
};

void keyset_release(struct keyset *s);

/* Empties it at a cost in proportion to what was in it. */
void keyset_clear(struct keyset *s);

/* 1: new and now in it; 0: it was there; -ENOMEM. */
int keyset_add(struct keyset *s, const void *key, size_t len);

/* Is it in the set? */
bool keyset_has(const struct keyset *s, const void *key, size_t len);

#endif
