/* SPDX-License-Identifier: MIT */
/* fs/watch.c - sees checkpoints change and tells the kernel to forget what it cached. */
#include "fs/watch.h"

#include <errno.h>
#include <string.h>

#include "base/log.h"
#include "fs/materialized.h"
#include "fs/disk.h"
#include "fs/node.h"
#include "fs/generation.h"
#include "fs/tree.h"
#include "remote/open_files.h"

enum {
    TICK_NS = 200000000,
    REST_NS = 900000000, /* a tick while there is nothing to look at */
    LOOK_NS = 400000000,
    REMOTE_LOOK_NS = 1000000000,
    COST_SHARE =
        20, /* a checkpoint that takes long to look at is looked at less often */
    /* A directory that nobody asks for is not looked at; the kernel has to ask first. */
    IDLE_SECONDS = 20,
    /* So many are looked at for that long; of more, each for less (a find over all). */
    FULLY_WATCHED = 64,
    IDLE_LEAST_NS = LOOK_NS, /* then none is looked at before it sleeps */
    /* Shards that nobody reads stay open so long, for the next reader. */
    OPEN_SECONDS = 5,
    /*
     * An answer made before the change may reach the kernel after our notice: so it is
     * told a second time, a tick later.
     */
    TELL_TIMES = 2,
};

struct change {
    struct change *next;
    struct generation *gen; /* a reference */
    bool names; /* the checkpoint stays: only names beside it came or went */
    int told;
};

struct watch {
    struct fs *fs;
    pthread_t thread;
    bool running;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* guarded by lock */
    struct change *changes;
    bool stop;
    bool resting; /* there is nothing to look at */
};

/* ---- telling the kernel ---- */

static int expire_entry(struct fs *fs, fuse_ino_t dir, const char *name, size_t len)
{
#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 16)
    return fuse_lowlevel_notify_expire_entry(fs->session, dir, name, len);
#else
    return fuse_lowlevel_notify_expire_entry(fs->session, dir, name, len,
                                             FUSE_LL_EXPIRE_ONLY);
#endif
}

static void forget_name(struct fs *fs, fuse_ino_t dir, const char *name)
{
    size_t len = strlen(name);
    int rc = fs->can_expire
                 ? expire_entry(fs, dir, name, len)
                 : fuse_lowlevel_notify_inval_entry(fs->session, dir, name, len);

    if (rc < 0 && rc != -ENOENT) /* ENOENT: the kernel did not have it */
        log_msg(LOG_FS, LOG_DEBUG, "tell the kernel to forget %s: %s", name,
                strerror(-rc));
}

/*
 * Does its number still mean its directory? One that the kernel has forgotten is given to
 * others, and then there is nothing to tell.
 */
static bool has_number(struct fs *fs, const struct generation *gen)
{
    struct node *n = node_pin(fs, gen->dir_ino);
    bool has = n && (n->ino == FUSE_ROOT_ID ||
                     (node_is_dir(n) && strcmp(n->path, gen->place) == 0));

    if (n)
        node_unpin(fs, n);
    return has;
}

/* Copies of the names, so that no lock is held while the kernel is told. */
static void forget_absent(struct fs *fs, struct generation *gen)
{
    struct absent copy = {0};

    pthread_mutex_lock(&gen->lock);
    copy.name = calloc(gen->absent.count + 1, sizeof *copy.name);
    for (size_t i = 0; copy.name && i < gen->absent.count; i++)
        if ((copy.name[copy.count] = strdup(gen->absent.name[i])))
            copy.count++;
    pthread_mutex_unlock(&gen->lock);
    for (size_t i = 0; i < copy.count; i++) {
        forget_name(fs, gen->dir_ino, copy.name[i]);
        free(copy.name[i]);
    }
    free(copy.name);
}

static void forget_own_names(struct fs *fs, const struct generation *gen)
{
    for (const char *const *name = tree_own_names; *name; name++)
        forget_name(fs, gen->dir_ino, *name);
}

