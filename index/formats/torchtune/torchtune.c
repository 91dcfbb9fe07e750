/* SPDX-License-Identifier: MIT */
/* index/formats/torchtune/torchtune.c - torchtune's epochs: a model, adapters, a recipe's state. */
#include "index/formats/format.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/hf/hf_model.h"
#include "index/formats/name_take.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_shards.h"

enum { MAX_DIGITS = 9 };

/* Of torchtune 0.1 to 0.6 (training/checkpointing/_checkpointer.py, _utils.py). */
static const char recipe_name[] = "recipe_state.pt";
static const char recipe_dir[] = "recipe_state";
static const char adapter_name[] = "adapter_model.pt"; /* beside PEFT's own */

/* ---- names ---- */

/* What 0.1 to 0.3 wrote: the epoch stands in the name, and all epochs in one folder. */
enum old_kind { OLD_NONE, OLD_MODEL, OLD_ADAPTER };

struct old_name {
    enum old_kind kind;
    uint64_t shard; /* hf_model_0002_0.pt: 2; of single files 1 */
    uint64_t epoch;
};

static bool take_number(const char **p, uint64_t *out)
{
    const char *start = *p;

    for (*out = 0; isdigit((unsigned char)**p) && *p - start < MAX_DIGITS; ++*p)
        *out = *out * 10 + (uint64_t)(**p - '0');
    return *p > start;
}

static bool take_old_name(const char *name, struct old_name *out)
{
    *out = (struct old_name){.kind = OLD_MODEL, .shard = 1};
    if (name_take(&name, "adapter_"))
        out->kind = OLD_ADAPTER;
    else if (name_take(&name, "hf_model_")) {
        if (!take_number(&name, &out->shard) || !name_take(&name, "_"))
            return false;
    } else if (!name_take(&name, "meta_model_") &&
               !name_take(&name, "torchtune_model_"))
        return false;
    return take_number(&name, &out->epoch) && strcmp(name, ".pt") == 0;
}

static enum old_kind old_name(const struct listing_entry *entry, struct old_name *out)
{
    if (entry->st.kind != ENTRY_FILE || !take_old_name(entry->name, out))
        *out = (struct old_name){0};
    return out->kind;
}

/* ---- what is there ---- */

struct survey {
    /* Of the newest epoch that has a model. */
    bool old;
    uint64_t epoch, files;
    uint64_t shards; /* the largest number of one, in any epoch */
    const char *first;
    uint64_t older; /* model files and adapters of other epochs */
    const char *first_older;
    /* Else. */
    struct hf_model hf;
    bool recipe, adapter; /* the files of that name are there */
};

static bool is_torch(struct listing *l, const char *name)
{
    unsigned char head[TORCH_HEAD];
    size_t got = 0;
    enum torch_kind kind;

    if (!listing_find(l, name) || listing_peek(l, name, head, sizeof head, &got) < 0)
        return false;
    kind = torch_sniff(head, got);
    return kind == TORCH_ZIP || kind == TORCH_MAYBE || kind == TORCH_LEGACY;
}

static void find_epoch(const struct listing *l, struct survey *s)
{
    struct old_name x;

    for (size_t i = 0; i < listing_count(l); i++) {
        if (old_name(listing_at(l, i), &x) != OLD_MODEL)
            continue;
        s->epoch = s->old ? MAX(s->epoch, x.epoch) : x.epoch;
        s->shards = MAX(s->shards, x.shard);
        s->old = true;
    }
}

static void count_files(const struct listing *l, struct survey *s)
{
    struct old_name x;

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;

        if (old_name(listing_at(l, i), &x) == OLD_NONE)
            continue;
        if (x.epoch != s->epoch) {
            s->older++;
            s->first_older = s->first_older ? s->first_older : name;
        } else if (x.kind == OLD_MODEL) {
            s->files++;
            s->first = s->first ? s->first : name;
        }
    }
}

static void look(struct listing *l, struct survey *s)
{
    *s = (struct survey){0};
    find_epoch(l, s);
    if (s->old)
        count_files(l, s);
    else
        hf_model_find(l, &s->hf);
    s->recipe = is_torch(l, recipe_name);
    s->adapter = is_torch(l, adapter_name);
}

/* ---- bids ---- */

/* "epoch_3", below it or beside it the recipe's state. */
static bool is_epoch(const struct listing *l, uint64_t *epoch)
{
    const char *name = listing_name(l);

    return name_take(&name, "epoch_") && take_number(&name, epoch) && !*name;
}

static void say(struct bid *out, int score, const char *why)
{
    out->score = score;
    snprintf(out->reason, sizeof out->reason, "%s", why);
}

static void torchtune_bid(struct listing *l, struct bid *out)
{
    struct survey s;
    uint64_t epoch;

    *out = (struct bid){0};
    look(l, &s);
    if (s.old && is_torch(l, s.first))
        say(out, s.files > 1 || s.recipe ? 85 : 55,
            "model files with an epoch in their names");
    else if (s.hf.driver && s.recipe)
        say(out, 89, "recipe_state.pt beside a Hugging Face model");
    else if (s.hf.driver && s.adapter)
        say(out, 87, "adapter_model.pt beside a Hugging Face model");
    else if (s.hf.driver && is_epoch(l, &epoch) && listing_marked(l, recipe_dir, 1))
        say(out, 87, "epoch_E with a Hugging Face model, recipe_state/ beside it");
}

/* ---- the model ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct survey has;
    uint64_t files; /* of the model, for the topology; 0: its own driver knows */
};

static int warned(int r, struct err *e)
{
    return r < 0 ? err_nomem(e) : 0;
}

