/* SPDX-License-Identifier: MIT */
/* index/plan.c - collects the chunks of a tensor, checks them and freezes the plan. */
#include "index/plan.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/cover.h"
#include "index/grid.h"

/* A chunk in the order of its first element. Elements are counted in row-major order. */
struct entry {
    const struct chunk *chunk;
    uint64_t first;
    uint64_t reach; /* the furthest last element of this and all chunks before */
};

/* Packed chunks that follow each other: the first element, the furthest last one. */
struct group {
    uint64_t first, reach;
};

enum {
    /* Entries, or nodes of the level below, that a node stands for. */
    FANOUT_BITS = 4,
    FANOUT = 1 << FANOUT_BITS,
    LEVELS_MAX = 64 / FANOUT_BITS,
};

/*
 * Boxes round the chunks of FANOUT, FANOUT^2, ... entries that follow each other: a window
 * passes over all of those whose box it does not touch.
 */
struct level {
    size_t n;
    uint64_t *box; /* of each node the start and the size: twice nd numbers */
};

struct plan {
    struct shape units;
    uint64_t stride[SHAPE_MAX_DIMS]; /* elements, row-major */
    uint64_t elements;
    unsigned unit;
    size_t n;
    struct entry *entry;           /* NULL where the chunks are packed */
    const struct chunk_list *list; /* then */
    struct group *group;           /* and each FANOUT of them */
    uint32_t levels;
    struct level level[LEVELS_MAX];
};

struct plan_builder {
    struct arena *arena;
    struct plan *plan;
    const struct chunk **chunk;
    size_t n, cap;
};

static int new_plan(struct arena *a, const struct shape *units, unsigned unit,
                    struct plan **out, struct err *e)
{
    struct plan *p = arena_alloc(a, sizeof *p);
    uint64_t stride = 1, bytes;

    assert(unit > 0);
    if (!p)
        return err_nomem(e);
    TRY(shape_elements(units, &p->elements, e));
    if (mul_overflows(p->elements, unit, &bytes) || bytes > INT64_MAX)
        return err_set(e, EOVERFLOW, "the tensor has more than 2^63 bytes");
    p->units = *units;
    p->unit = unit;
    /* An empty tensor has no elements to count, and its dimensions may overflow. */
    for (uint32_t k = units->nd; p->elements && k-- > 0; stride *= units->dim[k])
        p->stride[k] = stride;
    *out = p;
    return 0;
}

int plan_begin(struct arena *a, const struct shape *units, unsigned unit,
               struct plan_builder **out, struct err *e)
{
    struct plan_builder *b = arena_alloc(a, sizeof *b);
    int ret = b ? new_plan(a, units, unit, &b->plan, e) : err_nomem(e);

    if (ret < 0)
        return ret;
    b->arena = a;
    *out = b;
    return 0;
}

static int check_bounds(const struct shape *units, const struct chunk *c, struct err *e)
{
    struct buf text = {.max = 8192};
    bool outside = false;

    for (uint32_t k = 0; k < units->nd; k++)
        outside |= range_outside(c->start[k], c->size[k], units->dim[k]);
    if (!outside)
        return 0;
    box_format(c, units->nd, &text);
    buf_adds(&text, " lies outside the tensor ");
    if (shape_format(units, &text) < 0)
        err_set(e, EBADMSG, "a chunk lies outside the tensor");
    else
        err_set(e, EBADMSG, "chunk at %s", text.data);
    buf_release(&text);
    return -EBADMSG;
}

static bool chunk_is_empty(const struct chunk *c, uint32_t nd)
{
    for (uint32_t k = 0; k < nd; k++) {
        if (!c->size[k])
            return true;
    }
    return false;
}

/* Makes room for n more pointers. What is left behind in the arena halves each time. */
static int grow(struct plan_builder *b, size_t n, struct err *e)
{
    size_t cap = b->cap ? b->cap : 8;
    const struct chunk **bigger;

    if (n <= b->cap - b->n)
        return 0;
    while (cap - b->n < n) {
        if (__builtin_mul_overflow(cap, (size_t)2, &cap))
            return err_nomem(e);
    }
    bigger = arena_array(b->arena, cap, sizeof *bigger);
    if (!bigger)
        return err_nomem(e);
    if (b->n)
        memcpy(bigger, b->chunk, b->n * sizeof *bigger);
    b->chunk = bigger;
    b->cap = cap;
    return 0;
}

