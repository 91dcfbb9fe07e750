/* SPDX-License-Identifier: MIT */
/* index/formats/fairscale/fairscale_merge.c - model-parallel parts of metaseq put together. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "index/formats/fairscale/fairscale_priv.h"

struct merge {
    struct fairscale *f;
    struct flat_slice *slice; /* by part */
    struct rank_part *same;   /* by part: of buffers */
};

/* ---- one parameter ---- */

/* Finds the member of each part; false: one does not have it. */
static bool find_members(struct merge *g, const char *name, size_t len)
{
    for (uint32_t i = 0; i < g->f->parts; i++) {
        const struct model_part *part = &g->f->part[i];

        g->slice[i].m = part->first ? fairscale_member(&part->meta, name, len) : NULL;
        if (!g->slice[i].m ||
            (part->meta.param[g->slice[i].m->param].own && part->shards > 1))
            return false;
    }
    return true;
}

static void note_unknown(struct fairscale *f, const struct flat_member *m)
{
    if (f->unknown++ == 0)
        snprintf(f->first_unknown, sizeof f->first_unknown, "%.*s",
                 (int)MIN(m->len, (size_t)100), m->name);
}

/* Another part's tensors are found in the room of that part: all stand at once. */
static int report_weight(struct merge *g, enum rank_rule rule, const char *key,
                         size_t len, struct err *e)
{
    struct sink_tensor t = {.key = key, .key_len = len, .role = ROLE_MODEL};

    for (uint32_t i = 0; i < g->f->parts; i++) {
        struct model_part *part = &g->f->part[i];
        const struct flat_param *p = &part->meta.param[g->slice[i].m->param];

        flat_tensor_find(part, g->slice[i].m->param, false, p->key, p->key_len,
                         &g->slice[i].flat);
    }
    return flat_slices_report(g->f->sink, rule, g->slice, g->f->parts, &t, e);
}

static int report_moment(struct merge *g, enum rank_rule rule, const char *state,
                         struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0}, stored = {0};
    struct sink_tensor t = {.part = "last_optimizer_state", .role = ROLE_OPTIMIZER};

    buf_add(&key, g->slice[0].m->name, g->slice[0].m->len);
    buf_addf(&key, ".%s", state);
    for (uint32_t i = 0; i < g->f->parts; i++) {
        struct model_part *part = &g->f->part[i];
        size_t p = g->slice[i].m->param;

        buf_clear(&stored);
        buf_addf(&stored, "state.%zu.%s", p, state);
        if (buf_failed(&stored))
            return err_nomem(e);
        flat_tensor_find(part, p, true, stored.data, stored.len, &g->slice[i].flat);
        if (!g->slice[i].flat.like || g->slice[i].flat.like->nd != 1)
            return 0; /* it is shown with its part */
    }
    if (buf_failed(&key))
        return err_nomem(e);
    t.key = key.data;
    t.key_len = key.len;
    return flat_slices_report(g->f->sink, rule, g->slice, g->f->parts, &t, e);
}

/* The states that the first part has of it. */
static int report_moments(struct merge *g, enum rank_rule rule, struct err *e)
{
    const struct model_part *part = &g->f->part[0];
    const struct rank_tensors *t = &part->shard[part->first - part->file].optim;
    size_t p = g->slice[0].m->param;

    for (uint32_t i = 0; i < g->f->parts; i++)
        if (!g->f->part[i].named)
            return 0;
    for (size_t i = 0; i < t->count; i++) {
        const char *state;
        uint64_t number;

        if (fairscale_state_name(&t->tensor[i], &number, &state) && number == p &&
            t->tensor[i].nd == 1)
            TRY(report_moment(g, rule, state, e));
    }
    return 0;
}

static int merge_member(struct merge *g, const struct flat_member *m, struct err *e)
{
    enum rank_rule rule = metaseq_rule(m->name, m->len);

    if (rule == RANK_UNKNOWN || !find_members(g, m->name, m->len)) {
        note_unknown(g->f, m);
        return 0;
    }
    TRY(report_weight(g, rule, m->name, m->len, e));
    return report_moments(g, rule, e);
}

/* ---- buffers and second names ---- */

static int merge_buffer(struct merge *g, const struct flat_name *b, struct err *e)
{
    struct sink_tensor t = {.key = b->name, .key_len = b->len, .role = ROLE_MODEL};
    bool any = false;

    if (metaseq_rule(b->name, b->len) != RANK_SAME)
        return 0;
    for (uint32_t i = 0; i < g->f->parts; i++) {
        const struct model_part *part = &g->f->part[i];

        g->same[i] =
            rank_file_part(part->first ? part->first : &part->file[0], b->name, b->len);
        any |= g->same[i].x != NULL;
    }
    return any ? rank_merge(g->f->sink, RANK_SAME, g->same, g->f->parts, &t, e) : 0;
}

static int merge_alias(struct merge *g, const struct flat_alias *x, struct err *e)
{
    enum rank_rule rule = metaseq_rule(x->stored, x->stored_len);
    int r;

    if (rule == RANK_UNKNOWN || !find_members(g, x->stored, x->stored_len))
        return 0;
    r = report_weight(g, rule, x->alias, x->alias_len, e);
    if (r == -EEXIST)
        *e = (struct err){0};
    return -e->code;
}

static int merge_all(struct merge *g, struct err *e)
{
    const struct fairscale_metadata *m = &g->f->part[0].meta;

    for (size_t p = 0; p < m->params; p++)
        for (size_t i = 0; i < m->param[p].members; i++)
            TRY(merge_member(g, &m->param[p].member[i], e));
    for (size_t i = 0; i < m->buffers; i++)
        TRY(merge_buffer(g, &m->buffer[i], e));
    for (size_t i = 0; i < m->aliases; i++)
        TRY(merge_alias(g, &m->alias[i], e));
    return 0;
}

int fairscale_merge_parts(struct fairscale *f, struct err *e)
{
    struct merge g = {.f = f,
                      .slice = calloc(f->parts, sizeof *g.slice),
                      .same = calloc(f->parts, sizeof *g.same)};
    int r = g.slice && g.same ? 0 : err_nomem(e);

    if (r == 0 && f->part[0].first)
        r = merge_all(&g, e);
    free(g.slice);
    free(g.same);
    return r;
}
