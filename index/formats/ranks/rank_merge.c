/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/rank_merge.c - one tensor put together of what the ranks' files have. */
#include "index/formats/ranks/rank_merge.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/ranks/rank_copies.h"
#include "index/formats/torch/torch_file.h"
#include "index/sink.h"

enum {
    BOXES_MEMORY = 64 << 10, /* of one piece: three of them */
    MAX_LIST = 60 << 10,     /* of copies, some 3,000: the parameter of a chunk */
};

struct rank_cut rank_rule_cut(enum rank_rule rule)
{
    switch (rule) {
    case RANK_COLUMNS:
        return (struct rank_cut){.axis = 1, .blocks = 1};
    case RANK_HALVES:
        return (struct rank_cut){.blocks = 2};
    case RANK_THIRDS:
        return (struct rank_cut){.blocks = 3};
    case RANK_UNKNOWN:
    case RANK_SAME:
    case RANK_ROWS:
    case RANK_SUM:
        break;
    }
    return (struct rank_cut){.blocks = 1};
}

static bool is_joined(enum rank_rule rule)
{
    return rule == RANK_ROWS || rule == RANK_COLUMNS || rule == RANK_HALVES ||
           rule == RANK_THIRDS;
}

/* ---- do they fit? ---- */

/* Elements that share bytes cannot be told apart by rows. */
static bool is_whole_bytes(enum dtype d)
{
    return dtype_bits(d) % 8 == 0;
}

bool rank_parts_fit(const struct rank_part *part, uint32_t n,
                    const struct rank_cut *cut, uint64_t *whole)
{
    const struct rank_tensor *x = part[0].x;

    *whole = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct rank_tensor *y = part[i].x;

        if (y->dtype != x->dtype || y->nd != x->nd || y->nd <= cut->axis ||
            !is_whole_bytes(y->dtype) || y->dim[cut->axis] % cut->blocks != 0 ||
            add_overflows(*whole, y->dim[cut->axis], whole))
            return false;
        /* Strides of 0 would make little files show as endless tensors. */
        for (uint32_t k = 0; k < y->nd; k++)
            if ((k != cut->axis && y->dim[k] != x->dim[k]) ||
                (y->stride[k] == 0 && y->dim[k] > 1))
                return false;
    }
    return true;
}

static bool parts_alike(const struct rank_part *part, uint32_t n)
{
    const struct rank_tensor *x = part[0].x;

    for (uint32_t i = 1; i < n; i++) {
        const struct rank_tensor *y = part[i].x;

        if (y->dtype != x->dtype || y->nd != x->nd ||
            (x->nd > 0 && memcmp(x->dim, y->dim, x->nd * sizeof *x->dim) != 0))
            return false;
    }
    return true;
}

/* Row-major, as it is and plain: where its bytes are; false: elsewise. */
static bool plain_bytes(const struct rank_tensor *x, uint64_t *offset, uint64_t *len)
{
    uint64_t step = 1, from;

    for (uint32_t k = x->nd; k-- > 0; step *= x->dim[k])
        if (x->dim[k] == 0 || (x->dim[k] > 1 && (uint64_t)x->stride[k] != step))
            return false;
    *len = step * dtype_unit(x->dtype);
    from = x->first * dtype_unit(x->dtype);
    *offset = x->data + from;
    return is_whole_bytes(x->dtype) && !x->packed && !x->flags && from <= x->data_len &&
           *len <= x->data_len - from;
}

/* ---- pieces ---- */

int rank_part_report(struct sink *sink, const struct rank_part *part,
                     const struct rank_cut *cut, uint64_t before, uint64_t whole,
                     struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(BOXES_MEMORY);
    const struct rank_tensor *x = part->x;
    struct rank_boxes boxes;
    struct shape shape = {.nd = x->nd};
    struct chunk c;

    rank_tensor_chunk(x, part->file->number, &c);
    if (!a)
        return err_nomem(e);
    memcpy(shape.dim, x->dim, x->nd * sizeof *x->dim);
    TRY(rank_boxes_cut(a, cut, &shape, before, whole, &boxes, e));
    return rank_boxes_report(sink, &boxes, &c, e);
}

