/* SPDX-License-Identifier: MIT */
/* index/formats/hf/choose.c - which files of a directory are the model, and why. */
#include "index/formats/hf/choose.h"

#include <errno.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/hf/hf_model.h"
#include "index/formats/hf/safetensors_header.h"
#include "index/formats/hf/train_parts.h"
#include "index/formats/stand_in.h"
#include "index/formats/torch/torch_walk.h"
#include "index/formats/torch/torch_zip.h"
#include "index/sink.h"
#include "remote/listing.h"
#include "remote/source.h"

enum { MAX_INDEX = 100000000 }; /* what the JSON reader takes */

static const char *const suffix_of[] = {".safetensors", ".bin"};

static void judge_list(struct hf_candidate *c, enum hf_state state, const char *fmt,
                       va_list ap)
{
    c->state = state;
    vsnprintf(c->why, sizeof c->why, fmt, ap);
}

static void PRINTF(3, 4)
    judge(struct hf_candidate *c, enum hf_state state, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    judge_list(c, state, fmt, ap);
    va_end(ap);
}

/* ---- a candidate's files ---- */

static bool is_index(const struct hf_candidate *c)
{
    return c->family == HF_SAFETENSORS ? c->safetensors.kind == SAFETENSORS_INDEXED
                                       : c->torch.kind == TORCH_LAYOUT_INDEXED;
}

static bool is_numbered(const struct hf_candidate *c)
{
    return c->family == HF_SAFETENSORS ? c->safetensors.kind == SAFETENSORS_NUMBERED
                                       : c->torch.kind == TORCH_LAYOUT_NUMBERED;
}

/* Is it a file of this numbered set? */
static bool has_file(const struct hf_candidate *c, const char *name)
{
    struct safetensors_number n;

    if (c->family == HF_TORCH)
        return torch_layout_has(&c->torch, name);
    return safetensors_has_stem(name, c->safetensors.stem, c->safetensors.stem_len,
                                &n) &&
           n.n == c->safetensors.n;
}

static int read_index(struct listing *l, const struct hf_candidate *c,
                      struct hf_index *out, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    size_t len;

    TRY(listing_read(l, c->main, MAX_INDEX, &text, &len, e));
    return hf_index_parse(text, len, suffix_of[c->family], out, e);
}

/* Calls fn for each of its files that is there, until it returns other than 0. */
typedef int file_fn(void *user, const char *name, struct err *e);

static int each_named(struct listing *l, const struct hf_candidate *c, file_fn *fn,
                      void *user, struct err *e)
{
    CLEANUP(hf_index_release) struct hf_index x = {0};
    int rc = read_index(l, c, &x, e);

    for (size_t i = 0; rc == 0 && i < x.nfiles; i++)
        if (!x.file[i].fault && listing_find(l, x.file[i].name))
            rc = fn(user, listing_find(l, x.file[i].name)->name, e);
    return rc;
}

static int each_file(struct listing *l, const struct hf_candidate *c, file_fn *fn,
                     void *user, struct err *e)
{
    int rc = 0;

    if (is_index(c))
        return each_named(l, c, fn, user, e);
    if (!is_numbered(c))
        return fn(user, c->main, e);
    for (size_t i = 0; rc == 0 && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind == ENTRY_FILE && has_file(c, entry->name))
            rc = fn(user, entry->name, e);
    }
    return rc;
}

/* ---- judged by names ---- */

/* How the files that an index names are there. */
struct named {
    size_t there, missing;
    const char *first; /* that is missing */
    const char *fault; /* of a name that is never opened */
};

static void count_named(const struct listing *l, const struct hf_index *x,
                        struct named *out)
{
    *out = (struct named){0};
    for (size_t i = 0; i < x->nfiles; i++) {
        const struct listing_entry *entry = listing_find(l, x->file[i].name);

        if (x->file[i].fault)
            out->fault = x->file[i].fault;
        else if (entry && entry->st.kind == ENTRY_FILE)
            out->there++;
        else if (out->missing++ == 0)
            out->first = x->file[i].name;
    }
}

