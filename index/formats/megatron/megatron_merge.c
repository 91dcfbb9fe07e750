/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_merge.c - Megatron-LM's ranks put together, tensor by tensor. */
#include "index/formats/megatron/megatron_ranks.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "index/formats/format.h"
#include "index/formats/megatron/megatron_mamba.h"
#include "index/formats/megatron/megatron_rules.h"
#include "index/formats/ranks/rank_merge.h"
#include "index/formats/torch/torch_zip.h"
#include "index/sink.h"

/* One tensor on its way to the sink. */
struct merge {
    struct legacy *l;
    uint32_t p, v, e;                 /* stage, model of it, expert rank */
    const struct rank_tensors *model; /* as the first tensor rank has it */
    const struct rank_tensor *x;      /* of that */
    struct megatron_name name;
    bool expert;    /* it is an expert's, or of all experts that a rank has */
    uint64_t local; /* experts that this rank has, by the highest number */
    struct mamba_blocks blocks; /* of MEGATRON_BLOCKS */
    struct rank_part *part;     /* by tensor rank; nparts of them */
    uint32_t nparts;
    struct torch_file absent; /* stands for the first directory that is not there */
    char absent_name[24];
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
            ends_in(m->x, "word_embeddings_for_head.weight") ||
            /* NeMo's: the attribute's name, beside the embedding's own module. */
            ends_in(m->x, "model.word_embeddings.weight") ||
            ends_in(m->x, "module.word_embeddings.weight"));
}

/*
 * Of what Megatron Core calls experts (its MoELayer's `experts`, not `shared_experts` nor the
 * router): each expert rank has its own.
 */
static bool is_expert(const struct rank_tensor *x, const struct megatron_name *name)
{
    static const char mark[] = ".experts.";

    return name->expert.len > 0 || memmem(x->name, x->len, mark, sizeof mark - 1);
}

/* ---- rules ---- */

/* Have experts a tensor parallelism of their own? */
static bool own_tensor(const struct legacy *l)
{
    return l->args.expert_tensor > 0 && l->args.expert_tensor != l->tensor;
}

/*
 * parallel_state.py of Megatron Core 0.13 numbers a stage's ranks by tensor rank first,
 * for experts too: of rank r the tensor rank is r % T and the experts' is r % X, so r % T % X
 * where X divides T. A larger X would have several ranks write one file.
 */
static bool tells_expert_tensor(const struct legacy *l)
{
    return l->args.expert_tensor > 0 && l->tensor % l->args.expert_tensor == 0;
}

/* The weight that takes in what the fc1 at hand gives out, of the same rank; NULL: none. */
static const struct rank_tensor *fc2_of(const struct merge *m)
{
    static const char *const pairs[][2] = {{"linear_fc1.", "linear_fc2."},
                                           {"dense_h_to_4h.", "dense_4h_to_h."}};
    const struct rank_tensor *x = m->x;

    for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
        size_t n = strlen(pairs[i][0]);
        const char *at = memmem(x->name, x->len, pairs[i][0], n);
        CLEANUP(buf_release) struct buf name = {0};

        if (!at)
            continue;
        buf_add(&name, x->name, (size_t)(at - x->name));
        buf_addf(&name, "%sweight", pairs[i][1]);
        if (m->name.expert.at > (size_t)(at - x->name)) /* grouped ones: "weight3" */
            buf_add(&name, x->name + m->name.expert.at, m->name.expert.len);
        return buf_failed(&name) ? NULL
                                 : rank_tensors_find(m->model, name.data, name.len);
    }
    return NULL;
}

/*
 * Gated ones have two rows for each column of fc2. Args are only asked where there is no such
 * fc2: the flags for it are many (swiglu, quick_geglu of Megatron-LM since 2025, glu_activation
 * of its forks), and one model may have both kinds.
 */