static int add_joined(struct sink *sink, const struct rank_part *part, uint32_t n,
                      const struct rank_cut *cut, uint64_t whole, struct err *e)
{
    uint64_t before = 0;

    for (uint32_t i = 0; i < n; i++) {
        TRY(rank_part_report(sink, &part[i], cut, before, whole, e));
        before += part[i].x->dim[cut->axis];
    }
    return 0;
}

/* ---- copies and sums ---- */

/* Lists the bytes of all but the first; false when one is not plain. */
static bool list_others(const struct rank_part *part, uint32_t n, uint64_t len,
                        struct buf *list)
{
    for (uint32_t i = 1; i < n; i++) {
        uint64_t offset, same;

        if (!plain_bytes(part[i].x, &offset, &same) || same != len)
            return false;
        rank_copies_add(list, part[i].file->number, offset);
    }
    return true;
}

static int report_listed(struct sink *sink, const struct rank_part *part,
                         enum chunk_encoding encoding, uint64_t offset, uint64_t len,
                         struct sink_tensor *t, struct err *e)
{
    static const uint64_t zeros[SHAPE_MAX_DIMS];
    struct chunk c = {.file = part->file->number,
                      .encoding = (uint8_t)encoding,
                      .offset = offset,
                      .length = len,
                      .start = zeros,
                      .size = t->shape->dim};

    TRY(sink_tensor_begin(sink, t, e));
    TRY(sink_chunk(sink, &c, e));
    return sink_tensor_end(sink, e);
}

/* 0 when that is no way to have them; 1: it was reported. */
static int try_listed(struct sink *sink, enum chunk_encoding encoding,
                      const struct rank_part *part, uint32_t n, struct sink_tensor *t,
                      struct err *e)
{
    CLEANUP(buf_release) struct buf list = {.max = MAX_LIST};
    struct torch_tensor x;
    uint64_t offset, len;
    int r;

    if (!plain_bytes(part[0].x, &offset, &len) || !list_others(part, n, len, &list))
        return 0;
    if (buf_failed(&list))
        return buf_failed(&list) == -ENOMEM ? err_nomem(e) : 0;
    rank_tensor_open(part[0].x, &x);
    t->dtype = x.dtype;
    t->shape = &x.shape;
    t->codec_key = list.data;
    r = report_listed(sink, part, encoding, offset, len, t, e);
    t->codec_key = NULL;
    t->shape = NULL;
    return r < 0 ? r : 1;
}

/* ---- the whole tensor ---- */

/* What is wrong with a part: most texts say already which file they are of. */
static void describe(const struct rank_part *part, char *text, size_t size)
{
    const char *why = part->x ? part->x->why : part->why, *path = part->file->path;

    if (strstr(why, path))
        snprintf(text, size, "%.500s", why);
    else
        snprintf(text, size, "%.200s: %.300s", path, why);
}

int rank_report_alone(struct sink *sink, const struct rank_part *part,
                      struct sink_tensor *t, struct err *e)
{
    static const struct shape none = {.nd = 1};
    struct torch_tensor x;
    char why[600];
    int r;

    if (part->x && !part->x->why) {
        rank_tensor_open(part->x, &x);
        r = torch_file_tensor(sink, part->file, &x, t, e);
        t->shape = NULL;
        return r;
    }
    t->dtype = DTYPE_U8;
    t->shape = &none;
    r = sink_tensor_begin(sink, t, e);
    t->shape = NULL;
    if (r < 0)
        return r;
    describe(part, why, sizeof why);
    if (sink_fault(sink, "%s", why) < 0)
        return err_nomem(e);
    return sink_tensor_end(sink, e);
}

/* Why the tensor cannot be had, into `why`; false: all parts are there. */
static bool find_lack(const struct rank_part *part, uint32_t n, char *why, size_t size)
{
    for (uint32_t i = 0; i < n; i++) {
        if (part[i].x && !part[i].x->why)
            continue;
        describe(&part[i], why, size);
        return true;
    }
    return false;
}

