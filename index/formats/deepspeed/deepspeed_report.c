/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_report.c - one save, from its files to the sink. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_walk.h"

static const size_t MAX_MEMORY = (size_t)1 << 30; /* of what is known of all files */

/* ---- the files ---- */

/*
 * Several writers of FastFileWriter write the whole file each, with torch as it is. A torch
 * that was patched for it (save_torch_storage_object_list(), of the old format alone) has
 * each write its part of the storages behind the same pickles, which nothing here tells.
 */
static int check_writers(struct ds_scan *s, struct err *e)
{
    for (size_t i = 0; i < s->files.count; i++) {
        const struct ds_file *f = &s->files.file[i];
        unsigned char head[TORCH_HEAD];
        size_t got = 0;
        int rc;

        if (f->writers <= 1)
            continue;
        rc = listing_peek(s->listing, f->name, head, sizeof head, &got);
        if (rc < 0)
            return err_set(e, -rc, "%s cannot be read", f->name);
        if (torch_sniff(head, got) == TORCH_LEGACY)
            return err_set(e, ENOTSUP,
                           "%s: torch's old format by %" PRIu32
                           " writers is not supported, it may be in parts",
                           f->name, f->writers);
    }
    return 0;
}

static int hide_copies(struct ds_scan *s, struct err *e)
{
    const char *dir = s->how->dir ? s->how->dir : "";
    char path[PATH_MAX];

    for (size_t i = 0; i < s->files.copies; i++) {
        if (store_join(dir, s->files.copy[i], path, sizeof path) < 0)
            return err_set(e, ENAMETOOLONG, "%s: the path is too long",
                           s->files.copy[i]);
        TRY(sink_hide(s->sink, path, false, e));
    }
    return 0;
}

static int list_files(struct ds_scan *s, struct err *e)
{
    TRY(ds_files_list(s->listing, &s->files, e));
    TRY(check_writers(s, e));
    return hide_copies(s, e);
}

/* ---- the parts ---- */

/* The files of one kind that are of one model-parallel rank. */
static const struct ds_file *files_of(const struct ds_scan *s, enum ds_kind kind,
                                      uint32_t mp, size_t *n)
{
    const struct ds_file *first = NULL;

    *n = 0;
    for (size_t i = 0; i < ds_files_of(&s->files, kind); i++) {
        const struct ds_file *f = ds_files_at(&s->files, kind, i);

        if (f->mp != mp)
            continue;
        if (!first)
            first = f;
        ++*n;
    }
    return first;
}

static int make_part(struct ds_scan *s, uint32_t mp, struct err *e)
{
    struct ds_part *p = &s->part[mp];
    size_t nranks;

    p->mp = mp;
    p->files = files_of(s, DS_MODEL, mp, &p->nmodels);
    p->optim = files_of(s, DS_OPTIM, mp, &nranks);
    p->nranks = (uint32_t)nranks;
    if (!p->files)
        return err_set(e, EBADMSG, "mp_rank_%02u has no model states", mp);
    for (size_t i = 0; i < p->nmodels; i++)
        if (p->files[i].dp != i)
            return err_set(e, EBADMSG, "model states of rank %zu are missing", i);
    return 0;
}

static uint32_t last_mp(const struct ds_scan *s)
{
    static const enum ds_kind kinds[] = {DS_MODEL, DS_OPTIM};
    uint32_t last = 0;

    for (size_t k = 0; k < ARRAY_SIZE(kinds); k++)
        for (size_t i = 0; i < ds_files_of(&s->files, kinds[k]); i++)
            last = MAX(last, ds_files_at(&s->files, kinds[k], i)->mp);
    return last;
}

