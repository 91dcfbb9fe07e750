/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_cut.c - how tensor-parallel ranks have cut a parameter. */
#include "index/formats/deepspeed/deepspeed_cut.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/deepspeed/deepspeed_scan.h"

enum {
    MAX_SUBS = 64,  /* sub-parameters: q, k and v; gate and up; Mamba has five */
    BOX_EFFORT = 64 /* a box, in steps of patterns */
};

static const uint64_t MAX_EFFORT = UINT64_C(1) << 29; /* real notes take 2^22 */

int ds_cut_refuse(struct ds_cut *out, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(out->why, sizeof out->why, fmt, ap);
    va_end(ap);
    return 0;
}

/* ---- boxes ---- */

static int spend(struct ds_notes *n, uint64_t effort, struct err *e)
{
    n->effort += effort;
    return n->effort <= MAX_EFFORT
               ? 0
               : err_set(e, ENOTSUP,
                         "universal_checkpoint_info tells of more pieces and patterns "
                         "than can be looked through");
}

int ds_cut_room(struct ds_notes *n, struct arena *a, uint32_t nd, size_t count,
                struct ds_boxes *out, struct err *e)
{
    *out = (struct ds_boxes){
        .box = arena_array(a, MAX(count, (size_t)1), sizeof *out->box),
        .number = arena_array(a, count * 3 * nd + 1, sizeof *out->number),
    };
    if (!out->box || !out->number)
        return err_nomem(e);
    for (size_t i = 0; i < count; i++) {
        const uint64_t *number = out->number + i * 3 * nd;

        out->box[i] = (struct rank_box){number, number + nd, number + 2 * (size_t)nd};
    }
    out->all = (struct rank_boxes){.nd = nd, .box = out->box};
    return spend(n, BOX_EFFORT * (uint64_t)(count + 1), e);
}

void ds_cut_box(struct ds_boxes *b, const uint64_t *from, const uint64_t *to,
                const uint64_t *size)
{
    uint32_t nd = b->all.nd;
    uint64_t *number = b->number + b->all.count * 3 * nd;

    for (uint32_t k = 0; k < nd; k++) {
        if (size[k] == 0)
            return;
        number[k] = from[k];
        number[nd + k] = to[k];
        number[2 * (size_t)nd + k] = size[k];
    }
    b->all.count++;
}

/* ---- sub-parameters along one dimension ---- */

/*
 * The whole is `count` sub-parameters one behind the other along `axis`, and of each every
 * rank has a run of width[i * ranks + rank], in the order of ranks. One sub-parameter:
 * pieces simply follow each other.
 */
struct subs {
    uint32_t axis;
    uint32_t count;
    uint64_t *width;
    uint64_t *before; /* what is before each, of the whole */
};

static int box_rank(struct ds_notes *n, struct arena *a, const struct subs *s,
                    uint32_t rank, struct ds_cut *out, struct err *e)
{
    const struct shape *piece = &out->piece[rank];
    uint64_t from[SHAPE_MAX_DIMS] = {0}, to[SHAPE_MAX_DIMS] = {0};
    uint64_t size[SHAPE_MAX_DIMS];

    TRY(ds_cut_room(n, a, piece->nd, s->count, &out->boxes[rank], e));
    memcpy(size, piece->dim, piece->nd * sizeof *size);
    for (uint32_t i = 0; i < s->count; i++) {
        size[s->axis] = s->width[i * n->ranks + rank];
        to[s->axis] = s->before[i * n->ranks + rank];
        ds_cut_box(&out->boxes[rank], from, to, size);
        from[s->axis] += size[s->axis];
    }
    return 0;
}

/* `piece` and `whole` but for its axis are set; widths of a rank add up to its piece. */
static int join(struct ds_notes *n, struct arena *a, const struct subs *s,
                struct ds_cut *out, struct err *e)
{
    struct err why = {0};
    uint64_t whole = 0, ignored;

