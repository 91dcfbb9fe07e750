/* SPDX-License-Identifier: MIT */
/* fs/stage.c - stages and their nodes. */
#include "fs/stage.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <search.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fsutil.h"
#include "base/log.h"
#include "fs/alias.h"
#include "fs/lookup.h"
#include "fs/node.h"
#include "fs/save_upload.h"
#include "fs/slot.h"
#include "fs/stage_room.h"
#include "save/staging.h"
#include "save/witness.h"

#define STAGED_BIT (1ull << 62)
enum { FIRST_TABLE = 256 };

struct stages {
    pthread_rwlock_t place; /* who replaces a checkpoint; all who change plain files */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* guarded by lock */
    struct stage *first;
    struct staged **table; /* by number */
    size_t cap, free;
    uint64_t generation, stages;
    void *covers; /* staged nodes by what they cover */
};

int stages_new(struct stages **out, struct err *e)
{
    struct stages *t = calloc(1, sizeof *t);
    pthread_condattr_t monotonic;
    pthread_rwlockattr_t fair;

    if (!t)
        return err_nomem(e);
    t->table = calloc(FIRST_TABLE, sizeof(struct staged *));
    if (!t->table) {
        free(t);
        return err_nomem(e);
    }
    t->cap = FIRST_TABLE;
    pthread_mutex_init(&t->lock, NULL);
    /* Writers of logs, one after the other, would keep a save waiting for ever. */
    pthread_rwlockattr_init(&fair);
    pthread_rwlockattr_setkind_np(&fair, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&t->place, &fair);
    pthread_rwlockattr_destroy(&fair);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&t->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *out = t;
    return 0;
}

void stages_plain_begin(struct fs *fs)
{
    pthread_rwlock_rdlock(&fs->stages->place);
}

void stages_plain_end(struct fs *fs)
{
    int code = errno;

    pthread_rwlock_unlock(&fs->stages->place);
    errno = code;
}

void stages_place_begin(struct fs *fs)
{
    pthread_rwlock_wrlock(&fs->stages->place);
}

void stages_place_end(struct fs *fs)
{
    pthread_rwlock_unlock(&fs->stages->place);
}

void stages_lock(struct fs *fs)
{
    pthread_mutex_lock(&fs->stages->lock);
}

void stages_unlock(struct fs *fs)
{
    pthread_mutex_unlock(&fs->stages->lock);
}

struct stage *stage_first(struct fs *fs)
{
    return fs->stages->first;
}

struct stage *stage_at(struct fs *fs, const char *path)
{
    struct stage *s = fs->stages->first;

    while (s && strcmp(s->path, path) != 0)
        s = s->next;
    return s;
}

struct stage *stage_below(struct fs *fs, const char *path)
{
    struct stage *found = NULL;

    for (struct stage *s = fs->stages->first; s; s = s->next)
        if (path_is_within(s->path, path) &&
            (!found || strlen(s->path) > strlen(found->path)))
            found = s;
    return found;
}

struct stage *stage_inside(struct fs *fs, const struct stage *s,
                           const struct stage *after)
{
    struct stage *x = after ? after->next : fs->stages->first;

    while (x && (x == s || !path_is_within(x->path, s->path)))
        x = x->next;
    return x;
}

struct stage *stage_numbered(struct fs *fs, uint64_t number)
{
    struct stage *s = fs->stages->first;

    while (s && s->number != number)
        s = s->next;
    return s;
}

/* By its number: meanwhile another one may have got its address. */
static bool wait_for(struct fs *fs, uint64_t number)
{
    const struct stage *x;

    while ((x = stage_numbered(fs, number)) && x->publishing)
        pthread_cond_wait(&fs->stages->wake, &fs->stages->lock);
    return x != NULL;
}

bool stage_wait(struct fs *fs, struct stage *s)
{
    return wait_for(fs, s->number);
}

