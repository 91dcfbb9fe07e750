/* SPDX-License-Identifier: MIT */
/* index/formats/hf/train_survey.c - what a directory of Trainer or Accelerate holds. */
#include "index/formats/hf/train_survey.h"

#include <string.h>

#include "index/formats/dcp/torch_dcp.h"
#include "index/formats/deepspeed/deepspeed.h"
#include "index/formats/hf/choose.h"
#include "index/formats/torch/torch_file.h"
#include "remote/listing.h"

enum {
    STATE_HEAD = 4096,
    TAG_HEAD = 64,
}; /* of trainer_state.json, whose members are sorted */

static const char state_name[] = TRAIN_STATE_NAME;

static bool is_torch(struct listing *l, const char *name)
{
    unsigned char head[TORCH_HEAD];
    size_t got = 0;
    enum torch_kind kind;

    if (listing_peek(l, name, head, sizeof head, &got) < 0)
        return false;
    kind = torch_sniff(head, got);
    return kind == TORCH_ZIP || kind == TORCH_MAYBE || kind == TORCH_LEGACY;
}

static bool is_dcp(struct listing *l, const char *name)
{
    struct listing *sub = listing_sub(l, name);
    struct dcp_found found;

    return sub && dcp_find(sub, &found);
}

static bool is_deepspeed(struct listing *l, const char *name)
{
    struct listing *sub = listing_sub(l, name);
    struct deepspeed_found found;

    return sub && deepspeed_find(sub, &found);
}

static bool has_distcp(const struct listing *l)
{
    for (size_t i = 0; l && i < listing_count(l); i++) {
        const char *dot = strrchr(listing_at(l, i)->name, '.');

        if (dot && strcmp(dot, ".distcp") == 0)
            return true;
    }
    return false;
}

static bool is_trainer_state(struct listing *l)
{
    char head[STATE_HEAD];
    size_t got = 0;

    return listing_peek(l, state_name, head, sizeof head, &got) == 0 &&
           memmem(head, got, "\"global_step\"", 13);
}

/* Is it what its name says? The many files of a name that others need not be asked. */
static bool is_real(struct listing *l, const char *name, const struct train_part *part)
{
    switch (part->kind) {
    case TRAIN_MODEL_DCP:
    case TRAIN_OPTIM_DCP:
        return is_dcp(l, name);
    case TRAIN_MODEL_FILE:
    case TRAIN_OPTIM_FILE:
        return is_torch(l, name);
    case TRAIN_RNG:
    case TRAIN_MODEL_RANK:
    case TRAIN_MODEL_LOCAL:
    case TRAIN_OPTIM_RANK:
        return part->rank > 0 || is_torch(l, name);
    case TRAIN_DEEPSPEED:
        return is_deepspeed(l, name);
    case TRAIN_MORE_MODEL:
    case TRAIN_MORE_MODEL_BIN:
    case TRAIN_LORA:
    case TRAIN_STATE:
    case TRAIN_ARGS:
    case TRAIN_JSON:
    case TRAIN_KINDS:
        break;
    }
    return true;
}

/* Has somebody else the model, whole, where the files of Hugging Face's names are not? */
static bool is_elsewhere(const struct train_survey *s)
{
    return s->count[TRAIN_MODEL_DCP] || s->count[TRAIN_MODEL_RANK] ||
           s->count[TRAIN_MODEL_LOCAL] || s->count[TRAIN_MODEL_FILE] ||
           s->count[TRAIN_DEEPSPEED];
}

/* Shards win over full copies, names of the model's own library over others. */
static enum train_main main_of(struct listing *l, const struct train_survey *s)
{
    if (s->hf.driver && !s->hf.adapter &&
        (!is_elsewhere(s) || hf_choice_look(l) == HF_WHOLE))
        return MAIN_HF;
    if (s->count[TRAIN_MODEL_DCP])
        return MAIN_DCP;
    if (s->count[TRAIN_MODEL_RANK])
        return MAIN_RANK;
    if (s->count[TRAIN_MODEL_LOCAL])
        return MAIN_LOCAL;
    if (s->count[TRAIN_DEEPSPEED])
        return MAIN_DEEPSPEED;
    if (s->count[TRAIN_MODEL_FILE])
        return MAIN_FILE;
    if (s->hf.driver)
        return MAIN_HF;
    return s->lora ? MAIN_LORA : MAIN_NONE;
}

static bool is_of_ranks(enum train_kind kind)
{
    return kind == TRAIN_MODEL_RANK || kind == TRAIN_MODEL_LOCAL ||
           kind == TRAIN_OPTIM_RANK;
}

/* "global_step400" of Trainer; Accelerate's directories are one a model. */
static bool is_step(const char *name)
{
    static const char word[] = "global_step";

    return strncmp(name, word, sizeof word - 1) == 0;
}

/* The text of the file `latest`, or "". */
static void read_tag(struct listing *l, char tag[TAG_HEAD])
{
    size_t got = 0;

    if (listing_peek(l, "latest", tag, TAG_HEAD - 1, &got) < 0)
        got = 0;
    tag[got] = '\0';
    tag[strcspn(tag, " \r\n")] = '\0';
}

static void take_tag(struct train_survey *s, const char *name, const char *latest,
                     const struct train_part *part)
{
    bool named = s->tag && strcmp(s->tag, latest) == 0;

    if (!is_step(name) || named)
        return;
    if (s->tag && part->index < s->tag_step && strcmp(name, latest) != 0)
        return;
    s->tag = name;
    s->tag_step = part->index;
}

static void count_part(struct train_survey *s, const char *name, const char *latest,
                       const struct train_part *part)
{
    s->count[part->kind]++;
    if (part->kind == TRAIN_RNG) {
        s->ranks = MAX(s->ranks, part->rank + 1);
        s->random_states++;
    } else if (part->kind == TRAIN_DEEPSPEED)
        take_tag(s, name, latest, part);
    else if (part->kind == TRAIN_LORA && (!s->lora || part->safetensors))
        s->lora = name; /* diffusers takes this one of two */
}

void train_survey(struct listing *l, struct train_survey *s)
{
    struct train_part part;
    char latest[TAG_HEAD];

    *s = (struct train_survey){0};
    hf_model_find(l, &s->hf);
    read_tag(l, latest);
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (!train_part_of(entry, &part))
            continue;
        if (is_of_ranks(part.kind)) /* also one that is damaged has its place */
            s->too_many |= train_rank_sets_add(s->set, &s->nsets, &part) < 0;
        if (is_real(l, entry->name, &part))
            count_part(s, entry->name, latest, &part);
        else if (part.kind == TRAIN_MODEL_DCP)
            s->unfinished |= has_distcp(listing_sub(l, entry->name));
    }
    s->json = s->count[TRAIN_JSON] && is_trainer_state(l);
    s->main = main_of(l, s);
    s->passed = s->hf.driver && !s->hf.adapter && s->main != MAIN_HF;
}

bool train_is_unfinished(struct listing *l, const char *name)
{
    return !is_dcp(l, name) && has_distcp(listing_sub(l, name));
}

bool train_is_deepspeed(const struct train_survey *s, struct listing *l,
                        const char *name, const struct train_part *part)
{
    return part->kind == TRAIN_DEEPSPEED && is_deepspeed(l, name) &&
           (!is_step(name) || (s->tag && strcmp(name, s->tag) == 0));
}

bool train_has_optimizer(const struct train_survey *s)
{
    return s->count[TRAIN_OPTIM_DCP] || s->count[TRAIN_OPTIM_FILE] ||
           s->count[TRAIN_OPTIM_RANK];
}