/* The chunk and its numbers in one piece of the arena. */
static const struct chunk *copy_chunk(struct arena *a, const struct chunk *c,
                                      uint32_t nd)
{
    size_t row = nd * sizeof(uint64_t), rows = c->step ? 3 : 2;
    struct chunk *copy = arena_alloc(a, sizeof *copy + rows * row);
    uint64_t *numbers;

    if (!copy)
        return NULL;
    *copy = *c;
    if (c->whole) {
        copy->whole = (const uint64_t *)(const void *)arena_memdup(
            a, c->whole, c->whole_nd * sizeof *c->whole);
        if (!copy->whole)
            return NULL;
    }
    if (c->param && !(copy->param = arena_memdup(a, c->param, c->param_len)))
        return NULL;
    numbers = (uint64_t *)(copy + 1);
    copy->start = numbers;
    copy->size = numbers + nd;
    if (row) {
        memcpy(numbers, c->start, row);
        memcpy(numbers + nd, c->size, row);
    }
    if (c->step) {
        copy->step = (const int64_t *)(numbers + 2 * (size_t)nd);
        memcpy(numbers + 2 * (size_t)nd, c->step, row);
    }
    return copy;
}

int plan_take(struct plan_builder *b, const struct chunk *c, size_t n, struct err *e)
{
    const struct shape *units = &b->plan->units;
    int ret = grow(b, n, e);

    for (size_t i = 0; ret == 0 && i < n; i++) {
        ret = check_bounds(units, &c[i], e);
        if (ret == 0 && !chunk_is_empty(&c[i], units->nd))
            b->chunk[b->n++] = &c[i];
    }
    return ret;
}

int plan_add(struct plan_builder *b, const struct chunk *c, struct err *e)
{
    const struct chunk *copy = copy_chunk(b->arena, c, b->plan->units.nd);

    return copy ? plan_take(b, copy, 1, e) : err_nomem(e);
}

/* Number of the element at these indices. */
static uint64_t element_at(const struct plan *p, const uint64_t *index)
{
    uint64_t n = 0;

    for (uint32_t k = 0; k < p->units.nd; k++)
        n += index[k] * p->stride[k];
    return n;
}

static uint64_t last_element(const struct plan *p, const uint64_t *start,
                             const uint64_t *size)
{
    uint64_t n = 0;

    for (uint32_t k = 0; k < p->units.nd; k++)
        n += (start[k] + size[k] - 1) * p->stride[k];
    return n;
}

static int by_first(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;

    return x->first < y->first ? -1 : x->first > y->first;
}

static const uint64_t *node_start(const struct plan *p, uint32_t level, size_t i)
{
    return level ? p->level[level - 1].box + i * 2 * p->units.nd
                 : p->entry[i].chunk->start;
}

static const uint64_t *node_size(const struct plan *p, uint32_t level, size_t i)
{
    return level ? node_start(p, level, i) + p->units.nd : p->entry[i].chunk->size;
}

/* The smallest box round the boxes [from, to) of a level; level 0 is the entries. */
static void enclose(const struct plan *p, uint32_t level, size_t from, size_t to,
                    uint64_t *start)
{
    uint32_t nd = p->units.nd;
    uint64_t *size = start + nd;

    for (uint32_t k = 0; k < nd; k++) {
        uint64_t low = UINT64_MAX, high = 0;

        for (size_t i = from; i < to; i++) {
            uint64_t at = node_start(p, level, i)[k];

            low = MIN(low, at);
            high = MAX(high, at + node_size(p, level, i)[k]);
        }
        start[k] = low;
        size[k] = high - low;
    }
}

/* Adds levels above the last one, which has so many nodes, until one has few. */
static int add_levels(struct plan *p, size_t below, struct arena *a, struct err *e)
{
    for (; below > FANOUT && p->units.nd; p->levels++) {
        size_t n = (below - 1) / FANOUT + 1;
        struct level *l = &p->level[p->levels];

        l->box = arena_array(a, n, 2 * p->units.nd * sizeof *l->box);
        if (!l->box)
            return err_nomem(e);
        for (l->n = 0; l->n < n; l->n++)
            enclose(p, p->levels, l->n * FANOUT, MIN((l->n + 1) * FANOUT, below),
                    l->box + l->n * 2 * p->units.nd);
        below = n;
    }
    return 0;
}

