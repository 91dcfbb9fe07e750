/* SPDX-License-Identifier: MIT */
/* index/map/map_work.c - a rule's operations on one tensor, and what comes of them. */
#include "index/map/map_work.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/dtype.h"
#include "index/key_text.h"
#include "index/map/map_check.h"
#include "index/map/scope.h"
#include "index/map/shares.h"

enum {
    UNSTACK_FREE = 1 << 16,
    UNSTACK_BYTES = 256,
};

static struct scope work_scope(const struct work *w, uint64_t dim)
{
    return (struct scope){.map = w->f->map,
                          .config = w->f->config,
                          .source = w->f->source,
                          .captures = &w->captures,
                          .dim = dim};
}

/* The number of an expression for this axis. */
int work_count(const struct work *w, uint32_t axis, const char *text, uint64_t absent,
               uint64_t *out, struct err *e)
{
    struct scope s = work_scope(w, w->boxes.shape.dim[axis]);

    return scope_count(&s, text, absent, out, e);
}

int work_axis(const struct work *w, uint32_t axis, struct err *e)
{
    struct buf shape = {.max = 2048};

    if (axis < w->boxes.shape.nd)
        return 0;
    shape_format(&w->boxes.shape, &shape);
    err_set(e, EINVAL, "the tensor has no axis %u, its shape is %s", axis,
            shape.data ? shape.data : "");
    buf_release(&shape);
    return -e->code;
}

static enum dtype cast_of(const struct work *w)
{
    enum dtype wanted = w->rule && w->rule->cast ? w->rule->cast : DTYPE_NONE;

    if (!wanted && w->like->role == ROLE_MODEL)
        wanted = w->f->map->cast;
    return map_casts(w->like->dtype, wanted) ? wanted : w->like->dtype;
}

/* What a codec needs stands in each chunk, since several tensors may have come together. */
static void fill_params(const struct sink_taken *t, struct boxes *b)
{
    for (size_t i = 0; i < b->n; i++) {
        struct chunk *c = &b->chunk[i];

        if (c->encoding == CHUNK_PLAIN || c->param)
            continue;
        c->param_len = (uint32_t)(t->codec_key ? t->codec_key_len : t->key_len);
        if (c->param_len > 0)
            c->param = t->codec_key ? t->codec_key : t->key;
    }
}

static int put_chunks(const struct work *w, const struct sink_tensor *t, struct err *e)
{
    int ret = sink_tensor_begin(w->sink, t, e);

    if (ret < 0)
        return ret;
    if (w->fault) {
        char key[200];

        key_text(key, sizeof key, w->fault_key, strlen(w->fault_key));
        sink_fault(w->sink, "%s of the source: %s", key, w->fault);
    }
    for (size_t i = 0; ret == 0 && !w->fault && i < w->boxes.n; i++)
        ret = sink_chunk(w->sink, &w->boxes.chunk[i], e);
    return ret == 0 ? sink_tensor_end(w->sink, e) : ret;
}

int work_put(const struct work *w, const char *name, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {.max = 1 << 20};
    struct sink_tensor t = {.part = w->like->part,
                            .dtype = cast_of(w),
                            .stored = w->like->dtype,
                            .shape = &w->boxes.shape,
                            .role = w->like->role,
                            .codec_key = w->like->key,
                            .attributes = w->like->attributes};

    if (name)
        TRY(template_write(name, &w->captures, &key, e));
    t.key = !name ? w->like->key : key.data ? key.data : "";
    t.key_len = name ? key.len : w->like->key_len;
    t.wrapper = name ? 0 : w->like->wrapper;
    t.modules = !name && w->like->modules;
    if (name)
        TRY(map_check_shape(w->f, t.key, t.key_len, t.shape, e));
    return put_chunks(w, &t, e);
}

/* Boxes count elements: types of less than a byte have none of their own. */
static int check_packed(const struct taken *t, struct err *e)
{
    if (!t->rule || (dtype_bits(t->t.dtype) >= 8 && t->t.dtype != DTYPE_NONE))
        return 0;
    return err_set(e, ENOTSUP, "elements of %s are packed: only \"drop\" takes them",
                   dtype_name(t->t.dtype));
}

int work_load(struct arena *a, const struct taken *t, struct work *w, struct err *e)
{
    struct shape units = *t->t.shape;

    w->like = &t->t;
    w->captures = t->captures;
    w->fault = t->t.fault;
    w->fault_key = t->t.key;
    TRY(check_packed(t, e));
    if (!t->t.pieces_len) {
        w->boxes = (struct boxes){.arena = a, .shape = units};
        return 0;
    }
    TRY(boxes_load(a, &units, t->t.pieces, t->t.pieces_len, &w->boxes, e));
    fill_params(&t->t, &w->boxes);
    return 0;
}

