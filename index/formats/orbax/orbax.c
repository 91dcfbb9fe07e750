/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax.c - Orbax checkpoints: a tree, or a step with several items. */
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "index/formats/json_object.h"
#include "index/formats/orbax/orbax_item.h"
#include "index/formats/orbax/orbax_tree.h"
#include "index/formats/step.h"
#include "index/formats/zarr/zarr_array.h"

enum {
    MAX_ITEMS = 256,
    ITEM_LEVELS = 2, /* rng/jax_random_key: one item inside another */
    MAX_ITEM_JSON = 64 << 20,
    MAX_MARKER = 16 << 20,
};

static const char MARKER[] = "_CHECKPOINT_METADATA";
static const char API_MARK[] = "orbax.checkpoint"; /* of the API called v1 */
static const char METADATA[] = "_METADATA";
static const char AGGREGATE[] = "checkpoint"; /* of old versions */

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

/* ---- a step's items ---- */

struct found_item {
    char *dir; /* relative to the checkpoint's directory; owned */
    enum orbax_dir kind;
    const char *file; /* of ORBAX_JSON; the listing's */
    struct listing *l;
};

struct items {
    struct found_item item[MAX_ITEMS];
    size_t count, trees; /* trees: with arrays */
    bool unfinished, too_many;
    bool marked; /* by _CHECKPOINT_METADATA */
};

static void items_release(struct items *x)
{
    for (size_t i = 0; i < x->count; i++)
        free(x->item[i].dir);
    x->count = 0;
}

static void add_item(struct items *x, const struct found_item *found)
{
    if (x->count == MAX_ITEMS) {
        x->too_many = true;
        return;
    }
    x->item[x->count] = *found;
    x->item[x->count].dir = strdup(found->dir);
    if (!x->item[x->count].dir) {
        x->too_many = true;
        return;
    }
    x->count++;
    x->trees += found->kind == ORBAX_TREE || found->kind == ORBAX_STORE;
}

/*
 * What ArrayCheckpointHandler saved until 0.11: ITEM/checkpoint/.zarray and no _METADATA.
 * The array may be called otherwise; then only a step that has the mark is believed.
 */
static bool has_array(struct listing *l, bool marked)
{
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct listing *sub;

        if (entry->st.kind == ENTRY_DIR && !entry->st.is_link &&
            (marked || strcmp(entry->name, AGGREGATE) == 0) &&
            (sub = listing_sub(l, entry->name)) && has_file(sub, ".zarray"))
            return true;
    }
    return false;
}

/* Adds the items among the subdirectories of `l`, which is `above`. */
static void look_into(struct listing *l, const char *above, unsigned levels,
                      struct items *x)
{
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct found_item found = {.dir = (char[PATH_MAX]){""}};
        struct listing *sub;

        if (entry->st.kind != ENTRY_DIR || entry->st.is_link ||
            !(sub = listing_sub(l, entry->name)) ||
            store_join(above, entry->name, found.dir, PATH_MAX) < 0)
            continue;
        found.l = sub;
        found.kind = step_is_temporary(sub) ? ORBAX_UNFINISHED
                                            : orbax_dir_kind(sub, &found.file);
        x->unfinished |= found.kind == ORBAX_UNFINISHED;
        if (found.kind == ORBAX_NONE && has_array(sub, x->marked))
            found.kind = ORBAX_TREE;
        if (found.kind != ORBAX_NONE)
            add_item(x, &found);
        else if (levels > 1)
            look_into(sub, found.dir, levels - 1, x);
    }
}

/* ---- bids ---- */

static void PRINTF(3, 4) say(struct bid *out, int score, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    out->score = score;
    vsnprintf(out->reason, sizeof out->reason, fmt, ap);
    va_end(ap);
}

/* The step's number, or -1: "30", "step_30"; of a manager's step also "run_30". */
static int64_t step_of(const char *name, bool any_prefix)
{
    size_t len = strlen(name), digits = 0;
    int64_t step;

    while (digits < len && isdigit((unsigned char)name[len - 1 - digits]))
        digits++;
    if (digits > 0 && digits <= 18 &&
        (digits == len || (any_prefix && name[len - digits - 1] == '_')))
        return strtoll(name + len - digits, NULL, 10);
    return step_of_name(name, &step) ? step : -1;
}

/* Names that trainers give to a step's items. */
static const char *const item_names[] = {"default", "state",  "params",
                                         "model",   "pytree", "train_state"};

/* Before 0.6 a manager's step has no mark, but an item of such a name. */
static bool has_known_item(struct listing *l)
{
    const char *file;

    for (size_t i = 0; i < ARRAY_SIZE(item_names); i++) {
        struct listing *sub = listing_sub(l, item_names[i]);

        if (sub && orbax_dir_kind(sub, &file) == ORBAX_TREE)
            return true;
    }
    return false;
}

/*
 * A step of several items has the mark; that of old versions is known by its name, and by
 * items that are no steps themselves.
 */