static int make_parts(struct ds_scan *s, struct err *e)
{
    size_t n = ds_files_of(&s->files, DS_MODEL), last = last_mp(s);

    if (n == 0 && ds_files_of(&s->files, DS_OPTIM) == 0)
        return ds_files_of(&s->files, DS_LAYER) > 0 || s->universal
                   ? 0
                   : err_set(e, ESTALE, "no files of DeepSpeed any more");
    if (n == 0)
        return err_set(e, EBADMSG, "there are no model states, only optimizer states");
    if (last >= n)
        return err_set(e, EBADMSG,
                       "some of the model states up to mp_rank_%02zu are "
                       "missing",
                       last);
    s->nparts = last + 1;
    s->part = arena_array(s->arena, s->nparts, sizeof *s->part);
    if (!s->part)
        return err_nomem(e);
    for (uint32_t mp = 0; mp < s->nparts; mp++) {
        TRY(make_part(s, mp, e));
        TRY(ds_model_open(s, &s->part[mp], e));
    }
    return 0;
}

/* ---- what cannot be put together ---- */

/* Ranks that slice tensors; 0: not told. */
static uint64_t tensor_ranks(const struct ds_scan *s)
{
    struct pv dims, v;
    uint64_t n;

    if (ds_get_some(&s->part[0].root, "checkpoint_parallel_dimensions", &dims) &&
        ds_get(&dims, "tp_degree", &v) && pv_u64(&v, &n) && n > 0)
        return n;
    if (ds_files_of(&s->files, DS_LAYER) == 0)
        return 0;
    /* A pipeline's layers tell: layer_02-model_01 is a slice. */
    n = 0;
    for (size_t i = 0; i < ds_files_of(&s->files, DS_LAYER); i++)
        n = MAX(n, ds_files_at(&s->files, DS_LAYER, i)->mp + 1ULL);
    return n;
}

/* Slices go together by universal_checkpoint_info, or not at all. */
static int take_notes(struct ds_scan *s, struct err *e)
{
    uint64_t ranks = tensor_ranks(s);
    int rc;

    s->tensor = (uint32_t)(ranks > 0 ? MIN(ranks, (uint64_t)s->nparts) : s->nparts);
    if (s->nparts % s->tensor != 0 || s->tensor != MAX(ranks, (uint64_t)s->tensor))
        return err_set(e, EBADMSG,
                       "%zu model-parallel ranks are no stages of %" PRIu64
                       " tensor-parallel ranks",
                       s->nparts, ranks);
    rc = ds_notes_take(s->arena, &s->part[0].root, s->tensor, &s->notes, e);
    if (rc < 0)
        return err_wrap(e, "%s", s->part[0].model.path);
    if (rc > 0)
        return 0;
    err_set(e, ENOTSUP,
            "tensors are in slices of %u tensor-parallel ranks, and no "
            "universal_checkpoint_info in %s tells how they go together",
            s->tensor, s->part[0].model.path);
    return err_hint(e,
                    "stages of a pipeline are joined; so are slices that the training "
                    "script noted, which DeepSpeed's ds_to_universal.py asks for too");
}

static int find_slices(struct ds_scan *s, struct err *e)
{
    s->tensor = 1;
    for (size_t i = 0; i < ds_files_of(&s->files, DS_LAYER); i++)
        if (ds_files_at(&s->files, DS_LAYER, i)->mp > 0)
            return err_set(e, ENOTSUP,
                           "%s: layers in tensor-parallel slices are not "
                           "supported",
                           ds_files_at(&s->files, DS_LAYER, i)->name);
    if (s->nparts <= 1)
        return 0;
    if (ds_files_of(&s->files, DS_EXPERT) > 0)
        return err_set(e, ENOTSUP,
                       "experts on %zu model-parallel ranks are not "
                       "supported",
                       s->nparts);
    /* Stages of a pipeline have parameters of their own. */
    return tensor_ranks(s) == 1 ? 0 : take_notes(s, e);
}