struct stage *stage_settled(struct fs *fs, const char *path)
{
    struct stage *s;

    do {
        s = stage_at(fs, path);
    } while (s && !stage_wait(fs, s));
    return s;
}

void stage_wake(struct fs *fs)
{
    pthread_cond_broadcast(&fs->stages->wake);
}

void stage_sleep(struct fs *fs, long ns)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_nsec += ns;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&fs->stages->wake, &fs->stages->lock, &t);
}

bool stage_sleep_wait(struct fs *fs, struct stage *s, long ns)
{
    uint64_t number = s->number;

    stage_sleep(fs, ns);
    return wait_for(fs, number);
}

void stage_touch(struct stage *s)
{
    s->touched_ns = now_ns();
    s->failed = false;
    s->goes_along = false;
}

/* ---- nodes ---- */

static int by_name(const void *a, const void *b)
{
    const struct staged *x = a, *y = b;

    return strcmp(x->name, y->name);
}

static int by_cover(const void *a, const void *b)
{
    const struct staged *x = a, *y = b;

    return (x->covers > y->covers) - (x->covers < y->covers);
}

struct staged *staged_of_ino(struct fs *fs, fuse_ino_t ino)
{
    const struct stages *t = fs->stages;
    uint64_t number = ino & ~STAGED_BIT;
    struct staged key = {.covers = ino};
    void *found;

    if (ino_is_staged(ino))
        return number < t->cap ? t->table[number] : NULL;
    found = tfind(&key, &t->covers, by_cover);
    return found ? *(struct staged **)found : NULL;
}

struct staged *staged_find(const struct staged *dir, const char *name)
{
    struct staged key = {.name = (char *)(uintptr_t)name};
    void *found = tfind(&key, &dir->children, by_name);

    return found ? *(struct staged **)found : NULL;
}

static bool table_add(struct stages *t, struct staged *n)
{
    while (t->free < t->cap && t->table[t->free])
        t->free++;
    if (t->free == t->cap) {
        struct staged **grown = reallocarray(t->table, 2 * t->cap, sizeof *grown);

        if (!grown)
            return false;
        memset(grown + t->cap, 0, t->cap * sizeof *grown);
        t->table = grown;
        t->cap *= 2;
    }
    n->ino = STAGED_BIT | t->free;
    n->generation = ++t->generation;
    t->table[t->free] = n;
    return true;
}

static void staged_free(struct staged *n)
{
    if (n->unlinked_fd >= 0)
        close(n->unlinked_fd);
    free(n->name);
    free(n->dtype);
    free(n);
}

static struct staged *staged_make(struct fs *fs, const char *name,
                                  enum staged_kind kind, mode_t mode)
{
    struct staged *n = calloc(1, sizeof *n);

    if (!n)
        return NULL;
    n->kind = kind;
    n->unlinked_fd = -1;
    n->mode = mode & 07777;
    n->uid = geteuid();
    n->gid = getegid();
    n->refs = 1; /* its place in the tree */
    clock_gettime(CLOCK_REALTIME, &n->mtime);
    n->ctime = n->mtime;
    n->name = strdup(name);
    if (n->name && table_add(fs->stages, n))
        return n;
    staged_free(n);
    return NULL;
}

/* A name came to the directory, or went. */
static void names_changed(struct staged *dir)
{
    clock_gettime(CLOCK_REALTIME, &dir->mtime);
    dir->ctime = dir->mtime;
}

int staged_add(struct fs *fs, struct staged *dir, const char *name,
               enum staged_kind kind, mode_t mode, struct staged **out, struct err *e)
{
    struct staged *n = staged_make(fs, name, kind, mode);