    for (uint32_t k = 0; k < s->count * n->ranks; k++) {
        s->before[k] = whole;
        if (add_overflows(whole, s->width[k], &whole))
            return ds_cut_refuse(out, "its pieces are more than 2^64 elements long");
    }
    out->whole.dim[s->axis] = whole;
    if (shape_elements(&out->whole, &ignored, &why) < 0)
        return ds_cut_refuse(out, "its shape: %s", why.text);
    out->kind = DS_CUT_JOINED;
    for (uint32_t r = 0; r < n->ranks; r++)
        TRY(box_rank(n, a, s, r, out, e));
    return 0;
}

static int new_widths(const struct ds_notes *n, struct arena *a, uint32_t count,
                      struct subs *s, struct err *e)
{
    s->count = count;
    s->width = arena_array(a, (size_t)count * n->ranks, sizeof *s->width);
    s->before = arena_array(a, (size_t)count * n->ranks, sizeof *s->before);
    return s->width && s->before ? 0 : err_nomem(e);
}

/* Are all alike but along the axis? */
static bool alike(const struct ds_notes *n, const struct shape *local, uint32_t axis)
{
    for (uint32_t r = 0; r < n->ranks; r++) {
        if (local[r].nd != local[0].nd || local[r].nd <= axis)
            return false;
        for (uint32_t k = 0; k < local[r].nd; k++)
            if (k != axis && local[r].dim[k] != local[0].dim[k])
                return false;
    }
    return true;
}

/* Rows or columns, in `count` equal blocks each. */
static int cut_blocks(struct ds_notes *n, struct arena *a, struct shape *local,
                      uint32_t axis, uint32_t count, struct ds_cut *out, struct err *e)
{
    struct subs s = {.axis = axis};

    if (!alike(n, local, axis))
        return ds_cut_refuse(out, "the ranks' pieces do not fit along dimension %u",
                             axis);
    TRY(new_widths(n, a, count, &s, e));
    for (uint32_t r = 0; r < n->ranks; r++) {
        if (local[r].dim[axis] % count != 0)
            return ds_cut_refuse(out,
                                 "a rank's piece has %" PRIu64 " rows, which are "
                                 "not two equal parts",
                                 local[r].dim[axis]);
        for (uint32_t i = 0; i < count; i++)
            s.width[i * n->ranks + r] = local[r].dim[axis] / count;
    }
    out->piece = local;
    out->whole = local[0];
    return join(n, a, &s, out, e);
}

/* ---- copies ---- */

static int cut_copies(struct ds_notes *n, struct arena *a, struct shape *local,
                      enum ds_cut_kind kind, struct ds_cut *out, struct err *e)
{
    static const uint64_t zeros[SHAPE_MAX_DIMS];

    for (uint32_t r = 1; r < n->ranks; r++)
        if (!shape_equal(&local[r], &local[0]))
            return ds_cut_refuse(out, "the ranks have it in different shapes");
    out->kind = kind;
    out->piece = local;
    out->whole = local[0];
    for (uint32_t r = 0; r < n->ranks; r++) {
        TRY(ds_cut_room(n, a, local[r].nd, 1, &out->boxes[r], e));
        ds_cut_box(&out->boxes[r], zeros, zeros, local[r].dim);
    }
    return 0;
}

/* ---- parameter_with_sub_params ---- */

static uint64_t elements_of(const struct shape *s)
{
    struct err ignored = {0};
    uint64_t n = 0;

    return shape_elements(s, &n, &ignored) < 0 ? UINT64_MAX : n;
}

/* What is noted of one such parameter, besides the widths. */
struct view {
    struct shape shape; /* a size that is to be found is 0, and `open` its number */
    uint32_t open, axis;
    bool has_open;
    struct pv sizes; /* along the axis: a number, or a list of them */
};

static bool is_list(const struct pv *v)
{
    return v->kind == PV_LIST || v->kind == PV_TUPLE;
}

static bool take_view(const struct pv *note, struct view *out)
{
    struct pv shape, v;
    uint64_t axis;

    *out = (struct view){0};
    if (!ds_get(note, "partition_dim", &v) || !pv_u64(&v, &axis) ||
        !ds_get(note, "shape", &shape) || !is_list(&shape) ||
        axis >= pv_count(&shape) || pv_count(&shape) > SHAPE_MAX_DIMS)
        return false;
    out->axis = (uint32_t)axis;
    out->shape.nd = (uint32_t)pv_count(&shape);
    for (uint32_t k = 0; k < out->shape.nd; k++) {
        v = pv_at(&shape, k);
        if (k == axis) {
            out->sizes = v;
        } else if (v.kind == PV_INT && v.i == -1 && !out->has_open) {
            out->has_open = true;
            out->open = k;
        } else if (!pv_u64(&v, &out->shape.dim[k])) {
            return false;
        }
    }
    return is_list(&out->sizes) || (out->sizes.kind == PV_INT && out->sizes.i > 0);
}

