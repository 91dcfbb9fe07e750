/* SPDX-License-Identifier: MIT */
/* base/keyset.c - remembers which keys were seen, at 16 bytes each, however long they are. */
#include "base/keyset.h"

#include <errno.h>
#include <string.h>
#include <sys/auxv.h>
#include <xxhash.h>

/* Open addressing with linear probing; all zero: free. */
struct keyset_slot {
    uint64_t low, high;
};

enum {
    FIRST_CAP = 16,
    KEPT_CAP = 64, /* a larger table is freed when cleared: its keys paid for it */
};

void keyset_release(struct keyset *s)
{
    free(s->slots);
    *s = (struct keyset){0};
}

void keyset_clear(struct keyset *s)
{
    if (s->count == 0)
        return;
    if (s->cap > KEPT_CAP) {
        keyset_release(s);
        return;
    }
    memset(s->slots, 0, s->cap * sizeof *s->slots);
    s->count = 0;
}

/* Another one each run, so that no file can be made to fill one corner of the table. */
static uint64_t run_seed(void)
{
    const void *bytes = (const void *)getauxval(AT_RANDOM);
    uint64_t seed = 0;

    if (bytes)
        memcpy(&seed, bytes, sizeof seed);
    return seed;
}

static struct keyset_slot slot_of(const void *key, size_t len)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(key, len, run_seed());

    if (h.low64 == 0 && h.high64 == 0)
        h.high64 = 1; /* all zero means free */
    return (struct keyset_slot){h.low64, h.high64};
}

/* Where the hash is, or where it would go. */
static struct keyset_slot *find(struct keyset_slot *slots, size_t cap,
                                const struct keyset_slot *want)
{
    size_t i = want->low & (cap - 1);

    while ((slots[i].low || slots[i].high) &&
           (slots[i].low != want->low || slots[i].high != want->high))
        i = (i + 1) & (cap - 1);
    return &slots[i];
}

static int grow(struct keyset *s)
{
    size_t cap = s->cap ? s->cap * 2 : FIRST_CAP;
    struct keyset_slot *slots;

    slots = cap > s->cap ? calloc(cap, sizeof *slots) : NULL;
    if (!slots)
        return -ENOMEM;
    for (size_t i = 0; i < s->cap; i++)
        if (s->slots[i].low || s->slots[i].high)
            *find(slots, cap, &s->slots[i]) = s->slots[i];
    free(s->slots);
    s->slots = slots;
    s->cap = cap;
    return 0;
}

int keyset_add(struct keyset *s, const void *key, size_t len)
{
    struct keyset_slot want = slot_of(key, len), *slot;

    if (s->count >= s->cap / 4 * 3 && grow(s) < 0)
        return -ENOMEM;
    slot = find(s->slots, s->cap, &want);
    if (slot->low || slot->high)
        return 0;
    *slot = want;
    s->count++;
    return 1;
}

bool keyset_has(const struct keyset *s, const void *key, size_t len)
{
    struct keyset_slot want = slot_of(key, len), *slot;

    if (s->count == 0)
        return false;
    slot = find(s->slots, s->cap, &want);
    return slot->low || slot->high;
}
