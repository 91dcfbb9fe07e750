/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors.c - Hugging Face models: one file, shards, PEFT adapters. */
#include "index/formats/hf/safetensors_header.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "index/formats/hf/choose.h"
#include "index/formats/hf/hf_config.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/hf/hf_model.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/formats/hf/safetensors_layout.h"
#include "index/formats/hf/safetensors_notes.h"
#include "index/formats/hf/safetensors_write.h"
#include "index/formats/key_list.h"
#include "index/formats/step.h"

enum {
    HEAD_BYTES = 16,
    INDEX_HEAD = 4096,     /* "metadata" is small and stands before weight_map */
    MAX_INDEX = 100000000, /* what the JSON reader takes */
};

static const char no_model[] =
    "pieces of tensors by torch's HuggingFaceStorageWriter, no model by itself";

/* ---- bids ---- */

static bool has_magic(struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);
    unsigned char head[HEAD_BYTES];
    size_t got;

    return entry && listing_peek(l, name, head, sizeof head, &got) == 0 &&
           safetensors_magic(head, got, entry->st.id.size);
}

static void PRINTF(3, 4) say(struct bid *out, int score, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    out->score = score;
    vsnprintf(out->reason, sizeof out->reason, fmt, ap);
    va_end(ap);
}

/* By its name one of ours, but the first bytes say no: shown with what is wrong. */
static void say_damaged(struct bid *out, const char *name)
{
    say(out, 25, "%s by its name, but no safetensors header", name);
}

/* Alone it tells of a model that is not here: people copy it with the config. */
static void bid_index(struct listing *l, const struct safetensors_layout *x,
                      struct bid *out)
{
    const char *name = x->main;
    char head[INDEX_HEAD];
    size_t got = 0;

    if (x->present == 0)
        say(out, 27, "%s, but no .safetensors file", name);
    else if (listing_peek(l, name, head, sizeof head, &got) == 0 &&
             memmem(head, got, "\"weight_map\"", 12))
        say(out, 80, "%s with a weight_map", name);
    else
        say(out, 45, "%s by its name", name);
}

static void bid_layout(struct listing *l, const struct safetensors_layout *x,
                       struct bid *out)
{
    bool config = listing_find(l, "config.json");

    if (x->kind == SAFETENSORS_NONE)
        return;
    if (x->kind == SAFETENSORS_PIECES)
        return; /* hf_dcp's */
    if (x->kind == SAFETENSORS_INDEXED)
        bid_index(l, x, out);
    else if (!has_magic(l, x->main))
        say_damaged(out, x->main);
    else if (x->kind == SAFETENSORS_NUMBERED)
        say(out, x->present == x->total ? 55 : 40, "%s and its set: %u of %u files",
            x->main, x->present, x->total);
    else if (x->kind == SAFETENSORS_ADAPTER)
        say(out, 75, "%s with adapter_config.json", x->main);
    else
        say(out, config ? 75 : 60, "%s%s", x->main, config ? " with config.json" : "");
}

static void st_bid(struct listing *l, struct bid *out)
{
    const struct hf_choice *c = hf_choose(l);

    bid_layout(l, &c->safetensors, out);
    if (c->best && c->best->family != HF_SAFETENSORS && out->score > 15 &&
        c->safetensors.kind != SAFETENSORS_ADAPTER)
        say(out, 15, "%s, but there is %s as well", c->safetensors.main, c->best->main);
}

static void st_bid_file(struct listing *l, const char *name, struct bid *out)
{
    if (!safetensors_is_named(l, name))
        return;
    if (has_magic(l, name))
        say(out, 50, "a safetensors file");
    else
        say_damaged(out, name);
}

static void st_bid_content(struct listing *l, const char *name, struct bid *out)
{
    if (has_magic(l, name))
        say(out, 50, "a safetensors file by its first bytes");
}

/* ---- files of the model ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct safetensors_layout layout;
    struct hf_index index; /* of SAFETENSORS_INDEXED */
    bool *found;           /* entries of the index */
    struct safetensors_files files;
    /* What tells that an output layer is tied to the embedding. */
    bool has_head, has_embedding;
};

static void scan_release(struct scan *s)
{
    safetensors_files_release(&s->files);
    free(s->found);
    hf_index_release(&s->index);
}