/* Widths as they are noted since version 0.4: a list of one a rank, for each part. */
static bool take_widths(const struct ds_notes *n, const struct pv *lists,
                        struct subs *s)
{
    for (uint32_t i = 0; i < s->count; i++) {
        struct pv list = pv_at(lists, i);

        if (!is_list(&list) || pv_count(&list) != n->ranks)
            return false;
        for (uint32_t r = 0; r < n->ranks; r++) {
            struct pv v = pv_at(&list, r);

            if (!pv_u64(&v, &s->width[i * n->ranks + r]))
                return false;
        }
    }
    return true;
}

/* Is the sum of each part's widths what is noted of it? */
static bool sums_hold(const struct ds_notes *n, const struct view *v,
                      const struct subs *s)
{
    for (uint32_t i = 0; i < s->count; i++) {
        struct pv one = is_list(&v->sizes) ? pv_at(&v->sizes, i) : v->sizes;
        uint64_t sum = 0, want;

        for (uint32_t r = 0; r < n->ranks; r++)
            if (add_overflows(sum, s->width[i * n->ranks + r], &sum))
                return false;
        if (!pv_u64(&one, &want) || want != sum)
            return false;
    }
    return true;
}

/* Before version 0.4: sizes of the parts, or how many equal ones; cut evenly. */
static bool even_widths(const struct ds_notes *n, const struct view *v,
                        struct shape *local, struct subs *s)
{
    uint64_t whole = 0;

    for (uint32_t r = 0; !is_list(&v->sizes) && r < n->ranks; r++)
        if (local[r].nd <= v->axis ||
            add_overflows(whole, local[r].dim[v->axis], &whole))
            return false;
    for (uint32_t i = 0; i < s->count; i++) {
        struct pv one = is_list(&v->sizes) ? pv_at(&v->sizes, i) : v->sizes;
        uint64_t size = whole / s->count;

        if (is_list(&v->sizes) ? !pv_u64(&one, &size) : whole % s->count != 0)
            return false;
        if (size % n->ranks != 0)
            return false;
        for (uint32_t r = 0; r < n->ranks; r++)
            s->width[i * n->ranks + r] = size / n->ranks;
    }
    return true;
}

/* The piece of each rank, as the noted view of the whole sees it. */
static bool view_pieces(const struct ds_notes *n, struct view *v, const struct subs *s,
                        struct shape *local, struct shape *piece)
{
    uint64_t total = 0, whole = 0, known = 1, all = 0;

    for (uint32_t r = 0; r < n->ranks; r++)
        if (add_overflows(total, elements_of(&local[r]), &total))
            return false;
    for (uint32_t k = 0; k < s->count * n->ranks; k++)
        if (add_overflows(whole, s->width[k], &whole))
            return false;
    v->shape.dim[v->axis] = whole;
    for (uint32_t k = 0; k < v->shape.nd; k++)
        if (!(v->has_open && k == v->open) &&
            mul_overflows(known, v->shape.dim[k], &known))
            return false;
    if (v->has_open) {
        if (known == 0 || total % known != 0)
            return false;
        v->shape.dim[v->open] = total / known;
    }
    for (uint32_t r = 0; r < n->ranks; r++) {
        piece[r] = v->shape;
        piece[r].dim[v->axis] = 0;
        for (uint32_t i = 0; i < s->count; i++)
            piece[r].dim[v->axis] += s->width[i * n->ranks + r];
        if (elements_of(&piece[r]) != elements_of(&local[r]) ||
            add_overflows(all, elements_of(&piece[r]), &all))
            return false;
    }
    return all == total;
}

