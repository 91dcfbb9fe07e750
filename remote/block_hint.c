/* SPDX-License-Identifier: MIT */
/* remote/block_hint.c - hints of stores, kept on disk as blocks of their own. */
#include <string.h>

#include <xxhash.h>

#include "base/endian.h"
#include "remote/block_cache_priv.h"

enum { LENGTH = 4 }; /* of the hint, in front of it */

/* As no object is named: their hashes are of two numbers and one more. */
static bool hint_name(const char *store, const char *name, struct block_name *out)
{
    CLEANUP(buf_release) struct buf text = {0};
    XXH128_hash_t h;

    buf_adds(&text, "hint");
    buf_addc(&text, '\0');
    buf_adds(&text, store);
    buf_addc(&text, '\0');
    buf_adds(&text, name);
    if (buf_failed(&text) < 0)
        return false;
    h = XXH3_128bits(text.data, text.len);
    *out = (struct block_name){
        .tag = h.low64 ? h.low64 : 1, .seed = h.high64, .owner = block_owner_of(store)};
    return true;
}

size_t block_cache_recall(void *user, const char *store, const char *name, void *dst,
                          size_t size)
{
    struct block_cache *c = user;
    CLEANUP_FREE unsigned char *block = c->disk ? malloc(BLOCK_BYTES) : NULL;
    struct block_name id;
    unsigned there, sectors;
    size_t len;

    if (!block || !hint_name(store, name, &id))
        return 0;
    there = block_disk_get(c->disk, &id, 0, BLOCK_BYTES, block);
    sectors = (unsigned)__builtin_ctz(~there);
    if (sectors == 0)
        return 0;
    len = get_le32(block);
    if (len > size || len > sectors * (size_t)BLOCK_SECTOR - LENGTH)
        return 0;
    memcpy(dst, block + LENGTH, len);
    return len;
}

void block_cache_note(void *user, const char *store, const char *name, const void *data,
                      size_t len)
{
    struct block_cache *c = user;
    size_t whole = (LENGTH + len + BLOCK_SECTOR - 1) / BLOCK_SECTOR * BLOCK_SECTOR;
    CLEANUP_FREE unsigned char *block = NULL;
    struct block_name id;

    if (!c->disk || len > BLOCK_BYTES - LENGTH || !hint_name(store, name, &id))
        return;
    block = calloc(1, whole);
    if (!block)
        return;
    put_le32(block, (uint32_t)len);
    memcpy(block + LENGTH, data, len);
    /* Not kept: the next time takes longer. */
    (void)block_disk_put(c->disk, &id, 0, block, whole);
}
