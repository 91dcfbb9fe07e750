/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_intern.c - equal byte strings get one number, and are kept once. */
#include "index/formats/dcp/dcp_intern.h"

#include <errno.h>
#include <string.h>
#include <sys/auxv.h>
#include <xxhash.h>

struct intern_entry {
    uint32_t at; /* of the bytes, in eights */
    uint32_t len;
};

enum {
    FIRST_SLOTS = 64,
    ALIGNED = 8,
    /* What 32 bits of `at` can reach; far beyond any real file's names. */
    MAX_BYTES = 0x7fffffff,
};

void intern_release(struct intern *t)
{
    free(t->entry);
    free(t->slot);
    buf_release(&t->bytes);
    *t = (struct intern){0};
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

const void *intern_get(const struct intern *t, uint32_t number, size_t *len)
{
    const struct intern_entry *entry = &t->entry[number];

    *len = entry->len;
    return t->bytes.data + (size_t)entry->at * ALIGNED;
}

/* The slot of these bytes, or the free one where they would go. */
static uint32_t *find(const struct intern *t, const void *data, size_t len)
{
    size_t mask = t->nslots - 1, i = XXH3_64bits_withSeed(data, len, run_seed()) & mask;

    for (; t->slot[i]; i = (i + 1) & mask) {
        size_t have;
        const void *bytes = intern_get(t, t->slot[i] - 1, &have);

        if (have == len && memcmp(bytes, data, len) == 0)
            break;
    }
    return &t->slot[i];
}

bool intern_find(const struct intern *t, const void *data, size_t len, uint32_t *number)
{
    uint32_t slot = t->nslots ? *find(t, data, len) : 0;

    *number = slot - 1;
    return slot > 0;
}

/* Keeps two slots of three in use at most. */
static int grow_slots(struct intern *t)
{
    size_t n = t->nslots ? t->nslots * 2 : FIRST_SLOTS;
    uint32_t *old = t->slot;

    if (t->nslots && t->count < t->nslots / 3 * 2)
        return 0;
    t->slot = calloc(n, sizeof *t->slot);
    if (!t->slot) {
        t->slot = old;
        return -ENOMEM;
    }
    free(old);
    t->nslots = n;
    for (uint32_t i = 0; i < t->count; i++) {
        size_t len;
        const void *bytes = intern_get(t, i, &len);

        *find(t, bytes, len) = i + 1;
    }
    return 0;
}

static int grow_entries(struct intern *t)
{
    uint32_t cap = t->cap ? t->cap + t->cap / 2 : FIRST_SLOTS;
    struct intern_entry *entry;

    if (t->count < t->cap)
        return 0;
    if (t->count >= INTERN_MAX)
        return -EFBIG;
    entry = reallocarray(t->entry, cap, sizeof *entry);
    if (!entry)
        return -ENOMEM;
    t->entry = entry;
    t->cap = cap;
    return 0;
}

/* Copies the bytes in, padded to eights, so that every string is aligned. */
static int keep_bytes(struct intern *t, const void *data, size_t len, uint32_t *at)
{
    size_t padded = (len + ALIGNED - 1) / ALIGNED * ALIGNED;
    char *dst;

    t->bytes.max = MAX_BYTES;
    dst = buf_grow(&t->bytes, padded);
    if (!dst)
        return buf_failed(&t->bytes);
    if (len > 0)
        memcpy(dst, data, len);
    memset(dst + len, 0, padded - len);
    *at = (uint32_t)((size_t)(dst - t->bytes.data) / ALIGNED);
    return 0;
}

int intern_add(struct intern *t, const void *data, size_t len, uint32_t *number)
{
    uint32_t *slot, at = 0;
    int r;

    if (len > MAX_BYTES)
        return -EFBIG;
    if ((r = grow_slots(t)) < 0 || (r = grow_entries(t)) < 0)
        return r;
    slot = find(t, data, len);
    if (!*slot) {
        if ((r = keep_bytes(t, data, len, &at)) < 0)
            return r;
        t->entry[t->count] = (struct intern_entry){at, (uint32_t)len};
        *slot = ++t->count;
    }
    *number = *slot - 1;
    return 0;
}
