/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_v0.c - early OLMo-core: metadata.json and a safetensors file a rank. */
#include "index/formats/olmo/olmo_part.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/olmo/olmo_train.h"
#include "index/formats/step.h"

/* What save_model_and_optim_state() writes, each a checkpoint of the same form. */
static const char MODEL[] = "model";
static const char OPTIM[] = "optim";

/* ---- bids ---- */

/* 2, 1: is the directory itself such a folder? As olmo_part_find(). */
static int is_alone(struct listing *l)
{
    int found = olmo_part_find(l);

    return found == 1 && !listing_find(l, "rank_0.safetensors") ? 0 : found;
}

static bool has_part(struct listing *l, const char *name)
{
    struct listing *sub = listing_sub(l, name);

    return sub && is_alone(sub) > 0;
}

static void v0_bid(struct listing *l, struct bid *out)
{
    int found = is_alone(l);

    *out = (struct bid){0};
    if (found == 2) {
        out->score = 88;
        snprintf(out->reason, sizeof out->reason,
                 "metadata.json says which files hold which elements of tensors");
    } else if (found == 1) {
        out->score = 70;
        snprintf(out->reason, sizeof out->reason,
                 "metadata.json with tensors, and rank_0.safetensors");
    } else if (has_part(l, MODEL)) {
        out->score = 95;
        snprintf(out->reason, sizeof out->reason,
                 "%s/metadata.json of early OLMo-core%s", MODEL,
                 has_part(l, OPTIM) ? ", and optim/ as well" : "");
    }
}

/* ---- the checkpoint ---- */

struct about {
    struct olmo_part_told part;
    struct olmo_train_told train;
};

/* Also a scan that fails has a format. */
static int tell_checkpoint(const struct scan_context *c, struct sink *sink,
                           const struct about *a, struct err *e)
{
    char topology[96];
    struct sink_checkpoint about = {
        .format = a->part.legacy ? "olmo-core-v0-legacy" : "olmo-core-v0",
        .framework = "OLMo-core",
        .topology = topology,
        .metadata_file = a->part.metadata[0] ? a->part.metadata : NULL,
        .has_step = a->train.has_step,
        .step = a->train.step,
    };

    snprintf(topology, sizeof topology,
             "{\"ranks\": %" PRIu64 ", \"files\": %" PRIu64 "}",
             MAX(a->part.ranks, a->train.ranks), a->part.files);
    if (!about.has_step)
        about.has_step = step_of_name(listing_name(c->listing), &about.step);
    return sink_checkpoint(sink, &about, e);
}

/* Without its optimizer a model is still a model. */
static int scan_optim(const struct scan_context *c, struct sink *sink, struct about *a,
                      struct err *e)
{
    static const struct olmo_part_how how = {
        .dir = OPTIM, .part = OPTIM, .role = ROLE_OPTIMIZER};
    struct olmo_part_told told;
    struct err why = {0};

    if (!listing_sub(c->listing, OPTIM))
        return 0;
    TRY(olmo_part_add(sink, OPTIM, e));
    if (olmo_part_report(c, sink, &how, &told, &why) < 0) {
        if (why.code != EBADMSG && why.code != ENOENT && why.code != EFBIG) {
            return err_copy(e, &why);
        }
        return sink_warning(sink, "missing-part", "no tensors of the optimizer: %s",
                            why.text) < 0
                   ? err_nomem(e)
                   : 0;
    }
    a->part.ranks = MAX(a->part.ranks, told.ranks);
    a->part.files += told.files;
    return 0;
}

static int scan_parts(const struct scan_context *c, struct sink *sink, struct about *a,
                      struct err *e)
{
    static const struct olmo_part_how how = {.dir = MODEL, .role = ROLE_MODEL};

    TRY(olmo_part_add(sink, MODEL, e));
    TRY(olmo_part_report(c, sink, &how, &a->part, e));
    TRY(scan_optim(c, sink, a, e));
    return olmo_train_report(c, sink, &a->train, e);
}

static int scan_any(const struct scan_context *c, struct sink *sink, struct about *a,
                    struct err *e)
{
    static const struct olmo_part_how alone = {.dir = "", .role = -1};

    if (is_alone(c->listing) > 0)
        return olmo_part_report(c, sink, &alone, &a->part, e);
    return scan_parts(c, sink, a, e);
}

static int v0_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct about about = {0};
    struct err failed = {0};
    int rc = scan_any(c, sink, &about, &failed);

    TRY(tell_checkpoint(c, sink, &about, e));
    if (rc < 0)
        *e = failed;
    return rc;
}

static const struct format_writer *const v0_writers[] = {&writer_olmo, NULL};

const struct format_driver format_olmo_v0 = {
    .name = "olmo_v0",
    .title = "OLMo-core 0.1 and before: metadata.json and rank_N.safetensors",
    .bid = v0_bid,
    .scan = v0_scan,
    .writers = v0_writers,
};
