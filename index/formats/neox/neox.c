/* SPDX-License-Identifier: MIT */
/* index/formats/neox/neox.c - GPT-NeoX's global_stepN: a file a layer and tensor rank. */
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/vec.h"
#include "index/formats/deepspeed/deepspeed.h"
#include "index/formats/format.h"
#include "index/formats/neox/neox_rules.h"
#include "index/formats/ranks/rank_copies.h"
#include "index/formats/ranks/rank_files.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_walk.h"

enum {
    MAX_MEMORY = 256 << 20, /* names and shapes of one layer of all ranks */
    MAX_RANKS = 4096,
    NAME_LEN = 64,
    MAX_VERSION = 32,
};

/* ---- bids ---- */

static bool is_file(const struct listing_entry *entry)
{
    return entry->st.kind == ENTRY_FILE;
}

/* Files *.yml in configs: GPT-NeoX copies its configuration beside what it saves. */
static bool has_configs(struct listing *l)
{
    const struct listing *configs = listing_sub(l, "configs");

    for (size_t i = 0; configs && i < listing_count(configs); i++) {
        const char *name = listing_at(configs, i)->name;
        size_t len = strlen(name);

        if (len > 4 && strcmp(name + len - 4, ".yml") == 0)
            return true;
    }
    return false;
}

/* What the names of a directory tell. */
struct found {
    const char *layer, *rank; /* the first of each kind, of the ranks only past 0 */
    bool cut;                 /* there are several tensor ranks */
    bool optimizer;           /* there are files of DeepSpeed's optimizer */
};

static bool ends_in(const char *name, const char *end)
{
    size_t len = strlen(name), n = strlen(end);

    return len > n && strcmp(name + len - n, end) == 0;
}

static void look(struct listing *l, struct found *out)
{
    uint32_t layer, rank;
    int digits;

    *out = (struct found){0};
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (!is_file(entry))
            continue;
        out->optimizer |= ends_in(entry->name, "_optim_states.pt");
        if (neox_layer_name(entry->name, &layer, &rank, &digits)) {
            out->layer = out->layer ? out->layer : entry->name;
            out->cut |= rank > 0;
        } else if (neox_rank_name(entry->name, &rank) && rank > 0) {
            out->rank = out->rank ? out->rank : entry->name;
        }
    }
}

/*
 * One tensor rank is DeepSpeed's as it is, who knows its optimizer; so are several models
 * of ranks beside which GPT-NeoX has left no configuration.
 */
static void neox_bid(struct listing *l, struct bid *out)
{
    struct found f;

    *out = (struct bid){0};
    look(l, &f);
    if (f.layer) {
        out->score = f.cut || !f.optimizer ? 93 : 60;
        snprintf(out->reason, sizeof out->reason, "%.60s: a layer of a pipeline",
                 f.layer);
    } else if (f.rank && has_configs(l)) {
        out->score = 91;
        snprintf(out->reason, sizeof out->reason, "%.60s, and configs/*.yml", f.rank);
    }
}

/* ---- the scan ---- */

/* One layer's file of one rank. */
struct layer_file {
    uint32_t layer, rank;
    int digits; /* of the layer's number, as it is written */
};

struct neox {
    const struct scan_context *c;
    struct sink *sink;
    struct arena *arena;      /* of what is merged now */
    struct layer_file *layer; /* by layer and rank */
    size_t nlayers, cap;
    uint32_t tensor; /* ranks */
    uint32_t files;
    struct rank_part *part;
    /* What mp_rank_00 tells; 0: nothing. */
    uint64_t data, tensor_told, layers;
    char version[MAX_VERSION];
    int64_t step;
    bool has_step;
    enum neox_dialect dialect; /* of what is merged now */
    bool megatron;
    uint64_t transformer_layers; /* that were found */
    uint64_t unknown;
    char first_unknown[128];
};

static void neox_release(struct neox *n)
{
    free(n->layer);
    free(n->part);
    arena_free(n->arena);
}

/* ---- what the files tell ---- */

static uint64_t number(const struct pv *dict, const char *name)
{
    struct pv v;
    uint64_t n;

    return pv_dict_get(dict, name, &v) && pv_u64(&v, &n) ? n : 0;
}

/*
 * GPT-NeoX's args are a dict, Megatron-DeepSpeed's a namespace. mp_world_size tells nothing:
 * DeepSpeed counts the stages of a pipeline with it (runtime/pipe/topology.py,
 * get_model_parallel_world_size()).
 */
