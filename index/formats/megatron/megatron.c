/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron.c - Megatron Core's checkpoints: metadata.json and what it names. */
#include "index/formats/megatron/megatron.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "index/formats/megatron/megatron_integrity.h"
#include "index/formats/megatron/megatron_write.h"
#include "index/formats/step.h"
#include "index/formats/dcp/dcp_origin.h"
#include "index/formats/dcp/torch_dcp.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_zip.h"
#include "index/sink.h"

enum {
    MAX_METADATA = 64 << 10, /* of metadata.json; real ones have 130 bytes */
    MAX_CONFIG = 4 << 20,    /* of run_config.yaml; real ones have 20 KiB */
    MAX_COMMON = 64 << 20,   /* the common state as JSON */
    MAX_RANKS = 1 << 20,     /* of tensor parallelism */
};

static const char METADATA[] = "metadata.json";
static const char COMMON[] = "common.pt";
static const char CONFIG[] = "run_config.yaml";
static const char TRAIN_STATE[] = "train_state.pt";

/* ---- metadata.json ---- */

enum backend { BACKEND_UNKNOWN, BACKEND_TORCH_DIST, BACKEND_ZARR };

struct metadata {
    enum backend backend;
    char name[64];
    bool has_version;
    uint64_t version;
    char common[64]; /* "": none is told (0.19 on) */
    uint64_t common_version;
};

static void take_text(const struct json *v, char *dst, size_t size)
{
    const char *text;

    if (json_string(v, &text))
        snprintf(dst, size, "%s", text);
}

/* -EBADMSG when it is no metadata.json of Megatron Core. */
static int read_metadata(struct listing *l, struct metadata *out, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE char *text = NULL;
    size_t len;

    *out = (struct metadata){0};
    if (listing_read(l, METADATA, MAX_METADATA, &text, &len, e) < 0 ||
        json_parse(text, len, &json_python, &doc, e) < 0)
        return err_wrap(e, "%s", METADATA);
    take_text(json_get(doc, "sharded_backend"), out->name, sizeof out->name);
    if (!out->name[0])
        return err_set(e, EBADMSG, "%s tells no sharded_backend", METADATA);
    out->backend = strcmp(out->name, "torch_dist") == 0 ? BACKEND_TORCH_DIST
                   : strcmp(out->name, "zarr") == 0     ? BACKEND_ZARR
                                                        : BACKEND_UNKNOWN;
    out->has_version =
        json_u64(json_get(doc, "sharded_backend_version"), &out->version);
    take_text(json_get(doc, "common_backend"), out->common, sizeof out->common);
    if (!json_u64(json_get(doc, "common_backend_version"), &out->common_version))
        out->common_version = 0;
    return 0;
}

static int check_metadata(const struct metadata *m, struct err *e)
{
    if (m->backend == BACKEND_UNKNOWN) {
        err_set(e, ENOTSUP, "%s: sharded backend \"%s\" is not known", METADATA,
                m->name);
        return err_hint(e, "torch_dist and zarr of version 1 are supported");
    }
    if (!m->has_version || m->version != 1) {
        if (m->has_version)
            err_set(e, ENOTSUP, "%s: version %" PRIu64 " of backend %s is not known",
                    METADATA, m->version, m->name);
        else
            err_set(e, ENOTSUP, "%s tells no version of backend %s", METADATA, m->name);
        return err_hint(e, "version 1 is supported");
    }
    if (m->common[0] && (strcmp(m->common, "torch") != 0 || m->common_version != 1)) {
        err_set(e, ENOTSUP,
                "%s: common backend \"%s\" of version %" PRIu64 " is not known",
                METADATA, m->common, m->common_version);
        return err_hint(e, "torch of version 1 is supported");
    }
    return 0;
}

/* ---- bids ---- */

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

/*
 * Megatron Bridge's fsdp_dtensor: torch's own checkpoint with Bridge's files beside. It has
 * no metadata.json.
 */
static bool is_fsdp(struct listing *l)
{
    struct dcp_found found;

    return !has_file(l, METADATA) && has_file(l, CONFIG) && has_file(l, TRAIN_STATE) &&
           dcp_find(l, &found) && strcmp(found.name, ".metadata") == 0;
}

static void megatron_bid(struct listing *l, struct bid *out)
{
    struct metadata m;
    struct err ignored = {0};

    *out = (struct bid){0};
    if (has_file(l, METADATA)) {
        if (read_metadata(l, &m, &ignored) < 0)
            return;
        out->score = 90;
        snprintf(out->reason, sizeof out->reason, "%s names Megatron Core's backend %s",
                 METADATA, m.name);
    } else if (is_fsdp(l)) {
        out->score = 85;
        snprintf(out->reason, sizeof out->reason,
                 "a DCP checkpoint with Megatron Bridge's %s and %s", CONFIG,
                 TRAIN_STATE);
    }
}

