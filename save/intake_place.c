/* SPDX-License-Identifier: MIT */
/* save/intake_place.c - bytes of an incoming file, to and from the boxes that have them. */
#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "save/box.h"
#include "save/intake_priv.h"

enum { WINDOW = 1 << 20 }; /* what is cut at once */

/* Bytes [off, off + len) of one tensor, and memory of as many bytes to cut boxes in. */
struct span {
    struct intake_file *f;
    const struct taken *t;
    uint64_t off;
    size_t len;
    char *data;
    char *scratch;
    bool write, again;
};

static int make_scratch(struct span *s, struct err *e)
{
    if (!s->scratch)
        s->scratch = malloc(WINDOW);
    return s->scratch ? 0 : err_nomem(e);
}

/* Do these bytes of the box lie together in the tensor? */
static bool is_together(const struct box *b, uint64_t at, uint64_t len)
{
    uint64_t run = box_run(b);

    return len <= run - at % run;
}

static int write_box(struct span *s, const struct box *b, const struct place *p,
                     uint64_t at, uint64_t len, struct err *e)
{
    struct intake_file *f = s->f;
    struct staged *file = &f->p.staged[p->staged];
    const void *bytes;
    int ret = 0;

    if (!is_together(b, at, len))
        ret = make_scratch(s, e);
    if (ret < 0)
        return ret;
    bytes = box_take(b, s->off, s->data, at, len, s->scratch);
    if (s->again)
        atomic_store(&file->unsummed, true);
    ret = staged_file_write(f->intake, file, bytes, (size_t)len, p->at + at, e);
    if (ret == 0 && file->summed && !atomic_load(&file->unsummed))
        sums_add(&f->sums, p->staged, p->at + at, bytes, len);
    return ret;
}

static int read_box(struct span *s, const struct box *b, const struct place *p,
                    uint64_t at, uint64_t len, struct err *e)
{
    struct intake_file *f = s->f;
    struct staged *file = &f->p.staged[p->staged];
    int ret;

    if (is_together(b, at, len))
        return staged_file_read(f->intake, file, s->data + (box_place(b, at) - s->off),
                                (size_t)len, p->at + at, e);
    ret = make_scratch(s, e);
    if (ret == 0)
        ret = staged_file_read(f->intake, file, s->scratch, (size_t)len, p->at + at, e);
    if (ret == 0)
        box_spread(b, s->off, s->data, at, len, s->scratch);
    return ret;
}

/* The first place that may have bytes from `off` on: spans of boxes may overlap. */
static size_t first_place(const struct taken *t, uint64_t off)
{
    size_t low = 0, high = t->places;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (t->place[mid].reach <= off)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static int each_place(struct span *s, struct err *e)
{
    const struct taken *t = s->t;
    struct shape shape = {.nd = t->nd};
    int ret = 0;

    memcpy(shape.dim, t->dim, t->nd * sizeof *t->dim);
    for (size_t i = first_place(t, s->off);
         ret == 0 && i < t->places && t->place[i].first < s->off + s->len; i++) {
        const struct place *p = &t->place[i];
        const struct box b = {
            .units = &shape, .unit = 1, .start = p->start, .size = p->size};
        uint64_t at, len;

        box_overlap(&b, s->off, s->len, &at, &len);
        if (len > 0)
            ret = s->write ? write_box(s, &b, p, at, len, e)
                           : read_box(s, &b, p, at, len, e);
    }
    return ret;
}

/* Bytes of one tensor; those without a place are in the plain file, where they arrived. */
static int move_span(struct span *s, struct err *e)
{
    struct intake_file *f = s->f;
    uint64_t at = f->data + s->t->begin + s->off;

    if (s->t->places)
        return each_place(s, e);
    return s->write ? staged_file_write(f->intake, &f->plain, s->data, s->len, at, e)
                    : staged_file_read(f->intake, &f->plain, s->data, s->len, at, e);
}

static size_t first_tensor(const struct placement *p, uint64_t at)
{
    size_t low = 0, high = p->tensors;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (p->tensor[mid].end <= at)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* The tensors cover the data without a hole. */
static int move(struct span *s, size_t len, uint64_t at, struct err *e)
{
    const struct placement *p = &s->f->p;
    int ret = 0;

    for (size_t i = first_tensor(p, at); ret == 0 && len > 0 && i < p->tensors;) {
        s->t = &p->tensor[i];
        s->off = at - s->t->begin;
        s->len = (size_t)MIN(MIN((uint64_t)len, s->t->end - at), (uint64_t)WINDOW);
        ret = move_span(s, e);
        s->data += s->len;
        at += s->len;
        len -= s->len;
        i += at == s->t->end;
    }
    free(s->scratch);
    return ret < 0 ? err_wrap(e, "%s", s->f->path) : 0;
}

int placement_write(struct intake_file *f, const void *data, size_t len, uint64_t at,
                    bool again, struct err *e)
{
    /* What is written is not changed. */
    struct span s = {
        .f = f, .data = (char *)(uintptr_t)data, .write = true, .again = again};

    return move(&s, len, at, e);
}

int placement_read(struct intake_file *f, void *dst, size_t len, uint64_t at,
                   struct err *e)
{
    struct span s = {.f = f, .data = dst};

    return move(&s, len, at, e);
}
