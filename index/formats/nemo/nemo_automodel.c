/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_automodel.c - NeMo AutoModel's epoch_E_step_S: model/, optim/, state. */
#include "index/formats/format.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/hf/hf_dcp.h"
#include "index/formats/optim_sizes.h"
#include "index/formats/hf/safetensors_dir.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/formats/hf/safetensors_layout.h"
#include "index/formats/dcp/torch_dcp.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/nemo/nemo_adapter.h"

static const char model_dir[] = "model";
static const char optim_dir[] = "optim";
static const char full_dir[] = "model/consolidated";
static const char adapter_name[] = "adapter_model.safetensors";
static const char adapter_path[] = "model/adapter_model.safetensors";
static const char composer_name[] = "composer_metadata.json";
static const char unfinished[] = ".incomplete"; /* while the save runs, or for ever */

enum {
    MAX_COMPOSER = 64 << 10 /* it takes half a KiB: versions, and what machine it was */
};

/* ---- what it is ---- */

/* What model/ holds. */
enum model_kind {
    MODEL_NONE,
    MODEL_DCP,     /* model_save_format=torch_save */
    MODEL_SHARDS,  /* safetensors: torch's HuggingFaceStorageWriter */
    MODEL_ADAPTER, /* is_peft */
    MODEL_FULL,    /* consolidated/ alone, the shards were removed */
};

static bool is_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

/* Any whole safetensors files? */
static bool has_safetensors(const struct listing *l)
{
    for (size_t i = 0; l && i < listing_count(l); i++)
        if (safetensors_is_named(l, listing_at(l, i)->name))
            return true;
    return false;
}

static enum model_kind model_kind(struct listing *l)
{
    struct listing *model = listing_sub(l, model_dir);
    struct hf_dcp_found shards;
    struct dcp_found dcp;

    if (!model)
        return MODEL_NONE;
    if (dcp_find(model, &dcp))
        return MODEL_DCP;
    if (hf_dcp_find(model, &shards))
        return MODEL_SHARDS;
    if (is_file(model, adapter_name) && is_file(model, "adapter_config.json"))
        return MODEL_ADAPTER;
    return has_safetensors(listing_below(l, full_dir)) ? MODEL_FULL : MODEL_NONE;
}

static bool take_number(const char **p, int64_t *out)
{
    const char *start = *p;

    *out = 0;
    while (isdigit((unsigned char)**p) && *p - start < 18)
        *out = *out * 10 + (*(*p)++ - '0');
    return *p > start;
}

/* "epoch_1_step_4" */
static bool parse_name(const char *name, int64_t *epoch, int64_t *step)
{
    static const char first[] = "epoch_", second[] = "_step_";

    if (strncmp(name, first, strlen(first)) != 0)
        return false;
    name += strlen(first);
    if (!take_number(&name, epoch) || strncmp(name, second, strlen(second)) != 0)
        return false;
    name += strlen(second);
    return take_number(&name, step) && *name == '\0';
}

static const char *kind_text(enum model_kind kind)
{
    static const char *const texts[] = {"nothing that is known", "a DCP checkpoint",
                                        "shards in safetensors", "a PEFT adapter",
                                        "consolidated safetensors"};

    return texts[kind];
}

static void nemo_bid(struct listing *l, struct bid *out)
{
    struct listing *optim = listing_sub(l, optim_dir);
    int64_t epoch = 0, step = 0;
    bool named = parse_name(listing_name(l), &epoch, &step), has_optim;
    enum model_kind kind;
    struct dcp_found found;

    *out = (struct bid){0};
    if (listing_find(l, unfinished) || (!named && !optim))
        return;
    kind = model_kind(l);
    has_optim = optim && dcp_find(optim, &found);
    if (named ? !has_optim && kind == MODEL_NONE : !has_optim || kind == MODEL_NONE)
        return;
    out->score = named ? 95 : 90;
    snprintf(out->reason, sizeof out->reason, "%smodel/ holds %s, optim/ %s",
             named ? "epoch_E_step_S: " : "", kind_text(kind),
             has_optim ? "a DCP checkpoint" : "nothing that is known");
}

/* ---- the model ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    enum model_kind kind;
    uint64_t ranks;
    char metadata[PATH_MAX]; /* the file that decides about the model */
    bool composer;
    char version[64]; /* of Composer */
};

/* Hidden, and watched: names that come into it change what is found. */
static int add_part(struct scan *s, const char *dir, struct err *e)
{
    TRY(sink_part(s->sink, dir, e));
    return sink_watch(s->sink, dir, e);
}

/*
 * In the summer of 2025 safetensors models lost a leading "model." before the container
 * that added it again was taken off their names: lm_head, which had none, kept the
 * container's. Nothing else tells these saves than that they have no .hf_metadata.
 */