static void learn_args(struct neox *n, const struct pv *args)
{
    struct pv dict, state = args->kind == PV_OBJECT ? pv_state(args) : *args;

    if (torch_mapping(args, &dict) && dict.kind == PV_DICT) {
        n->layers = number(&dict, "num_layers");
        n->tensor_told = number(&dict, "model_parallel_size");
    } else if (state.kind == PV_DICT) {
        n->tensor_told = number(&state, "tensor_model_parallel_size");
    }
}

static void learn(struct neox *n, const struct pv *root)
{
    struct pv items, v;
    const char *text;
    size_t len;

    if (!torch_mapping(root, &items) || items.kind != PV_DICT)
        return;
    n->data = number(&items, "dp_world_size");
    if (pv_dict_get(&items, "global_steps", &v) && v.kind == PV_INT && v.i >= 0) {
        n->step = v.i;
        n->has_step = true;
    }
    if (pv_dict_get(&items, "ds_version", &v) && v.kind == PV_STR) {
        text = pv_bytes(&v, &len);
        snprintf(n->version, sizeof n->version, "%.*s", (int)MIN(len, (size_t)31),
                 text);
    }
    if (pv_dict_get(&items, "args", &v))
        learn_args(n, &v);
}

static const char *first_rank_file(const struct listing *l)
{
    uint32_t rank;

    for (size_t i = 0; i < listing_count(l); i++)
        if (is_file(listing_at(l, i)) && neox_rank_name(listing_at(l, i)->name, &rank))
            return listing_at(l, i)->name;
    return NULL;
}

/* Damage of it is told where it is reported. */
static int learn_first(struct neox *n, struct err *e)
{
    CLEANUP(torch_file_close)
    struct torch_file f = {.path = first_rank_file(n->c->listing)};
    struct err why = {0};
    struct pv root;

    if (!f.path)
        return 0;
    if (torch_file_register(n->sink, &f, &why) == 0 &&
        torch_file_load(n->c, &f, &why) == 0) {
        root = torch_zip_root(f.zip);
        learn(n, &root);
    }
    if (!torch_file_is_damaged(why.code)) {
        return err_copy(e, &why);
    }
    return 0;
}

/* ---- layers ---- */