static bool is_gated(const struct merge *m)
{
    const struct rank_tensor *fc2 = fc2_of(m);

    if (fc2 && fc2->nd == 2 && m->x->nd > 0 && m->x->dim[0] == fc2->dim[1])
        return false;
    if (fc2 && fc2->nd == 2 && m->x->nd > 0 && m->x->dim[0] / 2 == fc2->dim[1] &&
        m->x->dim[0] % 2 == 0)
        return true;
    return m->l->args.gated;
}

static bool name_ends(const struct merge *m, const char *end)
{
    return megatron_name_ends(m->x->name, m->x->len, end);
}

/* Rows of the whole: they are a rank's, or those of all ranks together. */
static enum megatron_rule rule_of_rows(const struct merge *m, uint64_t whole)
{
    uint64_t rows = m->x->nd > 0 ? m->x->dim[0] : 0, all;

    if (rows == 0)
        return MEGATRON_UNKNOWN;
    if (rows == whole)
        return MEGATRON_SAME;
    return !mul_overflows(rows, m->l->tensor, &all) && all == whole ? MEGATRON_ROWS
                                                                    : MEGATRON_UNKNOWN;
}

/*
 * With fewer groups than ranks Megatron Core (attention.py, 0.16 on) cuts the rows as always,
 * and gathers keys and values when it runs. Others repeat them on each rank: more rows.
 */
static enum megatron_rule rule_of_few_groups(const struct merge *m)
{
    const struct legacy_args *args = &m->l->args;
    uint64_t whole;

    return !mul_overflows(args->groups, 2, &whole) &&
                   !add_overflows(whole, args->heads, &whole) &&
                   !mul_overflows(whole, args->channels, &whole) &&
                   rule_of_rows(m, whole) == MEGATRON_ROWS
               ? MEGATRON_ROWS
               : MEGATRON_UNKNOWN;
}

/* MLA's down projections are cut by rows, or on each rank (Transformer Engine's since 0.11). */
static enum megatron_rule rule_of_down(const struct merge *m)
{
    const struct legacy_args *args = &m->l->args;
    uint64_t whole = 0;

    if (name_ends(m, "linear_q_down_proj.weight"))
        whole = args->q_rank;
    else if (!name_ends(m, "linear_kv_down_proj.weight") || args->kv_rank == 0 ||
             add_overflows(args->kv_rank, args->positions, &whole))
        return MEGATRON_UNKNOWN;
    return rule_of_rows(m, whole);
}

/* The norm of a layer that is a mixer alone: "decoder.layers.3.norm.weight". */
static bool is_layer_norm(const struct merge *m)
{
    static const char end[] = ".norm.weight";
    size_t at = m->name.layer.at + m->name.layer.len;

    return m->name.layer.len > 0 && m->x->len - at == sizeof end - 1 &&
           ends_in(m->x, end);
}

/* What no rule names. */
static enum megatron_rule rule_by_sizes(struct merge *m)
{
    if (is_layer_norm(m))
        return MEGATRON_SAME;
    switch (megatron_mamba_cut(m->model, m->x, &m->blocks)) {
    case MAMBA_ROWS:
        return MEGATRON_ROWS;
    case MAMBA_COLUMNS:
        return MEGATRON_COLUMNS;
    case MAMBA_BLOCKS:
        return MEGATRON_BLOCKS;
    case MAMBA_NONE:
        break;
    }
    return rule_of_down(m);
}

/* How the tensor is put together here; MEGATRON_UNKNOWN: not at all. */
static enum megatron_rule rule_of(struct merge *m)
{
    const struct legacy *l = m->l;
    const struct legacy_args *args = &l->args;
    enum megatron_rule rule = m->name.rule;

