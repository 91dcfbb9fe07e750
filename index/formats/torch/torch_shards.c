/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_shards.c - pytorch_model-0000K-of-0000N.bin, with an index or without. */
#include "index/formats/torch/torch_shards.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/err.h"
#include "base/keyset.h"
#include "base/pool.h"
#include "index/formats/format.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_layout.h"
#include "index/formats/torch/torch_walk.h"

enum { MAX_INDEX = 100000000 }; /* what the JSON reader takes */

struct shard {
    struct torch_file f;
    const char *fault; /* why it is not even opened, or NULL */
    bool missing;
    struct err err; /* why it cannot be read */
};

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct shard *shard;
    size_t nshards;
    /* With an index. */
    struct hf_index index;
    bool *found; /* entries of the index */
    size_t unlisted, again;
    char *first_unlisted, *first_again;
    bool no_memory;
    struct keyset once; /* keys that came */
    /* Without: those that came again. */
    char **twice;
    size_t ntwice;
};

static void scan_release(struct scan *s)
{
    for (size_t i = 0; i < s->nshards; i++)
        torch_file_close(&s->shard[i].f);
    for (size_t i = 0; i < s->ntwice; i++)
        free(s->twice[i]);
    free(s->twice);
    free(s->shard);
    free(s->found);
    free(s->first_unlisted);
    free(s->first_again);
    keyset_release(&s->once);
    hf_index_release(&s->index);
}

/* ---- the files ---- */

/* Damage of one file is told with its tensors; these stop the scan. */
static bool stops_scan(int code)
{
    return code == ESTALE || code == ENOMEM || code == EMFILE || code == ENFILE ||
           code == EINTR;
}

static int load_nth(void *user, size_t i, struct err *e)
{
    struct scan *s = user;
    struct shard *f = &s->shard[i];

    if (f->fault || f->missing || torch_file_load(s->c, &f->f, &f->err) == 0 ||
        !stops_scan(f->err.code))
        return 0;
    return err_copy(e, &f->err);
}

static int register_shard(struct scan *s, struct shard *f, struct err *e)
{
    if (f->fault)
        return 0;
    if (torch_file_register(s->sink, &f->f, e) == 0)
        return 0;
    if (e->code != ENOENT)
        return -e->code;
    *e = (struct err){0};
    f->missing = true;
    return sink_warning(s->sink, "missing-file", "%s is missing", f->f.path) < 0
               ? err_nomem(e)
               : 0;
}

static int load_shards(struct scan *s, struct err *e)
{
    for (size_t i = 0; i < s->nshards; i++)
        TRY(register_shard(s, &s->shard[i], e));
    return pool_each(s->c->pool, s->nshards, load_nth, s, e);
}

static int new_shards(struct scan *s, size_t n, struct err *e)
{
    s->shard = calloc(n + 1, sizeof *s->shard);
    s->nshards = s->shard ? n : 0;
    return s->shard ? 0 : err_nomem(e);
}

/* When not one file can be read, neither can the model. */
static int warn_damaged(struct scan *s, struct err *e)
{
    size_t bad = 0;

    for (size_t i = 0; i < s->nshards; i++) {
        const struct shard *f = &s->shard[i];

        if (f->f.zip || f->fault || f->missing)
            continue;
        if (++bad == s->nshards) {
            return err_copy(e, &f->err);
        }
        if (sink_warning(s->sink, "damaged-file", "%s", f->err.text) < 0)
            return err_nomem(e);
    }
    return 0;
}

static const struct torch_report plain = {
    .prefix = "", .role = ROLE_MODEL, .entries = true, .strict = true};

/* ---- tensors that cannot be read ---- */

static int set_fault(struct sink *sink, const struct shard *f)
{
    if (f->fault)
        return f->f.path[0] ? sink_fault(sink, "%s: \"%.200s\"", f->fault, f->f.path)
                            : sink_fault(sink, "%s", f->fault);
    if (f->missing)
        return sink_fault(sink, "%.200s is missing", f->f.path);
    if (!f->f.zip)
        return sink_fault(sink, "%s", f->err.text);
    return sink_fault(
        sink, "the index says that it is in %.200s, which does not hold it", f->f.path);
}