    if (!n)
        return err_nomem(e);
    n->stage = dir->stage;
    n->parent = dir;
    if (kind == STAGED_FILE)
        n->spool = ++n->stage->spools;
    if (kind == STAGED_GONE)
        n->order = ++n->stage->closes;
    if (!tsearch(n, &dir->children, by_name)) {
        n->stage = NULL;
        staged_unref(fs, n, 1);
        return err_nomem(e);
    }
    dir->count++;
    names_changed(dir);
    stage_touch(n->stage);
    *out = n;
    return 0;
}

/*
 * What is covered keeps its number for as long: given to another file, that one would be
 * read as this.
 */
static bool pin_covered(struct fs *fs, fuse_ino_t ino)
{
    return ino_is_inside(ino) ? slot_of_ino(fs, ino) != NULL
                              : node_pin(fs, ino) != NULL;
}

void staged_cover(struct fs *fs, struct staged *n, fuse_ino_t ino)
{
    void *found;

    if (!pin_covered(fs, ino))
        return;
    n->covers = ino;
    found = tsearch(n, &fs->stages->covers, by_cover);
    if (found && *(struct staged **)found == n)
        return;
    n->covers = 0; /* out of memory: its old name has the old bytes a while longer */
    entry_forget(fs, ino, 1);
}

void staged_lose(struct staged *n, int code, uint64_t from, uint64_t to)
{
    n->lost_from = n->lost ? MIN(n->lost_from, from) : from;
    n->lost_to = n->lost ? MAX(n->lost_to, to) : to;
    n->lost = code;
}

void staged_wrote(struct staged *n, uint64_t from, uint64_t to)
{
    if (n->lost && from <= n->lost_from && to > n->lost_from)
        n->lost_from = to;
    if (n->lost_from >= n->lost_to)
        n->lost = 0;
    if (from <= n->prefix)
        n->prefix = MAX(n->prefix, to);
}

void staged_cut(struct staged *n, uint64_t size)
{
    if (size <= n->lost_from)
        n->lost = 0;
    if (size == 0)
        n->checked = n->stands = false;
    n->prefix = MIN(n->prefix, size);
    n->to_disk = MIN(n->to_disk, size);
}

void staged_ref(struct staged *n)
{
    n->refs++;
}

void staged_unref(struct fs *fs, struct staged *n, uint64_t refs)
{
    struct stages *t = fs->stages;

    n->refs -= MIN(refs, n->refs);
    if (n->refs > 0)
        return;
    alias_end(fs, n);
    stage_room_give(fs, n, 0);
    t->table[n->ino & ~STAGED_BIT] = NULL;
    t->free = MIN(t->free, (size_t)(n->ino & ~STAGED_BIT));
    staged_free(n);
}

int staged_stat(const struct staged *n, struct stat *st)
{
    char name[24];

    if (n->unlinked_fd >= 0)
        return fstat(n->unlinked_fd, st) < 0 ? -errno : 0;
    if (n->kind != STAGED_FILE || !n->stage)
        return -ENOENT;
    snprintf(name, sizeof name, "%" PRIu64, n->spool);
    return fstatat(staging_spool(n->stage->staging), name, st, AT_SYMLINK_NOFOLLOW) < 0
               ? -errno
               : 0;
}

int staged_open_spool(const struct staged *n, int flags)
{
    char name[24];
    int fd;

    if (!n->stage)
        return -ESTALE;
    snprintf(name, sizeof name, "%" PRIu64, n->spool);
    fd = openat(staging_spool(n->stage->staging), name, flags | O_CLOEXEC | O_NOFOLLOW,
                0600);
    return fd < 0 ? -errno : fd;
}

int staged_link(const struct staged *from, const struct staged *to, struct err *e)
{
    int dir = staging_spool(from->stage->staging);
    char old[24], new[24];

    snprintf(old, sizeof old, "%" PRIu64, from->spool);
    snprintf(new, sizeof new, "%" PRIu64, to->spool);
    return linkat(dir, old, dir, new, 0) < 0
               ? err_set(e, errno, "%s: %s", to->name, strerror(errno))
               : 0;
}

