/* SPDX-License-Identifier: MIT */
/* fs/bucket_node.c - names of an object store in a mount for writing. */
#include "fs/bucket.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fsutil.h"
#include "base/pool.h"
#include "fs/attr.h"
#include "fs/disk_view.h"
#include "remote/bucket.h"
#include "save/publish.h"

/* ---- the table; with the lock of the mount ---- */

static struct bucket_node **ino_slot(struct bucket_mount *b, fuse_ino_t ino)
{
    struct bucket_node **at = &b->by_ino[ino & (BUCKET_NODES - 1)];

    while (*at && (*at)->ino != ino)
        at = &(*at)->next_ino;
    return at;
}

static struct bucket_node **path_bucket(struct bucket_mount *b, const char *path)
{
    return &b->by_path[XXH3_64bits(path, strlen(path)) & (BUCKET_NODES - 1)];
}

static struct bucket_node *find_path(struct bucket_mount *b, const char *path)
{
    struct bucket_node *n = *path_bucket(b, path);

    while (n && strcmp(n->path, path) != 0)
        n = n->next_path;
    return n;
}

static void add_path(struct bucket_mount *b, struct bucket_node *n)
{
    struct bucket_node **at = path_bucket(b, n->path);

    n->next_path = *at;
    *at = n;
}

/* It has its path no more. */
static void drop(struct bucket_mount *b, struct bucket_node *n)
{
    struct bucket_node **at = path_bucket(b, n->path);

    if (n->gone)
        return;
    while (*at != n)
        at = &(*at)->next_path;
    *at = n->next_path;
    n->gone = true;
}

static void node_free(struct fs *fs, struct bucket_node *n)
{
    if (n->spool >= 0)
        close(n->spool);
    generation_unref(fs, n->gen, 1);
    pthread_mutex_destroy(&n->lock);
    free(n->path);
    free(n);
}

static struct bucket_node *node_new(struct bucket_mount *b, const char *path,
                                    mode_t type)
{
    struct bucket_node *n = calloc(1, sizeof *n), **at;

    if (!n || !(n->path = strdup(path))) {
        free(n);
        return NULL;
    }
    pthread_mutex_init(&n->lock, NULL);
    atomic_init(&n->spool, -1);
    n->type = type;
    n->ino = ++b->last_ino;
    at = &b->by_ino[n->ino & (BUCKET_NODES - 1)];
    n->next_ino = *at;
    *at = n;
    add_path(b, n);
    return n;
}

/* ---- nodes ---- */

struct bucket_node *bucket_pin(struct fs *fs, fuse_ino_t ino)
{
    struct bucket_mount *b = fs->bucket;
    struct bucket_node *n;

    pthread_mutex_lock(&b->lock);
    n = *ino_slot(b, ino);
    if (n)
        n->refs++;
    pthread_mutex_unlock(&b->lock);
    return n;
}

void bucket_unref(struct fs *fs, struct bucket_node *n, uint64_t count)
{
    struct bucket_mount *b = fs->bucket;
    bool last;

    pthread_mutex_lock(&b->lock);
    n->refs -= MIN(n->refs, count);
    last = n->refs == 0;
    if (last) {
        drop(b, n);
        *ino_slot(b, n->ino) = n->next_ino;
    }
    pthread_mutex_unlock(&b->lock);
    if (last)
        node_free(fs, n);
}

void bucket_unpin(struct fs *fs, struct bucket_node *n)
{
    if (n)
        bucket_unref(fs, n, 1);
}

void bucket_node_forget(struct fs *fs, fuse_ino_t ino, uint64_t lookups)
{
    struct bucket_node *n = bucket_pin(fs, ino);

    if (n)
        bucket_unref(fs, n, lookups + 1);
}

int bucket_intern(struct fs *fs, const char *path, mode_t type,
                  struct bucket_node **out, struct err *e)
{
    struct bucket_mount *b = fs->bucket;
    struct bucket_node *n;

