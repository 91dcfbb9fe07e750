/* SPDX-License-Identifier: MIT */
/* fs/generation.c - generations of checkpoints, and the node ids of what is inside them. */
#include "fs/generation.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "base/fsutil.h"
#include "base/vec.h"
#include "fs/materialized.h"
#include "fs/node.h"
#include "fs/watch.h"

enum {
    NUMBER_SHIFT = 40,
    MAX_SLOTS = 1 << 23, /* what is left of the id's 64 bits */
    MAX_ABSENT = 256, /* loaders probe a dozen names; a scanner may probe any number */
};

struct generations {
    pthread_mutex_t lock;
    /* guarded by lock */
    struct generation **gen;
    size_t cap, free; /* free: no number below it is free */
    uint64_t generation;
};

int generations_new(struct generations **out, struct err *e)
{
    struct generations *s = calloc(1, sizeof *s);

    if (!s)
        return err_nomem(e);
    pthread_mutex_init(&s->lock, NULL);
    *out = s;
    return 0;
}

static void generation_free(struct generation *s)
{
    for (int i = 0; i < REPORTS; i++)
        source_put(s->report[i]);
    for (size_t i = 0; i < s->absent.count; i++)
        free(s->absent.name[i]);
    free(s->absent.name);
    pthread_mutex_destroy(&s->lock);
    arena_free(s->arena);
    free(s);
}

/* At the end of the mount, when the kernel will not forget what it knew. */
void generations_free(struct generations *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < s->cap; i++)
        if (s->gen[i])
            generation_free(s->gen[i]);
    free(s->gen);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

fuse_ino_t generation_ino(const struct generation *s, enum inside kind, uint32_t index)
{
    uint64_t high =
        1ull << 63 | (uint64_t)s->number << NUMBER_SHIFT | (uint64_t)kind << 32;

    return high | (index ^ ino_mix(high >> 32));
}

/* ---- what is hidden ---- */

struct hidden_builder {
    struct generation *gen;
    const char **name;
    size_t count, cap, nparts;
    const char **part;
    size_t part_cap;
    int failed;
};

static int add_text(struct hidden_builder *b, const char *text, const char ***list,
                    size_t *count, size_t *cap)
{
    if (!VEC_ROOM(*list, *count, *cap))
        return b->failed = -ENOMEM;
    (*list)[*count] = arena_memdup(b->gen->arena, text, strlen(text));
    if (!(*list)[*count])
        return b->failed = -ENOMEM;
    (*count)++;
    return 0;
}

static int on_hidden(void *user, const char *name, bool part)
{
    struct hidden_builder *b = user;
    int rc = add_text(b, name, &b->name, &b->count, &b->cap);

    return rc == 0 && part ? add_text(b, name, &b->part, &b->nparts, &b->part_cap) : rc;
}

/*
 * Storage files of parts by their path, which lifting side files must not show. Those of
 * the checkpoint's own directory are among the hidden names, unless they stay visible.
 */
