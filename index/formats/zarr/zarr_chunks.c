/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_chunks.c - the chunks that are stored, and boxes of the fill value between. */
#include "index/formats/zarr/zarr_array.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/crc32c.h"
#include "base/endian.h"
#include "base/err.h"
#include "index/formats/zarr/zarr_priv.h"
#include "index/sink.h"

enum {
    MAX_STORED = 10 * 1000 * 1000, /* as many chunks as a tensor may have */
    MAX_IN_SHARD = 4 << 20,        /* 64 MiB of index; real shards have thousands */
    MAX_LITERAL = 60 << 10,        /* a chunk's parameter has 64 KiB */
    MAX_LITERALS = 64 << 20,       /* bytes kept in the index for one tensor */
    PARAM_MEMORY = 256 << 20,      /* literals once more, each with a head */
    MAX_WHY = 160,
};

/* A value that was pushed. */
struct stored {
    uint64_t cell; /* number in the grid, row-major */
    uint64_t offset, length;
    uint64_t literal; /* its first byte in `literals`; `length` counts those then */
    uint32_t file;
    bool is_literal;
};

/* A grid of cells, one after the other in the order of its axes. */
struct grid {
    uint32_t nd;
    uint8_t axis[SHAPE_MAX_DIMS];    /* which dimension of the array an axis is */
    uint64_t count[SHAPE_MAX_DIMS];  /* cells along each axis */
    uint64_t stride[SHAPE_MAX_DIMS]; /* cells from one to the next along the axis */
    uint64_t cells;
    const uint64_t *cell;           /* elements of a cell, by dimension */
    uint64_t start[SHAPE_MAX_DIMS]; /* element where the grid starts, by dimension */
};

struct zarr_chunks {
    const struct zarr_array *a; /* borrowed */
    struct grid grid;
    struct stored *value; /* malloc */
    size_t n, cap;
    struct buf literals;
    char broken[MAX_WHY]; /* the first value that is none */
};

/* ---- grids ---- */

/*
 * Row-major strides, once axis and count are set. False: more than 2^63 cells. An empty grid
 * has no cell that would need a stride, and along its other axes there may be any number.
 */
static bool settle_grid(struct grid *g)
{
    for (uint32_t k = 0; k < g->nd; k++) {
        if (g->count[k] == 0) {
            g->cells = 0;
            return true;
        }
    }
    g->cells = 1;
    for (uint32_t k = g->nd; k-- > 0;) {
        g->stride[k] = g->cells;
        if (mul_overflows(g->cells, g->count[k], &g->cells) || g->cells > INT64_MAX)
            return false;
    }
    return true;
}

/* The chunks (or shards) of the array. The elements are less than 2^63, so are these. */
static void array_grid(const struct zarr_array *a, struct grid *g)
{
    bool ok;

    *g = (struct grid){.nd = a->shape.nd, .cell = a->grid_chunk.dim};
    for (uint32_t k = 0; k < g->nd; k++) {
        g->axis[k] = (uint8_t)k;
        g->count[k] = a->shape.dim[k] / a->grid_chunk.dim[k] +
                      (a->shape.dim[k] % a->grid_chunk.dim[k] != 0);
    }
    ok = settle_grid(g);
    assert(ok);
    (void)ok;
}

/* The chunks of the shard that starts at this element. */
static bool shard_grid(const struct zarr_array *a, const uint64_t *start,
                       struct grid *g)
{
    *g = (struct grid){.nd = a->shape.nd, .cell = a->inner.dim};
    for (uint32_t k = 0; k < g->nd; k++) {
        uint8_t d = a->shard_order[k];

        g->axis[k] = d;
        g->count[k] = a->grid_chunk.dim[d] / a->inner.dim[d];
        g->start[k] = start[k];
    }
    return settle_grid(g) && g->cells <= MAX_IN_SHARD;
}

