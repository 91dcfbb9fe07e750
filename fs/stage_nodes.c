/* SPDX-License-Identifier: MIT */
/* fs/stage_nodes.c - the files and directories of stages. */
#include <errno.h>
#include <fcntl.h>
#include <search.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/alias.h"
#include "fs/lookup.h"
#include "fs/node.h"
#include "fs/slot.h"
#include "fs/stage_priv.h"
#include "fs/stage_room.h"
#include "save/staging.h"

#define STAGED_BIT (1ull << 62)

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

void staged_free(struct staged *n)
{
    if (n->unlinked_fd >= 0)
        close(n->unlinked_fd);
    came_put(n->came);
    free(n->name);
    free(n->dtype);
    free(n);
}

struct staged *staged_make(struct fs *fs, const char *name, enum staged_kind kind,
                           mode_t mode)
{
    struct staged *n = calloc(1, sizeof *n);

    if (!n)
        return NULL;
    n->kind = kind;
    n->unlinked_fd = -1;
    n->since = STAGED_ALL_NEW;
    n->mode = mode & 07777;
    n->uid = geteuid();
    n->gid = getegid();
    n->refs = 1; /* its place in the tree */
    clock_gettime(CLOCK_REALTIME, &n->mtime);
    n->ctime = n->mtime;
    n->name = strdup(name);
    n->came = came_new();
    if (n->name && n->came && table_add(fs->stages, n))
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

enum { COMES_NS = 1000000000 };

/* Forgets it, too. With the lock. */
static bool was_told(struct stages *t, pid_t pid)
{
    bool was = false;

    for (unsigned i = 0; i < TURNED_MAX; i++) {
        if (t->turned[i].pid == pid) {
            was |= t->turned[i].ns > now_ns() - COMES_NS;
            t->turned[i].pid = 0;
        }
    }
    return was;
}

static void tell(struct stages *t, pid_t pid)
{
    t->turned[t->turns++ % TURNED_MAX] = (struct turned){pid, now_ns()};
}

void staged_told_stale(struct fs *fs, pid_t pid)
{
    stages_lock(fs);
    tell(fs->stages, pid);
    stages_unlock(fs);
}

bool staged_turn_away(struct fs *fs, struct staged *n, pid_t pid)
{
    if (pid == 0) /* of another name space of processes: all of them have this number */
        return false;
    if (was_told(fs->stages, pid))
        return false;
    tell(fs->stages, pid);
    n->stage->comes_ns = now_ns() + COMES_NS;
    return true;
}

void staged_came_back(struct fs *fs, struct staged *n, pid_t pid)
{
    if (pid != 0 && was_told(fs->stages, pid))
        n->stage->comes_ns = 0;
}

void staged_lose(struct staged *n, int code, uint64_t from, uint64_t to)
{
    struct stat st = {0};

    came_lose(n->came, code, from, to,
              staged_stat(n, &st) == 0 ? (uint64_t)st.st_size : UINT64_MAX);
}

bool staged_may_lack(const struct staged *n)
{
    struct stat st;

    return staged_stat(n, &st) == 0 && n->came->prefix < (uint64_t)st.st_size;
}

void staged_cut(struct staged *n, uint64_t size)
{
    came_cut(n->came, size);
    if (size == 0) {
        n->checked = n->stands = false;
        n->since = STAGED_ALL_NEW;
        n->base.ino = 0;
    }
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

/* Who has it open goes on, and asks for its size; it may be another name's file, too. */
static void leave_writers(struct staged *n)
{
    struct stat st;

    n->changing = 0;
    if (n->writers == 0)
        return;
    n->unlinked_fd = staged_open_spool(n, O_RDONLY);
    if (staged_stat(n, &st) == 0 && st.st_nlink > 1) {
        n->owes = n->stage->number;
        return;
    }
    n->stage->writers -= n->writers;
    n->writers = 0;
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
    leave_writers(n);
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
    n->base.ino = 0;    /* which stays what it was, if not hidden */
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

void staged_end(struct fs *fs, struct staged *n)
{
    while (n->children) {
        struct staged *child = *(struct staged **)n->children;

        tdelete(child, &n->children, by_name);
        staged_end(fs, child);
    }
    detach(fs, n);
}
