/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr.c - zarr arrays and groups, versions 2 and 3. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "index/formats/step.h"
#include "index/formats/zarr/zarr_array.h"
#include "index/formats/zarr/zarr_listed.h"
#include "index/formats/zarr/zarr_tree.h"

enum {
    HEAD = 4096,      /* bytes of a metadata file that a bid looks at */
    CHILDREN = 64,    /* directories that a bid looks into */
    LEVELS = 16,      /* of those below each other */
    STEP_DIGITS = 18, /* what an int64_t holds */
    NODE_MAX =
        4 << 20, /* of a zarr.json; longer ones have the metadata of a whole group */
};

static const char LEVANTER[] = "metadata.json";

/* ---- bids ---- */

/* The first HEAD bytes of a file, if there is one. */
static bool peek(struct listing *l, const char *name, char *head, size_t *got)
{
    const struct listing_entry *entry = listing_find(l, name);

    *got = 0;
    return entry && entry->st.kind == ENTRY_FILE &&
           listing_peek(l, name, head, HEAD, got) == 0;
}

/*
 * Is the file there, and does it speak of a zarr_format? zarr-python 3 writes a node's
 * attributes before that: behind long ones it is not seen, and zarr.json, a name that nothing
 * else has, counts by its first byte.
 */
static bool is_marker(struct listing *l, const char *name)
{
    char head[HEAD];
    size_t got;

    if (!peek(l, name, head, &got))
        return false;
    return memmem(head, got, "\"zarr_", 6) ||
           (got == HEAD && head[0] == '{' && strcmp(name, "zarr.json") == 0);
}

