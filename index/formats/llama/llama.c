/* SPDX-License-Identifier: MIT */
/* index/formats/llama/llama.c - Meta's consolidated.NN.pth: a file a model-parallel rank. */
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "index/formats/format.h"
#include "index/formats/llama/llama_rules.h"
#include "index/formats/ranks/rank_copies.h"
#include "index/formats/ranks/rank_files.h"
#include "index/formats/torch/torch_walk.h"

enum {
    MAX_PARAMS = 1 << 20, /* real ones have 200 bytes */
    MAX_RANKS = 1000,     /* Meta's largest: 16 */
    MAX_MEMORY = 1 << 30, /* names and shapes of all ranks */
    NAME_MAX_LEN = 32,
};

static const char PARAMS[] = "params.json";

/* ---- names ---- */

/* "consolidated.NN.pth": NN. */
static bool rank_of(const struct listing_entry *entry, uint32_t *rank)
{
    static const char prefix[] = "consolidated.";
    const char *p = entry->name + sizeof prefix - 1, *digits = p;

    if (entry->st.kind != ENTRY_FILE ||
        strncmp(entry->name, prefix, sizeof prefix - 1) != 0)
        return false;
    for (*rank = 0; isdigit((unsigned char)*p) && p - digits < 4; p++)
        *rank = *rank * 10 + (uint32_t)(*p - '0');
    return p - digits >= 2 && strcmp(p, ".pth") == 0 && *rank < MAX_RANKS;
}

static uint32_t count_ranks(const struct listing *l, uint32_t *first)
{
    uint32_t count = 0, rank;

    *first = UINT32_MAX;
    for (size_t i = 0; i < listing_count(l); i++) {
        if (!rank_of(listing_at(l, i), &rank))
            continue;
        *first = MIN(*first, rank);
        count = MAX(count, rank + 1);
    }
    return count;
}

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

/* ---- bids ---- */

static bool names_width(struct listing *l)
{
    char head[4096];
    size_t got = 0;

    return has_file(l, PARAMS) &&
           listing_peek(l, PARAMS, head, sizeof head, &got) == 0 &&
           memmem(head, got, "\"dim\"", 5);
}

/* One file without params.json is a torch.save file like any other. */
static void llama_bid(struct listing *l, struct bid *out)
{
    uint32_t first, count = count_ranks(l, &first);
    bool params = names_width(l);

    *out = (struct bid){0};
    if (count == 0 || (count == 1 && !params))
        return;
    /* Where somebody has put both into one folder, loaders take Hugging Face's. */
    out->score =
        has_file(l, "model.safetensors") || has_file(l, "model.safetensors.index.json")
            ? 20
        : params ? 90
                 : 75;
    snprintf(out->reason, sizeof out->reason, "consolidated.%02" PRIu32 ".pth%s", first,
             params ? " and params.json" : " and others, without params.json");
}

/* ---- the scan ---- */

struct llama {
    const struct scan_context *c;
    struct sink *sink;
    struct llama_params params;
    struct arena *arena;
    struct rank_file *file; /* by rank */
    char (*name)[NAME_MAX_LEN];
    struct rank_part *part; /* of the tensor that is merged */
    uint32_t ranks, first;
    bool many; /* files than params.json tells of: some are of another model */
    uint64_t width;
    uint64_t unknown;
    char first_unknown[128];
};

static void llama_release(struct llama *l)
{
    rank_files_free(l->file, l->ranks);
    free(l->name);
    free(l->part);
    arena_free(l->arena);
}

static int read_params(struct llama *l, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len;

    if (!has_file(l->c->listing, PARAMS))
        return 0;
    TRY(sink_watch(l->sink, PARAMS, e));
    if (listing_read(l->c->listing, PARAMS, MAX_PARAMS, &text, &len, &why) == 0 &&
        llama_params_parse(text, len, &l->params, &why) == 0)
        return 0;
    if (why.code == ENOMEM || why.code == ESTALE) {
        return err_copy(e, &why);
    }
    return sink_warning(l->sink, "params", "%s: %s", PARAMS, why.text) < 0
               ? err_nomem(e)
               : 0;
}

