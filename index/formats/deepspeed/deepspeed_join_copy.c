/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_join_copy.c - the copy that the model computed with, on tensor-parallel ranks. */
#include "index/formats/deepspeed/deepspeed_join.h"

#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/ranks/rank_tensors.h"
#include "index/formats/torch/torch_file.h"

enum { MODULE_MEMORY = 512 << 20 }; /* names and shapes of the copies of all ranks */

struct module {
    struct ds_scan *s;
    struct ds_part *p;
    struct arena *arena;
    struct rank_tensors *of; /* by rank */
    struct keyset names;     /* told of */
    uint64_t raw;            /* tensors whose cut is not noted */
    uint64_t hollow;         /* placeholders that nothing else stands for */
};

static void module_release(struct module *m)
{
    for (uint32_t t = 0; m->of && t < m->s->tensor; t++)
        rank_tensors_release(&m->of[t]);
    free(m->of);
    keyset_release(&m->names);
    arena_free(m->arena);
}

struct copies {
    const struct rank_tensor **x; /* by rank */
};

/* Row-major and as it is? */
static bool is_plain(const struct rank_tensor *x)
{
    uint64_t step = 1;

    for (uint32_t k = x->nd; k-- > 0; step *= x->dim[k])
        if (x->dim[k] > 1 && (uint64_t)x->stride[k] != step)
            return false;
    return !x->packed && dtype_bits(x->dtype) % 8 == 0;
}

static int copy_runs(struct ds_join *j, const void *what, uint32_t t, struct err *e)
{
    const struct rank_tensor *x = ((const struct copies *)what)->x[t];
    struct ds_piece piece = {
        .file = j->p[t].model.number, .count = 1, .flags = x->flags};

    if (!is_plain(x) || x->dtype != j->dtype)
        return ds_join_fault(j->s,
                             "a rank's piece is of another type, or not row by row", e);
    for (uint32_t k = 0; k < x->nd; k++)
        piece.count *= x->dim[k]; /* it was counted where the file was read */
    piece.at = x->data + x->first * dtype_unit(x->dtype);
    return piece.count > 0 ? ds_runs_add(&j->runs[t], &piece, e) : 0;
}

/* Finds all ranks' pieces. Why one cannot be had, or NULL. */
static const char *find_copies(struct ds_join *j, const struct module *m,
                               const struct rank_tensor *any, struct copies *out)
{
    const char *why = NULL;

    for (uint32_t t = 0; t < m->s->tensor; t++) {
        const struct rank_tensor *x = rank_tensors_find(&m->of[t], any->name, any->len);

        out->x[t] = x;
        if (!x || x->why)
            why = x ? x->why : ds_join_lacks;
        x = x ? x : any;
        j->local[t].nd = x->nd;
        memcpy(j->local[t].dim, x->dim, x->nd * sizeof *x->dim);
    }
    return why;
}

static int report_copy(struct module *m, const struct rank_tensor *x,
                       const char *prefix, int role, struct err *e)
{
    CLEANUP(ds_join_release)
    struct ds_join j = {.s = m->s, .p = m->p, .dtype = x->dtype};
    CLEANUP(buf_release) struct buf key = {0};
    struct sink_tensor t = {.part = m->s->how->part, .role = role};
    struct copies w;
    const char *why;

    TRY(ds_join_begin(&j, e));
    w.x = arena_array(j.arena, m->s->tensor, sizeof *w.x);
    buf_adds(&key, prefix);
    buf_add(&key, x->name, x->len);
    if (!w.x || buf_failed(&key))
        return err_nomem(e);
    t.key = key.data ? key.data : "";
    t.key_len = key.len;
    why = find_copies(&j, m, x, &w);
    return ds_join_report(&j, x->name, x->len, why, &t, copy_runs, &w, e);
}

/* A buffer: notes tell of parameters only. Each rank's is FILE:module.NAME. */
static int report_raw(struct module *m, const struct rank_tensor *any, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};

    m->raw++;
    for (uint32_t t = 0; t < m->s->tensor; t++) {
        const struct rank_tensor *x = rank_tensors_find(&m->of[t], any->name, any->len);
        struct sink_tensor out = {.part = m->s->how->part, .role = ROLE_OTHER};
        struct torch_tensor tensor;

        if (!x || x->why)
            continue;
        buf_clear(&key);
        buf_addf(&key, "%s:module.", m->p[t].model.path);
        buf_add(&key, x->name, x->len);
        if (buf_failed(&key))
            return err_nomem(e);
        out.key = key.data;
        out.key_len = key.len;
        rank_tensor_open(x, &tensor);
        TRY(torch_file_tensor(m->s->sink, &m->p[t].model, &tensor, &out, e));
    }
    return 0;
}

static int report_named(struct module *m, const struct rank_tensor *x, struct err *e)
{
    struct ds_scan *s = m->s;
    int rc = keyset_add(&m->names, x->name, x->len);

    if (rc <= 0)
        return rc < 0 ? err_nomem(e) : 0;
    if (s->stage == 3 && !x->why && x->nd == 1 && x->dim[0] == 0) {
        m->hollow += !keyset_has(&s->seen, x->name, x->len);
        return 0;
    }
    if (keyset_has(&s->buffers, x->name, x->len))
        return report_raw(m, x, e);
    rc = ds_see(s, x->name, x->len, e);
    if (rc < 0)
        return rc;
    if (rc > 0)
        TRY(report_copy(m, x, "", s->how->weights, e));
    return s->stage == 3 ? 0 : report_copy(m, x, "module.", ROLE_OTHER, e);
}

static int collect_module(struct module *m, struct err *e)
{
    m->arena = arena_new(MODULE_MEMORY);
    m->of = calloc(m->s->tensor, sizeof *m->of);
    if (!m->arena || !m->of)
        return err_nomem(e);
    for (uint32_t t = 0; t < m->s->tensor; t++)
        if (m->p[t].module.kind == PV_DICT &&
            rank_tensors_collect(m->p[t].model.zip, &m->p[t].module, m->arena,
                                 &m->of[t], e) < 0)
            return err_wrap(e, "%s", m->p[t].model.path);
    return 0;
}

static int warn_module(const struct module *m, struct err *e)
{
    if (m->raw > 0 &&
        sink_warning(m->s->sink, "unknown-cut",
                     "%s: %" PRIu64 " buffers, of which no pattern tells whether ranks "
                     "have cut them: each rank's is FILE:module.NAME",
                     m->p->model.path, m->raw) < 0)
        return err_nomem(e);
    if (m->hollow > 0 &&
        sink_warning(m->s->sink, "no-weights",
                     "%s: %" PRIu64 " parameters are named there and stored nowhere",
                     m->p->model.path, m->hollow) < 0)
        return err_nomem(e);
    return 0;
}

int ds_join_module(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    CLEANUP(module_release) struct module m = {.s = s, .p = p};

    TRY(collect_module(&m, e));
    for (uint32_t t = 0; t < s->tensor; t++)
        for (size_t i = 0; i < m.of[t].count; i++)
            TRY(report_named(&m, &m.of[t].tensor[i], e));
    TRY(ds_module_objects(s, &p->model, &p->module, e));
    return warn_module(&m, e);
}