/* Listed with the shape that one part lets expect. */
static int report_broken(struct sink *sink, enum rank_rule rule,
                         const struct rank_part *part, uint32_t n,
                         struct sink_tensor *t, const char *why, struct err *e)
{
    struct torch_tensor x = {.dtype = DTYPE_U8, .shape = {.nd = 1}};
    uint32_t axis = rank_rule_cut(rule).axis;
    int r;

    for (uint32_t i = 0; i < n; i++) {
        if (!part[i].x || part[i].x->why)
            continue;
        rank_tensor_open(part[i].x, &x);
        if (is_joined(rule) && axis < x.shape.nd &&
            mul_overflows(x.shape.dim[axis], n, &x.shape.dim[axis]))
            x.shape.dim[axis] = 0;
        break;
    }
    t->dtype = x.dtype;
    t->shape = &x.shape;
    r = sink_tensor_begin(sink, t, e);
    t->shape = NULL;
    if (r < 0)
        return r;
    if (sink_fault(sink, "%s", why) < 0)
        return err_nomem(e);
    return sink_tensor_end(sink, e);
}

static int merge_joined(struct sink *sink, enum rank_rule rule,
                        const struct rank_part *part, uint32_t n, struct sink_tensor *t,
                        struct err *e)
{
    struct rank_cut cut = rank_rule_cut(rule);
    struct torch_tensor x;
    uint64_t whole;
    int r;

    if (!rank_parts_fit(part, n, &cut, &whole))
        return report_broken(sink, rule, part, n, t,
                             "its pieces in the files of the ranks do not fit together",
                             e);
    rank_tensor_open(part[0].x, &x);
    x.shape.dim[cut.axis] = whole;
    t->dtype = x.dtype;
    t->shape = &x.shape;
    r = sink_tensor_begin(sink, t, e);
    t->shape = NULL;
    if (r < 0)
        return r;
    TRY(add_joined(sink, part, n, &cut, whole, e));
    return sink_tensor_end(sink, e);
}

/* The first rank's that can be read stands for all. */
static int merge_same(struct sink *sink, const struct rank_part *part, uint32_t n,
                      struct sink_tensor *t, struct err *e)
{
    uint32_t i = 0;
    char why[600];
    int r = 0;

    while (i < n && (!part[i].x || part[i].x->why))
        i++;
    if (i == n)
        return rank_report_alone(sink, &part[0], t, e);
    if (find_lack(part, n, why, sizeof why))
        return rank_report_alone(sink, &part[i], t, e);
    if (!parts_alike(part, n))
        return report_broken(sink, RANK_SAME, part, n, t,
                             "the ranks have copies of different types or shapes", e);
    if (n > 1)
        r = try_listed(sink, CHUNK_COPIES, part, n, t, e);
    return r ? MIN(r, 0) : rank_report_alone(sink, &part[0], t, e);
}

static int merge_sum(struct sink *sink, const struct rank_part *part, uint32_t n,
                     struct sink_tensor *t, struct err *e)
{
    int r = 0;

    if (parts_alike(part, n) && rank_sum_adds(part[0].x->dtype))
        r = try_listed(sink, CHUNK_SUM, part, n, t, e);
    return r ? MIN(r, 0)
             : report_broken(sink, RANK_SUM, part, n, t,
                             "it is the sum of what the ranks have, and those are not "
                             "plain floating point tensors of one type and shape",
                             e);
}

int rank_merge(struct sink *sink, enum rank_rule rule, const struct rank_part *part,
               uint32_t n, struct sink_tensor *t, struct err *e)
{
    char why[600];

    if (n == 1)
        return rank_report_alone(sink, &part[0], t, e);
    if (rule == RANK_SAME)
        return merge_same(sink, part, n, t, e);
    if (find_lack(part, n, why, sizeof why))
        return report_broken(sink, rule, part, n, t, why, e);
    return rule == RANK_SUM ? merge_sum(sink, part, n, t, e)
                            : merge_joined(sink, rule, part, n, t, e);
}
