/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_train.c - NeMo 1's training checkpoints: Lightning's file of each rank. */
#include "index/formats/nemo/nemo_train.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/keyset.h"
#include "index/formats/nemo/nemo_hparams.h"
#include "index/formats/nemo/nemo_ranks.h"
#include "index/formats/pickle/pickle.h"
#include "index/formats/ranks/rank_files.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_walk.h"
#include "index/formats/torch/torch_zip.h"

enum {
    MAX_CONFIG = 4 << 20, /* as JSON; real ones have 10 KiB */
    MAX_RANKS = 4096,
    MAX_VERSION = 48,
};

static const char ending[] = ".ckpt";

/* ---- which there are ---- */

bool nemo_train_is_dir(const char *name)
{
    uint32_t t, p;

    return nemo_rank_name(name, &t, &p);
}

static bool is_checkpoint_name(const char *name)
{
    size_t n = strlen(name), end = sizeof ending - 1;

    return n > end && strcmp(name + n - end, ending) == 0;
}

/* The rank's directory that entry i is, or NULL. */
static struct listing *rank_at(struct listing *l, size_t i)
{
    const struct listing_entry *entry = listing_at(l, i);

    return entry->st.kind == ENTRY_DIR && nemo_train_is_dir(entry->name)
               ? listing_sub(l, entry->name)
               : NULL;
}

static bool is_torch(struct listing *l, const char *name)
{
    unsigned char head[TORCH_HEAD];
    size_t got = 0;

    return listing_peek(l, name, head, sizeof head, &got) == 0 &&
           torch_sniff(head, got) != TORCH_NOT;
}

/* Nothing but such files. */
static bool is_pure(const struct listing *sub)
{
    for (size_t i = 0; i < listing_count(sub); i++)
        if (listing_at(sub, i)->st.kind != ENTRY_FILE ||
            !is_checkpoint_name(listing_at(sub, i)->name))
            return false;
    return true;
}

/* Are the ranks' directories such, and is some file of them what it should be? */
static bool has_sets(struct listing *l)
{
    bool seen = false, pure = true;

    for (size_t i = 0; pure && i < listing_count(l); i++) {
        struct listing *sub = rank_at(l, i);

        pure = !sub || is_pure(sub);
        for (size_t k = 0; sub && pure && !seen && k < listing_count(sub); k++)
            seen = is_torch(sub, listing_at(sub, k)->name);
    }
    return pure && seen;
}

/*
 * NeMo 2.0 puts NAME-unfinished beside the ranks' directories while they save, one for a model
 * and its average NAME-EMA (nemo/utils/callbacks/nemo_model_checkpoint.py).
 */
static bool is_unfinished(const struct listing *l, const char *name)
{
    static const char average[] = "-EMA";
    size_t n = strlen(name) - (sizeof ending - 1), end = sizeof average - 1;
    char mark[NAME_MAX + 16];

    if (n >= end && memcmp(name + n - end, average, end) == 0)
        n -= end;
    snprintf(mark, sizeof mark, "%.*s-unfinished", (int)MIN(n, (size_t)NAME_MAX), name);
    return listing_find(l, mark);
}

/* Those that no rank before this one has. */
static int tell_sets(struct listing *l, size_t dir, struct keyset *seen,
                     format_set_fn *fn, void *user)
{
    struct listing *sub = rank_at(l, dir);
    int rc = 0;

    for (size_t i = 0; rc == 0 && sub && i < listing_count(sub); i++) {
        const struct listing_entry *entry = listing_at(sub, i);
        const struct format_set set = {
            .name = entry->name, .dir = listing_at(l, dir)->name, .st = entry->st};

        rc = keyset_add(seen, entry->name, strlen(entry->name));
        if (rc >= 0)
            rc = rc > 0 && !is_unfinished(l, entry->name) ? fn(user, &set) : 0;
    }
    return rc;
}

int nemo_train_sets(struct listing *l, format_set_fn *fn, void *user)
{
    struct keyset seen = {0};
    int rc = 0;

    if (!has_sets(l))
        return 0;
    for (size_t i = 0; rc == 0 && i < listing_count(l); i++)
        rc = tell_sets(l, i, &seen, fn, user);
    keyset_release(&seen);
    return rc;
}

