/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_legacy.c - Megatron-LM's checkpoints of a file a rank. */
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "index/formats/format.h"
#include "index/formats/megatron/megatron_ranks.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_walk.h"
#include "index/formats/torch/torch_zip.h"
#include "index/sink.h"

enum {
    MAX_MEMORY = 64 << 20,
    MAX_ARGS = 16 << 20, /* args as JSON; real ones have 50 KiB */
};

static const char MODEL[] = "model_optim_rng.pt";

/* ---- names of ranks ---- */

/* "mp_rank_01", "mp_rank_01_003" or "mp_rank_01_003_000": how many numbers, 0: no such. */
static unsigned rank_numbers(const char *name, uint32_t number[3])
{
    static const char prefix[] = "mp_rank";
    unsigned n = 0;

    if (strncmp(name, prefix, sizeof prefix - 1) != 0)
        return 0;
    for (name += sizeof prefix - 1; *name == '_' && n < 3; n++) {
        const char *start = ++name;

        number[n] = 0;
        while (isdigit((unsigned char)*name) && name - start < 6)
            number[n] = number[n] * 10 + (uint32_t)(*name++ - '0');
        if (name == start)
            return 0;
    }
    return *name ? 0 : n;
}

static bool is_rank(const struct listing_entry *entry, uint32_t number[3],
                    unsigned *count)
{
    if (entry->st.kind != ENTRY_DIR)
        return false;
    *count = rank_numbers(entry->name, number);
    return *count > 0;
}

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = l ? listing_find(l, name) : NULL;

    return entry && entry->st.kind == ENTRY_FILE;
}

/* ---- bids ---- */

static void legacy_bid(struct listing *l, struct bid *out)
{
    uint32_t number[3];
    unsigned n;

    *out = (struct bid){0};
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        const struct listing *below;

        if (!is_rank(entry, number, &n))
            continue;
        below = listing_sub(l, entry->name);
        if (!has_file(below, MODEL) && !has_file(below, "model_rng.pt"))
            continue;
        out->score = 88;
        snprintf(out->reason, sizeof out->reason,
                 "%.40s/ is a rank's directory of Megatron-LM", entry->name);
        return;
    }
}

/* ---- args ---- */

static void take_u64(const struct json *state, const char *name, uint64_t *out)
{
    if (!json_u64(json_get(state, name), out))
        *out = 0;
}

static bool take_bool(const struct json *state, const char *name)
{
    bool v;

    return json_bool(json_get(state, name), &v) && v;
}

static void take_args(struct legacy *l, const char *text, size_t len)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    const struct json *state;
    struct err ignored = {0};

    megatron_learn_common(&l->facts, text, len);
    if (json_parse(text, len, &(struct json_limits){.depth = 512}, &doc, &ignored) < 0)
        return;
    state = json_get(json_get(doc, "args"), "state");
    l->args.known = state;
    l->args.gated = take_bool(state, "swiglu");
    l->args.untied = take_bool(state, "untie_embeddings_and_output_weights");
    take_u64(state, "num_layers", &l->args.layers);
    take_u64(state, "num_attention_heads", &l->args.heads);
    take_u64(state, "num_experts", &l->args.experts);
    take_u64(state, "expert_tensor_parallel_size", &l->args.expert_tensor);
    take_u64(state, "kv_channels", &l->args.channels);
    take_u64(state, "q_lora_rank", &l->args.q_rank);
    take_u64(state, "kv_lora_rank", &l->args.kv_rank);
    take_u64(state, "qk_pos_emb_head_dim", &l->args.positions);
    l->args.extended = take_bool(state, "moe_extended_tp");
    l->args.groups = 0;
    if (take_bool(state, "group_query_attention"))
        take_u64(state, "num_query_groups", &l->args.groups);
}

/* {"args": ..., "iteration": ...} of the common state, as the other backends have it. */
static int learn_args(struct legacy *l, struct torch_zip *zip, const struct pv *root,
                      struct err *e)
{
    CLEANUP(buf_release) struct buf json = {.max = MAX_ARGS};
    struct pv v;

    buf_adds(&json, "{\"args\": ");
    if (!pv_dict_get(root, "args", &v))
        buf_adds(&json, "null");
    else if (object_to_json(zip, &v, 0, legacy_no_key, NULL, &json, e) < 0)
        return err_wrap(e, "args");
    if (pv_dict_get(root, "iteration", &v) && v.kind == PV_INT)
        buf_addf(&json, ", \"iteration\": %" PRId64, v.i);
    buf_addc(&json, '}');
    if (buf_failed(&json))
        return err_nomem(e);
    take_args(l, json.data, json.len);
    return 0;
}