static bool skip_digits(const char **p)
{
    const char *start = *p;

    while (isdigit((unsigned char)**p))
        (*p)++;
    return *p > start;
}

/* nvidia-resiliency-ext: "iter_0000010_3_local.pt", iteration and rank. */
static bool is_local_name(const char *name)
{
    if (strncmp(name, "iter_", 5) != 0)
        return false;
    name += 5;
    return skip_digits(&name) && *name++ == '_' && skip_digits(&name) &&
           strcmp(name, "_local.pt") == 0;
}

static void megatron_bid_file(struct listing *l, const char *name, struct bid *out)
{
    unsigned char head[TORCH_HEAD];
    size_t got = 0;

    if (!is_local_name(name) || listing_peek(l, name, head, sizeof head, &got) < 0 ||
        torch_sniff(head, got) == TORCH_NOT)
        return;
    out->score = 70;
    snprintf(out->reason, sizeof out->reason,
             "a rank's local checkpoint of nvidia-resiliency-ext, which is refused");
}

/* ---- the checkpoint as a whole ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct metadata metadata;
    struct megatron_facts facts;
    struct dcp_told dcp; /* of the torch_dist backend */
    uint64_t rows;       /* of the embedding or output layer */
    char few_rows[40];   /* which of them, or "" */
    bool fsdp;
};

static const char *format_of(const struct scan *s)
{
    if (s->fsdp)
        return "megatron-fsdp-dtensor";
    switch (s->metadata.backend) {
    case BACKEND_TORCH_DIST:
        return "megatron-torch-dist";
    case BACKEND_ZARR:
        return "megatron-zarr";
    case BACKEND_UNKNOWN:
        break;
    }
    return "megatron";
}

static int write_topology(const struct scan *s, struct buf *out, struct err *e)
{
    buf_adds(out, "{\"backend\": ");
    buf_add_json(out, s->metadata.name, strlen(s->metadata.name));
    /* Files tell of the ranks that had something to write, which may not be all. */
    if (s->dcp.files > 0)
        buf_addf(out, ", \"ranks\": %" PRIu64 ", \"files\": %" PRIu64,
                 MAX(s->dcp.ranks, s->facts.world), s->dcp.files);
    megatron_topology(&s->facts, out);
    buf_addc(out, '}');
    return buf_failed(out) ? err_nomem(e) : 0;
}

/* The directory's name tells the step; else what was saved with it (a "release"). */
static bool find_step(const struct scan *s, int64_t *step)
{
    if (step_of_name(listing_name(s->c->listing), step))
        return true;
    *step = s->facts.iteration;
    return s->facts.has_iteration;
}

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    char path[PATH_MAX];
    struct sink_checkpoint about = {.format = format_of(s)};

    about.framework = s->facts.has_config ? "Megatron Bridge"
                      : s->facts.has_args ? "Megatron-LM"
                                          : "Megatron Core";
    TRY(write_topology(s, &topology, e));
    about.topology = topology.data;
    about.settings = megatron_settings(&s->facts);
    if (store_join(s->c->dir, s->fsdp ? ".metadata" : METADATA, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", s->c->dir,
                       METADATA);
    about.metadata_file = path;
    about.has_step = find_step(s, &about.step);
    return sink_checkpoint(s->sink, &about, e);
}

/* ---- what lies beside the tensors ---- */

static const char *no_key(void *user, const char *path, size_t path_len,
                          const struct torch_tensor *tensor)
{
    (void)user;
    (void)path;
    (void)path_len;
    (void)tensor;
    return NULL;
}

/* What cannot be read is told by torch_file_report(). */
static void learn_common_file(struct scan *s)
{
    CLEANUP(torch_file_close) struct torch_file f = {.path = COMMON};
    CLEANUP(buf_release) struct buf json = {.max = MAX_COMMON};
    struct err ignored = {0};
    struct pv root;

    if (torch_file_register(s->sink, &f, &ignored) < 0 ||
        torch_file_load(s->c, &f, &ignored) < 0)
        return;
    root = torch_zip_root(f.zip);
    if (object_to_json(f.zip, &root, 0, no_key, NULL, &json, &ignored) == 0)
        megatron_learn_common(&s->facts, json.data, json.len);
}