/* ---- operations ---- */

static int do_cut(struct work *w, const struct map_op *op, struct err *e)
{
    uint64_t dim = w->boxes.shape.dim[op->axis], from, to;
    struct axis_piece piece = {.step = 1};
    int ret = work_count(w, op->axis, op->from, 0, &from, e);

    if (ret == 0)
        ret = work_count(w, op->axis, op->to, dim, &to, e);
    if (ret < 0)
        return ret;
    if (from > to || to > dim)
        return err_set(e, EINVAL,
                       "a cut from %" PRIu64 " to %" PRIu64 " of an axis of %" PRIu64,
                       from, to, dim);
    piece.from = from;
    piece.count = to - from;
    return boxes_select(&w->boxes, op->axis, &piece, piece.count ? 1 : 0, piece.count,
                        e);
}

static int do_transpose(struct work *w, const struct map_op *op, struct err *e)
{
    uint32_t nd = w->boxes.shape.nd, reversed[SHAPE_MAX_DIMS];

    if (op->order && op->norder != nd)
        return err_set(e, EINVAL, "\"transpose\" of %u axes, the tensor has %u",
                       op->norder, nd);
    for (uint32_t k = 0; k < nd; k++)
        reversed[k] = nd - 1 - k;
    boxes_permute(&w->boxes, op->order ? op->order : reversed);
    return 0;
}

static int do_interleave(struct work *w, const struct map_op *op, struct err *e)
{
    CLEANUP(piece_list_release) struct piece_list pieces = {0};
    struct interleave i = {.dim = w->boxes.shape.dim[op->axis],
                           .undo = op->kind == OP_DEINTERLEAVE};
    int ret = work_count(w, op->axis, op->groups, 1, &i.groups, e);

    if (ret == 0)
        ret = work_count(w, op->axis, op->block, 1, &i.block, e);
    if (ret == 0)
        ret = shares_interleave(&i, &pieces, e);
    return ret == 0 ? boxes_select(&w->boxes, op->axis, pieces.at, pieces.n, i.dim, e)
                    : ret;
}

int work_op(struct work *w, const struct map_op *op, struct err *e)
{
    if (op->kind == OP_TRANSPOSE)
        return do_transpose(w, op, e);
    TRY(work_axis(w, op->axis, e));
    return op->kind == OP_CUT ? do_cut(w, op, e) : do_interleave(w, op, e);
}

/* ---- split ---- */

/* Rows of each part in each group; a part that does not say takes an equal share. */
static int part_rows(const struct work *w, uint64_t group, size_t i, uint64_t *out,
                     struct err *e)
{
    const struct map_rule *rule = w->rule;
    int ret;

    if (!rule->part[i].rows && group % rule->npart != 0)
        return err_set(e, EINVAL, "%" PRIu64 " elements are not %zu equal parts", group,
                       rule->npart);
    ret = work_count(w, rule->axis, rule->part[i].rows, group / rule->npart, out, e);
    if (ret == 0 && *out > group)
        return err_set(e, EINVAL,
                       "part %zu has %" PRIu64 " elements of groups of %" PRIu64, i + 1,
                       *out, group);
    return ret;
}

static int put_part(const struct work *whole, const struct share *share, size_t i,
                    struct err *e)
{
    CLEANUP(piece_list_release) struct piece_list pieces = {0};
    struct work w = *whole;
    uint32_t axis = w.rule->axis;
    int ret = shares_take(share, &pieces, e);

    if (ret == 0)
        ret = boxes_select(&w.boxes, axis, pieces.at, pieces.n,
                           share->groups * share->rows, e);
    return ret == 0 ? work_put(&w, w.rule->part[i].key, e) : ret;
}