static int path_of(const struct scan *s, const char *name, char path[PATH_MAX],
                   struct err *e)
{
    if (store_join(s->c->dir, name, path, PATH_MAX) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", s->c->dir, name);
    return 0;
}

/* ---- pieces of tensors, which must never be shown as tensors ---- */

static int check_offsets(void *user, const char *key, size_t key_len UNUSED,
                         const struct json *value, struct err *e)
{
    const struct json *list = json_get(value, "saved_offsets");

    (void)user;
    if (!list || json_kind(list) != JSON_ARRAY)
        return err_set(e, EBADMSG, "DCP_SHARDING_INFO: no saved_offsets of \"%.200s\"",
                       key);
    for (const struct json *v = json_first(list); v; v = json_next(v)) {
        uint64_t at;

        if (!json_u64(v, &at) || at != 0)
            return err_set(e, ENOTSUP, "%s", no_model);
    }
    return 0;
}

/*
 * Files of torch's writer say where each tensor's piece starts, but not how large the
 * whole is. Those that its rank-0 save writes are whole: no offset but zero, and called
 * model-K-of-N. All else with that mark may be pieces.
 */
static int check_whole(const struct safetensors_file *f, struct err *e)
{
    const char *text = f->h.dcp_sharding;
    struct safetensors_number n;

    if (safetensors_is_piece(f->name))
        return err_set(e, ENOTSUP, "%s: %s", f->name, no_model);
    if (!f->read || !text)
        return 0;
    if (!safetensors_has_stem(f->name, "model", strlen("model"), &n))
        return err_set(e, ENOTSUP, "%s: %s", f->name, no_model);
    if (json_each_member(text, strlen(text), NULL, check_offsets, NULL, e) < 0)
        return err_wrap(e, "%s", f->name);
    return 0;
}

static int check_all_whole(const struct scan *s, struct err *e)
{
    for (size_t i = 0; i < s->files.count; i++)
        if (check_whole(&s->files.file[i], e) < 0)
            return err_hint(e, "torch's consolidate_safetensors_files joins them");
    return 0;
}

/* ---- tensors ---- */

/* `fault` NULL, or why it must not be read. */
static int add_tensor(struct scan *s, const struct safetensors_file *f,
                      const struct safetensors_tensor *t, const char *part,
                      const char *fault, struct err *e)
{
    struct shape shape;
    struct sink_tensor out = {.key = t->name,
                              .key_len = t->name_len,
                              .part = part,
                              .dtype = t->dtype,
                              .shape = &shape,
                              .role = part ? ROLE_OTHER : -1};

    s->has_head |= hf_is_head(t->name, t->name_len);
    s->has_embedding |= hf_is_embedding(t->name, t->name_len);
    safetensors_shape(t, &shape);
    if (!fault)
        return sink_tensor_plain(s->sink, &out, f->number, f->h.data + t->begin, e);
    TRY(sink_tensor_begin(s->sink, &out, e));
    if (sink_fault(s->sink, "%s", fault) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

static int add_whole_file(struct scan *s, const struct safetensors_file *f,
                          const char *part, struct err *e)
{
    for (size_t i = 0; i < f->h.count; i++)
        TRY(add_tensor(s, f, &f->h.tensor[i], part, NULL, e));
    return 0;
}

static int set_fault(struct sink *sink, const struct safetensors_file *f)
{
    if (f->fault)
        return f->name[0] ? sink_fault(sink, "%s: \"%.200s\"", f->fault, f->name)
                          : sink_fault(sink, "%s", f->fault);
    if (f->missing)
        return sink_fault(sink, "%.200s is missing", f->name);
    if (!f->read)
        return sink_fault(sink, "%s", f->err.text);
    return sink_fault(
        sink, "the index says that it is in %.200s, which does not hold it", f->name);
}

/* A tensor of which only the name is known: shown as empty bytes that cannot be read. */
static int add_unknown(struct scan *s, const char *key, enum role role,
                       const struct safetensors_file *f, struct err *e)
{
    static const struct shape none = {.nd = 1};
    struct sink_tensor t = {.key = key,
                            .key_len = strlen(key),
                            .dtype = DTYPE_U8,
                            .shape = &none,
                            .role = (int)role};

    s->has_head |= hf_is_head(key, strlen(key));
    TRY(sink_tensor_begin(s->sink, &t, e));
    if (set_fault(s->sink, f) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

/* ---- one file ---- */

static int scan_single(struct scan *s, const char *name, struct err *e)
{
    struct safetensors_file *f;

    TRY(safetensors_files_new(&s->files, 1, e));
    f = &s->files.file[0];
    f->name = name;
    TRY(safetensors_files_read(s->c, s->sink, &s->files, e));
    if (f->missing)
        return err_set(e, ESTALE, "%s is gone", name);
    if (!f->read) {
        return err_copy(e, &f->err); /* a damaged header fails as one file */
    }
    TRY(check_all_whole(s, e));
    TRY(add_whole_file(s, f, NULL, e));
    return sink_whole_file(s->sink, f->number, e);
}

/* ---- an index and its files ---- */

static int read_index(struct scan *s, const char *name, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    size_t len;

    if (listing_read(s->c->listing, name, MAX_INDEX, &text, &len, e) < 0 ||
        hf_index_parse(text, len, ".safetensors", &s->index, e) < 0)
        return err_wrap(e, "%s", name);
    s->found = calloc(s->index.count + 1, sizeof *s->found);
    return s->found ? 0 : err_nomem(e);
}

/* Whose tensor of this key counts: loaders read all files, and the last one stays. */
struct owner {
    const struct safetensors_tensor *t;
    uint32_t file;
};

static int compare_owners(const void *a, const void *b)
{
    const struct owner *x = a, *y = b;
    size_t len = MIN(x->t->name_len, y->t->name_len);
    int order = memcmp(x->t->name, y->t->name, len);

    if (order == 0)
        order = (x->t->name_len > y->t->name_len) - (x->t->name_len < y->t->name_len);
    return order ? order : (x->file > y->file) - (x->file < y->file);
}

static bool same_key(const struct owner *x, const struct owner *y)
{
    return x->t->name_len == y->t->name_len &&
           memcmp(x->t->name, y->t->name, x->t->name_len) == 0;
}

/* All tensors of all files, by key and then by file. */
static int list_owners(const struct scan *s, struct owner **out, size_t *count,
                       struct err *e)
{
    size_t n = 0;

    *count = 0;
    for (size_t i = 0; i < s->files.count; i++)
        *count += s->files.file[i].h.count;
    *out = calloc(*count + 1, sizeof **out);
    if (!*out)
        return err_nomem(e);
    for (size_t i = 0; i < s->files.count; i++)
        for (size_t k = 0; k < s->files.file[i].h.count; k++)
            (*out)[n++] = (struct owner){&s->files.file[i].h.tensor[k], (uint32_t)i};
    if (n > 0)
        qsort(*out, n, sizeof **out, compare_owners);
    return 0;
}

/* What loaders read and the index does not say, or says otherwise. */
struct unlike {
    size_t unlisted, twice, lost;
    const struct owner *first_unlisted, *first_twice;
    const char *first_lost;
};

static int add_read(struct scan *s, const struct owner *o, size_t count,
                    struct unlike *u, struct err *e)
{
    for (size_t i = 0, n; i < count; i += n) {
        const struct owner *last;
        ptrdiff_t at = hf_index_find(&s->index, o[i].t->name, o[i].t->name_len);

        for (n = 1; i + n < count && same_key(&o[i], &o[i + n]); n++)
            ;
        last = &o[i + n - 1];
        if (at >= 0)
            s->found[at] = true;
        else if (u->unlisted++ == 0)
            u->first_unlisted = last;
        if (n > 1 && u->twice++ == 0)
            u->first_twice = last;
        TRY(add_tensor(s, &s->files.file[last->file], last->t, NULL, NULL, e));
    }
    return 0;
}

/*
 * Keys of the index that are in no file: they are listed, and give EIO. One that its file does
 * not hold is missing for no loader: it is no part of model.safetensors.
 */
static int add_unread(struct scan *s, struct unlike *u, struct err *e)
{
    for (size_t i = 0; i < s->index.count; i++) {
        const struct hf_index_entry *x = &s->index.entry[i];
        bool lost;

        if (s->found[i])
            continue;
        lost = s->files.file[x->file].read;
        if (lost && u->lost++ == 0)
            u->first_lost = x->key;
        TRY(add_unknown(s, x->key, lost ? ROLE_OTHER : ROLE_MODEL,
                        &s->files.file[x->file], e));
    }
    return 0;
}

static int tell_unlike(struct scan *s, const struct unlike *u, struct err *e)
{
    const char *index = s->layout.main;
    int rc = 0;

    if (u->unlisted > 0)
        rc =
            sink_warning(s->sink, "unlisted-tensor",
                         "%s does not list %zu tensors of the files that it names, as "
                         "%.200s in %s: they are part of the model, as for all loaders",
                         index, u->unlisted, u->first_unlisted->t->name,
                         s->files.file[u->first_unlisted->file].name);
    if (rc == 0 && u->twice > 0)
        rc = sink_warning(
            s->sink, "duplicate-key",
            "%zu tensors are in several files, as %.200s: that of the last "
            "file by name counts, %s, as for transformers",
            u->twice, u->first_twice->t->name,
            s->files.file[u->first_twice->file].name);
    if (rc == 0 && u->lost > 0)
        rc = sink_warning(
            s->sink, "missing-tensor",
            "%s lists %zu tensors that its files do not hold, as %.200s: "
            "they are lost, or the index is of another save: then remove %s",
            index, u->lost, u->first_lost, index);
    return rc < 0 ? err_nomem(e) : 0;
}

static int add_indexed(struct scan *s, struct err *e)
{
    CLEANUP_FREE struct owner *owner = NULL;
    struct unlike u = {0};
    size_t count;

    TRY(list_owners(s, &owner, &count, e));
    TRY(add_read(s, owner, count, &u, e));
    TRY(add_unread(s, &u, e));
    return tell_unlike(s, &u, e);
}

static int scan_indexed(struct scan *s, struct err *e)
{
    /* First watched, then read: also a damaged index is read anew when it changes. */
    TRY(sink_hide(s->sink, s->layout.main, true, e));
    TRY(read_index(s, s->layout.main, e));
    TRY(safetensors_files_new(&s->files, s->index.nfiles, e));
    for (size_t i = 0; i < s->files.count; i++) {
        s->files.file[i].name = s->index.file[i].name;
        s->files.file[i].fault = s->index.file[i].fault;
    }
    TRY(safetensors_files_read(s->c, s->sink, &s->files, e));
    TRY(check_all_whole(s, e));
    return add_indexed(s, e);
}

/* ---- a numbered set without an index ---- */

static int find_set(struct scan *s, struct err *e)
{
    const struct listing *l = s->c->listing;
    struct safetensors_number n;
    size_t count = 0;

    TRY(safetensors_files_new(&s->files, s->layout.files, e));
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (count < s->files.count && entry->st.kind == ENTRY_FILE &&
            safetensors_has_stem(entry->name, s->layout.stem, s->layout.stem_len, &n) &&
            n.n == s->layout.n)
            s->files.file[count++].name = entry->name;
    }
    if (s->layout.from_zero && !s->layout.has_last &&
        sink_warning(s->sink, "numbered-from-zero",
                     "%s and its set have no file %u: it may be missing, or they are "
                     "counted from 0",
                     s->layout.main, s->layout.n) < 0)
        return err_nomem(e);
    if (s->layout.present == s->layout.total)
        return 0;
    return sink_warning(
        s->sink, "missing-file", "%u of the %u files that %s counts are missing",
        s->layout.total - s->layout.present, s->layout.total, s->layout.main);
}

/* Two files with one key make it worthless. */
static int add_owned(struct scan *s, const struct owner *o, size_t count, struct err *e)
{
    for (size_t i = 0, n; i < count; i += n) {
        const struct safetensors_file *f = &s->files.file[o[i].file];
        char fault[2 * NAME_MAX + 64];

        for (n = 1; i + n < count && same_key(&o[i], &o[i + n]); n++)
            ;
        if (n > 1)
            snprintf(fault, sizeof fault, "it is in %s and in %s, and no index decides",
                     f->name, s->files.file[o[i + 1].file].name);
        TRY(add_tensor(s, f, o[i].t, NULL, n > 1 ? fault : NULL, e));
    }
    return 0;
}

static int add_set(struct scan *s, struct err *e)
{
    CLEANUP_FREE struct owner *owner = NULL;
    size_t count;

    TRY(list_owners(s, &owner, &count, e));
    return add_owned(s, owner, count, e);
}

static int scan_numbered(struct scan *s, struct err *e)
{
    size_t bad = 0;

    TRY(find_set(s, e));
    TRY(safetensors_files_read(s->c, s->sink, &s->files, e));
    TRY(check_all_whole(s, e));
    for (size_t i = 0; i < s->files.count; i++) {
        if (s->files.file[i].read)
            continue;
        if (++bad == s->files.count) {
            return err_copy(e, &s->files.file[i].err);
        }
        if (sink_warning(s->sink, "damaged-file", "%s", s->files.file[i].err.text) < 0)
            return err_nomem(e);
    }
    return add_set(s, e);
}

/* ---- what stands beside the model ---- */

/* An adapter beside its base model: its tensors are there too, of role other. */
static int scan_adapter_beside(struct scan *s, struct err *e)
{
    CLEANUP(safetensors_files_release) struct safetensors_files files = {0};
    struct safetensors_file *f;

    if (!s->layout.adapter)
        return 0;
    TRY(safetensors_files_new(&files, 1, e));
    f = &files.file[0];
    f->name = s->layout.adapter;
    f->shown = true;
    TRY(safetensors_files_read(s->c, s->sink, &files, e));
    if (f->read)
        return add_whole_file(s, f, f->name, e);
    return f->missing ? 0 : sink_warning(s->sink, "damaged-file", "%s", f->err.text);
}

static int list_shards(const struct scan *s, struct key_list *out, struct err *e)
{
    for (size_t i = 0; i < s->files.count; i++) {
        const char *name = s->files.file[i].name;

        TRY(key_list_add(out, name, strlen(name), e));
    }
    key_list_sort(out);
    return 0;
}

/*
 * Numbered files of the model's stem that are no part of it are left from an older save.
 * Loaders that take all *.safetensors would load them over the model: they are hidden.
 */
static int hide_stale(struct scan *s, struct err *e)
{
    CLEANUP(key_list_release) struct key_list shards = {0};
    const struct listing *l = s->c->listing;
    struct safetensors_number n;
    const char *first = NULL;
    size_t count = 0;

    TRY(list_shards(s, &shards, e));
    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;

        if (!safetensors_has_stem(name, s->layout.stem, s->layout.stem_len, &n) ||
            key_list_has(&shards, &(struct key){name, strlen(name)}))
            continue;
        TRY(sink_hide(s->sink, name, false, e));
        first = first ? first : name;
        count++;
    }
    if (count == 0)
        return 0;
    return sink_warning(s->sink, "unlisted-file",
                        "%zu files as %s are no part of %s: they are not shown", count,
                        first, s->layout.main);
}

/* ---- the checkpoint as a whole ---- */

/* safetensors cannot hold two names of one storage: the writer left one out. */
static int tell_tied(struct scan *s, struct err *e)
{
    struct hf_config config;

    if (s->layout.kind == SAFETENSORS_ADAPTER || s->has_head || !s->has_embedding)
        return 0;
    TRY(hf_config_read(s->c->listing, "", s->sink, &config, e));
    return config.tied ? hf_tell_tied(s->sink, e) : 0;
}

static const char *framework_of(const struct scan *s)
{
    static const struct {
        const char *format, *framework;
    } names[] = {{"pt", "PyTorch"}, {"tf", "TensorFlow"}, {"flax", "Flax"},
                 {"np", "NumPy"},   {"mlx", "MLX"},       {"paddle", "PaddlePaddle"}};

    for (size_t i = 0; i < s->files.count; i++) {
        const char *format = s->files.file[i].h.format;

        for (size_t k = 0; format && k < ARRAY_SIZE(names); k++)
            if (strcmp(format, names[k].format) == 0)
                return names[k].framework;
    }
    return NULL;
}

/* A file of a name that only we know, without a config.json, is nobody's model. */
static const char *format_of(const struct scan *s)
{
    if (s->layout.kind == SAFETENSORS_ADAPTER)
        return "hf-peft";
    if (s->layout.kind != SAFETENSORS_NONE ||
        listing_find(s->c->listing, "config.json"))
        return "hf-safetensors";
    return "safetensors";
}

static int tell_checkpoint(struct scan *s, const char *main, struct err *e)
{
    CLEANUP(buf_release) struct buf header = {0};
    char topology[64], path[PATH_MAX];
    struct sink_checkpoint about = {.format = format_of(s),
                                    .framework = framework_of(s),
                                    .topology = topology,
                                    .metadata_file = path,
                                    .adapter = s->layout.kind == SAFETENSORS_ADAPTER};
    int rc;

    snprintf(topology, sizeof topology, "{\"files\": %zu}", s->files.count);
    about.has_step = step_of_name(listing_name(s->c->listing), &about.step);
    TRY(path_of(s, main, path, e));
    rc = safetensors_notes_join(&s->files, &header, e);
    if (rc > 0 && sink_warning(s->sink, "long-metadata",
                               "__metadata__ of the files is too long for one file of "
                               "all tensors: it has the format only") < 0)
        return err_nomem(e);
    if (rc < 0)
        return rc;
    about.header = header.data;
    return sink_checkpoint(s->sink, &about, e);
}

/*
 * torch_checkpointing (0.1.1; metadata.pkl is a pickled dict of plain values) saves a
 * rank's parts of tensors as ITEM_RANK.safetensors, under the names of the whole ones: only
 * what lies beside it tells.
 */
static bool is_rank_of_checkpointing(struct listing *l, const char *name)
{
    static const char mark[] = "nested_path_to_metadata";
    const char *end = strstr(name, ".safetensors");
    size_t len = end ? (size_t)(end - name) : 0, digits = len;
    char head[INDEX_HEAD];
    size_t got = 0;

    while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9')
        digits--;
    return digits < len && digits > 1 && name[digits - 1] == '_' &&
           listing_find(l, "metadata.pkl") &&
           listing_peek(l, "metadata.pkl", head, sizeof head, &got) == 0 &&
           memmem(head, got, mark, sizeof mark - 1);
}

static int scan_single_model(struct scan *s, const char *main, struct err *e)
{
    if (!is_rank_of_checkpointing(s->c->listing, main))
        return scan_single(s, main, e);
    err_set(
        e, ENOTSUP,
        "%s: one rank's parts, saved by torch_checkpointing (metadata.pkl beside it)",
        main);
    return err_hint(e, "name its directory, which is read whole");
}

static int scan_model(struct scan *s, const char *main, struct err *e)
{
    switch (s->layout.kind) {
    case SAFETENSORS_INDEXED:
        return scan_indexed(s, e);
    case SAFETENSORS_NUMBERED:
        return scan_numbered(s, e);
    case SAFETENSORS_PIECES:
        return err_set(e, ENOTSUP, "%s: %s", main, no_model);
    case SAFETENSORS_NONE:
    case SAFETENSORS_SINGLE:
    case SAFETENSORS_ADAPTER:
        break;
    }
    return scan_single_model(s, main, e);
}

/* An adapter of the older kind; a value head of trl beside the adapter. */
static int scan_bin_beside(struct scan *s, struct err *e)
{
    const struct listing *l = s->c->listing;
    bool adapter = s->layout.kind == SAFETENSORS_ADAPTER;
    const struct listing_entry *entry =
        listing_find(l, adapter ? "pytorch_model.bin" : "adapter_model.bin");

    if (!entry || entry->st.kind != ENTRY_FILE || s->layout.adapter ||
        !listing_find(l, "adapter_config.json"))
        return 0;
    return hf_beside_report(entry->name, s->c, s->sink, e);
}

static int scan_beside(struct scan *s, struct err *e)
{
    if (s->layout.kind == SAFETENSORS_NONE)
        return 0;
    TRY(scan_bin_beside(s, e));
    TRY(hf_trained_beside_report(s->c, s->sink, e));
    if (s->layout.kind == SAFETENSORS_ADAPTER)
        return 0;
    TRY(scan_adapter_beside(s, e));
    return hide_stale(s, e);
}

static int st_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    CLEANUP(scan_release) struct scan s = {.c = c, .sink = sink};
    const char *main = c->file;

    if (!main) {
        s.layout = hf_choose(c->listing)->safetensors;
        main = s.layout.main;
    }
    if (!main)
        return err_set(e, ESTALE, "no safetensors files any more");
    /* First without what the headers tell: also a scan that fails has a format. */
    TRY(tell_checkpoint(&s, main, e));
    if (!c->among)
        TRY(hf_choice_report(c->listing, sink, e));
    TRY(scan_model(&s, main, e));
    sink_rule_end(sink);
    TRY(scan_beside(&s, e));
    TRY(tell_tied(&s, e));
    return tell_checkpoint(&s, main, e);
}

static const struct chunk_codec *const st_codecs[] = {&safetensors_codec, NULL};

static const struct format_writer *const st_writers[] = {&writer_hf, NULL};

const struct format_driver format_safetensors = {
    .name = "safetensors",
    .title = "Hugging Face safetensors: single file, sharded with index, PEFT adapter",
    .bid = st_bid,
    .bid_file = st_bid_file,
    .bid_content = st_bid_content,
    .scan = st_scan,
    .codecs = st_codecs,
    .writers = st_writers,
};