/* Out of its stage: what has it open may go on. */
static void detach(struct fs *fs, struct staged *n)
{
    struct stat st;
    char name[24];

    if (n->refs > 1 && staged_stat(n, &st) == 0)
        n->size = (uint64_t)st.st_size;
    if (n->covers) {
        tdelete(n, &fs->stages->covers, by_cover);
        entry_forget(fs, n->covers, 1);
        n->covers = 0;
    }
    if (n->kind == STAGED_FILE && n->stage) {
        snprintf(name, sizeof name, "%" PRIu64, n->spool);
        unlinkat(staging_spool(n->stage->staging), name, 0);
    }
    if (n->handles == 0)
        stage_room_give(fs, n, 0);
    n->stage = NULL;
    n->parent = NULL;
    staged_unref(fs, n, 1);
}

void staged_remove(struct fs *fs, struct staged *n)
{
    stage_touch(n->stage);
    if (n->parent) {
        tdelete(n, &n->parent->children, by_name);
        n->parent->count--;
        names_changed(n->parent);
    }
    while (n->children) {
        struct staged *child = *(struct staged **)n->children;

        staged_remove(fs, child);
    }
    if (n->writers > 0) /* who has it open goes on, and asks for its size */
        n->unlinked_fd = staged_open_spool(n, O_RDONLY);
    n->stage->writers -= n->writers;
    n->writers = 0;
    n->removed = true;
    detach(fs, n);
}

int staged_rename(struct fs *fs, struct staged *n, struct staged *dir, const char *name,
                  struct err *e)
{
    char *copy = strdup(name);
    struct staged *there = staged_find(dir, name);

    if (!copy)
        return err_nomem(e);
    if (there == n) {
        free(copy);
        return 0;
    }
    if (there)
        staged_remove(fs, there);
    tdelete(n, &n->parent->children, by_name);
    n->parent->count--;
    names_changed(n->parent);
    free(n->name);
    n->name = copy;
    n->parent = dir;
    dir->count++;
    names_changed(dir);
    n->ctime = dir->ctime;
    n->checked = false; /* what it is follows from its name */
    stage_touch(n->stage);
    if (tsearch(n, &dir->children, by_name))
        return 0;
    dir->count--;
    n->parent = NULL;
    staged_remove(fs, n);
    return err_nomem(e);
}

struct walk {
    void (*fn)(void *user, struct staged *n);
    void *user;
};

static void visit(const void *node, VISIT which, void *closure)
{
    const struct walk *w = closure;

    if (which == postorder || which == leaf)
        w->fn(w->user, *(struct staged *const *)node);
}

void staged_each(const struct staged *dir, void (*fn)(void *user, struct staged *n),
                 void *user)
{
    struct walk w = {fn, user};

    twalk_r(dir->children, visit, &w);
}

int staged_path(const struct staged *n, char *dst, size_t size)
{
    size_t at = size;

    if (size == 0)
        return -ENAMETOOLONG;
    dst[--at] = '\0';
    for (; n->parent; n = n->parent) {
        size_t len = strlen(n->name);

        if (at < len + 1)
            return -ENAMETOOLONG;
        memcpy(dst + (at -= len), n->name, len);
        if (n->parent->parent)
            dst[--at] = '/';
    }
    memmove(dst, dst + at, size - at);
    return 0;
}

/* ---- stages ---- */

/* The source itself is the checkpoint: its directory lies outside of what is mounted. */
static int root_parent(const struct fs *fs, const char **name, struct err *e)
{
    const char *url = fs->store->url, *slash = strrchr(url, '/');
    char dir[PATH_MAX];
    struct err ignored = {0};
    int fd;

    if (!slash || !slash[1] || !fs->store->ops->reopen ||
        fs->store->ops->reopen(fs->store, &ignored) < 0) {
        err_set(e, EROFS, "%s: the source itself cannot be replaced", url);
        return err_hint(e, "mount the directory above it");
    }
    *name = slash + 1;
    snprintf(dir, sizeof dir, "%.*s", slash == url ? 1 : (int)(slash - url), url);
    fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? err_set(e, errno, "%s: %s", dir, strerror(errno)) : fd;
}