/* rank_file_fn */
static int collect(void *user, size_t i UNUSED, struct rank_file *f, struct err *e)
{
    struct llama *l = user;
    struct pv root = torch_zip_root(f->file.zip), items;

    if (!torch_mapping(&root, &items))
        return err_set(e, EBADMSG, "it holds no dict");
    TRY(rank_tensors_collect(f->file.zip, &root, l->arena, &f->tensors, e));
    return rank_file_objects(l->sink, f, NULL, e);
}

/* `ranks` files; those that are there already stay. */
static int make_files(struct llama *l, uint32_t ranks, struct err *e)
{
    struct rank_file *file = rank_files_new(ranks);
    char(*name)[NAME_MAX_LEN] = calloc(ranks, sizeof *name);
    struct rank_part *part = calloc(ranks, sizeof *part);

    if (!file || !name || !part) {
        free(file);
        free(name);
        free(part);
        return err_nomem(e);
    }
    if (l->file)
        memcpy(file, l->file, l->ranks * sizeof *file);
    for (uint32_t i = 0; i < ranks; i++) {
        snprintf(name[i], sizeof *name, "consolidated.%02" PRIu32 ".pth", i);
        file[i].file.path = name[i];
    }
    free(l->file);
    free(l->name);
    free(l->part);
    l->file = file;
    l->name = name;
    l->part = part;
    l->ranks = ranks;
    return 0;
}

static int load_from(struct llama *l, uint32_t from, struct err *e)
{
    return rank_files_load(l->c, l->sink, l->file + from, l->ranks - from, collect, l,
                           e);
}

/*
 * How many ranks there should be: what params.json says of the heads, by what one rank has
 * of them. 0: that cannot be told.
 */
static uint32_t ranks_told(const struct llama *l, const struct rank_file *f)
{
    for (size_t i = 0; i < f->tensors.count; i++) {
        const struct rank_tensor *x = &f->tensors.tensor[i];
        uint64_t whole = llama_whole(LLAMA_QUERY, &l->params);

        if (llama_kind(x->name, x->len) != LLAMA_QUERY || x->why)
            continue;
        if (x->nd != 2 || x->dim[0] == 0 || whole % x->dim[0] != 0)
            return 0;
        whole /= x->dim[0];
        return whole < MAX_RANKS ? (uint32_t)whole : 0;
    }
    return 0;
}

/* dim, or what the norm before the output has. */
static uint64_t find_width(const struct llama *l, const struct rank_file *f)
{
    const struct rank_tensor *norm = rank_tensors_find(&f->tensors, "norm.weight", 11);

    if (l->params.dim > 0)
        return l->params.dim;
    return norm && norm->nd == 1 && !norm->why ? norm->dim[0] : 0;
}

static int load_all(struct llama *l, struct err *e)
{
    const struct rank_file *f;
    uint32_t found = count_ranks(l->c->listing, &l->first), told;

    if (found == 0)
        return err_set(e, ESTALE, "no consolidated.NN.pth any more");
    TRY(make_files(l, found, e));
    TRY(load_from(l, 0, e));
    f = rank_files_first(l->file, l->ranks, e);
    if (!f)
        return err_wrap(e, "%s", l->file[0].file.path);
    l->width = find_width(l, f);
    told = ranks_told(l, f);
    l->many = told > 0 && told < found;
    if (told <= found)
        return 0;
    TRY(make_files(l, told, e));
    TRY(load_from(l, found, e));
    return 0;
}

/* ---- tensors ---- */

/* Is the whole as large as params.json says? With fewer kv heads than ranks it is not. */
static bool is_expected(const struct llama *l, enum llama_kind kind,
                        enum rank_rule rule)
{
    uint64_t whole, expected = llama_whole(kind, &l->params);
    struct rank_cut cut = rank_rule_cut(rule);

    for (uint32_t i = 0; i < l->ranks; i++)
        if (!l->part[i].x || l->part[i].x->why)
            return true; /* something is missing, which is told */
    if (kind == LLAMA_EMBEDDING && rule == RANK_COLUMNS)
        expected = l->width;
    return expected == 0 || !rank_parts_fit(l->part, l->ranks, &cut, &whole) ||
           whole == expected;
}

