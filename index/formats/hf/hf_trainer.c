/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_trainer.c - checkpoints of Hugging Face's Trainer and of Accelerate. */
#include "index/formats/format.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/dcp/torch_dcp.h"
#include "index/formats/deepspeed/deepspeed.h"
#include "index/formats/hf/choose.h"
#include "index/formats/hf/hf_config.h"
#include "index/formats/hf/hf_model.h"
#include "index/formats/hf/safetensors_dir.h"
#include "index/formats/hf/train_parts.h"
#include "index/formats/hf/train_ranks.h"
#include "index/formats/hf/train_shapes.h"
#include "index/formats/hf/train_survey.h"
#include "index/formats/json_object.h"
#include "index/formats/object_value.h"
#include "index/formats/rankfiles/rank_set.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_file.h"

static const char state_name[] = TRAIN_STATE_NAME;
static const char latest_name[] = "latest";

/* ---- bids ---- */

static void say(struct bid *out, int score, const char *why)
{
    out->score = score;
    snprintf(out->reason, sizeof out->reason, "%s", why);
}

static void trainer_bid(struct listing *l, struct bid *out)
{
    struct train_survey s;
    bool any;

    *out = (struct bid){0};
    train_survey(l, &s);
    any = s.main != MAIN_NONE || train_has_optimizer(&s);
    if (s.unfinished && s.main != MAIN_HF)
        return;
    if (s.json && any)
        say(out, 92, "trainer_state.json beside a model or an optimizer");
    else if (s.count[TRAIN_RNG] && any)
        say(out, 90, "random states beside a model or an optimizer");
    else if (s.count[TRAIN_MODEL_DCP])
        say(out, 88, "pytorch_model_fsdp_N/ is a DCP checkpoint");
    else if (s.count[TRAIN_MODEL_RANK] || s.count[TRAIN_MODEL_LOCAL])
        say(out, 88, "pytorch_model_fsdp files of ranks are of torch.save");
    else if (s.count[TRAIN_MODEL_FILE])
        say(out, 86, "pytorch_model_fsdp.bin is a torch.save file");
    else if (s.passed)
        say(out, 86, "DeepSpeed's directory has what the Hugging Face model lacks");
    else if (s.main == MAIN_HF && train_has_optimizer(&s))
        say(out, 86, "an optimizer beside a Hugging Face model");
    else if (s.main == MAIN_HF && s.count[TRAIN_ARGS])
        say(out, 84, "training_args.bin beside a Hugging Face model");
}

/* ---- the model ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct train_survey has;
    uint64_t dcp_ranks, file_ranks;
    const char *deepspeed;   /* its format, static; NULL: there is none */
    char metadata[PATH_MAX]; /* the file that decides about the model */
    struct hf_config config;
    bool has_step, has_epoch;
    int64_t step;
    double epoch;
};