    pthread_mutex_lock(&b->lock);
    n = find_path(b, path);
    if (n && n->type != type) {
        drop(b, n);
        n = NULL;
    }
    if (!n)
        n = node_new(b, path, type);
    if (n)
        n->refs++;
    pthread_mutex_unlock(&b->lock);
    *out = n;
    return n ? 0 : err_nomem(e);
}

struct bucket_node *bucket_at(struct fs *fs, const char *path)
{
    struct bucket_mount *b = fs->bucket;
    struct bucket_node *n;

    pthread_mutex_lock(&b->lock);
    n = find_path(b, path);
    if (n)
        n->refs++;
    pthread_mutex_unlock(&b->lock);
    return n;
}

void bucket_node_path(struct fs *fs, const struct bucket_node *n, char path[PATH_MAX],
                      bool *gone)
{
    pthread_mutex_lock(&fs->bucket->lock);
    snprintf(path, PATH_MAX, "%s", n->path);
    *gone = n->gone;
    pthread_mutex_unlock(&fs->bucket->lock);
}

int bucket_path(struct fs *fs, fuse_ino_t dir, const char *name, char path[PATH_MAX],
                struct err *e)
{
    struct bucket_node *n = bucket_pin(fs, dir);
    char above[PATH_MAX];
    bool gone = true;

    if (n)
        bucket_node_path(fs, n, above, &gone);
    bucket_unpin(fs, n);
    if (gone)
        return err_set(e, ENOENT, "%s: its directory is gone", name);
    if (strlen(name) > NAME_MAX || store_join(above, name, path, PATH_MAX) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", above, name);
    if (!store_name_is_safe(path, strlen(path)))
        return err_set(e, EINVAL, "%s: no object gets such a name", path);
    return 0;
}

int bucket_move(struct fs *fs, struct bucket_node *n, const char *path, struct err *e)
{
    struct bucket_mount *b = fs->bucket;
    char *copy = strdup(path);
    struct bucket_node *there;

    if (!copy)
        return err_nomem(e);
    pthread_mutex_lock(&b->lock);
    there = find_path(b, path);
    if (there && there != n)
        drop(b, there);
    drop(b, n);
    free(n->path);
    n->path = copy;
    n->gone = false;
    add_path(b, n);
    pthread_mutex_unlock(&b->lock);
    return 0;
}

void bucket_drop(struct fs *fs, struct bucket_node *n)
{
    pthread_mutex_lock(&fs->bucket->lock);
    drop(fs->bucket, n);
    pthread_mutex_unlock(&fs->bucket->lock);
}

/* ---- what is there ---- */

static void fill(struct fs *fs, const char *path, mode_t type, uint64_t size,
                 int64_t mtime_ns, struct stat *st)
{
    const struct attr a = {.ino =
                               path[0] ? attr_path_ino(path, "", 0, 0) : FUSE_ROOT_ID,
                           .size = size,
                           .type = type,
                           .mode = S_ISDIR(type) ? 0755 : 0644,
                           .links = S_ISDIR(type) ? 2 : 1,
                           .uid = geteuid(),
                           .gid = getegid(),
                           .mtime_ns = mtime_ns > 1 ? mtime_ns : fs->begun_ns};

    attr_fill(fs, &a, st);
}

/* What is being written, though the store does not have it yet. */
static bool stat_spool(struct fs *fs, struct bucket_node *n, const char *path,
                       struct stat *st)
{
    struct stat local;
    bool there;

