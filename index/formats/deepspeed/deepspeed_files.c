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

/*
 * FastFileWriter puts its number and that of all writers behind the name, but in stage 3:
 * ".pt-0.1" (DeepSpeed 0.17.1 to 0.19.8, runtime/model_checkpointing/writer_factory.py,
 * create_writer()).
 */
static bool take_writer(const char *p, struct ds_file *f)
{
    return name_take(&p, "-") && name_take_number(&p, &f->writer) &&
           name_take(&p, ".") && name_take_number(&p, &f->writers) && *p == '\0' &&
           f->writer < f->writers;
}

static bool ends(const char *p, const char *text, struct ds_file *f)
{
    return name_take(&p, text) && (*p == '\0' || take_writer(p, f));
}

static const char model_end[] = "_model_states.pt";
static const char optim_end[] = "_optim_states.pt";

/* DeepSpeed until 0.3 left out the underscore. */
static bool ends_optim(const char *p, struct ds_file *f)
{
    return ends(p, optim_end, f) || ends(p, optim_end + 1, f);
}

static bool parse_zero(const char *p, struct ds_file *f)
{
    bool prefixed = name_take(&p, "bf16_") || name_take(&p, "fp16_");

    if (!name_take(&p, "zero_pp_rank_") || !name_take_number(&p, &f->dp) ||
        !name_take(&p, "_") || !take_mp(&p, f))
        return false;
    f->sharded = true;
    if (ends_optim(p, f))
        f->kind = DS_OPTIM;
    else if (!prefixed && ends(p, model_end, f))
        f->kind = DS_MODEL;
    else
        return false;
    return true;
}

static bool parse_model(const char *p, struct ds_file *f)
{
    f->kind = DS_MODEL;
    return take_mp(&p, f) && ends(p, model_end, f);
}

static bool parse_expert(const char *p, struct ds_file *f)
{
    f->kind = DS_EXPERT;
    if (name_take(&p, "layer_") &&
        (!name_take_number(&p, &f->layer) || !name_take(&p, "_")))
        return false;
    return name_take(&p, "expert_") && name_take_number(&p, &f->expert) &&
           name_take(&p, "_") && take_mp(&p, f) && ends(p, model_end, f);
}

static bool parse_expert_optim(const char *p, struct ds_file *f)
{
    f->kind = DS_EXPERT_OPTIM;
    return name_take(&p, "expp_rank_") && name_take_number(&p, &f->dp) &&
           name_take(&p, "_") && take_mp(&p, f) && ends(p, optim_end, f);
}

static bool parse_layer(const char *p, struct ds_file *f)
{
    f->kind = DS_LAYER;
    if (!name_take(&p, "layer_") || !name_take_number(&p, &f->layer))
        return false;
    if (ends(p, "-model_states.pt", f))
        return true; /* a pipeline without tensor-parallel ranks */
    return name_take(&p, "-model_") && name_take_number(&p, &f->mp) &&
           ends(p, "-model_states.pt", f);
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

static int compare_ranks(const struct ds_file *x, const struct ds_file *y)
{
    const uint32_t of_x[] = {x->kind, x->mp, x->layer, x->expert, x->dp};
    const uint32_t of_y[] = {y->kind, y->mp, y->layer, y->expert, y->dp};
    int order = 0;

    for (size_t i = 0; order == 0 && i < ARRAY_SIZE(of_x); i++)
        order = compare_numbers(of_x[i], of_y[i]);
    return order;
}

static int compare_files(const void *a, const void *b)
{
    const struct ds_file *x = a, *y = b;
    int order = compare_ranks(x, y);

    return order ? order : compare_numbers(x->writer, y->writer);
}

/* Something that another version of DeepSpeed may have written. */
static bool looks_like_states(const char *name)
{
    size_t len = strlen(name), n = sizeof "_states.pt" - 1;

    return len > n && strcmp(name + len - n, "_states.pt") == 0;
}

/* Each of several writers has written the whole file: the first one's counts. */
static int drop_copies(struct ds_files *f, struct err *e)
{
    size_t n = 0;

    f->copy = calloc(f->count + 1, sizeof *f->copy);
    if (!f->copy)
        return err_nomem(e);
    for (size_t i = 0; i < f->count; i++) {
        const struct ds_file *last = n > 0 ? &f->file[n - 1] : NULL, *x = &f->file[i];

        if (!last || compare_ranks(last, x) != 0) {
            f->file[n++] = *x;
        } else if (last->writers == x->writers && last->writer < x->writer) {
            f->copy[f->copies++] = x->name;
        } else {
            err_set(e, EBADMSG, "%s and %s are of the same rank", last->name, x->name);
            return err_hint(e, "one is left over from another save: move it away");
        }
    }
    f->count = n;
    return 0;
}

static int index_kinds(struct ds_files *f, struct err *e)
{
    qsort(f->file, f->count, sizeof *f->file, compare_files);
    TRY(drop_copies(f, e));
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
    free(f->copy);
    *f = (struct ds_files){0};
}
