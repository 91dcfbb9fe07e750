/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/verl.c - verl's checkpoints of FSDP: a torch.save file a rank. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "index/formats/hf/safetensors_dir.h"
#include "index/formats/hf/choose.h"
#include "index/formats/rankfiles/optim_names.h"
#include "index/formats/rankfiles/rank_set.h"
#include "index/formats/rankfiles/verl_files.h"
#include "index/formats/step.h"

enum { MAX_CONFIG = 1 << 16 }; /* two numbers */

static const char CONFIG[] = "fsdp_config.json";
#define HF "huggingface"

/* ---- bids ---- */

static bool is_torch(struct listing *l, const char *name)
{
    unsigned char head[TORCH_HEAD];
    size_t got = 0;

    if (listing_peek(l, name, head, sizeof head, &got) < 0)
        return false;
    switch (torch_sniff(head, got)) {
    case TORCH_ZIP:
    case TORCH_MAYBE:
    case TORCH_LEGACY:
        return true;
    case TORCH_NOT:
    case TORCH_TAR:
        break;
    }
    return false;
}

/* A full model of safetensors, which is read with the optimizer's files. */
static bool has_full(struct listing *l)
{
    enum safetensors_kind kind = hf_choose(l)->safetensors.kind;

    return kind != SAFETENSORS_NONE && kind != SAFETENSORS_PIECES;
}

static void verl_bid(struct listing *l, struct bid *out)
{
    const char *best = NULL;
    struct verl_name name;
    bool model = false;

    *out = (struct bid){0};
    for (size_t i = 0; i < listing_count(l) && !model; i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind != ENTRY_FILE || !verl_name(entry->name, &name) ||
            name.kind == VERL_EXTRA)
            continue;
        model = name.kind == VERL_MODEL;
        best = entry->name;
    }
    if (!best)
        return;
    out->score = !is_torch(l, best) ? 45 : model ? 88 : has_full(l) ? 82 : 80;
    snprintf(out->reason, sizeof out->reason, "%s is a rank's %s of verl%s", best,
             model ? "model" : "optimizer",
             out->score == 45 ? " by its name, and no torch.save file" : "");
}

/* ---- the scan ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    uint64_t version, world; /* as fsdp_config.json tells; 0: it does not */
    struct verl_files files;
    struct rank_set *model, *optim;
    struct optim_names names;
    bool adapter; /* in place of the model */
};

static void scan_release(struct scan *s)
{
    rank_set_free(s->optim);
    rank_set_free(s->model);
    optim_names_release(&s->names);
    verl_files_release(&s->files);
}

/* It is not there in older versions, and not needed: names of files tell the ranks. */
static int read_config(struct scan *s, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0};
    size_t len;

    if (!listing_find(s->c->listing, CONFIG))
        return 0;
    TRY(sink_watch(s->sink, CONFIG, e));
    if (listing_read(s->c->listing, CONFIG, MAX_CONFIG, &text, &len, &why) == 0 &&
        json_parse(text, len, &json_python, &doc, &why) == 0) {
        if (!json_u64(json_get(doc, "world_size"), &s->world))
            s->world = 0;
        if (!json_u64(json_get(doc, "FSDP_version"), &s->version))
            s->version = 0;
        return 0;
    }
    if (why.code == ENOMEM ||
        sink_warning(s->sink, "damaged-file", "%s: %s", CONFIG, why.text) < 0)
        return err_nomem(e);
    return 0;
}

static int find_files(struct scan *s, struct err *e)
{
    TRY(read_config(s, e));
    TRY(verl_files_find(s->c->listing, s->world, &s->files, e));
    for (size_t i = 0; i < s->files.nstale; i++)
        TRY(sink_hide(s->sink, s->files.stale[i], false, e));
    if (s->files.nstale > 0 && sink_warning(s->sink, "stale-file",
                                            "%zu files of another save, of %" PRIu32
                                            " ranks: they are not shown",
                                            s->files.nstale, s->files.stale_world) < 0)
        return err_nomem(e);
    return 0;
}

/* ---- huggingface/ ---- */