/* Beside an index: files of its kind in the directory. */
static uint32_t files_of_family(const struct hf_candidate *c)
{
    return c->family == HF_SAFETENSORS ? c->safetensors.present : c->torch.present;
}

static void judge_index(struct listing *l, struct hf_candidate *c)
{
    CLEANUP(hf_index_release) struct hf_index x = {0};
    struct named named;
    struct err e = {0};
    int rc = read_index(l, c, &x, &e);

    if (rc < 0 && (source_is_trouble(rc) || rc == -EACCES || rc == -EPERM))
        return; /* what it says was never seen */
    if (rc < 0) {
        judge(c, HF_PARTIAL, "it cannot be read: %.200s", e.text);
        return;
    }
    count_named(l, &x, &named);
    c->files = x.nfiles;
    if (x.count == 0)
        judge(c, HF_ABSENT, "it lists nothing");
    else if (named.there == 0 && !named.fault && files_of_family(c) == 0)
        judge(c, HF_ABSENT, "none of the %zu files that it names is there, as %.120s",
              named.missing, named.first);
    else if (named.missing > 0)
        judge(c, HF_PARTIAL,
              "%zu of the %zu files that it names are missing, as %.120s",
              named.missing, x.nfiles, named.first);
    else if (named.fault)
        judge(c, HF_PARTIAL, "%s", named.fault);
}

static void judge_numbered(struct hf_candidate *c)
{
    bool st = c->family == HF_SAFETENSORS;
    uint32_t total = st ? c->safetensors.total : c->torch.total;
    uint32_t present = st ? c->safetensors.present : c->torch.present;

    c->files = total;
    if (present < total)
        judge(c, HF_PARTIAL, "%u of its %u files are missing", total - present, total);
}

static void judge_names(struct listing *l, struct hf_candidate *c)
{
    c->files = 1;
    if (is_index(c))
        judge_index(l, c);
    else if (is_numbered(c))
        judge_numbered(c);
}

/* ---- judged by what is in the files ---- */

struct looking {
    struct listing *l;
    const struct hf_candidate *c;
    hf_tensor_fn *fn;
    void *user;
};

static int see_tensor(void *user, const struct torch_item *item, struct err *e)
{
    const struct looking *k = user;

    return k->fn(k->user, item->key, item->key_len,
                 item->tensor ? &item->tensor->shape : NULL, e);
}

static int look_at_torch(struct looking *k, struct source *src, struct err *e)
{
    CLEANUP(torch_zip_freep) struct torch_zip *zip = NULL;
    CLEANUP(torch_walk_release)
    struct torch_walk w = {
        .fn = see_tensor,
        .user = k,
        .key = {.max = TORCH_MAX_PATH},
        .path = {.max = TORCH_MAX_PATH},
    };

    TRY(torch_open(src, &zip, e));
    w.zip = zip;
    return torch_walk_value(&w, torch_zip_root(zip), e);
}

/* Every byte that the header counts is there, or it is not read. */
static int look_at_safetensors(struct looking *k, struct source *src, struct err *e)
{
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    struct shape shape;
    int rc = safetensors_read(src, 0, src->size, &h, e);

    for (size_t i = 0; rc == 0 && i < h.count; i++) {
        safetensors_shape(&h.tensor[i], &shape);
        rc = k->fn(k->user, h.tensor[i].name, h.tensor[i].name_len, &shape, e);
    }
    return rc;
}

static int look_at_file(void *user, const char *name, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    struct looking *k = user;
    int rc = listing_open(k->l, name, &src, e);

    if (rc == 0)
        rc = k->c->family == HF_TORCH ? look_at_torch(k, src, e)
                                      : look_at_safetensors(k, src, e);
    return rc < 0 ? err_wrap(e, "%s", name) : rc;
}

/* Directories in which DeepSpeed keeps what it took out of the tensors of the model. */
static bool has_deepspeed(const struct listing *l)
{
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind == ENTRY_DIR &&
            (strncmp(entry->name, "global_step", strlen("global_step")) == 0 ||
             strncmp(entry->name, "pytorch_model", strlen("pytorch_model")) == 0))
            return true;
    }
    return false;
}

