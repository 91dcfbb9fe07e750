/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle_table.c - lists, sets and dicts of the unpickler, and their keys. */
#include "index/formats/pickle/pickle_priv.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"

enum {
    LINEAR_MAX = 8,       /* up to so many entries are searched one by one */
    KEY_DEPTH = 64,       /* of tuples in a key; keys seen in checkpoints: 2 */
    KEY_VISITS = 1 << 16, /* of one comparison: tuples that share parts are a DAG */
    MAX_ENTRIES = 1 << 30
};

static struct pn_table *as_table(struct pnode *n)
{
    return container_of(n, struct pn_table, node);
}

static const struct pv *tuple_items(struct pv v)
{
    return container_of(v.node, struct pn_tuple, node)->item;
}

static uint32_t mix(uint64_t seed, uint64_t v)
{
    v = (v ^ seed) * UINT64_C(0x9e3779b97f4a7c15);
    v = (v ^ v >> 32) * UINT64_C(0xd6e8feb86659fd93);
    v ^= v >> 32;
    return (uint32_t)v | 1; /* 0 says "not yet" */
}

/* Numbers that are equal in Python are one key: 1, 1.0 and True. */
static struct pv number_key(struct pv v)
{
    if (v.kind == PV_BOOL)
        return (struct pv){.kind = PV_INT, .i = v.b};
    if (v.kind == PV_FLOAT && v.f >= (double)INT64_MIN && v.f < -(double)INT64_MIN &&
        (double)(int64_t)v.f == v.f)
        return (struct pv){.kind = PV_INT, .i = (int64_t)v.f};
    return v;
}