/* Cell number n as its place along each axis. */
static void locate(const struct grid *g, uint64_t n, uint64_t *at)
{
    for (uint32_t k = 0; k < g->nd; k++) {
        at[k] = n / g->stride[k];
        n %= g->stride[k];
    }
}

/* The elements of `count` cells from `at` on, without what is beyond the array; false: none. */
static bool box_of(const struct zarr_array *a, const struct grid *g, const uint64_t *at,
                   const uint64_t *count, uint64_t *start, uint64_t *size)
{
    for (uint32_t k = 0; k < g->nd; k++) {
        uint8_t d = g->axis[k];

        start[d] = g->start[d] + at[k] * g->cell[d];
        if (start[d] >= a->shape.dim[d])
            return false;
        size[d] = MIN(count[k] * g->cell[d], a->shape.dim[d] - start[d]);
    }
    return true;
}

/* ---- keys ---- */

/* A number as it is written: no sign, no zero in front. */
static bool take_index(const char **p, const char *end, uint64_t *out)
{
    const char *start = *p;

    for (*out = 0; *p < end && **p >= '0' && **p <= '9'; (*p)++)
        if (mul_overflows(*out, 10, out) ||
            add_overflows(*out, (uint64_t)(**p - '0'), out))
            return false;
    return *p > start && (*start != '0' || *p == start + 1);
}

/* "c/0/1", "0.1"; without dimensions "c" and "0". */
static bool parse_key(const struct zarr_array *a, const struct grid *g, const char *key,
                      size_t len, uint64_t *cell)
{
    const char *p = key, *end = key + len;
    uint64_t i;

    *cell = 0;
    if (a->key_prefix && (p == end || *p++ != 'c'))
        return false;
    if (g->nd == 0)
        return a->key_prefix ? p == end : len == 1 && *p == '0';
    for (uint32_t k = 0; k < g->nd; k++) {
        if ((k > 0 || a->key_prefix) && (p == end || *p++ != a->separator))
            return false;
        if (!take_index(&p, end, &i) || i >= g->count[k])
            return false;
        *cell += i * g->stride[k];
    }
    return p == end;
}

static const char *write_key(const struct zarr_array *a, const struct grid *g,
                             uint64_t cell, struct buf *out)
{
    uint64_t at[SHAPE_MAX_DIMS];

    locate(g, cell, at);
    if (a->key_prefix)
        buf_addc(out, 'c');
    for (uint32_t k = 0; k < g->nd; k++) {
        if (k > 0 || a->key_prefix)
            buf_addc(out, a->separator);
        buf_addf(out, "%" PRIu64, at[k]);
    }
    if (g->nd == 0 && !a->key_prefix)
        buf_addc(out, '0');
    return buf_failed(out) ? "(of many dimensions)" : out->data;
}

bool zarr_chunks_wants(const struct zarr_array *a, const char *prefix, size_t len)
{
    const char *p = prefix, *end = prefix + len;
    uint32_t parts = 0;
    uint64_t ignored;

    if (a->why[0] || a->separator != '/' || a->shape.nd == 0)
        return false;
    if (a->key_prefix) {
        if (len < 2 || memcmp(p, "c/", 2) != 0)
            return false;
        p += 2;
    }
    for (; p < end; parts++)
        if (!take_index(&p, end, &ignored) || p == end || *p++ != '/')
            return false;
    return parts < a->shape.nd;
}

/* ---- what is pushed ---- */

int zarr_chunks_new(const struct zarr_array *a, struct zarr_chunks **out, struct err *e)
{
    struct zarr_chunks *c = calloc(1, sizeof *c);

    if (!c)
        return err_nomem(e);
    c->a = a;
    c->literals.max = MAX_LITERALS;
    if (!a->why[0])
        array_grid(a, &c->grid);
    *out = c;
    return 0;
}

void zarr_chunks_free(struct zarr_chunks *c)
{
    if (!c)
        return;
    free(c->value);
    buf_release(&c->literals);
    free(c);
}