/* All ranks that took part have a file, and no others. */
static int check_ranks(const struct ds_scan *s, struct err *e)
{
    struct pv dims, v;
    uint64_t n = 0, tensor, stages;

    if (s->nparts == 0)
        return 0;
    if (ds_get_some(&s->part[0].root, "checkpoint_parallel_dimensions", &dims) &&
        ds_get(&dims, "tp_degree", &v) && pv_u64(&v, &tensor) &&
        ds_get(&dims, "pp_degree", &v) && pv_u64(&v, &stages) &&
        (mul_overflows(tensor, stages, &n) || n != s->nparts))
        return err_set(e, EBADMSG,
                       "%zu model-parallel ranks, not %" PRIu64 " stages of %" PRIu64
                       " ranks",
                       s->nparts, stages, tensor);
    if (ds_get_some(&s->part[0].root, "mp_world_size", &v) && pv_u64(&v, &n) &&
        n > s->nparts)
        return err_set(e, EBADMSG,
                       "%" PRIu64 " model-parallel ranks saved, there are files of %zu",
                       n, s->nparts);
    return 0;
}

/* ---- what is told ---- */

static const char *format_of(const struct ds_scan *s)
{
    static const char *const formats[] = {"deepspeed-zero0", "deepspeed-zero1",
                                          "deepspeed-zero2", "deepspeed-zero3"};

    return s->universal ? "deepspeed-universal" : formats[s->stage];
}

static void tell_text(const struct pv *v, char *dst, size_t size)
{
    const char *text;
    size_t len;

    if (v->kind != PV_STR)
        return;
    text = pv_bytes(v, &len);
    ds_text(text, len, dst, size);
}

static void tell(struct ds_scan *s)
{
    struct deepspeed_told *told = s->told;
    const struct ds_part *p = s->part;
    struct pv v;
    uint64_t step;

    told->format = format_of(s);
    told->files = s->files.count;
    told->model_ranks = s->nparts;
    told->has_step = step_of_name(listing_name(s->listing), &told->step);
    if (!p)
        return;
    told->tensor_ranks = s->nparts > 1 ? tensor_ranks(s) : 1;
    told->data_ranks = MAX(p->nranks, (uint64_t)p->nmodels);
    if (ds_get(&p->root, "dp_world_size", &v) && pv_u64(&v, &step))
        told->data_ranks = step;
    if (ds_get(&p->root, "global_steps", &v) && pv_u64(&v, &step) &&
        step <= INT64_MAX) {
        told->has_step = true;
        told->step = (int64_t)step;
    }
    if (ds_get(&p->root, "ds_version", &v))
        tell_text(&v, told->version, sizeof told->version);
    if (store_join(s->c->dir, p->model.path, told->metadata, sizeof told->metadata) < 0)
        told->metadata[0] = '\0';
}

/* ---- tensors ---- */

static int take_buffers(struct ds_scan *s, struct err *e)
{
    for (size_t i = 0; i < s->nparts; i++) {
        struct pv names;

        if (!ds_get_some(&s->part[i].root, "buffer_names", &names) ||
            names.kind != PV_LIST)
            continue;
        for (size_t k = 0; k < pv_count(&names); k++) {
            struct pv name = pv_at(&names, k);
            const char *text;
            size_t len;

            if (name.kind != PV_STR)
                continue;
            text = pv_bytes(&name, &len);
            if (keyset_add(&s->buffers, text, len) < 0)
                return err_nomem(e);
            TRY(ds_own_layer(s, text, len, e));
        }
    }
    return 0;
}

/* ds_file_fn */
static int add_expert(void *user, size_t i, const struct torch_file *f, struct err *e)
{
    struct pv root = torch_zip_root(f->zip), items;

    (void)i;
    if (!torch_mapping(&root, &items))
        return err_set(e, EBADMSG, "%s: the object is no dict", f->path);
    return ds_report_module(user, f, &items, e);
}

static int add_layer(void *user, size_t i, const struct torch_file *f, struct err *e)
{
    struct ds_scan *s = user;

    return ds_report_layer(s, f, ds_files_at(&s->files, DS_LAYER, i)->layer, e);
}