/* Nothing says how many files a model has: other epochs have as many, and none is left out. */
static int warn_files(struct scan *s, struct err *e)
{
    const struct survey *has = &s->has;

    if (has->older > 0)
        TRY(warned(sink_warning(s->sink, "older-files",
                                "%" PRIu64
                                " files as %s are of other epochs than %" PRIu64
                                ": they are shown as they are",
                                has->older, has->first_older, has->epoch),
                   e));
    if (has->files >= has->shards)
        return 0;
    return warned(sink_warning(s->sink, "missing-file",
                               "epoch %" PRIu64 " has %" PRIu64
                               " model files of %" PRIu64,
                               has->epoch, has->files, has->shards),
                  e);
}

static int report_old_model(struct scan *s, struct err *e)
{
    const struct listing *l = s->c->listing;
    CLEANUP_FREE const char **names = calloc(s->has.files + 1, sizeof *names);
    struct old_name x;
    size_t n = 0;

    if (!names)
        return err_nomem(e);
    for (size_t i = 0; i < listing_count(l) && n < s->has.files; i++)
        if (old_name(listing_at(l, i), &x) == OLD_MODEL && x.epoch == s->has.epoch)
            names[n++] = listing_at(l, i)->name;
    s->files = n;
    TRY(warn_files(s, e));
    return torch_shards_scan_set(s->c, s->sink, names, n, e);
}

static int report_model(struct scan *s, struct err *e)
{
    return s->has.old ? report_old_model(s, e)
                      : hf_model_report(&s->has.hf, s->c, s->sink, e);
}

/* ---- adapters and the recipe's state ---- */

/* The same adapter in torchtune's names: it stays visible, as PEFT's file does. */
static int report_adapter(struct scan *s, const char *name, struct err *e)
{
    static const struct torch_report how = {.role = ROLE_OTHER, .shown = true};

    return torch_file_report(s->c, s->sink, name, &how, e);
}

static int report_adapters(struct scan *s, struct err *e)
{
    const struct listing *l = s->c->listing;
    struct old_name x;

    if (s->has.adapter)
        TRY(report_adapter(s, adapter_name, e));
    for (size_t i = 0; s->has.old && i < listing_count(l); i++)
        if (old_name(listing_at(l, i), &x) == OLD_ADAPTER && x.epoch == s->has.epoch)
            TRY(report_adapter(s, listing_at(l, i)->name, e));
    return 0;
}

static void note_read(void *user, const struct torch_zip *zip UNUSED)
{
    *(bool *)user = true;
}

/*
 * {"optimizer": {"state": ..., "param_groups": ...}, "seed": ..., "epochs_run": ...}: the
 * first is a part of role optimizer, of which nobody knows the parameters' names.
 */
static int report_recipe(struct scan *s, struct err *e)
{
    static const char optimizer[] = "optimizer", object[] = "recipe_state.pt:";
    static const char *const skip[] = {optimizer, NULL};
    bool read = false;
    const struct torch_report first = {.prefix = "",
                                       .part = recipe_name,
                                       .role = ROLE_OPTIMIZER,
                                       .entries = true,
                                       .object = object,
                                       .only = optimizer,
                                       .loaded = note_read,
                                       .user = &read};
    const struct torch_report others = {
        .role = ROLE_OTHER, .entries = true, .object = object, .skip = skip};

    if (!s->has.recipe)
        return 0;
    TRY(torch_file_report(s->c, s->sink, recipe_name, &first, e));
    return read ? torch_file_report(s->c, s->sink, recipe_name, &others, e) : 0;
}

/* ---- the checkpoint as a whole ---- */

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    const char *main = s->has.old ? s->has.first : s->has.hf.main;
    CLEANUP(buf_release) struct buf topology = {0};
    struct sink_checkpoint about = {
        .format = "torchtune",
        .framework = "torchtune",
        .adapter = s->has.hf.adapter,
    };
    uint64_t epoch = s->has.epoch;
    char path[PATH_MAX];

    if (store_join(s->c->dir, main, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", s->c->dir, main);
    about.metadata_file = path;
    about.has_step = step_of_name(listing_name(s->c->listing), &about.step);
    buf_addc(&topology, '{');
    if (s->files > 0)
        buf_addf(&topology, "\"files\": %" PRIu64 ", ", s->files);
    if (s->has.old || is_epoch(s->c->listing, &epoch))
        buf_addf(&topology, "\"epoch\": %" PRIu64 ", ", epoch);
    buf_addf(&topology, "\"names\": \"%s\"}", s->has.old ? "old" : "Hugging Face");
    if (buf_failed(&topology))
        return err_nomem(e);
    about.topology = topology.data;
    return sink_checkpoint(s->sink, &about, e);
}

static int torchtune_scan(const struct scan_context *c, struct sink *sink,
                          struct err *e)
{
    struct scan s = {.c = c, .sink = sink};
    struct err failed = {0};

    look(c->listing, &s.has);
    if (!s.has.old && !s.has.hf.driver)
        return err_set(e, ESTALE, "there is no model any more");
    if (report_model(&s, &failed) == 0 && report_adapters(&s, &failed) == 0)
        report_recipe(&s, &failed);
    /* The driver of the model has told what it took the checkpoint for. */
    TRY(tell_checkpoint(&s, e));
    if (failed.code)
        *e = failed;
    return -e->code;
}

const struct format_driver format_torchtune = {
    .name = "torchtune",
    .title = "torchtune: epoch_E with a model, adapters and the recipe's state",
    .bid = torchtune_bid,
    .scan = torchtune_scan,
};
