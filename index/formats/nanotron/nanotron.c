/* SPDX-License-Identifier: MIT */
/* index/formats/nanotron/nanotron.c - nanotron: a safetensors file a parameter and rank. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "index/formats/format.h"
#include "index/formats/json_object.h"
#include "index/formats/nanotron/nanotron_priv.h"
#include "index/formats/ranks/rank_copies.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_file.h"

enum { MAX_MEMORY = 2000 << 20 /* names, slices and shapes of all files */ };

static const char METADATA[] = "checkpoint_metadata.json";

/* ---- bids ---- */

/* A file of a rank, under the name that nanotron gives it. */
static bool has_rank_file(struct listing *l)
{
    struct listing *sub = listing_sub(l, "optimizer");
    struct nano_ranks rank;

    for (size_t i = 0; sub && i < listing_count(sub); i++)
        if (nano_optimizer_name(listing_at(sub, i)->name, &rank))
            return true;
    return false;
}

/*
 * A metadata file that is damaged where it begins is no reason to take the ranks' files for
 * anything else: the scan says what is wrong with it.
 */
static void nano_bid(struct listing *l, struct bid *out)
{
    const struct listing_entry *entry = listing_find(l, METADATA);
    char head[4096];
    size_t got = 0;

    *out = (struct bid){0};
    if (!entry || entry->st.kind != ENTRY_FILE || !listing_sub(l, "model") ||
        listing_peek(l, METADATA, head, sizeof head, &got) < 0)
        return;
    if (memmem(head, got, "\"tp\"", 4) && memmem(head, got, "\"dp\"", 4)) {
        out->score = 92;
        snprintf(out->reason, sizeof out->reason, "%s with tp and dp, and model/",
                 METADATA);
    } else if (has_rank_file(l)) {
        out->score = 70;
        snprintf(out->reason, sizeof out->reason,
                 "%s beside model/, and optimizers of ranks", METADATA);
    }
}

/* ---- the metadata ---- */

static void take_number(const struct json *doc, const char *name, uint64_t *out)
{
    uint64_t v;

    if (json_u64(json_get(doc, name), &v) && v > 0 && v < 1u << 20)
        *out = v;
}

static int check_version(struct nano *n, struct err *e)
{
    uint32_t version = nano_version(n->version);

    if (version >= NANO_OLDEST && version <= NANO_NEWEST)
        return 0;
    err_set(e, ENOTSUP, "%s: version \"%s\"", METADATA, n->version);
    return err_hint(e, "versions 1.2 to 1.5 of nanotron's checkpoints are supported");
}

static int read_metadata(struct nano *n, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    const char *text = "";
    int64_t step;

    TRY(json_file_object(n->c->listing, METADATA, n->sink, &doc, e));
    if (!doc)
        return err_set(e, EBADMSG, "%s cannot be read", METADATA);
    json_string(json_get(doc, "version"), &text);
    snprintf(n->version, sizeof n->version, "%s", text);
    take_number(doc, "tp", &n->tp);
    take_number(doc, "dp", &n->dp);
    take_number(doc, "cp", &n->cp);
    if (json_i64(json_get(json_get(doc, "metas"), "last_train_step"), &step) &&
        step >= 0) {
        n->has_step = true;
        n->step = step;
    }
    return check_version(n, e);
}

/* ---- what is neither model nor optimizer ---- */

static bool is_pt(const struct listing_entry *entry)
{
    size_t len = strlen(entry->name);

    return entry->st.kind == ENTRY_FILE && len > 3 &&
           strcmp(entry->name + len - 3, ".pt") == 0;
}

static int report_state(struct nano *n, const char *dir, struct err *e)
{
    static const struct torch_report how = {.role = ROLE_OTHER};
    struct listing *l = listing_sub(n->c->listing, dir);
    char path[PATH_MAX];

    if (!l)
        return 0;
    TRY(sink_part(n->sink, dir, e));
    for (size_t i = 0; i < listing_count(l); i++) {
        if (!is_pt(listing_at(l, i)))
            continue;
        if (store_join(dir, listing_at(l, i)->name, path, sizeof path) < 0)
            return err_set(e, ENAMETOOLONG, "%s/: a path is too long", dir);
        TRY(torch_file_report(n->c, n->sink, path, &how, e));
    }
    return 0;
}

/* ---- the scan ---- */

static int report(struct nano *n, struct err *e)
{
    TRY(sink_part(n->sink, "model", e));
    if (listing_sub(n->c->listing, "optimizer"))
        TRY(sink_part(n->sink, "optimizer", e));
    TRY(read_metadata(n, e));
    TRY(nano_weights_report(n, e));
    TRY(nano_optimizer_report(n, e));
    TRY(report_state(n, "lr_scheduler", e));
    TRY(report_state(n, "random", e));
    if (n->lost.count > 0 &&
        sink_warning(
            n->sink, "missing-file",
            "model/ has no file of %zu parameters that the optimizer has states "
            "of, as %.200s",
            n->lost.count, n->first_lost) < 0)
        return err_nomem(e);
    if (n->unnamed > 0 &&
        sink_warning(n->sink, "not-merged",
                     "%" PRIu64
                     " tensors of the optimizer are of no parameter of model/: "
                     "they are shown as each rank has them",
                     n->unnamed) < 0)
        return err_nomem(e);
    return 0;
}

static void add_fact(struct buf *b, const char *name, uint64_t v)
{
    if (v > 0)
        buf_addf(b, "%s\"%s\": %" PRIu64, b->len > 1 ? ", " : "", name, v);
}

static int tell_checkpoint(const struct nano *n, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    char path[PATH_MAX];
    struct sink_checkpoint about = {.format = "nanotron",
                                    .framework = "nanotron",
                                    .version = n->version[0] ? n->version : NULL,
                                    .has_step = n->has_step,
                                    .step = n->step,
                                    .metadata_file = path};

    buf_addc(&topology, '{');
    add_fact(&topology, "tensor_parallel", n->tp);
    add_fact(&topology, "pipeline_parallel", n->pp);
    add_fact(&topology, "data_parallel", n->dp);
    add_fact(&topology, "context_parallel", n->cp);
    add_fact(&topology, "expert_parallel", n->ep);
    if (n->zero)
        add_fact(&topology, "zero", 1);
    buf_addc(&topology, '}');
    if (buf_failed(&topology))
        return err_nomem(e);
    about.topology = topology.data;
    if (store_join(n->c->dir, METADATA, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", n->c->dir);
    if (!about.has_step)
        about.has_step = step_of_name(listing_name(n->c->listing), &about.step);
    return sink_checkpoint(n->sink, &about, e);
}

static int nano_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct nano n = {.c = c, .sink = sink, .arena = arena_new(MAX_MEMORY)};
    struct err failed = {0};
    int r = n.arena ? report(&n, &failed) : err_nomem(&failed);

    if (tell_checkpoint(&n, e) == 0 && r < 0)
        *e = failed;
    nano_weights_release(&n);
    keyset_release(&n.lost);
    arena_free(n.arena);
    return -e->code;
}

static const struct chunk_codec *const nano_codecs[] = {
    &codec_zip_deflate, &codec_copies, &codec_sum, NULL};

const struct format_driver format_nanotron = {
    .name = "nanotron",
    .title = "nanotron: a safetensors file a parameter and rank, ZeRO-1 optimizers",
    .bid = nano_bid,
    .scan = nano_scan,
    .codecs = nano_codecs,
};
