/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_merge.c - Megatron-LM's ranks put together, tensor by tensor. */
#include "index/formats/megatron/megatron_ranks.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "index/formats/format.h"
#include "index/formats/megatron/megatron_rules.h"
#include "index/formats/torch/torch_zip.h"
#include "index/sink.h"

/* One tensor on its way to the sink. */
struct merge {
    struct legacy *l;
    uint32_t p, v, e;            /* stage, model of it, expert rank */
    const struct rank_tensor *x; /* as the first tensor rank has it */
    struct megatron_name name;
    const struct rank_tensor **part; /* by tensor rank; nparts of them */
    struct rank **rank;
    uint32_t nparts;
    uint64_t rows; /* of the whole, or columns: along the axis that was cut */
};

/* ---- names ---- */

static const struct layer_kind *kind_of(const struct legacy *l, const char *name,
                                        size_t len)
{
    for (const struct layer_kind *k = l->kinds; k; k = k->next)
        if (k->len == len && memcmp(k->prefix, name, len) == 0)
            return k;
    return NULL;
}

/* Layers and experts are numbered from 0 on each rank. */
static uint64_t global_layer(const struct merge *m)
{
    const struct layer_kind *k = kind_of(m->l, m->x->name, m->name.layer.at);

    return (k ? k->first[m->v * m->l->pipeline + m->p] : 0) + m->name.layer.value;
}

static uint64_t global_expert(const struct merge *m)
{
    return m->e * (m->l->args.experts / m->l->expert) + m->name.expert.value;
}

static int write_key(const struct merge *m, struct buf *out, struct err *e)
{
    const struct megatron_number *layer = &m->name.layer, *expert = &m->name.expert;
    const char *name = m->x->name;
    size_t at = 0;

    if (layer->len > 0) {
        buf_add(out, name, layer->at);
        buf_addf(out, "%" PRIu64, global_layer(m));
        at = layer->at + layer->len;
    }
    if (expert->len > 0 && expert->at >= at) {
        buf_add(out, name + at, expert->at - at);
        buf_addf(out, "%" PRIu64, global_expert(m));
        at = expert->at + expert->len;
    }
    buf_add(out, name + at, m->x->len - at);
    return buf_failed(out) ? err_nomem(e) : 0;
}

static bool ends_in(const struct rank_tensor *x, const char *end)
{
    size_t n = strlen(end);

    return x->len >= n && memcmp(x->name + x->len - n, end, n) == 0;
}

/*
 * The last stage has a copy of the embedding of the first one, as the head, where the two
 * are not told to differ.
 */
static bool is_tied_copy(const struct merge *m)
{
    return m->l->pipeline > 1 && m->p + 1 == m->l->pipeline && !m->l->args.untied &&
           (ends_in(m->x, "output_layer.weight") ||
            ends_in(m->x, "word_embeddings_for_head.weight"));
}

/* ---- rules ---- */

/* How the tensor is put together here; MEGATRON_UNKNOWN: not at all. */
static enum megatron_rule rule_of(const struct merge *m)
{
    const struct legacy *l = m->l;
    const struct legacy_args *args = &l->args;
    enum megatron_rule rule = m->name.rule;

    if (m->name.expert.len > 0 && l->expert > 1 &&
        (args->experts == 0 || args->experts % l->expert != 0))
        return MEGATRON_UNKNOWN;
    if (rule == MEGATRON_QKV && l->version < 2.0)
        return MEGATRON_QKV;
    if (l->tensor == 1)
        return MEGATRON_SAME;
    if (m->name.expert.len > 0 && args->expert_tensor > 0 &&
        args->expert_tensor != l->tensor)
        return MEGATRON_UNKNOWN;
    /* With fewer groups than ranks keys and values are repeated. */
    if (rule == MEGATRON_QKV && args->groups > 0 && args->groups < l->tensor)
        return MEGATRON_UNKNOWN;
    if (rule == MEGATRON_QKV || (rule == MEGATRON_FC1 && !args->gated))
        return MEGATRON_ROWS;
    return rule;
}

/* ---- chunks ---- */

/* After sink_fault(), which fails only for lack of memory. */
static int faulted(int r, struct err *e)
{
    return r < 0 ? err_nomem(e) : 0;
}

