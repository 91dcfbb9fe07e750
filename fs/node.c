/* SPDX-License-Identifier: MIT */
/* fs/node.c - the nodes outside of checkpoints: directories, side files, links. */
#include "fs/node.h"

#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "fs/snapshot.h"
#include "fs/generation.h"

struct nodes {
    pthread_mutex_t lock;
    /* guarded by lock */
    struct node **table;  /* by number; 0 is never used */
    size_t cap, free;     /* free: no number below it is free */
    struct node **bucket; /* by parent and name: those that have their name */
    size_t nbuckets, count;
    struct node **at; /* by path: all */
    size_t nat, known;
    uint64_t generation;
    struct node *watched; /* a list, with a reference to each */
    size_t nshown;        /* nodes that remember what they showed */
};

enum { FIRST_BUCKETS = 256, FIRST_TABLE = 256, TIDY_AT_ONCE = 64, TIDY_SECONDS = 5 };

static void node_free(struct fs *fs, struct node *n)
{
    if (n->snapshot)
        snapshot_put(fs, n->snapshot);
    generation_unref(fs, n->gen, 1);
    free(n->name);
    free(n->path);
    free(n->dir);
    free(n->file);
    free(n);
}

static char *copy(const char *text)
{
    return text ? strdup(text) : NULL;
}

static struct node *node_make(const struct node_spec *spec)
{
    struct node *n = calloc(1, sizeof *n);

    if (!n)
        return NULL;
    n->kind = spec->kind;
    n->name = strdup(spec->name);
    n->path = strdup(spec->path);
    n->dir = copy(spec->dir);
    n->file = copy(spec->file);
    n->dev = spec->dev;
    n->inode = spec->inode;
    n->refs = 1;
    if (n->name && n->path && (n->dir || !spec->dir) && (n->file || !spec->file))
        return n;
    free(n->name);
    free(n->path);
    free(n->dir);
    free(n->file);
    free(n);
    return NULL;
}

/* ---- the hash by path; all with the lock held ---- */

static struct node **bucket_at(const struct nodes *t, const char *path)
{
    return &t->at[XXH3_64bits(path, strlen(path)) & (t->nat - 1)];
}

static void at_grow(struct nodes *t)
{
    size_t old = t->nat;
    struct node **was = t->at;
    struct node **now = calloc(2 * old, sizeof *now);

    if (!now)
        return; /* longer chains, nothing worse */
    t->at = now;
    t->nat = 2 * old;
    for (size_t i = 0; i < old; i++) {
        for (struct node *n = was[i], *next; n; n = next) {
            struct node **b = bucket_at(t, n->path);

            next = n->next_at;
            n->next_at = *b;
            *b = n;
        }
    }
    free(was);
}

static void at_add(struct nodes *t, struct node *n)
{
    struct node **b;

    if (++t->known > t->nat)
        at_grow(t);
    b = bucket_at(t, n->path);
    n->next_at = *b;
    *b = n;
}

static void at_remove(struct nodes *t, struct node *n)
{
    struct node **b = bucket_at(t, n->path);

    while (*b != n)
        b = &(*b)->next_at;
    *b = n->next_at;
    t->known--;
}

/* The next one of this path (n NULL: the first), or NULL. */
static struct node *next_at(const struct nodes *t, const char *path,
                            const struct node *n)
{
    struct node *x = n ? n->next_at : *bucket_at(t, path);

    while (x && strcmp(x->path, path) != 0)
        x = x->next_at;
    return x;
}

int nodes_new(struct nodes **out, struct err *e)
{
    static const struct node_spec root = {.kind = NODE_DIR, .name = "", .path = ""};
    struct nodes *t = calloc(1, sizeof *t);

    if (!t)
        return err_nomem(e);
    pthread_mutex_init(&t->lock, NULL);
    t->bucket = calloc(FIRST_BUCKETS, sizeof *t->bucket);
    t->at = calloc(FIRST_BUCKETS, sizeof *t->at);
    t->table = calloc(FIRST_TABLE, sizeof *t->table);
    if (t->bucket && t->at && t->table)
        t->table[FUSE_ROOT_ID] = node_make(&root);
    if (!t->bucket || !t->at || !t->table || !t->table[FUSE_ROOT_ID]) {
        free(t->bucket);
        free(t->at);
        free(t->table);
        free(t);
        return err_nomem(e);
    }
    t->table[FUSE_ROOT_ID]->ino = FUSE_ROOT_ID;
    t->nbuckets = t->nat = FIRST_BUCKETS;
    t->cap = FIRST_TABLE;
    t->free = FUSE_ROOT_ID + 1;
    at_add(t, t->table[FUSE_ROOT_ID]);
    *out = t;
    return 0;
}

void nodes_free(struct fs *fs)
{
    struct nodes *t = fs->nodes;

    if (!t)
        return;
    for (size_t i = 0; i < t->cap; i++)
        if (t->table[i])
            node_free(fs, t->table[i]);
    free(t->table);
    free(t->bucket);
    free(t->at);
    pthread_mutex_destroy(&t->lock);
    free(t);
    fs->nodes = NULL;
}

