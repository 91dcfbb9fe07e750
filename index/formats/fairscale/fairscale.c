/* SPDX-License-Identifier: MIT */
/* index/formats/fairscale/fairscale.c - fairscale's flat shards, as metaseq and fairseq save them. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "index/formats/fairscale/fairscale_priv.h"
#include "index/formats/format.h"
#include "index/formats/ranks/rank_copies.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_walk.h"

enum {
    MAX_MEMORY = 1 << 30, /* names and shapes of all shards */
    MAX_JSON = 64 << 20,
    MAX_PARTS = 1024,
    MAX_SHARDS = 65536,
};

static const char OPTIMIZER[] = "last_optimizer_state";

/* ---- bids ---- */

/* The first shard of the first part: it stands for all of them. */
static bool is_first(const struct shard_name *n)
{
    return n->shard == 0 && n->part == 0;
}

static bool is_zip(struct listing *l, const char *name)
{
    unsigned char head[TORCH_HEAD];
    size_t got = 0;

    return listing_peek(l, name, head, sizeof head, &got) == 0 &&
           torch_sniff(head, got) != TORCH_NOT;
}

/* How many checkpoints of shards are there, and the first shard of the first one. */
static unsigned count_stems(struct listing *l, const char **main)
{
    struct shard_name last = {0}, n;
    const char *last_name = NULL;
    unsigned stems = 0;

    *main = NULL;
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind != ENTRY_FILE || !shard_name(entry->name, &n))
            continue;
        if (!*main)
            *main = entry->name;
        if (!last_name || !shard_same_stem(entry->name, &n, last_name, &last))
            stems++;
        last_name = entry->name;
        last = n;
    }
    return stems;
}

static void fairscale_bid(struct listing *l, struct bid *out)
{
    const char *main;

    *out = (struct bid){0};
    /* A folder with the saves of a whole run: each is a checkpoint, by its first file. */
    if (count_stems(l, &main) != 1 || !is_zip(l, main))
        return;
    out->score = 85;
    snprintf(out->reason, sizeof out->reason, "%.80s, a shard of fairscale", main);
}

static void fairscale_bid_file(struct listing *l, const char *name, struct bid *out)
{
    struct shard_name n;

    *out = (struct bid){0};
    if (!shard_name(name, &n) || !is_zip(l, name))
        return;
    out->score = 85;
    out->piece = !is_first(&n);
    snprintf(out->reason, sizeof out->reason, "%s of fairscale's shards",
             out->piece ? "one" : "the first");
}

/* ---- files ---- */

static void part_release(struct model_part *p)
{
    if (p->file)
        rank_files_free(p->file, p->shards);
    for (uint32_t s = 0; p->shard && s < p->shards; s++) {
        rank_tensors_release(&p->shard[s].optim);
        free(p->shard[s].padding);
    }
    free(p->shard);
    free(p->piece);
}

static void fairscale_release(struct fairscale *f)
{
    for (uint32_t i = 0; i < f->parts; i++)
        part_release(&f->part[i]);
    free(f->part);
    arena_free(f->arena);
}

/* The file that the scan is of, or any one of the only checkpoint. */
static int find_main(struct fairscale *f, struct err *e)
{
    f->main = f->c->file;
    if (!f->main)
        count_stems(f->c->listing, &f->main);
    return f->main && shard_name(f->main, &f->name)
               ? 0
               : err_set(e, ESTALE, "no shards any more");
}

static bool is_ours(const struct fairscale *f, const struct listing_entry *entry,
                    struct shard_name *n)
{
    return entry->st.kind == ENTRY_FILE && shard_name(entry->name, n) &&
           shard_same_stem(entry->name, n, f->main, &f->name);
}

static int make_part(struct fairscale *f, struct model_part *p, uint32_t shards,
                     struct err *e)
{
    p->file = rank_files_new(shards);
    p->shards = shards;
    p->shard = calloc(shards, sizeof *p->shard);
    p->piece = calloc(shards, sizeof *p->piece);
    if (!p->file || !p->shard || !p->piece)
        return err_nomem(e);
    for (uint32_t s = 0; s < shards; s++) {
        char path[NAME_MAX + 64];
        int n = snprintf(path, sizeof path, "%.*s", (int)f->name.stem, f->main);

        if (f->name.has_part)
            n += snprintf(path + n, sizeof path - (size_t)n, "-model_part-%" PRIu32,
                          p->number);
        n += snprintf(path + n, sizeof path - (size_t)n, "-shard%" PRIu32 ".pt", s);
        p->file[s].file.path = arena_memdup(f->arena, path, (size_t)n);
        if (!p->file[s].file.path)
            return err_nomem(e);
    }
    return 0;
}

