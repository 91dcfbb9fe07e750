/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_dir.c - whole safetensors files of a directory, as a part. */
#include "index/formats/hf/safetensors_dir.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/formats/hf/safetensors_layout.h"
#include "index/key_text.h"

enum {
    MAX_MEMORY = 1 << 26, /* names of files */
    MAX_INDEX = 100000000,
};

static const char index_suffix[] = ".safetensors.index.json";

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    const struct safetensors_how *how;
    struct listing *list;
    struct arena *arena;
    struct safetensors_files files;
};

static bool ends_with(const char *name, const char *end)
{
    size_t len = strlen(name), n = strlen(end);

    return len > n && strcmp(name + len - n, end) == 0;
}

static bool is_wanted(const struct scan *s, const char *name)
{
    return s->how->name ? strcmp(name, s->how->name) == 0
                        : safetensors_is_named(s->list, name);
}

/* "DIR/NAME" in the arena. */
static const char *join(struct scan *s, const char *name)
{
    char path[PATH_MAX];

    if (store_join(s->how->dir, name, path, sizeof path) < 0)
        return NULL;
    return arena_memdup(s->arena, path, strlen(path));
}

static int name_files(struct scan *s, struct err *e)
{
    size_t count = 0;

    TRY(safetensors_files_new(&s->files, listing_count(s->list), e));
    for (size_t i = 0; i < listing_count(s->list); i++) {
        const char *name = listing_at(s->list, i)->name;

        if (!is_wanted(s, name))
            continue;
        s->files.file[count].name = join(s, name);
        s->files.file[count].shown = s->how->shown;
        if (!s->files.file[count++].name)
            return err_set(e, ENAMETOOLONG, "%s: the path is too long", name);
    }
    s->files.count = count;
    return count
               ? 0
               : err_set(e, ENOENT, "no safetensors files in %s any more", s->how->dir);
}

/* Pieces of tensors must never be shown as tensors. */
static bool may_be_pieces(const struct safetensors_file *f)
{
    const char *slash = strrchr(f->name, '/');

    return f->h.dcp_sharding || safetensors_is_piece(slash ? slash + 1 : f->name);
}

static int check_files(struct scan *s, struct err *e)
{
    for (size_t i = 0; i < s->files.count; i++) {
        const struct safetensors_file *f = &s->files.file[i];

        if (f->read && may_be_pieces(f))
            return err_set(e, ENOTSUP, "%s may hold pieces of tensors", f->name);
        if (f->read || f->missing)
            continue;
        if (s->files.count == 1) {
            return err_copy(e, &f->err);
        }
        if (sink_warning(s->sink, "damaged-file", "%s", f->err.text) < 0)
            return err_nomem(e);
    }
    return 0;
}

static int add_tensor(struct scan *s, const struct safetensors_file *f,
                      const struct safetensors_tensor *t, struct err *e)
{
    struct shape shape;
    struct sink_tensor out = {.key = t->name,
                              .key_len = t->name_len,
                              .part = s->how->part,
                              .dtype = t->dtype,
                              .shape = &shape,
                              .role = s->how->role};
    char key[200];
    int r;

    safetensors_shape(t, &shape);
    r = sink_tensor_plain(s->sink, &out, f->number, f->h.data + t->begin, e);
    if (r != -EEXIST)
        return r;
    *e = (struct err){0};
    key_text(key, sizeof key, t->name, t->name_len);
    if (sink_warning(s->sink, "duplicate-key", "%s: %s is there already, shown once",
                     f->name, key) < 0)
        return err_nomem(e);
    return 0;
}

/* A tensor of which only the name is known: empty bytes that cannot be read. */
static int add_missing(struct scan *s, const char *key, const char *file, struct err *e)
{
    static const struct shape none = {.nd = 1};
    struct sink_tensor t = {.key = key,
                            .key_len = strlen(key),
                            .part = s->how->part,
                            .dtype = DTYPE_U8,
                            .shape = &none,
                            .role = s->how->role};
    int r = sink_tensor_begin(s->sink, &t, e);

    if (r == -EEXIST) {
        *e = (struct err){0};
        return 0;
    }
    if (r < 0)
        return r;
    if (sink_fault(s->sink,
                   "the index says that it is in %.200s, which does not hold it",
                   file) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

static int read_index(struct scan *s, const char *name, struct err *e)
{
    CLEANUP(hf_index_release) struct hf_index index = {0};
    CLEANUP_FREE char *text = NULL;
    const char *path = join(s, name);
    struct err why = {0};
    size_t len;

    if (!path || sink_hide(s->sink, path, true, e) < 0)
        return path ? -e->code : err_nomem(e);
    if (listing_read(s->list, name, MAX_INDEX, &text, &len, &why) < 0 ||
        hf_index_parse(text, len, ".safetensors", &index, &why) < 0) {
        if (!safetensors_stops_scan(why.code))
            return sink_warning(s->sink, "damaged-file", "%s: %s", path, why.text);
        return err_copy(e, &why);
    }
    for (size_t i = 0; i < index.count; i++)
        TRY(add_missing(s, index.entry[i].key, index.file[index.entry[i].file].name,
                        e));
    return 0;
}

static int scan(struct scan *s, struct safetensors_told *told, struct err *e)
{
    s->list = listing_below(s->c->listing, s->how->dir);
    s->arena = arena_new(MAX_MEMORY);
    if (!s->arena)
        return err_nomem(e);
    if (!s->list)
        return err_set(e, ENOENT, "there is no directory %s", s->how->dir);
    TRY(name_files(s, e));
    told->files = s->files.count;
    if (store_join(s->c->dir, s->files.file[0].name, told->metadata,
                   sizeof told->metadata) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", s->how->dir);
    TRY(safetensors_files_read(s->c, s->sink, &s->files, e));
    TRY(check_files(s, e));
    for (size_t i = 0; i < s->files.count; i++)
        for (size_t k = 0; k < s->files.file[i].h.count; k++)
            TRY(add_tensor(s, &s->files.file[i], &s->files.file[i].h.tensor[k], e));
    for (size_t i = 0; !s->how->name && i < listing_count(s->list); i++)
        if (ends_with(listing_at(s->list, i)->name, index_suffix))
            TRY(read_index(s, listing_at(s->list, i)->name, e));
    if (s->files.count > 1 || s->how->shown)
        return 0;
    return sink_whole_file(s->sink, s->files.file[0].number, e);
}

int safetensors_dir_report(const struct scan_context *c, struct sink *sink,
                           const struct safetensors_how *how,
                           struct safetensors_told *told, struct err *e)
{
    struct scan s = {.c = c, .sink = sink, .how = how};
    int r;

    *told = (struct safetensors_told){0};
    r = scan(&s, told, e);
    safetensors_files_release(&s.files);
    arena_free(s.arena);
    return r;
}
