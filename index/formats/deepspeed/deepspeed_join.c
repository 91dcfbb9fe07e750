/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_join.c - parameters whose pieces are on tensor-parallel ranks. */
#include "index/formats/deepspeed/deepspeed_join.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/ranks/rank_files.h"
#include "index/formats/ranks/rank_tensors.h"
#include "index/formats/torch/torch_walk.h"

/* ---- masters and states ---- */

/* A trained parameter: each rank's piece of it. */
struct trained {
    const struct ds_param **x; /* by rank */
    uint32_t slot;
};

static int trained_runs(struct ds_join *j, const void *what, uint32_t t, struct err *e)
{
    const struct trained *w = what;

    return ds_runs_collect(j->s, &j->p[t], w->x[t], w->slot, j->dtype, &j->runs[t], e);
}

/* Sets the shapes; false: a rank lacks it. */
static bool find_trained(struct ds_join *j, const char *name, size_t len, uint32_t slot,
                         struct trained *out, struct err *e)
{
    const struct ds_param *any = NULL;
    bool all = true;

    out->slot = slot;
    out->x = arena_array(j->arena, j->s->tensor, sizeof *out->x);
    if (!out->x) {
        err_nomem(e);
        return false;
    }
    for (uint32_t t = 0; t < j->s->tensor; t++) {
        out->x[t] = ds_param_find(&j->p[t], name, len);
        all = all && out->x[t];
        any = any ? any : out->x[t];
    }
    for (uint32_t t = 0; t < j->s->tensor; t++)
        ds_shape_of(out->x[t] ? out->x[t] : any, &j->local[t]);
    return all;
}

/* The type of the first rank that has elements of it. */
static enum dtype type_of(const struct ds_join *j, const struct trained *w, bool *there)
{
    *there = false;
    for (uint32_t t = 0; t < j->s->tensor; t++) {
        const struct ds_flat *flat =
            w->x[t] ? ds_first_flat(j->s, &j->p[t], w->x[t], w->slot) : NULL;

        if (!flat || flat->kind == DS_FLAT_NONE || flat->kind == DS_FLAT_PACKED)
            continue;
        *there = true;
        return (enum dtype)flat->dtype;
    }
    return DTYPE_F32;
}

static int report_master(struct ds_scan *s, struct ds_part *p, const char *name,
                         size_t len, const char *key, size_t key_len, struct err *e)
{
    CLEANUP(ds_join_release) struct ds_join j = {.s = s, .p = p};
    struct sink_tensor t = {
        .key = key, .key_len = key_len, .part = s->how->part, .role = s->how->weights};
    struct trained w;
    bool all, ignored;

    TRY(ds_join_begin(&j, e));
    all = find_trained(&j, name, len, DS_MASTER, &w, e);
    if (e->code)
        return -e->code;
    j.dtype = type_of(&j, &w, &ignored);
    return ds_join_report(&j, name, len, all ? NULL : ds_join_lacks, &t, trained_runs,
                          &w, e);
}

/* "step": one number for all of a group; that of the first rank. */
static int report_scalar(struct ds_scan *s, const struct ds_part *p,
                         const struct ds_flat *flat, struct sink_tensor *t,
                         struct err *e)
{
    static const struct shape scalar = {.nd = 0};
    const struct ds_piece piece = {
        .file = p->rank[0].file, .at = flat->at, .count = 1, .flags = flat->flags};

    t->dtype = (enum dtype)flat->dtype;
    t->shape = &scalar;
    TRY(ds_begin(s, p->rank[0].path, t, e));
    TRY(ds_add_piece(s, &scalar, t->dtype, &piece, e));
    return sink_tensor_end(s->sink, e);
}

/* One rank's piece of a state, which nothing tells how to join. */
static int report_piece(struct ds_scan *s, const struct ds_part *p,
                        const struct ds_param *x, uint32_t slot, const struct buf *key,
                        struct err *e)
{
    CLEANUP(buf_release) struct buf full = {0};
    struct ds_runs runs = {0};
    const struct ds_flat *flat = ds_first_flat(s, p, x, slot);
    struct sink_tensor t = {.part = s->how->part, .role = ROLE_OPTIMIZER};
    struct shape shape;
    int rc;

