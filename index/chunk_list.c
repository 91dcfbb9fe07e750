/* SPDX-License-Identifier: MIT */
/* index/chunk_list.c - finds any chunk of many that stay packed. */
#include "index/chunk_list.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/chunk_priv.h"

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
    const unsigned char *data;
    size_t len, n;
    uint32_t nd;
    struct mark *mark;
    uint64_t *numbers; /* 2 * nd a mark */
};

static void begin_room(struct chunk_room *r, uint32_t nd)
{
    r->chunk = (struct chunk){.start = r->start, .size = r->size};
    memset(r->start, 0, nd * sizeof *r->start);
    memset(r->size, 0, nd * sizeof *r->size);
}

static int next_param(struct unpacker *u, struct chunk *c, const struct chunk *prev,
                      struct err *e)
{
    uint64_t len = unpack_number(u);

    if (len == 0 && !u->bad && prev->param) {
        c->param = prev->param;
        c->param_len = prev->param_len;
        return 0;
    }
    if (u->bad || len == 0 || len > CHUNK_PARAM_MAX || len > u->len - u->pos)
        return err_set(e, EBADMSG, "a parameter of %" PRIu64 " bytes", len);
    c->param = (const char *)u->data + u->pos;
    c->param_len = (uint32_t)len;
    u->pos += (size_t)len;
    return 0;
}

static int next_whole(struct unpacker *u, struct chunk_room *r,
                      const struct chunk *prev, struct err *e)
{
    struct chunk *c = &r->chunk;
    uint64_t nd = unpack_number(u);

    if (nd == 0 && !u->bad && prev->whole) {
        c->whole = prev->whole;
        c->whole_nd = prev->whole_nd;
        return 0;
    }
    if (u->bad || nd == 0 || nd > SHAPE_MAX_DIMS + 1)
        return err_set(e, EBADMSG, "a piece of impossible shape");
    for (uint64_t k = 0; k + 1 < nd; k++)
        r->whole[k] = unpack_number(u);
    c->whole = r->whole;
    c->whole_nd = (uint32_t)nd - 1;
    return 0;
}

/* The chunk behind the one that is in the room. */
static int next_chunk(const struct chunk_list *l, struct chunk_room *r, struct err *e)
{
    struct unpacker u = {.data = l->data, .len = l->len, .pos = r->pos};
    const struct chunk prev = r->chunk;
    struct chunk *c = &r->chunk;
    uint64_t tag = unpack_number(&u), file = unpack_delta(&u, prev.file);

    if (file > UINT32_MAX || tag >> CHUNK_ENCODING_SHIFT > UINT8_MAX)
        return err_set(e, EBADMSG, "impossible file %" PRIu64 " or encoding %" PRIu64,
                       file, tag >> CHUNK_ENCODING_SHIFT);
    *c = (struct chunk){.file = (uint32_t)file,
                        .encoding = (uint8_t)(tag >> CHUNK_ENCODING_SHIFT),
                        .flags = tag & CHUNK_FLAG_BITS,
                        .start = r->start,
                        .size = r->size};
    c->offset = unpack_delta(&u, prev.offset + prev.length);
    c->length = unpack_delta(&u, prev.length);
    for (uint32_t k = 0; k < l->nd; k++)
        r->start[k] = unpack_delta(&u, r->start[k]);
    for (uint32_t k = 0; k < l->nd; k++)
        r->size[k] = unpack_delta(&u, r->size[k]);
    if (tag & CHUNK_HAS_FIRST)
        c->first = unpack_number(&u);
    if (tag & CHUNK_HAS_STEP) {
        for (uint32_t k = 0; k < l->nd; k++)
            r->step[k] = unzigzag(unpack_number(&u));
        c->step = r->step;
    }
    if (tag & CHUNK_HAS_PARAM && next_param(&u, c, &prev, e) < 0)
        return -e->code;
    if (tag & CHUNK_HAS_WHOLE && next_whole(&u, r, &prev, e) < 0)
        return -e->code;
    if (u.bad)
        return err_set(e, EBADMSG, "cut or malformed at byte %zu", u.pos);
    r->pos = u.pos;
    r->next++;
    return 0;
}