static size_t seed_wrapper(const char *key, size_t len)
{
    static const char head[] = "model.lm_head.";

    return len > strlen(head) && memcmp(key, head, strlen(head)) == 0 ? strlen("model.")
                                                                      : 0;
}

/* What the optimizer tells of a parameter, whose name it has without the wrapper. */
static bool size_of(void *user, const char *key, size_t len, struct shape *out)
{
    const struct optim_sizes *sizes = user;
    size_t wrapper = seed_wrapper(key, len);

    return optim_sizes_find(sizes, key, len, out) ||
           (wrapper && optim_sizes_find(sizes, key + wrapper, len - wrapper, out));
}

static const char *name_of(void *user, size_t i, size_t *len)
{
    return optim_sizes_name(user, i, len);
}

static int report_shards(struct scan *s, struct err *e)
{
    CLEANUP(optim_sizes_freep) struct optim_sizes *sizes = NULL;
    struct listing *metadata = listing_below(s->c->listing, "model/.hf_metadata");
    struct hf_dcp_how how = {.dir = model_dir, .role = ROLE_MODEL};
    struct hf_dcp_told told;
    int r;

    TRY(optim_sizes_load(s->c, optim_dir, &sizes, e));
    if (sizes) {
        how.size = size_of;
        how.name = name_of;
        how.user = sizes;
    }
    if (!metadata && !listing_below(s->c->listing, full_dir))
        how.wrapper = seed_wrapper;
    r = hf_dcp_report(s->c, s->sink, &how, &told, e);
    s->ranks = told.ranks;
    memcpy(s->metadata, told.metadata, sizeof s->metadata);
    return r;
}

static int report_dcp_model(struct scan *s, struct err *e)
{
    const struct dcp_how how = {.dir = model_dir, .role = ROLE_MODEL};
    struct dcp_told told;
    int r = dcp_report(s->c, s->sink, &how, &told, e);

    s->ranks = told.ranks;
    memcpy(s->metadata, told.metadata, sizeof s->metadata);
    return r;
}

static int report_whole(struct scan *s, const char *dir, const char *name,
                        struct err *e)
{
    const struct safetensors_how how = {.dir = dir, .name = name, .role = ROLE_MODEL};
    struct safetensors_told told;
    int r = safetensors_dir_report(s->c, s->sink, &how, &told, e);

    memcpy(s->metadata, told.metadata, sizeof s->metadata);
    return r;
}

static int report_adapter(struct scan *s, struct err *e)
{
    CLEANUP(optim_sizes_freep) struct optim_sizes *known = NULL;

    TRY(report_whole(s, model_dir, adapter_name, e));
    TRY(optim_sizes_load(s->c, optim_dir, &known, e));
    return known ? nemo_adapter_check(s->c, s->sink, adapter_path, known, e) : 0;
}

static int report_model(struct scan *s, struct err *e)
{
    if (listing_sub(s->c->listing, model_dir))
        TRY(add_part(s, model_dir, e));
    switch (s->kind) {
    case MODEL_DCP:
        return report_dcp_model(s, e);
    case MODEL_SHARDS:
        return report_shards(s, e);
    case MODEL_ADAPTER:
        return report_adapter(s, e);
    case MODEL_FULL:
        TRY(add_part(s, full_dir, e));
        return report_whole(s, full_dir, NULL, e);
    case MODEL_NONE:
        break;
    }
    if (sink_warning(s->sink, "missing-part", "model/ holds nothing that is known") < 0)
        return err_nomem(e);
    return 0;
}

/* ---- optimizer and other state ---- */

/* A state that cannot be read is no reason to hide the model. */
static int report_dcp_state(struct scan *s, const char *dir, int role, struct err *e)
{
    const struct dcp_how how = {.dir = dir, .part = dir, .role = role};
    struct dcp_told told;
    struct err why = {0};

    if (dcp_report(s->c, s->sink, &how, &told, &why) == 0)
        return 0;
    if (why.code != EBADMSG && why.code != ENOTSUP && why.code != EIO) {
        return err_copy(e, &why);
    }
    if (sink_warning(s->sink, "damaged-part", "%s: %s", dir, why.text) < 0)
        return err_nomem(e);
    return 0;
}

static bool is_pt(const struct listing_entry *entry)
{
    size_t len = strlen(entry->name);

    return entry->st.kind == ENTRY_FILE && len > 3 &&
           strcmp(entry->name + len - 3, ".pt") == 0;
}

/* The .pt files of a directory, "" for the checkpoint's own. */
static int report_files(struct scan *s, const struct listing *l, const char *dir,
                        struct err *e)
{
    static const struct torch_report how = {.role = ROLE_OTHER};
    char path[PATH_MAX];

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (!is_pt(entry))
            continue;
        if (store_join(dir, entry->name, path, sizeof path) < 0)
            return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir,
                           entry->name);
        TRY(torch_file_report(s->c, s->sink, path, &how, e));
    }
    return 0;
}