static void bid_step(struct listing *l, struct bid *out)
{
    bool marked = has_file(l, MARKER);
    struct items *x;

    if (!marked && step_of(listing_name(l), false) < 0 &&
        (step_of(listing_name(l), true) < 0 || !has_known_item(l)))
        return;
    x = calloc(1, sizeof *x);
    if (!x)
        return;
    x->marked = marked;
    look_into(l, "", ITEM_LEVELS, x);
    if (x->trees > 0 && !x->unfinished)
        say(out, marked ? 95 : 80, "%s%zu items of a step of Orbax",
            marked ? "_CHECKPOINT_METADATA and " : "", x->count);
    items_release(x);
    free(x);
}

static void orbax_bid(struct listing *l, struct bid *out)
{
    const char *file;

    *out = (struct bid){0};
    if (step_is_temporary(l))
        return;
    switch (orbax_dir_kind(l, &file)) {
    case ORBAX_TREE:
        say(out, has_file(l, METADATA) ? 88 : 75, "%s of a tree that Orbax has saved",
            has_file(l, METADATA) ? METADATA : AGGREGATE);
        break;
    case ORBAX_STORE:
        say(out, 72, "manifest.ocdbt: a store of tensorstore");
        break;
    case ORBAX_NONE:
    case ORBAX_JSON:
        bid_step(l, out);
        break;
    case ORBAX_UNFINISHED:
        break;
    }
}

/* ---- the checkpoint ---- */

struct about {
    const char *format;
    struct orbax_told told;
    struct items items;   /* of a step */
    const char *metadata; /* relative to the checkpoint's directory */
};

