/* SPDX-License-Identifier: MIT */
/* index/formats/flat_boxes.c - a range of a block's flat elements as boxes of the block. */
#include "index/formats/flat_boxes.h"

#include "base/err.h"

bool flat_boxes_begin(struct flat_boxes *f, const struct shape *block, uint64_t begin,
                      uint64_t end)
{
    struct err ignored = {0};
    uint64_t count, stride = 1;

    if (shape_elements(block, &count, &ignored) < 0 || begin > end || end > count)
        return false;
    f->block = block;
    f->begin = f->at = begin;
    f->end = end;
    if (count == 0)
        return true;
    for (uint32_t k = block->nd; k-- > 0; stride *= block->dim[k])
        f->stride[k] = stride;
    return true;
}

/*
 * The outermost dimension along which whole slices start here: the first whose stride
 * divides the place and fits into what is left. The last one's stride is 1.
 */
static uint32_t slice_dim(const struct flat_boxes *f)
{
    uint32_t k = 0;

    while (f->at % f->stride[k] != 0 || f->end - f->at < f->stride[k])
        k++;
    return k;
}

bool flat_boxes_next(struct flat_boxes *f, struct flat_box *out)
{
    const struct shape *block = f->block;
    uint64_t left = f->end - f->at, rest = f->at;
    uint32_t along;

    if (left == 0)
        return false;
    out->first = f->at - f->begin;
    if (block->nd == 0) {
        f->at = f->end;
        return true;
    }
    along = slice_dim(f);
    for (uint32_t k = 0; k < block->nd; k++) {
        out->start[k] = rest / f->stride[k];
        rest %= f->stride[k];
        out->size[k] = k < along ? 1 : block->dim[k];
    }
    out->size[along] =
        MIN(left / f->stride[along], block->dim[along] - out->start[along]);
    f->at += out->size[along] * f->stride[along];
    return true;
}
