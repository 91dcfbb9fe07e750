/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_file.c - torch.save files as checkpoints: alone, or as HF models. */
#include "index/formats/torch/torch_file.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/hf/choose.h"
#include "index/formats/hf/hf_model.h"
#include "index/formats/torch/torch_origin.h"
#include "index/formats/torch/torch_shards.h"
#include "index/names.h"

enum { INDEX_HEAD = 4096 }; /* "metadata" is small and stands before weight_map */

/* ---- bids ---- */

static void PRINTF(3, 4) say(struct bid *out, int score, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    out->score = score;
    vsnprintf(out->reason, sizeof out->reason, fmt, ap);
    va_end(ap);
}

static enum torch_kind kind_of(struct listing *l, const char *name)
{
    unsigned char head[TORCH_HEAD];
    size_t got = 0;

    if (listing_peek(l, name, head, sizeof head, &got) < 0)
        return TORCH_NOT;
    return torch_sniff(head, got);
}

static const char *kind_name(enum torch_kind kind)
{
    switch (kind) {
    case TORCH_ZIP:
        return "a zip of torch.save";
    case TORCH_MAYBE:
        return "a zip";
    case TORCH_LEGACY:
        return "torch.save's legacy format";
    case TORCH_TAR:
        return "the tar format of PyTorch before 0.1.10, which is refused";
    case TORCH_NOT:
        break;
    }
    return "nothing that torch.save writes";
}

static void bid_index(struct listing *l, const struct torch_layout *x, struct bid *out)
{
    const char *name = x->main;
    char head[INDEX_HEAD];
    size_t got = 0;

    if (x->present == 0)
        say(out, 26, "%s, but no .bin file", name);
    else if (listing_peek(l, name, head, sizeof head, &got) == 0 &&
             memmem(head, got, "\"weight_map\"", 12))
        say(out, 78, "%s with a weight_map", name);
    else
        say(out, 43, "%s by its name", name);
}

static void bid_model(struct listing *l, const struct torch_layout *x, struct bid *out)
{
    enum torch_kind kind = kind_of(l, x->main);
    bool config = listing_find(l, "config.json");
    int score = config || x->kind == TORCH_LAYOUT_ADAPTER ? 73 : 58;

    if (x->kind == TORCH_LAYOUT_NUMBERED)
        score = x->present == x->total ? 53 : 38;
    if (kind == TORCH_MAYBE || kind == TORCH_TAR)
        score = MIN(score, 45);
    if (kind == TORCH_NOT)
        score = 25;
    say(out, score, "%s is %s%s", x->main, kind_name(kind),
        config ? ", with config.json" : "");
}

/*
 * An adapter is no copy of the model. Where files of both kinds may be the model, what
 * choose.h decides is; those of the other kind stay side files.
 */
static void yield_to_safetensors(const struct hf_choice *c, struct bid *out)
{
    const struct torch_layout *x = &c->torch;

    if (c->best && c->best->family == HF_TORCH) {
        if (c->safetensors.kind == SAFETENSORS_ADAPTER)
            out->score += out->score >= 50 ? 4 : 0;
    } else if (c->best || c->safetensors.kind == SAFETENSORS_ADAPTER ||
               c->safetensors.kind == SAFETENSORS_PIECES) {
        say(out, 15, "%s, but there is %s as well", x->main, c->safetensors.main);
    }
}

static void tf_bid(struct listing *l, struct bid *out)
{
    const struct hf_choice *c = hf_choose(l);
    const struct torch_layout *x = &c->torch;

    if (x->kind == TORCH_LAYOUT_NONE)
        return;
    if (x->kind == TORCH_LAYOUT_INDEXED)
        bid_index(l, x, out);
    else
        bid_model(l, x, out);
    yield_to_safetensors(c, out);
}

static bool has_suffix(const char *name, const char *const *suffix, size_t n)
{
    size_t len = strlen(name);

    for (size_t i = 0; i < n; i++) {
        size_t k = strlen(suffix[i]);

        if (len > k && strcasecmp(name + len - k, suffix[i]) == 0)
            return true;
    }
    return false;
}

