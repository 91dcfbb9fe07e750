/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_dir.c - an array that lies in a directory, a file for each chunk. */
#include "index/formats/zarr/zarr_dir.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/formats/format.h"
#include "index/sink.h"

enum { NAMES_MEMORY = 1 << 30 };

/* Does the failure of one file leave the rest of the scan any sense? */
static bool stops_scan(int code)
{
    return code == ENOMEM || code == ESTALE || code == EMFILE || code == ENFILE;
}

static int join(const char *dir, const char *name, char *dst, struct err *e)
{
    if (store_join(dir, name, dst, PATH_MAX) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir, name);
    return 0;
}

/* ---- metadata ---- */

int zarr_dir_read(struct store *store, const char *root, const char *path,
                  const char *name, size_t max, char **text, size_t *len, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP_FREE char *data = NULL;
    char dir[PATH_MAX], full[PATH_MAX];

    TRY(join(root, path, dir, e));
    TRY(join(dir, name, full, e));
    TRY(store->ops->open(store, full, &src, e));
    if (src->size > max)
        return err_set(e, EFBIG, "%s has %" PRIu64 " bytes, the most is %zu", name,
                       src->size, max);
    data = malloc(src->size + 1);
    if (!data)
        return err_nomem(e);
    TRY(source_read(src, 0, src->size, data, e));
    TRY(source_check(src, e));
    data[src->size] = '\0';
    *len = src->size;
    *text = steal(&data);
    return 0;
}

static int parse_array(const struct zarr_dir *d, const char *text, size_t len,
                       struct zarr_array *a, struct err *e)
{
    return strcmp(d->metadata, "zarr.json") == 0 ? zarr_parse_v3(text, len, a, e)
                                                 : zarr_parse_v2(text, len, a, e);
}

static int read_array(const struct zarr_dir *d, struct zarr_array *a, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len;

    if (d->text && d->len <= ZARR_MAX_JSON)
        return parse_array(d, d->text, d->len, a, e);
    if (zarr_dir_read(d->store, d->root, d->path, d->metadata, ZARR_MAX_JSON, &text,
                      &len, &why) < 0) {
        if (stops_scan(why.code)) {
            return err_copy(e, &why);
        }
        zarr_array_broken(a, "its %s: %.180s", d->metadata, why.text);
        return 0;
    }
    return parse_array(d, text, len, a, e);
}

/* ---- chunks ---- */

/* A chunk's file, for shards whose index has to be read. */
struct chunk_file {
    uint32_t number;
    const char *path; /* relative to the checkpoint's directory */
};

/* A directory below the array's in which chunks lie. */
struct below {
    struct below *next;
    const char *prefix; /* "" or "c/0/" */
};

struct walk {
    const struct zarr_dir *d;
    const struct zarr_array *a;
    struct zarr_chunks *chunks;
    struct sink *sink;
    struct arena *arena;
    struct below *todo;
    struct chunk_file *file; /* malloc; numbers rise */
    size_t nfile, cap;
};

static int push_below(struct walk *w, const char *prefix, size_t len, struct err *e)
{
    struct below *b = arena_alloc(w->arena, sizeof *b);

    if (!b || !(b->prefix = arena_memdup(w->arena, prefix, len)))
        return err_nomem(e);
    b->next = w->todo;
    w->todo = b;
    return 0;
}

/* Only shards are read again. Numbers of files that are new rise one by one. */
static int note_file(struct walk *w, uint32_t number, const char *path, struct err *e)
{
    if (!w->a->sharded)
        return 0;
    if (!VEC_ROOM(w->file, w->nfile, w->cap))
        return err_nomem(e);
    w->file[w->nfile].number = number;
    w->file[w->nfile].path = arena_memdup(w->arena, path, strlen(path));
    return w->file[w->nfile++].path ? 0 : err_nomem(e);
}

static int add_file(struct walk *w, const char *key, size_t len, struct err *e)
{
    struct zarr_value v = {.kind = ZARR_STORED};
    char path[PATH_MAX];
    struct file_id id;

    TRY(join(w->d->path, key, path, e));
    TRY(sink_file(w->sink, path, strlen(path), &v.file, e));
    if (!sink_file_id(w->sink, v.file, &id)) {
        v.kind = ZARR_BROKEN;
        v.why = "its file is gone, or cannot be looked at";
        return zarr_chunks_add(w->chunks, key, len, &v, e);
    }
    v.length = id.size;
    TRY(note_file(w, v.file, path, e));
    return zarr_chunks_add(w->chunks, key, len, &v, e);
}

static int add_other(struct walk *w, const char *key, size_t len, bool dir,
                     struct err *e)
{
    const struct zarr_value v = {
        .kind = ZARR_BROKEN,
        .why = dir ? "is a directory" : "is neither a file nor a directory",
    };

    return zarr_chunks_add(w->chunks, key, len, &v, e);
}

/*
 * Names that are chunks' keys, and directories that lead to some. Whether a name is a key
 * at all is asked first: stray files are not even registered.
 */