/* Optimizers of experts without ZeRO: by numbers, as that of stage 0. */
static int add_expert_optim(void *user, size_t i, const struct torch_file *f,
                            struct err *e)
{
    struct ds_scan *s = user;
    const struct torch_report how = {.part = s->how->part, .role = ROLE_OPTIMIZER};

    (void)i;
    return torch_file_report_loaded(s->sink, f, &how, e);
}

static int each_of(struct ds_scan *s, enum ds_kind kind, ds_file_fn *fn, struct err *e)
{
    return ds_each_file(s, &s->files.file[s->files.begin[kind]],
                        ds_files_of(&s->files, kind), fn, s, e);
}

static int report_part(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    bool masters = p->has_shapes && p->nranks > 0;

    /* Where they are lost, only what the copy does not have either is told of them. */
    if (masters)
        TRY(ds_report_masters(s, p, e));
    TRY(ds_report_frozen(s, p, e));
    TRY(ds_report_tied(s, p, e));
    TRY(ds_report_module(s, &p->model, &p->module, e));
    if (p->lost)
        TRY(ds_report_masters(s, p, e));
    if (masters)
        TRY(ds_report_states(s, p, e));
    return ds_model_objects(s, p, e);
}

static int report_parts(struct ds_scan *s, struct err *e)
{
    for (size_t i = 0; i < s->nparts; i += s->tensor)
        TRY(s->tensor > 1 ? ds_join_stage(s, &s->part[i], e)
                          : report_part(s, &s->part[i], e));
    return s->tensor > 1 ? ds_join_end(s, e) : 0;
}

static int report_all(struct ds_scan *s, struct err *e)
{
    TRY(take_buffers(s, e));
    TRY(ds_tied_find(s, e));
    TRY(report_parts(s, e));
    TRY(each_of(s, DS_EXPERT, add_expert, e));
    TRY(each_of(s, DS_LAYER, add_layer, e));
    return each_of(s, DS_EXPERT_OPTIM, add_expert_optim, e);
}

/* ---- the optimizer's files ---- */

/*
 * Files of optimizer states are lost: the copy that the model computed with is the model.
 */
static int lose_masters(const struct ds_scan *s, struct ds_part *p, struct err *e)
{
    bool copy = p->has_shapes && p->module.kind == PV_DICT && !p->files->sharded;

    if (!p->incomplete || !copy || s->tensor > 1 || s->how->rule ||
        ds_files_of(&s->files, DS_EXPERT) > 0)
        return -e->code;
    p->lost = arena_memdup(s->arena, e->text, strlen(e->text));
    if (!p->lost)
        return err_nomem(e);
    p->nranks = 0;
    *e = (struct err){0};
    return sink_warning(s->sink, "lost-files",
                        "%s: the fp32 weights and the optimizer's states are lost with "
                        "it; the model is the copy that it computed with",
                        p->lost) < 0
               ? err_nomem(e)
               : 0;
}

static int read_optim(struct ds_scan *s, struct err *e)
{
    s->stage = s->nparts > 0 && s->part[0].files->sharded ? 3 : 0;
    for (size_t i = 0; i < s->nparts; i++) {
        struct ds_part *p = &s->part[i];

        p->incomplete = p->nranks == 0 && (s->part[0].nranks > 0 || s->part[0].lost);
        if (p->incomplete)
            err_set(e, EBADMSG, "mp_rank_%02u has no optimizer states", p->mp);
        if (p->incomplete ? lose_masters(s, p, e) < 0 : ds_optim_read(s, p, e) < 0)
            TRY(lose_masters(s, p, e));
        if ((s->stage == 3) != p->files->sharded)
            return err_set(e, EBADMSG, "%s: not the model states of stage %d",
                           p->model.path, s->stage);
        if (s->stage == 3 && p->nmodels != p->nranks)
            return err_set(e, EBADMSG,
                           "%zu files of model states, %u of optimizer states",
                           p->nmodels, p->nranks);
        if (s->stage == 3 && !p->has_shapes)
            return err_set(e, EBADMSG, "%s has no param_shapes", p->model.path);
    }
    return 0;
}