static int cut_subs(struct ds_notes *n, struct arena *a, const struct ds_pattern *p,
                    struct shape *local, struct ds_cut *out, struct err *e)
{
    struct shape *piece = arena_array(a, n->ranks, sizeof *piece);
    char text[600] = "";
    struct view v;
    struct subs s = {0};
    struct pv lists = {.kind = PV_NONE};
    uint64_t count;

    if (!piece)
        return err_nomem(e);
    if (!take_view(&n->value[DS_NOTE_SUBS][p->number], &v))
        return ds_cut_refuse(out, "parameter_with_sub_params does not tell its view");
    s.axis = v.axis;
    snprintf(text, sizeof text, "%.*s", (int)MIN(p->len, sizeof text - 1), p->text);
    if (n->version >= 0.4 && (n->widths.kind == PV_NONE ||
                              !ds_get(&n->widths, text, &lists) || !is_list(&lists)))
        return ds_cut_refuse(out, "sub_param_shard_widths does not tell its widths");
    count = lists.kind != PV_NONE ? pv_count(&lists)
            : is_list(&v.sizes)   ? pv_count(&v.sizes)
                                  : (uint64_t)v.sizes.i;
    if (count == 0 || count > MAX_SUBS ||
        (is_list(&v.sizes) && count != pv_count(&v.sizes)))
        return ds_cut_refuse(out, "it is of %" PRIu64 " sub-parameters", count);
    TRY(new_widths(n, a, (uint32_t)count, &s, e));
    if (lists.kind != PV_NONE ? !take_widths(n, &lists, &s) || !sums_hold(n, &v, &s)
                              : !even_widths(n, &v, local, &s))
        return ds_cut_refuse(out, "its sub-parameters' widths do not fit");
    if (!view_pieces(n, &v, &s, local, piece))
        return ds_cut_refuse(out, "the ranks' pieces are not of the noted widths");
    out->piece = piece;
    out->whole = v.shape;
    return join(n, a, &s, out, e);
}

/* ---- the vocabulary's padding ---- */

/* Leaves of the boxes what is in the first rows of the whole. */
static void clip_rows(struct ds_boxes *b, uint64_t rows)
{
    uint32_t nd = b->all.nd;
    size_t kept = 0;

    for (size_t i = 0; i < b->all.count; i++) {
        uint64_t *size = &b->number[(i * 3 + 2) * nd];

        if (b->box[i].to[0] >= rows)
            continue;
        size[0] = MIN(size[0], rows - b->box[i].to[0]);
        b->box[kept++] = (struct rank_box){b->box[i].from, b->box[i].to, size};
    }
    b->all.count = kept;
}

/* Rows past the vocabulary are padding, which the converter drops. */
static int drop_padding(struct ds_notes *n, struct ds_cut *out)
{
    if (!n->has_vocabulary || out->whole.nd < 2)
        return ds_cut_refuse(out, "the size of the vocabulary is not told");
    if (out->whole.dim[0] <= n->vocabulary)
        return 0;
    out->whole.dim[0] = n->vocabulary;
    for (uint32_t r = 0; r < n->ranks; r++)
        clip_rows(&out->boxes[r], n->vocabulary);
    return 0;
}

/* ---- what the notes say ---- */

/* Names of other characters could match otherwise than in Python. */
static bool is_plain(const char *name, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)name[i] < ' ' || (unsigned char)name[i] > '~')
            return false;
    return true;
}

static int refuse_unsupported(const struct ds_notes *n, const struct ds_pattern *p,
                              struct ds_cut *out)
{
    const struct pv *v = &n->value[DS_NOTE_UNSUPPORTED][p->number];
    const char *text = "no reason is noted";
    size_t len = strlen(text);

    if (v->kind == PV_STR)
        text = pv_bytes(v, &len);
    return ds_cut_refuse(out, "AutoTP noted that it cannot be joined: %.*s",
                         (int)MIN(len, (size_t)200), text);
}

