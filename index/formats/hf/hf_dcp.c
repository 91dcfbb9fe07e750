/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_dcp.c - DCP through torch's HuggingFaceStorageWriter: sharded safetensors. */
#include "index/formats/hf/hf_dcp.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "index/formats/hf/hf_dcp_priv.h"
#include "index/formats/hf/safetensors_layout.h"
#include "index/formats/step.h"

enum {
    HEAD_BYTES = 16,
    MAGIC_TRIES = 4,      /* shards: the first ones may be damaged */
    MAX_MEMORY = 1 << 30, /* names of files and offsets of pieces */
};

const char hf_metadata_dir[] = ".hf_metadata"; /* NeMo's */

/* ---- bids ---- */

static bool has_magic(struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);
    unsigned char head[HEAD_BYTES];
    size_t got;

    return listing_peek(l, name, head, sizeof head, &got) == 0 &&
           safetensors_magic(head, got, entry->st.id.size);
}

static bool find_in(struct listing *l, const char *dir, struct hf_dcp_found *out)
{
    *out = (struct hf_dcp_found){.dir = dir, .list = l};
    for (size_t i = 0; l && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind != ENTRY_FILE || !safetensors_is_piece(entry->name))
            continue;
        if (!out->magic && out->shards < MAGIC_TRIES)
            out->magic = has_magic(l, entry->name);
        out->first = out->first ? out->first : entry->name;
        out->shards++;
    }
    return out->first;
}

bool hf_dcp_find(struct listing *l, struct hf_dcp_found *out)
{
    return find_in(l, "", out) || (listing_find(l, "sharded") &&
                                   find_in(listing_sub(l, "sharded"), "sharded", out));
}

static void hf_dcp_bid(struct listing *l, struct bid *out)
{
    struct hf_dcp_found found;

    *out = (struct bid){0};
    if (!hf_dcp_find(l, &found))
        return;
    out->score = found.magic ? 85 : 30;
    snprintf(out->reason, sizeof out->reason, "%s%s%.60s and %u more shards%s",
             found.dir, found.dir[0] ? "/" : "", found.first, found.shards - 1,
             found.magic ? "" : ", but it has no safetensors header");
}

/* ---- what belongs to the directory ---- */

/* "DIR/NAME" in the arena. */
static const char *join(struct hf_scan *s, const char *dir, const char *name,
                        struct err *e)
{
    char path[PATH_MAX];
    char *kept;

    if (store_join(dir, name, path, sizeof path) < 0) {
        err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir, name);
        return NULL;
    }
    kept = arena_memdup(s->arena, path, strlen(path));
    if (!kept)
        err_nomem(e);
    return kept;
}

static bool is_full_file(const struct listing *l, const char *name)
{
    static const char index[] = ".safetensors.index.json";
    size_t len = strlen(name), end = strlen(index);

    if (len > end && strcmp(name + len - end, index) == 0)
        return true;
    return safetensors_is_named(l, name) && !safetensors_is_piece(name) &&
           strcmp(name, "adapter_model.safetensors") != 0;
}

static bool has_full_files(const struct listing *l)
{
    for (size_t i = 0; l && i < listing_count(l); i++)
        if (is_full_file(l, listing_at(l, i)->name))
            return true;
    return false;
}

/*
 * A directory of ours: its side files come to the top. Nothing in the checkpoint's own
 * directory changes when a file comes into it, so it is watched.
 */
static int add_part(struct hf_scan *s, const char *name, const char **out,
                    struct err *e)
{
    *out = join(s, s->how->dir ? s->how->dir : "", name, e);
    if (!*out || sink_part(s->sink, *out, e) < 0)
        return -e->code;
    return sink_watch(s->sink, *out, e);
}