/* How many models, and the version; from the first rank's file. */
static int learn_models(struct legacy *l, const struct pv *root, struct err *e)
{
    char name[16];
    struct pv v;

    l->version = 0;
    if (pv_dict_get(root, "checkpoint_version", &v))
        l->version = v.kind == PV_FLOAT ? v.f : v.kind == PV_INT ? (double)v.i : 0;
    if (!(l->version >= 0 && l->version <= 3)) { /* not a number either */
        err_set(e, ENOTSUP, "checkpoint_version %g is not known", l->version);
        return err_hint(e, "versions up to 3.0 are supported");
    }
    l->models = 1;
    l->several = !pv_dict_get(root, "model", &v);
    if (!l->several)
        return 0;
    for (l->models = 0; l->models < MEGATRON_MAX_VIRTUAL; l->models++) {
        snprintf(name, sizeof name, "model%" PRIu32, l->models);
        if (!pv_dict_get(root, name, &v))
            break;
    }
    return l->models > 0 ? 0 : err_set(e, EBADMSG, "it holds no model");
}

static int learn_first(struct legacy *l, struct rank *r, struct err *e)
{
    struct pv root, items;
    int rc;

    TRY(legacy_load(l, r, e));
    if (r->err.code) {
        *e = r->err;
        rc = -e->code;
    } else {
        root = torch_zip_root(r->file.zip);
        rc = torch_mapping(&root, &items) && items.kind == PV_DICT
                 ? learn_args(l, r->file.zip, &items, e)
                 : err_set(e, EBADMSG, "it holds no dict");
        if (rc == 0)
            rc = learn_models(l, &items, e);
    }
    legacy_unload(r);
    return rc < 0 ? err_wrap(e, "%s", r->path) : 0;
}

/* ---- ranks ---- */

static int find_ranks(struct legacy *l, struct err *e)
{
    struct listing *here = l->c->listing;
    uint32_t number[3];
    unsigned n;

    for (size_t i = 0; i < listing_count(here); i++) {
        const struct listing_entry *entry = listing_at(here, i);
        struct rank *r;

        if (!is_rank(entry, number, &n))
            continue;
        TRY(sink_part(l->sink, entry->name, e));
        r = reallocarray(l->rank, l->nranks + 1, sizeof *r);
        if (!r)
            return err_nomem(e);
        l->rank = r;
        r += l->nranks++;
        /* What the second number is only args tell: see name_ranks(). */
        *r = (struct rank){.t = number[0],
                           .p = n > 1 ? number[1] : 0,
                           .e = n > 2 ? number[2] : 0,
                           .numbers = n};
        snprintf(r->dir, sizeof r->dir, "%s", entry->name);
        snprintf(r->path, sizeof r->path, "%s/%s", r->dir, MODEL);
        if (!has_file(listing_sub(here, r->dir), MODEL) &&
            has_file(listing_sub(here, r->dir), "model_rng.pt"))
            return err_set(e, ENOTSUP,
                           "%s has model_rng.pt: files of Megatron-LM of before 2022 "
                           "with the distributed optimizer are not supported",
                           r->dir);
    }
    return l->nranks > 0 ? 0 : err_set(e, ESTALE, "no mp_rank directories any more");
}

/* A name with two numbers has the pipeline rank, or the expert rank where there is none. */
static void name_ranks(struct legacy *l)
{
    bool three = false;

    for (size_t i = 0; i < l->nranks; i++)
        three |= l->rank[i].numbers == 3;
    if (three || l->facts.pipeline > 1 || l->facts.expert <= 1)
        return;
    for (size_t i = 0; i < l->nranks; i++) {
        l->rank[i].e = l->rank[i].p;
        l->rank[i].p = 0;
    }
}

/* The larger of what is there and what args tell. */
static int size_of(uint32_t found, uint64_t told, const char *what, uint32_t *out,
                   struct err *e)
{
    *out = found;
    if (told == 0 || told == found)
        return 0;
    if (told < found)
        return err_set(e, EBADMSG,
                       "there are %" PRIu32 " %s ranks, and args tell of %" PRIu64,
                       found, what, told);
    if (told / 16 > found)
        return err_set(e, EBADMSG, "there are only %" PRIu32 " of %" PRIu64 " %s ranks",
                       found, told, what);
    *out = (uint32_t)told;
    return 0;
}