int plan_finish(struct plan_builder *b, const struct plan **out, struct err *e)
{
    struct plan *p = b->plan;
    uint64_t reach = 0;
    bool sorted = true;
    int ret = p->elements ? cover_check(&p->units, b->chunk, b->n, e) : 0;

    if (ret < 0)
        return ret;
    p->entry = arena_array(b->arena, b->n ? b->n : 1, sizeof *p->entry);
    if (!p->entry)
        return err_nomem(e);
    for (; p->n < b->n; p->n++) {
        const struct chunk *c = b->chunk[p->n];

        p->entry[p->n] = (struct entry){.chunk = c, .first = element_at(p, c->start)};
        sorted &= !p->n || p->entry[p->n - 1].first < p->entry[p->n].first;
    }
    if (!sorted)
        qsort(p->entry, p->n, sizeof *p->entry, by_first);
    for (size_t i = 0; i < p->n; i++) {
        const struct chunk *c = p->entry[i].chunk;

        reach = MAX(reach, last_element(p, c->start, c->size));
        p->entry[i].reach = reach;
    }
    ret = add_levels(p, p->n, b->arena, e);
    if (ret == 0)
        *out = p;
    return ret;
}

/* ---- chunks that stay packed ---- */

struct plan_packer {
    struct arena *arena;
    struct plan *plan;
    struct grid *grid;
    bool regular;
};

int plan_packer_new(struct arena *a, const struct shape *units, unsigned unit,
                    struct plan_packer **out, struct err *e)
{
    CLEANUP_FREE struct plan_packer *k = calloc(1, sizeof *k);
    int ret = k ? new_plan(a, units, unit, &k->plan, e) : err_nomem(e);

    if (ret < 0)
        return ret;
    k->arena = a;
    k->regular = units->nd > 0 && k->plan->elements > 0;
    if (k->regular && !(k->grid = grid_new(&k->plan->units)))
        return err_nomem(e);
    *out = steal(&k);
    return 0;
}

void plan_packer_freep(struct plan_packer **k)
{
    if (*k)
        grid_free((*k)->grid);
    free(*k);
    *k = NULL;
}

/* Room for the groups of n chunks and for the boxes round them. */
static int add_groups(struct plan_packer *k, size_t n, struct err *e)
{
    struct plan *p = k->plan;
    struct level *l = &p->level[0];

    l->n = (n - 1) / FANOUT + 1;
    l->box = arena_array(k->arena, l->n, 2 * p->units.nd * sizeof *l->box);
    p->group = arena_array(k->arena, l->n, sizeof *p->group);
    return l->box && p->group ? 0 : err_nomem(e);
}

/* Puts a box round what [start, start + size) has and the chunk, or only the chunk. */
static void widen(uint64_t *start, uint32_t nd, const struct chunk *c, bool only)
{
    uint64_t *size = start + nd;

    for (uint32_t k = 0; k < nd; k++) {
        uint64_t low = only ? c->start[k] : MIN(start[k], c->start[k]);
        uint64_t high = c->start[k] + c->size[k];

        if (!only)
            high = MAX(high, start[k] + size[k]);
        start[k] = low;
        size[k] = high - low;
    }
}

int plan_packer_add(void *packer, const struct chunk *c, size_t i, size_t n,
                    struct err *e)
{
    struct plan_packer *k = packer;
    struct plan *p = k->plan;
    size_t g = i >> FANOUT_BITS;
    int ret = k->regular ? grid_add(k->grid, c->start, c->size) : 0;

    if (ret < 0 || (i == 0 && ret == 1 && add_groups(k, n, e) < 0))
        return err_nomem(e);
    /* Who resolves other chunks takes a parameter for text that ends in NUL. */
    k->regular = ret == 1 && (!c->param || c->encoding == CHUNK_FILL);
    if (!k->regular)
        return 1;
    if (i % FANOUT == 0)
        p->group[g] = (struct group){.first = element_at(p, c->start),
                                     .reach = g ? p->group[g - 1].reach : 0};
    p->group[g].reach = MAX(p->group[g].reach, last_element(p, c->start, c->size));
    widen(p->level[0].box + g * 2 * p->units.nd, p->units.nd, c, i % FANOUT == 0);
    return 0;
}

int plan_packer_finish(struct plan_packer *k, const struct chunk_list *list,
                       const struct plan **out, struct err *e)
{
    struct plan *p = k->plan;

    if (!k->regular || !grid_is_whole(k->grid))
        return 0;
    p->n = chunk_list_count(list);
    p->list = list;
    p->levels = 1;
    TRY(add_levels(p, p->level[0].n, k->arena, e));
    *out = p;
    return 1;
}

uint64_t plan_size(const struct plan *p)
{
    return p->elements * p->unit;
}

unsigned plan_unit(const struct plan *p)
{
    return p->unit;
}

const struct shape *plan_shape(const struct plan *p)
{
    return &p->units;
}

size_t plan_chunks(const struct plan *p)
{
    return p->n;
}

const struct chunk *plan_chunk(const struct plan *p, size_t i, struct chunk_room *room)
{
    return p->list ? chunk_list_get(p->list, i, room) : p->entry[i].chunk;
}