    if (!flat || flat->kind != DS_FLAT_VECTOR)
        return 0;
    buf_addf(&full, "mp_rank_%02u/", p->mp);
    buf_add(&full, key->data, key->len);
    if (buf_failed(&full))
        return err_nomem(e);
    ds_shape_of(x, &shape);
    t.key = full.data;
    t.key_len = full.len;
    t.dtype = (enum dtype)flat->dtype;
    t.shape = &shape;
    rc = ds_begin(s, p->model.path, &t, e);
    if (rc == 0)
        rc = ds_runs_collect(s, p, x, slot, t.dtype, &runs, e);
    for (size_t i = 0; rc == 0 && i < runs.count; i++)
        rc = ds_add_piece(s, &shape, t.dtype, &runs.piece[i], e);
    ds_runs_release(&runs);
    return rc < 0 ? rc : sink_tensor_end(s->sink, e);
}

static int report_pieces(struct ds_scan *s, const struct ds_part *p,
                         const struct ds_param *x, uint32_t slot, const struct buf *key,
                         struct err *e)
{
    for (uint32_t t = 0; t < s->tensor; t++) {
        const struct ds_param *own = ds_param_find(&p[t], x->name, x->len);

        if (own)
            TRY(report_piece(s, &p[t], own, slot, key, e));
    }
    return 0;
}

/* The parameter in one slot; `rule`: how it is cut, RANK_UNKNOWN where the notes tell. */
static int join_state(struct ds_scan *s, struct ds_part *p, const struct ds_param *x,
                      uint32_t slot, enum rank_rule rule, struct sink_tensor *t,
                      struct err *e)
{
    CLEANUP(ds_join_release) struct ds_join j = {.s = s, .p = p, .rule = rule};
    struct trained w;
    bool all, there;

    TRY(ds_join_begin(&j, e));
    all = find_trained(&j, x->name, x->len, slot, &w, e);
    if (e->code)
        return -e->code;
    j.dtype = type_of(&j, &w, &there);
    if (!there)
        return 0;
    return ds_join_report(&j, x->name, x->len, all ? NULL : ds_join_lacks, t,
                          trained_runs, &w, e);
}

/* A state, and where a caller has rules the master too. */
static int report_state(struct ds_scan *s, struct ds_part *p, const struct ds_param *x,
                        uint32_t slot, enum rank_rule rule, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    struct sink_tensor t = {.part = s->how->part, .role = ROLE_OPTIMIZER};
    const struct ds_flat *first = ds_first_flat(s, &p[0], x, slot);

    buf_adds(&key, "optimizer.state.");
    buf_add(&key, x->name, x->len);
    buf_addf(&key, ".%s", slot == DS_MASTER ? "fp32" : p[0].slot[slot]);
    if (buf_failed(&key))
        return err_nomem(e);
    t.key = key.data;
    t.key_len = key.len;
    if (first && first->kind == DS_FLAT_SCALAR)
        return report_scalar(s, &p[0], first, &t, e);
    if (s->how->rule && (rule == RANK_UNKNOWN || rule == RANK_SUM))
        return report_pieces(s, p, x, slot, &key, e);
    return join_state(s, p, x, slot, rule, &t, e);
}

/* Do all ranks number their states alike? Each names them in the order of its file. */
static int check_slots(const struct ds_scan *s, const struct ds_part *p, struct err *e)
{
    for (uint32_t t = 1; t < s->tensor; t++) {
        bool same = p[t].nslots == p[0].nslots;

        for (uint32_t k = DS_MASTER + 1; same && k < p[0].nslots; k++)
            same = strcmp(p[t].slot[k], p[0].slot[k]) == 0;
        if (!same)
            return err_set(e, EBADMSG,
                           "mp_rank_%02u has other states than mp_rank_%02u", p[t].mp,
                           p[0].mp);
    }
    return 0;
}

/* Another stage has it too: that has to be the same parameter. */
static int note_copy(struct ds_scan *s, struct ds_part *p, struct ds_param *x,
                     struct err *e)
{
    char text[200];

