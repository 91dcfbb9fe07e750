/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_unsharded.c - full copies that OLMo and OLMo-core made of checkpoints. */
#include "index/formats/format.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/olmo/olmo_files.h"
#include "index/formats/olmo/olmo_key.h"
#include "index/formats/olmo/olmo_part.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_file.h"

enum { HEAD = 4096 };

static const char MODEL[] = "model";
static const char OPTIM[] = "optim";
static const char CONFIG[] = "config.yaml"; /* classic OLMo writes it last */
static const char UNSHARDED[] = "-unsharded";

/* What a directory is. */
enum kind {
    KIND_NONE,
    KIND_SETS,       /* OLMo-core: model/ (and optim/) with chunks or single tensors */
    KIND_SET,        /* one such folder by itself */
    KIND_PAIR,       /* OLMo-core: model.pt and a flat optim.pt */
    KIND_CLASSIC_PT, /* step1000-unsharded: model.pt, optim.pt, train.pt */
    KIND_CLASSIC_ST, /* the same as safetensors with encoded keys */
};

struct layout {
    enum kind kind;
    struct olmo_set model, optim; /* KIND_SETS, KIND_SET */
};

/* ---- what it is ---- */

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

static bool ends_in(const char *name, const char *suffix)
{
    size_t len = strlen(name), n = strlen(suffix);

    return len > n && strcmp(name + len - n, suffix) == 0;
}

static size_t head_of(struct listing *l, const char *name, char head[HEAD])
{
    size_t got = 0;

    if (!has_file(l, name) || listing_peek(l, name, head, HEAD, &got) < 0)
        return 0;
    return got;
}

static bool is_torch(struct listing *l, const char *name)
{
    char head[HEAD];
    enum torch_kind kind = torch_sniff(head, head_of(l, name, head));

    return kind == TORCH_ZIP || kind == TORCH_LEGACY;
}

static bool head_has(struct listing *l, const char *name, const char *text)
{
    char head[HEAD];
    size_t got = head_of(l, name, head);

    return got > 0 && memmem(head, got, text, strlen(text));
}

/* Flat keys, as no optimizer of torch itself has them. */
static bool is_flat_optim(struct listing *l)
{
    return is_torch(l, "optim.pt") && (head_has(l, "optim.pt", "state.") ||
                                       head_has(l, "optim.pt", "param_groups."));
}

static bool is_encoded(struct listing *l)
{
    CLEANUP(buf_release) struct buf path = {0};
    struct err ignored = {0};
    char head[HEAD];
    const char *key;
    bool pickled;
    size_t n;

    key = olmo_first_key(head, head_of(l, "model.safetensors", head), &n);
    return key && olmo_key_decode(key, n, &path, &pickled, &ignored) == 0;
}

static bool is_classic(struct listing *l)
{
    bool trainer = has_file(l, "train.pt") || has_file(l, "other.pt");

    if (!is_torch(l, "model.pt") || (!trainer && !has_file(l, "optim.pt")))
        return false;
    return (trainer && has_file(l, CONFIG)) || ends_in(listing_name(l), UNSHARDED);
}

/* A folder by itself. Chunks do not tell what they are of, and others have chunks too. */
static bool find_alone(struct listing *l, const char *root, struct olmo_set *out)
{
    olmo_set_find(l, root, out);
    if (out->kind == OLMO_SET_CHUNKS && strcmp(listing_name(l), root) != 0)
        out->kind = OLMO_SET_NONE;
    return out->kind != OLMO_SET_NONE;
}

static enum kind kind_of(struct listing *l, struct layout *x)
{
    if (is_encoded(l))
        return KIND_CLASSIC_ST;
    if (is_torch(l, "model.pt") && is_flat_optim(l))
        return KIND_PAIR;
    if (is_classic(l))
        return KIND_CLASSIC_PT;
    olmo_set_find(listing_sub(l, MODEL), MODEL, &x->model);
    olmo_set_find(listing_sub(l, OPTIM), OPTIM, &x->optim);
    if (x->model.kind != OLMO_SET_NONE)
        return KIND_SETS;
    x->optim.kind = OLMO_SET_NONE;
    return find_alone(l, MODEL, &x->model) || find_alone(l, OPTIM, &x->optim)
               ? KIND_SET
               : KIND_NONE;
}

static void layout_of(struct listing *l, struct layout *x)
{
    *x = (struct layout){0};
    x->kind = kind_of(l, x);
}

static void unsharded_bid(struct listing *l, struct bid *out)
{
    static const struct {
        int score;
        const char *reason;
    } bids[] = {
        [KIND_SETS] = {88,
                       "model/ holds the chunks or tensors of OLMo-core's unsharding"},
        [KIND_SET] = {75,
                      "chunks or single tensors as OLMo-core's unsharding calls them"},
        [KIND_PAIR] = {85, "model.pt and optim.pt with OLMo-core's flat keys"},
        [KIND_CLASSIC_PT] = {80, "model.pt with the files of OLMo's trainer"},
        [KIND_CLASSIC_ST] = {90, "model.safetensors has OLMo's keys, pickled paths"},
    };
    struct layout x;

    *out = (struct bid){0};
    layout_of(l, &x);
    if (x.kind == KIND_NONE)
        return;
    out->score = bids[x.kind].score;
    snprintf(out->reason, sizeof out->reason, "%s", bids[x.kind].reason);
}