static int find_dirs(struct hf_scan *s, struct err *e)
{
    const char *dir = s->how->dir ? s->how->dir : "", *path;
    struct listing *below = listing_sub(s->top, "consolidated");
    struct hf_dcp_found found;

    if (!hf_dcp_find(s->top, &found))
        return err_set(e, ESTALE, "no shards of HuggingFaceStorageWriter any more");
    s->pieces = found.list;
    s->pieces_dir = dir;
    if (found.dir[0])
        TRY(add_part(s, found.dir, &s->pieces_dir, e));
    if (has_full_files(s->top)) {
        s->full = s->top;
        s->full_dir = dir;
    }
    if (below)
        TRY(add_part(s, "consolidated", &path, e));
    if (has_full_files(below)) {
        s->full = below;
        s->full_dir = path;
    }
    if (listing_sub(s->top, hf_metadata_dir))
        TRY(add_part(s, hf_metadata_dir, &path, e));
    return dir[0] ? sink_watch(s->sink, dir, e) : 0;
}

/* The first of these that has one: NeMo's folder, beside full files, beside the shards. */
static int read_config(struct hf_scan *s, struct err *e)
{
    const char *dir = s->how->dir ? s->how->dir : "";
    struct listing *metadata = listing_sub(s->top, hf_metadata_dir);

    if (metadata && listing_find(metadata, "config.json")) {
        dir = join(s, dir, hf_metadata_dir, e);
        return dir ? hf_config_read(metadata, dir, s->sink, &s->config, e) : -e->code;
    }
    if (s->full && listing_find(s->full, "config.json"))
        return hf_config_read(s->full, s->full_dir, s->sink, &s->config, e);
    return hf_config_read(s->top, dir, s->sink, &s->config, e);
}

/* ---- NeMo's lists of names ---- */

static int hide_mappings(struct hf_scan *s, struct err *e)
{
    static const char *const names[] = {"fqn_to_file_index_mapping.json",
                                        "fqn_to_dtype_mapping.json"};
    struct listing *l = listing_sub(s->top, hf_metadata_dir);
    const char *dir = join(s, s->how->dir ? s->how->dir : "", hf_metadata_dir, e);

    if (!dir)
        return -e->code;
    for (size_t i = 0; l && i < ARRAY_SIZE(names); i++) {
        const char *path = listing_find(l, names[i]) ? join(s, dir, names[i], e) : NULL;

        if (e->code || (path && sink_hide(s->sink, path, true, e) < 0))
            return -e->code;
    }
    return 0;
}

/* ---- oddities of the set of files ---- */

static int warn(int r, struct err *e)
{
    return r < 0 ? err_nomem(e) : 0;
}

/* The first model file of which a rank has no shard, or of which there is none at all. */
struct gap {
    uint32_t k, rank; /* rank 0: no rank has one */
};

/* Shards are in order of their model files. */
static struct gap find_gap(const struct hf_scan *s)
{
    uint32_t next = 1;

    for (size_t i = 0; i < s->file.count && s->shard[i].k <= next; i++) {
        if (s->shard[i].without)
            return (struct gap){s->shard[i].k, s->shard[i].without};
        next = MAX(next, s->shard[i].k + 1);
    }
    return next <= s->max_n ? (struct gap){next, 0} : (struct gap){0};
}

static int warn_of_gaps(struct hf_scan *s, struct err *e)
{
    struct gap gap = find_gap(s);
    bool mixed = false;

    for (size_t i = 0; i < s->file.count; i++)
        mixed |= s->shard[i].n != s->max_n;
    if (mixed)
        TRY(warn(sink_warning(s->sink, "mixed-sets",
                              "shards of several saves lie together: their names "
                              "count different numbers of model files"),
                 e));
    if (gap.k > 0 && gap.rank == 0)
        return warn(sink_warning(s->sink, "missing-file",
                                 "no shard of model file %u of %u is there", gap.k,
                                 s->max_n),
                    e);
    if (gap.k > 0)
        return warn(sink_warning(s->sink, "rank-gap",
                                 "ranks go up to %u, and rank %u has no shard of model "
                                 "file %u: it is lost, or that rank had none of it",
                                 s->max_rank, gap.rank, gap.k),
                    e);
    return 0;
}