    pthread_mutex_lock(&fs->bucket->lock);
    there = n->spool >= 0 && fstat(n->spool, &local) == 0;
    pthread_mutex_unlock(&fs->bucket->lock);
    if (!there)
        return false;
    fill(fs, path, S_IFREG, (uint64_t)local.st_size,
         (int64_t)local.st_mtim.tv_sec * 1000000000 + local.st_mtim.tv_nsec, st);
    return true;
}

static int stat_stored(struct fs *fs, const char *path, struct stat *st, struct err *e)
{
    struct entry_stat found;
    int rc = fs->store->ops->stat(fs->store, path, &found, e);

    if (rc == -ENOENT && bucket_is_made(fs, path)) {
        *e = (struct err){0};
        fill(fs, path, S_IFDIR, 0, 0, st);
        return 0;
    }
    if (rc == 0 && found.kind != ENTRY_DIR && found.kind != ENTRY_FILE)
        return -ENOENT;
    if (rc == 0)
        fill(fs, path, found.kind == ENTRY_DIR ? S_IFDIR : S_IFREG, found.id.size,
             found.id.mtime_ns, st);
    return rc == -ENOTDIR ? -ENOENT : rc;
}

int bucket_stat(struct fs *fs, const char *path, struct stat *st, struct err *e)
{
    struct bucket_node *n;
    bool found;

    if (!path[0]) {
        fill(fs, path, S_IFDIR, 0, 0, st);
        return 0;
    }
    n = bucket_at(fs, path);
    found = n && stat_spool(fs, n, path, st);
    bucket_unpin(fs, n);
    return found ? 0 : stat_stored(fs, path, st, e);
}

int bucket_node_stat(struct fs *fs, struct bucket_node *n, struct stat *st,
                     struct err *e)
{
    char path[PATH_MAX];
    bool gone;
    int rc;