/* ZeRO saved, and its files are gone: what is left is the copy of the model. */
static int warn_lost(struct ds_scan *s, struct err *e)
{
    const char *why = NULL;

    if (s->files.unknown > 0 &&
        sink_warning(s->sink, "unknown-file",
                     "%zu files of states are not DeepSpeed's (%.100s)",
                     s->files.unknown, s->files.first_unknown) < 0)
        return err_nomem(e);
    if (s->nparts > 0 && s->part[0].nranks == 0 && s->part[0].has_shapes &&
        !s->part[0].lost)
        why = "there are no optimizer states: NAME is what the model computed with";
    if (s->nparts > 0 && s->part[0].nranks > 0 && !s->part[0].has_shapes)
        why = "param_shapes is missing: nothing tells where the masters lie";
    if (why && sink_warning(s->sink, "no-masters", "%s", why) < 0)
        return err_nomem(e);
    return 0;
}

/*
 * ZenFlow brings the most important columns up to date on the device, in the copy alone, and
 * the masters with those only when it selects anew (0.19.8, zenflow_stage_1_and_2.py,
 * sync_fp32_param_from_gpu()): what is saved between is behind, in no file it says by how much.
 */
static int warn_stale(struct ds_scan *s, struct err *e)
{
    struct pv ignored;

    if (s->nparts == 0 || (!s->universal && s->part[0].nranks == 0) ||
        !ds_zero_option(&s->part[0].root, "zenflow", &ignored))
        return 0;
    return sink_warning(
               s->sink, "stale-masters",
               "trained with ZenFlow: some columns of NAME and its states may be "
               "of earlier steps than %s",
               s->stage == 3 ? "the model, whose own are in no file" : "module.NAME") <
                   0
               ? err_nomem(e)
               : 0;
}

static bool has_super_offload(const struct ds_part *p)
{
    struct pv offload, v;

    return ds_zero_option(&p->root, "offload_optimizer", &offload) &&
           ds_get(&offload, "super_offload", &v) && v.kind == PV_BOOL && v.b;
}

/*
 * What a device of its own steps is not in the optimizer that DeepSpeed saves: in stage 3
 * sub-groups that offload_optimizer's `ratio` leaves on the GPU (backup_optimizer of
 * stage3.py, 0.19.8), and with SuperOffload all (a process of its own, superoffload_utils.py).
 */
static int warn_lost_states(struct ds_scan *s, struct err *e)
{
    const struct ds_part *p = s->part;
    uint32_t with = 0, without = 0;

    if (s->nparts == 0 || p->nranks == 0 || !p->has_shapes)
        return 0;
    for (uint32_t g = 0; g < p->ngroups; g++) {
        bool any = p->rank[0].flat[(size_t)g * p->nslots + DS_MASTER].count > 0;

        with += any && p->stated[g];
        without += any && !p->stated[g];
    }
    if (without == 0 || (with == 0 && !has_super_offload(p)))
        return 0;
    return sink_warning(
               s->sink, "lost-states",
               "%u of %u groups of weights have no states in the optimizer's files%s",
               without, with + without,
               with == 0 ? ": SuperOffload does not save them" : "") < 0
               ? err_nomem(e)
               : 0;
}

/* ---- universal checkpoints ---- */

/* A pipeline's ranks have no copy: it was in layer files, which are not converted. */
static bool has_copies(const struct ds_scan *s)
{
    for (size_t i = 0; i < s->nparts; i++)
        if (s->part[i].module.kind == PV_DICT && pv_count(&s->part[i].module) > 0)
            return true;
    return false;
}

/*
 * The tensors of zero/ are whole, whatever the ranks were. Model states are copied from the
 * ranks as they were: those of tensor-parallel ones stay slices, and are not shown.
 */