void zarr_chunks_freep(struct zarr_chunks **c)
{
    zarr_chunks_free(*c);
}

static int make_room(struct zarr_chunks *c, struct err *e)
{
    size_t cap = c->cap ? c->cap + c->cap / 2 : 16;
    struct stored *bigger;

    if (c->n < c->cap)
        return 0;
    if (c->n >= MAX_STORED)
        return err_set(e, EFBIG, "more than %d chunks are stored", MAX_STORED);
    bigger = reallocarray(c->value, cap, sizeof *bigger);
    if (!bigger)
        return err_nomem(e);
    c->value = bigger;
    c->cap = cap;
    return 0;
}

static void note_broken(struct zarr_chunks *c, uint64_t cell, const char *why)
{
    CLEANUP(buf_release) struct buf key = {.max = 2048};

    if (c->broken[0])
        return;
    snprintf(c->broken, sizeof c->broken, "chunk %.80s: %.60s",
             write_key(c->a, &c->grid, cell, &key), why);
}

bool zarr_chunks_is_key(const struct zarr_chunks *c, const char *key, size_t len)
{
    uint64_t ignored;

    return !c->a->why[0] && parse_key(c->a, &c->grid, key, len, &ignored);
}

int zarr_chunks_add(struct zarr_chunks *c, const char *key, size_t len,
                    const struct zarr_value *v, struct err *e)
{
    struct stored s = {.file = v->file, .offset = v->offset, .length = v->length};

    if (c->a->why[0] || !parse_key(c->a, &c->grid, key, len, &s.cell))
        return 0;
    if (v->kind == ZARR_BROKEN) {
        note_broken(c, s.cell, v->why);
        return 1;
    }
    if (v->kind == ZARR_LITERAL && v->data_len > MAX_LITERAL) {
        note_broken(c, s.cell, "it stands in metadata, and is too long for that");
        return 1;
    }
    if (v->kind == ZARR_LITERAL) {
        s.is_literal = true;
        s.literal = c->literals.len;
        s.length = v->data_len;
        if (buf_add(&c->literals, v->data, v->data_len) == -ENOMEM)
            return err_nomem(e);
        if (buf_failed(&c->literals))
            return err_set(e, EFBIG, "more than %d bytes of chunks stand in metadata",
                           MAX_LITERALS);
    }
    TRY(make_room(c, e));
    c->value[c->n++] = s;
    return 1;
}

static int by_cell(const void *a, const void *b)
{
    const struct stored *x = a, *y = b;

    return (x->cell > y->cell) - (x->cell < y->cell);
}

/* ---- to the sink ---- */

struct report {
    const struct zarr_array *a;
    struct zarr_chunks *c;
    const struct zarr_how *how;
    struct sink *sink;
    struct arena *arena; /* parameters of chunks */
    struct buf spec;
    char fill[2 * sizeof(((struct zarr_array *)0)->fill) + 1];
    int64_t step[SHAPE_MAX_DIMS];
    bool row_major;
};

/* After sink_fault(), which fails only for lack of memory. 1: the tensor has a fault. */
static int faulted(int r, struct err *e)
{
    return r < 0 ? err_nomem(e) : 1;
}

static int fault_at(struct report *r, uint64_t shard, const char *why, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {.max = 2048};

    return faulted(sink_fault(r->sink, "chunk %s %s",
                              write_key(r->a, &r->c->grid, shard, &key), why),
                   e);
}

static int missing(struct report *r, uint64_t cell, struct err *e)
{
    return fault_at(r, cell,
                    r->how->all_chunks_needed ? "is missing: the save was not finished"
                                              : "is missing, and fill_value is null",
                    e);
}