    bucket_node_path(fs, n, path, &gone);
    if (stat_spool(fs, n, path, st)) {
        st->st_nlink = gone ? 0 : st->st_nlink;
        return 0;
    }
    if (gone)
        return -ESTALE;
    rc = bucket_stat(fs, path, st, e);
    if (rc == 0 && (st->st_mode & S_IFMT) != n->type)
        return -ESTALE;
    return rc;
}

static bool is_above(const char *dir, const char *path)
{
    size_t len = strlen(dir);

    return len == 0 || (strncmp(path, dir, len) == 0 && path[len] == '/');
}

static void remove_made(struct bucket_mount *b, size_t i)
{
    free(b->made[i]);
    b->made[i] = b->made[--b->nmade];
}

/* The directories above it, the root too, have something else in them. */
void bucket_changed(struct fs *fs, const char *path)
{
    struct bucket_mount *b = fs->bucket;
    char dir[PATH_MAX];
    char *slash;

    store_forget(fs->store, path);
    snprintf(dir, sizeof dir, "%s", path);
    pthread_mutex_lock(&b->lock);
    do {
        struct bucket_node *n;

        slash = strrchr(dir, '/');
        *(slash ? slash : dir) = '\0';
        n = find_path(b, dir);
        if (n)
            n->changes++;
    } while (slash || dir[0]);
    pthread_mutex_unlock(&b->lock);
}

/* ---- directories of mkdir ---- */

bool bucket_is_made(struct fs *fs, const char *path)
{
    struct bucket_mount *b = fs->bucket;
    bool found = false;

    pthread_mutex_lock(&b->lock);
    for (size_t i = 0; i < b->nmade && !found; i++)
        found = strcmp(b->made[i], path) == 0 || is_above(path, b->made[i]);
    pthread_mutex_unlock(&b->lock);
    return found;
}

void bucket_unmake_dir(struct fs *fs, const char *path)
{
    struct bucket_mount *b = fs->bucket;

    pthread_mutex_lock(&b->lock);
    for (size_t i = b->nmade; i > 0; i--)
        if (strcmp(b->made[i - 1], path) == 0)
            remove_made(b, i - 1);
    pthread_mutex_unlock(&b->lock);
}

int bucket_make_dir(struct fs *fs, const char *path, struct err *e)
{
    struct bucket_mount *b = fs->bucket;
    char *copy = path[0] ? strdup(path) : NULL;
    int rc = 0;

    if (!path[0])
        return 0;
    bucket_unmake_dir(fs, path); /* each is there once */
    pthread_mutex_lock(&b->lock);
    if (copy && b->nmade == b->cap) {
        size_t cap = b->cap ? 2 * b->cap : 16;
        char **grown = reallocarray(b->made, cap, sizeof *grown);

        if (grown) {
            b->made = grown;
            b->cap = cap;
        }
    }
    if (copy && b->nmade < b->cap)
        b->made[b->nmade++] = steal(&copy);
    else
        rc = err_nomem(e);
    pthread_mutex_unlock(&b->lock);
    free(copy);
    return rc;
}

/* ---- listing ---- */

/* The name in the directory that leads to this path: "" when it is not below it. */
static void name_below(const char *dir, const char *path, char name[NAME_MAX + 1])
{
    const char *rest = path + strlen(dir) + (dir[0] != '\0');

    name[0] = '\0';
    if (is_above(dir, path))
        snprintf(name, NAME_MAX + 1, "%.*s", (int)strcspn(rest, "/"), rest);
}

int bucket_each_local(struct fs *fs, const char *path, bucket_name_fn *fn, void *user)
{
    struct bucket_mount *b = fs->bucket;
    char name[NAME_MAX + 1];
    int rc = 0;

    pthread_mutex_lock(&b->lock);
    for (size_t i = 0; rc == 0 && i < b->nmade; i++) {
        name_below(path, b->made[i], name);
        rc = name[0] ? fn(user, name, S_IFDIR) : 0;
    }
    for (size_t i = 0; i < BUCKET_NODES; i++)
        for (const struct bucket_node *n = b->by_path[i]; rc == 0 && n;
             n = n->next_path) {
            if (n->spool < 0)
                continue;
            name_below(path, n->path, name);
            if (name[0])
                rc =
                    fn(user, name,
                       strlen(n->path) > strlen(path) + (path[0] != '\0') + strlen(name)
                           ? S_IFDIR
                           : S_IFREG);
        }
    pthread_mutex_unlock(&b->lock);
    return rc;
}

int bucket_each_name(struct fs *fs, const char *path, bucket_name_fn *fn, void *user,
                     struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    int rc = fs->store->ops->list(fs->store, path, &l, e);

    if (rc == -ENOENT && (!path[0] || bucket_is_made(fs, path))) {
        *e = (struct err){0};
        rc = 0;
    }
    for (size_t i = 0; l && rc == 0 && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (!publish_is_staging(entry->name) && entry->st.kind != ENTRY_OTHER)
            rc = fn(user, entry->name, entry->st.kind == ENTRY_DIR ? S_IFDIR : S_IFREG);
    }
    return rc == 0 ? bucket_each_local(fs, path, fn, user) : rc;
}

/* ---- checkpoints ---- */

/* What was found lately, with a reference: 1, and NULL for a plain directory; 0: look. */
static int known(struct fs *fs, struct bucket_node *dir, struct generation **out)
{
    bool current;

    pthread_mutex_lock(&fs->bucket->lock);
    current = dir->looked_ns && now_ns() - dir->looked_ns < FRESH_NS &&
              dir->gen_changes == dir->changes;
    *out = current && dir->gen ? generation_get(fs, dir->gen) : NULL;
    pthread_mutex_unlock(&fs->bucket->lock);
    if (*out && ((*out)->stale || !generation_fresh(*out, now_ns()))) {
        generation_unref(fs, *out, 1);
        *out = NULL;
        return 0;
    }
    return current;
}

/* The last generation of the directory, with a reference; *changes: as of now. */
static struct generation *last_generation(struct fs *fs, struct bucket_node *dir,
                                          uint64_t *changes)
{
    struct generation *gen;

    pthread_mutex_lock(&fs->bucket->lock);
    gen = dir->gen ? generation_get(fs, dir->gen) : NULL;
    *changes = dir->changes;
    pthread_mutex_unlock(&fs->bucket->lock);
    return gen;
}

static void note(struct fs *fs, struct bucket_node *dir, struct generation *gen,
                 uint64_t changes)
{
    struct generation *old;

    pthread_mutex_lock(&fs->bucket->lock);
    old = dir->gen;
    dir->gen = gen ? generation_get(fs, gen) : NULL;
    dir->gen_changes = changes;
    dir->looked_ns = now_ns();
    pthread_mutex_unlock(&fs->bucket->lock);
    generation_unref(fs, old, 1);
}

/* Is it a directory of storage files of a checkpoint above? 1, 0 or -errno. */
static int is_part(struct fs *fs, const char *path, struct err *e)
{
    char above[PATH_MAX];
    char *slash;
    int rc = 0;

    snprintf(above, sizeof above, "%s", path);
    while (rc == 0 && above[0]) {
        struct bucket_node *n;
        struct generation *gen = NULL;

        slash = strrchr(above, '/');
        *(slash ? slash : above) = '\0';
        rc = bucket_intern(fs, above, S_IFDIR, &n, e);
        if (rc < 0)
            return rc;
        rc = bucket_generation(fs, n, true, &gen, e);
        if (rc == 0)
            rc = generation_hides_in(gen, path + strlen(above) + (above[0] != '\0'));
        else if (rc == -ENOENT)
            rc = 0;
        generation_unref(fs, gen, 1);
        bucket_unpin(fs, n);
    }
    return rc;
}

static int look(struct fs *fs, struct bucket_node *dir, struct generation *last,
                struct generation **out, struct err *e)
{
    char path[PATH_MAX];
    struct entry_stat st;
    const struct generation_place place = {
        .path = path, .dir_ino = dir->ino, .dir = &st};
    bool gone;
    int rc;