/* hf_tensor_fn */
static int count_tensor(void *user, const char *key UNUSED, size_t len UNUSED,
                        const struct shape *shape, struct err *e UNUSED)
{
    struct hf_candidate *c = user;

    c->tensors++;
    c->empty += shape && shape->nd == 1 && shape->dim[0] == 0;
    return 0;
}

static void look_into(struct listing *l, struct hf_candidate *c)
{
    struct looking k = {.l = l, .c = c, .fn = count_tensor, .user = c};
    struct err e = {0};
    int rc;

    if (c->looked)
        return;
    c->looked = true;
    rc = each_file(l, c, look_at_file, &k, &e);
    if (rc == -EBADMSG || rc == -ENOTSUP || rc == -ENOENT || rc == -EFBIG)
        judge(c, HF_PARTIAL, "%.300s", e.text);
    else if (rc == 0 && c->empty > 0 && (c->empty == c->tensors || has_deepspeed(l)))
        judge(c, HF_PLACEHOLDER,
              "%" PRIu64 " of its %" PRIu64 " tensors have no elements", c->empty,
              c->tensors);
}

/* ---- compared ---- */

/* The same files, by an index and by their numbers: neither needs a look for the other. */
static bool same_files(const struct hf_candidate *a, const struct hf_candidate *b)
{
    const struct safetensors_layout *x = &a->safetensors, *y = &b->safetensors;

    if (a->family != b->family || !is_index(a) || !is_numbered(b))
        return false;
    if (a->family == HF_TORCH)
        return a->files == b->torch.total;
    return a->files == y->total && x->stem_len == y->stem_len &&
           memcmp(x->stem, y->stem, x->stem_len) == 0;
}

static enum hf_rank rank_of(const struct hf_candidate *x)
{
    return x->family == HF_SAFETENSORS ? x->safetensors.rank : x->torch.rank;
}

/* By a name that no loader looks for: it may be anything, an optimizer, another model. */
static bool is_other(const struct hf_candidate *x)
{
    enum hf_rank rank = rank_of(x);

    return rank == HF_RANK_OTHER_INDEX || rank == HF_RANK_OTHER_VARIANT ||
           rank == HF_RANK_NUMBERED_OTHER;
}

/* A set by its numbers is nothing to be told where an index names the same files. */
static bool is_shadow(const struct hf_choice *c, const struct hf_candidate *x)
{
    for (size_t i = 0; i < c->count; i++)
        if (same_files(&c->candidate[i], x) && c->candidate[i].state <= x->state)
            return true;
    return false;
}

static bool has_rival(const struct hf_choice *c, const struct hf_candidate *x)
{
    for (size_t i = 0; i < c->count; i++)
        if (&c->candidate[i] != x && c->candidate[i].state == HF_WHOLE &&
            is_other(&c->candidate[i]) == is_other(x) &&
            !same_files(x, &c->candidate[i]))
            return true;
    return false;
}

/*
 * The first whole one. Those before it were looked into, those behind it need not be: they
 * would not be taken.
 */
static const struct hf_candidate *best_of(struct listing *l, struct hf_choice *c,
                                          bool others)
{
    const struct hf_candidate *best = NULL;

    for (size_t i = 0; i < c->count; i++) {
        struct hf_candidate *x = &c->candidate[i];

        if (is_other(x) != others)
            continue;
        if (x->state == HF_WHOLE && has_rival(c, x))
            look_into(l, x);
        if (x->state == HF_WHOLE)
            return x;
        if (!best || x->state < best->state)
            best = x;
    }
    return best;
}

static void add(struct hf_choice *c, const struct hf_candidate *x)
{
    size_t i = c->count;

    if (c->count == HF_CANDIDATES)
        return;
    for (; i > 0 && rank_of(&c->candidate[i - 1]) > rank_of(x); i--)
        c->candidate[i] = c->candidate[i - 1];
    c->candidate[i] = *x;
    c->count++;
}

