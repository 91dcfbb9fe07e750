/* SPDX-License-Identifier: MIT */
/* save/gather.c - literal bytes and boxes of tensors, as the file has them. */
#include "save/gather.h"

#include <blosc.h>
#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "save/box.h"

enum {
    UNIT_MAX = 16, /* the largest unit of a type is a C128 */
    /* Runs that are worth a read each; shorter ones are cut out of whole windows. */
    DIRECT = 64 << 10,
    READ_MAX = 4 << 20, /* at once: a reader may need as much for itself */
};

/* A box of one tensor, and who reads it. */
struct box_source {
    const struct gather *g;
    uint32_t tensor;
    struct shape units;
    struct box box;
};

static int open_box(const struct gather *g, const struct layout_piece *p,
                    struct box_source *s, struct err *e)
{
    const struct layout_tensor *t = &g->input->tensor[p->tensor];

    *s = (struct box_source){.g = g, .tensor = p->tensor};
    s->box = (struct box){.units = &s->units,
                          .unit = dtype_unit(t->dtype),
                          .start = p->start,
                          .size = p->size};
    return shape_units(&t->shape, t->dtype, &s->units, e);
}

static int read_tensor(const struct box_source *s, uint64_t off, uint64_t len,
                       void *dst, struct err *e)
{
    const struct save_source *source = &s->g->source;

    return source->read(source->user, s->tensor, off, (size_t)len, dst, e);
}

/* What lies together in the tensor is read as it lies. */
static int take_runs(const struct box_source *s, uint64_t run, uint64_t at,
                     uint64_t len, char *dst, struct err *e)
{
    int ret = 0;

    while (ret == 0 && len > 0) {
        uint64_t part = MIN(run - at % run, len);

        part = MIN(part, (uint64_t)READ_MAX);
        ret = read_tensor(s, box_place(&s->box, at), part, dst, e);
        at += part;
        dst += part;
        len -= part;
    }
    return ret;
}

/* Short runs: what stands between them is read along, and left out. */
static int take_windows(const struct box_source *s, uint64_t at, uint64_t len,
                        char *dst, struct err *e)
{
    CLEANUP_FREE char *window = malloc(2 * (size_t)SAVE_WINDOW);
    uint64_t off = box_place(&s->box, at);
    uint64_t end = box_place(&s->box, at + len - s->box.unit) + s->box.unit;
    int ret = window ? 0 : err_nomem(e);

    while (ret == 0 && off < end) {
        uint64_t part = MIN(end - off, (uint64_t)SAVE_WINDOW), first, n;

        ret = read_tensor(s, off, part, window, e);
        box_overlap(&s->box, off, part, &first, &n);
        if (ret == 0 && n > 0)
            memcpy(dst + (first - at),
                   box_take(&s->box, off, window, first, n, window + SAVE_WINDOW),
                   (size_t)n);
        off += part;
    }
    return ret;
}

/* Whole units of the box. */
static int take_units(const struct box_source *s, uint64_t at, uint64_t len, char *dst,
                      struct err *e)
{
    uint64_t run = box_run(&s->box);

    if (len == 0)
        return 0;
    return run >= DIRECT || len <= run - at % run ? take_runs(s, run, at, len, dst, e)
                                                  : take_windows(s, at, len, dst, e);
}

/* A range of a file may begin and end amid a unit: that one is read whole. */
static int take_amid(const struct box_source *s, uint64_t at, uint64_t len, char *dst,
                     struct err *e)
{
    unsigned unit = s->box.unit;
    char whole[UNIT_MAX];
    int ret;

    if (len == 0)
        return 0;
    ret = take_units(s, at - at % unit, unit, whole, e);
    if (ret == 0)
        memcpy(dst, whole + at % unit, (size_t)len);
    return ret;
}

static int gather_box(const struct gather *g, const struct layout_piece *p, uint64_t at,
                      uint64_t len, char *dst, struct err *e)
{
    struct box_source s;
    uint64_t head, body;
    int ret = open_box(g, p, &s, e);

    if (ret < 0)
        return ret;
    head = MIN((s.box.unit - at % s.box.unit) % s.box.unit, len);
    body = (len - head) / s.box.unit * s.box.unit;
    ret = take_amid(&s, at, head, dst, e);
    if (ret == 0)
        ret = take_units(&s, at + head, body, dst + head, e);
    if (ret == 0)
        ret = take_amid(&s, at + head + body, len - head - body, dst + head + body, e);
    return ret;
}

size_t gather_piece_at(const struct layout_file_info *f, uint64_t at)
{
    size_t low = 0, high = f->pieces;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (f->piece[mid].at + f->piece[mid].len <= at)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

int gather_range(const struct gather *g, const struct layout_file_info *f,
                 uint64_t from, uint64_t len, void *dst, struct err *e)
{
    uint64_t end = from + len;
    int ret = 0;

    for (size_t i = gather_piece_at(f, from);
         ret == 0 && i < f->pieces && f->piece[i].at < end; i++) {
        const struct layout_piece *p = &f->piece[i];
        uint64_t first = MAX(p->at, from), last = MIN(p->at + p->len, end);
        char *to = (char *)dst + (first - from);

        if (p->kind == LAYOUT_LITERAL)
            memcpy(to, (const char *)p->data + (first - p->at), (size_t)(last - first));
        else if (p->kind == LAYOUT_BOX)
            ret = gather_box(g, p, first - p->at, last - first, to, e);
        else
            memset(to, 0, (size_t)(last - first));
    }
    return ret < 0 ? err_wrap(e, "%s", f->path) : 0;
}

int gather_encoded(const struct gather *g, const struct layout_file_info *f, void **out,
                   size_t *len, struct err *e)
{
    size_t room = (size_t)f->size + BLOSC_MAX_OVERHEAD;
    CLEANUP_FREE char *plain = malloc((size_t)f->size + 1), *packed = malloc(room);
    int ret = plain && packed ? 0 : err_nomem(e), n;

    for (size_t i = 0; ret == 0 && i < f->pieces; i++)
        if (f->piece[i].kind == LAYOUT_CRC32)
            ret = err_set(e, ENOTSUP, "%s: a checksum in a compressed file", f->path);
    if (ret == 0)
        ret = gather_range(g, f, 0, f->size, plain, e);
    if (ret < 0)
        return ret;
    /* What numcodecs and zarr write by default: level 5, shuffle by bytes. */
    n = blosc_compress_ctx(5, BLOSC_SHUFFLE, f->type_size, (size_t)f->size, plain,
                           packed, room, "lz4", 0, 1);
    if (n <= 0)
        return err_set(e, EIO, "%s: blosc: %d", f->path, n);
    *out = steal(&packed);
    *len = (size_t)n;
    return 0;
}