/* The first chunk that may hold element `n` or a later one. */
static size_t find_reach(const struct plan *p, uint64_t n)
{
    size_t low = 0, high = p->n;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (p->entry[mid].reach < n)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* Elements [from, to] of the tensor, and the indices of the first. */
struct element_range {
    uint64_t from, to;
    uint64_t index[SHAPE_MAX_DIMS];
};

static bool within(const uint64_t *start, const uint64_t *size, uint32_t k,
                   uint64_t index)
{
    return index >= start[k] && index - start[k] < size[k];
}

/* The first element of the box at or behind the one at `index`; the box's last one is. */
static uint64_t next_in_box(const struct plan *p, const uint64_t *start,
                            const uint64_t *size, const uint64_t *index)
{
    uint64_t next[SHAPE_MAX_DIMS];
    uint32_t nd = p->units.nd, k = 0;

    while (k < nd && within(start, size, k, index[k])) {
        next[k] = index[k];
        k++;
    }
    if (k < nd && index[k] > start[k]) {
        /* Behind the box in this dimension: go on by one in an outer one that can. */
        do {
            assert(k > 0);
            k--;
        } while (!within(start, size, k, index[k] + 1));
        next[k] = index[k] + 1;
        k++;
    }
    for (; k < nd; k++)
        next[k] = start[k];
    return element_at(p, next);
}

/* Does the box hold any of the range? */
static bool box_meets(const struct plan *p, const uint64_t *start, const uint64_t *size,
                      const struct element_range *r)
{
    return last_element(p, start, size) >= r->from &&
           next_in_box(p, start, size, r->index) <= r->to;
}

/*
 * The entries that the largest node passes over which begins at entry i and does not meet
 * the range; 0: there is none.
 */
static size_t passed_over(const struct plan *p, size_t i, const struct element_range *r)
{
    uint32_t level = 0;

    while (level < p->levels && i % ((size_t)FANOUT << level * FANOUT_BITS) == 0)
        level++;
    for (; level > 0; level--) {
        size_t node = i >> level * FANOUT_BITS;

        if (!box_meets(p, node_start(p, level, node), node_size(p, level, node), r))
            return (size_t)1 << level * FANOUT_BITS;
    }
    return 0;
}

static struct element_range range_of(const struct plan *p, uint64_t from, uint64_t to)
{
    struct element_range r = {.from = from, .to = to};

    for (uint32_t k = 0; k < p->units.nd; k++) {
        r.index[k] = from / p->stride[k];
        from %= p->stride[k];
    }
    return r;
}

/* The first group that may hold element `n` or a later one. */
static size_t find_group(const struct plan *p, uint64_t n)
{
    size_t low = 0, high = p->level[0].n;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (p->group[mid].reach < n)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static int touched_packed(const struct plan *p, const struct element_range *r,
                          int (*fn)(void *user, size_t i), void *user)
{
    struct chunk_room room;
    size_t i = find_group(p, r->from) << FANOUT_BITS;

    room.list = NULL;
    while (i < p->n && p->group[i >> FANOUT_BITS].first <= r->to) {
        size_t passed = i % FANOUT == 0 && p->group[i >> FANOUT_BITS].first < r->from
                            ? passed_over(p, i, r)
                            : 0;
        const struct chunk *c;
        uint64_t first;
        int ret = 0;

        if (passed) {
            i += passed;
            continue;
        }
        c = chunk_list_get(p->list, i, &room);
        first = element_at(p, c->start);
        if (first > r->to)
            return 0;
        if (first >= r->from || box_meets(p, c->start, c->size, r))
            ret = fn(user, i);
        if (ret)
            return ret;
        i++;
    }
    return 0;
}

int plan_touched(const struct plan *p, uint64_t off, uint64_t len,
                 int (*fn)(void *user, size_t i), void *user)
{
    uint64_t size = plan_size(p);
    struct element_range r;
    size_t i;

    if (off >= size || !len)
        return 0;
    r = range_of(p, off / p->unit, (off + MIN(len, size - off) - 1) / p->unit);
    if (p->list)
        return touched_packed(p, &r, fn, user);
    i = find_reach(p, r.from);
    while (i < p->n && p->entry[i].first <= r.to) {
        const struct entry *x = &p->entry[i];
        size_t passed = x->first < r.from ? passed_over(p, i, &r) : 0;
        int ret;

        if (passed) {
            i += passed;
            continue;
        }
        if (x->first >= r.from || box_meets(p, x->chunk->start, x->chunk->size, &r)) {
            ret = fn(user, i);
            if (ret)
                return ret;
        }
        i++;
    }
    return 0;
}