static void find(struct listing *l, struct hf_choice *c)
{
    struct safetensors_layout st[HF_CANDIDATES];
    struct torch_layout bin[HF_CANDIDATES];
    size_t n = safetensors_layouts(l, st, ARRAY_SIZE(st));
    size_t m = torch_layouts(l, bin, ARRAY_SIZE(bin));

    if (n > 0)
        c->safetensors = st[0];
    if (m > 0)
        c->torch = bin[0];
    for (size_t i = 0; i < n; i++)
        if (st[i].kind != SAFETENSORS_ADAPTER && st[i].kind != SAFETENSORS_PIECES)
            add(c, &(struct hf_candidate){.family = HF_SAFETENSORS,
                                          .main = st[i].main,
                                          .safetensors = st[i]});
    for (size_t i = 0; i < m; i++)
        if (bin[i].kind != TORCH_LAYOUT_ADAPTER)
            add(c, &(struct hf_candidate){
                       .family = HF_TORCH, .main = bin[i].main, .torch = bin[i]});
}

static bool any_is_there(const struct hf_choice *c)
{
    for (size_t i = 0; i < c->count; i++)
        if (c->candidate[i].state != HF_ABSENT)
            return true;
    return false;
}

static struct hf_candidate variant_file(const struct hf_choice *c, const char *name,
                                        enum hf_family family)
{
    const struct safetensors_layout *st = &c->safetensors;
    const struct torch_layout *bin = &c->torch;

    return (struct hf_candidate){
        .family = family,
        .main = name,
        .files = 1,
        .safetensors = {.kind = SAFETENSORS_SINGLE,
                        .main = name,
                        .stem = name,
                        .stem_len = strlen(name) - strlen(suffix_of[family]),
                        .adapter =
                            st->kind == SAFETENSORS_ADAPTER ? st->main : st->adapter,
                        .rank = HF_RANK_VARIANT_FILE},
        .torch = {.kind = TORCH_LAYOUT_SINGLE,
                  .main = name,
                  .beside = bin->kind == TORCH_LAYOUT_ADAPTER ? bin->main : bin->beside,
                  .rank = HF_RANK_VARIANT_FILE_BIN}};
}

/*
 * A variant in one file, which transformers loads for who asks for it. Without any other
 * candidate it is a file like all others.
 */
static void find_variant_files(const struct listing *l, struct hf_choice *c)
{
    static const struct {
        const char *pattern;
        enum hf_family family;
    } names[] = {{"model.*.safetensors", HF_SAFETENSORS},
                 {"diffusion_pytorch_model.*.safetensors", HF_SAFETENSORS},
                 {"pytorch_model.*.bin", HF_TORCH},
                 {"diffusion_pytorch_model.*.bin", HF_TORCH}};

    for (size_t i = 0; any_is_there(c) && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        for (size_t k = 0; k < ARRAY_SIZE(names); k++) {
            const struct hf_candidate x = variant_file(c, entry->name, names[k].family);

            if (entry->st.kind == ENTRY_FILE && !strstr(entry->name, "-of-") &&
                fnmatch(names[k].pattern, entry->name, 0) == 0)
                add(c, &x);
        }
    }
}

/* Each family's driver reads its first candidate of the best state. */
static void set_families(struct hf_choice *c)
{
    const struct hf_candidate *first[2] = {NULL, NULL};

    for (size_t i = 0; i < c->count; i++) {
        const struct hf_candidate *x = &c->candidate[i], **f = &first[x->family];

        if (x == c->best || (!*f && c->best->family != x->family) ||
            (*f && *f != c->best && x->state < (*f)->state))
            *f = x;
    }
    if (first[HF_SAFETENSORS])
        c->safetensors = first[HF_SAFETENSORS]->safetensors;
    if (first[HF_TORCH])
        c->torch = first[HF_TORCH]->torch;
}

/* Other files of its kind may be models by themselves, where an index names none of them. */
static bool is_beside_others(const struct hf_candidate *x)
{
    return x->state == HF_ABSENT &&
           (x->family == HF_SAFETENSORS ? x->safetensors.present : x->torch.present) >
               0;
}

