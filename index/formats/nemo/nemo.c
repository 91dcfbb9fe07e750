/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo.c - NeMo's .nemo archives and folders: a config, weights, side files. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/yaml_tree.h"
#include "index/formats/format.h"
#include "index/formats/nemo/nemo_ranks.h"
#include "index/formats/nemo/nemo_train.h"
#include "index/formats/scan.h"
#include "index/formats/torch/torch_file.h"
#include "remote/archives.h"
#include "remote/gunzip.h"
#include "remote/tar.h"

enum {
    HEAD_BYTES = 512,
    MAX_CONFIG = 16 << 20, /* as yaml_parse() */
    MAX_VERSION = 48,
    MAX_RANKS = 4096,
};

static const char config_name[] = "model_config.yaml";
static const char file_name[] = "model_weights.ckpt";

/* Folders of a distributed checkpoint: of NeMo 1 and 2. */
static const char *const dir_names[] = {"model_weights", "weights"};

/* ---- what is there ---- */

enum weights_kind {
    WEIGHTS_NONE,
    WEIGHTS_FILE,  /* model_weights.ckpt */
    WEIGHTS_DIR,   /* a distributed checkpoint */
    WEIGHTS_RANKS, /* mp_rank_NN/model_weights.ckpt */
    WEIGHTS_ODD,   /* by its name there, but a link or a device of the archive */
};

struct weights {
    enum weights_kind kind;
    const char *name; /* of the file or folder, or the first rank's folder */
    size_t ranks;
};

static enum entry_kind kind_of(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    /* A link or device is there and of no use; what is absent is called a directory's. */
    return entry ? entry->st.kind : (enum entry_kind) - 1;
}

static bool is_rank_dir(struct listing *l, const struct listing_entry *entry)
{
    uint32_t t, p;
    struct listing *sub =
        entry->st.kind == ENTRY_DIR && nemo_rank_name(entry->name, &t, &p)
            ? listing_sub(l, entry->name)
            : NULL;

    return sub && kind_of(sub, file_name) == ENTRY_FILE;
}

static void find_weights(struct listing *l, struct weights *out)
{
    *out = (struct weights){0};
    if (listing_find(l, file_name)) {
        out->name = file_name;
        out->kind = kind_of(l, file_name) == ENTRY_FILE ? WEIGHTS_FILE : WEIGHTS_ODD;
        return;
    }
    for (size_t i = 0; i < ARRAY_SIZE(dir_names); i++) {
        if (!listing_find(l, dir_names[i]) || kind_of(l, dir_names[i]) == ENTRY_FILE)
            continue;
        out->name = dir_names[i];
        out->kind = kind_of(l, dir_names[i]) == ENTRY_DIR ? WEIGHTS_DIR : WEIGHTS_ODD;
        return;
    }
    for (size_t i = 0; i < listing_count(l); i++) {
        if (!is_rank_dir(l, listing_at(l, i)))
            continue;
        if (out->ranks++ == 0)
            out->name = listing_at(l, i)->name;
        out->kind = WEIGHTS_RANKS;
    }
}

/* ---- bids ---- */

/* Is the folder of weights a checkpoint that some driver knows? */
static bool knows_dir(struct listing *l, const char *name)
{
    CLEANUP(place_release) struct place place = {0};
    struct listing *sub = listing_sub(l, name);
    struct err ignored = {0};

    return sub && place_of(sub, NULL, &place, &ignored) == 0 &&
           place.kind == PLACE_CHECKPOINT;
}

/* An archive that was unpacked, or a folder of NeMo 2: context/ beside weights/. */
static void nemo_bid(struct listing *l, struct bid *out)
{
    bool config = kind_of(l, config_name) == ENTRY_FILE;
    bool context = kind_of(l, "context") == ENTRY_DIR;
    struct weights w;

    *out = (struct bid){0};
    if (!config && !context)
        return;
    find_weights(l, &w);
    if (w.kind == WEIGHTS_NONE || w.kind == WEIGHTS_ODD ||
        (!config && w.kind != WEIGHTS_DIR) ||
        (w.kind == WEIGHTS_DIR && !knows_dir(l, w.name)))
        return;
    out->score = 90; /* it claims a part that others read by itself */
    snprintf(out->reason, sizeof out->reason, "%s beside %s",
             config ? config_name : "context/", w.name);
}

static void nemo_bid_file(struct listing *l, const char *name, struct bid *out)
{
    unsigned char head[HEAD_BYTES];
    size_t got = 0;

    *out = (struct bid){0};
    if (!archive_is_named(name))
        return;
    if (listing_peek(l, name, head, sizeof head, &got) < 0)
        got = 0;
    out->score = gunzip_sniff(head, got) || tar_sniff(head, got) ? 60 : 20;
    snprintf(out->reason, sizeof out->reason, "*.nemo, %s",
             out->score == 20          ? "but neither tar nor gzip"
             : gunzip_sniff(head, got) ? "packed by gzip"
                                       : "a tar archive");
}