/* Rows [row, row + count) of a part, every `step`-th one, to row `to` of the whole. */
static int add_rows(const struct merge *m, uint32_t t, uint64_t row, uint64_t step,
                    uint64_t count, uint64_t to, struct err *e)
{
    uint64_t start[SHAPE_MAX_DIMS] = {to};
    struct torch_tensor x;

    rank_tensor_open(m->part[t], &x);
    x.storage_offset += row * (uint64_t)x.stride[0];
    x.stride[0] *= (int64_t)step;
    x.shape.dim[0] = count;
    return torch_file_chunk(m->l->sink, &m->rank[t]->file, &x, start, e);
}

static int add_whole(const struct merge *m, uint32_t t, uint32_t axis, uint64_t to,
                     struct err *e)
{
    uint64_t start[SHAPE_MAX_DIMS] = {0};
    struct torch_tensor x;

    rank_tensor_open(m->part[t], &x);
    start[axis] = to;
    return torch_file_chunk(m->l->sink, &m->rank[t]->file, &x, start, e);
}

static int add_joined(const struct merge *m, uint32_t axis, struct err *e)
{
    uint64_t to = 0;

    for (uint32_t t = 0; t < m->nparts; t++) {
        if (add_whole(m, t, axis, to, e) < 0)
            return -e->code;
        to += m->part[t]->dim[axis];
    }
    return 0;
}

/* Each rank has [w; v]: the whole is all w and then all v. */
static int add_gated(const struct merge *m, struct err *e)
{
    uint64_t to = 0;

    for (uint32_t t = 0; t < m->nparts; t++)
        if (m->part[t]->dim[0] % 2 != 0)
            return faulted(sink_fault(m->l->sink,
                                      "%s has an odd number of rows, and no two halves",
                                      m->rank[t]->dir),
                           e);
    for (uint32_t t = 0; t < m->nparts; t++) {
        uint64_t half = m->part[t]->dim[0] / 2;

        if (add_rows(m, t, 0, 1, half, to, e) < 0 ||
            add_rows(m, t, half, 1, half, m->rows / 2 + to, e) < 0)
            return -e->code;
        to += half;
    }
    return 0;
}

/*
 * Rows of query, key and value of each head: [3, heads, d] in version 0, [heads, d, 3] in
 * 1.0, [heads, 3, d] since.
 */
static int add_old_qkv(const struct merge *m, uint32_t t, uint64_t heads, uint64_t to,
                       struct err *e)
{
    uint64_t d = m->part[t]->dim[0] / (3 * heads);
    bool first = m->l->version < 1.0;

    for (uint64_t h = 0; h < heads; h++) {
        for (uint64_t c = 0; c < 3; c++) {
            uint64_t row = first ? (c * heads + h) * d : h * d * 3 + c;

            if (add_rows(m, t, row, first ? 1 : 3, d, to + (h * 3 + c) * d, e) < 0)
                return -e->code;
        }
    }
    return 0;
}

static int add_old_qkvs(const struct merge *m, struct err *e)
{
    uint64_t heads = m->l->args.heads / m->nparts, to = 0;

    if (heads == 0 || m->l->args.heads % m->nparts != 0)
        return faulted(
            sink_fault(m->l->sink,
                       "checkpoint version %g, and args do not tell how many "
                       "attention heads a rank has",
                       m->l->version),
            e);
    for (uint32_t t = 0; t < m->nparts; t++) {
        uint64_t rows = m->part[t]->dim[0];

        if (rows % 3 != 0 || rows / 3 % heads != 0 || rows == 0)
            return faulted(sink_fault(m->l->sink,
                                      "its rows in %s are not those of %" PRIu64
                                      " heads",
                                      m->rank[t]->dir, heads),
                           e);
        if (add_old_qkv(m, t, heads, to, e) < 0)
            return -e->code;
        to += rows;
    }
    return 0;
}

static int add_chunks(const struct merge *m, enum megatron_rule rule, struct err *e)
{
    switch (rule) {
    case MEGATRON_ROWS:
        return add_joined(m, 0, e);
    case MEGATRON_COLUMNS:
        return add_joined(m, 1, e);
    case MEGATRON_FC1:
        return add_gated(m, e);
    case MEGATRON_QKV:
        return add_old_qkvs(m, e);
    case MEGATRON_SAME:
    case MEGATRON_UNKNOWN:
        break;
    }
    return 0; /* lie in one place: add_alone() */
}

/* ---- the whole tensor ---- */

