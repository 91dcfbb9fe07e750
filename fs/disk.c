/* SPDX-License-Identifier: MIT */
/* fs/disk.c - inodes of the source in a mount for writing. */
#include "fs/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <xxhash.h>

#include "fs/generation.h"
#include "index/formats/scan.h"

enum {
    FIRST_BUCKETS = 256,
    FIRST_TABLE = 256,
    FDS_MAX = 1 << 16,
    FDS_LEAST = 64,
};

struct disk {
    pthread_mutex_t lock;
    /* guarded by lock */
    struct disk_node **table; /* by number; 0 is never used */
    size_t cap, free;         /* free: no number below it is free */
    struct disk_node **bucket;
    size_t nbuckets, count;
    uint64_t generation;
    struct ring unused; /* nodes whose descriptor nobody uses, oldest first */
    size_t fds, max_fds;
    unsigned moves; /* of the store, when its root was opened */
};

/* What a file is, whatever its name. */
struct identity {
    uint64_t dev, inode;
    int64_t born_ns; /* 0: the file system does not tell */
};

struct disk_proc disk_proc(int fd)
{
    struct disk_proc p;

    snprintf(p.path, sizeof p.path, "/proc/self/fd/%d", fd);
    return p;
}

static int fail(const char *name, struct err *e)
{
    return err_set(e, errno, "%s: %s", name, strerror(errno));
}

static int identify(int fd, struct identity *id, struct stat *st)
{
    struct statx x;

    if (fstatat(fd, "", st, AT_EMPTY_PATH) < 0)
        return -errno;
    *id = (struct identity){.dev = st->st_dev, .inode = st->st_ino};
    if (statx(fd, "", AT_EMPTY_PATH, STATX_BTIME, &x) == 0 &&
        (x.stx_mask & STATX_BTIME))
        id->born_ns = x.stx_btime.tv_sec * 1000000000 + x.stx_btime.tv_nsec;
    return 0;
}

static bool is_same(const struct disk_node *n, const struct identity *id)
{
    return n->dev == id->dev && n->inode == id->inode && n->born_ns == id->born_ns;
}

/* ---- the table; all with the lock ---- */

static struct disk_node **bucket_of(const struct disk *d, const struct identity *id)
{
    return &d->bucket[XXH3_64bits(id, sizeof *id) & (d->nbuckets - 1)];
}

static struct identity identity_of(const struct disk_node *n)
{
    return (struct identity){n->dev, n->inode, n->born_ns};
}

static struct disk_node *hash_find(const struct disk *d, const struct identity *id)
{
    struct disk_node *n = *bucket_of(d, id);

    while (n && !is_same(n, id))
        n = n->next;
    return n;
}

static void hash_link(struct disk *d, struct disk_node *n)
{
    const struct identity id = identity_of(n);
    struct disk_node **b = bucket_of(d, &id);

    n->next = *b;
    *b = n;
}

static void hash_grow(struct disk *d)
{
    size_t old = d->nbuckets;
    struct disk_node **was = d->bucket;
    struct disk_node **now = calloc(2 * old, sizeof *now);

    if (!now)
        return; /* longer chains, nothing worse */
    d->bucket = now;
    d->nbuckets = 2 * old;
    for (size_t i = 0; i < old; i++) {
        for (struct disk_node *n = was[i], *next; n; n = next) {
            next = n->next;
            hash_link(d, n);
        }
    }
    free(was);
}

static void hash_remove(struct disk *d, struct disk_node *n)
{
    const struct identity id = identity_of(n);
    struct disk_node **b = bucket_of(d, &id);

    while (*b != n)
        b = &(*b)->next;
    *b = n->next;
    d->count--;
}

/* Gives it a number. */
static bool table_add(struct disk *d, struct disk_node *n)
{
    while (d->free < d->cap && d->table[d->free])
        d->free++;
    if (d->free == d->cap) {
        struct disk_node **grown = reallocarray(d->table, 2 * d->cap, sizeof *grown);

        if (!grown)
            return false;
        memset(grown + d->cap, 0, d->cap * sizeof *grown);
        d->table = grown;
        d->cap *= 2;
    }
    n->ino = d->free;
    n->generation = ++d->generation;
    d->table[n->ino] = n;
    if (++d->count > d->nbuckets)
        hash_grow(d);
    hash_link(d, n);
    return true;
}