static void tell(struct fs *fs, const struct change *c)
{
    struct generation *gen = c->gen;
    static const enum inside dirs[] = {INSIDE_TENSORS, INSIDE_TREE, INSIDE_RAW,
                                       INSIDE_OPTIMIZER, INSIDE_META};

    if (has_number(fs, gen)) {
        forget_absent(fs, gen);
        if (!c->names)
            forget_own_names(fs, gen);
    }
    if (c->names)
        return;
    for (size_t i = 0; i < ARRAY_SIZE(dirs); i++)
        fuse_lowlevel_notify_inval_inode(fs->session, generation_ino(gen, dirs[i], 0),
                                         0, 0);
}

static void add_change(struct fs *fs, struct generation *s, bool names)
{
    /* A mount for writing has the kernel ask for every name of ours, every time. */
    struct watch *w = fs_writable(fs) ? NULL : fs->watch;
    struct change *c = w ? calloc(1, sizeof *c) : NULL;

    if (!c) {
        if (w)
            log_msg(LOG_FS, LOG_ERROR,
                    "%s changed; out of memory, the kernel was not told", s->path);
        return;
    }
    c->gen = generation_get(fs, s);
    c->names = names;
    pthread_mutex_lock(&w->lock);
    c->next = w->changes;
    w->changes = c;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
}

void watch_changed(struct fs *fs, struct generation *s)
{
    add_change(fs, s, false);
}

void watch_names(struct fs *fs, struct generation *s)
{
    add_change(fs, s, true);
}

void watch_soon(struct fs *fs)
{
    struct watch *w = fs->watch;

    if (!w)
        return;
    pthread_mutex_lock(&w->lock);
    if (w->resting)
        pthread_cond_signal(&w->wake);
    w->resting = false;
    pthread_mutex_unlock(&w->lock);
}

static struct change *take_changes(struct watch *w)
{
    struct change *list;

    pthread_mutex_lock(&w->lock);
    list = w->changes;
    w->changes = NULL;
    pthread_mutex_unlock(&w->lock);
    return list;
}

static void keep_change(struct watch *w, struct change *c)
{
    pthread_mutex_lock(&w->lock);
    c->next = w->changes;
    w->changes = c;
    pthread_mutex_unlock(&w->lock);
}

/* True: some will be told again. */
static bool tell_changes(struct watch *w)
{
    struct change *next;
    bool again = false;

    for (struct change *c = take_changes(w); c; c = next) {
        next = c->next;
        tell(w->fs, c);
        if (++c->told < TELL_TIMES) {
            keep_change(w, c);
            again = true;
        } else {
            generation_unref(w->fs, c->gen, 1);
            free(c);
        }
    }
    return again;
}

/* ---- looking at the source ---- */

/* Of a store of objects the listings are as old as refresh= allows; looking costs little. */
static int64_t look_interval(const struct fs *fs)
{
    if (fs->store->remote)
        return REMOTE_LOOK_NS;
    return fs->options.refresh ? (int64_t)fs->options.refresh * 1000000000 : LOOK_NS;
}

static void look_at(struct fs *fs, struct node *n, struct generation *gen)
{
    int64_t start = now_ns(), end;
    struct err e = {0};

    scanner_suspect(fs->scanner, gen->path, gen->file);
    if (generation_refresh(fs, gen, &e) < 0)
        log_msg(LOG_FS, LOG_DEBUG, "%s", e.text);
    end = now_ns();
    n->look_ns = end + MAX(look_interval(fs), COST_SHARE * (end - start));
}

/*
 * Nobody asked for long: the kernel is made to ask before it uses what it has. False: it is
 * used just now. Whoever uses it says so first and then looks whether it sleeps, so that
 * one of the two sees the other.
 */
static bool put_to_sleep(struct fs *fs, struct generation *gen, int64_t used)
{
    gen->dormant = true;
    if (gen->used_ns != used && atomic_exchange(&gen->dormant, false))
        return false;
    forget_own_names(fs, gen);
    forget_absent(fs, gen);
    return true;
}