static int on_file(void *user, const struct catalog_file *f)
{
    struct hidden_builder *b = user;
    const char *dir = b->gen->info.path, *name;
    size_t len = strlen(dir);

    if (strncmp(f->path, dir, len) != 0 || (len && f->path[len] != '/'))
        return 0; /* not below the checkpoint */
    name = f->path + len + (len > 0);
    if (!f->storage || !strchr(name, '/'))
        return 0;
    return add_text(b, name, &b->name, &b->count, &b->cap);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Moves a list into the generation's arena, where it is constant from now on. */
static int keep_list(struct generation *s, const char **list, size_t count,
                     const char ***out)
{
    *out = arena_array(s->arena, count + 1, sizeof **out);
    if (!*out)
        return -ENOMEM;
    if (count)
        memcpy(*out, list, count * sizeof *list);
    return 0;
}

static int load_hidden(struct fs *fs, struct generation *s, struct err *e)
{
    struct hidden_builder b = {.gen = s};
    int rc = catalog_hidden(fs->catalog, s->info.id, on_hidden, &b, e);

    if (rc == 0)
        rc = catalog_files(fs->catalog, s->info.id, on_file, &b, e);
    if (rc == 0 && b.count)
        qsort(b.name, b.count, sizeof *b.name, by_text);
    if (rc == 0)
        rc = keep_list(s, b.name, b.count, &s->hidden.name);
    if (rc == 0)
        rc = keep_list(s, b.part, b.nparts, &s->hidden.part);
    s->hidden.count = b.count;
    s->hidden.nparts = b.nparts;
    free(b.name);
    free(b.part);
    return rc == -ENOMEM ? err_nomem(e) : rc;
}

bool generation_hides(const struct generation *s, const char *name)
{
    return s->hidden.count && bsearch(&name, s->hidden.name, s->hidden.count,
                                      sizeof *s->hidden.name, by_text);
}

static bool is_named(const char *const *list, size_t count, const char *dir)
{
    for (size_t i = 0; i < count; i++)
        if (path_is_within(list[i], dir) || path_is_within(dir, list[i]))
            return true;
    return false;
}

bool generation_hides_in(const struct generation *s, const char *dir)
{
    return is_named(s->hidden.name, s->hidden.count, dir) ||
           is_named(s->hidden.part, s->hidden.nparts, dir);
}

/* ---- the table ---- */

/* Gives it a free number. */
static int table_add(struct generations *t, struct generation *s)
{
    size_t at = t->free;

    while (at < t->cap && t->gen[at])
        at++;
    t->free = at;
    if (at == t->cap) {
        size_t cap = t->cap ? 2 * t->cap : 64;
        struct generation **grown =
            at < MAX_SLOTS ? reallocarray(t->gen, cap, sizeof *grown) : NULL;

        if (!grown)
            return -ENOMEM;
        memset(grown + t->cap, 0, (cap - t->cap) * sizeof *grown);
        t->gen = grown;
        t->cap = cap;
    }
    t->gen[at] = s;
    s->number = (uint32_t)at;
    s->generation = ++t->generation;
    return 0;
}

static int generation_fill(struct fs *fs, struct generation *s,
                           const struct generation_place *place, struct err *e)
{
    char path[PATH_MAX];

    s->path = arena_memdup(s->arena, place->path, strlen(place->path));
    s->file =
        place->file ? arena_memdup(s->arena, place->file, strlen(place->file)) : NULL;
    s->place = s->path;
    if (place->file && store_join(place->path, place->file, path, sizeof path) == 0)
        s->place = arena_memdup(s->arena, path, strlen(path));
    if (!s->path || !s->place || (place->file && !s->file))
        return err_nomem(e);
    return load_hidden(fs, s, e);
}

int generation_new(struct fs *fs, const struct generation_place *place,
                   struct arena *arena, const struct checkpoint_info *info,
                   struct generation **out, struct err *e)
{
    struct generation *s = calloc(1, sizeof *s);
    int rc;

    if (!s) {
        arena_free(arena);
        return err_nomem(e);
    }
    s->arena = arena;
    s->info = *info;
    s->refs = 1;
    s->dir_ino = place->dir_ino;
    s->dir = *place->dir;
    s->names = info->names_hash;
    s->checked_ns = s->used_ns = now_ns();
    pthread_mutex_init(&s->lock, NULL);
    rc = generation_fill(fs, s, place, e);
    if (rc == 0) {
        pthread_mutex_lock(&fs->generations->lock);
        rc = table_add(fs->generations, s);
        pthread_mutex_unlock(&fs->generations->lock);
        if (rc < 0)
            err_set(e, -rc, "too many checkpoints are in use");
    }
    if (rc < 0) {
        generation_free(s);
        return rc;
    }
    counter_add(&fs->counters, COUNT_GENERATIONS, 1);
    atomic_fetch_add(&fs->counters.known_bytes, s->info.bytes);
    *out = s;
    return 0;
}

struct generation *generation_of_ino(struct fs *fs, fuse_ino_t ino)
{
    uint64_t number = (ino & ~(1ull << 63)) >> NUMBER_SHIFT;
    struct generations *t = fs->generations;
    struct generation *s = NULL;

    pthread_mutex_lock(&t->lock);
    if (number < t->cap && t->gen[number]) {
        s = t->gen[number];
        s->refs++;
    }
    pthread_mutex_unlock(&t->lock);
    return s;
}

struct generation *generation_get(struct fs *fs, struct generation *s)
{
    generation_ref(fs, s, 1);
    return s;
}

void generation_ref(struct fs *fs, struct generation *s, uint64_t n)
{
    pthread_mutex_lock(&fs->generations->lock);
    s->refs += n;
    pthread_mutex_unlock(&fs->generations->lock);
}

void generation_unref(struct fs *fs, struct generation *s, uint64_t n)
{
    struct generations *t = fs->generations;
    bool last;

    if (!s)
        return;
    pthread_mutex_lock(&t->lock);
    s->refs -= MIN(n, s->refs);
    last = s->refs == 0;
    if (last) {
        t->gen[s->number] = NULL;
        t->free = MIN(t->free, s->number);
    }
    pthread_mutex_unlock(&t->lock);
    if (!last)
        return;
    if (!s->stale)
        atomic_fetch_sub(&fs->counters.known_bytes, s->info.bytes);
    generation_free(s);
}

void generation_forget(struct fs *fs, fuse_ino_t ino, uint64_t n)
{
    struct generation *s = generation_of_ino(fs, ino);

    generation_unref(fs, s, n + 1);
}

bool generation_retire(struct fs *fs, struct generation *s)
{
    if (atomic_exchange(&s->stale, true))
        return false;
    atomic_fetch_sub(&fs->counters.known_bytes, s->info.bytes);
    counter_add(&fs->counters, COUNT_INVALIDATED, 1);
    materialized_forget(fs->materialized, s->info.id);
    watch_changed(fs, s);
    return true;
}

void generation_used(struct fs *fs, struct generation *s)
{
    struct node *n;
    struct generation *is;

    s->used_ns = now_ns();
    if (!s->dormant || !atomic_exchange(&s->dormant, false))
        return;
    n = node_pin(fs, s->dir_ino);
    is = n ? node_generation(fs, n) : NULL;
    if (is == s)
        node_watch(fs, n);
    generation_unref(fs, is, 1);
    if (n)
        node_unpin(fs, n);
    watch_soon(fs);
}

/* It is what it was; has its directory other names beside? */
static void see_names(struct fs *fs, struct generation *s, uint64_t names)
{
    if (atomic_exchange(&s->names, names) == names && names)
        return;
    nodes_look_again(fs, s->path);
    watch_names(fs, s);
}

int generation_refresh(struct fs *fs, struct generation *s, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    struct checkpoint_info info;
    int64_t asked = now_ns();
    unsigned found = s->suspect; /* what is found during the look counts again */
    int rc;

    if (!a)
        return err_nomem(e);
    rc = scanner_get(fs->scanner, s->path, s->file, a, &info, e);
    if (rc == 0 && info.id == s->info.id && !s->stale) {
        s->checked_ns = asked;
        /* Not before: until then others who ask must not take the last look's word. */
        s->answered = found;
        see_names(fs, s, info.names_hash);
        return 0;
    }
    if (rc < 0 && rc != -ENOENT && rc != -ESTALE)
        return rc;
    generation_retire(fs, s);
    return err_set(e, ESTALE, "%s: the checkpoint changed", s->path);
}

bool generation_note_absent(struct generation *s, const char *name)
{
    bool noted = false;

    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; !noted && i < s->absent.count; i++)
        noted = strcmp(s->absent.name[i], name) == 0;
    if (!noted && s->absent.count < MAX_ABSENT) {
        if (!s->absent.name)
            s->absent.name = calloc(MAX_ABSENT, sizeof *s->absent.name);
        if (s->absent.name && (s->absent.name[s->absent.count] = strdup(name))) {
            s->absent.count++;
            noted = true;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return noted;
}