static uint32_t axis_of(enum megatron_rule rule)
{
    return rule == MEGATRON_COLUMNS ? 1 : 0;
}

/* Finds each rank's part; *why is set when one is missing or damaged. */
static void find_parts(struct merge *m, char *why, size_t size)
{
    for (uint32_t t = 0; t < m->nparts; t++) {
        struct rank *r = legacy_rank(m->l, t, m->p, m->e);

        m->rank[t] = r;
        m->part[t] = r && !r->err.code
                         ? rank_tensors_find(&r->model[m->v], m->x->name, m->x->len)
                         : NULL;
        if (why[0])
            continue;
        if (!r)
            snprintf(why, size, "tensor rank %" PRIu32 " is missing", t);
        else if (r->err.code)
            snprintf(why, size, "%.60s: %.150s", r->path, r->err.text);
        else if (!m->part[t])
            snprintf(why, size, "%.60s does not have it", r->path);
        else if (m->part[t]->why)
            snprintf(why, size, "%.60s: %.150s", r->path, m->part[t]->why);
    }
}

/* Are all parts alike but along the axis? Adds up what they have of it. */
static bool parts_fit(struct merge *m, enum megatron_rule rule)
{
    uint32_t axis = axis_of(rule);
    const struct rank_tensor *x = m->part[0];

    m->rows = 0;
    for (uint32_t t = 0; t < m->nparts; t++) {
        const struct rank_tensor *y = m->part[t];

        if (y->dtype != x->dtype || y->nd != x->nd || y->nd <= axis || y->packed ||
            add_overflows(m->rows, y->dim[axis], &m->rows))
            return false;
        for (uint32_t k = 0; k < y->nd; k++)
            if (k != axis && y->dim[k] != x->dim[k])
                return false;
    }
    return true;
}

/* Begins the tensor: 1 when it was there already. */
static int begin(struct merge *m, const struct shape *shape, enum dtype dtype,
                 struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    struct sink_tensor t = {.dtype = dtype, .shape = shape, .role = ROLE_MODEL};
    int r;

    if (write_key(m, &key, e) < 0)
        return -e->code;
    t.key = key.data;
    t.key_len = key.len;
    r = sink_tensor_begin(m->l->sink, &t, e);
    if (r != -EEXIST)
        return r;
    /* Stages share it: the first one's is shown. */
    *e = (struct err){0};
    m->l->tied++;
    return 1;
}

static int add_broken(struct merge *m, enum megatron_rule rule, const char *why,
                      struct err *e)
{
    static const struct shape none = {.nd = 1};
    struct torch_tensor x;
    uint32_t axis = axis_of(rule);
    int r;

    rank_tensor_open(m->x, &x);
    if (rule != MEGATRON_SAME && axis < x.shape.nd &&
        mul_overflows(x.shape.dim[axis], m->nparts, &x.shape.dim[axis]))
        x.shape.dim[axis] = 0;
    r = m->x->why ? begin(m, &none, DTYPE_U8, e) : begin(m, &x.shape, x.dtype, e);
    if (r != 0)
        return MIN(r, 0);
    if (faulted(sink_fault(m->l->sink, "%s", why), e) < 0)
        return -e->code;
    return sink_tensor_end(m->l->sink, e);
}

/* All of it lies in one place. */
static int add_alone(struct merge *m, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    struct sink_tensor t = {.role = ROLE_MODEL};
    struct torch_tensor x;
    int r;

    if (write_key(m, &key, e) < 0)
        return -e->code;
    t.key = key.data;
    t.key_len = key.len;
    rank_tensor_open(m->part[0], &x);
    r = torch_file_tensor(m->l->sink, &m->rank[0]->file, &x, &t, e);
    if (r != -EEXIST)
        return r;
    *e = (struct err){0};
    m->l->tied++;
    return 0;
}

static int add_merged(struct merge *m, enum megatron_rule rule, struct err *e)
{
    struct torch_tensor x;
    int r;

    rank_tensor_open(m->part[0], &x);
    x.shape.dim[axis_of(rule)] = m->rows;
    r = begin(m, &x.shape, x.dtype, e);
    if (r != 0)
        return MIN(r, 0);
    if (add_chunks(m, rule, e) < 0)
        return -e->code;
    return sink_tensor_end(m->l->sink, e);
}

