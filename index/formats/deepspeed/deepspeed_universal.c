/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_universal.c - zero/NAME/STATE.pt: a file for each tensor. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

/*
 * Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py. Stages 1 and 2 write a dict
 * {"param": tensor, "cat_dim": ...}, stage 3 the flat tensor itself.
 */
static const char zero_dir[] = "zero";
static const char master[] = "fp32";
static const char end[] = ".pt";

/* One file, and the tensor that it is. */
struct job {
    const char *name, *state;
    bool tied; /* the file is of its owner */
};

struct universal {
    struct ds_scan *s;
    struct listing *zero;
    struct job *job; /* malloc, as is file; count of both */
    struct ds_file *file;
    size_t count, cap;
    uint64_t strange; /* files that are no tensor of a parameter */
    uint64_t slices;  /* tensors that one tensor-parallel rank had */
};

static void release(struct universal *u)
{
    free(u->job);
    free(u->file);
}

/* ---- the files ---- */

static int make_room(struct universal *u, struct err *e)
{
    size_t cap = u->cap ? u->cap * 2 : 256;
    struct job *job;
    struct ds_file *file;

    if (u->count < u->cap)
        return 0;
    job = reallocarray(u->job, cap, sizeof *job);
    if (job)
        u->job = job;
    file = reallocarray(u->file, cap, sizeof *file);
    if (file)
        u->file = file;
    if (!job || !file)
        return err_nomem(e);
    u->cap = cap;
    return 0;
}

/* zero/DIR/STATE.pt is STATE of `name`. */
static int add_job(struct universal *u, const char *name, const char *dir,
                   const char *state, size_t state_len, struct err *e)
{
    CLEANUP(buf_release) struct buf path = {0};
    struct arena *a = u->s->arena;
    struct job job = {.name = arena_memdup(a, name, strlen(name)),
                      .state = arena_memdup(a, state, state_len),
                      .tied = strcmp(name, dir) != 0};
    struct ds_file file = {0};

    TRY(make_room(u, e));
    buf_addf(&path, "%s/%s/", zero_dir, dir);
    buf_add(&path, state, state_len);
    buf_adds(&path, end);
    file.name = path.data ? arena_memdup(a, path.data, path.len) : NULL;
    if (buf_failed(&path) || !file.name || !job.name || !job.state)
        return err_nomem(e);
    u->file[u->count] = file;
    u->job[u->count++] = job;
    return 0;
}

static int list_param(struct universal *u, const char *name, struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    char path[PATH_MAX];

    if (store_join(listing_path(u->zero), name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", zero_dir, name);
    TRY(u->s->c->store->ops->list(u->s->c->store, path, &l, e));
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        size_t len = strlen(entry->name), n = sizeof end - 1;

        if (entry->st.kind != ENTRY_FILE || len <= n ||
            strcmp(entry->name + len - n, end) != 0)
            u->strange++;
        else
            TRY(add_job(u, name, name, entry->name, len - n, e));
    }
    return 0;
}

static int list_params(struct universal *u, struct err *e)
{
    for (size_t i = 0; i < listing_count(u->zero); i++) {
        const struct listing_entry *entry = listing_at(u->zero, i);

        if (entry->st.kind == ENTRY_DIR) {
            TRY(list_param(u, entry->name, e));
        } else {
            u->strange += strcmp(entry->name, "optimizer_state.pt") != 0;
        }
    }
    return 0;
}

static bool has_dir(const struct universal *u, const char *name, size_t len, char *copy)
{
    const struct listing_entry *entry;

    if (len > NAME_MAX || memchr(name, '\0', len))
        return false;
    memcpy(copy, name, len);
    copy[len] = '\0';
    entry = listing_find(u->zero, copy);
    return entry && entry->st.kind == ENTRY_DIR;
}

/* Tied names have no files of their own, unless the converter was told to make them. */
static int list_tied(struct universal *u, const struct ds_part *p, struct err *e)
{
    char alias[NAME_MAX + 1], owner[NAME_MAX + 1];
    struct pv shared, items;

    if (!ds_get_some(&p->root, "shared_params", &shared) ||
        !torch_mapping(&shared, &items) || items.kind != PV_DICT)
        return 0;
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv key = pv_key_at(&items, i), value = pv_value_at(&items, i);
        const char *name;
        size_t len;

        if (key.kind != PV_STR || value.kind != PV_STR)
            continue;
        name = pv_bytes(&value, &len);
        if (!has_dir(u, name, len, owner))
            continue;
        name = pv_bytes(&key, &len);
        if ((!has_dir(u, name, len, alias) || u->s->slices) && len <= NAME_MAX &&
            !memchr(name, '\0', len))
            TRY(add_job(u, alias, owner, master, sizeof master - 1, e));
    }
    return 0;
}