/* verl's dataloader, beside the folders of the models of one step. */
static bool is_verl_data(const struct listing *l, const char *name)
{
    static const char *const models[] = {"actor", "critic"};

    for (size_t i = 0; strcmp(name, "data.pt") == 0 && i < ARRAY_SIZE(models); i++) {
        const struct listing_entry *entry = listing_find(l, models[i]);

        if (entry && entry->st.kind == ENTRY_DIR)
            return true;
    }
    return false;
}

/*
 * Trackers and state that trainers put beside a model or a run's steps: no model by itself,
 * or each run's root would be a checkpoint; nor is what lies beside the shards of an
 * unfinished DCP save.
 */
static bool is_state_of_run(const struct listing *l, const char *name)
{
    static const char dataloader[] = "train_dataloader_dprank";
    static const char *const words[] = {
        "latest_train_state", "train_state",      "training_args", "rng",
        "random_states",      "scheduler",        "scaler",        "sampler",
        "dl_state_dict",      "custom_checkpoint"};

    for (size_t i = 0; i < ARRAY_SIZE(words); i++) {
        size_t n = strlen(words[i]);

        if (strncmp(name, words[i], n) == 0 && !isalpha((unsigned char)name[n]))
            return true;
    }
    return strncmp(name, dataloader, sizeof dataloader - 1) == 0 ||
           is_verl_data(l, name) || listing_find(l, "__0_0.distcp");
}

/* A file counts by what it holds, and only where its name says that it may be one. */
static void tf_bid_file(struct listing *l, const char *name, struct bid *out)
{
    static const char *const usual[] = {".pt", ".pth",    ".ckpt",
                                        ".th", ".pt.tar", ".pth.tar"};
    static const char *const others[] = {
        ".bin", ".model", ".pkl",   ".params", ".mdl", ".jit",     ".ts",
        ".ptl", ".torch", ".chkpt", ".pyth",   ".ptc", ".weights", ".state"};
    bool is_usual = has_suffix(name, usual, ARRAY_SIZE(usual));
    enum torch_kind kind;

    if ((!is_usual && !has_suffix(name, others, ARRAY_SIZE(others))) ||
        is_state_of_run(l, name))
        return;
    kind = kind_of(l, name);
    if (kind == TORCH_ZIP || kind == TORCH_LEGACY)
        say(out, 50, "%s", kind_name(kind));
    else if (is_usual && kind != TORCH_NOT)
        say(out, 20, "%s by its first bytes", kind_name(kind));
}

static void tf_bid_content(struct listing *l, const char *name, struct bid *out)
{
    enum torch_kind kind = kind_of(l, name);

    if (kind == TORCH_ZIP || kind == TORCH_LEGACY)
        say(out, 50, "%s by its first bytes", kind_name(kind));
}

/* ---- one file ---- */

struct about {
    const char *format;
    size_t files;
    bool adapter;
    struct torch_origin origin;
};

/* A file that is called optimizer.pt holds nothing else, whatever its keys are. */
static int role_of_file(const char *name)
{
    return role_of(name, "", 0) == ROLE_OPTIMIZER ? ROLE_OPTIMIZER : -1;
}

/* torch.jit.freeze makes constants of a module's weights: then hardly anything else is there. */
static int warn_constants(struct sink *sink, const struct torch_file *f, struct err *e)
{
    uint64_t n = torch_zip_constants(f->zip);

    if (n > 0 && sink_warning(sink, "constants",
                              "%s holds %" PRIu64 " tensors that are constants of its "
                              "code (as torch.jit.freeze makes them of weights): they "
                              "have no names, and are not shown",
                              f->path, n) < 0)
        return err_nomem(e);
    return 0;
}