static int put_fill(struct report *r, const struct grid *g, const uint64_t *at,
                    const uint64_t *count, struct err *e)
{
    uint64_t start[SHAPE_MAX_DIMS] = {0}, size[SHAPE_MAX_DIMS] = {0};
    const struct chunk c = {
        .file = r->how->file,
        .encoding = CHUNK_FILL,
        .start = start,
        .size = size,
        .param = r->fill,
        .param_len = (uint32_t)strlen(r->fill),
    };

    if (!box_of(r->a, g, at, count, start, size))
        return 0;
    return sink_chunk(r->sink, &c, e);
}

/*
 * The cells [low, high), none of which is stored, as few boxes: at most two for each axis.
 * 1: the tensor has a fault. `shard` is the cell of the array's grid, for messages.
 */
static int put_fills(struct report *r, const struct grid *g, uint64_t low,
                     uint64_t high, uint64_t shard, struct err *e)
{
    if (low < high && (!r->a->has_fill || r->how->all_chunks_needed))
        return missing(r, shard, e);
    while (low < high) {
        uint64_t at[SHAPE_MAX_DIMS], count[SHAPE_MAX_DIMS];
        uint64_t n = 1;
        uint32_t k = 0;

        while (k + 1 < g->nd && (low % g->stride[k] != 0 || high - low < g->stride[k]))
            k++;
        locate(g, low, at);
        for (uint32_t i = 0; i < g->nd; i++)
            count[i] = i < k ? 1 : g->count[i];
        if (g->nd > 0) {
            count[k] = MIN((high - low) / g->stride[k], g->count[k] - at[k]);
            n = count[k] * g->stride[k];
        }
        TRY(put_fill(r, g, at, count, e));
        low += n;
    }
    return 0;
}

/* What is stored of a chunk: bytes of a file, or of a literal. */
struct piece {
    const struct stored *from;
    uint64_t at, length; /* within the value */
};

/* The chunk brings its bytes along. */
static int place_literal(struct report *r, const struct piece *p, struct chunk *c,
                         struct err *e)
{
    size_t len = r->spec.len + 1 + p->length;
    char *param = arena_alloc(r->arena, len);

    if (!param)
        return err_nomem(e);
    memcpy(param, r->spec.data, r->spec.len);
    param[r->spec.len] = '\n';
    memcpy(param + r->spec.len + 1, r->c->literals.data + p->from->literal + p->at,
           p->length);
    c->encoding = CHUNK_ZARR_LITERAL;
    c->offset = p->from->offset;
    c->param = param;
    c->param_len = (uint32_t)len;
    return 0;
}

static int place_piece(struct report *r, const struct piece *p, struct chunk *c,
                       struct err *e)
{
    c->file = p->from->file;
    if (p->from->is_literal)
        return place_literal(r, p, c, e);
    c->length = p->length;
    c->encoding = r->a->chain.n > 0 ? CHUNK_ZARR : CHUNK_PLAIN;
    c->offset = p->from->offset + p->at; /* within the value, checked before */
    return 0;
}

/* One chunk that is stored. 1: the tensor has a fault. */
static int put_chunk(struct report *r, const struct grid *g, uint64_t cell,
                     const struct piece *p, struct err *e)
{
    uint64_t at[SHAPE_MAX_DIMS], count[SHAPE_MAX_DIMS];
    uint64_t start[SHAPE_MAX_DIMS] = {0}, size[SHAPE_MAX_DIMS] = {0};
    struct chunk c = {
        .flags = r->a->big_endian ? CHUNK_SWAP : 0,
        .start = start,
        .size = size,
        .step = r->step,
    };
    char why[100];

    locate(g, cell, at);
    for (uint32_t k = 0; k < g->nd; k++)
        count[k] = 1;
    if (!box_of(r->a, g, at, count, start, size))
        return 0; /* in a shard at the edge */
    if (p->length == 0 || (r->a->chain.n == 0 && p->length != r->a->bytes)) {
        snprintf(why, sizeof why, "has %" PRIu64 " bytes where all have %" PRIu64,
                 p->length, r->a->bytes);
        return fault_at(r, p->from->cell,
                        p->length ? why : "is an empty file, which is no chunk", e);
    }
    if (r->row_major && memcmp(size, g->cell, g->nd * sizeof *size) == 0)
        c.step = NULL;
    TRY(place_piece(r, p, &c, e));
    return sink_chunk(r->sink, &c, e);
}

