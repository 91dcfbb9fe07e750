/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_core.c - OLMo-core's stepN/: model_and_optim/, a DCP, and train/. */
#include "index/formats/olmo/olmo_core.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/olmo/olmo_part.h"
#include "index/formats/olmo/olmo_train.h"
#include "index/formats/step.h"
#include "index/formats/dcp/torch_dcp.h"
#include "index/formats/torch/torch_zip.h"
#include "index/names.h"

enum { MAX_MARK = 64 << 10 /* of .metadata.json; real ones have 40 bytes */ };

static const char STATE[] = "model_and_optim";
static const char MARK[] = ".metadata.json"; /* written last, since 1.5.0 */
static const char CONFIG[] = "config.yaml";  /* written last by classic OLMo */

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

/* A save in progress is called stepN-tmp until all of it is there. */
static bool is_unfinished(const struct listing *l)
{
    const char *name = listing_name(l);
    size_t len = strlen(name);

    return len > 4 && strcmp(name + len - 4, "-tmp") == 0;
}

static void core_bid(struct listing *l, struct bid *out)
{
    struct listing *state = listing_sub(l, STATE);
    struct dcp_found found;

    *out = (struct bid){0};
    if (!state || is_unfinished(l) || !dcp_find(state, &found))
        return;
    if (has_file(l, MARK) || olmo_train_find(l)) {
        out->score = 95;
        snprintf(out->reason, sizeof out->reason, "%s/ is a DCP checkpoint, with %s",
                 STATE, has_file(l, MARK) ? MARK : "train/");
    } else {
        out->score = 85;
        snprintf(out->reason, sizeof out->reason, "%s/ is a DCP checkpoint", STATE);
    }
}

/* ---- .metadata.json ---- */

struct mark {
    char version[64]; /* of OLMo-core, or "" */
    bool ephemeral;   /* the trainer removes it when it has saved again */
};

/* {"ephemeral": false, "version": "3.0.0"}; nothing in it decides about tensors. */
static int read_mark(const struct scan_context *c, struct mark *out, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE char *text = NULL;
    const char *version;
    size_t len;

    if (listing_read(c->listing, MARK, MAX_MARK, &text, &len, e) < 0 ||
        json_parse(text, len, &json_python, &doc, e) < 0)
        return err_wrap(e, "%s", MARK);
    if (json_string(json_get(doc, "version"), &version))
        snprintf(out->version, sizeof out->version, "%s", version);
    if (!json_bool(json_get(doc, "ephemeral"), &out->ephemeral))
        out->ephemeral = false;
    return 0;
}

/* 1.0.0 wrote none: then .metadata, which is written behind all data, has to do. */
static int take_mark(const struct scan_context *c, struct sink *sink, struct mark *out,
                     struct err *e)
{
    struct err why = {0};
    int rc = 0;

    if (has_file(c->listing, MARK)) {
        TRY(sink_hide(sink, MARK, true, e));
        if (read_mark(c, out, &why) < 0)
            rc = sink_warning(sink, "damaged-file", "%s", why.text);
    } else if (!has_file(c->listing, CONFIG)) {
        rc = sink_warning(sink, "no-mark",
                          "there is no %s: from 1.5.0 on OLMo-core takes this save for "
                          "unfinished",
                          MARK);
    }
    return rc < 0 ? err_nomem(e) : 0;
}

/* ---- tensors ---- */

static bool ends_in(const char *key, size_t len, const char *suffix)
{
    size_t n = strlen(suffix);

    return len > n && memcmp(key + len - n, suffix, n) == 0;
}

/*
 * The module for experts in parallel puts an optimizer's state beside each weight, without
 * a prefix: NAME.main, NAME.exp_avg, ...
 */
int olmo_core_role(const char *key, size_t len)
{
    static const char *const states[] = {".exp_avg", ".exp_avg_sq", ".step",
                                         ".muon_momentum"};
    static const char *const roots[] = {"model.", "optim."};

    for (size_t i = 0; i < ARRAY_SIZE(roots); i++)
        if (len >= 6 && memcmp(key, roots[i], 6) == 0)
            return (int)role_of(NULL, key, len);
    for (size_t i = 0; i < ARRAY_SIZE(states); i++)
        if (ends_in(key, len, states[i]))
            return ROLE_OPTIMIZER;
    return (int)role_of(NULL, key, len);
}

/* ---- the checkpoint ---- */

struct about {
    struct mark mark;
    struct dcp_told state;
    struct olmo_train_told train;
};

static int topology_of(const struct about *a, struct buf *out, struct err *e)
{
    buf_addf(out, "{\"ranks\": %" PRIu64 ", \"files\": %" PRIu64 "%s}",
             MAX(a->state.ranks, a->train.ranks), a->state.files,
             a->mark.ephemeral ? ", \"ephemeral\": true" : "");
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int tell_checkpoint(const struct scan_context *c, struct sink *sink,
                           const struct about *a, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    struct sink_checkpoint about = {
        .format = "olmo-core-step",
        .framework = "OLMo-core",
        .version = a->mark.version[0] ? a->mark.version : NULL,
        .metadata_file = a->state.metadata[0] ? a->state.metadata : NULL,
        .has_step = a->train.has_step,
        .step = a->train.step,
    };

    TRY(topology_of(a, &topology, e));
    about.topology = topology.data;
    if (step_of_name(listing_name(c->listing), &about.step))
        about.has_step = true;
    return sink_checkpoint(sink, &about, e);
}

static int scan_all(const struct scan_context *c, struct sink *sink, struct about *a,
                    struct err *e)
{
    static const struct dcp_how how = {
        .dir = STATE, .role = -1, .role_of = olmo_core_role};

    TRY(take_mark(c, sink, &a->mark, e));
    TRY(olmo_part_add(sink, STATE, e));
    TRY(dcp_report(c, sink, &how, &a->state, e));
    return olmo_train_report(c, sink, &a->train, e);
}

static int core_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct about about = {0};
    struct err failed = {0};
    int rc = scan_all(c, sink, &about, &failed);

    /* Also a scan that fails has a format. */
    TRY(tell_checkpoint(c, sink, &about, e));
    if (rc < 0)
        *e = failed;
    return rc;
}

static const struct chunk_codec *const core_codecs[] = {
    &codec_torch_zip,
    &codec_torch_zip_zstd,
    NULL,
};

static const struct format_writer *const core_writers[] = {&writer_olmo_step, NULL};

const struct format_driver format_olmo_core = {
    .name = "olmo_core",
    .title = "OLMo-core from 1.0 on: stepN with model_and_optim/ and train/",
    .bid = core_bid,
    .scan = core_scan,
    .codecs = core_codecs,
    .writers = core_writers,
};