static int merge_parts(struct merge *m, enum megatron_rule rule, struct err *e)
{
    char why[256] = "";

    m->nparts = rule == MEGATRON_SAME ? 1 : m->l->tensor;
    find_parts(m, why, sizeof why);
    if (!why[0] && rule == MEGATRON_SAME)
        return add_alone(m, e);
    if (!why[0] && !parts_fit(m, rule))
        snprintf(why, sizeof why,
                 "its parts in the files of the tensor ranks do not fit together");
    return why[0] ? add_broken(m, rule, why, e) : add_merged(m, rule, e);
}

/* ---- as the ranks have it ---- */

/* A tensor of which only the name is known. */
static int add_unreadable(const struct merge *m, struct sink_tensor *t, const char *why,
                          struct err *e)
{
    static const struct shape none = {.nd = 1};

    t->dtype = DTYPE_U8;
    t->shape = &none;
    if (sink_tensor_begin(m->l->sink, t, e) < 0 ||
        faulted(sink_fault(m->l->sink, "%s", why), e) < 0)
        return -e->code;
    return sink_tensor_end(m->l->sink, e);
}

static int add_raw(struct merge *m, const struct rank *r, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    struct sink_tensor t = {.role = ROLE_OTHER};
    const struct rank_tensor *x =
        rank_tensors_find(&r->model[m->v], m->x->name, m->x->len);
    struct torch_tensor open;

    if (!x)
        return 0;
    buf_addf(&key, "%s:model", r->path);
    if (m->l->several)
        buf_addf(&key, "%" PRIu32, m->v);
    buf_addc(&key, '.');
    buf_add(&key, x->name, x->len);
    if (buf_failed(&key))
        return err_nomem(e);
    t.key = key.data;
    t.key_len = key.len;
    if (x->why)
        return add_unreadable(m, &t, x->why, e);
    rank_tensor_open(x, &open);
    return torch_file_tensor(m->l->sink, &r->file, &open, &t, e);
}

static int add_raws(struct merge *m, struct err *e)
{
    for (uint32_t t = 0; t < m->l->tensor; t++) {
        const struct rank *r = legacy_rank(m->l, t, m->p, m->e);

        if (r && !r->err.code && add_raw(m, r, e) < 0)
            return -e->code;
    }
    return 0;
}

static void note_unknown(struct merge *m)
{
    if (m->l->unknown++ == 0)
        snprintf(m->l->first_unknown, sizeof m->l->first_unknown, "%.*s",
                 (int)MIN(m->x->len, (size_t)100), m->x->name);
}

/* ---- stages ---- */

static int merge_tensor(struct merge *m, const struct rank_tensor *x, struct err *e)
{
    enum megatron_rule rule;

    m->x = x;
    megatron_name(x->name, x->len, &m->name);
    /* What is no expert's is the same on all expert ranks. */
    if (m->e > 0 && m->name.expert.len == 0)
        return 0;
    if (ends_in(x, "_extra_state"))
        return add_raws(m, e);
    if (is_tied_copy(m)) {
        m->l->tied++;
        return 0;
    }
    rule = rule_of(m);
    if (rule != MEGATRON_UNKNOWN)
        return merge_parts(m, rule, e);
    note_unknown(m);
    return add_raws(m, e);
}

static int merge_model(struct merge *m, struct err *e)
{
    const struct rank *first = legacy_rank(m->l, 0, m->p, m->e);
    const struct rank_tensors *model;

    if (!first || first->err.code)
        return err_set(e, EBADMSG,
                       "tensor rank 0 of pipeline rank %" PRIu32
                       " cannot be read: nothing tells what that stage has%s%s",
                       m->p, first ? ": " : "", first ? first->err.text : "");
    model = &first->model[m->v];
    for (size_t i = 0; i < model->count; i++)
        if (merge_tensor(m, &model->tensor[i], e) < 0)
            return -e->code;
    return 0;
}

int legacy_merge_stage(struct legacy *l, uint32_t p, struct err *e)
{
    struct merge m = {.l = l, .p = p};

    m.part = reallocarray(NULL, l->tensor, sizeof *m.part);
    m.rank = reallocarray(NULL, l->tensor, sizeof *m.rank);
    if (!m.part || !m.rank)
        err_nomem(e);
    for (m.v = 0; e->code == 0 && m.v < l->models; m.v++)
        for (m.e = 0; e->code == 0 && m.e < l->expert; m.e++)
            merge_model(&m, e);
    free(m.part);
    free(m.rank);
    return -e->code;
}
