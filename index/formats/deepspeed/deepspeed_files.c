/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_files.c - takes the names of DeepSpeed's files apart. */
#include "index/formats/deepspeed/deepspeed_files.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/name_take.h"
#include "remote/listing.h"

static bool take_mp(const char **p, struct ds_file *f)
{
    return name_take(p, "mp_rank_") && name_take_number(p, &f->mp);
}

static bool ends(const char *p, const char *text)
{
    return strcmp(p, text) == 0;
}

static const char model_end[] = "_model_states.pt";
static const char optim_end[] = "_optim_states.pt";

/* DeepSpeed until 0.3 left out the underscore. */
static bool ends_optim(const char *p)
{
    return ends(p, optim_end) || ends(p, optim_end + 1);
}

static bool parse_zero(const char *p, struct ds_file *f)
{
    bool prefixed = name_take(&p, "bf16_") || name_take(&p, "fp16_");

    if (!name_take(&p, "zero_pp_rank_") || !name_take_number(&p, &f->dp) ||
        !name_take(&p, "_") || !take_mp(&p, f))
        return false;
    f->sharded = true;
    if (ends_optim(p))
        f->kind = DS_OPTIM;
    else if (!prefixed && ends(p, model_end))
        f->kind = DS_MODEL;
    else
        return false;
    return true;
}

static bool parse_model(const char *p, struct ds_file *f)
{
    f->kind = DS_MODEL;
    return take_mp(&p, f) && ends(p, model_end);
}

static bool parse_expert(const char *p, struct ds_file *f)
{
    f->kind = DS_EXPERT;
    if (name_take(&p, "layer_") &&
        (!name_take_number(&p, &f->layer) || !name_take(&p, "_")))
        return false;
    return name_take(&p, "expert_") && name_take_number(&p, &f->expert) &&
           name_take(&p, "_") && take_mp(&p, f) && ends(p, model_end);
}

static bool parse_expert_optim(const char *p, struct ds_file *f)
{
    f->kind = DS_EXPERT_OPTIM;
    return name_take(&p, "expp_rank_") && name_take_number(&p, &f->dp) &&
           name_take(&p, "_") && take_mp(&p, f) && ends(p, optim_end);
}

static bool parse_layer(const char *p, struct ds_file *f)
{
    f->kind = DS_LAYER;
    if (!name_take(&p, "layer_") || !name_take_number(&p, &f->layer))
        return false;
    if (ends(p, "-model_states.pt"))
        return true; /* a pipeline without tensor-parallel ranks */
    return name_take(&p, "-model_") && name_take_number(&p, &f->mp) &&
           ends(p, "-model_states.pt");
}

bool ds_file_parse(const char *name, struct ds_file *out)
{
    static bool (*const parsers[])(const char *, struct ds_file *) = {
        parse_zero, parse_model, parse_expert, parse_expert_optim, parse_layer};

    for (size_t i = 0; i < ARRAY_SIZE(parsers); i++) {
        *out = (struct ds_file){.name = name};
        if (parsers[i](name, out))
            return true;
    }
    *out = (struct ds_file){.name = name, .kind = DS_NOT};
    return false;
}

static int compare_numbers(uint32_t a, uint32_t b)
{
    return (a > b) - (a < b);
}

static int compare_files(const void *a, const void *b)
{
    const struct ds_file *x = a, *y = b;
    const uint32_t of_x[] = {x->kind, x->mp, x->layer, x->expert, x->dp};
    const uint32_t of_y[] = {y->kind, y->mp, y->layer, y->expert, y->dp};
    int order = 0;

    for (size_t i = 0; order == 0 && i < ARRAY_SIZE(of_x); i++)
        order = compare_numbers(of_x[i], of_y[i]);
    return order;
}

/* Something that another version of DeepSpeed may have written. */
static bool looks_like_states(const char *name)
{
    size_t len = strlen(name), n = sizeof "_states.pt" - 1;

    return len > n && strcmp(name + len - n, "_states.pt") == 0;
}

static int index_kinds(struct ds_files *f, struct err *e)
{
    qsort(f->file, f->count, sizeof *f->file, compare_files);
    for (size_t i = 1; i < f->count; i++)
        if (compare_files(&f->file[i - 1], &f->file[i]) == 0) {
            err_set(e, EBADMSG, "%s and %s are of the same rank", f->file[i - 1].name,
                    f->file[i].name);
            return err_hint(e, "one is left over from another save: move it away");
        }
    for (size_t i = 0; i < f->count; i++)
        f->begin[f->file[i].kind + 1] = i + 1;
    for (size_t k = 1; k <= DS_KINDS; k++)
        f->begin[k] = MAX(f->begin[k], f->begin[k - 1]);
    return 0;
}

int ds_files_list(const struct listing *l, struct ds_files *out, struct err *e)
{
    *out = (struct ds_files){.file = calloc(listing_count(l) + 1, sizeof *out->file)};
    if (!out->file)
        return err_nomem(e);
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind != ENTRY_FILE)
            continue;
        if (ds_file_parse(entry->name, &out->file[out->count])) {
            out->count++;
        } else if (looks_like_states(entry->name)) {
            out->unknown++;
            if (!out->first_unknown)
                out->first_unknown = entry->name;
        }
    }
    return index_kinds(out, e);
}

void ds_files_release(struct ds_files *f)
{
    free(f->file);
    *f = (struct ds_files){0};
}