/* ---- the scan ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    const char
        *base; /* of names below the checkpoint's directory: the archive, or "" */
    char dir[PATH_MAX]; /* the same in the store */
    struct listing *listing;
    struct archive_oddities odd;
    struct weights weights;
    bool merged; /* the ranks */
    char version[MAX_VERSION];
    struct nemo_config config;
    struct err no_config; /* code 0: there is a config */
};

/*
 * The config tells the version, and how ranks have cut the model. It need not be there,
 * nor be YAML: then s->no_config says why nothing is known of the ranks.
 */
static void read_config(struct scan *s)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE char *text = NULL;
    const char *version;
    size_t len;

    if (listing_read(s->listing, config_name, MAX_CONFIG, &text, &len, &s->no_config) <
            0 ||
        yaml_parse(text, len, &doc, &s->no_config) < 0) {
        err_wrap(&s->no_config, "%s", config_name);
        return;
    }
    if (json_string(json_get(doc, "nemo_version"), &version))
        snprintf(s->version, sizeof s->version, "%s", version);
    nemo_config_learn(doc, &s->config, &s->no_config);
}

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    const struct sink_checkpoint *told = sink_told(s->sink);
    struct sink_checkpoint about = *told;
    const char *inner = told->topology;
    bool by_other = s->weights.kind == WEIGHTS_DIR && told->format &&
                    strncmp(told->format, "nemo", 4) != 0;

    buf_addf(&topology, "{\"archive\": %s",
             !s->base[0]     ? "null"
             : s->odd.packed ? "\"tar.gz\""
                             : "\"tar\"");
    if (s->weights.ranks > 0)
        buf_addf(&topology, ", \"ranks\": %zu", s->weights.ranks);
    if (s->merged)
        buf_addf(&topology,
                 ", \"tensor_parallel\": %" PRIu64 ", \"pipeline_parallel\": %" PRIu64,
                 s->config.tensor, s->config.pipeline);
    if (by_other) {
        buf_adds(&topology, ", \"weights\": ");
        buf_add_json(&topology, told->format, strlen(told->format));
    }
    if (by_other && inner && inner[0] == '{' && inner[1] != '}')
        buf_addf(&topology, ", %s", inner + 1);
    else
        buf_addc(&topology, '}');
    if (buf_failed(&topology))
        return err_nomem(e);
    about.format = s->weights.kind == WEIGHTS_DIR ? "nemo-dist"
                   : s->merged                    ? "nemo-ranks"
                                                  : "nemo";
    about.framework = "NeMo";
    about.version = s->version[0] ? s->version : NULL;
    about.topology = topology.data;
    if (s->base[0])
        about.metadata_file = s->dir;
    return sink_checkpoint(s->sink, &about, e);
}

/* What the drivers of the weights see: the archive's folder as their directory. */
static struct scan_context context_of(const struct scan *s, const char *dir,
                                      struct listing *l)
{
    return (struct scan_context){
        .store = s->c->store, .pool = s->c->pool, .listing = l, .dir = dir};
}

static int scan_file(struct scan *s, const char *path, struct err *e)
{
    const struct scan_context c = context_of(s, s->dir, s->listing);
    const struct torch_report how = {.prefix = "",
                                     .role = ROLE_MODEL,
                                     .entries = true,
                                     .wrappers = true,
                                     .strict = true};

    return torch_file_report(&c, s->sink, path, &how, e);
}