struct node *node_of_ino(struct fs *fs, fuse_ino_t ino)
{
    struct nodes *t = fs->nodes;
    struct node *n;

    pthread_mutex_lock(&t->lock);
    n = ino < t->cap ? t->table[ino] : NULL;
    pthread_mutex_unlock(&t->lock);
    return n;
}

/* ---- the hash by parent and name; all with the lock held ---- */

static struct node **bucket_of(const struct nodes *t, uint64_t parent, const char *name)
{
    return &t->bucket[XXH3_64bits_withSeed(name, strlen(name), parent) &
                      (t->nbuckets - 1)];
}

static void hash_grow(struct nodes *t)
{
    size_t old = t->nbuckets;
    struct node **was = t->bucket;
    struct node **now = calloc(2 * old, sizeof *now);

    if (!now)
        return; /* longer chains, nothing worse */
    t->bucket = now;
    t->nbuckets = 2 * old;
    for (size_t i = 0; i < old; i++) {
        for (struct node *n = was[i], *next; n; n = next) {
            struct node **b = bucket_of(t, n->parent->ino, n->name);

            next = n->next;
            n->next = *b;
            *b = n;
        }
    }
    free(was);
}

static void hash_add(struct nodes *t, struct node *n)
{
    struct node **b;

    if (++t->count > t->nbuckets)
        hash_grow(t);
    b = bucket_of(t, n->parent->ino, n->name);
    n->next = *b;
    *b = n;
}

static void hash_remove(struct nodes *t, struct node *n)
{
    struct node **b = bucket_of(t, n->parent->ino, n->name);

    while (*b != n)
        b = &(*b)->next;
    *b = n->next;
    t->count--;
}

static struct node *hash_find(const struct nodes *t, const struct node *parent,
                              const char *name)
{
    struct node *n = *bucket_of(t, parent->ino, name);

    while (n && (n->parent != parent || strcmp(n->name, name) != 0))
        n = n->next;
    return n;
}

static bool is_same(const struct node *n, const struct node_spec *spec)
{
    return n->kind == spec->kind && node_stands_for(n, spec->dev, spec->inode) &&
           strcmp(n->path, spec->path) == 0;
}

/* Puts it on the list of those that are watched; with the lock held. */
static void watch(struct nodes *t, struct node *n)
{
    if (n->watched)
        return;
    n->watched = true;
    n->refs++;
    n->next_watched = t->watched;
    t->watched = n;
}

/* Its name is another node's; its checkpoint, if it was one, has to go. */
static void make_orphan(struct nodes *t, struct node *n)
{
    hash_remove(t, n);
    n->orphan = true;
    if (n->gen)
        watch(t, n);
}

/* Gives it a number. */
static bool table_add(struct nodes *t, struct node *n)
{
    while (t->free < t->cap && t->table[t->free])
        t->free++;
    if (t->free == t->cap) {
        struct node **grown = reallocarray(t->table, 2 * t->cap, sizeof *grown);

        if (!grown)
            return false;
        memset(grown + t->cap, 0, t->cap * sizeof *grown);
        t->table = grown;
        t->cap *= 2;
    }
    n->ino = t->free;
    n->generation = ++t->generation;
    t->table[n->ino] = n;
    at_add(t, n);
    return true;
}

int node_intern(struct fs *fs, struct node *parent, const struct node_spec *spec,
                struct node **out, struct err *e)
{
    struct nodes *t = fs->nodes;
    struct node *fresh = NULL, *n;

    pthread_mutex_lock(&t->lock);
    n = hash_find(t, parent, spec->name);
    if (n && !is_same(n, spec)) {
        make_orphan(t, n);
        n = NULL;
    }
    if (n) {
        n->refs++;
    } else if ((fresh = node_make(spec)) && table_add(t, fresh)) {
        fresh->parent = parent;
        parent->refs++;
        hash_add(t, fresh);
        n = fresh;
    }
    pthread_mutex_unlock(&t->lock);
    if (!n) {
        if (fresh)
            node_free(fs, fresh);
        return err_nomem(e);
    }
    *out = n;
    return 0;
}

/*
 * Takes n references; the node itself and parents that nobody needs go with the last, to
 * the list that is returned. With the lock held.
 */
static struct node *take_refs(struct nodes *t, struct node *n, uint64_t refs)
{
    struct node *dead = NULL;

    while (n && n->ino != FUSE_ROOT_ID) {
        struct node *parent = n->parent;

        n->refs -= MIN(refs, n->refs);
        if (n->refs > 0)
            break;
        if (!n->orphan)
            hash_remove(t, n);
        t->nshown -= n->snapshot != NULL;
        at_remove(t, n);
        t->table[n->ino] = NULL;
        t->free = MIN(t->free, n->ino);
        n->next = dead;
        dead = n;
        n = parent;
        refs = 1;
    }
    return dead;
}

static void bury(struct fs *fs, struct node *dead)
{
    for (struct node *next; dead; dead = next) {
        next = dead->next;
        node_free(fs, dead);
    }
}