    if (l->rule)
        return l->rule(m->l, m->x, rule);
    if (m->expert && l->expert > 1 &&
        (m->name.expert.len == 0 || args->extended || args->experts == 0 ||
         args->experts % l->expert != 0 || m->local != args->experts / l->expert))
        return MEGATRON_UNKNOWN;
    if (rule == MEGATRON_KV && l->version < 2.0)
        return MEGATRON_UNKNOWN;
    if (rule == MEGATRON_QKV && l->version < 2.0)
        return MEGATRON_QKV;
    if (m->expert && own_tensor(l) && !tells_expert_tensor(l))
        return MEGATRON_UNKNOWN;
    if ((m->expert && own_tensor(l) ? args->expert_tensor : l->tensor) == 1)
        return MEGATRON_SAME;
    if (rule == MEGATRON_QKV && args->groups > 0 && args->groups < l->tensor)
        return rule_of_few_groups(m);
    if (rule == MEGATRON_QKV || rule == MEGATRON_KV)
        return MEGATRON_ROWS;
    if (rule == MEGATRON_FC1)
        return is_gated(m) ? MEGATRON_HALVES : MEGATRON_ROWS;
    return rule == MEGATRON_UNKNOWN ? rule_by_sizes(m) : rule;
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
    const struct rank_tensor *x = m->part[t].x;
    uint64_t start[SHAPE_MAX_DIMS] = {to}, size[SHAPE_MAX_DIMS];
    int64_t steps[SHAPE_MAX_DIMS];
    struct chunk c;

    memcpy(size, x->dim, x->nd * sizeof *size);
    memcpy(steps, x->stride, x->nd * sizeof *steps);
    rank_tensor_chunk(x, m->part[t].file->number, &c);
    c.first += row * (uint64_t)x->stride[0];
    size[0] = count;
    steps[0] *= (int64_t)step;
    c.start = start;
    c.size = size;
    c.step = steps;
    return sink_chunk(m->l->sink, &c, e);
}

/*
 * Rows of query, key and value of each head: [3, heads, d] in version 0, [heads, d, 3] in
 * 1.0, [heads, 3, d] since.
 */
static int add_old_qkv(const struct merge *m, uint32_t t, uint64_t heads, uint64_t to,
                       struct err *e)
{
    uint64_t d = m->part[t].x->dim[0] / (3 * heads);
    bool first = m->l->version < 1.0;

