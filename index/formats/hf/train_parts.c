/* SPDX-License-Identifier: MIT */
/* index/formats/hf/train_parts.c - what Trainer and Accelerate write beside a model. */
#include "index/formats/hf/train_parts.h"

#include <ctype.h>
#include <string.h>

#include "index/formats/name_take.h"
#include "remote/listing.h"

enum { MAX_DIGITS = 9 };

enum number {
    NEVER,
    MAYBE,  /* of the first of several there is none */
    ALWAYS, /* 0 as well */
    LATER,  /* from 1 */
};

/* WORD[_INDEX][_rankRANK]SUFFIX. For what each rank has, the index is the rank. */
static const struct pattern {
    const char *word;
    enum number index;
    const char *before; /* the index */
    bool rank;
    const char *suffix; /* "/": a directory */
    enum train_kind kind;
} patterns[] = {
    {"pytorch_model_fsdp", ALWAYS, "_", false, "/", TRAIN_MODEL_DCP},
    {"pytorch_model_fsdp", MAYBE, "_", false, ".bin", TRAIN_MODEL_FILE},
    {"pytorch_model_fsdp", ALWAYS, "_", true, ".bin", TRAIN_MODEL_RANK},
    {"pytorch_model_fsdp", NEVER, "_", true, ".bin", TRAIN_MODEL_LOCAL},
    {"model", LATER, "_", false, ".safetensors", TRAIN_MORE_MODEL},
    {"pytorch_model", LATER, "_", false, ".bin", TRAIN_MORE_MODEL_BIN},
    {"pytorch_lora_weights", NEVER, "_", false, ".safetensors", TRAIN_LORA},
    {"pytorch_lora_weights", NEVER, "_", false, ".bin", TRAIN_LORA},
    {"optimizer", ALWAYS, "_", false, "/", TRAIN_OPTIM_DCP},
    {"optimizer", NEVER, "_", false, ".pt", TRAIN_OPTIM_FILE},
    {"optimizer", MAYBE, "_", false, ".bin", TRAIN_OPTIM_FILE},
    {"optimizer", MAYBE, "_", true, ".bin", TRAIN_OPTIM_RANK},
    {"rng_state", MAYBE, "_", false, ".pth", TRAIN_RNG},
    {"random_states", ALWAYS, "_", false, ".pkl", TRAIN_RNG},
    {"scheduler", NEVER, "_", false, ".pt", TRAIN_STATE},
    {"scheduler", MAYBE, "_", false, ".bin", TRAIN_STATE},
    {"scaler", NEVER, "_", false, ".pt", TRAIN_STATE},
    {"sampler", MAYBE, "_", false, ".bin", TRAIN_STATE},
    {"dl_state_dict", MAYBE, "_", false, ".bin", TRAIN_STATE},
    {"custom_checkpoint", ALWAYS, "_", false, ".pkl", TRAIN_STATE},
    {"training_args", NEVER, "_", false, ".bin", TRAIN_ARGS},
    {"trainer_state", NEVER, "_", false, ".json", TRAIN_JSON},
    {"global_step", ALWAYS, "", false, "/", TRAIN_DEEPSPEED},
    {"pytorch_model", MAYBE, "_", false, "/", TRAIN_DEEPSPEED},
};

/* `text` and a number as str() writes it, or nothing is taken. */
static bool take_number(const char **p, const char *text, uint64_t *out)
{
    const char *s = *p, *digits;

    if (!name_take(&s, text))
        return false;
    digits = s;
    for (*out = 0; isdigit((unsigned char)*s); s++)
        *out = *out * 10 + (uint64_t)(*s - '0');
    if (s == digits || s - digits > MAX_DIGITS || (*digits == '0' && s - digits > 1))
        return false;
    *p = s;
    return true;
}

static bool matches(const struct pattern *x, const char *name, bool is_dir,
                    struct train_part *out)
{
    bool dir = strcmp(x->suffix, "/") == 0, numbered;

    *out = (struct train_part){.kind = x->kind,
                               .safetensors = strcmp(x->suffix, ".safetensors") == 0};
    if (dir != is_dir || !name_take(&name, x->word))
        return false;
    numbered = x->index != NEVER && take_number(&name, x->before, &out->index);
    if (!numbered && x->index != NEVER && x->index != MAYBE)
        return false;
    if (!numbered)
        out->index = 0;
    if (x->index == LATER && out->index == 0)
        return false;
    if (x->rank && !take_number(&name, "_rank", &out->rank))
        return false;
    if (x->kind == TRAIN_RNG)
        out->rank = out->index;
    return strcmp(name, dir ? "" : x->suffix) == 0;
}

bool train_part_of(const struct listing_entry *entry, struct train_part *out)
{
    if (entry->st.kind == ENTRY_OTHER)
        return false;
    for (size_t i = 0; i < ARRAY_SIZE(patterns); i++)
        if (matches(&patterns[i], entry->name, entry->st.kind == ENTRY_DIR, out))
            return true;
    return false;
}
