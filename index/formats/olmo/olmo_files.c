/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_files.c - whole tensors in safetensors or torch files, with a prefix. */
#include "index/formats/olmo/olmo_files.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/olmo/olmo_key.h"
#include "index/formats/olmo/olmo_pickle.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/formats/hf/safetensors_layout.h"
#include "index/formats/torch/torch_file.h"

enum {
    HEAD = 4096,
    MAX_KEYS = 1 << 30, /* of all files, as their headers */
    CHUNK_DIGITS = 5,
};

static const char SAFETENSORS[] = ".safetensors";
static const char TORCH[] = ".pt";
static const char CHUNK[] = "chunk-";

/* ---- which files ---- */

static bool has_suffix(const char *name, const char *suffix)
{
    size_t len = strlen(name), n = strlen(suffix);

    return len > n && strcmp(name + len - n, suffix) == 0;
}

/* N of chunk-0000N.SUFFIX. */
static bool chunk_number(const char *name, const char *suffix, uint64_t *n)
{
    size_t at = strlen(CHUNK);
    char *end;

    if (strncmp(name, CHUNK, at) != 0 || !isdigit((unsigned char)name[at]))
        return false;
    *n = strtoull(name + at, &end, 10);
    return end - (name + at) >= CHUNK_DIGITS && end - (name + at) < 16 &&
           strcmp(end, suffix) == 0;
}

static bool is_member(const struct olmo_set *set, const struct listing_entry *entry)
{
    struct safetensors_number number;
    uint64_t n;

    if (entry->st.kind != ENTRY_FILE)
        return false;
    if (set->kind == OLMO_SET_CHUNKS)
        return chunk_number(entry->name, set->suffix, &n);
    /* model-00001-of-00002.safetensors is somebody else's. */
    return set->kind == OLMO_SET_SINGLE && has_suffix(entry->name, set->suffix) &&
           strncmp(entry->name, set->stem, strlen(set->stem)) == 0 &&
           !safetensors_numbered(entry->name, &number) &&
           !safetensors_is_piece(entry->name);
}

/* Is the file called as its key, which has '.' for each '-' of `name`? */
static bool is_called(const char *name, size_t len, const char *key, size_t key_len)
{
    if (len != key_len)
        return false;
    for (size_t i = 0; i < len; i++)
        if ((key[i] == '.' ? '-' : key[i]) != name[i])
            return false;
    return true;
}

/* Does the first file hold what a file of its name has to? */
static bool is_proved(struct listing *l, const struct olmo_set *set, const char *name)
{
    size_t stem = strlen(set->stem), end = strlen(name) - strlen(set->suffix);
    bool torch = strcmp(set->suffix, TORCH) == 0;
    size_t got = 0, n = 0;
    char head[HEAD];
    const char *key;

    if (listing_peek(l, name, head, sizeof head, &got) < 0)
        return false;
    if (torch ? torch_sniff(head, got) != TORCH_ZIP
              : !safetensors_magic((const unsigned char *)head, got,
                                   listing_find(l, name)->st.id.size))
        return false;
    key = torch ? olmo_first_torch_key(head, got, &n) : olmo_first_key(head, got, &n);
    if (!key)
        return false;
    return set->kind == OLMO_SET_CHUNKS ||
           (end > stem && is_called(name + stem, end - stem, key, n));
}

static bool try_set(struct listing *l, struct olmo_set *set)
{
    for (size_t i = 0; i < listing_count(l); i++)
        if (is_member(set, listing_at(l, i)))
            return is_proved(l, set, listing_at(l, i)->name);
    return false;
}

void olmo_set_find(struct listing *l, const char *root, struct olmo_set *out)
{
    static const enum olmo_set_kind kinds[] = {OLMO_SET_CHUNKS, OLMO_SET_SINGLE};
    static const char *const suffixes[] = {SAFETENSORS, TORCH};

    for (size_t k = 0; l && k < ARRAY_SIZE(kinds); k++) {
        for (size_t i = 0; i < ARRAY_SIZE(suffixes); i++) {
            *out = (struct olmo_set){.kind = kinds[k]};
            snprintf(out->suffix, sizeof out->suffix, "%s", suffixes[i]);
            snprintf(out->stem, sizeof out->stem, "%s-", root);
            if (try_set(l, out))
                return;
        }
    }
    *out = (struct olmo_set){.kind = OLMO_SET_NONE};
}

/* ---- safetensors ---- */

/* A tensor and where it was found. */
struct found {
    const char *key;
    size_t key_len;
    const struct safetensors_tensor *t;
    const struct safetensors_file *f;
    bool pickled;
};

struct files {
    const struct scan_context *c;
    struct sink *sink;
    const struct olmo_files_how *how;
    struct safetensors_files files;
    struct arena *arena; /* paths and keys */
    struct found *found;
    size_t count;
    struct olmo_pickles pickles;
};