static int add_entry(struct walk *w, const char *prefix,
                     const struct listing_entry *entry, struct err *e)
{
    bool dir = entry->st.kind == ENTRY_DIR;
    char key[PATH_MAX];
    int len = snprintf(key, sizeof key, "%s%s/", prefix, entry->name);

    if (len < 0 || (size_t)len >= sizeof key)
        return err_set(e, ENAMETOOLONG, "%s%s: the path is too long", prefix,
                       entry->name);
    if (dir && zarr_chunks_wants(w->a, key, (size_t)len))
        return push_below(w, key, (size_t)len, e);
    key[--len] = '\0';
    if (!zarr_chunks_is_key(w->chunks, key, (size_t)len))
        return 0;
    return entry->st.kind == ENTRY_FILE ? add_file(w, key, (size_t)len, e)
                                        : add_other(w, key, (size_t)len, dir, e);
}

static int add_entries(struct walk *w, const char *prefix, const struct listing *l,
                       struct err *e)
{
    for (size_t i = 0; i < listing_count(l); i++)
        TRY(add_entry(w, prefix, listing_at(l, i), e));
    return 0;
}

/* First watched, then listed: what comes in between makes the index stale. */
static int list_below(struct walk *w, const char *prefix, struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    char path[PATH_MAX], full[PATH_MAX];
    size_t len;

    if (!prefix[0] && w->d->listing)
        return add_entries(w, prefix, w->d->listing, e);
    TRY(join(w->d->path, prefix, path, e));
    len = strlen(path);
    while (len > 0 && path[len - 1] == '/')
        path[--len] = '\0';
    if (len > 0)
        TRY(sink_watch(w->sink, path, e));
    TRY(join(w->d->root, path, full, e));
    TRY(w->d->store->ops->list(w->d->store, full, &l, e));
    return add_entries(w, prefix, l, e);
}

static int list_all(struct walk *w, struct err *e)
{
    if (w->a->why[0])
        return 0;
    TRY(push_below(w, "", 0, e));
    while (w->todo) {
        const struct below *b = w->todo;

        w->todo = b->next;
        TRY(list_below(w, b->prefix, e));
    }
    return 0;
}

/* ---- shards' indexes ---- */

static int compare_files(const void *key, const void *item)
{
    const uint32_t *number = key;
    const struct chunk_file *f = item;

    return (*number > f->number) - (*number < f->number);
}

/* zarr_read_fn */
static int read_file(void *user, uint32_t file, uint64_t off, size_t len, void *dst,
                     struct err *e)
{
    const struct walk *w = user;
    const struct chunk_file *f =
        bsearch(&file, w->file, w->nfile, sizeof *w->file, compare_files);
    CLEANUP(source_putp) struct source *src = NULL;
    char full[PATH_MAX];
    struct file_id id;

    if (!f || !sink_file_id(w->sink, file, &id))
        return err_set(e, EINVAL, "file %u of an array is not known", file);
    TRY(join(w->d->root, f->path, full, e));
    TRY(w->d->store->ops->open(w->d->store, full, &src, e));
    if (!file_id_equal(&src->id, &id))
        return source_stale(full, &id, &src->id, e);
    return source_read(src, off, len, dst, e);
}

/* ---- the array ---- */

static int by_number(const void *a, const void *b)
{
    const struct chunk_file *x = a, *y = b;

    return (x->number > y->number) - (x->number < y->number);
}

static int report(struct walk *w, const struct sink_tensor *about, uint32_t file,
                  struct err *e)
{
    const struct zarr_how how = {
        .read = read_file,
        .user = w,
        .file = file,
        .all_chunks_needed = w->d->all_chunks_needed,
    };

    TRY(zarr_chunks_new(w->a, &w->chunks, e));
    TRY(list_all(w, e));
    if (w->nfile > 0)
        qsort(w->file, w->nfile, sizeof *w->file, by_number);
    return zarr_report(w->a, w->chunks, about, &how, w->sink, e);
}

int zarr_dir_chunks(const struct zarr_dir *d, const struct sink_tensor *about,
                    const struct zarr_array *a, uint32_t file, struct sink *sink,
                    struct err *e)
{
    struct walk w = {.d = d, .a = a, .sink = sink, .arena = arena_new(NAMES_MEMORY)};
    int rc = w.arena ? report(&w, about, file, e) : err_nomem(e);

    zarr_chunks_free(w.chunks);
    arena_free(w.arena);
    free(w.file);
    return rc;
}

int zarr_dir_report(const struct zarr_dir *d, const struct sink_tensor *about,
                    struct sink *sink, struct zarr_array *a, struct err *e)
{
    char path[PATH_MAX];
    uint32_t file;

    /* First registered, then read: one that is replaced in between is read anew. */
    TRY(join(d->path, d->metadata, path, e));
    TRY(sink_file(sink, path, strlen(path), &file, e));
    TRY(read_array(d, a, e));
    return zarr_dir_chunks(d, about, a, file, sink, e);
}