static void choose(struct listing *l, struct hf_choice *c)
{
    find(l, c);
    for (size_t i = 0; i < c->count; i++)
        judge_names(l, &c->candidate[i]);
    find_variant_files(l, c);
    c->best = best_of(l, c, false);
    if (!c->best || c->best->state == HF_ABSENT) {
        const struct hf_candidate *other = best_of(l, c, true);

        if (other && (!c->best || other->state < c->best->state))
            c->best = other;
    }
    if (c->best && is_beside_others(c->best)) {
        c->best = NULL;
        c->safetensors = (struct safetensors_layout){0};
        c->torch = (struct torch_layout){0};
    } else if (c->best) {
        set_families(c);
    }
}

const struct hf_choice *hf_choose(struct listing *l)
{
    static const struct hf_choice none;
    struct hf_choice *c = listing_kept(l);

    if (c)
        return c;
    c = calloc(1, sizeof *c);
    if (!c)
        return &none;
    choose(l, c);
    listing_keep(l, c);
    return c;
}

enum hf_state hf_choice_look(struct listing *l)
{
    const struct hf_choice *c = hf_choose(l);

    if (!c->best)
        return HF_ABSENT;
    look_into(l, (struct hf_candidate *)(uintptr_t)c->best);
    return c->best->state;
}

int hf_choice_each(struct listing *l, hf_tensor_fn *fn, void *user, struct err *e)
{
    const struct hf_choice *c = hf_choose(l);
    struct looking k = {.l = l, .c = c->best, .fn = fn, .user = user};

    return c->best ? each_file(l, c->best, look_at_file, &k, e) : 0;
}

void hf_choice_doubt(struct listing *l, const char *fmt, ...)
{
    const struct hf_choice *c = hf_choose(l);
    va_list ap;

    va_start(ap, fmt);
    if (c->best)
        judge_list((struct hf_candidate *)(uintptr_t)c->best, HF_PARTIAL, fmt, ap);
    va_end(ap);
}

/* ---- reported ---- */

/*
 * The loader that would stumble over this index, or NULL. transformers takes the first name of
 * its order that is there, vLLM this index before any file; an index of a variant is opened only
 * by who asks for it.
 */
static const char *misled_by(const struct hf_choice *choice,
                             const struct hf_candidate *c)
{
    if (!is_index(c) || c->state == HF_WHOLE || rank_of(c) >= HF_RANK_OTHER_INDEX)
        return NULL;
    if (c == &choice->candidate[0])
        return "transformers";
    return rank_of(c) == HF_RANK_SAFETENSORS_INDEX ? "vLLM" : NULL;
}

static void say_rule(const struct hf_candidate *c, char *out, size_t size)
{
    if (is_index(c))
        snprintf(out, size, "the files that %s names, read whole", c->main);
    else if (is_numbered(c))
        snprintf(out, size, "the %" PRIu64 " files that %s counts, without an index",
                 c->files, c->main);
    else
        snprintf(out, size, "the file %s", c->main);
}

static void say_passed(const struct hf_choice *choice, const struct hf_candidate *c,
                       const char *better, char *out, size_t size)
{
    const struct hf_candidate *best = choice->best;
    const char *misled = misled_by(choice, c);
    const char *elsewhere =
        c->state == HF_PLACEHOLDER && better ? "; the model is elsewhere" : "";

    if (misled)
        snprintf(out, size, "%s; %s goes by it: get it again, or remove %s%s", c->why,
                 misled, c->main, elsewhere);
    else if (c->state != HF_WHOLE)
        snprintf(out, size, "%s%s", c->why, elsewhere);
    else if (better)
        snprintf(out, size, "%s is the model", better);
    else if (best && rank_of(best) >= HF_RANK_OTHER_INDEX)
        snprintf(out, size, "%s goes first; transformers loads neither unless asked",
                 best->main);
    else
        snprintf(out, size, "%s comes first in transformers' order",
                 best ? best->main : "another");
}

static int watch_file(void *user, const char *name, struct err *e)
{
    return sink_watch(user, name, e);
}

static int hide_file(void *user, const char *name, struct err *e)
{
    return sink_hide(user, name, true, e);
}