static int scan_dir(struct scan *s, struct err *e)
{
    CLEANUP(place_release) struct place place = {0};
    struct listing *l = listing_sub(s->listing, s->weights.name);
    char dir[PATH_MAX], base[PATH_MAX];
    struct scan_context c;

    if (!l)
        return err_set(e, EBADMSG, "%s cannot be listed", s->weights.name);
    if (store_join(s->dir, s->weights.name, dir, sizeof dir) < 0 ||
        store_join(s->base, s->weights.name, base, sizeof base) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", s->weights.name);
    TRY(place_of(l, NULL, &place, e));
    if (place.kind != PLACE_CHECKPOINT) {
        err_set(e, ENOTSUP, "%s/ holds no checkpoint that is known", s->weights.name);
        return err_hint(e, "torch_dist and zarr of Megatron Core are, and torch's DCP");
    }
    TRY(sink_part(s->sink, s->weights.name, e));
    TRY(sink_enter(s->sink, base, e));
    c = context_of(s, dir, l);
    c.file = place.file;
    return place.driver->scan(&c, s->sink, e);
}

/* What each file holds is shown, and none of it as the model. */
static int show_ranks(struct scan *s, const struct err *why, struct err *e)
{
    static const struct torch_report how = {.role = ROLE_OTHER};
    const struct scan_context c = context_of(s, s->dir, s->listing);
    char path[PATH_MAX];

    for (size_t i = 0; i < listing_count(s->listing); i++) {
        const struct listing_entry *entry = listing_at(s->listing, i);

        if (!is_rank_dir(s->listing, entry))
            continue;
        snprintf(path, sizeof path, "%s/%s", entry->name, file_name);
        TRY(torch_file_report(&c, s->sink, path, &how, e));
    }
    return sink_warning(s->sink, "not-merged",
                        "the files of %zu model parallel ranks are shown as they are, "
                        "pieces of the model's tensors: %s",
                        s->weights.ranks, why->text) < 0
               ? err_nomem(e)
               : 0;
}

static int scan_ranks(struct scan *s, struct err *e)
{
    const struct scan_context c = context_of(s, s->dir, s->listing);
    const struct nemo_ranks ranks = {.c = &c, .sink = s->sink, .file = file_name};
    struct err why = s->no_config;

    if (s->weights.ranks > MAX_RANKS)
        return err_set(e, EFBIG, "more than %d ranks", MAX_RANKS);
    for (size_t i = 0; i < listing_count(s->listing); i++)
        if (is_rank_dir(s->listing, listing_at(s->listing, i)))
            TRY(sink_part(s->sink, listing_at(s->listing, i)->name, e));
    if (!why.code)
        TRY(nemo_ranks_report(&ranks, &s->config, &s->merged, &why, e));
    return s->merged ? 0 : show_ranks(s, &why, e);
}

static int scan_weights(struct scan *s, struct err *e)
{
    switch (s->weights.kind) {
    case WEIGHTS_FILE:
        return scan_file(s, file_name, e);
    case WEIGHTS_DIR:
        return scan_dir(s, e);
    case WEIGHTS_RANKS:
        return scan_ranks(s, e);
    case WEIGHTS_ODD:
        return err_set(e, EBADMSG, "%s is a link or a device in the archive",
                       s->weights.name);
    case WEIGHTS_NONE:
        break;
    }
    return sink_warning(s->sink, "no-weights",
                        "there is no %s, no model_weights/ and no mp_rank_NN/: only "
                        "its side files are shown",
                        file_name) < 0
               ? err_nomem(e)
               : 0;
}

static int warn_oddities(struct scan *s, struct err *e)
{
    int rc = 0;

    if (s->odd.unended)
        rc = sink_warning(s->sink, "truncated-archive",
                          "%s does not end as tar ends archives: what came behind may "
                          "be lost",
                          s->base);
    if (rc == 0 && s->odd.doubles > 0)
        rc = sink_warning(s->sink, "duplicate-member",
                          "%s has %zu members more than once: the last ones are shown",
                          s->base, s->odd.doubles);
    return rc < 0 ? err_nomem(e) : 0;
}

/* It stays visible. Of an archive a change is one of the archive. */
static int watch_config(struct scan *s, struct err *e)
{
    return s->base[0] || !listing_find(s->listing, config_name)
               ? 0
               : sink_watch(s->sink, config_name, e);
}

static int scan_content(struct scan *s, struct err *e)
{
    /* First watched, then read: also a config that is damaged is read anew. */
    TRY(watch_config(s, e));
    read_config(s);
    find_weights(s->listing, &s->weights);
    TRY(sink_enter(s->sink, s->base, e));
    TRY(tell_checkpoint(s, e));
    TRY(scan_weights(s, e));
    TRY(warn_oddities(s, e));
    return tell_checkpoint(s, e);
}

/* First registered, then read: also a damaged archive is read anew when it changes. */
static int scan_archive(struct scan *s, struct err *e)
{
    CLEANUP(listing_freep) struct listing *inside = NULL;
    struct store *store = s->c->store;
    uint32_t number;

    s->base = s->c->file;
    if (store_join(s->c->dir, s->base, s->dir, sizeof s->dir) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", s->base);
    TRY(tell_checkpoint(s, e));
    TRY(sink_file(s->sink, s->base, strlen(s->base), &number, e));
    TRY(sink_part(s->sink, s->base, e));
    TRY(store->ops->list(store, s->dir, &inside, e));
    TRY(archives_oddities(store, s->dir, &s->odd, e));
    s->listing = inside;
    return scan_content(s, e);
}

static int nemo_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct scan s = {.c = c, .sink = sink, .base = "", .listing = c->listing};

    if (c->file && !archive_is_named(c->file))
        return nemo_train_scan(c, sink, e);
    if (c->file)
        return scan_archive(&s, e);
    snprintf(s.dir, sizeof s.dir, "%s", c->dir);
    return scan_content(&s, e);
}

const struct format_driver format_nemo = {
    .name = "nemo",
    .title = "NeMo: .nemo archives (tar, tar.gz), unpacked ones, context/ and weights/",
    .bid = nemo_bid,
    .bid_file = nemo_bid_file,
    .sets = nemo_train_sets,
    .is_set_dir = nemo_train_is_dir,
    .scan = nemo_scan,
};