static int report_common(struct scan *s, struct err *e)
{
    static const struct torch_report how = {.role = ROLE_OTHER};

    if (has_file(s->c->listing, COMMON)) {
        learn_common_file(s);
        return torch_file_report(s->c, s->sink, COMMON, &how, e);
    }
    if (!s->metadata.common[0])
        return 0;
    return sink_warning(s->sink, "missing-file",
                        "%s is missing: %s says that the common state is there", COMMON,
                        METADATA) < 0
               ? err_nomem(e)
               : 0;
}

/* "layer_wise_optimizer_3.pt": Muon's state, a file a data-parallel rank. */
static bool is_layer_wise(const char *name)
{
    static const char prefix[] = "layer_wise_optimizer_";

    if (strncmp(name, prefix, sizeof prefix - 1) != 0)
        return false;
    name += sizeof prefix - 1;
    return skip_digits(&name) && strcmp(name, ".pt") == 0;
}

/* Files of torch.save beside the tensors. */
static int report_files(struct scan *s, struct err *e)
{
    static const struct torch_report state = {.role = ROLE_OTHER};
    const struct listing *l = s->c->listing;

    if (has_file(l, TRAIN_STATE))
        TRY(torch_file_report(s->c, s->sink, TRAIN_STATE, &state, e));
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        const struct torch_report optimizer = {
            .prefix = "", .part = entry->name, .role = ROLE_OPTIMIZER};

        if (entry->st.kind == ENTRY_FILE && is_layer_wise(entry->name))
            TRY(torch_file_report(s->c, s->sink, entry->name, &optimizer, e));
    }
    return 0;
}

/* It stays visible: people read it, and Bridge does. */
static int learn_config(struct scan *s, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    struct err ignored = {0};
    size_t len;

    if (!has_file(s->c->listing, CONFIG))
        return 0;
    TRY(sink_watch(s->sink, CONFIG, e));
    if (listing_read(s->c->listing, CONFIG, MAX_CONFIG, &text, &len, &ignored) == 0)
        megatron_learn_config(&s->facts, text, len);
    return 0;
}

/* ---- known losses ---- */

static bool ends_with(const char *key, size_t len, const char *name)
{
    size_t n = strlen(name);

    return len >= n && memcmp(key + len - n, name, n) == 0 &&
           (len == n || key[len - n - 1] == '.');
}

/* Rows of what has one for each word; the fewest. */
static void note_rows(void *user, const char *key, size_t len,
                      const struct shape *shape)
{
    static const char *const names[] = {"embedding.word_embeddings.weight",
                                        "output_layer.weight"};
    struct scan *s = user;

    if (shape->nd != 2 || megatron_role(key, len) == ROLE_OPTIMIZER)
        return;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        if (!ends_with(key, len, names[i]) ||
            (s->few_rows[0] && shape->dim[0] >= s->rows))
            continue;
        s->rows = shape->dim[0];
        snprintf(s->few_rows, sizeof s->few_rows, "%s", names[i]);
    }
}

/*
 * Megatron Core 0.17 with Bridge stores a tensor-parallel rank's rows of the embedding as
 * the whole where FSDP is used (fsdp_dtensor): the other ranks' rows are in no file.
 */
static int tell_lost_rows(struct scan *s, struct err *e)
{
    const char *settings = megatron_settings(&s->facts);
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err ignored = {0};
    uint64_t vocab;

    if (!settings || !s->few_rows[0] || s->facts.tensor < 2 || s->rows > UINT32_MAX ||
        json_parse(settings, strlen(settings), NULL, &doc, &ignored) < 0 ||
        !json_u64(json_get(doc, "vocab_size"), &vocab) || s->rows >= vocab ||
        vocab - s->rows > s->rows * (MIN(s->facts.tensor, MAX_RANKS) - 1))
        return 0;
    return sink_warning(s->sink, "lost-rows",
                        "%s has %" PRIu64 " rows, and vocab_size is %" PRIu64
                        ": the framework did not save the others (Megatron Core 0.17 "
                        "stores one tensor-parallel rank's rows as the whole)",
                        s->few_rows, s->rows, vocab) < 0
               ? err_nomem(e)
               : 0;
}

static int hide_machinery(struct scan *s, struct err *e)
{
    static const char *const names[] = {METADATA, MEGATRON_INTEGRITY};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (has_file(s->c->listing, names[i]))
            TRY(sink_hide(s->sink, names[i], true, e));
    return 0;
}

/* ---- torch_dist ---- */

/* dcp_how.on_object */
static void see_object(void *user, const char *key, size_t len, const char *json,
                       size_t json_len)
{
    static const char common[] = "common_state/shard_0_1";
    struct scan *s = user;

    if (len == sizeof common - 1 && memcmp(key, common, len) == 0)
        megatron_learn_common(&s->facts, json, json_len);
    else
        megatron_learn_cell(&s->facts, key, len);
}