/* ---- descriptors; with the lock ---- */

static void close_fd(struct disk *d, struct disk_node *n)
{
    close(n->fd);
    n->fd = -1;
    d->fds--;
}

/* Closes what was not used for longest, where there are too many. */
static void make_room(struct disk *d)
{
    struct ring *at = d->unused.next, *next;

    for (; d->fds > d->max_fds && at != &d->unused; at = next) {
        struct disk_node *n = container_of(at, struct disk_node, unused);

        next = at->next;
        if (n->keeps_fd || !n->parent)
            continue;
        ring_remove(&n->unused);
        close_fd(d, n);
    }
}

/* Closes half of them. Was there any that is not in use? */
static bool spare_some(struct disk *d)
{
    size_t before = d->fds, most = d->max_fds;

    d->max_fds = before / 2;
    make_room(d);
    d->max_fds = most;
    return d->fds < before;
}

int disk_openat(struct fs *fs, int at, const char *name, int flags, mode_t mode)
{
    int fd = openat(at, name, flags, mode);

    while (fd < 0 && errno == EMFILE) {
        bool spared;

        disk_lock(fs);
        spared = spare_some(fs->disk);
        disk_unlock(fs);
        errno = EMFILE;
        if (!spared)
            return -1;
        fd = openat(at, name, flags, mode);
    }
    return fd;
}

/* Takes the descriptor over; where the node has one, that stays. */
static void give_fd(struct disk *d, struct disk_node *n, int fd)
{
    if (n->fd >= 0) {
        close(fd);
        return;
    }
    n->fd = fd;
    d->fds++;
    if (n->users == 0)
        ring_append(&d->unused, &n->unused);
    make_room(d);
}

static void use_fd(struct disk_node *n)
{
    if (n->users++ == 0)
        ring_remove(&n->unused);
}

void disk_lock(struct fs *fs)
{
    pthread_mutex_lock(&fs->disk->lock);
}

void disk_unlock(struct fs *fs)
{
    pthread_mutex_unlock(&fs->disk->lock);
}

/* ---- references ---- */

/* The node and parents that nobody needs, as a list. With the lock. */
static struct disk_node *take_refs(struct disk *d, struct disk_node *n, uint64_t refs)
{
    struct disk_node *dead = NULL;

    while (n && n->ino != FUSE_ROOT_ID) {
        struct disk_node *parent = n->parent;

        n->refs -= MIN(refs, n->refs);
        if (n->refs > 0)
            break;
        hash_remove(d, n);
        d->table[n->ino] = NULL;
        d->free = MIN(d->free, n->ino);
        if (n->fd >= 0) {
            ring_remove(&n->unused);
            close_fd(d, n);
        }
        n->next = dead;
        dead = n;
        n = parent;
        refs = 1;
    }
    return dead;
}

static void node_free(struct fs *fs, struct disk_node *n)
{
    generation_unref(fs, n->gen, 1);
    free(n->name);
    free(n);
}

static void bury(struct fs *fs, struct disk_node *dead)
{
    for (struct disk_node *next; dead; dead = next) {
        next = dead->next;
        node_free(fs, dead);
    }
}

static void drop(struct fs *fs, struct disk_node *n, uint64_t refs)
{
    struct disk_node *dead;

    if (!n)
        return;
    disk_lock(fs);
    dead = take_refs(fs->disk, n, refs);
    disk_unlock(fs);
    bury(fs, dead);
}

struct disk_node *disk_pin(struct fs *fs, fuse_ino_t ino)
{
    struct disk *d = fs->disk;
    struct disk_node *n;

    pthread_mutex_lock(&d->lock);
    n = ino < d->cap ? d->table[ino] : NULL;
    if (n)
        n->refs++;
    pthread_mutex_unlock(&d->lock);
    return n;
}

void disk_unpin(struct fs *fs, struct disk_node *n)
{
    drop(fs, n, 1);
}

