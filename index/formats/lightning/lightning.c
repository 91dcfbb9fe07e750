/* SPDX-License-Identifier: MIT */
/* index/formats/lightning/lightning.c - Lightning's sharded checkpoints: DCP and meta.pt. */
#include "index/formats/format.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/dcp/torch_dcp.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_origin.h"

/*
 * What is no module and no optimizer: loops, callbacks, hyper-parameters, and whatever
 * the user of Fabric put beside them (lightning/fabric/strategies/fsdp.py, 2.6).
 */
static const char meta_name[] = "meta.pt";

/* ---- bids ---- */

static bool has_meta(struct listing *l)
{
    unsigned char head[TORCH_HEAD];
    size_t got = 0;
    enum torch_kind kind;

    if (listing_peek(l, meta_name, head, sizeof head, &got) < 0)
        return false;
    kind = torch_sniff(head, got);
    return kind == TORCH_ZIP || kind == TORCH_MAYBE || kind == TORCH_LEGACY;
}

static void lightning_bid(struct listing *l, struct bid *out)
{
    struct dcp_found found;

    *out = (struct bid){0};
    if (!dcp_find(l, &found) || !has_meta(l))
        return;
    out->score = 90;
    snprintf(out->reason, sizeof out->reason,
             "%s is a pickled DCP Metadata, beside meta.pt", found.name);
}

/* ---- the scan ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct dcp_told told;
    struct torch_origin origin;
};

/* Trainer's strategies call the optimizers optimizer_0, optimizer_1, ...: role -1 knows
 * Fabric's usual names. */
static int role_of_key(const char *key, size_t len)
{
    static const char word[] = "optimizer_";
    size_t n = sizeof word - 1, digits = n;

    if (len <= n || memcmp(key, word, n) != 0)
        return -1;
    while (digits < len && isdigit((unsigned char)key[digits]))
        digits++;
    return digits > n && digits < len && key[digits] == '.' ? ROLE_OPTIMIZER : -1;
}

static void note_origin(void *user, const struct torch_zip *zip)
{
    struct scan *s = user;

    torch_origin(zip, &s->origin);
}

/* Objects are meta.pt:ENTRY, as loops and callbacks are large and apart. */
static int report_meta(struct scan *s, struct err *e)
{
    const struct torch_report how = {
        .role = ROLE_OTHER,
        .entries = true,
        .object = "meta.pt:",
        .loaded = note_origin,
        .user = s,
    };

    return torch_file_report(s->c, s->sink, meta_name, &how, e);
}

static int topology_of(const struct scan *s, struct buf *out, struct err *e)
{
    buf_addf(out, "{\"ranks\": %" PRIu64 ", \"files\": %" PRIu64, s->told.ranks,
             s->told.files);
    if (s->origin.has_epoch)
        buf_addf(out, ", \"epoch\": %" PRId64, s->origin.epoch);
    buf_addc(out, '}');
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    const struct torch_origin *from = &s->origin;
    bool trainer = from->version[0];
    struct sink_checkpoint about = {
        .format = trainer ? "lightning-dcp" : "lightning-fabric-dcp",
        .framework = trainer ? "Lightning" : "Lightning Fabric",
        .version = trainer ? from->version : NULL,
        .metadata_file = s->told.metadata[0] ? s->told.metadata : NULL,
        .has_step = from->has_step,
        .step = from->step,
    };

    TRY(topology_of(s, &topology, e));
    about.topology = topology.data;
    return sink_checkpoint(s->sink, &about, e);
}

static int lightning_scan(const struct scan_context *c, struct sink *sink,
                          struct err *e)
{
    static const struct dcp_how how = {.role = -1, .role_of = role_of_key};
    struct scan s = {.c = c, .sink = sink};
    struct err failed = {0};

    if (dcp_report(c, sink, &how, &s.told, &failed) == 0)
        report_meta(&s, &failed);
    /* Also a scan that fails has a format. */
    TRY(tell_checkpoint(&s, e));
    if (failed.code)
        *e = failed;
    return -e->code;
}

const struct format_driver format_lightning = {
    .name = "lightning",
    .title = "Lightning and Fabric: sharded .ckpt directories with meta.pt",
    .bid = lightning_bid,
    .scan = lightning_scan,
};
