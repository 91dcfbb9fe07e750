/* SPDX-License-Identifier: MIT */
/* index/spans.c - few large reads that cover many small runs. */
#include "index/spans.h"

#include <errno.h>

#include "base/err.h"
#include "base/vec.h"
#include "index/plan.h"

/*
 * The copies of one run by rising offset: the next one to be covered and how many are
 * left. Cursors of all runs form a heap, so that copies come out sorted without ever
 * being listed: memory is that of the runs, whatever their counts.
 */
struct cursor {
    uint64_t off, len, step;
    uint64_t left;
    uint32_t tag;
};

struct cover {
    uint64_t gap, max;
    struct span_list *out;
    size_t cap;
};

void span_list_release(struct span_list *l)
{
    free(l->span);
    *l = (struct span_list){0};
}

static struct cursor cursor_of(const struct plan_run *r, uint64_t gap, uint64_t max)
{
    struct cursor c = {r->src, r->len, (uint64_t)r->src_step, r->count, r->tag};

    if (r->src_step < 0) {
        c.off -= (r->count - 1) * -c.step;
        c.step = -c.step;
    }
    if (r->count == 1 || !c.step)
        c.left = 1;
    /* Copies that overlap, or that may be joined however many there are, are one. */
    if (c.left > 1 && (c.step < c.len || (!max && c.step - c.len <= gap))) {
        c.len += (c.left - 1) * c.step;
        c.left = 1;
    }
    return c;
}

static bool before(const struct cursor *a, const struct cursor *b)
{
    return a->tag != b->tag ? a->tag < b->tag : a->off < b->off;
}

/* Lets heap[i] sink to its place. */
static void sift_down(struct cursor *heap, size_t n, size_t i)
{
    for (;;) {
        size_t least = i, child = 2 * i + 1;
        struct cursor swap;

        for (size_t k = child; k < n && k < child + 2; k++) {
            if (before(&heap[k], &heap[least]))
                least = k;
        }
        if (least == i)
            return;
        swap = heap[i];
        heap[i] = heap[least];
        heap[least] = swap;
        i = least;
    }
}

/* The last span takes the copy when it overlaps it or the rules allow. */
static bool join(const struct cover *v, uint32_t tag, uint64_t off, uint64_t len)
{
    struct span *s = v->out->count ? &v->out->span[v->out->count - 1] : NULL;
    uint64_t end, joined;

    if (!s || s->tag != tag)
        return false;
    end = s->off + s->len;
    joined = MAX(end, off + len) - s->off;
    if (off >= end && (off - end > v->gap || (v->max && joined > v->max)))
        return false;
    s->len = joined;
    return true;
}

static int add_copy(struct cover *v, uint32_t tag, uint64_t off, uint64_t len,
                    struct err *e)
{
    struct span_list *l = v->out;

    if (join(v, tag, off, len))
        return 0;
    if (!VEC_ROOM(l->span, l->count, v->cap))
        return err_nomem(e);
    l->span[l->count++] = (struct span){tag, off, len};
    return 0;
}

/*
 * Adds the copies of c that the last span, which ends with the one before them, takes
 * whatever else there is: no other copy begins before `other`. Returns how many.
 */
static uint64_t join_many(const struct cover *v, const struct cursor *c, uint64_t other)
{
    struct span *s = &v->out->span[v->out->count - 1];
    uint64_t n = c->left, room = v->max - c->len;

    if (!n || c->off >= other || c->step - c->len > v->gap)
        return 0;
    n = MIN(n, (other - c->off - 1) / c->step + 1);
    if (v->max) {
        if (c->len > v->max || c->off - s->off > room)
            return 0;
        n = MIN(n, (room - (c->off - s->off)) / c->step + 1);
    }
    s->len = MAX(s->len, c->off + (n - 1) * c->step + c->len - s->off);
    return n;
}

/* Where the next copy of any other cursor of the first one's source begins. */
static uint64_t next_other(const struct cursor *heap, size_t n)
{
    uint64_t off = UINT64_MAX;

    for (size_t k = 1; k < n && k < 3; k++)
        if (heap[k].tag == heap[0].tag)
            off = MIN(off, heap[k].off);
    return off;
}

static void advance(struct cursor *c, uint64_t copies)
{
    c->off += copies * c->step;
    c->left -= copies;
}

static int drain(struct cover *v, struct cursor *heap, size_t n, struct err *e)
{
    while (n) {
        struct cursor *top = &heap[0];

        if (add_copy(v, top->tag, top->off, top->len, e) < 0)
            return -ENOMEM;
        advance(top, 1);
        advance(top, join_many(v, top, next_other(heap, n)));
        if (!top->left)
            *top = heap[--n];
        sift_down(heap, n, 0);
    }
    return 0;
}

int spans_cover(const struct plan_run *run, size_t n, uint64_t gap, uint64_t max,
                struct span_list *out, struct err *e)
{
    CLEANUP_FREE struct cursor *heap = reallocarray(NULL, n ? n : 1, sizeof *heap);
    struct cover v = {.gap = gap, .max = max, .out = out};
    size_t used = 0;
    int ret;

    *out = (struct span_list){0};
    if (!heap)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++) {
        if (run[i].len && run[i].count)
            heap[used++] = cursor_of(&run[i], gap, max);
    }
    for (size_t i = used / 2; i-- > 0;)
        sift_down(heap, used, i);
    ret = drain(&v, heap, used, e);
    if (ret < 0)
        span_list_release(out);
    return ret;
}

size_t spans_find(const struct span_list *l, uint32_t tag, uint64_t off)
{
    size_t low = 0, high = l->count;

    while (low < high) { /* the first span behind (tag, off) */
        size_t mid = low + (high - low) / 2;
        const struct span *s = &l->span[mid];

        if (s->tag < tag || (s->tag == tag && s->off <= off))
            low = mid + 1;
        else
            high = mid;
    }
    return low ? low - 1 : 0;
}