static int compare_layers(const void *a, const void *b)
{
    const struct layer_file *x = a, *y = b;

    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

static int add_layer(struct neox *n, const struct layer_file *x, struct err *e)
{
    if (!VEC_ROOM(n->layer, n->nlayers, n->cap))
        return err_nomem(e);
    n->layer[n->nlayers++] = *x;
    n->tensor = MAX(n->tensor, x->rank + 1);
    return 0;
}

static int find_layers(struct neox *n, struct err *e)
{
    const struct listing *l = n->c->listing;

    for (size_t i = 0; i < listing_count(l); i++) {
        struct layer_file x;

        if (is_file(listing_at(l, i)) &&
            neox_layer_name(listing_at(l, i)->name, &x.layer, &x.rank, &x.digits))
            TRY(add_layer(n, &x, e));
    }
    if (n->nlayers > 0)
        qsort(n->layer, n->nlayers, sizeof *n->layer, compare_layers);
    for (size_t i = 1; i < n->nlayers; i++)
        if (compare_layers(&n->layer[i - 1], &n->layer[i]) == 0)
            return err_set(e, EBADMSG,
                           "layer %" PRIu32 " has two files of rank %" PRIu32,
                           n->layer[i].layer, n->layer[i].rank);
    return 0;
}

/* Both of the model's ranks and of the layers' the larger; but for a few lost files. */
static int find_ranks(struct neox *n, struct err *e)
{
    uint32_t rank;

    for (size_t i = 0; n->nlayers == 0 && i < listing_count(n->c->listing); i++)
        if (neox_rank_name(listing_at(n->c->listing, i)->name, &rank))
            n->tensor = MAX(n->tensor, rank + 1);
    if (n->tensor == 0)
        return err_set(e, ESTALE, "no files of layers any more");
    if (n->nlayers > 0 && n->tensor_told > 0 && n->tensor_told < n->tensor) {
        err_set(e, EBADMSG,
                "there are layers of %" PRIu32
                " tensor ranks, and args tell of %" PRIu64,
                n->tensor, n->tensor_told);
        return err_hint(e, "files of an older save are there: move them away");
    }
    if (n->nlayers > 0 && n->tensor_told > n->tensor && n->tensor_told <= MAX_RANKS)
        n->tensor = (uint32_t)n->tensor_told;
    if (n->tensor > MAX_RANKS)
        return err_set(e, EFBIG, "%" PRIu32 " tensor ranks, more than %d", n->tensor,
                       MAX_RANKS);
    n->part = calloc(n->tensor, sizeof *n->part);
    return n->part ? 0 : err_nomem(e);
}

/* ---- tensors ---- */

/* One set of files that is merged: a layer, or the whole model. */
struct set {
    struct neox *n;
    struct rank_file *file; /* by rank */
    char (*name)[NAME_LEN];
    const char *prefix; /* of keys */
    const char *entry;  /* of the files' dict; NULL: all of it */
    size_t wrapper;     /* bytes of the prefix that the saver put on */
};

static int set_begin(struct set *s, struct err *e)
{
    s->file = rank_files_new(s->n->tensor);
    s->name = calloc(s->n->tensor, sizeof *s->name);
    s->n->arena = arena_new(MAX_MEMORY);
    if (!s->file || !s->name || !s->n->arena)
        return err_nomem(e);
    for (uint32_t i = 0; i < s->n->tensor; i++)
        s->file[i].file.path = s->name[i];
    return 0;
}

static void set_release(struct set *s)
{
    if (s->file)
        rank_files_free(s->file, s->n->tensor);
    free(s->name);
    arena_free(steal(&s->n->arena));
}

/* rank_file_fn */
static int collect(void *user, size_t i UNUSED, struct rank_file *f, struct err *e)
{
    struct set *s = user;
    const char *const skip[] = {s->entry, NULL};
    struct pv root = torch_zip_root(f->file.zip), items, v = root;

    s->n->files++;
    if (!torch_mapping(&root, &items) || (s->entry && items.kind != PV_DICT))
        return err_set(e, EBADMSG, "it holds no dict");
    if (s->entry && !pv_dict_get(&items, s->entry, &v))
        return err_set(e, EBADMSG, "it holds no %s", s->entry);
    TRY(rank_tensors_collect(f->file.zip, &v, s->n->arena, &f->tensors, e));
    return rank_file_objects(s->n->sink, f, s->entry ? skip : NULL, e);
}

static int report_raw(struct set *s, const struct rank_tensor *x, struct err *e)
{
    struct neox *n = s->n;

    if (n->unknown++ == 0)
        snprintf(n->first_unknown, sizeof n->first_unknown, "%s%.*s", s->prefix,
                 (int)MIN(x->len, (size_t)80), x->name);
    for (uint32_t i = 0; i < n->tensor; i++)
        if (n->part[i].x)
            TRY(rank_file_raw(n->sink, &s->file[i], n->part[i].x, e));
    return 0;
}

static int report_tensor(struct set *s, const struct rank_tensor *x, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    struct neox *n = s->n;
    enum rank_rule rule = neox_rule(x, s->file, n->tensor, n->dialect);
    struct sink_tensor t = {.role = ROLE_MODEL, .wrapper = s->wrapper};

    for (uint32_t i = 0; i < n->tensor; i++)
        n->part[i] = rank_file_part(&s->file[i], x->name, x->len);
    if (n->tensor > 1 && rule == RANK_UNKNOWN)
        return report_raw(s, x, e);
    buf_adds(&key, s->prefix);
    buf_add(&key, x->name, x->len);
    if (buf_failed(&key))
        return err_nomem(e);
    t.key = key.data;
    t.key_len = key.len;
    return rank_merge(n->sink, rule, n->part, n->tensor, &t, e);
}

static void find_dialect(struct set *s)
{
    bool found = false;

    for (uint32_t i = 0; i < s->n->tensor; i++) {
        const struct rank_tensors *t = &s->file[i].tensors;

        for (size_t k = 0; k < t->count; k++) {
            enum neox_dialect d = neox_dialect(t->tensor[k].name, t->tensor[k].len);

            if (d == NEOX_NEITHER)
                continue;
            found = true;
            s->n->dialect = d;
            s->n->megatron = d == NEOX_MEGATRON;
        }
    }
    s->n->transformer_layers += found;
}

static int report_set(struct set *s, struct err *e)
{
    TRY(rank_files_load(s->n->c, s->n->sink, s->file, s->n->tensor, collect, s, e));
    find_dialect(s);
    for (uint32_t i = 0; i < s->n->tensor; i++) {
        const struct rank_tensors *t = &s->file[i].tensors;

        for (size_t k = 0; k < t->count; k++)
            if (rank_files_lack(s->file, i, &t->tensor[k]))
                TRY(report_tensor(s, &t->tensor[k], e));
    }
    return 0;
}

static int report_layer(struct neox *n, const struct layer_file *x, struct err *e)
{
    char prefix[NAME_LEN];
    CLEANUP(set_release) struct set s = {.n = n, .prefix = prefix};

    snprintf(prefix, sizeof prefix, "layer_%0*" PRIu32 "/", x->digits, x->layer);
    n->dialect = NEOX_NEITHER;
    TRY(set_begin(&s, e));
    for (uint32_t i = 0; i < n->tensor; i++)
        snprintf(s.name[i], NAME_LEN,
                 "layer_%0*" PRIu32 "-model_%02" PRIu32 "-model_states.pt", x->digits,
                 x->layer, i);
    return report_set(&s, e);
}

/* Without a pipeline: the module is in the files of the ranks. */
static int report_module(struct neox *n, struct err *e)
{
    CLEANUP(set_release)
    struct set s = {.n = n, .prefix = "module.", .entry = "module", .wrapper = 7};

    TRY(set_begin(&s, e));
    for (uint32_t i = 0; i < n->tensor; i++)
        snprintf(s.name[i], NAME_LEN, "mp_rank_%02" PRIu32 "_model_states.pt", i);
    return report_set(&s, e);
}

static int report_layers(struct neox *n, struct err *e)
{
    for (size_t i = 0; i < n->nlayers; i++)
        if (i == 0 || n->layer[i].layer != n->layer[i - 1].layer)
            TRY(report_layer(n, &n->layer[i], e));
    if (n->layers > n->transformer_layers && n->transformer_layers > 0 &&
        sink_warning(n->sink, "missing-layers",
                     "args tell of %" PRIu64 " layers with attention, the files have "
                     "%" PRIu64,
                     n->layers, n->transformer_layers) < 0)
        return err_nomem(e);
    return 0;
}

/* ---- what is no model ---- */

/* A rank's part of the optimizer, whose flat buffers are cut by no rule of these files. */
static int report_optimizer(struct neox *n, const char *name, struct err *e)
{
    CLEANUP(buf_release) struct buf object = {0};
    struct torch_report how = {
        .prefix = "", .part = name, .role = ROLE_OPTIMIZER, .entries = true};

    buf_addf(&object, "%s:", name);
    if (buf_failed(&object))
        return err_nomem(e);
    how.object = object.data;
    return torch_file_report(n->c, n->sink, name, &how, e);
}

/* deepspeed_how.rule: names are those of layer_LL, with "LL." before. */
static enum rank_rule optimizer_rule(const struct rank_tensor *x,
                                     const struct rank_file *files, uint32_t n)
{
    enum neox_dialect dialect = NEOX_NEITHER;
    struct rank_tensor inner = *x;

    for (size_t i = 0; i < files->tensors.count && dialect == NEOX_NEITHER; i++)
        dialect =
            neox_dialect(files->tensors.tensor[i].name, files->tensors.tensor[i].len);
    /* The layer of the last norm alone. */
    while (inner.len > 0 && isdigit((unsigned char)*inner.name)) {
        inner.name++;
        inner.len--;
    }
    if (inner.len > 0 && inner.len < x->len && *inner.name == '.' &&
        !memchr(inner.name + 1, '.', inner.len - 1)) {
        inner.name++;
        inner.len--;
        return neox_rule(&inner, files, n, dialect);
    }
    return neox_rule(x, files, n, dialect);
}

/*
 * The optimizer under the parameters' names: 1. 0: its files do not tell, or not all are
 * there; then each is shown as it is.
 */
static int join_optimizer(struct neox *n, struct err *e)
{
    static const struct deepspeed_how how = {.weights = ROLE_OPTIMIZER,
                                             .rule = optimizer_rule};
    struct deepspeed_told told;
    struct err why = {0};

    if (n->nlayers == 0 || deepspeed_report(n->c, n->sink, &how, &told, &why) == 0)
        return n->nlayers > 0;
    if (!torch_file_is_damaged(why.code)) {
        return err_copy(e, &why);
    }
    if (sink_warning(n->sink, "optimizer", "%s", why.text) < 0)
        return err_nomem(e);
    return 0;
}

static int report_others(struct neox *n, struct err *e)
{
    static const struct torch_report state = {.role = ROLE_OTHER};
    /* DeepSpeed's MoE (GPT-NeoX of 2024): names are the whole model's. */
    static const struct torch_report expert = {.prefix = "", .role = ROLE_MODEL};
    const struct listing *l = n->c->listing;
    uint64_t optimizer = 0, experts = 0;
    struct found found;
    uint32_t rank;
    int joined;

    look(n->c->listing, &found);
    joined = found.optimizer ? join_optimizer(n, e) : 1;
    if (joined < 0)
        return joined;
    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;
        int r = 0;

        if (!is_file(listing_at(l, i)))
            continue;
        if (ends_in(name, "_optim_states.pt") && joined) {
            continue;
        } else if (ends_in(name, "_optim_states.pt")) {
            optimizer++;
            r = report_optimizer(n, name, e);
        } else if (n->nlayers > 0 && neox_rank_name(name, &rank)) {
            r = torch_file_report(n->c, n->sink, name, &state, e);
        } else if (strstr(name, "expert_") && ends_in(name, "_model_states.pt")) {
            experts += n->tensor > 1;
            r = torch_file_report(n->c, n->sink, name, n->tensor > 1 ? &state : &expert,
                                  e);
        }
        if (r < 0)
            return r;
    }
    if ((optimizer > 0 && sink_warning(n->sink, "optimizer-not-merged",
                                       "%" PRIu64 " files of the ranks' optimizers are "
                                       "shown as they are, not merged",
                                       optimizer) < 0) ||
        (experts > 0 &&
         sink_warning(n->sink, "experts",
                      "%" PRIu64 " files of experts do not tell whether "
                      "tensor ranks have cut them: each is shown as it is",
                      experts) < 0))
        return err_nomem(e);
    return 0;
}