/* A full copy of the model, where one was asked for: shards win, verify compares. */
static int hide_copy(struct scan *s, struct listing *l, const char *name, struct err *e)
{
    char path[PATH_MAX];
    size_t len = strlen(name);
    bool index = len > 11 && strcmp(name + len - 11, ".index.json") == 0;
    bool bin = strncmp(name, "pytorch_model", 13) == 0;

    if (store_join(HF, name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", HF, name);
    if (safetensors_is_named(l, name))
        return sink_copy(s->sink, path, e);
    return index || bin ? sink_hide(s->sink, path, false, e) : 0;
}

/* config.json and the tokenizer come to the top. */
static int lift_config(struct scan *s, struct err *e)
{
    struct listing *l = listing_sub(s->c->listing, HF);

    if (!l)
        return 0;
    TRY(sink_part(s->sink, HF, e));
    TRY(sink_watch(s->sink, HF, e));
    for (size_t i = 0; s->model && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind == ENTRY_FILE)
            TRY(hide_copy(s, l, entry->name, e));
    }
    return 0;
}

/*
 * Without a rank's file of the model it may have been saved in full: verl, told to save
 * hf_model in place of model, puts it into huggingface/, AReaL beside the optimizer's files.
 */
static int report_full(struct scan *s, struct err *e)
{
    static const char *const dirs[] = {"", HF};
    struct safetensors_how how = {.role = ROLE_MODEL};
    const struct safetensors_layout *layout;
    struct safetensors_told told;
    struct listing *l;

    for (size_t i = 0; !s->model && i < ARRAY_SIZE(dirs); i++) {
        l = dirs[i][0] ? listing_sub(s->c->listing, dirs[i]) : s->c->listing;
        if (!l)
            continue;
        layout = &hf_choose(l)->safetensors;
        if (layout->kind == SAFETENSORS_NONE || layout->kind == SAFETENSORS_PIECES)
            continue;
        how.dir = dirs[i];
        s->adapter = layout->kind == SAFETENSORS_ADAPTER;
        if (s->adapter || layout->kind == SAFETENSORS_SINGLE)
            how.name = layout->main;
        return safetensors_dir_report(s->c, s->sink, &how, &told, e);
    }
    return 0;
}

/* ---- model and optimizer ---- */

static int load_set(struct scan *s, enum verl_kind kind, const struct rank_set_how *how,
                    struct rank_set **out, struct err *e)
{
    const struct verl_file *file = s->files.file[kind];
    uint32_t n = s->files.count[kind];

    if (n == 0)
        return 0;
    TRY(rank_set_new(s->c, s->sink, how, out, e));
    rank_set_expect(*out, s->files.world - n);
    for (uint32_t i = 0; i < n; i++)
        TRY(rank_set_add(*out, file[i].name, e));
    return rank_set_load(*out, e);
}

static const struct rank_set_how model_how = {.role = ROLE_MODEL};

/* rank_set_how.on_first of the optimizer. */
static int find_names(void *user, const struct torch_file *f, struct err *e)
{
    static const char key[] = "optim:index_to_name";
    struct scan *s = user;
    CLEANUP(buf_release) struct buf json = {0};
    struct pv root = torch_zip_root(f->zip);

    TRY(optim_names_find(&s->names, s->model, s->optim, &root, e));
    if (s->names.count == 0 ||
        (!rank_set_is_distributed(s->optim) && s->files.world > 1))
        return 0;
    if (optim_names_json(&s->names, &json) < 0)
        return err_nomem(e);
    return sink_object(s->sink, key, sizeof key - 1, json.data, json.len, e);
}

/* rank_set_how.rename */
static int name_state(void *user, const char *path, size_t len, struct buf *key)
{
    const struct scan *s = user;

    return optim_names_rename(&s->names, path, len, key);
}

/* An optimizer that cannot be read is no reason to hide the model. */
static int report_optim(struct scan *s, const struct rank_set_how *how, struct err *e)
{
    struct err why = {0};

    if (load_set(s, VERL_OPTIM, how, &s->optim, &why) == 0)
        return s->optim ? rank_set_report(s->optim, e) : 0;
    if (!s->model || (why.code != EBADMSG && why.code != ENOTSUP && why.code != EIO &&
                      why.code != EFBIG)) {
        return err_copy(e, &why);
    }
    return 0; /* each of its files was told */
}

static int tell_unnamed(struct scan *s, struct err *e)
{
    if (!s->names.numbered || !rank_set_is_distributed(s->optim))
        return 0;
    return sink_warning(s->sink, "unnamed-optimizer",
                        "the optimizer's entries have numbers: %s do not tell which "
                        "parameters they are of",
                        s->names.several ? "its several groups" : "the files") < 0
               ? err_nomem(e)
               : 0;
}

static int report_extra(struct scan *s, struct err *e)
{
    static const struct torch_report how = {.role = ROLE_OTHER};

    for (uint32_t i = 0; i < s->files.count[VERL_EXTRA]; i++)
        TRY(torch_file_report(s->c, s->sink, s->files.file[VERL_EXTRA][i].name, &how,
                              e));
    return 0;
}

/* ---- the checkpoint ---- */

static const char *main_file(const struct scan *s)
{
    for (int k = 0; k < VERL_KINDS; k++)
        if (s->files.count[k] > 0)
            return s->files.file[k][0].name;
    return NULL;
}

/* .../global_step_100/actor */
static bool find_step(const struct listing *l, int64_t *step)
{
    static const char prefix[] = "global_step_";
    const char *at = listing_path(l), *end, *slash;
    char part[64];

    for (; *at; at = *end ? end + 1 : end) {
        slash = strchr(at, '/');
        end = slash ? slash : at + strlen(at);
        if (strncmp(at, prefix, sizeof prefix - 1) != 0 ||
            (size_t)(end - at) >= sizeof part)
            continue;
        memcpy(part, at, (size_t)(end - at));
        part[end - at] = '\0';
        if (step_of_name(part, step))
            return true;
    }
    return step_of_name(listing_name(l), step);
}

static void add_mesh(const struct dist_mesh *m, struct buf *out)
{
    buf_adds(out, ", \"mesh\": [");
    for (uint32_t i = 0; i < m->naxes; i++) {
        buf_adds(out, i ? ", [" : "[");
        buf_add_json(out, m->name[i], strlen(m->name[i]));
        buf_addf(out, ", %" PRIu64 "]", m->size[i]);
    }
    buf_addc(out, ']');
}

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    const char *file = main_file(s);
    char path[PATH_MAX];
    struct sink_checkpoint about = {.format = "verl-fsdp", .framework = "verl"};

    if (file && store_join(s->c->dir, file, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", s->c->dir, file);
    about.metadata_file = file ? path : NULL;
    about.adapter = s->adapter;
    about.has_step = find_step(s->c->listing, &about.step);
    buf_addf(&topology, "{\"ranks\": %" PRIu32, s->files.world);
    if (s->version > 0)
        buf_addf(&topology, ", \"fsdp\": %" PRIu64, s->version);
    if (s->model && rank_set_mesh(s->model)->naxes > 0)
        add_mesh(rank_set_mesh(s->model), &topology);
    buf_addc(&topology, '}');
    if (buf_failed(&topology))
        return err_nomem(e);
    about.topology = topology.data;
    return sink_checkpoint(s->sink, &about, e);
}

static int report(struct scan *s, const struct rank_set_how *optim_how, struct err *e)
{
    /* First without what the files tell: also a scan that fails has a format. */
    TRY(find_files(s, e));
    TRY(tell_checkpoint(s, e));
    TRY(load_set(s, VERL_MODEL, &model_how, &s->model, e));
    if (s->model)
        TRY(rank_set_report(s->model, e));
    TRY(lift_config(s, e));
    TRY(report_full(s, e));
    TRY(report_optim(s, optim_how, e));
    TRY(tell_unnamed(s, e));
    TRY(report_extra(s, e));
    return tell_checkpoint(s, e);
}

static int verl_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    CLEANUP(scan_release) struct scan s = {.c = c, .sink = sink};
    const struct rank_set_how optim_how = {
        .part = "optim",
        .role = ROLE_OPTIMIZER,
        .optimizer = true,
        .object = "optim:",
        .on_first = find_names,
        .rename = name_state,
        .user = &s,
    };

    return report(&s, &optim_how, e);
}

static const struct chunk_codec *const verl_codecs[] = {&codec_zip_deflate, NULL};

const struct format_driver format_verl = {
    .name = "verl",
    .title = "verl: FSDP's sharded state dicts, a torch.save file a rank",
    .bid = verl_bid,
    .scan = verl_scan,
    .codecs = verl_codecs,
};
