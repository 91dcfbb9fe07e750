/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed.c - DeepSpeed's ZeRO stages and universal checkpoints. */
#include "index/formats/deepspeed/deepspeed.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/deepspeed/deepspeed_files.h"
#include "index/formats/format.h"
#include "index/formats/ranks/rank_copies.h"
#include "index/formats/torch/torch_file.h"

/* ---- bids ---- */

/* zero/ and a directory in it that holds fp32.pt. */
static bool is_universal(struct listing *l)
{
    struct listing *zero = listing_sub(l, "zero");

    for (size_t i = 0; zero && i < listing_count(zero); i++) {
        const struct listing_entry *entry = listing_at(zero, i);
        struct listing *sub;

        if (entry->st.kind != ENTRY_DIR)
            continue;
        sub = listing_sub(zero, entry->name);
        return sub && listing_find(sub, "fp32.pt");
    }
    return false;
}

static void count_file(const char *name, struct deepspeed_found *out)
{
    struct ds_file f;

    if (!ds_file_parse(name, &f))
        return;
    out->optim += f.kind == DS_OPTIM;
    out->model += f.kind == DS_MODEL;
    out->layers |= f.kind == DS_LAYER;
    if (!out->name || f.kind == DS_MODEL)
        out->name = name;
}

bool deepspeed_find(struct listing *l, struct deepspeed_found *out)
{
    *out = (struct deepspeed_found){0};
    for (size_t i = 0; i < listing_count(l); i++)
        if (listing_at(l, i)->st.kind == ENTRY_FILE)
            count_file(listing_at(l, i)->name, out);
    out->universal = is_universal(l);
    return out->model > 0 || out->optim > 0 || out->layers || out->universal;
}

static bool is_torch(struct listing *l, const char *name)
{
    unsigned char head[TORCH_HEAD];
    size_t got = 0;

    return name && listing_peek(l, name, head, sizeof head, &got) == 0 &&
           torch_sniff(head, got) != TORCH_NOT;
}

static void ds_bid(struct listing *l, struct bid *out)
{
    struct deepspeed_found found;

    *out = (struct bid){0};
    if (!deepspeed_find(l, &found))
        return;
    if (found.universal) {
        out->score = 85;
        snprintf(out->reason, sizeof out->reason,
                 "zero/ holds a universal checkpoint of DeepSpeed");
        return;
    }
    /* Trainers that build on its pipeline know more about their layers. */
    out->score = found.layers ? 70 : found.model > 0 ? 80 : 60;
    if (!is_torch(l, found.name))
        out->score = 30;
    snprintf(out->reason, sizeof out->reason,
             "DeepSpeed: %u files of model states, %u of optimizer states%s",
             found.model, found.optim, found.layers ? ", layers of a pipeline" : "");
}

/* ---- the checkpoint as a whole ---- */

static int tell_checkpoint(const struct sink_checkpoint *about,
                           const struct deepspeed_told *told, struct sink *sink,
                           struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    struct sink_checkpoint out = *about;

    buf_addf(&topology, "{\"files\": %" PRIu64, told->files);
    if (told->data_ranks > 0)
        buf_addf(&topology, ", \"data_parallel\": %" PRIu64, told->data_ranks);
    if (told->tensor_ranks > 0)
        buf_addf(&topology,
                 ", \"tensor_parallel\": %" PRIu64 ", \"pipeline_parallel\": %" PRIu64,
                 told->tensor_ranks, told->model_ranks / told->tensor_ranks);
    else if (told->model_ranks > 0)
        buf_addf(&topology, ", \"model_parallel\": %" PRIu64, told->model_ranks);
    buf_addc(&topology, '}');
    if (buf_failed(&topology))
        return err_nomem(e);
    out.format = told->format;
    out.version = told->version[0] ? told->version : NULL;
    out.topology = topology.data;
    out.metadata_file = told->metadata[0] ? told->metadata : NULL;
    out.has_step = told->has_step;
    out.step = told->step;
    return sink_checkpoint(sink, &out, e);
}

static int ds_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    static const struct deepspeed_how how = {.weights = ROLE_MODEL};
    static const struct sink_checkpoint about = {.framework = "DeepSpeed"};
    struct deepspeed_told told;
    struct err failed = {0};
    int rc = deepspeed_report(c, sink, &how, &told, &failed);

    /* Also a scan that fails has a format. */
    TRY(tell_checkpoint(&about, &told, sink, e));
    if (rc < 0)
        *e = failed;
    return rc;
}

static const struct chunk_codec *const ds_codecs[] = {&codec_copies, &codec_mean, NULL};

const struct format_driver format_deepspeed = {
    .name = "deepspeed",
    .title = "DeepSpeed ZeRO 0 to 3 and universal checkpoints",
    .bid = ds_bid,
    .scan = ds_scan,
    .codecs = ds_codecs,
};
