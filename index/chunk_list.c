/* SPDX-License-Identifier: MIT */
/* index/chunk_list.c - finds any chunk of many that stay packed. */
#include "index/chunk_list.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"

/* Chunks are differences to the one before: from each 8th on they can be read. */
enum { MARK_BITS = 3, MARK_EVERY = 1 << MARK_BITS };

/*
 * What stands before a chunk; and of the chunk before it start and size, in `numbers`.
 */
struct mark {
    size_t pos;
    uint64_t offset, length;
    uint32_t file;
    uint32_t param_len, whole_nd;
    const char *param;
    const uint64_t *whole;
};

struct chunk_list {
    struct chunk_blob blob;
    struct mark *mark;
    uint64_t *numbers; /* 2 * nd a mark */
};

/* Notes what is in the room, before chunk r->next is read. */
static int add_mark(struct chunk_list *l, const struct chunk_room *r, struct arena *a,
                    struct err *e)
{
    const struct chunk *c = &r->chunk;
    size_t i = r->next >> MARK_BITS;
    uint64_t *numbers = l->numbers + i * 2 * l->blob.nd;
    struct mark *m = &l->mark[i];

    *m = (struct mark){.pos = r->pos,
                       .offset = c->offset,
                       .length = c->length,
                       .file = c->file,
                       .param = c->param,
                       .param_len = c->param_len,
                       .whole_nd = c->whole_nd};
    memcpy(numbers, r->start, l->blob.nd * sizeof *numbers);
    memcpy(numbers + l->blob.nd, r->size, l->blob.nd * sizeof *numbers);
    if (!c->whole)
        return 0;
    m->whole = (const uint64_t *)(const void *)arena_memdup(
        a, c->whole, c->whole_nd * sizeof *c->whole);
    return m->whole ? 0 : err_nomem(e);
}

static void go_to_mark(const struct chunk_list *l, size_t i, struct chunk_room *r)
{
    const struct mark *m = &l->mark[i];
    const uint64_t *numbers = l->numbers + i * 2 * l->blob.nd;

    r->chunk = (struct chunk){.file = m->file,
                              .offset = m->offset,
                              .length = m->length,
                              .param = m->param,
                              .param_len = m->param_len,
                              .whole_nd = m->whole_nd};
    if (m->whole) {
        memcpy(r->whole, m->whole, m->whole_nd * sizeof *r->whole);
        r->chunk.whole = r->whole;
    }
    memcpy(r->start, numbers, l->blob.nd * sizeof *numbers);
    memcpy(r->size, numbers + l->blob.nd, l->blob.nd * sizeof *numbers);
    r->pos = m->pos;
    r->next = i << MARK_BITS;
}

static int read_all(struct chunk_list *l, struct chunk_room *r, struct arena *a,
                    chunk_list_fn *fn, void *user, struct err *e)
{
    int ret = 0;

    while (ret == 0 && r->next < l->blob.n) {
        size_t i = r->next;

        if (i % MARK_EVERY == 0)
            ret = add_mark(l, r, a, e);
        if (ret == 0)
            ret = chunk_blob_next(&l->blob, r, e);
        if (ret == 0)
            ret = fn(user, &r->chunk, i, l->blob.n, e);
    }
    return ret ? ret : chunk_blob_end(&l->blob, r, e);
}

int chunk_list_new(struct arena *a, const void *data, size_t len, uint32_t nd,
                   chunk_list_fn *fn, void *user, const struct chunk_list **out,
                   struct err *e)
{
    struct chunk_list *l = arena_alloc(a, sizeof *l);
    const void *kept = arena_memdup(a, data, len);
    struct chunk_room room = {0};
    size_t marks;
    int ret;

    if (!l || !kept)
        return err_nomem(e);
    TRY(chunk_blob_begin(kept, len, nd, &l->blob, &room, e));
    marks = (l->blob.n >> MARK_BITS) + 1;
    l->mark = arena_array(a, marks, sizeof *l->mark);
    l->numbers = arena_array(a, marks * 2, nd * sizeof *l->numbers);
    if (!l->mark || !l->numbers)
        return err_nomem(e);
    ret = read_all(l, &room, a, fn, user, e);
    if (ret == 0)
        *out = l;
    return ret;
}

size_t chunk_list_count(const struct chunk_list *l)
{
    return l->blob.n;
}

const struct chunk *chunk_list_get(const struct chunk_list *l, size_t i,
                                   struct chunk_room *room)
{
    struct err e = {0};

    assert(i < l->blob.n);
    if (room->list == l && room->next == i + 1)
        return &room->chunk;
    if (room->list != l || room->next > i || room->next >> MARK_BITS != i >> MARK_BITS)
        go_to_mark(l, i >> MARK_BITS, room);
    room->list = l;
    while (room->next <= i) {
        int ret = chunk_blob_next(&l->blob, room, &e);

        assert(ret == 0); /* these bytes were read before, and nobody changes them */
        (void)ret;
    }
    return &room->chunk;
}