/* ---- shards ---- */

struct shard_index {
    const struct stored *shard;
    struct grid grid;
    uint64_t bytes;      /* of the stored index */
    unsigned char *data; /* malloc */
};

static int read_index_bytes(struct report *r, const struct shard_index *x, uint64_t at,
                            struct err *e)
{
    if (x->shard->is_literal) {
        memcpy(x->data, r->c->literals.data + x->shard->literal + at, x->bytes);
        return 0;
    }
    return r->how->read(r->how->user, x->shard->file, x->shard->offset + at,
                        (size_t)x->bytes, x->data, e);
}

/* Does an error of reading one file leave the rest of the scan any sense? */
static bool stops_report(int code)
{
    return code == ENOMEM || code == ESTALE || code == EMFILE || code == ENFILE;
}

/* 1: the tensor has a fault. */
static int read_index(struct report *r, struct shard_index *x, struct err *e)
{
    uint64_t entries = x->grid.cells * 16, at;
    bool checked = r->a->index_chain.n > 0;
    struct err why = {0};

    x->bytes = entries + (checked ? 4 : 0);
    if (x->shard->length < x->bytes)
        return fault_at(r, x->shard->cell, "is a shard that is shorter than its index",
                        e);
    x->data = malloc(x->bytes + 1);
    if (!x->data)
        return err_nomem(e);
    at = r->a->index_at_start ? 0 : x->shard->length - x->bytes;
    if (read_index_bytes(r, x, at, &why) < 0) {
        if (stops_report(why.code)) {
            return err_copy(e, &why);
        }
        return faulted(sink_fault(r->sink, "the index of a shard: %s", why.text), e);
    }
    if (checked && crc32c(0, x->data, entries) != get_le32(x->data + entries))
        return fault_at(r, x->shard->cell, "is a shard whose index has a wrong CRC", e);
    return 0;
}

static uint64_t index_number(const struct report *r, const struct shard_index *x,
                             uint64_t n)
{
    return r->a->index_big_endian ? get_be64(x->data + 8 * n)
                                  : get_le64(x->data + 8 * n);
}

/* Is it within the shard, and not in the index itself? */
static bool entry_fits(const struct report *r, const struct shard_index *x,
                       const struct piece *p)
{
    uint64_t low = r->a->index_at_start ? x->bytes : 0;
    uint64_t high = x->shard->length - (r->a->index_at_start ? 0 : x->bytes);

    return p->at >= low && !range_outside(p->at, p->length, high);
}

static int put_entries(struct report *r, const struct shard_index *x, struct err *e)
{
    uint64_t next = 0;
    int rc = 0;

    for (uint64_t i = 0; rc == 0 && i < x->grid.cells; i++) {
        const struct piece p = {.from = x->shard,
                                .at = index_number(r, x, 2 * i),
                                .length = index_number(r, x, 2 * i + 1)};

        if (p.at == UINT64_MAX && p.length == UINT64_MAX)
            continue;
        if (!entry_fits(r, x, &p))
            return fault_at(r, x->shard->cell, "is a shard whose index leads out of it",
                            e);
        rc = put_fills(r, &x->grid, next, i, x->shard->cell, e);
        if (rc == 0)
            rc = put_chunk(r, &x->grid, i, &p, e);
        next = i + 1;
    }
    return rc != 0 ? rc
                   : put_fills(r, &x->grid, next, x->grid.cells, x->shard->cell, e);
}