static int scan_file(const struct scan_context *c, struct sink *sink, const char *name,
                     bool model, struct about *about, struct err *e)
{
    CLEANUP(torch_file_close) struct torch_file f = {.path = name};
    const struct torch_report how = {
        .prefix = "",
        .role = model ? ROLE_MODEL : role_of_file(name),
        .entries = true,
        .wrappers = !model,
        .strict = true,
    };

    about->files = 1;
    if (torch_file_register(sink, &f, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", name) : -e->code;
    TRY(torch_file_load(c, &f, e));
    if (torch_zip_is_script(f.zip)) {
        about->format = "torchscript";
        TRY(warn_constants(sink, &f, e));
    }
    torch_origin(f.zip, &about->origin);
    if (about->origin.format)
        about->format = about->origin.format;
    return torch_file_report_loaded(sink, &f, &how, e);
}

/* ---- the checkpoint ---- */

static int topology_of(const struct about *about, struct buf *out, struct err *e)
{
    buf_addf(out, "{\"files\": %zu", about->files);
    if (about->origin.ranks > 0)
        buf_addf(out, ", \"ranks\": %" PRId64, about->origin.ranks);
    if (about->origin.has_epoch)
        buf_addf(out, ", \"epoch\": %" PRId64, about->origin.epoch);
    buf_addc(out, '}');
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int tell_checkpoint(const struct scan_context *c, struct sink *sink,
                           const char *main, const struct about *about, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    const struct torch_origin *from = &about->origin;
    struct sink_checkpoint out = {.format = about->format,
                                  .framework =
                                      from->framework ? from->framework : "PyTorch",
                                  .version = from->version[0] ? from->version : NULL,
                                  .adapter = about->adapter,
                                  .has_step = from->has_step,
                                  .step = from->step};
    char path[PATH_MAX];

    TRY(topology_of(about, &topology, e));
    if (store_join(c->dir, main, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", c->dir, main);
    out.topology = topology.data;
    out.metadata_file = path;
    return sink_checkpoint(sink, &out, e);
}

static int scan_layout(const struct scan_context *c, struct sink *sink,
                       const struct torch_layout *x, struct about *about, struct err *e)
{
    switch (x->kind) {
    case TORCH_LAYOUT_INDEXED:
    case TORCH_LAYOUT_NUMBERED:
        return torch_shards_scan(c, sink, x, &about->files, e);
    case TORCH_LAYOUT_SINGLE:
    case TORCH_LAYOUT_ADAPTER:
    case TORCH_LAYOUT_NONE:
        break;
    }
    return scan_file(c, sink, x->main, true, about, e);
}

/* Hugging Face's names without a config.json are any torch.save file's. */
static const char *format_of(const struct torch_layout *x, const struct listing *l)
{
    if (x->kind == TORCH_LAYOUT_ADAPTER)
        return "hf-peft";
    if (x->kind == TORCH_LAYOUT_INDEXED || listing_find(l, "config.json"))
        return "hf-bin";
    return "torch-file";
}

static int tf_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct about about = {.format = "torch-file"};
    struct torch_layout layout = {.main = c->file};
    int rc;

    if (!c->file) {
        layout = hf_choose(c->listing)->torch;
        about.format = format_of(&layout, c->listing);
        about.adapter = layout.kind == TORCH_LAYOUT_ADAPTER;
    }
    if (!layout.main)
        return err_set(e, ESTALE, "no torch.save files any more");
    /* First without what the file tells: also a scan that fails has a format. */
    TRY(tell_checkpoint(c, sink, layout.main, &about, e));
    if (!c->among)
        TRY(hf_choice_report(c->listing, sink, e));
    if (c->file)
        rc = scan_file(c, sink, c->file, false, &about, e);
    else
        rc = scan_layout(c, sink, &layout, &about, e);
    sink_rule_end(sink);
    if (rc == 0 && layout.beside)
        rc = hf_beside_report(layout.beside, c, sink, e);
    if (rc == 0 && !c->file)
        rc = hf_trained_beside_report(c, sink, e);
    return rc < 0 ? rc : tell_checkpoint(c, sink, layout.main, &about, e);
}

static const struct chunk_codec *const tf_codecs[] = {&codec_zip_deflate, NULL};

static const struct format_writer *const torch_writers[] = {&writer_pt, NULL};

const struct format_driver format_torch_file = {
    .name = "torch_file",
    .title = "PyTorch torch.save: .pt/.pth/.ckpt files, TorchScript, pytorch_model.bin",
    .bid = tf_bid,
    .bid_file = tf_bid_file,
    .bid_content = tf_bid_content,
    .scan = tf_scan,
    .codecs = tf_codecs,
    .writers = torch_writers,
};