static void files_release(struct files *s)
{
    olmo_pickles_release(&s->pickles);
    safetensors_files_release(&s->files);
    free(s->found);
    arena_free(s->arena);
}

static const char *path_of(struct arena *a, const char *dir, const char *name,
                           struct err *e)
{
    char path[PATH_MAX];
    const char *copy;

    if (store_join(dir, name, path, sizeof path) < 0) {
        err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir, name);
        return NULL;
    }
    copy = arena_memdup(a, path, strlen(path));
    if (!copy)
        err_nomem(e);
    return copy;
}

static int make_key(struct files *s, struct found *x, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};

    buf_adds(&key, s->how->root);
    if (!s->how->encoded)
        buf_add(&key, x->t->name, x->t->name_len);
    else if (olmo_key_decode(x->t->name, x->t->name_len, &key, &x->pickled, e) < 0)
        return err_wrap(e, "%s", x->f->name);
    x->key = buf_failed(&key) ? NULL : arena_memdup(s->arena, key.data, key.len);
    x->key_len = key.len;
    return x->key ? 0 : err_nomem(e);
}

static int compare_found(const void *a, const void *b)
{
    const struct found *x = a, *y = b;
    int order = memcmp(x->key, y->key, MIN(x->key_len, y->key_len));

    if (order == 0)
        order = (x->key_len > y->key_len) - (x->key_len < y->key_len);
    return order ? order : (x->f > y->f) - (x->f < y->f);
}

static int collect(struct files *s, struct err *e)
{
    size_t count = 0;

    for (size_t i = 0; i < s->files.count; i++)
        count += s->files.file[i].read ? s->files.file[i].h.count : 0;
    s->found = calloc(count + 1, sizeof *s->found);
    if (!s->found)
        return err_nomem(e);
    for (size_t i = 0; i < s->files.count; i++) {
        const struct safetensors_file *f = &s->files.file[i];

        for (size_t k = 0; f->read && k < f->h.count; k++) {
            struct found *x = &s->found[s->count++];

            *x = (struct found){.t = &f->h.tensor[k], .f = f};
            TRY(make_key(s, x, e));
        }
    }
    qsort(s->found, s->count, sizeof *s->found, compare_found);
    return 0;
}

static int note_pickle(struct files *s, const struct found *x, struct err *e)
{
    const struct olmo_pickle p = {.key = x->key,
                                  .file = x->f,
                                  .offset = x->f->h.data + x->t->begin,
                                  .length = x->t->end - x->t->begin};

    return olmo_pickles_add(&s->pickles, &p, e);
}

/* `other`: a second one of the same key, or NULL. */
static int add_tensor(struct files *s, const struct found *x, const struct found *other,
                      struct err *e)
{
    struct shape shape;
    const struct sink_tensor out = {.key = x->key,
                                    .key_len = x->key_len,
                                    .part = s->how->part,
                                    .wrapper = strlen(s->how->root),
                                    .dtype = x->t->dtype,
                                    .shape = &shape,
                                    .role = x->pickled ? ROLE_OTHER : s->how->role};