static int find_sizes(struct legacy *l, struct err *e)
{
    uint32_t t = 0, p = 0, x = 0;

    for (size_t i = 0; i < l->nranks; i++) {
        t = MAX(t, l->rank[i].t);
        p = MAX(p, l->rank[i].p);
        x = MAX(x, l->rank[i].e);
    }
    TRY(size_of(t + 1, l->facts.tensor, "tensor", &l->tensor, e));
    TRY(size_of(p + 1, l->facts.pipeline, "pipeline", &l->pipeline, e));
    TRY(size_of(x + 1, x > 0 ? l->facts.expert : 0, "expert", &l->expert, e));
    if ((uint64_t)l->tensor * l->pipeline / 16 * l->expert > l->nranks)
        return err_set(e, EBADMSG,
                       "there are only %zu ranks of %" PRIu32 " x %" PRIu32
                       " x %" PRIu32,
                       l->nranks, l->tensor, l->pipeline, l->expert);
    return 0;
}

/* ---- the scan ---- */

static int report_oddities(struct legacy *l, struct err *e)
{
    const struct layer_kind *k = l->kinds;
    uint64_t total = k ? legacy_layers(l, k) : 0;
    int r = 0;

    TRY(legacy_warn_unknown(l, e));
    if (k && !k->next && l->args.layers > 0 && l->args.layers != total)
        r = sink_warning(l->sink, "layers",
                         "args tell of %" PRIu64 " layers, the files have %" PRIu64,
                         l->args.layers, total);
    if (r == 0 && !l->args.known)
        r = sink_warning(l->sink, "no-args",
                         "no args: the head is taken to be the embedding, and fc1 to "
                         "be not gated where its fc2 does not tell");
    return r < 0 ? err_nomem(e) : 0;
}

static int report(struct legacy *l, struct err *e)
{
    TRY(find_ranks(l, e));
    TRY(learn_first(l, &l->rank[0], e));
    name_ranks(l);
    TRY(legacy_sort(l, e));
    TRY(find_sizes(l, e));
    TRY(legacy_count_layers(l, e));
    TRY(legacy_report_stages(l, e));
    return report_oddities(l, e);
}

static int tell_checkpoint(struct legacy *l, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    char path[PATH_MAX];
    struct sink_checkpoint about = {.format = "megatron-legacy",
                                    .framework = "Megatron-LM"};

    buf_addf(&topology, "{\"backend\": \"torch\", \"files\": %zu", l->nranks);
    megatron_topology(&l->facts, &topology);
    buf_addf(&topology, ", \"checkpoint_version\": %g}", l->version);
    if (buf_failed(&topology))
        return err_nomem(e);
    about.topology = topology.data;
    about.settings = megatron_settings(&l->facts);
    if (l->nranks > 0) {
        if (store_join(l->c->dir, l->rank[0].path, path, sizeof path) < 0)
            return err_set(e, ENAMETOOLONG, "%s: the path is too long",
                           l->rank[0].path);
        about.metadata_file = path;
    }
    about.has_step = step_of_name(listing_name(l->c->listing), &about.step);
    if (!about.has_step && l->facts.has_iteration) {
        about.has_step = true;
        about.step = l->facts.iteration;
    }
    return sink_checkpoint(l->sink, &about, e);
}

static int legacy_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct legacy l = {.c = c,
                       .sink = sink,
                       .entry = "model",
                       .optimizer = "optimizer",
                       .arena = arena_new(MAX_MEMORY)};
    struct err failed = {0};
    int r = l.arena ? report(&l, &failed) : err_nomem(&failed);

    if (tell_checkpoint(&l, e) == 0 && r < 0)
        *e = failed;
    free(l.rank);
    arena_free(l.arena);
    return -e->code;
}

static const struct chunk_codec *const legacy_codecs[] = {&codec_zip_deflate, NULL};

const struct format_driver format_megatron_legacy = {
    .name = "megatron_legacy",
    .title = "Megatron-LM: a file a rank (mp_rank_*)",
    .bid = legacy_bid,
    .scan = legacy_scan,
    .codecs = legacy_codecs,
};
