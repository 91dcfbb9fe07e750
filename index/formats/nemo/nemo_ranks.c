/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_ranks.c - NeMo 1's files of model parallel ranks, merged. */
#include "index/formats/nemo/nemo_ranks.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "index/formats/format.h"
#include "index/formats/megatron/megatron_ranks.h"
#include "index/formats/name_take.h"
#include "index/formats/nemo/nemo_rules.h"
#include "index/formats/ranks/rank_files.h"
#include "index/formats/torch/torch_walk.h"
#include "index/formats/torch/torch_zip.h"

enum {
    MAX_MEMORY = 64 << 20,
    MAX_RANKS = 4096,
};

/* ---- names ---- */

bool nemo_rank_name(const char *name, uint32_t *tensor, uint32_t *pipeline)
{
    *pipeline = 0;
    if (name_take(&name, "mp_rank_"))
        return name_take_number(&name, tensor) && !*name;
    return name_take(&name, "tp_rank_") && name_take_number(&name, tensor) &&
           name_take(&name, "_pp_rank_") && name_take_number(&name, pipeline) && !*name;
}

/* ---- the ranks that are there ---- */

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = l ? listing_find(l, name) : NULL;

    return entry && entry->st.kind == ENTRY_FILE;
}

static int add_rank(struct legacy *l, const struct nemo_ranks *r,
                    const struct rank *found, const char *dir, struct err *e)
{
    struct rank *more = reallocarray(l->rank, l->nranks + 1, sizeof *more);
    struct rank *x;

    if (!more)
        return err_nomem(e);
    l->rank = more;
    x = &l->rank[l->nranks++];
    *x = *found;
    snprintf(x->dir, sizeof x->dir, "%s", dir);
    if ((size_t)snprintf(x->path, sizeof x->path, "%s/%s", dir, r->file) >=
        sizeof x->path)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir, r->file);
    return 0;
}

/* Two spellings of one rank, mp_rank_00 and mp_rank_000, are found by legacy_sort(). */
static int find_ranks(struct legacy *l, const struct nemo_ranks *r,
                      const struct nemo_config *config, struct err *e)
{
    struct listing *here = r->c->listing;

    for (size_t i = 0; i < listing_count(here); i++) {
        const struct listing_entry *entry = listing_at(here, i);
        struct rank found = {0};

        if (entry->st.kind != ENTRY_DIR ||
            !nemo_rank_name(entry->name, &found.t, &found.p) ||
            strlen(entry->name) >= sizeof found.dir ||
            !has_file(listing_sub(here, entry->name), r->file))
            continue;
        if (found.t >= config->tensor || found.p >= config->pipeline)
            return err_set(e, EBADMSG,
                           "the configuration tells of %" PRIu64 " tensor and %" PRIu64
                           " pipeline ranks, and there is %s",
                           config->tensor, config->pipeline, entry->name);
        TRY(add_rank(l, r, &found, entry->name, e));
    }
    return legacy_sort(l, e);
}

/* ---- what the configuration must agree with ---- */

static int check_config(const struct nemo_config *c, bool training, struct err *e)
{
    if (c->tensor > MAX_RANKS || c->pipeline > MAX_RANKS ||
        c->tensor * c->pipeline > MAX_RANKS)
        return err_set(e, ENOTSUP, "more than %d ranks", MAX_RANKS);
    if (c->expert > 1)
        return err_set(e, ENOTSUP, "experts are on ranks of their own");
    if (c->virtual_pipeline > MEGATRON_MAX_VIRTUAL)
        return err_set(e, ENOTSUP, "more than %d virtual pipelines",
                       MEGATRON_MAX_VIRTUAL);
    if (c->virtual_pipeline > 1 && !training)
        return err_set(e, ENOTSUP,
                       "the models of virtual pipelines have no places of their own");
    return 0;
}

/* A stage with too few layers would give wrong numbers to those of the next ones. */
static int check_layers(const struct legacy *l, const struct nemo_config *c,
                        struct err *e)
{
    for (const struct layer_kind *k = l->kinds; k; k = k->next) {
        uint64_t told = nemo_config_sizes(c, k->prefix, k->len)->layers;

        if (told != legacy_layers(l, k))
            return err_set(e, EBADMSG,
                           "the configuration tells of %" PRIu64
                           " layers, the files have %" PRIu64 " of %.*s",
                           told, legacy_layers(l, k), (int)MIN(k->len, (size_t)100),
                           k->prefix);
    }
    return 0;
}

static enum megatron_rule rule_of(struct legacy *l, const struct rank_tensor *x,
                                  enum megatron_rule rule)
{
    return nemo_rule(l->user, x->name, x->len, x->dim, x->nd, rule);
}

static int prepare(struct legacy *l, const struct nemo_ranks *r,
                   const struct nemo_config *config, struct err *e)
{
    TRY(check_config(config, r->training, e));
    TRY(find_ranks(l, r, config, e));
    l->tensor = (uint32_t)config->tensor;
    l->pipeline = (uint32_t)config->pipeline;
    /* on_save_checkpoint() of megatron_gpt_model.py: state_dict is empty then. */
    l->several = config->virtual_pipeline > 1;
    l->models = (uint32_t)config->virtual_pipeline;
    l->expert = 1;
    l->args.untied = config->untied;
    l->version = 3;
    l->rule = rule_of;
    l->user = config;
    TRY(legacy_count_layers(l, e));
    if (r->training && !l->kinds)
        return err_set(e, EBADMSG, "they have no layers in %s",
                       l->several ? "model0, model1, ..." : l->entry);
    return check_layers(l, config, e);
}

int nemo_ranks_report(const struct nemo_ranks *r, const struct nemo_config *config,
                      bool *merged, struct err *why, struct err *e)
{
    struct legacy l = {.c = r->c,
                       .sink = r->sink,
                       .entry = r->training ? "state_dict" : "",
                       .optimizer = "optimizer_states",
                       .arena = arena_new(MAX_MEMORY)};

    *merged = false;
    if (!l.arena) {
        err_nomem(e);
    } else if (prepare(&l, r, config, why) < 0) {
        if (!torch_file_is_damaged(why->code))
            *e = *why;
    } else {
        *merged = true;
        if (legacy_report_stages(&l, e) == 0)
            legacy_warn_unknown(&l, e);
    }
    free(l.rank);
    arena_free(l.arena);
    return -e->code;
}