static int set_metadata(struct scan *s, const char *name, struct err *e)
{
    if (store_join(s->c->dir, name, s->metadata, sizeof s->metadata) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", s->c->dir, name);
    return 0;
}

/* Hidden, and watched: names that come into it change what is found. */
static int add_part(struct scan *s, const char *dir, struct err *e)
{
    TRY(sink_part(s->sink, dir, e));
    return sink_watch(s->sink, dir, e);
}

static int warned(int r, struct err *e)
{
    return r < 0 ? err_nomem(e) : 0;
}

static bool is_trainer(const struct train_survey *s)
{
    return s->json || s->count[TRAIN_ARGS];
}

static const char *model_text(const struct train_survey *s)
{
    static const char *const texts[] = {
        [MAIN_NONE] = "none",
        [MAIN_HF] = "Hugging Face",
        [MAIN_DCP] = "FSDP, sharded",
        [MAIN_RANK] = "FSDP, a file a rank",
        [MAIN_LOCAL] = "FSDP, a file a rank",
        [MAIN_FILE] = "FSDP, in one file",
        [MAIN_DEEPSPEED] = "DeepSpeed",
        [MAIN_LORA] = "diffusers' LoRA",
    };

    return s->main == MAIN_HF && s->hf.adapter ? "a PEFT adapter" : texts[s->main];
}

static int report_hf(struct scan *s, struct err *e)
{
    const struct hf_model *hf = &s->has.hf;

    if (!hf->driver)
        return 0;
    if (s->has.passed)
        return hf_choice_pass(s->c->listing, model_text(&s->has), s->sink, e);
    if (s->has.main != MAIN_HF) {
        TRY(hf_adapter_report(hf, s->c, s->sink, e));
        return hf_trained_beside_report(s->c, s->sink, e);
    }
    TRY(set_metadata(s, hf->main, e));
    return hf_model_report(hf, s->c, s->sink, e);
}

/* Where save_pretrained wrote the same model a second time. */
static int warn_copy(struct scan *s, const char *name, struct err *e)
{
    return warned(sink_warning(s->sink, "two-models",
                               "%s holds the model a second time: its tensors are of "
                               "role other",
                               name),
                  e);
}

/* How a further copy, or a further model, is told from the first one. */
static int role_of_model(const struct scan *s, const struct train_part *part,
                         enum train_main kind, const char *name, const char **shown_as)
{
    bool first = part->index == 0;

    *shown_as = first && s->has.main == kind ? NULL : name;
    return first && s->has.main != kind ? ROLE_OTHER : ROLE_MODEL;
}

/* Its save was not finished, or what says where its shards belong was not copied along. */
static int tell_unfinished(struct scan *s, const char *name, struct err *e)
{
    return warned(sink_warning(s->sink, "missing-part",
                               "%s has .distcp files and no .metadata: the save is not "
                               "finished, or .metadata was not copied along",
                               name),
                  e);
}

static int report_model_dcp(struct scan *s, const char *name,
                            const struct train_part *part, struct err *e)
{
    struct dcp_how how = {.dir = name};
    struct dcp_told told;
    int r;

    if (train_is_unfinished(s->c->listing, name))
        return tell_unfinished(s, name, e);
    TRY(add_part(s, name, e));
    how.role = role_of_model(s, part, MAIN_DCP, name, &how.part);
    if (how.role == ROLE_OTHER)
        TRY(warn_copy(s, name, e));
    how.object = part->index > 0 ? name : NULL;
    r = dcp_report(s->c, s->sink, &how, &told, e);
    s->dcp_ranks = MAX(s->dcp_ranks, told.ranks);
    if (!how.part)
        memcpy(s->metadata, told.metadata, sizeof s->metadata);
    return r;
}

static int report_model_file(struct scan *s, const char *name,
                             const struct train_part *part, struct err *e)
{
    struct torch_report how = {.prefix = "", .entries = true, .strict = true};

    how.role = role_of_model(s, part, MAIN_FILE, name, &how.part);
    if (how.role == ROLE_OTHER)
        TRY(warn_copy(s, name, e));
    if (!how.part)
        TRY(set_metadata(s, name, e));
    return torch_file_report(s->c, s->sink, name, &how, e);
}

static int report_model_ranks(struct scan *s, const struct train_rank_set *set,
                              struct err *e)
{
    const struct train_part part = {.kind = set->kind, .index = set->index};
    bool local = set->kind == TRAIN_MODEL_LOCAL;
    struct rank_set_how how = {0};
    char name[64];

    if (local)
        snprintf(name, sizeof name, "pytorch_model_fsdp");
    else
        snprintf(name, sizeof name, "pytorch_model_fsdp_%" PRIu64, set->index);
    how.role = (enum role)role_of_model(s, &part, local ? MAIN_LOCAL : MAIN_RANK, name,
                                        &how.part);
    if (how.role == ROLE_OTHER)
        TRY(warn_copy(s, name, e));
    return train_ranks_report(s->c, s->sink, set, &how, e);
}

/*
 * What diffusers' LoRA scripts save in place of the model. It stays visible: their loader
 * asks for its name.
 */
static int report_lora(struct scan *s, const char *name, const struct train_part *part,
                       struct err *e)
{
    bool is_main = s->has.main == MAIN_LORA;
    enum role role = is_main ? ROLE_MODEL : ROLE_OTHER;
    const char *shown_as = is_main ? NULL : name;
    const struct safetensors_how how = {
        .dir = "", .name = name, .part = shown_as, .role = (int)role, .shown = true};
    const struct torch_report torch = {.prefix = "",
                                       .part = shown_as,
                                       .role = (int)role,
                                       .entries = true,
                                       .strict = true,
                                       .shown = true};
    struct safetensors_told told;

    if (name != s->has.lora)
        return 0;
    if (is_main)
        TRY(set_metadata(s, name, e));
    return part->safetensors ? safetensors_dir_report(s->c, s->sink, &how, &told, e)
                             : torch_file_report(s->c, s->sink, name, &torch, e);
}

/* A second model of one Accelerator. */
static int report_more_model(struct scan *s, const char *name, struct err *e)
{
    const struct safetensors_how how = {
        .dir = "", .name = name, .part = name, .role = ROLE_MODEL};
    struct safetensors_told told;

    return safetensors_dir_report(s->c, s->sink, &how, &told, e);
}

static void take_deepspeed(struct scan *s, const struct deepspeed_told *told,
                           bool is_main)
{
    uint64_t ranks;

    if (mul_overflows(told->data_ranks, MAX(told->model_ranks, (uint64_t)1), &ranks))
        ranks = 0;
    s->dcp_ranks = MAX(s->dcp_ranks, ranks);
    s->deepspeed = told->format;
    if (!s->has_step && told->has_step) {
        s->has_step = true;
        s->step = told->step;
    }
    if (is_main)
        memcpy(s->metadata, told->metadata, sizeof s->metadata);
}

static bool is_damage(int code)
{
    return code == EBADMSG || code == ENOTSUP || code == ENOENT || code == EIO ||
           code == EFBIG;
}

/* DeepSpeed saves model and optimizer together; with a model beside it for its masters. */
static int report_deepspeed(struct scan *s, const char *name,
                            const struct train_part *part, struct err *e)
{
    bool tag = s->has.tag && strcmp(name, s->has.tag) == 0;
    /* A tag's number counts steps; beside it, directories of models are others. */
    const struct train_part of = {
        .kind = part->kind, .index = tag ? 0 : part->index + (s->has.tag ? 1 : 0)};
    struct deepspeed_how how = {.dir = name, .object = of.index > 0 ? name : NULL};
    struct deepspeed_told told;
    struct err why = {0};

    if (!train_is_deepspeed(&s->has, s->c->listing, name, part))
        return 0;
    TRY(add_part(s, name, e));
    how.weights = role_of_model(s, &of, MAIN_DEEPSPEED, name, &how.part);
    if (deepspeed_report(s->c, s->sink, &how, &told, &why) == 0 || !how.part)
        take_deepspeed(s, &told, !how.part);
    if (why.code == 0)
        return 0;
    if (how.part && is_damage(why.code))
        return warned(sink_warning(s->sink, "damaged-part", "%s: %s", name, why.text),
                      e);
    return err_copy(e, &why);
}

/* The tag is of DeepSpeed's directory, not of another checkpoint. */
static int hide_latest(struct scan *s, struct err *e)
{
    if (s->has.count[TRAIN_DEEPSPEED] == 0 || !listing_find(s->c->listing, latest_name))
        return 0;
    return sink_hide(s->sink, latest_name, true, e);
}

/* ---- optimizers and other state ---- */

/* A state that cannot be read is no reason to hide the model. */
static int report_optim_dcp(struct scan *s, const char *name,
                            const struct train_part *part, struct err *e)
{
    const struct dcp_how how = {.dir = name,
                                .part = name,
                                .role = ROLE_OPTIMIZER,
                                .object = part->index > 0 ? name : NULL};
    struct dcp_told told;
    struct err why = {0};

    if (train_is_unfinished(s->c->listing, name))
        return tell_unfinished(s, name, e);
    TRY(add_part(s, name, e));
    if (dcp_report(s->c, s->sink, &how, &told, &why) == 0) {
        s->dcp_ranks = MAX(s->dcp_ranks, told.ranks);
        return 0;
    }
    if (is_damage(why.code))
        return warned(sink_warning(s->sink, "damaged-part", "%s: %s", name, why.text),
                      e);
    return err_copy(e, &why);
}

/* Each file that cannot be read is told by the set. */
static int report_optim_ranks(struct scan *s, const struct train_rank_set *set,
                              struct err *e)
{
    char name[64], object[72];
    const struct rank_set_how how = {
        .part = name, .role = ROLE_OPTIMIZER, .optimizer = true, .object = object};
    struct err why = {0};

    snprintf(name, sizeof name, "optimizer_%" PRIu64, set->index);
    snprintf(object, sizeof object, "%s:", name);
    if (train_ranks_report(s->c, s->sink, set, &how, &why) == 0 || is_damage(why.code))
        return 0;
    return err_copy(e, &why);
}

/*
 * Objects are FILE:ENTRY, as states and param_groups of several optimizers meet. The file is
 * whole by itself and stays visible: a trainer that does not find it goes on without a word,
 * with an optimizer that knows nothing.
 */
static int report_optim_file(struct scan *s, const char *name, struct err *e)
{
    char object[NAME_MAX + 2];
    const struct torch_report how = {.prefix = "",
                                     .part = name,
                                     .role = ROLE_OPTIMIZER,
                                     .entries = true,
                                     .object = object,
                                     .shown = true};

    snprintf(object, sizeof object, "%s:", name);
    return torch_file_report(s->c, s->sink, name, &how, e);
}

/* Schedulers, random states, arguments: what the trainer asks for when it goes on. */
static int report_state(struct scan *s, const char *name, struct err *e)
{
    const struct torch_report how = {.role = ROLE_OTHER, .shown = true};

    return torch_file_report(s->c, s->sink, name, &how, e);
}

static int report_json(struct scan *s, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;

    TRY(json_file_object(s->c->listing, state_name, s->sink, &doc, e));
    /* After DeepSpeed, whose count of steps may be another. */
    if (json_i64(json_get(doc, "global_step"), &s->step))
        s->has_step = true;
    s->has_epoch = json_double(json_get(doc, "epoch"), &s->epoch);
    return 0;
}

/* Why the tensors of this part are there. */
static int set_rule(struct scan *s, const char *name, const struct train_part *part,
                    struct err *e)
{
    static const enum train_main mains[TRAIN_KINDS] = {
        [TRAIN_MODEL_DCP] = MAIN_DCP,   [TRAIN_MODEL_FILE] = MAIN_FILE,
        [TRAIN_MODEL_RANK] = MAIN_RANK, [TRAIN_MODEL_LOCAL] = MAIN_LOCAL,
        [TRAIN_LORA] = MAIN_LORA,       [TRAIN_DEEPSPEED] = MAIN_DEEPSPEED,
    };
    bool is_main = mains[part->kind] != MAIN_NONE && mains[part->kind] == s->has.main;

    return warned(sink_rule(s->sink, "%s of a directory of %s%s", name,
                            is_trainer(&s->has) ? "Trainer" : "Accelerate",
                            is_main ? ", which has the model" : ""),
                  e);
}

static int report_part(struct scan *s, const char *name, const struct train_part *part,
                       struct err *e)
{
    TRY(set_rule(s, name, part, e));
    switch (part->kind) {
    case TRAIN_MODEL_DCP:
        return report_model_dcp(s, name, part, e);
    case TRAIN_MODEL_FILE:
    case TRAIN_MORE_MODEL_BIN:
        return report_model_file(s, name, part, e);
    case TRAIN_MORE_MODEL:
        return report_more_model(s, name, e);
    case TRAIN_LORA:
        return report_lora(s, name, part, e);
    case TRAIN_OPTIM_DCP:
        return report_optim_dcp(s, name, part, e);
    case TRAIN_OPTIM_FILE:
        return report_optim_file(s, name, e);
    case TRAIN_RNG:
    case TRAIN_STATE:
    case TRAIN_ARGS:
        return report_state(s, name, e);
    case TRAIN_JSON:
        return report_json(s, e);
    case TRAIN_DEEPSPEED:
        return report_deepspeed(s, name, part, e);
    case TRAIN_MODEL_RANK: /* report_ranks() */
    case TRAIN_MODEL_LOCAL:
    case TRAIN_OPTIM_RANK:
    case TRAIN_KINDS:
        break;
    }
    return 0;
}

static int report_ranks(struct scan *s, struct err *e)
{
    for (size_t i = 0; i < s->has.nsets; i++) {
        const struct train_rank_set *set = &s->has.set[i];
        int r = set_rule(s, "the files of all ranks",
                         &(struct train_part){.kind = set->kind}, e);

        if (r < 0)
            return r;
        r = set->kind == TRAIN_OPTIM_RANK ? report_optim_ranks(s, set, e)
                                          : report_model_ranks(s, set, e);

        if (r < 0)
            return r;
        s->file_ranks = MAX(s->file_ranks, set->ranks);
    }
    if (!s->has.too_many)
        return 0;
    return warned(
        sink_warning(s->sink, "missing-part",
                     "files a rank of more than %d models and optimizers: not "
                     "all are shown",
                     TRAIN_MAX_RANK_SETS),
        e);
}

static int report_parts(struct scan *s, struct err *e)
{
    const struct listing *l = s->c->listing;
    struct train_part part;

    for (size_t i = 0; i < listing_count(l); i++)
        if (train_part_of(listing_at(l, i), &part))
            TRY(report_part(s, listing_at(l, i)->name, &part, e));
    return 0;
}

/* ---- the checkpoint as a whole ---- */

static const char *format_of(const struct train_survey *s)
{
    if (is_trainer(s))
        return "hf-trainer";
    if (s->count[TRAIN_MODEL_RANK] || s->count[TRAIN_MODEL_LOCAL])
        return "accelerate-fsdp-rank-files";
    return s->count[TRAIN_MODEL_DCP] || s->count[TRAIN_MODEL_FILE] ||
                   s->count[TRAIN_OPTIM_DCP]
               ? "accelerate-fsdp"
               : "accelerate";
}

static const char *optimizer_text(const struct train_survey *s)
{
    if (s->count[TRAIN_OPTIM_DCP])
        return "FSDP, sharded";
    if (s->count[TRAIN_OPTIM_RANK])
        return "FSDP, a file a rank";
    if (s->count[TRAIN_OPTIM_FILE])
        return "in one file";
    return s->count[TRAIN_DEEPSPEED] ? "DeepSpeed" : "none";
}

/* Ranks that took part, as any of the files tells. */
static uint64_t ranks_of(const struct scan *s)
{
    return MAX(MAX(s->has.ranks, s->dcp_ranks), s->file_ranks);
}

static void add_topology(const struct scan *s, struct buf *out)
{
    uint64_t ranks = ranks_of(s);

    buf_addc(out, '{');
    if (ranks > 0)
        buf_addf(out, "\"ranks\": %" PRIu64 ", ", ranks);
    if (s->has_epoch) {
        buf_adds(out, "\"epoch\": ");
        object_value_double(out, s->epoch);
        buf_adds(out, ", ");
    }
    buf_addf(out, "\"model\": \"%s\", \"optimizer\": \"%s\"", model_text(&s->has),
             optimizer_text(&s->has));
    if (s->deepspeed)
        buf_addf(out, ", \"deepspeed\": \"%s\"", s->deepspeed);
    buf_addc(out, '}');
}

/* Accelerate's automatic names count saves, not steps. */
static bool step_of_dir(const struct scan *s, int64_t *step)
{
    const char *name = listing_name(s->c->listing);

    return strncmp(name, "checkpoint_", strlen("checkpoint_")) != 0 &&
           step_of_name(name, step);
}

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    bool trainer = is_trainer(&s->has);
    struct sink_checkpoint about = {
        .format = format_of(&s->has),
        .framework = trainer ? "Hugging Face Trainer" : "Hugging Face Accelerate",
        .version = trainer && s->config.transformers[0] ? s->config.transformers : NULL,
        .metadata_file = s->metadata[0] ? s->metadata : NULL,
        .adapter = s->has.main == MAIN_HF && s->has.hf.adapter,
        .has_step = s->has_step,
        .step = s->step,
    };

    if (!about.has_step)
        about.has_step = step_of_dir(s, &about.step);
    add_topology(s, &topology);
    if (buf_failed(&topology))
        return err_nomem(e);
    about.topology = topology.data;
    return sink_checkpoint(s->sink, &about, e);
}