/* Only the name is known: shown as empty bytes. `f` NULL: it is in several files. */
static int add_unknown(struct scan *s, const char *key, enum role role,
                       const struct shard *f, struct err *e)
{
    static const struct shape none = {.nd = 1};
    const struct sink_tensor t = {.key = key,
                                  .key_len = strlen(key),
                                  .dtype = DTYPE_U8,
                                  .shape = &none,
                                  .role = (int)role};

    TRY(sink_tensor_begin(s->sink, &t, e));
    if ((f ? set_fault(s->sink, f)
           : sink_fault(s->sink, "it is in several files, and no index decides")) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

/* ---- with an index ---- */

static int read_index(struct scan *s, const char *name, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    size_t len;

    if (listing_read(s->c->listing, name, MAX_INDEX, &text, &len, e) < 0 ||
        hf_index_parse(text, len, ".bin", &s->index, e) < 0)
        return err_wrap(e, "%s", name);
    s->found = calloc(s->index.count + 1, sizeof *s->found);
    return s->found ? new_shards(s, s->index.nfiles, e) : err_nomem(e);
}

/* Which key it was first, for a message. */
static void note_first(char **first, const char *key, size_t len)
{
    if (!*first)
        *first = strndup(key, MIN(len, (size_t)200));
}

/*
 * Loaders read all files in the order of their names, and the last tensor of a key stays: so
 * they are reported from the last one on, and what comes again is not.
 */
static bool is_read(void *user, const char *key, size_t len)
{
    struct scan *s = user;
    ptrdiff_t at = hf_index_find(&s->index, key, len);
    int rc = keyset_add(&s->once, key, len);

    s->no_memory |= rc < 0;
    if (at >= 0)
        s->found[at] = true;
    if (rc == 0) {
        s->again++;
        note_first(&s->first_again, key, len);
    } else if (at < 0) {
        s->unlisted++;
        note_first(&s->first_unlisted, key, len);
    }
    return rc != 0;
}

static int report_read(struct scan *s, size_t i, struct err *e)
{
    struct torch_report how = plain;

    how.wants = is_read;
    how.user = s;
    TRY(torch_file_report_loaded(s->sink, &s->shard[i].f, &how, e));
    return s->no_memory ? err_nomem(e) : 0;
}

/*
 * Keys of the index that are in no file: they are listed, and give EIO. One that its file does
 * not hold is missing for no loader: it is no part of model.safetensors.
 */
static int add_unread(struct scan *s, size_t *lost, const char **first, struct err *e)
{
    *lost = 0;
    for (size_t i = 0; i < s->index.count; i++) {
        const struct hf_index_entry *x = &s->index.entry[i];
        bool is_lost;

        if (s->found[i])
            continue;
        is_lost = s->shard[x->file].f.zip != NULL;
        if (is_lost && (*lost)++ == 0)
            *first = x->key;
        TRY(add_unknown(s, x->key, is_lost ? ROLE_OTHER : ROLE_MODEL,
                        &s->shard[x->file], e));
    }
    return 0;
}

static int tell_unlike(struct scan *s, const char *index, struct err *e)
{
    const char *first_lost = NULL;
    size_t lost;
    int rc = 0;

    TRY(add_unread(s, &lost, &first_lost, e));
    if (s->unlisted > 0)
        rc = sink_warning(s->sink, "unlisted-tensor",
                          "%s does not list %zu tensors of the files that it names, as "
                          "%s: they are part of the model, as for all loaders",
                          index, s->unlisted,
                          s->first_unlisted ? s->first_unlisted : "");
    if (rc == 0 && s->again > 0)
        rc = sink_warning(s->sink, "duplicate-key",
                          "%zu tensors are in several files, as %s: that of the last "
                          "file by name counts, as for transformers",
                          s->again, s->first_again ? s->first_again : "");
    if (rc == 0 && lost > 0)
        rc = sink_warning(
            s->sink, "missing-tensor",
            "%s lists %zu tensors that its files do not hold, as %.200s: "
            "they are lost, or the index is of another save: then remove %s",
            index, lost, first_lost, index);
    return rc < 0 ? err_nomem(e) : 0;
}

static int scan_indexed(struct scan *s, const char *name, struct err *e)
{
    /* First watched, then read: also a damaged index is read anew when it changes. */
    TRY(sink_hide(s->sink, name, true, e));
    TRY(read_index(s, name, e));
    for (size_t i = 0; i < s->nshards; i++) {
        s->shard[i].f.path = s->index.file[i].name;
        s->shard[i].fault = s->index.file[i].fault;
    }
    TRY(load_shards(s, e));
    TRY(warn_damaged(s, e));
    for (size_t i = s->nshards; i-- > 0;)
        if (s->shard[i].f.zip)
            TRY(report_read(s, i, e));
    return tell_unlike(s, name, e);
}

/* ---- without one ---- */

static int find_set(struct scan *s, const struct torch_layout *x, struct err *e)
{
    const struct listing *l = s->c->listing;
    size_t count = 0;

    TRY(new_shards(s, x->present, e));
    for (size_t i = 0; i < listing_count(l); i++)
        if (count < s->nshards && listing_at(l, i)->st.kind == ENTRY_FILE &&
            torch_layout_has(x, listing_at(l, i)->name))
            s->shard[count++].f.path = listing_at(l, i)->name;
    if (x->present < x->total &&
        sink_warning(s->sink, "missing-file",
                     "%u of the %u files that %s counts are missing",
                     x->total - x->present, x->total, x->main) < 0)
        return err_nomem(e);
    return 0;
}

/* torch_item_fn: notes keys that two files have. */
static int note_key(void *user, const struct torch_item *item, struct err *e)
{
    struct scan *s = user;
    int rc = keyset_add(&s->once, item->key, item->key_len);
    char **grown;

    if (rc != 0)
        return rc < 0 ? err_nomem(e) : 0;
    grown = reallocarray(s->twice, s->ntwice + 1, sizeof *grown);
    if (!grown)
        return err_nomem(e);
    s->twice = grown;
    s->twice[s->ntwice] = strndup(item->key, item->key_len);
    return s->twice[s->ntwice] ? (s->ntwice++, 0) : err_nomem(e);
}

static int note_keys(struct scan *s, const struct torch_file *f, struct err *e)
{
    CLEANUP(torch_walk_release)
    struct torch_walk w = {
        .zip = f->zip,
        .fn = note_key,
        .user = s,
        .key = {.max = TORCH_MAX_PATH},
        .path = {.max = TORCH_MAX_PATH},
    };

    return torch_walk_value(&w, torch_zip_root(f->zip), e);
}

static bool is_single(void *user, const char *key, size_t len)
{
    const struct scan *s = user;

    for (size_t i = 0; i < s->ntwice; i++)
        if (strlen(s->twice[i]) == len && memcmp(s->twice[i], key, len) == 0)
            return false;
    return true;
}

/* A key that came three times is there twice. */
static int add_twice(struct scan *s, struct err *e)
{
    for (size_t i = 0; i < s->ntwice; i++) {
        if (add_unknown(s, s->twice[i], ROLE_MODEL, NULL, e) == 0)
            continue;
        if (e->code != EEXIST)
            return -e->code;
        *e = (struct err){0};
    }
    return 0;
}

static int scan_set(struct scan *s, struct err *e)
{
    struct torch_report how = plain;

    how.wants = is_single;
    how.user = s;
    TRY(load_shards(s, e));
    TRY(warn_damaged(s, e));
    for (size_t i = 0; i < s->nshards; i++)
        if (s->shard[i].f.zip)
            TRY(note_keys(s, &s->shard[i].f, e));
    for (size_t i = 0; i < s->nshards; i++)
        if (s->shard[i].f.zip)
            TRY(torch_file_report_loaded(s->sink, &s->shard[i].f, &how, e));
    return add_twice(s, e);
}

int torch_shards_scan(const struct scan_context *c, struct sink *sink,
                      const struct torch_layout *layout, size_t *files, struct err *e)
{
    CLEANUP(scan_release) struct scan s = {.c = c, .sink = sink};
    bool indexed = layout->kind == TORCH_LAYOUT_INDEXED;
    int rc = indexed ? scan_indexed(&s, layout->main, e) : find_set(&s, layout, e);

    *files = indexed ? s.nshards : layout->total;
    return rc == 0 && !indexed ? scan_set(&s, e) : rc;
}

int torch_shards_scan_set(const struct scan_context *c, struct sink *sink,
                          const char *const *names, size_t n, struct err *e)
{
    CLEANUP(scan_release) struct scan s = {.c = c, .sink = sink};

    TRY(new_shards(&s, n, e));
    for (size_t i = 0; i < n; i++)
        s.shard[i].f.path = names[i];
    return scan_set(&s, e);
}