/* How long one that nobody asks for is looked at, of `awake` ones. */
static int64_t idle_ns(size_t awake)
{
    int64_t share = IDLE_SECONDS * 1000000000ll * FULLY_WATCHED /
                    (int64_t)MAX(awake, (size_t)FULLY_WATCHED);

    return MAX(share, (int64_t)IDLE_LEAST_NS);
}

/* True: it will be looked at again. */
static bool look_at_node(struct fs *fs, struct node *n, int64_t idle)
{
    struct generation *gen = node_generation(fs, n);
    int64_t now = now_ns();
    int64_t used = gen ? gen->used_ns : 0;
    bool again = false;

    if (gen && n->orphan) {
        generation_retire(fs, gen);
        node_set_generation(fs, n, NULL);
    } else if (gen && !gen->stale) { /* the next use replaces a stale one */
        again = !fs->can_expire || now - used <= idle || !put_to_sleep(fs, gen, used);
        if (again && now >= MAX(n->look_ns, gen->checked_ns + look_interval(fs)))
            look_at(fs, n, gen);
    }
    generation_unref(fs, gen, 1);
    return again;
}

/* True: there are checkpoints in use. */
static bool look_around(struct fs *fs)
{
    struct node **node;
    size_t count, awake = 0;

    if (node_take_watched(fs, &node, &count) < 0)
        return true; /* out of memory; again in a moment */
    for (size_t i = 0; i < count; i++) {
        if (look_at_node(fs, node[i], idle_ns(count))) {
            node_watch_again(fs, node[i]);
            awake++;
        } else {
            node_unpin(fs, node[i]);
        }
    }
    free(node);
    nodes_tidy(fs);
    return awake > 0;
}

static void wait_tick(struct watch *w, bool busy)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_nsec += busy ? TICK_NS : REST_NS;
    if (t.tv_nsec >= 1000000000) {
        t.tv_nsec -= 1000000000;
        t.tv_sec++;
    }
    pthread_mutex_lock(&w->lock);
    w->resting = !busy;
    if (!w->stop)
        pthread_cond_timedwait(&w->wake, &w->lock, &t);
    w->resting = false;
    pthread_mutex_unlock(&w->lock);
}

static bool stopped(struct watch *w)
{
    bool stop;

    pthread_mutex_lock(&w->lock);
    stop = w->stop;
    pthread_mutex_unlock(&w->lock);
    return stop;
}

static void *watch_thread(void *user)
{
    struct watch *w = user;

    while (!stopped(w)) {
        bool told = tell_changes(w);
        bool awake;

        store_follow(w->fs->store);
        disk_follow(w->fs);
        awake = look_around(w->fs);
        open_files_rest(w->fs->reading.files, now_ns(),
                        (int64_t)OPEN_SECONDS * 1000000000);
        materialized_tidy(w->fs->materialized);
        wait_tick(w, told || awake);
    }
    return NULL;
}

int watch_new(struct fs *fs, struct watch **out, struct err *e)
{
    struct watch *w = calloc(1, sizeof *w);
    pthread_condattr_t monotonic;
    int rc;

    if (!w)
        return err_nomem(e);
    w->fs = fs;
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&w->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    rc = pthread_create(&w->thread, NULL, watch_thread, w);
    w->running = rc == 0;
    *out = w;
    return rc ? err_set(e, rc, "start a thread: %s", strerror(rc)) : 0;
}

void watch_stop(struct watch *w)
{
    if (!w || !w->running)
        return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    w->running = false;
}

void watch_free(struct watch *w)
{
    if (!w)
        return;
    watch_stop(w);
    for (struct change *c = w->changes, *next; c; c = next) {
        next = c->next;
        generation_unref(w->fs, c->gen, 1);
        free(c);
    }
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->lock);
    free(w);
}