/* As many shards in each part as in any: one that is missing is told. */
static int find_files(struct fairscale *f, struct err *e)
{
    const struct listing *l = f->c->listing;
    uint32_t parts = 0, shards = 0, files = 0;
    struct shard_name n;

    for (size_t i = 0; i < listing_count(l); i++) {
        if (!is_ours(f, listing_at(l, i), &n))
            continue;
        parts = MAX(parts, n.part + 1);
        shards = MAX(shards, n.shard + 1);
        files++;
    }
    if (parts > MAX_PARTS || shards > MAX_SHARDS || files == 0 ||
        (uint64_t)parts * shards / 16 > files)
        return err_set(e, EBADMSG,
                       "%" PRIu32 " files of %" PRIu32 " parts of %" PRIu32 " shards",
                       files, parts, shards);
    f->part = calloc(parts, sizeof *f->part);
    if (!f->part)
        return err_nomem(e);
    for (f->parts = 0; f->parts < parts; f->parts++) {
        f->part[f->parts].number = f->parts;
        if (make_part(f, &f->part[f->parts], shards, e) < 0) {
            f->parts++; /* to be released */
            return -e->code;
        }
    }
    return 0;
}

/* ---- loading ---- */

struct loading {
    struct fairscale *f;
    struct model_part *part;
};

static int keep_padding(struct model_part *part, uint32_t s,
                        const struct fairscale_metadata *m,
                        const struct rank_file *file, struct err *e)
{
    uint64_t *padding = calloc(m->params + 1, sizeof *padding);

    if (!padding)
        return err_nomem(e);
    part->shard[s].padding = padding;
    for (size_t p = 0; p < m->params; p++)
        padding[p] = m->param[p].padding;
    if (part->first) {
        bool same = m->params == part->meta.params;

        for (size_t p = 0; same && p < m->params; p++)
            same = m->param[p].layout == part->meta.param[p].layout;
        if (!same)
            return err_set(e, EBADMSG, "its shard_metadata is not that of %.200s",
                           part->first->file.path);
        return 0;
    }
    part->meta = *m;
    part->first = file;
    return 0;
}

/* Of all but the first shard only the paddings stay. */
static int read_metadata(struct loading *l, uint32_t s, const struct rank_file *file,
                         const struct pv *items, struct err *e)
{
    CLEANUP(arena_freep) struct arena *own = NULL;
    struct arena *a = l->f->arena;
    struct fairscale_metadata m;
    struct pv v;

    if (!pv_dict_get(items, "shard_metadata", &v)) {
        err_set(e, ENOTSUP, "it has no shard_metadata, which alone tells the shapes");
        return err_hint(e, "shards of fairscale 0.4.6 and later are supported");
    }
    if (l->part->first) {
        own = arena_new(MAX_MEMORY);
        if (!own)
            return err_nomem(e);
        a = own;
    }
    TRY(fairscale_metadata_read(&v, a, &m, e));
    return keep_padding(l->part, s, &m, file, e);
}

static const char *no_key(void *user UNUSED, const char *path UNUSED,
                          size_t path_len UNUSED, const struct torch_tensor *x UNUSED)
{
    return NULL;
}

/* param_groups and the like; its tensors are shown by their names. */
static int report_state(struct loading *l, const struct rank_file *file,
                        const struct pv *state, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {.max = MAX_JSON}, key = {0};
    struct err why = {0};

    buf_addf(&key, "%s:%s", file->file.path, OPTIMIZER);
    if (buf_failed(&key))
        return err_nomem(e);
    if (object_to_json(file->file.zip, state, 0, no_key, NULL, &json, &why) == 0)
        return sink_object(l->f->sink, key.data, key.len, json.data, json.len, e);
    return why.code == ENOMEM ||
                   sink_warning(l->f->sink, "object", "%s: %s", key.data, why.text) < 0
               ? err_nomem(e)
               : 0;
}

static int report_objects(struct loading *l, const struct rank_file *file,
                          const struct pv *items, struct err *e)
{
    static const char *const skip[] = {"model", "shard_metadata", OPTIMIZER, NULL};
    CLEANUP(buf_release) struct buf object = {0};
    struct torch_report how = {.role = ROLE_OTHER, .entries = true, .skip = skip};
    struct pv state;

    buf_addf(&object, "%s:", file->file.path);
    if (buf_failed(&object))
        return err_nomem(e);
    how.object = object.data;
    TRY(torch_file_report_loaded(l->f->sink, &file->file, &how, e));
    return pv_dict_get(items, OPTIMIZER, &state) ? report_state(l, file, &state, e) : 0;
}

/* optimizer_history[-1]["num_updates"]: fairseq's and metaseq's step. */
static void learn_step(struct fairscale *f, const struct pv *items)
{
    struct pv history, last, dict, v;

    if (f->has_step || !pv_dict_get(items, "optimizer_history", &history) ||
        history.kind != PV_LIST || pv_count(&history) == 0)
        return;
    last = pv_at(&history, pv_count(&history) - 1);
    if (torch_mapping(&last, &dict) && dict.kind == PV_DICT &&
        pv_dict_get(&dict, "num_updates", &v) && v.kind == PV_INT && v.i >= 0) {
        f->has_step = true;
        f->step = v.i;
    }
}