/*
 * Each rank saves its random states, in a file with its number; Trainer's only process in one
 * without. There are as many ranks as any other file tells.
 */
static int tell_random_states(struct scan *s, struct err *e)
{
    uint64_t ranks = ranks_of(s), there = s->has.random_states;

    if (there == 0 || there >= ranks || listing_find(s->c->listing, "rng_state.pth"))
        return 0;
    return warned(sink_warning(s->sink, "missing-file",
                               "random states of %" PRIu64 " of %" PRIu64
                               " ranks are missing",
                               ranks - there, ranks),
                  e);
}

/* Accelerate numbers all of a kind without a gap (save_accelerator_state(), 1.15.0). */
static int tell_gap(struct scan *s, const char *word, struct err *e)
{
    const struct listing *l = s->c->listing;
    uint64_t files = 0, numbers = 0;
    struct train_part part;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (strncmp(entry->name, word, strlen(word)) != 0 ||
            !train_part_of(entry, &part) ||
            (part.kind != TRAIN_STATE && part.kind != TRAIN_OPTIM_FILE))
            continue;
        files++;
        numbers = MAX(numbers, part.index + 1);
    }
    if (files >= numbers)
        return 0;
    return warned(sink_warning(s->sink, "missing-file",
                               "%" PRIu64 " of the %" PRIu64
                               " files of %s that their numbers count are missing",
                               numbers - files, numbers, word),
                  e);
}