void disk_forget(struct fs *fs, fuse_ino_t ino, uint64_t lookups)
{
    struct disk_node *n = disk_pin(fs, ino);

    drop(fs, n, lookups + 1);
}

/* ---- where a node is ---- */

/* Where it was seen last, from now on. With the lock; the old parent is returned. */
static struct disk_node *set_place(struct disk_node *n, struct disk_node *dir,
                                   const char *name)
{
    struct disk_node *old = n->parent;
    char *copy;

    if (n->ino == FUSE_ROOT_ID || (old == dir && n->name && strcmp(n->name, name) == 0))
        return NULL;
    copy = strdup(name);
    if (!copy)
        return NULL; /* its old place is found to be another's when it is needed */
    free(n->name);
    n->name = copy;
    n->parent = dir;
    dir->refs++;
    return old;
}

void disk_moved(struct fs *fs, struct disk_node *n, struct disk_node *dir,
                const char *name)
{
    struct disk_node *old, *dead;

    disk_lock(fs);
    old = set_place(n, dir, name);
    dead = old ? take_refs(fs->disk, old, 1) : NULL;
    disk_unlock(fs);
    bury(fs, dead);
}

struct disk_node *disk_place(struct fs *fs, struct disk_node *n,
                             char name[NAME_MAX + 1])
{
    struct disk_node *dir;

    disk_lock(fs);
    dir = n->name ? n->parent : NULL;
    if (dir) {
        dir->refs++;
        snprintf(name, NAME_MAX + 1, "%s", n->name);
    }
    disk_unlock(fs);
    return dir;
}

/* With the lock. */
static int build_path(const struct disk_node *n, char dst[PATH_MAX])
{
    size_t at = PATH_MAX - 1;

    dst[at] = '\0';
    for (; n->parent; n = n->parent) {
        size_t len = n->name ? strlen(n->name) : 0;

        if (!n->name)
            return -ESTALE;
        if (at < len + 1)
            return -ENAMETOOLONG;
        if (dst[at])
            dst[--at] = '/';
        at -= len;
        memcpy(dst + at, n->name, len);
    }
    memmove(dst, dst + at, PATH_MAX - at);
    return 0;
}

int disk_path(struct fs *fs, struct disk_node *n, char dst[PATH_MAX], struct err *e)
{
    int rc;

    disk_lock(fs);
    rc = build_path(n, dst);
    disk_unlock(fs);
    if (rc == -ESTALE)
        return err_set(e, ESTALE, "the directory has no name any more");
    return rc < 0 ? err_set(e, ENAMETOOLONG, "the path is longer than %d bytes",
                            PATH_MAX - 1)
                  : 0;
}

void disk_changed(struct fs *fs, struct disk_node *n)
{
    disk_lock(fs);
    for (; n; n = n->parent)
        n->changes++;
    disk_unlock(fs);
}

uint64_t disk_changes(struct fs *fs, const struct disk_node *n)
{
    uint64_t changes;

    disk_lock(fs);
    changes = n->changes;
    disk_unlock(fs);
    return changes;
}

struct disk_node *disk_parent(struct fs *fs, struct disk_node *n)
{
    struct disk_node *dir;

    disk_lock(fs);
    dir = n->parent;
    if (dir)
        dir->refs++;
    disk_unlock(fs);
    return dir;
}

unsigned disk_writers(struct fs *fs, struct disk_node *n, int by)
{
    unsigned writers;

    disk_lock(fs);
    n->writers += (unsigned)by;
    writers = n->writers;
    disk_unlock(fs);
    return writers;
}

void disk_keep(struct fs *fs, struct disk_node *n)
{
    disk_lock(fs);
    n->keeps_fd = true;
    disk_unlock(fs);
}

/* ---- descriptors ---- */