static void drop(struct fs *fs, struct node *n, uint64_t refs)
{
    struct nodes *t = fs->nodes;
    struct node *dead;

    pthread_mutex_lock(&t->lock);
    dead = take_refs(t, n, refs);
    pthread_mutex_unlock(&t->lock);
    bury(fs, dead);
}

void node_forget(struct fs *fs, fuse_ino_t ino, uint64_t n)
{
    struct node *node = node_of_ino(fs, ino);

    if (node)
        drop(fs, node, n);
}

struct node *node_pin(struct fs *fs, fuse_ino_t ino)
{
    struct nodes *t = fs->nodes;
    struct node *n;

    pthread_mutex_lock(&t->lock);
    n = ino < t->cap ? t->table[ino] : NULL;
    if (n)
        n->refs++;
    pthread_mutex_unlock(&t->lock);
    return n;
}

void node_unpin(struct fs *fs, struct node *n)
{
    drop(fs, n, 1);
}

/* ---- what a directory remembers ---- */

struct snapshot *node_snapshot(struct fs *fs, struct node *n)
{
    struct snapshot *snapshot;

    pthread_mutex_lock(&fs->nodes->lock);
    snapshot = n->snapshot ? snapshot_get(n->snapshot) : NULL;
    pthread_mutex_unlock(&fs->nodes->lock);
    return snapshot;
}

void node_set_snapshot(struct fs *fs, struct node *n, struct snapshot *snapshot)
{
    struct snapshot *old;

    pthread_mutex_lock(&fs->nodes->lock);
    old = n->snapshot;
    n->snapshot = snapshot_get(snapshot);
    fs->nodes->nshown += old == NULL;
    pthread_mutex_unlock(&fs->nodes->lock);
    snapshot_put(fs, old);
}

struct generation *node_generation(struct fs *fs, struct node *n)
{
    struct generation *gen;

    pthread_mutex_lock(&fs->nodes->lock);
    gen = n->gen ? generation_get(fs, n->gen) : NULL;
    pthread_mutex_unlock(&fs->nodes->lock);
    return gen;
}

void node_set_generation(struct fs *fs, struct node *n, struct generation *gen)
{
    struct generation *old;

    pthread_mutex_lock(&fs->nodes->lock);
    old = n->gen;
    n->gen = gen ? generation_get(fs, gen) : NULL;
    if (gen)
        watch(fs->nodes, n);
    pthread_mutex_unlock(&fs->nodes->lock);
    generation_unref(fs, old, 1);
}

/* Up to TIDY_AT_ONCE snapshots that are out of date for long, taken off nodes from *at on. */
static size_t take_old(struct nodes *t, int64_t before, size_t *at,
                       struct snapshot **old)
{
    size_t n = 0;

    pthread_mutex_lock(&t->lock);
    for (; t->nshown > 0 && *at < t->cap && n < TIDY_AT_ONCE; (*at)++) {
        struct node *node = t->table[*at];

        if (node && node->snapshot && node->snapshot->until_ns < before) {
            old[n++] = steal(&node->snapshot);
            t->nshown--;
        }
    }
    pthread_mutex_unlock(&t->lock);
    return n;
}

void nodes_tidy(struct fs *fs)
{
    int64_t before = now_ns() - TIDY_SECONDS * 1000000000ll;
    struct snapshot *old[TIDY_AT_ONCE];
    size_t n, at = 0;

    do {
        n = take_old(fs->nodes, before, &at, old);
        for (size_t i = 0; i < n; i++)
            snapshot_put(fs, old[i]);
    } while (n == TIDY_AT_ONCE);
}

/* ---- names that change ---- */

void nodes_look_again(struct fs *fs, const char *path)
{
    struct nodes *t = fs->nodes;
    struct node *n = NULL;

    pthread_mutex_lock(&t->lock);
    while ((n = next_at(t, path, n)))
        if (n->snapshot)
            n->snapshot->until_ns = 0;
    pthread_mutex_unlock(&t->lock);
}

int node_take_watched(struct fs *fs, struct node ***out, size_t *count)
{
    struct nodes *t = fs->nodes;
    size_t n = 0;

    *count = 0;
    pthread_mutex_lock(&t->lock);
    for (const struct node *x = t->watched; x; x = x->next_watched)
        n++;
    *out = n ? malloc(n * sizeof **out) : NULL;
    while (*out && t->watched) {
        struct node *x = t->watched;

        t->watched = steal(&x->next_watched);
        x->watched = false;
        (*out)[(*count)++] = x;
    }
    pthread_mutex_unlock(&t->lock);
    return n && !*out ? -ENOMEM : 0;
}

void node_watch(struct fs *fs, struct node *n)
{
    pthread_mutex_lock(&fs->nodes->lock);
    watch(fs->nodes, n);
    pthread_mutex_unlock(&fs->nodes->lock);
}

void node_watch_again(struct fs *fs, struct node *n)
{
    struct nodes *t = fs->nodes;
    struct node *dead;

    pthread_mutex_lock(&t->lock);
    if (n->refs > 1 || n->ino == FUSE_ROOT_ID)
        watch(t, n);
    dead = take_refs(t, n, 1);
    pthread_mutex_unlock(&t->lock);
    bury(fs, dead);
}