/* ---- what the files tell ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    const char *file;
    size_t ranks;
    char first[PATH_MAX]; /* of the files that told: its path */
    bool told, has_step, merged;
    int64_t step;
    struct nemo_config config;
    char version[MAX_VERSION];
    struct err why; /* code 0: the ranks can be put together */
};

static bool has_file(struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

static int learn_config(const struct pv *root, struct nemo_config *out, char *version,
                        struct err *e)
{
    CLEANUP(buf_release) struct buf text = {.max = MAX_CONFIG};
    CLEANUP(json_freep) struct json *doc = NULL;
    const char *told;

    TRY(nemo_hparams_json(root, &text, e));
    TRY(json_parse(text.data, text.len, NULL, &doc, e));
    if (json_string(json_get(doc, "nemo_version"), &told))
        snprintf(version, MAX_VERSION, "%s", told);
    return nemo_config_learn(doc, out, e);
}

static bool learn_step(const struct pv *root, int64_t *out)
{
    struct pv items, v;

    if (!torch_mapping(root, &items) || items.kind != PV_DICT ||
        !pv_dict_get(&items, "global_step", &v) || v.kind != PV_INT || v.i < 0)
        return false;
    *out = v.i;
    return true;
}

/*
 * Each rank has saved the same configuration at the same step: files that differ are of two
 * runs or two saves, and what they would give together no model ever was.
 */
static void learn_file(struct scan *s, const struct torch_file *f)
{
    struct pv root = torch_zip_root(f->zip);
    struct nemo_config config;
    char version[MAX_VERSION] = "";
    int64_t step = 0;
    bool has_step = learn_step(&root, &step);

    if (learn_config(&root, &config, version, &s->why) < 0) {
        err_wrap(&s->why, "%s: its configuration", f->path);
        return;
    }
    if (!s->told) {
        s->told = true;
        s->config = config;
        s->has_step = has_step;
        s->step = step;
        snprintf(s->version, sizeof s->version, "%s", version);
        snprintf(s->first, sizeof s->first, "%s", f->path);
    } else if (!nemo_config_same(&s->config, &config)) {
        err_set(&s->why, EBADMSG, "%s and %s tell of different configurations",
                s->first, f->path);
    } else if (s->has_step != has_step || s->step != step) {
        err_set(&s->why, EBADMSG,
                "%s is of step %" PRId64 " and %s of step %" PRId64
                ": they are of two saves",
                s->first, s->step, f->path, step);
    }
}

/* What is damaged is told with the tensors that it has a part of. */
static int learn_rank(struct scan *s, const char *path, struct err *e)
{
    struct torch_file f = {.path = path};
    struct err damage = {0};

    if (torch_file_register(s->sink, &f, &damage) == 0 &&
        torch_file_load(s->c, &f, &damage) == 0)
        learn_file(s, &f);
    torch_file_close(&f);
    if (damage.code && !torch_file_is_damaged(damage.code))
        *e = damage;
    else if (s->why.code == ENOMEM)
        *e = s->why;
    return -e->code;
}

static int learn(struct scan *s, struct err *e)
{
    struct listing *l = s->c->listing;
    char path[PATH_MAX];

    for (size_t i = 0; i < listing_count(l); i++) {
        struct listing *sub = rank_at(l, i);

        if (!sub || !has_file(sub, s->file))
            continue;
        if (++s->ranks > MAX_RANKS)
            return err_set(e, EFBIG, "more than %d ranks", MAX_RANKS);
        if (store_join(listing_at(l, i)->name, s->file, path, sizeof path) < 0)
            return err_set(e, ENAMETOOLONG, "%s: the path is too long", s->file);
        if (!s->why.code)
            TRY(learn_rank(s, path, e));
    }
    if (s->ranks == 0)
        return err_set(e, ESTALE, "no rank has %s any more", s->file);
    if (!s->told && !s->why.code)
        err_set(&s->why, EBADMSG, "none of the files can be read");
    return 0;
}

/* ---- shown as they are ---- */

static int show_loaded(struct scan *s, const struct torch_file *f, struct err *e)
{
    static const char optimizer[] = "optimizer_states";
    static const char *const skip[] = {optimizer, NULL};
    char object[PATH_MAX + 1];
    const struct torch_report rest = {
        .role = ROLE_OTHER, .entries = true, .object = object, .skip = skip};
    const struct torch_report states = {
        .role = ROLE_OPTIMIZER, .entries = true, .object = object, .only = optimizer};

    snprintf(object, sizeof object, "%s:", f->path);
    TRY(torch_file_report_loaded(s->sink, f, &rest, e));
    return torch_file_report_loaded(s->sink, f, &states, e);
}

static int show_rank(struct scan *s, const char *path, struct err *e)
{
    struct torch_file f = {.path = path};
    struct err damage = {0};

    if (torch_file_register(s->sink, &f, &damage) == 0 &&
        torch_file_load(s->c, &f, &damage) == 0)
        show_loaded(s, &f, e);
    torch_file_close(&f);
    if (damage.code && !torch_file_is_damaged(damage.code))
        *e = damage;
    else if (damage.code &&
             sink_warning(s->sink, "damaged-file", "%s: %s", path, damage.text) < 0)
        err_nomem(e);
    return -e->code;
}

static int show_ranks(struct scan *s, struct err *e)
{
    struct listing *l = s->c->listing;
    char path[PATH_MAX];

    for (size_t i = 0; i < listing_count(l); i++) {
        struct listing *sub = rank_at(l, i);

        if (sub && has_file(sub, s->file) &&
            store_join(listing_at(l, i)->name, s->file, path, sizeof path) == 0)
            TRY(show_rank(s, path, e));
    }
    return sink_warning(s->sink, "not-merged",
                        "the files of %zu model parallel ranks are shown as they are, "
                        "pieces of the model's tensors: %s",
                        s->ranks, s->why.text) < 0
               ? err_nomem(e)
               : 0;
}

/* ---- the scan ---- */

/*
 * A file of a rank that comes later makes the index stale. Where the directory is the
 * checkpoint, directories of ranks are its parts; a file of another name makes two of it.
 */
static int watch(struct scan *s, struct err *e)
{
    struct listing *l = s->c->listing;

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;

        if (!rank_at(l, i))
            continue;
        if (!s->c->among)
            TRY(sink_part(s->sink, name, e));
        TRY(sink_watch(s->sink, name, e));
    }
    return 0;
}