/* ---- one file ---- */

/* What the converter noted beside the tensor. */
static int add_notes(const struct pv *dict, struct buf *out)
{
    static const char *const names[] = {"cat_dim", "param_n_sub_params",
                                        "vocab_tensor"};
    struct pv v;

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        if (!ds_get(dict, names[i], &v) || (v.kind != PV_INT && v.kind != PV_BOOL) ||
            (v.kind == PV_INT && v.i < 0))
            continue;
        buf_addf(out, "%s\"%s\": ", out->len ? ", " : "", names[i]);
        if (v.kind == PV_BOOL)
            buf_adds(out, v.b ? "true" : "false");
        else
            buf_addf(out, "%" PRId64, v.i);
    }
    return buf_failed(out);
}

/* Stage 3 leaves tensors flat: only the model states tell their shape. */
static int add_shape(const struct ds_scan *s, const struct job *job,
                     const struct torch_tensor *x, struct buf *out)
{
    const struct ds_param *param;

    if (s->stage != 3 || s->nparts == 0 || x->shape.nd != 1)
        return 0;
    param = ds_param_find(&s->part[0], job->name, strlen(job->name));
    if (!param || param->nd == 1 || param->elements != x->shape.dim[0])
        return 0;
    buf_addf(out, "%s\"param_shape\": \"[", out->len ? ", " : "");
    for (uint32_t k = 0; k < param->nd; k++)
        buf_addf(out, "%s%" PRIu64, k ? ", " : "", param->dim[k]);
    return buf_adds(out, "]\"");
}

/*
 * What has no master has a file all the same (frozen and tied parameters, buffers): its copy,
 * of the first rank alone, even where others have other parts (DeepSpeed 0.19.8, main() of
 * ds_to_universal.py). True unless the notes say that all ranks have it.
 */
static bool is_slice(struct universal *u, const struct job *job)
{
    struct ds_scan *s = u->s;
    size_t len = strlen(job->name);
    struct ds_pattern *ignored;

    if (!s->slices || job->tied || strcmp(job->state, master) != 0)
        return false;
    for (size_t i = 0; i < s->nparts; i++)
        if (ds_param_find(&s->part[i], job->name, len))
            return false;
    return ds_patterns_find(&s->notes.kind[DS_NOTE_SAME], job->name, len,
                            &s->notes.effort, &ignored) == 0;
}

static int set_file_key(struct universal *u, const struct torch_file *f,
                        struct sink_tensor *t, struct err *e)
{
    struct buf *key = &u->s->key;

    buf_clear(key);
    buf_addf(key, "%s:param", f->path);
    if (buf_failed(key))
        return err_nomem(e);
    *t = (struct sink_tensor){.part = u->s->how->part,
                              .role = ROLE_OTHER,
                              .key = key->data,
                              .key_len = key->len};
    u->slices++;
    return 0;
}

/* The keys of a file's tensor: NAME, or optimizer.state.NAME.STATE. */
static int set_key(struct universal *u, const struct job *job, struct sink_tensor *t,
                   struct err *e)
{
    struct buf *key = &u->s->key;

    t->part = u->s->how->part;
    buf_clear(key);
    if (strcmp(job->state, master) == 0) {
        t->role = u->s->how->weights;
        buf_adds(key, job->name);
    } else {
        t->role = ROLE_OPTIMIZER;
        buf_addf(key, "optimizer.state.%s.%s", job->name, job->state);
    }
    if (buf_failed(key))
        return err_nomem(e);
    t->key = key->data;
    t->key_len = key->len;
    return 0;
}

static int report_damaged(struct universal *u, const struct torch_file *f,
                          struct sink_tensor *t, const char *why, struct err *e)
{
    static const struct shape none = {.nd = 1};