static int put_shard(struct report *r, const struct stored *s, struct err *e)
{
    struct shard_index x = {.shard = s};
    uint64_t at[SHAPE_MAX_DIMS], start[SHAPE_MAX_DIMS] = {0};
    int rc;

    locate(&r->c->grid, s->cell, at);
    for (uint32_t k = 0; k < r->c->grid.nd; k++)
        start[k] = at[k] * r->a->grid_chunk.dim[k];
    if (!shard_grid(r->a, start, &x.grid))
        return fault_at(r, s->cell, "is a shard of too many chunks", e);
    rc = read_index(r, &x, e);
    if (rc == 0)
        rc = put_entries(r, &x, e);
    free(x.data);
    return rc;
}

/* ---- the tensor ---- */

/* Where the next element along each dimension lies in a decoded chunk, in elements. */
static void settle_steps(struct report *r)
{
    uint64_t step = 1;

    r->row_major = true;
    for (uint32_t k = r->a->shape.nd; k-- > 0;) {
        uint8_t d = r->a->order[k];

        r->row_major &= d == k;
        r->step[d] = (int64_t)step;
        step *= r->a->inner.dim[d];
    }
}

static int put_value(struct report *r, const struct stored *s, struct err *e)
{
    const struct piece whole = {.from = s, .length = s->length};

    if (r->a->sharded)
        return put_shard(r, s, e);
    return put_chunk(r, &r->c->grid, s->cell, &whole, e);
}

static int put_all(struct report *r, struct err *e)
{
    const struct zarr_chunks *c = r->c;
    uint64_t next = 0;
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < c->n; i++) {
        const struct stored *s = &c->value[i];

        if (i > 0 && s->cell == c->value[i - 1].cell)
            return fault_at(r, s->cell, "is stored twice", e);
        rc = put_fills(r, &c->grid, next, s->cell, next, e);
        if (rc == 0)
            rc = put_value(r, s, e);
        next = s->cell + 1;
    }
    return rc != 0 ? rc : put_fills(r, &c->grid, next, c->grid.cells, next, e);
}

static int report_chunks(struct report *r, struct err *e)
{
    if (r->a->why[0])
        return faulted(sink_fault(r->sink, "%s", r->a->why), e);
    if (r->c->broken[0])
        return faulted(sink_fault(r->sink, "%s", r->c->broken), e);
    if (r->c->n > 0)
        qsort(r->c->value, r->c->n, sizeof *r->c->value, by_cell);
    settle_steps(r);
    return put_all(r, e);
}

static void write_fill(struct report *r)
{
    unsigned unit = dtype_unit(r->a->dtype);

    for (unsigned i = 0; i < unit; i++)
        snprintf(r->fill + 2 * i, 3, "%02x", r->a->fill[i]);
}

static int report_tensor(struct report *r, const struct sink_tensor *about,
                         struct err *e)
{
    struct sink_tensor t = *about;
    char attributes[64];
    int rc;

    TRY(zarr_spec_write(r->a, &r->spec, e));
    write_fill(r);
    t.dtype = r->a->dtype;
    t.shape = &r->a->shape;
    t.codec_key = r->a->chain.n > 0 ? r->spec.data : NULL;
    if (r->a->numpy_dtype) {
        snprintf(attributes, sizeof attributes, "{\"numpy_dtype\": \"%s\"}",
                 r->a->numpy_dtype);
        t.attributes = attributes;
    }
    TRY(sink_tensor_begin(r->sink, &t, e));
    rc = report_chunks(r, e);
    return rc < 0 ? rc : sink_tensor_end(r->sink, e);
}

int zarr_report(const struct zarr_array *a, struct zarr_chunks *c,
                const struct sink_tensor *about, const struct zarr_how *how,
                struct sink *sink, struct err *e)
{
    struct report r = {.a = a, .c = c, .how = how, .sink = sink};
    int rc;

    r.arena = arena_new(PARAM_MEMORY);
    rc = r.arena ? report_tensor(&r, about, e) : err_nomem(e);
    arena_free(r.arena);
    buf_release(&r.spec);
    return rc;
}