static int report(struct neox *n, struct err *e)
{
    TRY(learn_first(n, e));
    TRY(find_layers(n, e));
    TRY(find_ranks(n, e));
    TRY(n->nlayers > 0 ? report_layers(n, e) : report_module(n, e));
    TRY(report_others(n, e));
    if (n->files == 0)
        return err_set(e, EBADMSG, "no file of the model can be read");
    if (n->unknown > 0 &&
        sink_warning(
            n->sink, "unknown-cut",
            "%" PRIu64 " tensors are cut by tensor parallelism in ways that "
            "their names do not tell (%s): each rank's piece is shown as it is",
            n->unknown, n->first_unknown) < 0)
        return err_nomem(e);
    return 0;
}

static int tell_checkpoint(const struct neox *n, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    const char *main = first_rank_file(n->c->listing);
    char path[PATH_MAX];
    struct sink_checkpoint about = {.format = "neox-pipeline",
                                    .framework = "GPT-NeoX (DeepSpeed)",
                                    .version = n->version[0] ? n->version : NULL,
                                    .has_step = n->has_step,
                                    .step = n->step};

    if (n->megatron)
        about.framework = "Megatron-DeepSpeed";
    buf_addf(&topology, "{\"files\": %" PRIu32 ", \"tensor_parallel\": %" PRIu32,
             n->files, n->tensor);
    if (n->data > 0)
        buf_addf(&topology, ", \"data_parallel\": %" PRIu64, n->data);
    if (n->layers > 0)
        buf_addf(&topology, ", \"layers\": %" PRIu64, n->layers);
    buf_addf(&topology, ", \"pipeline\": %s}", n->nlayers > 0 ? "true" : "false");
    if (buf_failed(&topology))
        return err_nomem(e);
    about.topology = topology.data;
    if (main && store_join(n->c->dir, main, path, sizeof path) == 0)
        about.metadata_file = path;
    if (!about.has_step)
        about.has_step = step_of_name(listing_name(n->c->listing), &about.step);
    return sink_checkpoint(n->sink, &about, e);
}

static int neox_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    CLEANUP(neox_release) struct neox n = {.c = c, .sink = sink};
    struct err failed = {0};
    int r = report(&n, &failed);

    if (tell_checkpoint(&n, e) == 0 && r < 0)
        *e = failed;
    return -e->code;
}

static const struct chunk_codec *const neox_codecs[] = {
    &codec_zip_deflate, &codec_copies, &codec_sum, NULL};

const struct format_driver format_neox = {
    .name = "neox",
    .title = "GPT-NeoX: layer_LL-model_TT-model_states.pt of a global_stepN",
    .bid = neox_bid,
    .scan = neox_scan,
    .codecs = neox_codecs,
};