static bool has_files(const struct listing *l)
{
    for (size_t i = 0; i < listing_count(l); i++)
        if (is_pt(listing_at(l, i)))
            return true;
    return false;
}

/* Before 0.6 nothing else tells a save that ended while the optimizer was written. */
static int unknown_optim(struct scan *s, struct err *e)
{
    TRY(sink_watch(s->sink, optim_dir, e));
    if (sink_warning(
            s->sink, "missing-part",
            "optim/ holds nothing that is known: its .metadata is lost, or the "
            "save was not finished") < 0)
        return err_nomem(e);
    return 0;
}

/* Directories are called as the recipe's attributes: dataloader, rng, or anything else. */
static int report_dir(struct scan *s, const char *name, struct err *e)
{
    struct listing *l = listing_sub(s->c->listing, name);
    bool optim = strcmp(name, optim_dir) == 0;
    struct dcp_found found;

    if (!l || strcmp(name, model_dir) == 0)
        return 0;
    if (dcp_find(l, &found) || (optim && listing_find(l, ".metadata"))) {
        TRY(add_part(s, name, e));
        return report_dcp_state(s, name, optim ? ROLE_OPTIMIZER : ROLE_OTHER, e);
    }
    if (optim && listing_count(l) > 0)
        TRY(unknown_optim(s, e));
    if (!has_files(l))
        return 0; /* stays visible */
    TRY(add_part(s, name, e));
    return report_files(s, l, name, e);
}

static int report_state(struct scan *s, struct err *e)
{
    struct listing *l = s->c->listing;

    for (size_t i = 0; i < listing_count(l); i++)
        if (listing_at(l, i)->st.kind == ENTRY_DIR)
            TRY(report_dir(s, listing_at(l, i)->name, e));
    return report_files(s, l, "", e);
}

/* ---- the checkpoint as a whole ---- */

/* "ep0-ba2": what CheckpointSaveOptions.dir_prefix is where nobody says otherwise. */
static bool parse_composer(const char *name, int64_t *epoch, int64_t *step)
{
    if (strncmp(name, "ep", 2) != 0)
        return false;
    name += 2;
    if (!take_number(&name, epoch) || strncmp(name, "-ba", 3) != 0)
        return false;
    name += 3;
    return take_number(&name, step) && *name == '\0';
}

/* Composer's save_checkpoint_to_disk writes the same two folders, and composer_metadata.json. */
static int find_composer(struct scan *s, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE char *text = NULL;
    struct listing *l = s->c->listing;
    struct err why = {0};
    const char *version;
    size_t len;

    s->composer = is_file(l, composer_name);
    if (!s->composer)
        return 0;
    TRY(sink_watch(s->sink, composer_name, e));
    if (listing_read(l, composer_name, MAX_COMPOSER, &text, &len, &why) == 0 &&
        json_parse(text, len, &json_python, &doc, &why) == 0 &&
        json_string(json_get(doc, "composer_version"), &version))
        snprintf(s->version, sizeof s->version, "%s", version);
    if (!safetensors_stops_scan(why.code))
        return 0;
    *e = why;
    return err_wrap(e, "%s", composer_name);
}

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    const char *name = listing_name(s->c->listing);
    struct sink_checkpoint about = {
        .format = s->composer ? "composer-dcp" : "nemo-automodel",
        .framework = s->composer ? "Composer" : "NeMo AutoModel",
        .version = s->version[0] ? s->version : NULL,
        .metadata_file = s->metadata[0] ? s->metadata : NULL,
        .adapter = s->kind == MODEL_ADAPTER,
    };
    int64_t epoch = 0;

    about.has_step = s->composer ? parse_composer(name, &epoch, &about.step)
                                 : parse_name(name, &epoch, &about.step);
    buf_addc(&topology, '{');
    if (s->ranks > 0)
        buf_addf(&topology, "\"ranks\": %" PRIu64 ", ", s->ranks);
    if (about.has_step)
        buf_addf(&topology, "\"epoch\": %" PRId64 ", ", epoch);
    buf_addf(&topology, "\"model\": \"%s\"}", kind_text(s->kind));
    if (buf_failed(&topology))
        return err_nomem(e);
    about.topology = topology.data;
    return sink_checkpoint(s->sink, &about, e);
}

static int nemo_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct scan s = {.c = c, .sink = sink, .kind = model_kind(c->listing)};

    /* First without what the files tell: also a scan that fails has a format. */
    TRY(find_composer(&s, e));
    TRY(tell_checkpoint(&s, e));
    TRY(report_model(&s, e));
    TRY(report_state(&s, e));
    return tell_checkpoint(&s, e);
}

const struct format_driver format_nemo_automodel = {
    .name = "nemo_automodel",
    .title = "NeMo AutoModel: epoch_E_step_S with model/, optim/ and state",
    .bid = nemo_bid,
    .scan = nemo_scan,
};