static uint64_t float_bits(double f)
{
    uint64_t bits;

    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static uint32_t hash_bytes(const struct pickle *p, struct pnode *n)
{
    const char *data = container_of(n, struct pn_bytes, node)->data;

    if (!n->hash)
        n->hash = mix(p->seed, XXH3_64bits_withSeed(data, n->len, p->seed));
    return n->hash;
}

static uint32_t hash_global(const struct pickle *p, struct pnode *n)
{
    const struct pn_global *g = container_of(n, struct pn_global, node);
    size_t len = (size_t)n->len + 1 + g->name_len;

    if (!n->hash)
        n->hash = mix(p->seed, XXH3_64bits_withSeed(g->text, len, p->seed));
    return n->hash;
}

bool pv_hash(const struct pickle *p, struct pv v, uint32_t *hash)
{
    v = number_key(pv_norm(v));
    switch ((enum pv_kind)v.kind) {
    case PV_NONE:
        *hash = mix(p->seed, 0);
        return true;
    case PV_BOOL:
    case PV_INT:
        *hash = mix(p->seed, (uint64_t)v.i);
        return true;
    case PV_FLOAT:
        *hash = mix(~p->seed, float_bits(v.f));
        return true;
    case PV_RECORD:
        *hash = mix(p->seed + 1, v.record);
        return true;
    case PV_BIGINT:
    case PV_STR:
    case PV_BYTES:
        *hash = hash_bytes(p, v.node);
        return !(v.node->flags & PNODE_UNHASHABLE);
    case PV_TUPLE:
    case PV_FROZENSET:
        *hash = v.node->hash;
        return !(v.node->flags & PNODE_UNHASHABLE);
    case PV_GLOBAL:
        *hash = hash_global(p, v.node);
        return true;
    case PV_OBJECT:
    case PV_PERSID:
        *hash = mix(p->seed, (uintptr_t)v.node);
        return true;
    case PV_LIST:
    case PV_SET:
    case PV_DICT:
        break;
    }
    return false;
}

/*
 * Taken when a tuple is made, from the hashes of its items: looking at it as a key later
 * neither recurses nor walks what it shares with others.
 */
uint32_t phash_tuple(struct pickle *p, const struct pv *items, size_t n, uint8_t *flags)
{
    uint64_t sum = n;
    uint32_t hash = 0;

    for (size_t i = 0; i < n; i++) {
        if (!pv_hash(p, items[i], &hash)) {
            *flags |= PNODE_UNHASHABLE;
            return 1;
        }
        sum = (sum ^ hash) * UINT64_C(0x9fb21c651e98df25);
        sum ^= sum >> 29;
    }
    return mix(p->seed, sum);
}

/* Compares without looking into tuples; -1: they are tuples that have to be compared. */
static int equal_flat(struct pv a, struct pv b)
{
    a = number_key(pv_norm(a));
    b = number_key(pv_norm(b));
    if (a.kind != b.kind)
        return 0;
    if (pv_has_node(a)) {
        size_t len = a.node->len;

        if (a.node == b.node)
            return 1;
        if (a.kind == PV_OBJECT || a.kind == PV_PERSID || a.kind == PV_FROZENSET ||
            a.node->hash != b.node->hash || b.node->len != len)
            return 0;
        if (a.kind == PV_TUPLE)
            return -1;
        if (a.kind == PV_GLOBAL) {
            const struct pn_global *g = container_of(a.node, struct pn_global, node);
            const struct pn_global *h = container_of(b.node, struct pn_global, node);

            return g->name_len == h->name_len &&
                   memcmp(g->text, h->text, len + 1 + g->name_len) == 0;
        }
        return memcmp(container_of(a.node, struct pn_bytes, node)->data,
                      container_of(b.node, struct pn_bytes, node)->data, len) == 0;
    }
    switch (a.kind) {
    case PV_NONE:
        return 1;
    case PV_FLOAT:
        return float_bits(a.f) == float_bits(b.f) && !isnan(a.f);
    case PV_RECORD:
        return a.record == b.record;
    default:
        return a.i == b.i;
    }
}

/* 1, 0, or -EBADMSG for tuples made to take forever. */
static int key_equal(struct pv a, struct pv b, struct err *e)
{
    struct {
        struct pv a, b;
        uint32_t i;
    } level[KEY_DEPTH] = {{a, b, 0}};
    unsigned depth = 1, visits = 0;
    int same = equal_flat(a, b);

    if (same >= 0)
        return same;
    while (depth > 0) {
        uint32_t i = level[depth - 1].i++;

        if (i == level[depth - 1].a.node->len) {
            depth--;
            continue;
        }
        a = tuple_items(level[depth - 1].a)[i];
        b = tuple_items(level[depth - 1].b)[i];
        same = equal_flat(a, b);
        if (same == 0)
            return 0;
        if (++visits > KEY_VISITS || (same < 0 && depth == KEY_DEPTH))
            return err_set(e, EBADMSG, "a key of too many nested tuples");
        if (same < 0) {
            level[depth].a = a;
            level[depth].b = b;
            level[depth++].i = 0;
        }
    }
    return 1;
}

static size_t width_of(const struct pnode *n)
{
    return n->kind == PV_DICT ? 2 : 1;
}

/* Room for n more entries: exactly so many at first, then growing by half. */
static int reserve(struct pickle *p, struct pn_table *t, size_t n, struct err *e)
{
    size_t width = width_of(&t->node) * sizeof(struct pv), cap;
    struct pv *item;

    if (n <= t->cap - t->node.len)
        return 0;
    if (n > MAX_ENTRIES - t->node.len)
        return err_set(e, EBADMSG, "a container of over %d entries", MAX_ENTRIES);
    cap = MAX(t->node.len + n, (size_t)t->cap + t->cap / 2);
    item = pmem_resize(&p->mem, t->item, t->cap * width, cap * width, e);
    if (!item)
        return -e->code;
    t->item = item;
    t->cap = (uint32_t)cap;
    return 0;
}

int ptable_append(struct pickle *p, struct pnode *list, const struct pv *items,
                  size_t n, struct err *e)
{
    struct pn_table *t = as_table(list);

    TRY(reserve(p, t, n, e));
    if (n > 0)
        memcpy(t->item + list->len, items, n * sizeof *items);
    list->len += (uint32_t)n;
    return 0;
}

static void index_put(struct pn_table *t, uint32_t hash, uint32_t entry)
{
    uint32_t mask = t->index_cap - 1, i = hash & mask;

    while (t->index[i])
        i = (i + 1) & mask;
    t->index[i] = entry + 1;
}

/* Makes the index when it is missing or over half full. */
static int index_grow(struct pickle *p, struct pn_table *t, struct err *e)
{
    uint32_t cap = t->index_cap ? t->index_cap : 4 * LINEAR_MAX;
    size_t width = width_of(&t->node);
    uint32_t hash = 0, *index;

    while (cap / 2 <= t->node.len)
        cap *= 2;
    index = pmem_alloc(&p->mem, cap * sizeof *index, e);
    if (!index)
        return -e->code;
    memset(index, 0, cap * sizeof *index);
    pmem_free(&p->mem, t->index, t->index_cap * sizeof *t->index);
    t->index = index;
    t->index_cap = cap;
    for (uint32_t i = 0; i < t->node.len; i++) {
        (void)pv_hash(p, t->item[i * width], &hash); /* it was hashable when added */
        index_put(t, hash, i);
    }
    return 0;
}

/* The entry that has this key: its number, or -1 (none), or -EBADMSG as a code below. */
static int64_t find(const struct pn_table *t, struct pv key, uint32_t hash,
                    struct err *e)
{
    size_t width = width_of(&t->node);
    int same;

    if (!t->index) {
        for (uint32_t i = 0; i < t->node.len; i++) {
            same = key_equal(t->item[i * width], key, e);
            if (same != 0)
                return same > 0 ? (int64_t)i : -2;
        }
        return -1;
    }
    for (uint32_t i = hash & (t->index_cap - 1); t->index[i];
         i = (i + 1) & (t->index_cap - 1)) {
        uint32_t entry = t->index[i] - 1;

        same = key_equal(t->item[entry * width], key, e);
        if (same != 0)
            return same > 0 ? (int64_t)entry : -2;
    }
    return -1;
}

/* Appends an entry whose key is new; there is room for it. */
static int insert(struct pickle *p, struct pn_table *t, const struct pv *entry,
                  uint32_t hash, struct err *e)
{
    bool due = t->index ? t->node.len >= t->index_cap / 2 : t->node.len >= LINEAR_MAX;

    if (due)
        TRY(index_grow(p, t, e));
    memcpy(t->item + t->node.len * width_of(&t->node), entry,
           width_of(&t->node) * sizeof *entry);
    if (t->index)
        index_put(t, hash, t->node.len);
    t->node.len++;
    return 0;
}

static int hash_key(struct pickle *p, struct pv key, uint32_t *hash, struct err *e)
{
    if (!pv_hash(p, key, hash))
        return err_set(e, EBADMSG, "a key that cannot be hashed");
    return 0;
}

static int add_one(struct pickle *p, struct pn_table *t, struct pv item, struct err *e)
{
    uint32_t hash = 0;
    int64_t at;

    TRY(hash_key(p, item, &hash, e));
    at = find(t, item, hash, e);
    if (at < -1)
        return -e->code;
    if (at < 0)
        return insert(p, t, &item, hash, e);
    pv_unref(p, item);
    return 0;
}

int ptable_add(struct pickle *p, struct pnode *set, const struct pv *items, size_t n,
               struct err *e)
{
    struct pn_table *t = as_table(set);
    uint32_t hash = 0, sum = 0;

    TRY(reserve(p, t, n, e));
    for (size_t i = 0; i < n; i++) {
        TRY(add_one(p, t, items[i], e));
    }
    for (uint32_t i = 0; set->kind == PV_FROZENSET && i < set->len; i++) {
        (void)pv_hash(p, t->item[i], &hash);
        sum += hash; /* the order of items means nothing */
    }
    set->hash = set->kind == PV_FROZENSET ? mix(p->seed, sum) : 0;
    return 0;
}

static int set_one(struct pickle *p, struct pn_table *t, const struct pv *pair,
                   struct err *e)
{
    uint32_t hash = 0;
    int64_t at;

    TRY(hash_key(p, pair[0], &hash, e));
    at = find(t, pair[0], hash, e);
    if (at < -1)
        return -e->code;
    if (at < 0)
        return insert(p, t, pair, hash, e);
    pv_unref(p, pair[0]);
    pv_unref(p, t->item[2 * at + 1]);
    t->item[2 * at + 1] = pair[1];
    return 0;
}

int ptable_set(struct pickle *p, struct pnode *dict, const struct pv *pairs,
               size_t npairs, struct err *e)
{
    struct pn_table *t = as_table(dict);

    TRY(reserve(p, t, npairs, e));
    for (size_t i = 0; i < npairs; i++) {
        TRY(set_one(p, t, pairs + 2 * i, e));
    }
    return 0;
}