    bucket_node_path(fs, dir, path, &gone);
    rc = gone ? 0 : view_is_checkpoint(fs, path, e);
    if (rc == 1)
        rc = is_part(fs, path, e) == 0;
    if (rc == 1)
        rc = fs->store->ops->stat(fs->store, path, &st, e) == 0;
    if (rc == 1)
        return view_look(fs, &place, last, out, e);
    generation_unref(fs, last, 1);
    return rc;
}

int bucket_generation(struct fs *fs, struct bucket_node *dir, bool may_block,
                      struct generation **out, struct err *e)
{
    uint64_t changes;
    int rc = known(fs, dir, out);

    if (rc == 0 && !may_block)
        return FS_LATER;
    if (rc == 0) {
        struct generation *last = last_generation(fs, dir, &changes);

        rc = look(fs, dir, last, out, e);
        if (rc == -ENOENT)
            *e = (struct err){0};
        else if (rc < 0)
            return rc;
        note(fs, dir, *out, changes);
    }
    return *out ? 0 : -ENOENT;
}

/* ---- begin and end ---- */

int bucket_mount_new(struct fs *fs, struct bucket_mount **out, struct err *e)
{
    struct bucket_mount *b = calloc(1, sizeof *b);
    struct bucket_node *root = NULL;
    int rc;

    if (!b)
        return err_nomem(e);
    pthread_mutex_init(&b->names, NULL);
    pthread_mutex_init(&b->lock, NULL);
    *out = b;
    rc = bucket_open(fs->options.source, &b->bucket, &b->prefix, e);
    if (rc == 0)
        rc = pool_new(POOL_REMOTE, &b->pool, e);
    if (rc == 0)
        rc = bucket_intern(fs, "", S_IFDIR, &root, e);
    return rc;
}

void bucket_mount_end(struct fs *fs)
{
    struct bucket_mount *b = fs->bucket;

    for (size_t i = 0; b && i < BUCKET_NODES; i++)
        for (struct bucket_node *n = b->by_path[i]; n; n = n->next_path) {
            struct err e = {0};

            pthread_mutex_lock(&n->lock);
            if (n->dirty && !n->failed && bucket_send(fs, n, n->path, &e) < 0)
                last_error_report(&fs->last_error, &e);
            pthread_mutex_unlock(&n->lock);
        }
}

void bucket_mount_free(struct fs *fs)
{
    struct bucket_mount *b = fs->bucket;

    if (!b)
        return;
    for (size_t i = 0; i < BUCKET_NODES; i++)
        for (struct bucket_node *n = b->by_ino[i], *next; n; n = next) {
            next = n->next_ino;
            node_free(fs, n);
        }
    for (size_t i = 0; i < b->nmade; i++)
        free(b->made[i]);
    free(b->made);
    pool_free(b->pool);
    bucket_close(b->bucket);
    free(b->prefix);
    pthread_mutex_destroy(&b->lock);
    pthread_mutex_destroy(&b->names);
    free(b);
    fs->bucket = NULL;
}