static int warn_of_proof(struct hf_scan *s, struct err *e)
{
    if (s->proof.lost)
        return warn(sink_warning(s->sink, "lost-files", "%s", s->proof.why), e);
    if (hf_all_sure(s))
        return 0;
    return warn(sink_warning(s->sink, "unproven-size",
                             "shards do not tell the full shapes, and nothing here "
                             "proves that there were no ranks above %u: if their files "
                             "are lost, tensors look smaller than they were",
                             s->max_rank),
                e);
}

/* ---- the scan ---- */

static void tell(const struct hf_scan *s, struct hf_dcp_told *told)
{
    told->format = s->full ? "hf-dcp-sharded+consolidated" : "hf-dcp-sharded";
    told->ranks = s->max_rank;
    told->files = s->max_n;
    told->shards = s->file.count;
}

static int tell_metadata(const struct hf_scan *s, struct hf_dcp_told *told,
                         struct err *e)
{
    struct hf_dcp_found found;
    char below[PATH_MAX];

    if (!hf_dcp_find(s->top, &found))
        return err_set(e, ESTALE, "no shards of HuggingFaceStorageWriter any more");
    if (store_join(s->pieces_dir, found.first, below, sizeof below) < 0 ||
        store_join(s->c->dir, below, told->metadata, sizeof told->metadata) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", found.first);
    return 0;
}

static int scan(struct hf_scan *s, struct hf_dcp_told *told, struct err *e)
{
    s->top = listing_below(s->c->listing, s->how->dir ? s->how->dir : "");
    s->arena = arena_new(MAX_MEMORY);
    if (!s->arena)
        return err_nomem(e);
    if (!s->top)
        return err_set(e, ENOENT, "there is no directory %s", s->how->dir);
    TRY(find_dirs(s, e));
    TRY(tell_metadata(s, told, e));
    tell(s, told);
    TRY(hide_mappings(s, e));
    TRY(read_config(s, e));
    TRY(hf_read_shards(s, e));
    tell(s, told);
    TRY(hf_read_copies(s, e));
    TRY(hf_join_pieces(s, e));
    TRY(hf_weigh(s, e));
    TRY(hf_check_names(s, e));
    TRY(hf_report_tensors(s, e));
    TRY(warn_of_gaps(s, e));
    return warn_of_proof(s, e);
}

static void scan_release(struct hf_scan *s)
{
    safetensors_files_release(&s->file);
    safetensors_files_release(&s->copy);
    hf_index_release(&s->index);
    free(s->shard);
    free(s->piece);
    free(s->tensor);
    free(s->full_tensor);
    arena_free(s->arena);
}

int hf_dcp_report(const struct scan_context *c, struct sink *sink,
                  const struct hf_dcp_how *how, struct hf_dcp_told *told, struct err *e)
{
    struct hf_scan s = {.c = c, .sink = sink, .how = how, .full_dir = ""};
    int r;

    *told = (struct hf_dcp_told){.format = "hf-dcp-sharded"};
    r = scan(&s, told, e);
    scan_release(&s);
    return r;
}

/* ---- the driver ---- */

static int hf_dcp_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    static const struct hf_dcp_how how = {.role = -1};
    struct hf_dcp_told told;
    struct err failed = {0};
    char topology[128];
    struct sink_checkpoint about = {.framework = "PyTorch", .topology = topology};
    int r = hf_dcp_report(c, sink, &how, &told, &failed);

    about.format = told.format;
    about.metadata_file = told.metadata[0] ? told.metadata : NULL;
    about.has_step = step_of_name(listing_name(c->listing), &about.step);
    snprintf(topology, sizeof topology,
             "{\"ranks\": %" PRIu64 ", \"model_files\": %" PRIu64
             ", \"files\": %" PRIu64 "}",
             told.ranks, told.files, told.shards);
    TRY(sink_checkpoint(sink, &about, e));
    if (r < 0)
        *e = failed;
    return r;
}

static const struct format_writer *const hf_dcp_writers[] = {&writer_dcp_hf, NULL};

const struct format_driver format_hf_dcp = {
    .name = "hf_dcp",
    .title = "PyTorch DCP with the Hugging Face writer: sharded safetensors",
    .bid = hf_dcp_bid,
    .scan = hf_dcp_scan,
    .writers = hf_dcp_writers,
};
