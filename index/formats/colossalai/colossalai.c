/* SPDX-License-Identifier: MIT */
/* index/formats/colossalai/colossalai.c - Colossal-AI's sharded optimizers, and steps with them. */
#include "index/formats/format.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/hf/hf_model.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/formats/json_object.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_walk.h"

enum {
    INDEX_HEAD = 4096, /* "metadata" is small and stands before weight_map */
    MAX_INDEX = 100000000,
};

static const char optim_dir[] = "optimizer";
static const char states_name[] = "running_states.json";
static const char scheduler_name[] = "lr_scheduler";
static const char *const model_dirs[] = {"modeling", "model"};

/* Files of the two kinds: Booster.save_optimizer(shard=True) and its use_async=True. */
static const struct kind {
    const char *stem, *suffix;
} kinds[] = {{"pytorch_optim", ".bin"}, {"optimizer", ".safetensors"}};

/* ---- what is there ---- */

struct optim {
    const char *name; /* of the index; borrowed from the listing */
    const struct kind *kind;
};

/* What no other index has: the file of the groups, told in its metadata. */
static bool names_groups(struct listing *l, const char *name)
{
    char head[INDEX_HEAD];
    size_t got = 0;

    return listing_peek(l, name, head, sizeof head, &got) == 0 &&
           memmem(head, got, "\"param_groups\"", 14) &&
           memmem(head, got, "\"weight_map\"", 12);
}

static const struct kind *kind_of(const char *name)
{
    struct hf_index_name x;

    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        if (hf_index_name(name, kinds[i].suffix, &x) &&
            x.stem_len == strlen(kinds[i].stem) &&
            memcmp(name, kinds[i].stem, x.stem_len) == 0)
            return &kinds[i];
    return NULL;
}

static bool find_optim(struct listing *l, struct optim *out)
{
    *out = (struct optim){0};
    for (size_t i = 0; l && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind != ENTRY_FILE || !(out->kind = kind_of(entry->name)) ||
            !names_groups(l, entry->name))
            continue;
        out->name = entry->name;
        return true;
    }
    return false;
}

struct survey {
    struct optim optim;
    bool step;             /* a step's directory: the optimizer is below it */
    const char *model_dir; /* of a step */
    struct hf_model model;
};

static bool look(struct listing *l, struct survey *s)
{
    *s = (struct survey){0};
    if (find_optim(l, &s->optim))
        return true;
    if (!listing_find(l, optim_dir) ||
        !find_optim(listing_sub(l, optim_dir), &s->optim))
        return false;
    s->step = true;
    for (size_t i = 0; i < ARRAY_SIZE(model_dirs) && !s->model_dir; i++) {
        struct listing *below =
            listing_find(l, model_dirs[i]) ? listing_sub(l, model_dirs[i]) : NULL;

        if (below && hf_model_find(below, &s->model))
            s->model_dir = model_dirs[i];
    }
    return s->model_dir;
}

static void colossalai_bid(struct listing *l, struct bid *out)
{
    struct survey s;

    *out = (struct bid){0};
    if (!look(l, &s))
        return;
    out->score = s.step ? 95 : 86;
    snprintf(out->reason, sizeof out->reason, "%s%.80s with param_groups%s%s",
             s.step ? "optimizer/" : "", s.optim.name, s.step ? ", beside " : "",
             s.step ? s.model_dir : "");
}

/* ---- the optimizer ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct survey has;
    bool has_step, has_epoch;
    int64_t step, epoch;
    /* While the optimizer is read. */
    struct scan_context below;
    char dir[PATH_MAX];
    struct hf_index index; /* {"0": "pytorch_optim-00001.bin"} */
    bool *found;           /* entries of it */
    size_t now;            /* the file of the index that is read */
    size_t elsewhere;      /* parameters in it that the index puts into another one */
    ptrdiff_t last;        /* the last of those */
    struct safetensors_files files;
};

static void scan_release(struct scan *s)
{
    safetensors_files_release(&s->files);
    free(s->found);
    hf_index_release(&s->index);
}

/*
 * Does the index put this parameter into another file, which is there? The embedding of a
 * pipeline with tied ends is in files of the first and the last stage, and the loader of
 * a stage takes the one that the index names.
 */
static bool is_elsewhere(const struct scan *s, ptrdiff_t at)
{
    const struct hf_index_file *file;

    if (at < 0 || s->index.entry[at].file == s->now)
        return false;
    file = &s->index.file[s->index.entry[at].file];
    return !file->fault && listing_find(s->below.listing, file->name);
}

static void note_parameter(struct scan *s, const char *number, size_t len)
{
    ptrdiff_t at = hf_index_find(&s->index, number, len);

    if (at >= 0 && !is_elsewhere(s, at))
        s->found[at] = true;
}

static bool is_wanted(struct scan *s, const char *number, size_t len)
{
    ptrdiff_t at = hf_index_find(&s->index, number, len);

    if (!is_elsewhere(s, at))
        return true;
    if (s->elsewhere == 0 || at != s->last)
        s->elsewhere++;
    s->last = at;
    return false;
}