/* ---- the scan ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct layout layout;
    uint64_t files;
    char metadata[PATH_MAX];
};

/* The optimizer's files are no reason to hide the model. */
static int take_told(struct scan *s, int rc, const struct olmo_files_told *told,
                     bool model, const struct err *why, struct err *e)
{
    s->files += told->files;
    if (model || !s->metadata[0])
        memcpy(s->metadata, told->metadata, sizeof s->metadata);
    if (rc == 0)
        return 0;
    if (!model && (why->code == EBADMSG || why->code == ENOTSUP || why->code == EFBIG))
        return sink_warning(s->sink, "damaged-part", "%s", why->text) < 0 ? err_nomem(e)
                                                                          : 0;
    return err_copy(e, why);
}

static int add_set(struct scan *s, const char *dir, const char *root,
                   const struct olmo_set *set, struct err *e)
{
    char prefix[16];
    bool model = strcmp(root, MODEL) == 0;
    const struct olmo_files_how how = {.dir = dir,
                                       .part = model || !dir[0] ? NULL : dir,
                                       .root = prefix,
                                       .role = model ? ROLE_MODEL : ROLE_OPTIMIZER};
    struct olmo_files_told told;
    struct err why = {0};
    int rc;

    if (set->kind == OLMO_SET_NONE)
        return 0;
    if (dir[0])
        TRY(olmo_part_add(s->sink, dir, e));
    snprintf(prefix, sizeof prefix, "%s.", root);
    rc = olmo_set_report(s->c, s->sink, &how, set, &told, &why);
    return take_told(s, rc, &told, model || !dir[0], &why, e);
}

/* A file that is the model or the optimizer. */
static int add_file(struct scan *s, const char *name, const char *root, bool encoded,
                    struct err *e)
{
    bool model = strncmp(name, MODEL, strlen(MODEL)) == 0;
    const struct olmo_files_how how = {.dir = "",
                                       .part = model ? NULL : name,
                                       .root = root,
                                       .role = model ? ROLE_MODEL : ROLE_OPTIMIZER,
                                       .encoded = encoded};
    struct olmo_files_told told;
    struct err why = {0};
    int rc;

    if (!has_file(s->c->listing, name))
        return 0;
    rc = olmo_file_report(s->c, s->sink, &how, name, &told, &why);
    return take_told(s, rc, &told, model, &why, e);
}

/* train.pt was called other.pt before. */
static int add_trainer(struct scan *s, struct err *e)
{
    static const struct torch_report how = {.role = ROLE_OTHER};
    static const char *const names[] = {"train.pt", "other.pt"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (has_file(s->c->listing, names[i]))
            TRY(torch_file_report(s->c, s->sink, names[i], &how, e));
    return 0;
}

static int scan_kind(struct scan *s, struct err *e)
{
    const struct layout *x = &s->layout;

    switch (x->kind) {
    case KIND_SETS:
        TRY(add_set(s, MODEL, MODEL, &x->model, e));
        return add_set(s, OPTIM, OPTIM, &x->optim, e);
    case KIND_SET:
        TRY(add_set(s, "", MODEL, &x->model, e));
        return add_set(s, "", OPTIM, &x->optim, e);
    case KIND_PAIR:
        TRY(add_file(s, "model.pt", "model.", false, e));
        return add_file(s, "optim.pt", "optim.", false, e);
    case KIND_CLASSIC_PT:
        return add_file(s, "model.pt", "", false, e) < 0 ||
                       add_file(s, "optim.pt", "", false, e) < 0
                   ? -e->code
                   : add_trainer(s, e);
    case KIND_CLASSIC_ST:
        return add_file(s, "model.safetensors", "", true, e) < 0 ||
                       add_file(s, "optim.safetensors", "", true, e) < 0
                   ? -e->code
                   : add_trainer(s, e);
    case KIND_NONE:
        break;
    }
    return err_set(e, ESTALE, "no files of OLMo any more");
}

/* ---- the checkpoint ---- */

static bool is_of_core(enum kind kind)
{
    return kind == KIND_SETS || kind == KIND_SET || kind == KIND_PAIR;
}

/* The N of stepN-unsharded. */
static bool find_step(const struct listing *l, int64_t *step)
{
    char name[NAME_MAX + 1];

    snprintf(name, sizeof name, "%s", listing_name(l));
    if (ends_in(name, UNSHARDED))
        name[strlen(name) - strlen(UNSHARDED)] = '\0';
    return step_of_name(name, step);
}

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    char topology[64];
    bool core = is_of_core(s->layout.kind);
    struct sink_checkpoint about = {
        .format = core ? "olmo-core-unsharded" : "olmo-unsharded",
        .framework = core ? "OLMo-core" : "OLMo",
        .topology = topology,
        .metadata_file = s->metadata[0] ? s->metadata : NULL,
    };

    snprintf(topology, sizeof topology, "{\"files\": %" PRIu64 "}", s->files);
    about.has_step = find_step(s->c->listing, &about.step);
    return sink_checkpoint(s->sink, &about, e);
}

static int unsharded_scan(const struct scan_context *c, struct sink *sink,
                          struct err *e)
{
    struct scan s = {.c = c, .sink = sink};
    struct err failed = {0};
    int rc;

    layout_of(c->listing, &s.layout);
    rc = scan_kind(&s, &failed);
    /* Also a scan that fails has a format. */
    TRY(tell_checkpoint(&s, e));
    if (rc < 0)
        *e = failed;
    return rc;
}

static const struct chunk_codec *const unsharded_codecs[] = {&codec_zip_deflate, NULL};

const struct format_driver format_olmo_unsharded = {
    .name = "olmo_unsharded",
    .title =
        "OLMo and OLMo-core, unsharded: model.pt and optim.pt, chunks, single tensors",
    .bid = unsharded_bid,
    .scan = unsharded_scan,
    .codecs = unsharded_codecs,
};