/* What was looked at decided: a change of it may decide otherwise. */
static int watch(struct listing *l, const struct hf_candidate *c, struct sink *sink,
                 bool hide, struct err *e)
{
    struct err ignored = {0};

    if (hide ? sink_hide(sink, c->main, true, e) : sink_watch(sink, c->main, e))
        return -e->code;
    if (!hide && !c->looked)
        return 0;
    if (each_file(l, c, hide ? hide_file : watch_file, sink, &ignored) == -ENOMEM)
        return err_nomem(e);
    return 0;
}

/*
 * Loaders take all *.safetensors, and an index before the model's one file. What goes by
 * another name (a variant, diffusers') stays for who asks for it.
 */
static bool is_in_the_way(const struct hf_candidate *c)
{
    enum hf_rank rank = c->safetensors.rank;

    return c->family == HF_SAFETENSORS &&
           (rank <= HF_RANK_SAFETENSORS_INDEX || rank == HF_RANK_NUMBERED ||
            (c->state != HF_WHOLE && rank <= HF_RANK_OTHER_INDEX));
}

static int pass(struct listing *l, const struct hf_candidate *c, const char *better,
                struct sink *sink, struct err *e)
{
    char why[600];

    say_passed(hf_choose(l), c, better, why, sizeof why);
    TRY(watch(l, c, sink, better || is_in_the_way(c), e));
    return sink_passed_over(sink, "%s: %s", c->main, why) < 0 ? err_nomem(e) : 0;
}

static int tell_best(const struct hf_choice *c, struct sink *sink)
{
    char rule[300], more[80] = "";
    size_t count = 0;

    for (size_t i = 0; i < c->count; i++)
        count += !is_shadow(c, &c->candidate[i]);
    say_rule(c->best, rule, sizeof rule);
    if (count > 1)
        snprintf(more, sizeof more,
                 c->best->state == HF_WHOLE ? "; the first whole one of %zu candidates"
                                            : "; none of %zu candidates is whole",
                 count);
    return sink_rule(sink, "%s%s", rule, more);
}

/* A safetensors file that is neither a candidate's nor read beside the model. */
static bool is_lone(struct listing *l, const struct hf_choice *c,
                    const struct listing_entry *entry)
{
    struct safetensors_number number;
    struct train_part part;
    struct err why = {0};

    if (!safetensors_is_named(l, entry->name) || train_part_of(entry, &part) ||
        safetensors_numbered(entry->name, &number) || hf_is_beside(entry->name))
        return false;
    for (size_t i = 0; i < c->count; i++)
        if (strcmp(c->candidate[i].main, entry->name) == 0)
            return false;
    return !stand_in_is(l, entry, &why);
}

/* Where only the numbers of its files tell that they are the model, others may be it. */
static int tell_lone(struct listing *l, const struct hf_choice *c, struct sink *sink)
{
    for (size_t i = 0; c->best && is_numbered(c->best) && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (is_lone(l, c, entry) &&
            sink_passed_over(sink,
                             "%s: transformers loads neither this nor the set of %s, "
                             "which has a model's name and goes first",
                             entry->name, c->best->main) < 0)
            return -ENOMEM;
    }
    return 0;
}

int hf_choice_report(struct listing *l, struct sink *sink, struct err *e)
{
    const struct hf_choice *c = hf_choose(l);

    if (c->best && (tell_best(c, sink) < 0 || tell_lone(l, c, sink) < 0))
        return err_nomem(e);
    for (size_t i = 0; i < c->count; i++)
        if (&c->candidate[i] != c->best && !is_shadow(c, &c->candidate[i]))
            TRY(pass(l, &c->candidate[i], NULL, sink, e));
    return 0;
}

int hf_choice_pass(struct listing *l, const char *better, struct sink *sink,
                   struct err *e)
{
    const struct hf_choice *c = hf_choose(l);

    for (size_t i = 0; i < c->count; i++)
        if (!is_shadow(c, &c->candidate[i]))
            TRY(pass(l, &c->candidate[i], better, sink, e));
    return 0;
}