/* What only all parts together tell. */
static int tell_lost_files(struct scan *s, struct err *e)
{
    static const char *const words[] = {"custom_checkpoint", "optimizer", "scheduler"};

    for (size_t i = 0; i < ARRAY_SIZE(words); i++)
        TRY(tell_gap(s, words[i], e));
    return tell_random_states(s, e);
}

/* Trainer and Accelerate save a model with each optimizer, Trainer a scheduler with it. */
static int tell_lost(struct scan *s, struct err *e)
{
    const struct train_survey *has = &s->has;
    bool optimizer = train_has_optimizer(has) || has->count[TRAIN_DEEPSPEED];
    int rc = 0;

    if (has->main == MAIN_NONE && !has->unfinished && train_has_optimizer(has))
        rc = sink_warning(s->sink, "missing-part",
                          "there is no model beside the optimizer");
    if (rc == 0 && has->json && !optimizer && !has->unfinished &&
        listing_find(s->c->listing, "scheduler.pt"))
        rc = sink_warning(
            s->sink, "missing-file",
            "there is no optimizer.pt: Trainer saves it with scheduler.pt");
    return warned(rc, e);
}

static int trainer_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct scan s = {.c = c, .sink = sink};
    struct err failed = {0};
    int differ;

    train_survey(c->listing, &s.has);
    differ = train_shapes_compare(c->listing, &s.has, e);
    if (differ < 0)
        return differ;
    if (differ > 0)
        train_survey(c->listing, &s.has);
    TRY(hf_config_read(c->listing, "", sink, &s.config, e));
    if (tell_lost(&s, &failed) == 0 && report_hf(&s, &failed) == 0 &&
        report_parts(&s, &failed) == 0 && report_ranks(&s, &failed) == 0 &&
        tell_lost_files(&s, &failed) == 0)
        hide_latest(&s, &failed);
    /* The driver of the model has told what it took the checkpoint for. */
    TRY(tell_checkpoint(&s, e));
    if (failed.code)
        *e = failed;
    return -e->code;
}

const struct format_driver format_hf_trainer = {
    .name = "hf_trainer",
    .title = "Hugging Face Trainer's checkpoint-N, Accelerate's save_state with FSDP",
    .bid = trainer_bid,
    .scan = trainer_scan,
};