    safetensors_shape(x->t, &shape);
    if (!other) {
        if (x->pickled)
            TRY(note_pickle(s, x, e));
        return sink_tensor_plain(s->sink, &out, x->f->number,
                                 x->f->h.data + x->t->begin, e);
    }
    TRY(sink_tensor_begin(s->sink, &out, e));
    if (sink_fault(s->sink, "it is in %.200s and in %.200s, and nothing decides",
                   x->f->name, other->f->name) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

static int add_tensors(struct files *s, struct err *e)
{
    for (size_t i = 0, n; i < s->count; i += n) {
        for (n = 1;
             i + n < s->count && s->found[i].key_len == s->found[i + n].key_len &&
             memcmp(s->found[i].key, s->found[i + n].key, s->found[i].key_len) == 0;
             n++)
            ;
        TRY(add_tensor(s, &s->found[i], n > 1 ? &s->found[i + 1] : NULL, e));
    }
    return olmo_pickles_report(s->c, s->sink, NULL, &s->pickles, e);
}

/* Damage of the only file is returned, of one among others told. */
static int check_files(struct files *s, struct err *e)
{
    size_t good = 0;

    for (size_t i = 0; i < s->files.count; i++)
        good += s->files.file[i].read;
    for (size_t i = 0; i < s->files.count; i++) {
        const struct safetensors_file *f = &s->files.file[i];

        if (f->missing)
            return err_set(e, ESTALE, "%s is gone", f->name);
        if (f->read)
            continue;
        if (good == 0) {
            return err_copy(e, &f->err);
        }
        if (sink_warning(s->sink, "damaged-file", "%s", f->err.text) < 0)
            return err_nomem(e);
    }
    return 0;
}

static int report_safetensors(const struct scan_context *c, struct sink *sink,
                              const struct olmo_files_how *how, const char *const *name,
                              size_t count, struct err *e)
{
    CLEANUP(files_release)
    struct files s = {.c = c, .sink = sink, .how = how, .arena = arena_new(MAX_KEYS)};

    if (!s.arena)
        return err_nomem(e);
    TRY(safetensors_files_new(&s.files, count, e));
    for (size_t i = 0; i < count; i++) {
        s.files.file[i].name = path_of(s.arena, how->dir, name[i], e);
        if (!s.files.file[i].name)
            return -e->code;
    }
    TRY(safetensors_files_read(c, sink, &s.files, e));
    TRY(check_files(&s, e));
    TRY(collect(&s, e));
    return add_tensors(&s, e);
}

/* ---- torch files ---- */

static int report_torch_file(const struct scan_context *c, struct sink *sink,
                             const struct torch_report *how, const char *path,
                             struct err *e)
{
    CLEANUP(torch_file_close) struct torch_file f = {.path = path};

    if (torch_file_register(sink, &f, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    TRY(torch_file_load(c, &f, e));
    return torch_file_report_loaded(sink, &f, how, e);
}

static int report_torch(const struct scan_context *c, struct sink *sink,
                        const struct olmo_files_how *how, const char *const *name,
                        size_t count, struct err *e)
{
    const struct torch_report report = {
        .prefix = how->root,
        .prefix_is_wrapper = true,
        .part = how->part,
        .role = how->role,
        .entries = true,
        .object = how->root,
    };
    size_t good = 0;

    for (size_t i = 0; i < count; i++) {
        char path[PATH_MAX];
        struct err why = {0};

        if (store_join(how->dir, name[i], path, sizeof path) < 0)
            return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", how->dir,
                           name[i]);
        if (report_torch_file(c, sink, &report, path, &why) == 0) {
            good++;
        } else if (!torch_file_is_damaged(why.code) || (i + 1 == count && good == 0)) {
            return err_copy(e, &why);
        } else if (sink_warning(sink, "damaged-file", "%s: %s", path, why.text) < 0) {
            return err_nomem(e);
        }
    }
    return 0;
}

/* ---- sets ---- */

static int tell_first(const struct scan_context *c, const struct olmo_files_how *how,
                      const char *name, struct olmo_files_told *told, struct err *e)
{
    char path[PATH_MAX];

    if (store_join(how->dir, name, path, sizeof path) < 0 ||
        store_join(c->dir, path, told->metadata, sizeof told->metadata) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", how->dir, name);
    return 0;
}

/* Chunks count from 0; how many there were nobody wrote down. */
static int check_numbers(struct sink *sink, const struct olmo_files_how *how,
                         const struct olmo_set *set, const char *last, size_t count,
                         struct err *e)
{
    uint64_t n = 0;

    if (set->kind != OLMO_SET_CHUNKS || !chunk_number(last, set->suffix, &n) ||
        n + 1 == count)
        return 0;
    return sink_warning(sink, "missing-file",
                        "%s%s%zu of the chunks up to %s are there", how->dir,
                        how->dir[0] ? ": " : "", count, last) < 0
               ? err_nomem(e)
               : 0;
}

int olmo_set_report(const struct scan_context *c, struct sink *sink,
                    const struct olmo_files_how *how, const struct olmo_set *set,
                    struct olmo_files_told *told, struct err *e)
{
    struct listing *l = listing_below(c->listing, how->dir);
    CLEANUP_FREE const char **name = NULL;
    size_t count = 0;

    *told = (struct olmo_files_told){0};
    name = l ? calloc(listing_count(l) + 1, sizeof *name) : NULL;
    if (!name)
        return l ? err_nomem(e) : err_set(e, ESTALE, "%s is gone", how->dir);
    for (size_t i = 0; i < listing_count(l); i++)
        if (is_member(set, listing_at(l, i)))
            name[count++] = listing_at(l, i)->name;
    if (count == 0)
        return err_set(e, ESTALE, "%s: its files are gone", how->dir);
    told->files = count;
    TRY(tell_first(c, how, name[0], told, e));
    TRY(check_numbers(sink, how, set, name[count - 1], count, e));
    return strcmp(set->suffix, TORCH) == 0
               ? report_torch(c, sink, how, name, count, e)
               : report_safetensors(c, sink, how, name, count, e);
}

int olmo_file_report(const struct scan_context *c, struct sink *sink,
                     const struct olmo_files_how *how, const char *name,
                     struct olmo_files_told *told, struct err *e)
{
    *told = (struct olmo_files_told){.files = 1};
    TRY(tell_first(c, how, name, told, e));
    return has_suffix(name, SAFETENSORS) ? report_safetensors(c, sink, how, &name, 1, e)
                                         : report_torch(c, sink, how, &name, 1, e);
}