    x->elsewhere = true;
    for (const struct ds_part *q = s->part; q < p; q += s->tensor) {
        const struct ds_param *first = ds_param_find(q, x->name, x->len);

        if (!first)
            continue;
        if (first->nd == x->nd &&
            memcmp(first->dim, x->dim, x->nd * sizeof *x->dim) == 0)
            return 0;
        break;
    }
    return err_set(e, EBADMSG, "%s: %s has another shape on another stage",
                   p->model.path, ds_text(x->name, x->len, text, sizeof text));
}

static int report_masters(struct ds_scan *s, struct ds_part *p, uint32_t t,
                          struct err *e)
{
    for (size_t i = 0; i < p[t].nparams; i++) {
        struct ds_param *x = &p[t].param[i];
        int seen = ds_see(s, x->name, x->len, e);

        if (seen < 0)
            return seen;
        if (seen == 0 && t > 0)
            continue; /* of the rank before, or told of already */
        TRY(seen == 0 ? note_copy(s, p, x, e)
                      : report_master(s, p, x->name, x->len, x->name, x->len, e));
    }
    return 0;
}

static int report_states(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    TRY(check_slots(s, p, e));
    for (size_t i = 0; i < p->nparams; i++)
        for (uint32_t slot = DS_MASTER + 1; !p->param[i].elsewhere && slot < p->nslots;
             slot++)
            TRY(report_state(s, p, &p->param[i], slot, RANK_UNKNOWN, e));
    return 0;
}

/* ---- frozen ones of stage 3 ---- */

struct frozen {
    const struct ds_param **x; /* by rank */
};

static int frozen_runs(struct ds_join *j, const void *what, uint32_t t, struct err *e)
{
    const struct frozen *w = what;
    size_t i = (size_t)(w->x[t] - j->p[t].frozen);

    if (ds_frozen_type(&j->p[t], i) != j->dtype)
        return ds_join_fault(j->s, "the ranks have it in several types", e);
    return ds_frozen_runs(j->s, &j->p[t], i, &j->runs[t], e);
}

static int report_frozen(struct ds_scan *s, struct ds_part *p, const char *name,
                         size_t len, const char *key, size_t key_len, struct err *e)
{
    CLEANUP(ds_join_release) struct ds_join j = {.s = s, .p = p};
    struct sink_tensor t = {
        .key = key, .key_len = key_len, .part = s->how->part, .role = s->how->weights};
    struct frozen w = {0};
    bool all = true;

    TRY(ds_join_begin(&j, e));
    w.x = arena_array(j.arena, s->tensor, sizeof *w.x);
    if (!w.x)
        return err_nomem(e);
    for (uint32_t r = 0; r < s->tensor; r++) {
        w.x[r] = ds_frozen_find(&p[r], name, len);
        ds_shape_of(w.x[r] ? w.x[r] : w.x[0], &j.local[r]);
        all &= w.x[r] != NULL;
    }
    j.dtype = ds_frozen_type(p, (size_t)(w.x[0] - p->frozen));
    return ds_join_report(&j, name, len, all ? NULL : ds_join_lacks, &t, frozen_runs,
                          &w, e);
}

static int report_all_frozen(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    for (uint32_t t = 0; s->stage == 3 && t < s->tensor; t++)
        TRY(ds_frozen_read(s, &p[t], e));
    for (size_t i = 0; s->stage == 3 && i < p->nfrozen; i++) {
        const struct ds_param *x = &p->frozen[i];
        int seen = ds_see(s, x->name, x->len, e);

        if (seen < 0 ||
            (seen > 0 && report_frozen(s, p, x->name, x->len, x->name, x->len, e) < 0))
            return -e->code;
    }
    return 0;
}

/* ---- tied names ---- */

static int report_alias(struct ds_scan *s, struct ds_part *p, const struct pv *alias,
                        const struct pv *owner, struct err *e)
{
    const char *name[2];
    size_t len[2];
    bool trained, frozen;
    int seen;

    if (alias->kind != PV_STR || owner->kind != PV_STR)
        return 0;
    name[0] = pv_bytes(alias, &len[0]);
    name[1] = pv_bytes(owner, &len[1]);
    trained = p->nranks > 0 && ds_param_find(p, name[1], len[1]);
    frozen = s->stage == 3 && ds_frozen_find(p, name[1], len[1]);
    if (!trained && !frozen)
        return 0; /* in the module under both names */
    seen = ds_see(s, name[0], len[0], e);
    if (seen <= 0)
        return seen;
    return trained ? report_master(s, p, name[1], len[1], name[0], len[0], e)
                   : report_frozen(s, p, name[1], len[1], name[0], len[0], e);
}

