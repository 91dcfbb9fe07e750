/* SPDX-License-Identifier: MIT */
/* remote/object_list.c - the objects and prefixes of one directory, as files have them. */
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <xxhash.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/log.h"
#include "remote/objects_priv.h"

enum {
    ENTRIES_MAX = 8000000, /* as of a local directory */
    TEXT_MAX = 4096,       /* of an ETag or a version */
};

/* Times that are long gone and never zero: nobody takes them for just now. */
static const uint64_t old_time_mask = (1ull << 60) - 1;

static const int64_t second_ns = 1000000000;

int object_list_new(const char *path, uint64_t store, struct object_list **out,
                    struct err *e)
{
    CLEANUP(object_list_putp) struct object_list *l = calloc(1, sizeof *l);

    if (!l)
        return err_nomem(e);
    atomic_init(&l->refs, 1);
    l->store = store;
    l->path = strdup(path);
    l->arena = arena_new((size_t)ENTRIES_MAX * (NAME_MAX + 65));
    if (!l->path || !l->arena)
        return err_nomem(e);
    *out = steal(&l);
    return 0;
}

struct object_list *object_list_get(struct object_list *l)
{
    atomic_fetch_add(&l->refs, 1);
    return l;
}

void object_list_put(struct object_list *l)
{
    if (!l || atomic_fetch_sub(&l->refs, 1) > 1)
        return;
    arena_free(l->arena);
    free(l->object);
    free(l->path);
    free(l);
}

void object_list_putp(struct object_list **l)
{
    object_list_put(*l);
}

/* ---- identity ---- */

static int64_t old_time(uint64_t hash)
{
    return (int64_t)(hash & old_time_mask) | 1;
}

static uint64_t hash_text(const char *text, uint64_t seed)
{
    return text ? XXH3_64bits_withSeed(text, strlen(text) + 1, seed) : seed;
}

static uint64_t path_hash(const struct object_list *l, const char *name)
{
    uint64_t dir = l->path[0] ? hash_text(l->path, l->store) : l->store;
    uint64_t h = name ? hash_text(name, dir) : dir;

    return h ? h : 1;
}

/*
 * The change time holds what tells one content from another: the ETag, the version. It
 * is no time, but nothing shows it.
 */
static void set_stat(const struct object_list *l, const struct object_entry *entry,
                     struct entry_stat *st)
{
    *st = (struct entry_stat){.kind = entry->is_dir ? ENTRY_DIR : ENTRY_FILE,
                              .mode = entry->is_dir ? 0755 : 0444,
                              .uid = geteuid(),
                              .gid = getegid()};
    st->id.dev = l->store;
    st->id.ino = path_hash(l, entry->name);
    if (entry->is_dir) {
        st->id.mtime_ns = st->id.ctime_ns = 1;
        return;
    }
    st->id.size = entry->size;
    st->id.mtime_ns = entry->modified > 0 && entry->modified < INT64_MAX / second_ns
                          ? entry->modified * second_ns
                          : 1;
    st->id.ctime_ns = old_time(hash_text(entry->version, hash_text(entry->etag, 1)));
}

void object_dir_stat(const struct object_list *l, struct entry_stat *out)
{
    *out = (struct entry_stat){
        .kind = ENTRY_DIR, .mode = 0755, .uid = geteuid(), .gid = getegid()};
    out->id = (struct file_id){.dev = l->store,
                               .ino = path_hash(l, NULL),
                               .mtime_ns = 1,
                               .ctime_ns = old_time(l->names)};
}

/* ---- building ---- */

/* Keys may be anything; what cannot be a file's name is not shown as one. */
static bool is_file_name(const char *name)
{
    size_t len = strlen(name);

    return len > 0 && len <= NAME_MAX && !strchr(name, '/') && strcmp(name, ".") != 0 &&
           strcmp(name, "..") != 0;
}

static int make_room(struct object_list *l, struct err *e)
{
    size_t cap = l->cap ? l->cap * 2 : 32;
    struct object *grown;

    if (l->count < l->cap)
        return 0;
    if (l->count >= ENTRIES_MAX)
        return err_set(e, EFBIG, "%s: more than %d objects", l->path, ENTRIES_MAX);
    grown = reallocarray(l->object, cap, sizeof *grown);
    if (!grown)
        return err_nomem(e);
    l->object = grown;
    l->cap = cap;
    return 0;
}

static const char *keep(struct object_list *l, const char *text)
{
    return arena_memdup(l->arena, text, strlen(text));
}

int object_list_add(struct object_list *l, const struct object_entry *entry,
                    struct err *e)
{
    struct object o = {0};

    if (!is_file_name(entry->name) || (entry->etag && strlen(entry->etag) > TEXT_MAX) ||
        (entry->version && strlen(entry->version) > TEXT_MAX)) {
        l->left_out++;
        return 0;
    }
    TRY(make_room(l, e));
    set_stat(l, entry, &o.st);
    o.name = keep(l, entry->name);
    o.etag = entry->etag ? keep(l, entry->etag) : NULL;
    o.version = entry->version ? keep(l, entry->version) : NULL;
    if (!o.name || (entry->etag && !o.etag) || (entry->version && !o.version))
        return err_nomem(e);
    l->object[l->count++] = o;
    return 0;
}

/* Directories before files of the same name: they are the ones that stay. */
static int compare(const void *a, const void *b)
{
    const struct object *x = a, *y = b;
    int by_name = strcmp(x->name, y->name);

    return by_name ? by_name : (x->st.kind != ENTRY_DIR) - (y->st.kind != ENTRY_DIR);
}

void object_list_finish(struct object_list *l)
{
    size_t kept = 0;

    if (l->count > 1)
        qsort(l->object, l->count, sizeof *l->object, compare);
    l->names = 1;
    for (size_t i = 0; i < l->count; i++) {
        const struct object *o = &l->object[i];

        if (kept > 0 && strcmp(l->object[kept - 1].name, o->name) == 0) {
            l->left_out += o->st.kind != l->object[kept - 1].st.kind;
            continue;
        }
        l->names = hash_text(o->name, l->names + o->st.kind);
        l->object[kept++] = *o;
    }
    l->count = kept;
    if (l->left_out)
        log_msg(LOG_REMOTE, LOG_WARN,
                "%s/: %zu objects are not shown: no file can have their name", l->path,
                l->left_out);
}

static int compare_name(const void *key, const void *member)
{
    const struct object *o = member;

    return strcmp(key, o->name);
}

const struct object *object_list_find(const struct object_list *l, const char *name)
{
    return l->count
               ? bsearch(name, l->object, l->count, sizeof *l->object, compare_name)
               : NULL;
}