/* What is written goes where it was read: the path may lead elsewhere (umount -l). */
static int open_root(const struct fs *fs, struct err *e)
{
    CLEANUP_FD int fd = open(fs->store->url, O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct entry_stat root;
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        return err_set(e, errno, "%s: %s", fs->store->url, strerror(errno));
    if (fs->store->ops->stat(fs->store, "", &root, e) < 0)
        return -e->code;
    if (root.id.dev != st.st_dev || root.id.ino != st.st_ino) {
        err_set(e, EIO, "%s: another directory than the one that is mounted",
                fs->store->url);
        return err_hint(e, "nothing is written there: mount it anew");
    }
    return steal_fd(&fd);
}

/* The directory that holds `path`, beneath the source's root; "" has none in it. */
int stage_parent(const struct fs *fs, const char *path, const char **name,
                 struct err *e)
{
    const struct open_rule rule = {.beneath = true,
                                   .flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC};
    const char *slash = strrchr(path, '/');
    char dir[PATH_MAX];
    CLEANUP_FD int root = -1;
    int fd;

    if (fs->store->remote)
        return save_upload_refuse(fs, path, e);
    if (path[0] == '\0')
        return root_parent(fs, name, e);
    *name = slash ? slash + 1 : path;
    if (snprintf(dir, sizeof dir, "%.*s", slash ? (int)(slash - path) : 1,
                 slash ? path : ".") >= (int)sizeof dir)
        return err_set(e, ENAMETOOLONG, "%s", path);
    root = open_root(fs, e);
    if (root < 0)
        return root;
    fd = open_below(root, dir, &rule);
    return fd < 0 ? err_set(e, -fd, "%s: %s", dir, strerror(-fd)) : fd;
}

int stage_directory(const struct fs *fs, const char *path, struct err *e)
{
    const char *name;
    CLEANUP_FD int parent = stage_parent(fs, path, &name, e);
    int fd;

    if (parent < 0)
        return parent;
    fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return fd < 0 ? err_set(e, errno, "%s: %s", path, strerror(errno)) : fd;
}

static int begin(struct fs *fs, struct stage *s, struct err *e)
{
    CLEANUP_FREE char *target = NULL;
    const struct witness_filter storage = {.counts = slot_stores, .user = s->slot};
    struct staging_claim claim = {.mount = true, .storage = s->slot ? &storage : NULL};
    const char *slash = strrchr(s->path, '/');
    CLEANUP_FD int parent = fs->store->remote
                                ? save_upload_spools(fs, s->path, e)
                                : stage_parent(fs, s->path, &claim.name, e);

    if (parent < 0)
        return parent;
    if (fs->store->remote)
        claim.name = slash ? slash + 1 : s->path;
    if (asprintf(&target, "%s/%s", fs->store->url, s->path) < 0) {
        target = NULL;
        return err_nomem(e);
    }
    claim.parent = parent;
    claim.target = target;
    return staging_open(&claim, &s->staging, e);
}

static void stage_free(struct fs *fs, struct stage *s)
{
    struct err e = {0};

    if (s->staging)
        staging_discard(s->staging, &e);
    staging_close(s->staging);
    slot_unref(fs, s->slot, 1);
    free(s->format);
    free(s->path);
    free(s);
}

int stage_new(struct fs *fs, const char *path, struct slot *slot, struct stage **out,
              struct err *e)
{
    struct stage *s = calloc(1, sizeof *s);
    int rc;

    if (!s)
        return err_nomem(e);
    s->path = strdup(path);
    s->slot = slot ? slot_get(fs, slot) : NULL;
    stages_plain_begin(fs); /* its staging directory may lie in a checkpoint */
    rc = s->path ? begin(fs, s, e) : err_nomem(e);
    stages_plain_end(fs);
    if (rc == 0)
        s->root = staged_make(fs, "", STAGED_DIR, 0777);
    if (rc == 0 && !s->root)
        rc = err_nomem(e);
    if (rc < 0) {
        stage_free(fs, s);
        return rc;
    }
    s->root->stage = s;
    s->number = ++fs->stages->stages;
    stage_touch(s);
    s->next = fs->stages->first;
    fs->stages->first = s;
    *out = s;
    return 0;
}

bool stage_is_removal(const struct stage *s)
{
    const struct staged *reports = s->slot ? staged_find(s->root, ".unshard") : NULL;

    return reports && (reports->count > 0 || reports->removed);
}

/* All nodes of a kind below a directory. */
struct found {
    enum staged_kind kind;
    struct staged **node;
    size_t count, cap;
};

static void find_kind(void *user, struct staged *n)
{
    struct found *f = user;

    if (n->kind == STAGED_DIR) {
        n->removed = false;
        staged_each(n, find_kind, f); /* not deep: these are directories of programs */
    }
    if (n->kind != f->kind)
        return;
    if (f->count == f->cap) {
        size_t cap = f->cap ? 2 * f->cap : 256;
        struct staged **grown = reallocarray(f->node, cap, sizeof *grown);

        if (!grown)
            return; /* it stays hidden in this mount */
        f->node = grown;
        f->cap = cap;
    }
    f->node[f->count++] = n;
}

struct renewal {
    struct fs *fs;
    const struct stage *stage;
};

/* Directories that the kernel saw removed are others when they show again. */
static void renew(void *user, struct staged *n)
{
    const struct renewal *w = user;
    enum inside dir = n->kind == STAGED_DIR && n->covers ? ino_kind(n->covers) : 0;
    char path[PATH_MAX];

    if (n->kind == STAGED_GONE) {
        if (store_join(w->stage->path, n->name, path, sizeof path) == 0)
            nodes_renew(w->fs, path);
    } else if (dir && (n->removed || (dir == INSIDE_TREE && n->count > 0))) {
        slot_renew(w->fs, w->stage->slot, dir);
    }
}

bool stage_unhide(struct fs *fs, struct stage *s)
{
    struct found gone = {.kind = STAGED_GONE}, files = {.kind = STAGED_FILE};
    bool any;

    staged_each(s->root, renew, &(struct renewal){fs, s});
    staged_each(s->root, find_kind, &gone);
    for (size_t i = 0; i < gone.count; i++)
        staged_remove(fs, gone.node[i]);
    free(gone.node);
    staged_each(s->root, find_kind, &files);
    any = files.count > 0;
    free(files.node);
    return any;
}

static void end_tree(struct fs *fs, struct staged *n)
{
    while (n->children) {
        struct staged *child = *(struct staged **)n->children;

        tdelete(child, &n->children, by_name);
        end_tree(fs, child);
    }
    detach(fs, n);
}

void stage_end(struct fs *fs, struct stage *s, bool published)
{
    struct stage **p = &fs->stages->first;

    while (*p && *p != s)
        p = &(*p)->next;
    if (*p)
        *p = s->next;
    end_tree(fs, s->root);
    if (published) { /* which has removed what was staged */
        staging_close(s->staging);
        s->staging = NULL;
    }
    stage_free(fs, s);
    stage_wake(fs);
}

void stages_free(struct fs *fs)
{
    struct stages *t = fs->stages;

    if (!t)
        return;
    while (t->first)
        stage_end(fs, t->first, false);
    for (size_t i = 0; i < t->cap; i++)
        if (t->table[i])
            staged_free(t->table[i]);
    free(t->table);
    pthread_rwlock_destroy(&t->place);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->lock);
    free(t);
    fs->stages = NULL;
}