static int report_tied(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    struct pv shared, items;

    if (!ds_get_some(&p->root, "shared_params", &shared) ||
        !torch_mapping(&shared, &items) || items.kind != PV_DICT)
        return 0;
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv alias = pv_key_at(&items, i), owner = pv_value_at(&items, i);

        TRY(report_alias(s, p, &alias, &owner, e));
    }
    return 0;
}

/* ---- masters and states alone, by a rule ---- */

/* The parameters of a stage as names and shapes of files. */
static struct rank_file *shapes_of(struct ds_scan *s, const struct ds_part *p)
{
    struct rank_file *f = rank_files_new(s->tensor);

    for (uint32_t t = 0; f && t < s->tensor; t++) {
        f[t].tensors.tensor = calloc(p[t].nparams + 1, sizeof *f[t].tensors.tensor);
        if (!f[t].tensors.tensor) {
            rank_files_free(f, s->tensor);
            return NULL;
        }
        f[t].tensors.count = p[t].nparams;
        for (size_t i = 0; i < p[t].nparams; i++) {
            const struct ds_param *x = p[t].by_name[i];
            uint64_t *dim = arena_array(s->arena, (size_t)x->nd + 1, sizeof *dim);

            if (!dim) {
                rank_files_free(f, s->tensor);
                return NULL;
            }
            memcpy(dim, x->dim, x->nd * sizeof *dim);
            f[t].tensors.tensor[i] = (struct rank_tensor){
                .name = x->name, .len = x->len, .nd = x->nd, .dim = dim};
        }
    }
    return f;
}

/* All of a parameter, unless an earlier stage or rank has it. */
static int report_all_slots(struct ds_scan *s, struct ds_part *p,
                            const struct rank_file *files, uint32_t t, size_t i,
                            struct err *e)
{
    const struct ds_param *x = p[t].by_name[i];
    enum rank_rule rule = s->how->rule(&files[t].tensors.tensor[i], files, s->tensor);
    int seen = ds_see(s, x->name, x->len, e);

    for (uint32_t slot = DS_MASTER; seen > 0 && slot < p->nslots; slot++)
        TRY(report_state(s, p, x, slot, rule, e));
    return MIN(seen, 0);
}

int ds_join_states(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    struct rank_file *files;
    int rc = check_slots(s, p, e);

    files = rc == 0 ? shapes_of(s, p) : NULL;
    if (rc == 0 && !files)
        rc = err_nomem(e);
    for (uint32_t t = 0; rc == 0 && t < s->tensor; t++)
        for (size_t i = 0; rc == 0 && i < p[t].nparams; i++)
            rc = report_all_slots(s, p, files, t, i, e);
    if (files)
        rank_files_free(files, s->tensor);
    return rc;
}

/* ---- a stage ---- */

int ds_join_stage(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    bool masters = true;

    for (uint32_t t = 0; t < s->tensor; t++)
        masters = masters && p[t].has_shapes && p[t].nranks > 0;
    for (uint32_t t = 0; masters && t < s->tensor; t++)
        TRY(report_masters(s, p, t, e));
    TRY(report_all_frozen(s, p, e));
    TRY(report_tied(s, p, e));
    TRY(ds_join_module(s, p, e));
    if (masters)
        TRY(report_states(s, p, e));
    for (uint32_t t = 0; t < s->tensor; t++)
        TRY(ds_model_objects(s, &p[t], e));
    return 0;
}

int ds_join_end(struct ds_scan *s, struct err *e)
{
    const struct ds_pattern *p = ds_notes_unused(&s->notes);
    char text[200];

    if (!p)
        return 0;
    err_set(e, ENOTSUP,
            "universal_checkpoint_info has a pattern that is no parameter's: %s",
            ds_text(p->text, p->len, text, sizeof text));
    return err_hint(e, "its patterns do not fit the names, and what they miss would be "
                       "joined in a wrong way");
}