static int tell_checkpoint(struct scan *s, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    char path[PATH_MAX];
    struct sink_checkpoint about = {.format = "nemo-ckpt", .framework = "NeMo"};

    buf_addf(&topology, "{\"ranks\": %zu", s->ranks);
    if (s->merged)
        buf_addf(&topology,
                 ", \"tensor_parallel\": %" PRIu64 ", \"pipeline_parallel\": %" PRIu64,
                 s->config.tensor, s->config.pipeline);
    if (s->merged && s->config.virtual_pipeline > 1)
        buf_addf(&topology, ", \"virtual_pipeline\": %" PRIu64,
                 s->config.virtual_pipeline);
    buf_addc(&topology, '}');
    if (buf_failed(&topology))
        return err_nomem(e);
    about.topology = topology.data;
    about.version = s->version[0] ? s->version : NULL;
    about.has_step = s->has_step;
    about.step = s->step;
    if (s->first[0]) {
        if (store_join(s->c->dir, s->first, path, sizeof path) < 0)
            return err_set(e, ENAMETOOLONG, "%s: the path is too long", s->first);
        about.metadata_file = path;
    }
    return sink_checkpoint(s->sink, &about, e);
}

static int report(struct scan *s, struct err *e)
{
    const struct nemo_ranks ranks = {
        .c = s->c, .sink = s->sink, .file = s->file, .training = true};

    TRY(watch(s, e));
    TRY(learn(s, e));
    if (!s->why.code)
        TRY(nemo_ranks_report(&ranks, &s->config, &s->merged, &s->why, e));
    return s->merged ? 0 : show_ranks(s, e);
}

int nemo_train_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct scan s = {.c = c, .sink = sink, .file = c->file};
    struct err failed = {0};
    int rc = report(&s, &failed);

    if (tell_checkpoint(&s, e) == 0 && rc < 0)
        *e = failed;
    return -e->code;
}