static int report_universal(struct ds_scan *s, struct err *e)
{
    struct err ignored = {0};

    s->slices = s->nparts > 1 && tensor_ranks(s) != 1 && has_copies(s);
    s->stage = s->nparts > 0 && s->part[0].files->sharded ? 3 : 2;
    tell(s);
    if (s->slices && ds_notes_take(s->arena, &s->part[0].root, (uint32_t)s->nparts,
                                   &s->notes, &ignored) < 0)
        s->notes = (struct ds_notes){0};
    TRY(warn_stale(s, e));
    TRY(ds_universal_report(s, e));
    if (s->slices &&
        sink_warning(s->sink, "slices",
                     "the copies that %zu model-parallel ranks computed with "
                     "are slices, and not shown",
                     s->nparts) < 0)
        return err_nomem(e);
    for (size_t i = 0; i < s->nparts; i++) {
        struct ds_part *p = &s->part[i];

        if (!s->slices) {
            TRY(ds_report_frozen(s, p, e));
            TRY(ds_report_tied(s, p, e));
            TRY(ds_report_module(s, &p->model, &p->module, e));
        }
        TRY(ds_model_objects(s, p, e));
    }
    return 0;
}

/* The optimizer alone: each stage's ranks by the caller's rule. */
static int run_states(struct ds_scan *s, struct err *e)
{
    uint64_t ranks = s->nparts > 0 ? tensor_ranks(s) : 0;

    if (ranks == 0 || s->nparts % ranks != 0)
        return err_set(e, EBADMSG,
                       "%zu model-parallel ranks are no stages of %" PRIu64
                       " tensor-parallel ranks",
                       s->nparts, ranks);
    s->tensor = (uint32_t)ranks;
    s->notes = (struct ds_notes){.arena = s->arena, .ranks = s->tensor};
    TRY(check_ranks(s, e));
    TRY(read_optim(s, e));
    for (size_t i = 0; i < s->nparts; i++)
        if (!s->part[i].has_shapes || s->part[i].nranks == 0)
            return err_set(e, EBADMSG,
                           "%s does not tell what the optimizer's files hold",
                           s->part[i].model.path);
    for (size_t i = 0; i < s->nparts; i += s->tensor)
        TRY(ds_join_states(s, &s->part[i], e));
    return 0;
}

static int run(struct ds_scan *s, struct err *e)
{
    TRY(list_files(s, e));
    s->universal =
        listing_find(s->listing, "zero") && ds_files_of(&s->files, DS_OPTIM) == 0;
    TRY(make_parts(s, e));
    if (s->how->rule)
        return run_states(s, e);
    if (s->universal)
        return report_universal(s, e);
    tell(s);
    TRY(check_ranks(s, e));
    TRY(find_slices(s, e));
    TRY(read_optim(s, e));
    tell(s);
    return warn_lost(s, e) < 0 || warn_stale(s, e) < 0 || warn_lost_states(s, e) < 0
               ? -e->code
               : report_all(s, e);
}

static void release(struct ds_scan *s)
{
    for (size_t i = 0; i < s->nparts; i++)
        torch_file_close(&s->part[i].model);
    ds_files_release(&s->files);
    keyset_release(&s->seen);
    keyset_release(&s->buffers);
    keyset_release(&s->own);
    buf_release(&s->key);
    arena_free(s->arena);
}

int deepspeed_report(const struct scan_context *c, struct sink *sink,
                     const struct deepspeed_how *how, struct deepspeed_told *told,
                     struct err *e)
{
    struct ds_scan s = {.c = c, .sink = sink, .how = how, .told = told};
    int rc;

    *told = (struct deepspeed_told){.format = "deepspeed"};
    s.listing = listing_below(c->listing, how->dir ? how->dir : "");
    if (!s.listing)
        return err_set(e, ENOENT, "%s is gone", how->dir);
    s.arena = arena_new(MAX_MEMORY);
    rc = s.arena ? run(&s, e) : err_nomem(e);
    release(&s);
    return rc;
}