/* Of an array or a group. */
static const char *marker_of(struct listing *l)
{
    static const char *const names[] = {"zarr.json", ".zarray", ".zgroup",
                                        ".zmetadata"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (is_marker(l, names[i]))
            return names[i];
    return NULL;
}

/*
 * What version 3 says of the node. A group is a checkpoint of its own, as one of version 2
 * is: steps side by side are not one checkpoint.
 */
static bool is_group(struct listing *l)
{
    const struct listing_entry *entry = listing_find(l, "zarr.json");
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE char *text = NULL;
    struct err ignored = {0};
    const char *type;
    size_t len;

    if (entry->st.id.size > NODE_MAX)
        return true;
    if (listing_read(l, "zarr.json", NODE_MAX, &text, &len, &ignored) < 0 ||
        json_parse(text, len, NULL, &doc, &ignored) < 0)
        return false; /* damaged: that is told of an array */
    return json_string(json_get(doc, "node_type"), &type) && strcmp(type, "group") == 0;
}

/* A .zarray is one whatever stands in it: a damaged array is told, not passed over. */
static bool is_array(struct listing *l)
{
    const struct listing_entry *entry = listing_find(l, ".zarray");

    return (entry && entry->st.kind == ENTRY_FILE) ||
           (is_marker(l, "zarr.json") && !is_group(l));
}

/* Orbax's tree of one leaf is an array as well, but a checkpoint beside others. */
static bool is_orbax(struct listing *l)
{
    const struct listing_entry *entry = listing_find(l, "_METADATA");

    return entry && entry->st.kind == ENTRY_FILE;
}

/* The first array among the directories; writers of checkpoints leave out group files. */
static const char *array_child(struct listing *l)
{
    unsigned looked = 0;

    for (size_t i = 0; i < listing_count(l) && looked < CHILDREN; i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct listing *sub;

        if (entry->st.kind != ENTRY_DIR || entry->name[0] == '.')
            continue;
        looked++;
        sub = listing_sub(l, entry->name);
        if (sub && is_array(sub) && !is_orbax(sub))
            return entry->name;
    }
    return NULL;
}

/*
 * Levanter's step: metadata.json = {"step", "timestamp", ...}, arrays at model/a/b/weight
 * and no group files (levanter/checkpoint.py).
 */
static bool is_levanter(struct listing *l)
{
    char head[HEAD];
    size_t got;

    return peek(l, LEVANTER, head, &got) && memmem(head, got, "\"step\"", 6) &&
           memmem(head, got, "\"timestamp\"", 11);
}

/* EasyDeL's: arrays at model/a/b/kernel and tx/..., all of which are in a list. */
static bool is_easydel(struct listing *l)
{
    char head[HEAD];
    size_t got;

    return peek(l, ZARR_LISTED, head, &got) && zarr_is_listed(head, got);
}

/* Is there an array at any depth? *looks: directories that may still be looked into. */
static bool has_array(struct listing *l, unsigned levels, unsigned *looks)
{
    for (size_t i = 0; levels > 0 && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct listing *sub;

        if (entry->st.kind != ENTRY_DIR || entry->st.is_link || entry->name[0] == '.')
            continue;
        if (*looks == 0)
            return false;
        --*looks;
        sub = listing_sub(l, entry->name);
        if (sub && (is_array(sub) || has_array(sub, levels - 1, looks)))
            return true;
    }
    return false;
}

static void zarr_bid(struct listing *l, struct bid *out)
{
    const char *marker = marker_of(l), *child;
    unsigned looks = CHILDREN;

    *out = (struct bid){0};
    if (marker || is_array(l)) {
        out->score = 75;
        snprintf(out->reason, sizeof out->reason, "%s of a zarr array or group",
                 marker ? marker : ".zarray");
        return;
    }
    if (is_levanter(l) && has_array(l, LEVELS, &looks)) {
        out->score = 72;
        snprintf(out->reason, sizeof out->reason, "%s of Levanter, and arrays below",
                 LEVANTER);
        return;
    }
    if (is_easydel(l) && has_array(l, LEVELS, &looks)) {
        out->score = 72;
        snprintf(out->reason, sizeof out->reason, "%s of EasyDeL, and arrays below",
                 ZARR_LISTED);
        return;
    }
    child = array_child(l);
    if (child) {
        out->score = 60;
        snprintf(out->reason, sizeof out->reason, "a directory %.80s is a zarr array",
                 child);
    }
}

/* ---- the checkpoint ---- */

static const char *format_of(const struct zarr_found *f)
{
    bool group = f->groups > 0;

    if (f->arrays[2] > 0 && f->arrays[3] > 0)
        return group ? "zarr-group" : "zarr";
    if (f->arrays[3] > 0)
        return group ? "zarr3-group" : "zarr3";
    return group ? "zarr2-group" : "zarr2";
}

/* EasyDeL calls its steps run-500. */
static bool step_of_easydel(struct listing *l, int64_t *step)
{
    static const char run[] = "run-";
    const char *name = listing_name(l), *number = name + sizeof run - 1;
    size_t digits;

    if (strncmp(name, run, sizeof run - 1) != 0 || !is_easydel(l))
        return false;
    digits = strspn(number, "0123456789");
    if (digits == 0 || digits > STEP_DIGITS || number[digits])
        return false;
    *step = strtoll(number, NULL, 10);
    return true;
}

static int tell_checkpoint(const struct scan_context *c, const struct zarr_found *f,
                           struct sink *sink, struct err *e)
{
    char topology[120];
    struct sink_checkpoint about = {
        .format = format_of(f),
        .framework = "zarr",
        .topology = topology,
        .has_step = f->has_step,
        .step = f->step,
        .metadata_file = f->metadata[0] ? f->metadata : NULL,
    };

    if (!about.has_step)
        about.has_step = step_of_name(listing_name(c->listing), &about.step) ||
                         step_of_easydel(c->listing, &about.step);
    snprintf(topology, sizeof topology,
             "{\"arrays\": %" PRIu64 ", \"groups\": %" PRIu64 "}",
             f->arrays[2] + f->arrays[3], f->groups);
    return sink_checkpoint(sink, &about, e);
}

/* Also a scan that fails has a format. */
static int zarr_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct zarr_found found;
    struct err failed = {0};
    int rc = zarr_tree_report(c, sink, &found, &failed);

    TRY(tell_checkpoint(c, &found, sink, e));
    if (rc < 0)
        *e = failed;
    return rc;
}

static const struct chunk_codec *const zarr_codecs[] = {
    &codec_zarr,
    &codec_zarr_literal,
    NULL,
};

const struct format_driver format_zarr = {
    .name = "zarr",
    .title = "zarr arrays and groups (versions 2 and 3)",
    .bid = zarr_bid,
    .scan = zarr_scan,
    .codecs = zarr_codecs,
};