/* The outermost dict has parameters' numbers as keys. */
static bool is_wanted_entry(void *user, const struct pv *key)
{
    char text[24];

    return key->kind != PV_INT ||
           is_wanted(user, text,
                     (size_t)snprintf(text, sizeof text, "%" PRId64, key->i));
}

static int warn_elsewhere(struct scan *s, struct err *e)
{
    if (s->elsewhere > 0 &&
        sink_warning(s->sink, "unlisted-tensor",
                     "%s holds states of %zu parameters that the index puts into "
                     "other files: they are not shown",
                     s->index.file[s->now].name, s->elsewhere) < 0)
        return err_nomem(e);
    s->elsewhere = 0;
    return 0;
}

/* With a tensor below or none. */
static void note_loaded(void *user, const struct torch_zip *zip)
{
    struct pv root = torch_zip_root(zip), items;
    char text[24];

    if (!torch_mapping(&root, &items) || items.kind != PV_DICT)
        return;
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv key = pv_key_at(&items, i);

        if (key.kind == PV_INT)
            note_parameter(user, text,
                           (size_t)snprintf(text, sizeof text, "%" PRId64, key.i));
    }
}

static int report_bin(struct scan *s, const char *name, struct err *e)
{
    const struct torch_report how = {.prefix = "state.",
                                     .part = optim_dir,
                                     .role = ROLE_OPTIMIZER,
                                     .entries = true,
                                     .object = "state.",
                                     .loaded = note_loaded,
                                     .wants_entry = is_wanted_entry,
                                     .user = s};

    return torch_file_report(&s->below, s->sink, name, &how, e);
}

/* Keys are state.0.exp_avg. */
static int add_tensor(struct scan *s, const struct safetensors_file *f,
                      const struct safetensors_tensor *t, struct err *e)
{
    static const char word[] = "state.";
    const size_t n = sizeof word - 1;
    struct shape shape;
    struct sink_tensor out = {.key = t->name,
                              .key_len = t->name_len,
                              .part = optim_dir,
                              .dtype = t->dtype,
                              .shape = &shape,
                              .role = ROLE_OPTIMIZER};

    if (t->name_len > n && memcmp(t->name, word, n) == 0) {
        const char *dot = memchr(t->name + n, '.', t->name_len - n);

        if (dot) {
            size_t digits = (size_t)(dot - t->name) - n;

            if (!is_wanted(s, t->name + n, digits))
                return 0;
            note_parameter(s, t->name + n, digits);
        }
    }
    safetensors_shape(t, &shape);
    return sink_tensor_plain(s->sink, &out, f->number, f->h.data + t->begin, e);
}

static int report_safetensors(struct scan *s, struct err *e)
{
    size_t n = 0;

    TRY(safetensors_files_new(&s->files, s->index.nfiles, e));
    for (size_t i = 0; i < s->index.nfiles; i++)
        if (!s->index.file[i].fault)
            s->files.file[n++].name = s->index.file[i].name;
    s->files.count = n;
    TRY(safetensors_files_read(&s->below, s->sink, &s->files, e));
    for (size_t i = 0; i < n; i++) {
        const struct safetensors_file *f = &s->files.file[i];

        if (!f->read && !f->missing &&
            sink_warning(s->sink, "damaged-file", "%s", f->err.text) < 0)
            return err_nomem(e);
        while (strcmp(s->index.file[s->now].name, f->name) != 0) /* in the same order */
            s->now++;
        for (size_t k = 0; f->read && k < f->h.count; k++)
            TRY(add_tensor(s, f, &f->h.tensor[k], e));
        TRY(warn_elsewhere(s, e));
    }
    return 0;
}

static int report_bins(struct scan *s, struct err *e)
{
    for (s->now = 0; s->now < s->index.nfiles; s->now++) {
        const struct hf_index_file *file = &s->index.file[s->now];

        if (!file->fault) {
            TRY(report_bin(s, file->name, e));
            TRY(warn_elsewhere(s, e));
        }
    }
    return 0;
}