/* Opens it where it was seen last: it must still be what is there. */
static int open_again(struct fs *fs, struct disk_node *n, struct err *e)
{
    char name[NAME_MAX + 1];
    struct disk_node *dir = disk_place(fs, n, name);
    struct identity id;
    struct stat st;
    int at = dir ? disk_get(fs, dir, e) : -ESTALE;
    int fd =
        at < 0 ? -1 : disk_openat(fs, at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
    int code = at < 0 ? -at : errno;

    if (at >= 0)
        disk_put(fs, dir);
    disk_unpin(fs, dir);
    if (fd >= 0 && identify(fd, &id, &st) == 0 && is_same(n, &id))
        return fd;
    if (fd < 0 && (code == EMFILE || code == ENFILE))
        return err_set(e, code, "%s: %s", name, strerror(code));
    if (fd >= 0)
        close(fd);
    return err_set(e, ESTALE, "%s is not there any more, or another file", name);
}

/*
 * With the lock: its descriptor, used once more; or -1. One of a file system that was
 * unmounted would go on working, where nobody else sees what is written.
 */
static int try_fd(struct fs *fs, struct disk_node *n, struct err *e)
{
    if (fs->disk->moves != atomic_load(&fs->store->moves)) {
        err_set(e, EIO, "%s: the file system of the source was unmounted",
                fs->store->url);
        return err_hint(e, "mount it again");
    }
    if (n->moves != fs->disk->moves)
        return err_set(e, ESTALE, "%s lay on a file system that was unmounted",
                       n->name ? n->name : "it");
    if (n->fd >= 0)
        use_fd(n);
    return n->fd;
}

int disk_get(struct fs *fs, struct disk_node *n, struct err *e)
{
    struct disk *d = fs->disk;
    int fd, fresh;

    pthread_mutex_lock(&d->lock);
    fd = try_fd(fs, n, e);
    pthread_mutex_unlock(&d->lock);
    if (fd != -1)
        return fd;
    fresh = open_again(fs, n, e);
    if (fresh < 0)
        return fresh;
    pthread_mutex_lock(&d->lock);
    n->users++; /* so that nobody closes it before it is used */
    give_fd(d, n, fresh);
    ring_remove(&n->unused);
    fd = n->fd;
    pthread_mutex_unlock(&d->lock);
    return fd;
}

void disk_put(struct fs *fs, struct disk_node *n)
{
    struct disk *d = fs->disk;

    pthread_mutex_lock(&d->lock);
    if (--n->users == 0 && n->fd >= 0) {
        ring_append(&d->unused, &n->unused);
        make_room(d);
    }
    pthread_mutex_unlock(&d->lock);
}

/* ---- names ---- */

static struct disk_node *node_make(const struct identity *id, mode_t type)
{
    struct disk_node *n = calloc(1, sizeof *n);

    if (!n)
        return NULL;
    n->dev = id->dev;
    n->inode = id->inode;
    n->born_ns = id->born_ns;
    n->type = type & S_IFMT;
    n->fd = -1;
    ring_init(&n->unused);
    return n;
}

/* Finds or makes the node of an open descriptor, which it takes over. */
static int intern(struct fs *fs, struct disk_node *dir, const char *name, int fd,
                  const struct identity *id, mode_t type, struct disk_node **out,
                  struct err *e)
{
    struct disk *d = fs->disk;
    struct disk_node *fresh = node_make(id, type), *n, *old = NULL, *dead;

    pthread_mutex_lock(&d->lock);
    n = hash_find(d, id);
    if (!n && fresh && table_add(d, fresh))
        n = steal(&fresh);
    if (n) {
        n->refs++;
        n->moves = d->moves;
        old = set_place(n, dir, name);
        give_fd(d, n, fd);
    }
    dead = old ? take_refs(d, old, 1) : NULL;
    pthread_mutex_unlock(&d->lock);
    bury(fs, dead);
    free(fresh);
    if (n) {
        *out = n;
        return 0;
    }
    close(fd);
    return err_nomem(e);
}

int disk_find(struct fs *fs, struct disk_node *dir, const char *name,
              struct disk_node **out, struct stat *st, struct err *e)
{
    int at = disk_get(fs, dir, e), rc;
    struct identity id;
    int fd;

    if (at < 0)
        return at;
    fd = disk_openat(fs, at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
    rc = fd < 0 ? fail(name, e) : identify(fd, &id, st);
    disk_put(fs, dir);
    if (rc < 0) {
        if (fd >= 0)
            close(fd);
        return rc;
    }
    return intern(fs, dir, name, fd, &id, st->st_mode, out, e);
}

struct disk_node *disk_known(struct fs *fs, struct disk_node *dir, const char *name)
{
    struct err ignored = {0};
    int at = disk_get(fs, dir, &ignored);
    CLEANUP_FD int fd =
        at < 0 ? -1 : disk_openat(fs, at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
    struct disk_node *n = NULL;
    struct identity id;
    struct stat st;

    if (at >= 0)
        disk_put(fs, dir);
    if (fd < 0 || identify(fd, &id, &st) < 0)
        return NULL;
    disk_lock(fs);
    n = hash_find(fs->disk, &id);
    if (n)
        n->refs++;
    disk_unlock(fs);
    return n;
}

/* ---- begin and end ---- */

static size_t fds_allowed(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return FDS_LEAST;
    return MAX(MIN((size_t)limit.rlim_cur / 2, (size_t)FDS_MAX), (size_t)FDS_LEAST);
}

static int add_root(struct fs *fs, struct disk *d, struct err *e)
{
    CLEANUP_FD int fd = open(fs->store->url, O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct disk_node *root;
    struct identity id;
    struct stat st;

    if (fd < 0)
        return fail(fs->store->url, e);
    if (identify(fd, &id, &st) < 0)
        return fail(fs->store->url, e);
    root = node_make(&id, S_IFDIR);
    if (!root || !table_add(d, root)) {
        free(root);
        return err_nomem(e);
    }
    root->refs = 1;
    fs->disk_dev = id.dev;
    give_fd(d, root, steal_fd(&fd));
    return 0;
}

/* The descriptor keeps its number: whoever uses it at the moment ends on either root. */
static void move_root(struct disk *d, int fd, const struct identity *id, unsigned moves)
{
    struct disk_node *root = d->table[FUSE_ROOT_ID];

    if (dup3(fd, root->fd, O_CLOEXEC) < 0)
        return; /* until the next look */
    hash_remove(d, root);
    root->dev = id->dev;
    root->inode = id->inode;
    root->born_ns = id->born_ns;
    hash_link(d, root);
    d->count++;
    root->changes++;
    root->moves = d->moves = moves;
}

void disk_follow(struct fs *fs)
{
    struct disk *d = fs->disk;
    unsigned moves = atomic_load(&fs->store->moves);
    CLEANUP_FD int fd = -1;
    struct identity id;
    struct stat st;

    if (!d || moves % 2 || moves == d->moves)
        return;
    fd = open(fs->store->url, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || identify(fd, &id, &st) < 0)
        return;
    pthread_mutex_lock(&d->lock);
    move_root(d, fd, &id, moves);
    pthread_mutex_unlock(&d->lock);
    fs->disk_dev = id.dev;
}

int disk_new(struct fs *fs, struct disk **out, struct err *e)
{
    struct disk *d = calloc(1, sizeof *d);

    if (!d)
        return err_nomem(e);
    pthread_mutex_init(&d->lock, NULL);
    ring_init(&d->unused);
    *out = d;
    d->bucket = calloc(FIRST_BUCKETS, sizeof *d->bucket);
    d->table = calloc(FIRST_TABLE, sizeof *d->table);
    if (!d->bucket || !d->table)
        return err_nomem(e);
    d->nbuckets = FIRST_BUCKETS;
    d->cap = FIRST_TABLE;
    d->free = FUSE_ROOT_ID;
    d->max_fds = fds_allowed();
    return add_root(fs, d, e);
}

void disk_free(struct fs *fs)
{
    struct disk *d = fs->disk;

    if (!d)
        return;
    for (size_t i = 0; i < d->cap; i++) {
        if (!d->table || !d->table[i])
            continue;
        if (d->table[i]->fd >= 0)
            close(d->table[i]->fd);
        node_free(fs, d->table[i]);
    }
    free(d->table);
    free(d->bucket);
    pthread_mutex_destroy(&d->lock);
    free(d);
    fs->disk = NULL;
}
