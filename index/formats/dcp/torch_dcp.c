/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/torch_dcp.c - torch.distributed.checkpoint: .metadata and .distcp files. */
#include "index/formats/dcp/torch_dcp.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/dcp/dcp_origin.h"
#include "index/formats/dcp/dcp_scan.h"
#include "index/formats/dcp/dcp_write.h"
#include "index/formats/format.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_zip.h"

enum { SNIFFED = 4096 };

/* ---- bids ---- */

bool dcp_find(struct listing *l, struct dcp_found *out)
{
    unsigned char head[SNIFFED];
    size_t got = 0;

    *out = (struct dcp_found){.name = dcp_metadata_name(l)};
    return out->name && listing_peek(l, out->name, head, sizeof head, &got) == 0 &&
           dcp_metadata_sniff(head, got, out->class, sizeof out->class);
}

/* Trainers that build on DCP put files of their own beside: their drivers know more. */
static const char *foreign_mark(const struct listing *l)
{
    static const char *const marks[] = {"metadata.json", "common.pt"};

    for (size_t i = 0; i < ARRAY_SIZE(marks); i++)
        if (listing_find(l, marks[i]))
            return marks[i];
    return NULL;
}

/* A .metadata that does not begin as torch's: worth an error message, if nobody else bids. */
static void bid_doubtful(struct listing *l, const char *class, struct bid *out)
{
    if (!dcp_has_distcp(l))
        return;
    out->score = 20;
    snprintf(out->reason, sizeof out->reason,
             ".metadata beside .distcp files, but it begins with %.80s",
             class[0] ? class : "no pickled object");
}

static void dcp_bid(struct listing *l, struct bid *out)
{
    const char *mark = foreign_mark(l);
    struct dcp_found found;
    bool sure = dcp_find(l, &found), whole;

    *out = (struct bid){0};
    if (!found.name)
        return;
    whole = strcmp(found.name, ".metadata") == 0;
    if (sure && whole) {
        out->score = mark ? 60 : 80;
        snprintf(out->reason, sizeof out->reason,
                 ".metadata is a pickled DCP Metadata%s%s",
                 mark ? ", with another trainer's " : "", mark ? mark : "");
    } else if (sure) {
        out->score = 75;
        snprintf(out->reason, sizeof out->reason,
                 "%.40s is a pickled DCP Metadata, and there is no .metadata",
                 found.name);
    } else if (whole) {
        bid_doubtful(l, found.class, out);
    }
}

/* ---- the checkpoint as a whole ---- */

static int topology_of(const struct dcp_told *told, const struct dcp_origin *from,
                       struct buf *out, struct err *e)
{
    buf_addf(out, "{\"ranks\": %" PRIu64 ", \"files\": %" PRIu64, told->ranks,
             told->files);
    if (from->has_epoch)
        buf_addf(out, ", \"epoch\": %" PRId64, from->epoch);
    if (told->version[0]) {
        buf_adds(out, ", \"metadata_version\": ");
        buf_add_json(out, told->version, strlen(told->version));
    }
    buf_addc(out, '}');
    return buf_failed(out) ? err_nomem(e) : 0;
}

/* Also a scan that fails has a format. */
static int tell_checkpoint(const struct scan_context *c, struct sink *sink,
                           const struct dcp_told *told, const struct dcp_origin *from,
                           bool failed, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    struct sink_checkpoint about = {
        .format = told->format,
        .framework = told->olmo        ? "OLMo-core"
                     : from->framework ? from->framework
                                       : "PyTorch",
        .version = from->version[0] ? from->version : NULL,
        .has_step = from->has_step,
        .step = from->step,
        .metadata_file = told->metadata[0] ? told->metadata : NULL,
    };

    if (!failed)
        TRY(topology_of(told, from, &topology, e));
    about.topology = topology.data;
    if (!about.has_step)
        about.has_step = step_of_name(listing_name(c->listing), &about.step);
    return sink_checkpoint(sink, &about, e);
}

/* Megatron Core wrote common.pt, and metadata.json last; it loads nothing without that. */
static int tell_unmarked(const struct scan_context *c, struct sink *sink, struct err *e)
{
    if (!listing_find(c->listing, "common.pt") ||
        listing_find(c->listing, "metadata.json"))
        return 0;
    if (sink_warning(
            sink, "missing-file",
            "metadata.json is missing, which Megatron Core writes last: the save "
            "is not finished, or it was not copied along") < 0)
        return err_nomem(e);
    return 0;
}

static int dcp_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct dcp_origin from = {0};
    const struct dcp_how how = {.role = -1,
                                .role_of = dcp_origin_role,
                                .on_object = dcp_origin_note,
                                .user = &from};
    struct dcp_told told = {0};
    struct err failed = {0};
    int r = dcp_report(c, sink, &how, &told, &failed);

    if (r == 0)
        TRY(tell_unmarked(c, sink, e));
    TRY(tell_checkpoint(c, sink, &told, &from, r < 0, e));
    if (r < 0)
        *e = failed;
    return r;
}

static const struct chunk_codec *const dcp_codecs[] = {
    &codec_torch_zip,
    &codec_torch_zip_zstd,
    NULL,
};

static const struct format_writer *const dcp_writers[] = {&writer_dcp, NULL};

const struct format_driver format_torch_dcp = {
    .name = "torch_dcp",
    .title = "PyTorch distributed checkpoint (DCP)",
    .bid = dcp_bid,
    .scan = dcp_scan,
    .codecs = dcp_codecs,
    .writers = dcp_writers,
};
