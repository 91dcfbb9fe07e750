/* SPDX-License-Identifier: MIT */
/* index/formats/safetensors.c - Hugging Face models: one file, shards, PEFT adapters. */
#include "index/formats/safetensors_header.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "base/pool.h"
#include "index/formats/format.h"
#include "index/formats/hf_index.h"
#include "index/formats/safetensors_layout.h"

enum {
    HEAD_BYTES = 16,
    INDEX_HEAD = 4096,     /* "metadata" is small and stands before weight_map */
    MAX_INDEX = 100000000, /* what the JSON reader takes */
    MAX_CONFIG = 1 << 24,  /* the largest seen, with quantisation tables: 2 MB */
    MAX_HEADERS = 1 << 30, /* of all files of a model; 50 MB is a large one */
};

static const char not_yet[] =
    "written by torch's HuggingFaceStorageWriter as shards: not supported yet";

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

static void bid_index(struct listing *l, const char *name, struct bid *out)
{
    char head[INDEX_HEAD];
    size_t got = 0;

    if (listing_peek(l, name, head, sizeof head, &got) == 0 &&
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
        say(out, 30, "%s: %s", x->main, not_yet);
    else if (x->kind == SAFETENSORS_INDEXED)
        bid_index(l, x->main, out);
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
    struct safetensors_layout layout;

    safetensors_layout(l, &layout);
    bid_layout(l, &layout, out);
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

/* ---- files of the model ---- */

struct shard {
    const char *name;  /* in the checkpoint's directory */
    const char *fault; /* why it was not even opened, or NULL */
    bool missing;
    bool shown; /* stays visible as it is */
    uint32_t number;
    struct file_id id; /* when it was registered */
    struct safetensors_header h;
    bool read;      /* h is good */
    struct err err; /* why it is not */
};

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct safetensors_layout layout;
    struct hf_index index; /* of SAFETENSORS_INDEXED */
    bool *found;           /* entries of the index */
    struct shard *shard;
    size_t nshards;
    atomic_ullong header_bytes;
    /* What tells that an output layer is tied to the embedding. */
    bool has_head, has_embedding;
};

static void shard_release(struct shard *f)
{
    safetensors_header_release(&f->h);
}

static void scan_release(struct scan *s)
{
    for (size_t i = 0; i < s->nshards; i++)
        shard_release(&s->shard[i]);
    free(s->shard);
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

static int new_shards(struct scan *s, size_t n, struct err *e)
{
    s->shard = calloc(n + 1, sizeof *s->shard);
    s->nshards = s->shard ? n : 0;
    return s->shard ? 0 : err_nomem(e);
}

static int register_shard(struct scan *s, struct shard *f, struct err *e)
{
    int (*add)(struct sink * s, const char *path, size_t len, uint32_t *number,
               struct err *e) = f->shown ? sink_file_shown : sink_file;

    if (f->fault)
        return 0;
    if (add(s->sink, f->name, strlen(f->name), &f->number, e) < 0)
        return -e->code;
    f->missing = !sink_file_id(s->sink, f->number, &f->id);
    if (f->missing)
        return sink_warning(s->sink, "missing-file", "%s is missing", f->name);
    return 0;
}

/* Damage of one file is told with its tensors; these stop the scan. */
static bool stops_scan(int code)
{
    return code == ESTALE || code == ENOMEM || code == EMFILE || code == ENFILE ||
           code == E2BIG || code == EINTR;
}

static int read_header(struct scan *s, struct shard *f, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    char path[PATH_MAX];

    if (path_of(s, f->name, path, e) < 0)
        return -e->code;
    if (s->c->store->ops->open(s->c->store, path, &src, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    if (!file_id_equal(&src->id, &f->id))
        return err_set(e, ESTALE, "%s was changed during the scan", path);
    if (safetensors_read(src, 0, src->size, &f->h, e) < 0)
        return err_wrap(e, "%s", path);
    if (atomic_fetch_add(&s->header_bytes, f->h.data) + f->h.data > MAX_HEADERS)
        return err_set(e, E2BIG, "the headers of this model are larger than %d MB",
                       MAX_HEADERS >> 20);
    if (source_check(src, e) < 0) {
        shard_release(f);
        return -e->code;
    }
    f->read = true;
    return 0;
}

static int read_nth(void *user, size_t i, struct err *e)
{
    struct scan *s = user;
    struct shard *f = &s->shard[i];

    if (f->fault || f->missing || read_header(s, f, &f->err) == 0)
        return 0;
    if (!stops_scan(f->err.code))
        return 0;
    *e = f->err;
    return -e->code;
}

static int read_shards(struct scan *s, struct err *e)
{
    for (size_t i = 0; i < s->nshards; i++)
        if (register_shard(s, &s->shard[i], e) < 0)
            return -e->code;
    return pool_each(s->c->pool, s->nshards, read_nth, s, e);
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
            return err_set(e, ENOTSUP, "%s", not_yet);
    }
    return 0;
}

/*
 * Files of torch's writer say where each tensor's piece starts, but not how large the
 * whole is. Those that its rank-0 save writes are whole: no offset but zero, and called
 * model-K-of-N. All else with that mark may be pieces.
 */
static int check_whole(const struct shard *f, struct err *e)
{
    const char *text = f->h.dcp_sharding;
    struct safetensors_number n;

    if (safetensors_is_piece(f->name))
        return err_set(e, ENOTSUP, "%s: %s", f->name, not_yet);
    if (!f->read || !text)
        return 0;
    if (!safetensors_has_stem(f->name, "model", strlen("model"), &n))
        return err_set(e, ENOTSUP, "%s: %s", f->name, not_yet);
    if (json_each_member(text, strlen(text), NULL, check_offsets, NULL, e) < 0)
        return err_wrap(e, "%s", f->name);
    return 0;
}

static int check_all_whole(const struct scan *s, struct err *e)
{
    for (size_t i = 0; i < s->nshards; i++)
        if (check_whole(&s->shard[i], e) < 0)
            return err_hint(e, "torch's consolidate_safetensors_files joins them");
    return 0;
}

/* ---- tensors ---- */

static bool key_is(const struct safetensors_tensor *t, const char *key)
{
    return t->name_len == strlen(key) && memcmp(t->name, key, t->name_len) == 0;
}

/* Input embeddings of the models whose output layer is lm_head.weight. */
static bool is_embedding(const struct safetensors_tensor *t)
{
    static const char *const keys[] = {
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "model.decoder.embed_tokens.weight",
        "transformer.word_embeddings.weight",
        "model.language_model.embed_tokens.weight",
    };

    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        if (key_is(t, keys[i]))
            return true;
    return false;
}

/* `fault` NULL, or why it must not be read. */
static int add_tensor(struct scan *s, const struct shard *f,
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

    s->has_head = s->has_head || key_is(t, "lm_head.weight");
    s->has_embedding = s->has_embedding || is_embedding(t);
    safetensors_shape(t, &shape);
    if (!fault)
        return sink_tensor_plain(s->sink, &out, f->number, f->h.data + t->begin, e);
    if (sink_tensor_begin(s->sink, &out, e) < 0)
        return -e->code;
    if (sink_fault(s->sink, "%s", fault) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

static int add_whole_file(struct scan *s, const struct shard *f, const char *part,
                          struct err *e)
{
    for (size_t i = 0; i < f->h.count; i++)
        if (add_tensor(s, f, &f->h.tensor[i], part, NULL, e) < 0)
            return -e->code;
    return 0;
}

static int set_fault(struct sink *sink, const struct shard *f)
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
static int add_unknown(struct scan *s, const char *key, const struct shard *f,
                       struct err *e)
{
    static const struct shape none = {.nd = 1};
    struct sink_tensor t = {.key = key,
                            .key_len = strlen(key),
                            .dtype = DTYPE_U8,
                            .shape = &none,
                            .role = -1};

    s->has_head = s->has_head || strcmp(key, "lm_head.weight") == 0;
    if (sink_tensor_begin(s->sink, &t, e) < 0)
        return -e->code;
    if (set_fault(s->sink, f) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

/* ---- one file ---- */

static int scan_single(struct scan *s, const char *name, struct err *e)
{
    struct shard *f;

    if (new_shards(s, 1, e) < 0)
        return -e->code;
    f = &s->shard[0];
    f->name = name;
    if (read_shards(s, e) < 0)
        return -e->code;
    if (f->missing)
        return err_set(e, ESTALE, "%s is gone", name);
    if (!f->read) {
        *e = f->err; /* a damaged header fails as one file */
        return -e->code;
    }
    if (check_all_whole(s, e) < 0 || add_whole_file(s, f, NULL, e) < 0)
        return -e->code;
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

/* The tensors of one file that the index puts there; loaders ignore all others. */
static int add_indexed_file(struct scan *s, size_t file, struct err *e)
{
    const struct shard *f = &s->shard[file];
    const struct safetensors_tensor *first = NULL;
    size_t unlisted = 0;

    for (size_t i = 0; i < f->h.count; i++) {
        const struct safetensors_tensor *t = &f->h.tensor[i];
        ptrdiff_t at = hf_index_find(&s->index, t->name, t->name_len);

        if (at < 0 || s->index.entry[at].file != file) {
            first = first ? first : t;
            unlisted++;
            continue;
        }
        s->found[at] = true;
        if (add_tensor(s, f, t, NULL, NULL, e) < 0)
            return -e->code;
    }
    if (unlisted > 0 &&
        sink_warning(s->sink, "unlisted-tensor",
                     "%s holds %zu tensors that the index does not put there, as "
                     "\"%.200s\": they are not shown",
                     f->name, unlisted, first->name) < 0)
        return err_nomem(e);
    return 0;
}

static int scan_indexed(struct scan *s, struct err *e)
{
    /* First watched, then read: also a damaged index is read anew when it changes. */
    if (sink_hide(s->sink, s->layout.main, true, e) < 0 ||
        read_index(s, s->layout.main, e) < 0 || new_shards(s, s->index.nfiles, e) < 0)
        return -e->code;
    for (size_t i = 0; i < s->nshards; i++) {
        s->shard[i].name = s->index.file[i].name;
        s->shard[i].fault = s->index.file[i].fault;
    }
    if (read_shards(s, e) < 0 || check_all_whole(s, e) < 0)
        return -e->code;
    for (size_t i = 0; i < s->nshards; i++)
        if (add_indexed_file(s, i, e) < 0)
            return -e->code;
    for (size_t i = 0; i < s->index.count; i++)
        if (!s->found[i] && add_unknown(s, s->index.entry[i].key,
                                        &s->shard[s->index.entry[i].file], e) < 0)
            return -e->code;
    return 0;
}

/* ---- a numbered set without an index ---- */

static int find_set(struct scan *s, struct err *e)
{
    const struct listing *l = s->c->listing;
    struct safetensors_number n;
    size_t count = 0;

    if (new_shards(s, s->layout.present, e) < 0)
        return -e->code;
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (count < s->nshards && entry->st.kind == ENTRY_FILE &&
            safetensors_has_stem(entry->name, s->layout.stem, s->layout.stem_len, &n) &&
            n.n == s->layout.total)
            s->shard[count++].name = entry->name;
    }
    if (s->layout.present == s->layout.total)
        return 0;
    return sink_warning(
        s->sink, "missing-file", "%u of the %u files that %s counts are missing",
        s->layout.total - s->layout.present, s->layout.total, s->layout.main);
}

/* Which file had the key first; two files with one key make it worthless. */
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

static int add_owned(struct scan *s, const struct owner *o, size_t count, struct err *e)
{
    for (size_t i = 0, n; i < count; i += n) {
        const struct shard *f = &s->shard[o[i].file];
        char fault[2 * NAME_MAX + 64];

        for (n = 1; i + n < count && same_key(&o[i], &o[i + n]); n++)
            ;
        if (n > 1)
            snprintf(fault, sizeof fault, "it is in %s and in %s, and no index decides",
                     f->name, s->shard[o[i + 1].file].name);
        if (add_tensor(s, f, o[i].t, NULL, n > 1 ? fault : NULL, e) < 0)
            return -e->code;
    }
    return 0;
}

static int add_set(struct scan *s, struct err *e)
{
    CLEANUP_FREE struct owner *owner = NULL;
    size_t count = 0, n = 0;

    for (size_t i = 0; i < s->nshards; i++)
        count += s->shard[i].h.count;
    owner = calloc(count + 1, sizeof *owner);
    if (!owner)
        return err_nomem(e);
    for (size_t i = 0; i < s->nshards; i++)
        for (size_t k = 0; k < s->shard[i].h.count; k++)
            owner[n++] = (struct owner){&s->shard[i].h.tensor[k], (uint32_t)i};
    qsort(owner, count, sizeof *owner, compare_owners);
    return add_owned(s, owner, count, e);
}

static int scan_numbered(struct scan *s, struct err *e)
{
    size_t bad = 0;

    if (find_set(s, e) < 0 || read_shards(s, e) < 0 || check_all_whole(s, e) < 0)
        return -e->code;
    for (size_t i = 0; i < s->nshards; i++) {
        if (s->shard[i].read)
            continue;
        if (++bad == s->nshards) {
            *e = s->shard[i].err;
            return -e->code;
        }
        if (sink_warning(s->sink, "damaged-file", "%s", s->shard[i].err.text) < 0)
            return err_nomem(e);
    }
    return add_set(s, e);
}

/* ---- what stands beside the model ---- */

/* An adapter beside its base model: its tensors are there too, of role other. */
static int scan_adapter_beside(struct scan *s, struct err *e)
{
    CLEANUP(shard_release) struct shard f = {.name = s->layout.adapter, .shown = true};

    if (!f.name)
        return 0;
    if (register_shard(s, &f, e) < 0)
        return -e->code;
    if (!f.missing && read_header(s, &f, &f.err) < 0 && stops_scan(f.err.code)) {
        *e = f.err;
        return -e->code;
    }
    if (f.read)
        return add_whole_file(s, &f, f.name, e);
    return f.missing ? 0 : sink_warning(s->sink, "damaged-file", "%s", f.err.text);
}

static bool is_shard(const struct scan *s, const char *name)
{
    for (size_t i = 0; i < s->nshards; i++)
        if (strcmp(s->shard[i].name, name) == 0)
            return true;
    return false;
}

/*
 * Numbered files of the model's stem that are no part of it are left from an older save.
 * Loaders that take all *.safetensors would load them over the model: they are hidden.
 */
static int hide_stale(struct scan *s, struct err *e)
{
    const struct listing *l = s->c->listing;
    struct safetensors_number n;
    const char *first = NULL;
    size_t count = 0;

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;

        if (!safetensors_has_stem(name, s->layout.stem, s->layout.stem_len, &n) ||
            is_shard(s, name))
            continue;
        if (sink_hide(s->sink, name, false, e) < 0)
            return -e->code;
        first = first ? first : name;
        count++;
    }
    if (count == 0)
        return 0;
    return sink_warning(s->sink, "unlisted-file",
                        "%zu files as %s are no part of %s: they are not shown", count,
                        first, s->layout.main);
}

/* transformers takes the single file and never looks at the index beside it. */
static int hide_index(struct scan *s, struct err *e)
{
    char name[NAME_MAX + 1];
    const struct listing_entry *entry;

    snprintf(name, sizeof name, "%s.index.json", s->layout.main);
    entry = listing_find(s->c->listing, name);
    if (s->layout.kind != SAFETENSORS_SINGLE || !entry)
        return 0;
    if (sink_hide(s->sink, entry->name, true, e) < 0)
        return -e->code;
    return sink_warning(s->sink, "two-models",
                        "%s and %s are both there: the single file is the model",
                        s->layout.main, entry->name);
}

/* torch leaves the shards that it made the full files of beside or below them. */
static int warn_of_pieces(struct scan *s)
{
    struct listing *below = listing_sub(s->c->listing, "sharded");

    for (size_t k = 0; k < 2; k++) {
        const struct listing *l = k == 0 ? s->c->listing : below;

        for (size_t i = 0; l && i < listing_count(l); i++)
            if (safetensors_is_piece(listing_at(l, i)->name))
                return sink_warning(
                    s->sink, "sharded-copy",
                    "full files and shards (%s) of torch's HuggingFaceStorageWriter: the "
                    "full files are shown; torch writes 0-d tensors there as zeros",
                    listing_at(l, i)->name);
    }
    return 0;
}

/* ---- the checkpoint as a whole ---- */

/* What nobody can read of config.json is not our business: it is a side file. */
static int config_says_tied(struct listing *l, bool *tied, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len;

    *tied = false;
    if (listing_read(l, "config.json", MAX_CONFIG, &text, &len, &why) == 0 &&
        json_parse(text, len, NULL, &doc, &why) == 0)
        json_bool(json_get(doc, "tie_word_embeddings"), tied);
    if (!stops_scan(why.code))
        return 0;
    *e = why;
    return err_wrap(e, "config.json");
}

/* safetensors cannot hold two names of one storage: the writer left one out. */
static int tell_tied(struct scan *s, struct err *e)
{
    static const char key[] = "lm_head.weight", value[] = "\"tied, not stored\"";
    bool tied;

    if (s->layout.kind == SAFETENSORS_ADAPTER || s->has_head || !s->has_embedding ||
        !listing_find(s->c->listing, "config.json"))
        return 0;
    if (sink_watch(s->sink, "config.json", e) < 0 ||
        config_says_tied(s->c->listing, &tied, e) < 0)
        return -e->code;
    return tied ? sink_object(s->sink, key, sizeof key - 1, value, sizeof value - 1, e)
                : 0;
}

static const char *framework_of(const struct scan *s)
{
    static const struct {
        const char *format, *framework;
    } names[] = {{"pt", "PyTorch"}, {"tf", "TensorFlow"}, {"flax", "Flax"},
                 {"np", "NumPy"},   {"mlx", "MLX"},       {"paddle", "PaddlePaddle"}};

    for (size_t i = 0; i < s->nshards; i++) {
        const char *format = s->shard[i].h.format;

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
    char topology[64], path[PATH_MAX];
    struct sink_checkpoint about = {.format = format_of(s),
                                    .framework = framework_of(s),
                                    .topology = topology,
                                    .metadata_file = path,
                                    .adapter = s->layout.kind == SAFETENSORS_ADAPTER};

    snprintf(topology, sizeof topology, "{\"files\": %zu}", s->nshards);
    if (path_of(s, main, path, e) < 0)
        return -e->code;
    return sink_checkpoint(s->sink, &about, e);
}

static int scan_model(struct scan *s, const char *main, struct err *e)
{
    switch (s->layout.kind) {
    case SAFETENSORS_INDEXED:
        return scan_indexed(s, e);
    case SAFETENSORS_NUMBERED:
        return scan_numbered(s, e);
    case SAFETENSORS_PIECES:
        err_set(e, ENOTSUP, "%s: %s", main, not_yet);
        return err_hint(e, "torch's consolidate_safetensors_files joins them");
    case SAFETENSORS_NONE:
    case SAFETENSORS_SINGLE:
    case SAFETENSORS_ADAPTER:
        break;
    }
    return scan_single(s, main, e);
}

static int scan_beside(struct scan *s, struct err *e)
{
    if (s->layout.kind == SAFETENSORS_NONE || s->layout.kind == SAFETENSORS_ADAPTER)
        return 0;
    if (scan_adapter_beside(s, e) < 0 || hide_stale(s, e) < 0 || hide_index(s, e) < 0)
        return -e->code;
    return warn_of_pieces(s);
}

static int st_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    CLEANUP(scan_release) struct scan s = {.c = c, .sink = sink};
    const char *main = c->file;

    if (!main) {
        safetensors_layout(c->listing, &s.layout);
        main = s.layout.main;
    }
    if (!main)
        return err_set(e, ESTALE, "no safetensors files any more");
    /* First without what the headers tell: also a scan that fails has a format. */
    if (tell_checkpoint(&s, main, e) < 0 || scan_model(&s, main, e) < 0 ||
        scan_beside(&s, e) < 0 || tell_tied(&s, e) < 0)
        return -e->code;
    return tell_checkpoint(&s, main, e);
}

static const struct chunk_codec *const st_codecs[] = {&safetensors_codec, NULL};

const struct format_driver format_safetensors = {
    .name = "safetensors",
    .title = "Hugging Face safetensors: single file, sharded with index, PEFT adapter",
    .bid = st_bid,
    .bid_file = st_bid_file,
    .scan = st_scan,
    .codecs = st_codecs,
};