static int report_torch_dist(struct scan *s, struct err *e)
{
    const struct dcp_how how = {
        .role = -1,
        .no_wrapper = !s->fsdp,
        .unwrap = !s->fsdp,
        .role_of = s->fsdp ? dcp_origin_role : megatron_role,
        .on_tensor = note_rows,
        .on_object = see_object,
        .user = s,
    };

    return dcp_report(s->c, s->sink, &how, &s->dcp, e);
}

static int report_tensors(struct scan *s, struct err *e)
{
    return s->metadata.backend == BACKEND_ZARR
               ? megatron_zarr_report(s->c, s->sink, &s->facts, e)
               : report_torch_dist(s, e);
}

/* ---- the scan ---- */

static int refuse_local(const struct scan_context *c, struct sink *sink, struct err *e)
{
    static const struct sink_checkpoint about = {.format = "megatron-local",
                                                 .framework = "nvidia-resiliency-ext"};

    TRY(sink_checkpoint(sink, &about, e));
    err_set(e, ENOTSUP,
            "%s is one rank's local non-persistent checkpoint, which is of use only to "
            "the job that wrote it",
            c->file);
    return err_hint(e, "save with non_persistent_ckpt_type global, or persistently");
}

/*
 * Bridge says in run_config.yaml what it saved; of torch_dist Megatron Core writes metadata.json
 * last, and loads nothing without it.
 */
static int tell_unmarked(struct scan *s, struct err *e)
{
    static const char *const backends[] = {"ckpt_format: torch_dist",
                                           "ckpt_format: zarr"};
    CLEANUP_FREE char *text = NULL;
    struct err ignored = {0};
    size_t len;
    bool marked = false;

    if (listing_read(s->c->listing, CONFIG, MAX_CONFIG, &text, &len, &ignored) < 0)
        return 0;
    for (size_t i = 0; i < ARRAY_SIZE(backends); i++)
        marked |= memmem(text, len, backends[i], strlen(backends[i])) != NULL;
    if (marked &&
        sink_warning(s->sink, "missing-file",
                     "%s is missing, which Megatron Core writes last: the save is not "
                     "finished, or it was not copied along",
                     METADATA) < 0)
        return err_nomem(e);
    return 0;
}

static int read_head(struct scan *s, struct err *e)
{
    s->fsdp = is_fsdp(s->c->listing);
    if (s->fsdp)
        TRY(tell_unmarked(s, e));
    if (s->fsdp)
        snprintf(s->metadata.name, sizeof s->metadata.name, "fsdp_dtensor");
    if (has_file(s->c->listing, CONFIG) && !has_file(s->c->listing, TRAIN_STATE) &&
        sink_warning(s->sink, "missing-file",
                     "%s is missing, which Megatron Bridge saves with %s", TRAIN_STATE,
                     CONFIG) < 0)
        return err_nomem(e);
    TRY(hide_machinery(s, e));
    if (s->fsdp)
        return 0;
    if (!has_file(s->c->listing, METADATA))
        return err_set(e, ESTALE, "%s is gone", METADATA);
    TRY(read_metadata(s->c->listing, &s->metadata, e));
    return check_metadata(&s->metadata, e);
}

static int report(struct scan *s, struct err *e)
{
    TRY(read_head(s, e));
    TRY(report_tensors(s, e));
    TRY(report_common(s, e));
    TRY(report_files(s, e));
    TRY(learn_config(s, e));
    return tell_lost_rows(s, e);
}

/* Also a scan that fails has a format. */
static int megatron_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct scan s = {.c = c, .sink = sink};
    struct err failed = {0};
    int r;

    if (c->file)
        return refuse_local(c, sink, e);
    r = report(&s, &failed);
    TRY(tell_checkpoint(&s, e));
    if (r < 0)
        *e = failed;
    return r;
}

static const struct chunk_codec *const megatron_codecs[] = {
    &codec_torch_zip,
    &codec_torch_zip_zstd,
    &codec_zip_deflate,
    NULL,
};

static const struct format_writer *const megatron_writers[] = {&writer_torch_dist,
                                                               &writer_zarr, NULL};

const struct format_driver format_megatron = {
    .name = "megatron",
    .title = "Megatron Core and Megatron Bridge (torch_dist, zarr)",
    .bid = megatron_bid,
    .bid_file = megatron_bid_file,
    .scan = megatron_scan,
    .codecs = megatron_codecs,
    .writers = megatron_writers,
};