/* The parts together must be the axis: what is to be left out, a cut says. */
static int put_split(const struct work *w, struct err *e)
{
    const struct map_rule *rule = w->rule;
    struct share share = {0};
    uint64_t dim;
    int ret = work_axis(w, rule->axis, e);

    if (ret == 0)
        ret = work_count(w, rule->axis, rule->groups, 1, &share.groups, e);
    if (ret < 0)
        return ret;
    dim = w->boxes.shape.dim[rule->axis];
    if (share.groups == 0 || dim % share.groups != 0)
        return err_set(e, EINVAL, "%" PRIu64 " elements are not %" PRIu64 " groups",
                       dim, share.groups);
    share.group = dim / share.groups;
    for (size_t i = 0; ret == 0 && i < rule->npart; i++) {
        ret = part_rows(w, share.group, i, &share.rows, e);
        if (ret == 0 && share.rows > share.group - share.at)
            ret = err_set(e, EINVAL, "the parts are more than groups of %" PRIu64,
                          share.group);
        if (ret == 0)
            ret = put_part(w, &share, i, e);
        share.at += share.rows;
    }
    if (ret == 0 && share.at != share.group)
        ret = err_set(e, EINVAL,
                      "the parts are %" PRIu64 " elements of groups of %" PRIu64,
                      share.at, share.group);
    return ret;
}

/* ---- a tensor by itself: operations, then "to" or "split" ---- */

static int put_result(const struct work *w, struct err *e)
{
    return w->rule->kind == RULE_SPLIT ? put_split(w, e) : work_put(w, w->rule->to, e);
}

static int run_ops(struct work *w, size_t at, struct err *e);

/*
 * A tensor without elements may have any number of indices along an axis. Real results have
 * a few KiB at least (a layer's norm), of the largest models there are some 100,000.
 */
static int allow_unstack(struct filter *f, uint64_t dim, struct err *e)
{
    uint64_t most = UNSTACK_FREE + f->bytes / UNSTACK_BYTES;

    if (dim > most - MIN(most, f->unstacked))
        return err_set(e, E2BIG,
                       "\"unstack\" of an axis of %" PRIu64
                       ": more than %d tensors and "
                       "one for each %d bytes would come of it",
                       dim, UNSTACK_FREE, UNSTACK_BYTES);
    f->unstacked += dim;
    return 0;
}

/* One tensor an index of the axis. Not deeper than the map has operations. */
static int unstack(struct work *w, size_t at, struct err *e)
{
    const struct map_op *op = &w->rule->op[at];
    uint64_t dim;
    int ret = work_axis(w, op->axis, e);

    dim = ret == 0 ? w->boxes.shape.dim[op->axis] : 0;
    if (ret == 0)
        ret = allow_unstack(w->f, dim, e);
    for (uint64_t i = 0; ret == 0 && i < dim; i++) {
        const struct axis_piece piece = {.from = i, .step = 1, .count = 1};
        struct work one = *w;

        ret = capture_bind(&one.captures, op->as, i, e);
        if (ret == 0)
            ret = boxes_select(&one.boxes, op->axis, &piece, 1, 1, e);
        if (ret < 0)
            break;
        boxes_drop_axis(&one.boxes, op->axis);
        ret = run_ops(&one, at + 1, e);
    }
    return ret;
}

/* Where the key has the index already (a tensor a layer), nothing is to be done for it. */
static bool has_index(const struct work *w, const struct map_op *op)
{
    return op->as && capture_find(&w->captures, op->as, strlen(op->as)) != NULL;
}

/* A further name for a number of the key, with something added; where the key has it. */
static int shift(struct work *w, const struct map_op *op, struct err *e)
{
    const struct capture *of = capture_find(&w->captures, op->of, strlen(op->of));
    struct scope s = work_scope(w, 0);
    uint64_t number, by;
    int ret;

    if (!of)
        return 0;
    if (!capture_number(of, &number))
        return err_set(e, EINVAL, "\"shift\": {%s} is \"%.*s\", which is no number",
                       op->of, (int)of->len, of->text);
    ret = scope_count(&s, op->by, 0, &by, e);
    if (ret == 0 && add_overflows(number, by, &number))
        ret = err_set(e, ERANGE, "\"shift\": {%s} passes 2^64", op->as);
    return ret == 0 ? capture_bind(&w->captures, op->as, number, e) : ret;
}

/* The operations from `at` on, and what the rule makes of the result. */
static int run_ops(struct work *w, size_t at, struct err *e)
{
    int ret = 0;

    for (; ret == 0 && at < w->rule->nop; at++) {
        const struct map_op *op = &w->rule->op[at];

        if (has_index(w, op))
            continue;
        if (op->kind == OP_UNSTACK)
            return unstack(w, at, e);
        ret = op->kind == OP_SHIFT ? shift(w, op, e) : work_op(w, op, e);
    }
    return ret == 0 ? put_result(w, e) : ret;
}

int work_run(struct work *w, struct err *e)
{
    return run_ops(w, 0, e);
}