static int cut_by(struct ds_notes *n, struct arena *a, enum ds_note kind,
                  const struct ds_pattern *p, struct shape *local, struct ds_cut *out,
                  struct err *e)
{
    switch (kind) {
    case DS_NOTE_AFFINE:
        return ds_cut_affine(n, a, &n->value[kind][p->number], local, out, e);
    case DS_NOTE_UNSUPPORTED:
        return refuse_unsupported(n, p, out);
    case DS_NOTE_SAME:
        return cut_copies(n, a, local, DS_CUT_SAME, out, e);
    case DS_NOTE_MEAN:
        return cut_copies(n, a, local, DS_CUT_MEAN, out, e);
    case DS_NOTE_HALVES:
        return cut_blocks(n, a, local, 0, 2, out, e);
    case DS_NOTE_SUBS:
        return cut_subs(n, a, p, local, out, e);
    case DS_NOTE_COLUMNS:
        return cut_blocks(n, a, local, 1, 1, out, e);
    case DS_NOTE_VOCABULARY:
    case DS_NOTES:
        break;
    }
    return cut_blocks(n, a, local, 0, 1, out, e);
}

/* All kinds are asked, as each pattern has to be some parameter's. */
static int ask(struct ds_notes *n, const char *name, size_t len,
               struct ds_pattern **found, unsigned *hits, struct err *e)
{
    for (unsigned k = 0; k < DS_NOTES; k++) {
        uint64_t effort = 0;

        hits[k] = ds_patterns_find(&n->kind[k], name, len, &effort, &found[k]);
        TRY(spend(n, effort, e));
    }
    return 0;
}

/*
 * AutoTP of DeepSpeed 0.18.9 to 0.19.3 noted nothing of what it had left alone, and until
 * 0.19.5 nothing of fused weights (qkv_proj, gate_up_proj), whose parts it cuts one by one
 * (module_inject/layers.py, collect_autotp_universal_checkpoint_info()).
 */
static int cut_unnoted(struct ds_notes *n, struct arena *a, const char *name,
                       size_t len, struct shape *local, struct ds_cut *out,
                       struct err *e)
{
    enum rank_rule rule = ds_cut_unnoted(n, name, len, local[0].nd);

    if (rule == RANK_SAME)
        return cut_copies(n, a, local, DS_CUT_SAME, out, e);
    out->by_name = rule == RANK_ROWS;
    if (out->by_name)
        return cut_blocks(n, a, local, 0, 1, out, e);
    return ds_cut_refuse(out,
                         "AutoTP of DeepSpeed 0.18.9 to 0.19.5 does not note how it "
                         "was cut");
}

int ds_cut_find(struct ds_notes *n, struct arena *a, const char *name, size_t len,
                struct shape *local, struct ds_cut *out, struct err *e)
{
    struct ds_pattern *found[DS_NOTES];
    unsigned hits[DS_NOTES], k = 0;

    *out = (struct ds_cut){.piece = local, .whole = local[0]};
    if (!is_plain(name, len))
        return ds_cut_refuse(out, "patterns are not held against names that are not "
                                  "ASCII");
    TRY(ask(n, name, len, found, hits, e));
    while (k < DS_NOTE_VOCABULARY && hits[k] == 0)
        k++;
    if (hits[k] > 1 || hits[DS_NOTE_VOCABULARY] > 1)
        return ds_cut_refuse(out, "two patterns of one kind match it");
    out->boxes = arena_array(a, n->ranks, sizeof *out->boxes);
    if (!out->boxes)
        return err_nomem(e);
    TRY(n->partial && k == DS_NOTE_VOCABULARY && hits[k] == 0
            ? cut_unnoted(n, a, name, len, local, out, e)
            : cut_by(n, a, (enum ds_note)k, found[k], local, out, e));
    return hits[DS_NOTE_VOCABULARY] && !out->why[0] ? drop_padding(n, out) : 0;
}

int ds_cut_by_rule(struct ds_notes *n, struct arena *a, enum rank_rule rule,
                   struct shape *local, struct ds_cut *out, struct err *e)
{
    struct rank_cut cut = rank_rule_cut(rule);

    *out = (struct ds_cut){.piece = local, .whole = local[0]};
    out->boxes = arena_array(a, n->ranks, sizeof *out->boxes);
    if (!out->boxes)
        return err_nomem(e);
    if (rule == RANK_SAME)
        return cut_copies(n, a, local, DS_CUT_SAME, out, e);
    return cut_blocks(n, a, local, cut.axis, cut.blocks, out, e);
}
