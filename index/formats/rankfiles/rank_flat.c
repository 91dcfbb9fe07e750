/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/rank_flat.c - ranges of flattened tensors, as pieces of the full ones. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "index/formats/flat_boxes.h"
#include "index/formats/rankfiles/rank_set_priv.h"

/* The distance of its row-major elements, or 0 where that is no one number. */
static int64_t flat_step(const struct torch_tensor *x)
{
    int64_t want = 0, step = 1;

    for (uint32_t k = x->shape.nd; k-- > 0;) {
        if (x->shape.dim[k] == 1)
            continue;
        if (want == 0)
            want = step = x->stride[k];
        if (x->stride[k] != want || step <= 0 ||
            __builtin_mul_overflow(want, (int64_t)x->shape.dim[k], &want))
            return 0;
    }
    return step;
}

/* NULL, or why x cannot hold that range. */
static const char *misfit(const struct rank_flat *f, int64_t *step)
{
    struct err ignored = {0};
    uint64_t has, whole, bytes;

    *step = flat_step(f->x);
    if (dtype_bits(f->x->dtype) % 8 != 0 || *step == 0)
        return "its elements are not one behind the other";
    if (shape_bytes(f->shape, f->x->dtype, &bytes, &ignored) < 0)
        return "it has more than 2^63 bytes";
    if (shape_elements(&f->x->shape, &has, &ignored) < 0 ||
        range_outside(f->offset, f->count, has))
        return "its range is not within the flattened parameter";
    if (shape_elements(f->shape, &whole, &ignored) < 0 ||
        range_outside(f->begin, f->count, whole))
        return "its range is not within its shape";
    return NULL;
}

static int add_box(struct rank_set *s, struct rank_entry *t, uint32_t file,
                   const struct rank_flat *f, const struct flat_box *box,
                   const struct flat_boxes *boxes, int64_t step, struct err *e)
{
    struct torch_tensor x = *f->x;

    x.shape.nd = f->shape->nd;
    for (uint32_t k = 0; k < x.shape.nd; k++) {
        x.shape.dim[k] = box->size[k];
        x.stride[k] = (int64_t)boxes->stride[k] * step;
    }
    x.storage_offset += (f->offset + box->first) * (uint64_t)step;
    return rank_entry_piece(s, t, file, &x, box->start, e);
}

int rank_set_flat(struct rank_set *s, uint32_t file, const struct rank_flat *f,
                  struct err *e)
{
    struct rank_entry *t;
    struct flat_boxes boxes;
    struct flat_box box;
    const char *why;
    int64_t step;

    if (rank_entry_meet(s, file, f->path, f->len, true, &t, e) < 0 || !t)
        return -e->code;
    s->distributed = t->distributed = true;
    why = misfit(f, &step);
    if (!why && !flat_boxes_begin(&boxes, f->shape, f->begin, f->begin + f->count))
        why = "its range is not within its shape";
    if (why)
        return rank_entry_fault(s, t, file, why, e);
    TRY(rank_entry_shape(s, t, file, f->x->dtype, f->shape, e));
    while (flat_boxes_next(&boxes, &box))
        TRY(add_box(s, t, file, f, &box, &boxes, step, e));
    return 0;
}