static int report_raw(struct llama *l, const struct rank_tensor *x, struct err *e)
{
    if (l->unknown++ == 0)
        snprintf(l->first_unknown, sizeof l->first_unknown, "%.*s",
                 (int)MIN(x->len, (size_t)100), x->name);
    for (uint32_t i = 0; i < l->ranks; i++)
        if (l->part[i].x)
            TRY(rank_file_raw(l->sink, &l->file[i], l->part[i].x, e));
    return 0;
}

static int report_tensor(struct llama *l, const struct rank_tensor *x, struct err *e)
{
    enum llama_kind kind = llama_kind(x->name, x->len);
    enum rank_rule rule = llama_rule(kind, x, l->width);
    struct sink_tensor t = {.key = x->name, .key_len = x->len, .role = ROLE_MODEL};

    for (uint32_t i = 0; i < l->ranks; i++)
        l->part[i] = rank_file_part(&l->file[i], x->name, x->len);
    if (l->ranks > 1 && (rule == RANK_UNKNOWN || !is_expected(l, kind, rule) ||
                         (l->many && rule != RANK_SAME)))
        return report_raw(l, x, e);
    return rank_merge(l->sink, rule, l->part, l->ranks, &t, e);
}

static int report_tensors(struct llama *l, struct err *e)
{
    for (uint32_t i = 0; i < l->ranks; i++) {
        const struct rank_tensors *t = &l->file[i].tensors;

        for (size_t k = 0; k < t->count; k++)
            if (rank_files_lack(l->file, i, &t->tensor[k]))
                TRY(report_tensor(l, &t->tensor[k], e));
    }
    return 0;
}

static int report(struct llama *l, struct err *e)
{
    TRY(read_params(l, e));
    TRY(load_all(l, e));
    TRY(report_tensors(l, e));
    if (l->unknown > 0 &&
        sink_warning(l->sink, "unknown-cut",
                     "%" PRIu64 " tensors are cut in ways that neither their names nor "
                     "params.json tell (%s): each rank's piece is shown as it is",
                     l->unknown, l->first_unknown) < 0)
        return err_nomem(e);
    return 0;
}

static int tell_checkpoint(const struct llama *l, struct err *e)
{
    char path[PATH_MAX], topology[96], settings[160], main[NAME_MAX_LEN];
    struct sink_checkpoint about = {.format = "llama-consolidated",
                                    .framework = "Meta Llama",
                                    .topology = topology,
                                    .metadata_file = path};
    const struct llama_params *p = &l->params;
    int n = snprintf(topology, sizeof topology,
                     "{\"files\": %" PRIu32 ", \"tensor_parallel\": %" PRIu32, l->ranks,
                     l->ranks);

    if (l->params.layers > 0)
        snprintf(topology + n, sizeof topology - (size_t)n,
                 ", \"layers\": %" PRIu64 "}", l->params.layers);
    else
        snprintf(topology + n, sizeof topology - (size_t)n, "}");
    if (p->heads > 0 && p->layers > 0)
        about.settings = settings;
    snprintf(settings, sizeof settings,
             "{\"n_heads\": %" PRIu64 ", \"n_kv_heads\": %" PRIu64
             ", \"n_layers\": %" PRIu64 "}",
             p->heads, p->kv_heads, p->layers);
    snprintf(main, sizeof main, "consolidated.%02" PRIu32 ".pth",
             l->first < MAX_RANKS ? l->first : 0);
    if (store_join(l->c->dir, main, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", l->c->dir);
    return sink_checkpoint(l->sink, &about, e);
}

static int llama_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    CLEANUP(llama_release)
    struct llama l = {.c = c, .sink = sink, .arena = arena_new(MAX_MEMORY)};
    struct err failed = {0};
    int r = l.arena ? report(&l, &failed) : err_nomem(&failed);

    if (tell_checkpoint(&l, e) == 0 && r < 0)
        *e = failed;
    return -e->code;
}

static const struct chunk_codec *const llama_codecs[] = {
    &codec_zip_deflate, &codec_copies, &codec_sum, NULL};

const struct format_driver format_llama = {
    .name = "llama",
    .title = "Meta's Llama: consolidated.NN.pth and params.json",
    .bid = llama_bid,
    .scan = llama_scan,
    .codecs = llama_codecs,
};