    t->dtype = DTYPE_U8;
    t->shape = &none;
    TRY(ds_begin(u->s, f->path, t, e));
    if (sink_fault(u->s->sink, "%s", why) < 0)
        return err_nomem(e);
    return sink_tensor_end(u->s->sink, e);
}

static int report_tensor(struct universal *u, const struct job *job,
                         const struct torch_file *f, const struct pv *dict,
                         const struct torch_tensor *x, struct sink_tensor *t,
                         struct err *e)
{
    CLEANUP(buf_release) struct buf notes = {0}, json = {0};

    if (add_notes(dict, &notes) < 0 || add_shape(u->s, job, x, &notes) < 0)
        return err_nomem(e);
    if (notes.len > 0) {
        buf_addf(&json, "{%s}", notes.data);
        if (buf_failed(&json))
            return err_nomem(e);
        t->attributes = json.data;
    }
    return torch_file_tensor(u->s->sink, f, x, t, e);
}

/* "step" can be a number of Python. */
static int report_value(struct universal *u, const struct torch_file *f,
                        const struct sink_tensor *t, const struct pv *v, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0}, prefix = {0};
    struct ds_entry x = {.f = f, .path = "", .role = ROLE_OTHER};

    buf_add(&key, t->key, t->key_len);
    buf_addf(&prefix, "%s:", f->path);
    if (buf_failed(&key) || buf_failed(&prefix))
        return err_nomem(e);
    x.prefix = prefix.data;
    TRY(ds_entry_tensors(u->s, &x, *v, e));
    return ds_entry_object(u->s, &x, key.data, v, e);
}

/* ds_file_fn */
static int report_file(void *user, size_t i, const struct torch_file *f, struct err *e)
{
    struct universal *u = user;
    const struct job *job = &u->job[i];
    struct sink_tensor t = {0};
    struct torch_tensor x;
    struct err why = {0};
    struct pv root, v;
    bool slice = is_slice(u, job);
    int rc;

    TRY(slice ? set_file_key(u, f, &t, e) : set_key(u, job, &t, e));
    if (!slice && strcmp(job->state, master) == 0)
        TRY(ds_see(u->s, job->name, strlen(job->name), e));
    if (!f->zip)
        return report_damaged(u, f, &t, u->s->damage->text, e);
    root = torch_zip_root(f->zip);
    if (!ds_get(&root, "param", &v))
        v = root;
    rc = torch_zip_tensor(f->zip, &v, &x, &why);
    if (rc == -ENOMEM)
        return err_nomem(e);
    if (rc < 0)
        return report_damaged(u, f, &t, why.text, e);
    return rc > 0 ? report_tensor(u, job, f, &root, &x, &t, e)
                  : report_value(u, f, &t, &root, e);
}

/* ---- what must be there ---- */

/* A parameter without a file is listed, and cannot be read. */
static int report_missing(struct universal *u, const struct ds_part *p, struct err *e)
{
    for (size_t i = 0; i < p->nparams; i++) {
        const struct ds_param *x = &p->param[i];
        struct shape shape;
        struct sink_tensor t = {.key = x->name,
                                .key_len = x->len,
                                .part = u->s->how->part,
                                .role = u->s->how->weights,
                                .dtype = DTYPE_F32,
                                .shape = &shape};
        int seen = ds_see(u->s, x->name, x->len, e);

        if (seen < 0)
            return seen;
        if (seen == 0)
            continue;
        ds_shape_of(x, &shape);
        TRY(ds_begin(u->s, p->model.path, &t, e));
        if (sink_fault(u->s->sink, "%s/NAME/%s%s is missing", zero_dir, master, end) <
            0)
            return err_nomem(e);
        TRY(sink_tensor_end(u->s->sink, e));
    }
    return 0;
}

/* ---- states that others have ---- */

/* Which states parameters have: each set of them once. What passes this is not compared. */
struct sets {
    const char *state[32], *first[32]; /* of the set: a parameter that has it */
    uint32_t bits[32];
    size_t states, count;
};

/* amsgrad is a group's own choice. */
static bool is_compared(const struct job *job)
{
    return !job->tied && strcmp(job->state, master) != 0 &&
           strcmp(job->state, "max_exp_avg_sq") != 0;
}

static uint32_t state_bit(struct sets *x, const char *state)
{
    size_t i = 0;

    while (i < x->states && strcmp(x->state[i], state) != 0)
        i++;
    if (i == ARRAY_SIZE(x->state))
        return 0;
    x->state[i] = state;
    x->states = MAX(x->states, i + 1);
    return UINT32_C(1) << i;
}

