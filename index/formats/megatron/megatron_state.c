/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_state.c - what Megatron-LM's ranks have beside the model. */
#include "index/formats/megatron/megatron_ranks.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "index/formats/format.h"
#include "index/formats/torch/torch_walk.h"
#include "index/formats/torch/torch_zip.h"
#include "index/sink.h"

enum { MAX_STATE = 16 << 20 }; /* JSON of one entry */

static const char OPTIMIZER[] = "distrib_optim.pt";

enum part { PART_MODEL, PART_OPTIMIZER, PART_REST };

static enum part part_of(const struct legacy *l, const struct pv *key)
{
    char name[LEGACY_ENTRY];

    for (uint32_t v = 0; v < l->models; v++) {
        legacy_entry(l, v, name);
        if (pv_str_is(key, name))
            return PART_MODEL;
    }
    return pv_str_is(key, l->optimizer) ? PART_OPTIMIZER : PART_REST;
}

/* Names of the outermost dict's entries but for those of one kind. */
static const char **other_entries(const struct legacy *l, const struct rank *r,
                                  enum part kind)
{
    struct pv root = torch_zip_root(r->file.zip), items;
    const char **names, *text;
    size_t n = 0, len;

    if (!torch_mapping(&root, &items) || items.kind != PV_DICT)
        return NULL;
    names = arena_array(r->arena, pv_count(&items) + 1, sizeof *names);
    for (size_t i = 0; names && i < pv_count(&items); i++) {
        struct pv key = pv_key_at(&items, i);

        if (key.kind != PV_STR || part_of(l, &key) == kind)
            continue;
        text = pv_bytes(&key, &len);
        names[n] = arena_memdup(r->arena, text, len);
        if (!names[n++])
            return NULL;
    }
    return names;
}

/* Everything but the models: the optimizer, and what is of role other. */
static int report_entries(struct legacy *l, struct rank *r, enum part kind,
                          struct err *e)
{
    char object[sizeof r->path + 1];
    struct torch_report how = {
        .role = kind == PART_OPTIMIZER ? ROLE_OPTIMIZER : ROLE_OTHER,
        .entries = true,
        .object = object,
    };

    if (!l->several && !l->entry[0]) /* all of the file is the model */
        return 0;
    how.skip = other_entries(l, r, kind);
    if (!how.skip)
        return err_nomem(e);
    snprintf(object, sizeof object, "%s:", r->path);
    return torch_file_report_loaded(l->sink, &r->file, &how, e);
}

/* State of Transformer Engine that is no tensor; None says nothing. */
static int report_state(struct legacy *l, struct rank *r, uint32_t v,
                        const struct pv *key, const struct pv *value, struct err *e)
{
    CLEANUP(buf_release) struct buf name = {0}, json = {.max = MAX_STATE};
    struct torch_tensor ignored;
    struct err why = {0};
    struct pv items;
    const char *text;
    size_t len;

    if (key->kind != PV_STR || value->kind == PV_NONE || torch_mapping(value, &items) ||
        torch_zip_tensor(r->file.zip, value, &ignored, &why) != 0)
        return 0;
    text = pv_bytes(key, &len);
    legacy_place(l, r, v, &name);
    buf_add(&name, text, len);
    if (buf_failed(&name))
        return err_nomem(e);
    if (object_to_json(r->file.zip, value, 0, legacy_no_key, NULL, &json, &why) == 0)
        return sink_object(l->sink, name.data, name.len, json.data, json.len, e);
    return why.code == ENOMEM ||
                   sink_warning(l->sink, "object", "%s: %s", name.data, why.text) < 0
               ? err_nomem(e)
               : 0;
}

static int report_states(struct legacy *l, struct rank *r, struct err *e)
{
    struct pv model, entries;

    for (uint32_t v = 0; v < l->models; v++) {
        if (!legacy_model(l, r, v, &model) || !torch_mapping(&model, &entries) ||
            entries.kind != PV_DICT)
            continue;
        for (size_t i = 0; i < pv_count(&entries); i++) {
            struct pv key = pv_key_at(&entries, i), value = pv_value_at(&entries, i);

            TRY(report_state(l, r, v, &key, &value, e));
        }
    }
    return 0;
}

/* Ranks save their optimizer each, or none of them does. */
static int tell_lost_optimizer(struct legacy *l, const struct rank *r, struct err *e)
{
    bool others = false;

    for (size_t i = 0; i < l->nranks && !others; i++) {
        struct listing *dir = listing_sub(l->c->listing, l->rank[i].dir);

        others = dir && listing_find(dir, OPTIMIZER);
    }
    if (others && sink_warning(l->sink, "missing-file", "%s/%s is missing", r->dir,
                               OPTIMIZER) < 0)
        return err_nomem(e);
    return 0;
}

static int report_rank(struct legacy *l, struct rank *r, struct err *e)
{
    static const struct torch_report how = {.role = ROLE_OPTIMIZER};
    struct listing *here = listing_sub(l->c->listing, r->dir);
    const struct listing_entry *optimizer = here ? listing_find(here, OPTIMIZER) : NULL;
    char path[64];

    if (r->err.code)
        return sink_warning(l->sink, "damaged-file", "%s: %s", r->path, r->err.text) < 0
                   ? err_nomem(e)
                   : 0;
    TRY(report_states(l, r, e));
    TRY(report_entries(l, r, PART_REST, e));
    TRY(report_entries(l, r, PART_OPTIMIZER, e));
    if (!optimizer || optimizer->st.kind != ENTRY_FILE)
        return tell_lost_optimizer(l, r, e);
    snprintf(path, sizeof path, "%s/%s", r->dir, OPTIMIZER);
    return torch_file_report(l->c, l->sink, path, &how, e);
}

static int report_stage(struct legacy *l, uint32_t p, struct err *e)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < l->nranks; i++)
        if (l->rank[i].p == p)
            rc = legacy_load(l, &l->rank[i], e);
    if (rc == 0)
        rc = legacy_merge_stage(l, p, e);
    for (size_t i = 0; rc == 0 && i < l->nranks; i++)
        if (l->rank[i].p == p)
            rc = report_rank(l, &l->rank[i], e);
    for (size_t i = 0; i < l->nranks; i++)
        legacy_unload(&l->rank[i]);
    return rc;
}

int legacy_report_stages(struct legacy *l, struct err *e)
{
    for (uint32_t p = 0; p < l->pipeline; p++)
        TRY(report_stage(l, p, e));
    return 0;
}

int legacy_warn_unknown(struct legacy *l, struct err *e)
{
    int r = 0;

    if (l->unknown.count > 0)
        r = sink_warning(l->sink, "unknown-cut",
                         "%" PRIu64
                         " tensors are cut by tensor or expert parallelism in "
                         "ways that their names do not tell (%s): each rank's part is "
                         "shown as it is",
                         l->unknown.count, l->unknown.first);
    if (r == 0 && l->unlike.count > 0)
        r = sink_warning(l->sink, "unlike-config",
                         "%" PRIu64
                         " tensors are not as large as the model's configuration "
                         "tells (%s): each rank's part is shown as it is",
                         l->unlike.count, l->unlike.first);
    return r < 0 ? err_nomem(e) : 0;
}