/* rank_file_fn */
static int collect(void *user, size_t i, struct rank_file *file, struct err *e)
{
    struct loading *l = user;
    struct shard *shard = &l->part->shard[i];
    struct pv root = torch_zip_root(file->file.zip), items, model, state;

    if (!torch_mapping(&root, &items) || items.kind != PV_DICT ||
        !pv_dict_get(&items, "model", &model))
        return err_set(e, EBADMSG, "it holds no model");
    TRY(read_metadata(l, (uint32_t)i, file, &items, e));
    TRY(rank_tensors_collect(file->file.zip, &model, l->f->arena, &file->tensors, e));
    if (pv_dict_get(&items, OPTIMIZER, &state) && state.kind != PV_NONE)
        TRY(rank_tensors_collect(file->file.zip, &state, l->f->arena, &shard->optim,
                                 e));
    learn_step(l->f, &items);
    return report_objects(l, file, &items, e);
}

/* A part of which no shard can be read: the scan goes on where another one can. */
static int load_part(struct fairscale *f, struct model_part *part, struct err *e)
{
    struct loading l = {.f = f, .part = part};

    return rank_files_load(f->c, f->sink, part->file, part->shards, collect, &l, e);
}

/* A file whose metadata were good, and then something else was not. */
static void drop_damaged(struct model_part *part)
{
    for (uint32_t s = 0; s < part->shards; s++) {
        if (!part->file[s].err.code)
            continue;
        rank_tensors_release(&part->file[s].tensors);
        rank_tensors_release(&part->shard[s].optim);
        free(steal(&part->shard[s].padding));
    }
}

/* ---- the scan ---- */

static int warn(struct fairscale *f, struct err *e)
{
    int r = 0;

    if (f->own > 0)
        r = sink_warning(f->sink, "own-parameters",
                         "%" PRIu64
                         " parameters (no_broadcast_optim_state: experts) are "
                         "each rank's own: all of them are shown, FILE:model.NAME",
                         f->own);
    if (r == 0 && f->raw > 0)
        r = sink_warning(f->sink, "not-merged",
                         "%" PRIu64
                         " tensors of which shard_metadata tells nothing are "
                         "shown as each rank has them",
                         f->raw);
    if (r == 0 && f->unknown > 0)
        r = sink_warning(
            f->sink, "unknown-cut",
            "%" PRIu64 " parameters are cut by model parallelism in ways "
            "that their names do not tell (%s): each part's is shown as it "
            "is",
            f->unknown, f->first_unknown);
    return r < 0 ? err_nomem(e) : 0;
}

static int report(struct fairscale *f, struct err *e)
{
    struct err why = {0};
    bool any = false;

    TRY(find_main(f, e));
    TRY(find_files(f, e));
    for (uint32_t i = 0; i < f->parts; i++) {
        struct model_part *part = &f->part[i];

        TRY(load_part(f, part, e));
        drop_damaged(part);
        if (part->first && part->first->err.code)
            part->first = NULL;
        any |= part->first != NULL;
        if (!part->first && !why.code)
            why = part->file[0].err;
        if (part->first)
            TRY(fairscale_report_part(f, part, e));
    }
    if (!any) {
        *e = why;
        return err_wrap(e, "%s", f->part[0].file[0].file.path);
    }
    if (f->parts > 1)
        TRY(fairscale_merge_parts(f, e));
    return warn(f, e);
}

static int tell_checkpoint(const struct fairscale *f, struct err *e)
{
    char topology[128], path[PATH_MAX], stem[NAME_MAX + 1];
    struct sink_checkpoint about = {
        .format = "metaseq-fsdp-flat",
        .framework = f->name.has_part ? "metaseq (fairscale)" : "fairseq (fairscale)",
        .topology = topology,
        .has_step = f->has_step,
        .step = f->step};

    snprintf(topology, sizeof topology,
             "{\"ranks\": %" PRIu32 ", \"tensor_parallel\": %" PRIu32
             ", \"fully_sharded\": %" PRIu32 "}",
             f->parts * (f->parts ? f->part[0].shards : 0), f->parts,
             f->parts ? f->part[0].shards : 0);
    if (f->main && store_join(f->c->dir, f->main, path, sizeof path) == 0)
        about.metadata_file = path;
    if (f->main && !about.has_step) {
        snprintf(stem, sizeof stem, "%.*s", (int)f->name.stem, f->main);
        about.has_step = step_of_name(stem, &about.step);
    }
    return sink_checkpoint(f->sink, &about, e);
}

static int fairscale_scan(const struct scan_context *c, struct sink *sink,
                          struct err *e)
{
    CLEANUP(fairscale_release)
    struct fairscale f = {.c = c, .sink = sink, .arena = arena_new(MAX_MEMORY)};
    struct err failed = {0};
    int r = f.arena ? report(&f, &failed) : err_nomem(&failed);

    if (tell_checkpoint(&f, e) == 0 && r < 0)
        *e = failed;
    return -e->code;
}

static const struct chunk_codec *const fairscale_codecs[] = {
    &codec_zip_deflate, &codec_copies, &codec_sum, NULL};

const struct format_driver format_fairscale = {
    .name = "fairscale",
    .title = "fairscale's flat shards: checkpoint_*-shardR.pt of metaseq and fairseq",
    .bid = fairscale_bid,
    .bid_file = fairscale_bid_file,
    .scan = fairscale_scan,
    .codecs = fairscale_codecs,
};