static void add_set(struct sets *x, uint32_t bits, const char *name)
{
    size_t i = 0;

    while (i < x->count && x->bits[i] != bits)
        i++;
    if (bits == 0 || i < x->count || i == ARRAY_SIZE(x->bits))
        return;
    x->bits[i] = bits;
    x->first[i] = name;
    x->count++;
}

/* The files of a parameter follow each other. */
static void find_sets(const struct universal *u, struct sets *x)
{
    uint32_t bits = 0;

    for (size_t i = 0; i < u->count; i++) {
        const struct job *job = &u->job[i];

        bits |= is_compared(job) ? state_bit(x, job->state) : 0;
        if (i + 1 == u->count || strcmp(job->name, job[1].name) != 0) {
            add_set(x, bits, job->name);
            bits = 0;
        }
    }
}

/* One optimizer gives all parameters the same states: what has some of another's lost one. */
static int tell_lost(struct universal *u, struct err *e)
{
    struct sets x = {0};

    find_sets(u, &x);
    for (size_t i = 0; i < x.count; i++) {
        uint32_t lost = 0;

        for (size_t k = 0; k < x.count; k++)
            if ((x.bits[i] & ~x.bits[k]) == 0)
                lost |= x.bits[k] & ~x.bits[i];
        if (lost &&
            sink_warning(u->s->sink, "missing-file",
                         "%s/%s has no %s%s, which other parameters with its "
                         "other states have",
                         zero_dir, x.first[i], x.state[__builtin_ctz(lost)], end) < 0)
            return err_nomem(e);
    }
    return 0;
}

static int hide_part(struct universal *u, struct err *e)
{
    char path[PATH_MAX];

    if (store_join(u->s->how->dir ? u->s->how->dir : "", zero_dir, path, sizeof path) <
        0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", zero_dir);
    TRY(sink_part(u->s->sink, path, e));
    return sink_watch(u->s->sink, path, e);
}

/* The optimizer's other state, as the first rank had it. */
static int report_optimizer(struct universal *u, struct err *e)
{
    CLEANUP(buf_release) struct buf object = {0};
    struct torch_report how = {
        .part = u->s->how->part, .role = ROLE_OTHER, .entries = true};
    char path[PATH_MAX];

    if (!listing_find(u->zero, "optimizer_state.pt"))
        return 0;
    if (store_join(u->s->how->dir ? u->s->how->dir : "", "zero/optimizer_state.pt",
                   path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", zero_dir);
    buf_addf(&object, "%soptimizer.", u->s->how->object ? u->s->how->object : "");
    if (buf_failed(&object))
        return err_nomem(e);
    how.object = object.data;
    return torch_file_report(u->s->c, u->s->sink, path, &how, e);
}

static int run(struct universal *u, struct err *e)
{
    TRY(hide_part(u, e));
    TRY(list_params(u, e));
    for (size_t i = 0; i < u->s->nparts; i++)
        TRY(list_tied(u, &u->s->part[i], e));
    TRY(ds_each_file_or_damage(u->s, u->file, u->count, report_file, u, e));
    for (size_t i = 0; i < u->s->nparts; i++)
        TRY(report_missing(u, &u->s->part[i], e));
    if (u->strange > 0 &&
        sink_warning(u->s->sink, "unknown-file",
                     "%s/ holds %" PRIu64 " things that are no tensor of a parameter",
                     zero_dir, u->strange) < 0)
        return err_nomem(e);
    if (u->slices > 0 &&
        sink_warning(u->s->sink, "unknown-cut",
                     "%" PRIu64 " tensors without a master are what the first of "
                     "several tensor-parallel ranks had, their keys are FILE:param",
                     u->slices) < 0)
        return err_nomem(e);
    u->s->told->files += u->count;
    TRY(tell_lost(u, e));
    return report_optimizer(u, e);
}

int ds_universal_report(struct ds_scan *s, struct err *e)
{
    struct universal u = {.s = s, .zero = listing_sub(s->listing, zero_dir)};
    int rc;

    if (!u.zero)
        return err_set(e, ESTALE, "%s/ is gone", zero_dir);
    rc = run(&u, e);
    release(&u);
    return rc;
}