    for (uint64_t h = 0; h < heads; h++) {
        for (uint64_t c = 0; c < 3; c++) {
            uint64_t row = first ? (c * heads + h) * d : h * d * 3 + c;

            TRY(add_rows(m, t, row, first ? 1 : 3, d, to + (h * 3 + c) * d, e));
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
        uint64_t rows = m->part[t].x->dim[0];

        if (rows % 3 != 0 || rows / 3 % heads != 0 || rows == 0)
            return faulted(sink_fault(m->l->sink,
                                      "its rows in %s are not those of %" PRIu64
                                      " heads",
                                      m->part[t].file->path, heads),
                           e);
        TRY(add_old_qkv(m, t, heads, to, e));
        to += rows;
    }
    return 0;
}

/* ---- the whole tensor ---- */

static bool same_shape(const struct rank_tensor *a, const struct rank_tensor *b)
{
    return a->nd == b->nd && memcmp(a->dim, b->dim, a->nd * sizeof *a->dim) == 0;
}

/*
 * The directory of part `t`. Where experts are cut as all else it is that of the tensor rank;
 * else the first expert rank's that has the tensor rank, or of experts any of the tensor
 * ranks that have the part.
 */
static const struct rank *rank_of_part(const struct merge *m, uint32_t t)
{
    const struct legacy *l = m->l;
    const struct rank *r = NULL;

    if (!own_tensor(l))
        return legacy_rank(l, t, m->p, m->e);
    if (!m->expert)
        for (uint32_t e = 0; !r && e < l->expert; e++)
            r = legacy_rank(l, t, m->p, e);
    else
        for (uint32_t i = t; !r && i < l->tensor; i += m->nparts)
            r = legacy_rank(l, i, m->p, m->e);
    return r;
}

/* What each tensor rank has. */
static void find_parts(struct merge *m)
{
    m->absent.path = NULL;
    for (uint32_t t = 0; t < m->nparts; t++) {
        const struct rank *r = rank_of_part(m, t);
        struct rank_part *part = &m->part[t];

        *part = (struct rank_part){.file = r ? &r->file : &m->absent};
        if (!r && !m->absent.path) {
            snprintf(m->absent_name, sizeof m->absent_name, "tensor rank %" PRIu32, t);
            m->absent.path = m->absent_name;
        }
        if (!r)
            part->why = "it is missing";
        else if (r->err.code)
            part->why = r->err.text;
        else
            part->x = rank_tensors_find(&r->model[m->v], m->x->name, m->x->len);
        if (m->l->rule && part->x && !same_shape(part->x, m->x)) {
            part->why = "its part has another shape than that of tensor rank 0";
            part->x = NULL;
        }
        if (!part->x && !part->why)
            part->why = "it does not have it";
    }
}

/* Stages share it: the first one's is shown. */
static int once(struct merge *m, int r, struct err *e)
{
    if (r != -EEXIST)
        return r;
    *e = (struct err){0};
    m->l->tied++;
    return 0;
}

static bool all_there(const struct merge *m)
{
    for (uint32_t t = 0; t < m->nparts; t++)
        if (!m->part[t].x || m->part[t].x->why)
            return false;
    return true;
}

/* All ranks' rows, which `add` puts into another order than that of the ranks. */
static int merge_rows(struct merge *m, struct sink_tensor *t,
                      int (*add)(const struct merge *m, struct err *e), struct err *e)
{
    struct rank_cut rows = rank_rule_cut(RANK_ROWS);
    struct torch_tensor x;
    uint64_t whole;

    if (!all_there(m) || !rank_parts_fit(m->part, m->nparts, &rows, &whole))
        return once(m, rank_merge(m->l->sink, RANK_ROWS, m->part, m->nparts, t, e), e);
    rank_tensor_open(m->part[0].x, &x);
    x.shape.dim[0] = whole;
    t->dtype = x.dtype;
    t->shape = &x.shape;
    if (sink_tensor_begin(m->l->sink, t, e) < 0)
        return once(m, -e->code, e);
    TRY(add(m, e));
    return sink_tensor_end(m->l->sink, e);
}

static bool parts_of_one_size(const struct merge *m)
{
    for (uint32_t t = 0; t < m->nparts; t++)
        if (m->part[t].x->dim[0] != m->x->dim[0])
            return false;
    return true;
}

/* Rows of several blocks on each rank: all ranks' first ones, then all second ones, ... */
static int add_blocks(const struct merge *m, struct err *e)
{
    uint64_t to = 0;

    if (!parts_of_one_size(m))
        return faulted(sink_fault(m->l->sink, "the ranks have different parts of it"),
                       e);
    for (size_t b = 0, row = 0; b < m->blocks.count; row += m->blocks.rows[b++]) {
        for (uint32_t t = 0; t < m->nparts; t++) {
            TRY(add_rows(m, t, row, 1, m->blocks.rows[b], to, e));
            to += m->blocks.rows[b];
        }
    }
    return 0;
}

static enum rank_rule cut_of(enum megatron_rule rule)
{
    switch (rule) {
    case MEGATRON_ROWS:
        return RANK_ROWS;
    case MEGATRON_COLUMNS:
        return RANK_COLUMNS;
    case MEGATRON_HALVES:
        return RANK_HALVES;
    case MEGATRON_THIRDS:
        return RANK_THIRDS;
    case MEGATRON_SAME:
        return RANK_SAME;
    case MEGATRON_QKV:
    case MEGATRON_KV:
    case MEGATRON_FC1: /* rule_of() says what they are */
    case MEGATRON_BLOCKS:
    case MEGATRON_UNLIKE:
    case MEGATRON_UNKNOWN:
        break;
    }
    return RANK_UNKNOWN;
}

static int merge_parts(struct merge *m, enum megatron_rule rule, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    struct sink_tensor t = {.role = ROLE_MODEL};

    m->nparts = m->expert && own_tensor(m->l) ? (uint32_t)m->l->args.expert_tensor
                                              : m->l->tensor;
    find_parts(m);
    TRY(write_key(m, &key, e));
    t.key = key.data;
    t.key_len = key.len;
    if (rule == MEGATRON_QKV)
        return merge_rows(m, &t, add_old_qkvs, e);
    if (rule == MEGATRON_BLOCKS)
        return merge_rows(m, &t, add_blocks, e);
    return once(m, rank_merge(m->l->sink, cut_of(rule), m->part, m->nparts, &t, e), e);
}

/* ---- as the ranks have it ---- */

/* A tensor of which only the name is known. */
static int add_unreadable(const struct merge *m, struct sink_tensor *t, const char *why,
                          struct err *e)
{
    static const struct shape none = {.nd = 1};