/* Notes what is in the room, before chunk r->next is read. */
static int add_mark(struct chunk_list *l, const struct chunk_room *r, struct arena *a,
                    struct err *e)
{
    const struct chunk *c = &r->chunk;
    size_t i = r->next >> MARK_BITS;
    uint64_t *numbers = l->numbers + i * 2 * l->nd;
    struct mark *m = &l->mark[i];

    *m = (struct mark){.pos = r->pos,
                       .offset = c->offset,
                       .length = c->length,
                       .file = c->file,
                       .param = c->param,
                       .param_len = c->param_len,
                       .whole_nd = c->whole_nd};
    memcpy(numbers, r->start, l->nd * sizeof *numbers);
    memcpy(numbers + l->nd, r->size, l->nd * sizeof *numbers);
    if (!c->whole)
        return 0;
    m->whole = (const uint64_t *)(const void *)arena_memdup(
        a, c->whole, c->whole_nd * sizeof *c->whole);
    return m->whole ? 0 : err_nomem(e);
}

static void go_to_mark(const struct chunk_list *l, size_t i, struct chunk_room *r)
{
    const struct mark *m = &l->mark[i];
    const uint64_t *numbers = l->numbers + i * 2 * l->nd;

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
    memcpy(r->start, numbers, l->nd * sizeof *numbers);
    memcpy(r->size, numbers + l->nd, l->nd * sizeof *numbers);
    r->pos = m->pos;
    r->next = i << MARK_BITS;
}

static int read_all(struct chunk_list *l, struct chunk_room *r, struct arena *a,
                    chunk_list_fn *fn, void *user, struct err *e)
{
    while (r->next < l->n) {
        size_t i = r->next;
        int ret = i % MARK_EVERY == 0 ? add_mark(l, r, a, e) : 0;

        if (ret == 0 && (ret = next_chunk(l, r, e)) < 0)
            return err_wrap(e, "chunk %zu of %zu", i, l->n);
        if (ret == 0)
            ret = fn(user, &r->chunk, i, l->n, e);
        if (ret != 0)
            return ret;
    }
    if (r->pos != l->len)
        return err_set(e, EBADMSG, "%zu bytes behind the last chunk", l->len - r->pos);
    return 0;
}

int chunk_list_new(struct arena *a, const void *data, size_t len, uint32_t nd,
                   chunk_list_fn *fn, void *user, const struct chunk_list **out,
                   struct err *e)
{
    struct chunk_list *l = arena_alloc(a, sizeof *l);
    struct unpacker u = {.data = data, .len = len};
    struct chunk_room room = {0};
    uint64_t count = unpack_number(&u);
    size_t marks;
    int ret;

    if (nd > SHAPE_MAX_DIMS)
        return err_set(e, EBADMSG, "%u dimensions, the most is %d", nd, SHAPE_MAX_DIMS);
    if (u.bad || count > (len - u.pos) / chunk_packed_min(nd))
        return err_set(e, EBADMSG, "%zu bytes cannot hold %" PRIu64 " chunks", len,
                       count);
    if (!l)
        return err_nomem(e);
    marks = ((size_t)count >> MARK_BITS) + 1;
    l->data = (const unsigned char *)arena_memdup(a, data, len);
    l->mark = arena_array(a, marks, sizeof *l->mark);
    l->numbers = arena_array(a, marks * 2, nd * sizeof *l->numbers);
    if (!l->data || !l->mark || !l->numbers)
        return err_nomem(e);
    l->len = len;
    l->n = (size_t)count;
    l->nd = nd;
    begin_room(&room, nd);
    room.pos = u.pos;
    ret = read_all(l, &room, a, fn, user, e);
    if (ret == 0)
        *out = l;
    return ret;
}

size_t chunk_list_count(const struct chunk_list *l)
{
    return l->n;
}

const struct chunk *chunk_list_get(const struct chunk_list *l, size_t i,
                                   struct chunk_room *room)
{
    struct err e = {0};

    assert(i < l->n);
    if (room->list == l && room->next == i + 1)
        return &room->chunk;
    if (room->list != l || room->next > i || room->next >> MARK_BITS != i >> MARK_BITS)
        go_to_mark(l, i >> MARK_BITS, room);
    room->list = l;
    while (room->next <= i) {
        int ret = next_chunk(l, room, &e);

        assert(ret == 0); /* these bytes were read before, and nobody changes them */
        (void)ret;
    }
    return &room->chunk;
}
