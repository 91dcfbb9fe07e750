/* SPDX-License-Identifier: MIT */
/* gpu/slots.c - packs boxes into slots, with the bytes of sources that they read. */
#include "gpu/slots.h"

#include <string.h>

#include "base/err.h"
#include "remote/source.h"

enum {
    /* Boxes with less between them are read in one: a disk's request costs more. */
    JOIN_GAP = 16 << 10,
};

void slot_plan_release(struct slot_plan *p)
{
    free(p->part);
    free(p->batch);
    *p = (struct slot_plan){0};
}

/* ---- packing ---- */

/* Copies to their place apart from work for the kernel, then in the order of sources. */
static int by_place(const void *a, const void *b)
{
    const struct work *x = a, *y = b;
    bool x_direct = box_direct(&x->box) != 0, y_direct = box_direct(&y->box) != 0;
    uint64_t x_at, y_at;

    if (x_direct != y_direct)
        return x_direct ? -1 : 1;
    if (x->source != y->source)
        return x->source < y->source ? -1 : 1;
    x_at = box_lines_of(&x->box).first;
    y_at = box_lines_of(&y->box).first;
    return (x_at > y_at) - (x_at < y_at);
}

static uint64_t result_bytes(const struct core_box *b)
{
    uint64_t n = b->dst_step[b->nd - 1];

    for (uint32_t k = 0; k < b->nd; k++)
        n *= b->count[k];
    return n;
}

/* What is being packed. */
struct packing {
    struct work_list *w;
    uint64_t room;
    size_t boxes;
    struct slot_plan *out;
};

static struct slot_batch *new_batch(struct packing *p, bool direct)
{
    struct slot_batch *b = &p->out->batch[p->out->batches++];

    *b = (struct slot_batch){.first = p->out->parts, .direct = direct};
    return b;
}

/* Does the box go into the last part of the batch? Then the part is made longer. */
static bool join(struct packing *p, struct slot_batch *b, const struct work *w,
                 const struct box_lines *l)
{
    struct slot_part *part = b->count ? &p->out->part[p->out->parts - 1] : NULL;
    uint64_t end, grown;

    if (!part || part->lines.sparse || l->sparse ||
        p->w->work[part->first].source != w->source)
        return false;
    end = part->lines.first + part->lines.length; /* sorted: it begins no earlier */
    if (l->first > end && l->first - end >= JOIN_GAP)
        return false;
    grown = MAX(end, l->first + l->length) - part->lines.first;
    if (part->at + grown > p->room || b->boxes == p->boxes)
        return false;
    part->lines.length = grown;
    part->count++;
    b->used = part->at + grown;
    return true;
}

/* The first place from `used` on that has the box's bytes aligned as its result is. */
static uint64_t place_for(uint64_t used, const struct core_box *b,
                          const struct box_lines *l)
{
    uint64_t skip = b->dst - (b->src - l->first) - used;

    return used + skip % CORE_ALIGN;
}

static void add_part(struct packing *p, struct slot_batch *b, size_t i,
                     const struct box_lines *l)
{
    struct slot_part *part = &p->out->part[p->out->parts++];

    *part = (struct slot_part){.first = i, .count = 1, .lines = *l};
    part->at = place_for(b->used, &p->w->work[i].box, l);
    b->count++;
    b->used = part->at + (l->count - 1) * box_pitch(l) + l->length;
}

static void pack(struct packing *p)
{
    struct slot_batch *b = NULL;

    for (size_t i = 0; i < p->w->count; i++) {
        const struct work *w = &p->w->work[i];
        struct box_lines l = box_lines_of(&w->box);
        bool direct = box_direct(&w->box) != 0;

        if (!b || b->direct != direct || b->boxes == p->boxes)
            b = new_batch(p, direct);
        if (!join(p, b, w, &l)) {
            if (b->count && b->used + box_footprint(&l) > p->room)
                b = new_batch(p, direct);
            add_part(p, b, i, &l);
        }
        b->boxes++;
        b->result += result_bytes(&w->box);
    }
}

int slot_plan_make(struct work_list *w, uint64_t room, size_t boxes,
                   struct slot_plan *out, struct err *e)
{
    struct packing p = {.w = w, .room = room, .boxes = boxes, .out = out};

    out->part = calloc(w->count + 1, sizeof *out->part);
    out->batch = calloc(w->count + 1, sizeof *out->batch);
    if (!out->part || !out->batch)
        return err_nomem(e);
    if (w->count)
        qsort(w->work, w->count, sizeof *w->work, by_place);
    pack(&p);
    return 0;
}

/* ---- reading ---- */

/* The lines of one box on their way into a slot. */
struct line_reader {
    const struct work *w;
    const struct box_lines *lines;
    unsigned char *to, *bounce;
    uint64_t *read;
};

/* How many lines from n on are near enough to each other to be one read. */
static uint64_t lines_together(const struct line_reader *r, uint64_t n)
{
    uint64_t first = box_line(&r->w->box, r->lines, n), end = first + r->lines->length;
    uint64_t m = 1;

    for (; n + m < r->lines->count; m++) {
        uint64_t next = box_line(&r->w->box, r->lines, n + m);

        if (next < end || next - end >= JOIN_GAP ||
            next + r->lines->length - first > SLOT_BOUNCE)
            break;
        end = next + r->lines->length;
    }
    return m;
}

static int read_together(const struct line_reader *r, uint64_t n, uint64_t m,
                         struct err *e)
{
    uint64_t first = box_line(&r->w->box, r->lines, n);
    uint64_t last = box_line(&r->w->box, r->lines, n + m - 1);
    size_t length = (size_t)r->lines->length, all = (size_t)(last - first) + length;
    unsigned char *to = r->to + n * box_pitch(r->lines);

    TRY(source_read(r->w->source, first, all, m > 1 ? r->bounce : to, e));
    *r->read += all;
    for (uint64_t i = 0; m > 1 && i < m; i++)
        memcpy(to + i * box_pitch(r->lines),
               r->bounce + (box_line(&r->w->box, r->lines, n + i) - first), length);
    return 0;
}

static int read_part(const struct work_list *w, const struct slot_part *part,
                     unsigned char *slot, unsigned char *bounce, uint64_t *read,
                     struct err *e)
{
    struct line_reader r = {.w = &w->work[part->first],
                            .lines = &part->lines,
                            .to = slot + part->at,
                            .bounce = bounce,
                            .read = read};
    uint64_t m;
    int ret = 0;

    for (uint64_t n = 0; ret == 0 && n < part->lines.count; n += m) {
        m = lines_together(&r, n);
        ret = read_together(&r, n, m, e);
    }
    return ret;
}

int slot_read(const struct work_list *w, const struct slot_plan *p, size_t batch,
              unsigned char *slot, unsigned char *bounce, uint64_t *read, struct err *e)
{
    const struct slot_batch *b = &p->batch[batch];
    int ret = 0;

    for (size_t i = b->first; ret == 0 && i < b->first + b->count; i++)
        ret = read_part(w, &p->part[i], slot, bounce, read, e);
    return ret;
}