    t->dtype = DTYPE_U8;
    t->shape = &none;
    TRY(sink_tensor_begin(m->l->sink, t, e));
    TRY(faulted(sink_fault(m->l->sink, "%s", why), e));
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
    legacy_place(m->l, r, m->v, &key);
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

        if (r && !r->err.code)
            TRY(add_raw(m, r, e));
    }
    return 0;
}

static void note(const struct merge *m, struct legacy_note *n)
{
    if (n->count++ == 0)
        snprintf(n->first, sizeof n->first, "%.*s", (int)MIN(m->x->len, (size_t)100),
                 m->x->name);
}

/* ---- stages ---- */

static int merge_tensor(struct merge *m, const struct rank_tensor *x, struct err *e)
{
    enum megatron_rule rule;

    m->x = x;
    megatron_name(x->name, x->len, &m->name);
    m->expert = is_expert(x, &m->name);
    /* What is no expert's is the same on all expert ranks. */
    if (m->e > 0 && !m->expert)
        return 0;
    if (ends_in(x, "_extra_state"))
        return add_raws(m, e);
    if (is_tied_copy(m)) {
        m->l->tied++;
        return 0;
    }
    rule = rule_of(m);
    if (rule != MEGATRON_UNKNOWN && rule != MEGATRON_UNLIKE)
        return merge_parts(m, rule, e);
    note(m, rule == MEGATRON_UNKNOWN ? &m->l->unknown : &m->l->unlike);
    return add_raws(m, e);
}

static uint64_t count_experts(const struct rank_tensors *model)
{
    struct megatron_name name;
    uint64_t n = 0;

    for (size_t i = 0; i < model->count; i++) {
        megatron_name(model->tensor[i].name, model->tensor[i].len, &name);
        if (name.expert.len > 0)
            n = MAX(n, name.expert.value + 1);
    }
    return n;
}

static int merge_model(struct merge *m, struct err *e)
{
    const struct rank *first = own_tensor(m->l) && m->e > 0
                                   ? legacy_rank_any(m->l, m->p, m->e)
                                   : legacy_rank(m->l, 0, m->p, m->e);

    if (!first || first->err.code)
        return err_set(e, EBADMSG,
                       "tensor rank 0 of pipeline rank %" PRIu32
                       " cannot be read: nothing tells what that stage has%s%s",
                       m->p, first ? ": " : "", first ? first->err.text : "");
    m->model = &first->model[m->v];
    m->local = count_experts(m->model);
    for (size_t i = 0; i < m->model->count; i++)
        TRY(merge_tensor(m, &m->model->tensor[i], e));
    return 0;
}

int legacy_merge_stage(struct legacy *l, uint32_t p, struct err *e)
{
    struct merge m = {.l = l, .p = p};

    m.part = reallocarray(NULL, l->tensor, sizeof *m.part);
    if (!m.part)
        err_nomem(e);
    for (m.v = 0; e->code == 0 && m.v < l->models; m.v++)
        for (m.e = 0; e->code == 0 && m.e < l->expert; m.e++)
            merge_model(&m, e);
    free(m.part);
    return -e->code;
}
