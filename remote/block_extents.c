/* SPDX-License-Identifier: MIT */
/* remote/block_extents.c - bytes of objects in memory: found, added, and let go of. */
#include <assert.h>
#include <string.h>
#include <sys/mman.h>

#include "base/vec.h"

#include "remote/block_cache_priv.h"

/* What is kept of an extent beside its bytes: counted, as reads of 4 KiB make many. */
enum { EXTENT_COST = 256 };

/*
 * Larger ones are on pages of their own, which go back to the system at once: the heaps of
 * many threads would keep as much again.
 */
enum { PAGES_MIN = 128 << 10 };

/* What was fetched ahead and is not read for so many seconds will not be. */
enum { FORSAKEN_S = 3 };

/* ---- objects ---- */

static struct object **object_slot(struct block_cache *c, const uint64_t hash[2])
{
    struct object **slot = &c->object[hash[0] % OBJECT_BUCKETS];

    while (*slot && ((*slot)->hash[0] != hash[0] || (*slot)->hash[1] != hash[1]))
        slot = &(*slot)->next;
    return slot;
}

struct object *object_get(struct block_cache *c, const struct object *like)
{
    struct object **slot = object_slot(c, like->hash);

    if (!*slot) {
        *slot = malloc(sizeof **slot);
        if (!*slot)
            return NULL;
        **slot = *like;
    }
    (*slot)->refs++;
    return *slot;
}

/* Extents outlive the sources: who opens it again finds them. */
static void object_free_unused(struct block_cache *c, struct object *o)
{
    if (o->refs || o->n)
        return;
    *object_slot(c, o->hash) = o->next;
    free(o->extent);
    free(o);
}

void object_put(struct block_cache *c, struct object *o)
{
    o->refs--;
    object_free_unused(c, o);
}

size_t object_find(const struct object *o, uint64_t off)
{
    size_t lo = 0, hi = o->n;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (o->extent[mid]->off + o->extent[mid]->len <= off)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool object_link(struct object *o, struct extent *x)
{
    size_t at = object_find(o, x->off);

    if (!VEC_ROOM(o->extent, o->n, o->cap))
        return false;
    assert(at == o->n || x->off + x->len <= o->extent[at]->off);
    memmove(o->extent + at + 1, o->extent + at, (o->n - at) * sizeof(*o->extent));
    o->extent[at] = x;
    o->n++;
    x->object = o;
    return true;
}

static void object_unlink(struct block_cache *c, struct extent *x)
{
    struct object *o = x->object;
    size_t at = object_find(o, x->off);

    assert(o->extent[at] == x);
    memmove(o->extent + at, o->extent + at + 1, (o->n - at - 1) * sizeof(*o->extent));
    o->n--;
    x->object = NULL;
    object_free_unused(c, o);
}

/* ---- extents ---- */

static unsigned char *bytes_new(size_t len)
{
    void *p;

    if (len < PAGES_MIN)
        return malloc(len);
    p = mmap(NULL, len, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* NULL is fine. */
static void bytes_free(unsigned char *data, size_t len)
{
    if (data && len >= PAGES_MIN)
        munmap(data, len);
    else
        free(data);
}

/* Frees it; gives its memory instead when that has `want` bytes. */
static unsigned char *extent_free(struct block_cache *c, struct extent *x, size_t want)
{
    unsigned char *data = x->data;

    if (x->object)
        object_unlink(c, x);
    ring_remove(&x->lru);
    c->used -= x->len + EXTENT_COST;
    if (x->len != want) {
        bytes_free(data, x->len);
        data = NULL;
    }
    free(x);
    return data;
}

static time_t now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return t.tv_sec;
}

/*
 * The next to go, or NULL. For bytes that are fetched ahead (`spare`) those that wait for
 * their reader stay, unless he has not come for long.
 */
static struct extent *next_to_go(struct block_cache *c, bool spare)
{
    struct extent *x;

    if (c->lru.next != &c->lru)
        return container_of(c->lru.next, struct extent, lru);
    if (c->unread.next == &c->unread)
        return NULL;
    x = container_of(c->unread.next, struct extent, lru);
    return !spare || now() - x->used > FORSAKEN_S ? x : NULL;
}

/* Lets others go until `len` bytes fit. *data is the memory of one of them, or NULL. */
static bool make_room(struct block_cache *c, size_t len, bool spare,
                      unsigned char **data)
{
    while (c->used + len + EXTENT_COST > c->memory) {
        struct extent *x = next_to_go(c, spare);

        if (!x)
            return false;
        bytes_free(*data, len);
        *data = extent_free(c, x, len);
    }
    return true;
}

struct extent *extent_new(struct block_cache *c, struct object *o, uint64_t off,
                          size_t len, bool spare)
{
    struct extent *x = calloc(1, sizeof *x);
    unsigned char *data = NULL;
    bool fits;

    if (!x)
        return NULL;
    o->refs++; /* making room must not end it */
    fits = make_room(c, len, spare, &data);
    o->refs--;
    if (!data && (fits || !spare))
        data = bytes_new(len);
    *x = (struct extent){
        .off = off, .len = len, .refs = 1, .ahead = spare, .waits = spare};
    ring_init(&x->lru);
    if (!data || (spare && !fits) || !object_link(o, x)) {
        bytes_free(data, len);
        free(x);
        return NULL;
    }
    x->data = data;
    c->used += len + EXTENT_COST;
    return x;
}

void extent_hold(struct extent *x)
{
    x->refs++;
    ring_remove(&x->lru);
}

void extent_put_read(struct block_cache *c, struct extent *x, bool used_up)
{
    if (--x->refs > 0)
        return;
    assert(x->state != EXTENT_FETCHING);
    x->used = now();
    if (x->state == EXTENT_FAILED || c->used > c->memory)
        extent_free(c, x, 0);
    else if (x->waits)
        ring_append(&c->unread, &x->lru);
    else if (used_up)
        ring_append(c->lru.next, &x->lru); /* in front of all */
    else
        ring_append(&c->lru, &x->lru);
}

void extent_put(struct block_cache *c, struct extent *x)
{
    extent_put_read(c, x, false);
}

void extent_end(struct block_cache *c, struct extent *x, bool good)
{
    x->state = good ? EXTENT_DONE : EXTENT_FAILED;
    if (!good)
        object_unlink(c, x);
    pthread_cond_broadcast(&c->changed);
}

void extents_drop(struct block_cache *c)
{
    struct extent *x;

    while ((x = next_to_go(c, false)))
        extent_free(c, x, 0);
}