/* A parameter whose states are lost; only its number is known. */
static int add_lost(struct scan *s, const struct hf_index_entry *entry, struct err *e)
{
    static const struct shape none = {.nd = 1};
    const struct hf_index_file *file = &s->index.file[entry->file];
    CLEANUP(buf_release) struct buf key = {0};
    struct sink_tensor t = {
        .part = optim_dir, .dtype = DTYPE_U8, .shape = &none, .role = ROLE_OPTIMIZER};

    buf_addf(&key, "state.%s", entry->key);
    if (buf_failed(&key))
        return err_nomem(e);
    t.key = key.data;
    t.key_len = key.len;
    TRY(sink_tensor_begin(s->sink, &t, e));
    if (sink_fault(s->sink, "%s%.200s%s",
                   file->fault ? file->fault : "the index says that it is in ",
                   file->fault ? "" : file->name,
                   file->fault ? "" : ", which does not hold it") < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

static int read_index(struct scan *s, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    const char *name = s->has.optim.name;
    size_t len;

    TRY(sink_hide(s->sink, name, true, e));
    if (listing_read(s->below.listing, name, MAX_INDEX, &text, &len, e) < 0 ||
        hf_index_parse(text, len, s->has.optim.kind->suffix, &s->index, e) < 0)
        return err_wrap(e, "%s", name);
    s->found = calloc(s->index.count + 1, sizeof *s->found);
    return s->found ? 0 : err_nomem(e);
}

/* Its name is the index's with another stem: pytorch_optim_group.PREFIX.bin. */
static int report_groups(struct scan *s, struct err *e)
{
    static const struct torch_report how = {.role = ROLE_OTHER,
                                            .object = "param_groups"};
    static const char stem[] = "pytorch_optim_group", suffix[] = ".bin";
    const struct listing *l = s->below.listing;

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;
        size_t len = strlen(name), n = sizeof suffix - 1;

        if (listing_at(l, i)->st.kind == ENTRY_FILE && len > n &&
            strncmp(name, stem, sizeof stem - 1) == 0 &&
            strcmp(name + len - n, suffix) == 0)
            return torch_file_report(&s->below, s->sink, name, &how, e);
    }
    return 0;
}

static int report_optim(struct scan *s, struct err *e)
{
    bool safetensors = s->has.optim.kind == &kinds[1];

    TRY(read_index(s, e));
    TRY(safetensors ? report_safetensors(s, e) : report_bins(s, e));
    TRY(report_groups(s, e));
    for (size_t i = 0; i < s->index.count; i++)
        if (!s->found[i])
            TRY(add_lost(s, &s->index.entry[i], e));
    return 0;
}

/* ---- a step ---- */

static int enter(struct scan *s, const char *dir, struct err *e)
{
    s->below = *s->c;
    if (store_join(s->c->dir, dir, s->dir, sizeof s->dir) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", dir);
    s->below.dir = s->dir;
    s->below.listing = listing_sub(s->c->listing, dir);
    if (!s->below.listing)
        return err_set(e, ESTALE, "%s is gone", dir);
    TRY(sink_enter(s->sink, "", e));
    TRY(sink_part(s->sink, dir, e));
    return sink_enter(s->sink, dir, e);
}

static int report_states(struct scan *s, struct err *e)
{
    static const struct torch_report scheduler = {
        .role = ROLE_OTHER, .object = scheduler_name, .shown = true};
    CLEANUP(json_freep) struct json *doc = NULL;

    if (listing_find(s->c->listing, scheduler_name))
        TRY(torch_file_report(s->c, s->sink, scheduler_name, &scheduler, e));
    if (!listing_find(s->c->listing, states_name))
        return 0;
    TRY(json_file_object(s->c->listing, states_name, s->sink, &doc, e));
    s->has_step = doc && json_i64(json_get(doc, "step"), &s->step);
    s->has_epoch = doc && json_i64(json_get(doc, "epoch"), &s->epoch);
    return 0;
}

static int report_step(struct scan *s, struct err *e)
{
    TRY(enter(s, s->has.model_dir, e));
    TRY(hf_model_report(&s->has.model, &s->below, s->sink, e));
    TRY(enter(s, optim_dir, e));
    TRY(report_optim(s, e));
    TRY(sink_enter(s->sink, "", e));
    return report_states(s, e);
}

/* ---- the checkpoint as a whole ---- */

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    struct sink_checkpoint about = {.format = "colossalai",
                                    .framework = "Colossal-AI",
                                    .adapter = s->has.model.adapter,
                                    .has_step = s->has_step,
                                    .step = s->step};
    char below[PATH_MAX], path[PATH_MAX];

    if (store_join(s->has.step ? optim_dir : "", s->has.optim.name, below,
                   sizeof below) < 0 ||
        store_join(s->c->dir, below, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", s->has.optim.name);
    about.metadata_file = path;
    buf_addf(&topology, "{\"optimizer_files\": %zu", s->index.nfiles);
    if (s->has_epoch)
        buf_addf(&topology, ", \"epoch\": %" PRId64, s->epoch);
    buf_addc(&topology, '}');
    if (buf_failed(&topology))
        return err_nomem(e);
    about.topology = topology.data;
    return sink_checkpoint(s->sink, &about, e);
}

static int colossalai_scan(const struct scan_context *c, struct sink *sink,
                           struct err *e)
{
    CLEANUP(scan_release) struct scan s = {.c = c, .sink = sink, .below = *c};
    struct err failed = {0};

    if (!look(c->listing, &s.has))
        return err_set(e, ESTALE, "there is no sharded optimizer any more");
    (s.has.step ? report_step : report_optim)(&s, &failed);
    /* The driver of the model has told what it took the checkpoint for. */
    TRY(sink_enter(sink, "", e));
    TRY(tell_checkpoint(&s, e));
    if (failed.code)
        *e = failed;
    return -e->code;
}

const struct format_driver format_colossalai = {
    .name = "colossalai",
    .title = "Colossal-AI: sharded optimizers, and steps of modeling/ and optimizer/",
    .bid = colossalai_bid,
    .scan = colossalai_scan,
};