static int topology_of(const struct about *a, struct buf *out, struct err *e)
{
    buf_addf(out, "{\"zarr\": %d, \"ocdbt\": %s", a->told.zarr3 ? 3 : 2,
             a->told.ocdbt ? "true" : "false");
    if (a->told.processes > 0)
        buf_addf(out, ", \"processes\": %" PRIu64, a->told.processes);
    if (a->told.mesh[0])
        buf_addf(out, ", \"mesh\": %s", a->told.mesh);
    for (size_t i = 0; i < a->items.count; i++) {
        buf_adds(out, i == 0 ? ", \"items\": [" : ", ");
        buf_add_json(out, a->items.item[i].dir, strlen(a->items.item[i].dir));
        if (i + 1 == a->items.count)
            buf_addc(out, ']');
    }
    buf_addc(out, '}');
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int tell_checkpoint(const struct scan_context *c, struct sink *sink,
                           const struct about *a, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    char path[PATH_MAX];
    struct sink_checkpoint about = {
        .format = a->format,
        .framework = strcmp(a->format, "ocdbt") == 0 ? "TensorStore" : "Orbax",
        .metadata_file = path,
        .step = step_of(listing_name(c->listing), a->items.count > 0),
    };

    about.has_step = about.step >= 0;
    if (store_join(c->dir, a->metadata, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", c->dir);
    TRY(topology_of(a, &topology, e));
    about.topology = topology.data;
    return sink_checkpoint(sink, &about, e);
}

/*
 * The local steps of emergency and multi-tier managers: a process has its own shards in a
 * directory of its own, and what it lacks is no save that was cut off.
 */
static int tell_local(const struct scan_context *c, struct sink *sink, struct err *e)
{
    static const char name[] = "process_metadata";
    const struct listing_entry *entry = listing_find(c->listing, name);

    if (!entry || entry->st.kind != ENTRY_DIR)
        return 0;
    return sink_warning(sink, "local-copy",
                        "%s: a local step, with the shards of one process; the "
                        "persistent step of the run has all",
                        name) < 0
               ? err_nomem(e)
               : 0;
}

/* Custom metadata and metrics of the step, when there are any. */
static int report_marker(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct orbax_member m[2] = {{.name = "custom_metadata"}, {.name = "metrics"}};
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len;

    if (!has_file(c->listing, MARKER))
        return 0;
    TRY(sink_hide(sink, MARKER, true, e));
    TRY(tell_local(c, sink, e));
    if (orbax_read_json(c->listing, MARKER, MAX_MARKER, &text, &len, &why) < 0) {
        return err_copy(e, &why);
    }
    if (!orbax_members(text, len, m, ARRAY_SIZE(m)) &&
        sink_warning(sink, "damaged-file", "%s is no JSON", MARKER) < 0)
        return err_nomem(e);
    for (size_t i = 0; i < ARRAY_SIZE(m); i++)
        TRY(orbax_member_object(sink, m[i].name, strlen(m[i].name), &m[i], e));
    return 0;
}

/* ---- steps ---- */

/* The item whose keys are shown as they are; the others' are told apart by its name. */
static const struct found_item *main_item(const struct items *x)
{
    static const char checkpointables[] = "checkpointables";
    const struct found_item *only = NULL;

    for (size_t k = 0; k <= ARRAY_SIZE(item_names); k++) {
        const char *name = k < ARRAY_SIZE(item_names) ? item_names[k] : checkpointables;

        for (size_t i = 0; i < x->count; i++)
            if (x->item[i].kind != ORBAX_JSON && strcmp(x->item[i].dir, name) == 0)
                return &x->item[i];
    }
    for (size_t i = 0; i < x->count; i++) {
        if (x->item[i].kind == ORBAX_JSON)
            continue;
        if (only)
            return NULL;
        only = &x->item[i];
    }
    return only;
}

static int report_json(struct sink *sink, const struct found_item *item, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE char *text = NULL;
    size_t len = strlen(item->dir), text_len;
    char path[PATH_MAX];
    struct err why = {0};

    if (store_join(item->dir, item->file, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", item->dir);
    TRY(sink_hide(sink, item->dir, false, e));
    TRY(sink_watch(sink, path, e));
    if (orbax_read_json(item->l, item->file, MAX_ITEM_JSON, &text, &text_len, &why) ==
            0 &&
        json_parse(text, text_len, NULL, &doc, &why) == 0)
        return sink_object(sink, item->dir, len, text, text_len, e);
    if (why.code != ENOMEM && why.code != ESTALE)
        return object_unreadable(sink, item->dir, len, &why, e);
    return err_copy(e, &why);
}

/* An item inside another, which is nothing by itself, hides that too. */
static int hide_above(struct sink *sink, const char *dir, struct err *e)
{
    char top[NAME_MAX + 1];
    size_t len = strcspn(dir, "/");

    if (dir[len] == '\0')
        return 0;
    snprintf(top, sizeof top, "%.*s", (int)len, dir);
    return sink_hide(sink, top, false, e);
}

static int scan_items(const struct scan_context *c, struct sink *sink, struct about *a,
                      struct err *e)
{
    const struct found_item *first;

    a->items.marked = has_file(c->listing, MARKER);
    look_into(c->listing, "", ITEM_LEVELS, &a->items);
    if (a->items.too_many)
        return err_set(e, EFBIG, "more than %d items", MAX_ITEMS);
    if (a->items.unfinished || a->items.trees == 0)
        return err_set(e, ESTALE, "no finished step any more");
    first = main_item(&a->items);
    for (size_t i = 0; i < a->items.count; i++) {
        const struct found_item *item = &a->items.item[i];
        const struct orbax_item how = {.dir = item->dir,
                                       .part = item == first ? NULL : item->dir};

        TRY(hide_above(sink, item->dir, e));
        TRY(item->kind == ORBAX_JSON ? report_json(sink, item, e)
                                     : orbax_item_report(c, sink, &how, &a->told, e));
    }
    return 0;
}

static int scan_tree(const struct scan_context *c, struct sink *sink, struct about *a,
                     struct err *e)
{
    const struct orbax_item how = {.dir = ""};

    TRY(orbax_item_report(c, sink, &how, &a->told, e));
    if (strcmp(a->format, "ocdbt") != 0)
        a->format = a->told.ocdbt ? "orbax-ocdbt" : "orbax-zarr";
    return 0;
}

static int scan_all(const struct scan_context *c, struct sink *sink, struct about *a,
                    struct err *e)
{
    const char *file;

    switch (orbax_dir_kind(c->listing, &file)) {
    case ORBAX_TREE:
        a->format = "orbax-zarr";
        a->metadata = has_file(c->listing, METADATA) ? METADATA : AGGREGATE;
        break;
    case ORBAX_STORE:
        a->format = "ocdbt";
        a->metadata = "manifest.ocdbt";
        break;
    case ORBAX_NONE:
    case ORBAX_JSON:
    case ORBAX_UNFINISHED:
        if (has_file(c->listing, API_MARK))
            a->format = "orbax";
        TRY(sink_hide(sink, "commit_success.txt", false, e));
        TRY(sink_hide(sink, API_MARK, false, e));
        TRY(report_marker(c, sink, e));
        return scan_items(c, sink, a, e);
    }
    TRY(report_marker(c, sink, e));
    return scan_tree(c, sink, a, e);
}

static int orbax_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    CLEANUP_FREE struct about *a = calloc(1, sizeof *a);
    struct err failed = {0};
    int rc;

    if (!a)
        return err_nomem(e);
    a->format = "orbax-manager";
    a->metadata = MARKER;
    rc = scan_all(c, sink, a, &failed);
    /* Also a scan that fails has a format. */
    if (tell_checkpoint(c, sink, a, e) < 0)
        rc = -e->code;
    else if (rc < 0)
        *e = failed;
    items_release(&a->items);
    return rc;
}

static const struct chunk_codec *const orbax_codecs[] = {&codec_zarr,
                                                         &codec_zarr_literal, NULL};

const struct format_driver format_orbax = {
    .name = "orbax",
    .title = "Orbax (JAX, Flax) with and without OCDBT; stores of TensorStore's OCDBT",
    .bid = orbax_bid,
    .scan = orbax_scan,
    .codecs = orbax_codecs,
};
