/* SPDX-License-Identifier: MIT */
/* remote/objects_dirs.c - the directories of an object store that are known by now. */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "base/err.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "remote/objects_priv.h"
#include "remote/ring.h"

enum {
    BUCKETS = 4096,
    ENTRIES_KEPT =
        10000000, /* of all directories together, 1.5 GB; those unused go first */
    LOOK_NS = 100000000,
    /* Who has an old listing does not wait a minute for a new one: at first so long, twice
     * as long after each failure. */
    RENEW_SECONDS = 3,
    RENEW_SECONDS_MAX = 10,
    COST_SHARE = 10, /* a directory that takes long to list is listed less often */
};

static const int64_t second_ns = 1000000000;

struct dir {
    struct ring lru;
    struct dir *next; /* in its bucket */
    char *path;
    struct object_list *list; /* NULL: not known */
    int64_t until;            /* it counts till then */
    bool busy;                /* somebody asks the server */
    bool old;         /* objects were written since: it serves nobody any more, */
    uint64_t changes; /* and so often that was said */
    unsigned renew_s; /* how long to wait for it, where there is a list; 0: first */
    unsigned users;
    uint64_t flights;
    int rc; /* how the last flight ended */
    struct err err;
};

struct dirs {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    /* guarded by lock, as what is in them */
    struct dir *bucket[BUCKETS];
    struct ring lru; /* least recently used first */
    size_t entries;
};

static int64_t clock_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * second_ns + t.tv_nsec;
}

int dirs_new(struct objects *o, struct dirs **out, struct err *e)
{
    struct dirs *d = calloc(1, sizeof *d);
    pthread_condattr_t monotonic;

    (void)o;
    if (!d)
        return err_nomem(e);
    ring_init(&d->lru);
    pthread_mutex_init(&d->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&d->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *out = d;
    return 0;
}

static void dir_free(struct dir *dir)
{
    object_list_put(dir->list);
    free(dir->path);
    free(dir);
}

void dirs_free(struct dirs *d)
{
    if (!d)
        return;
    while (d->lru.next != &d->lru) {
        struct dir *dir = container_of(d->lru.next, struct dir, lru);

        ring_remove(&dir->lru);
        dir_free(dir);
    }
    pthread_cond_destroy(&d->ended);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

/* ---- locked ---- */

static struct dir **slot_of(struct dirs *d, const char *path)
{
    uint64_t h = 0xcbf29ce484222325; /* FNV-1a */
    struct dir **slot;

    for (const char *p = path; *p; p++)
        h = (h ^ (unsigned char)*p) * 0x100000001b3;
    slot = &d->bucket[(h ^ h >> 32) % BUCKETS];
    while (*slot && strcmp((*slot)->path, path) != 0)
        slot = &(*slot)->next;
    return slot;
}

static void drop(struct dirs *d, struct dir *dir)
{
    struct dir **slot = slot_of(d, dir->path);

    *slot = dir->next;
    ring_remove(&dir->lru);
    d->entries -= dir->list ? dir->list->count : 0;
    dir_free(dir);
}

static void trim(struct dirs *d)
{
    struct ring *r = d->lru.next;

    while (d->entries > ENTRIES_KEPT && r != &d->lru) {
        struct dir *dir = container_of(r, struct dir, lru);

        r = r->next;
        if (!dir->users)
            drop(d, dir);
    }
}

/* Known or new, in use by the caller. */
static struct dir *use(struct dirs *d, const char *path)
{
    struct dir **slot = slot_of(d, path), *dir = *slot;

    if (!dir) {
        dir = calloc(1, sizeof *dir);
        if (!dir || !(dir->path = strdup(path))) {
            free(dir);
            return NULL;
        }
        ring_init(&dir->lru);
        *slot = dir;
    }
    ring_remove(&dir->lru);
    ring_append(&d->lru, &dir->lru);
    dir->users++;
    return dir;
}

static void unuse(struct dirs *d, struct dir *dir)
{
    if (--dir->users == 0 && !dir->list)
        drop(d, dir); /* names that nobody has are not kept */
    else
        trim(d);
}

/* ---- asking the server ---- */

static int fetch(struct objects *o, const char *path, unsigned deadline_s,
                 struct object_list **out, struct err *e)
{
    CLEANUP(object_list_putp) struct object_list *l = NULL;
    int rc = object_list_new(path, o->id, &l, e);

    if (rc == 0)
        rc = o->protocol->list(o->self, path, deadline_s, l, e);
    if (rc < 0)
        return rc;
    object_list_finish(l);
    *out = steal(&l);
    return 0;
}

/* The server did not say that it is another one or gone, only nothing at all. */
static bool says_nothing(int rc)
{
    return rc != -ENOENT && rc != -ENOTDIR;
}

/* Takes in how a flight ended. Locked. */
static void land(struct objects *o, struct dir *dir, int64_t start, uint64_t changes,
                 int rc, struct object_list *l, const struct err *e)
{
    struct dirs *d = o->dirs;
    int64_t now = clock_ns();

    dir->until = now + MAX(o->refresh_ns, COST_SHARE * (now - start));
    if (rc == 0 && o->protocol->pinned)
        dir->until = INT64_MAX; /* there is never another one */
    dir->renew_s = rc < 0 ? MIN(2 * MAX(dir->renew_s, (unsigned)RENEW_SECONDS),
                                (unsigned)RENEW_SECONDS_MAX)
                          : 0;
    if (rc < 0 && dir->list && says_nothing(rc) && !dir->old) {
        dir->until = now + o->refresh_ns;
        if (rc != -EINTR && rc != -ECANCELED)
            log_msg(LOG_REMOTE, LOG_WARN, "%s; what was listed before counts", e->text);
        else
            dir->until = 0;
        rc = 0;
    } else {
        d->entries -= dir->list ? dir->list->count : 0;
        object_list_put(dir->list);
        dir->list = rc == 0 ? object_list_get(l) : NULL;
        d->entries += dir->list ? dir->list->count : 0;
        dir->old = dir->changes != changes; /* it may be as of before */
        if (dir->old)
            dir->until = 0;
    }
    dir->rc = rc;
    dir->err = *e;
}

/* Asks for all who wait. Locked when called and after. */
static void fly(struct objects *o, struct dir *dir)
{
    struct dirs *d = o->dirs;
    CLEANUP(object_list_putp) struct object_list *l = NULL;
    unsigned deadline_s =
        dir->list && !dir->old ? MAX(dir->renew_s, (unsigned)RENEW_SECONDS) : 0;
    uint64_t changes = dir->changes;
    const char *path = dir->path; /* stays while it is in use */
    int64_t start = clock_ns();
    struct err e = {0};
    int rc;

    dir->busy = true;
    pthread_mutex_unlock(&d->lock);
    rc = fetch(o, path, deadline_s, &l, &e);
    pthread_mutex_lock(&d->lock);
    dir->busy = false;
    dir->flights++;
    land(o, dir, start, changes, rc, l, &e);
    pthread_cond_broadcast(&d->ended);
}

static int wait_ended(struct dirs *d, struct err *e)
{
    int64_t until = clock_ns() + LOOK_NS;
    const struct timespec t = {.tv_sec = until / second_ns,
                               .tv_nsec = until % second_ns};

    pthread_cond_timedwait(&d->ended, &d->lock, &t);
    return interrupt_asked() ? err_set(e, EINTR, "interrupted") : 0;
}

/*
 * Waits for who asks, or asks. An old listing serves the others meanwhile. Who asked may
 * have been interrupted, which says nothing to those who wait: they ask anew.
 */
static int settle(struct objects *o, struct dir *dir, struct err *e)
{
    while (!dir->list || clock_ns() >= dir->until) {
        uint64_t flights = dir->flights;

        if (!dir->busy) {
            fly(o, dir);
            *e = dir->err;
            return dir->rc;
        }
        if (dir->list && !dir->old)
            return 0;
        while (dir->busy && dir->flights == flights)
            if (wait_ended(o->dirs, e) < 0)
                return -EINTR;
        if (dir->rc < 0 && dir->rc != -EINTR) {
            *e = dir->err;
            return dir->rc;
        }
    }
    return 0;
}

int dirs_get(struct objects *o, const char *path, struct object_list **out,
             struct err *e)
{
    struct dirs *d = o->dirs;
    struct dir *dir;
    int rc;

    pthread_mutex_lock(&d->lock);
    dir = use(d, path);
    if (!dir) {
        pthread_mutex_unlock(&d->lock);
        return err_nomem(e);
    }
    rc = settle(o, dir, e);
    if (rc == 0 && dir->list) {
        *out = object_list_get(dir->list);
        *e = (struct err){0};
    } else if (rc == 0) {
        rc = err_set(e, ENOENT, "%s: %s", path, strerror(ENOENT));
    }
    unuse(d, dir);
    pthread_mutex_unlock(&d->lock);
    return rc;
}

/* One that is being asked for may not know what was written meanwhile. */
void dirs_changed(struct objects *o, const char *path)
{
    struct dir *dir;

    pthread_mutex_lock(&o->dirs->lock);
    dir = *slot_of(o->dirs, path);
    if (dir) {
        dir->until = 0;
        dir->old = true;
        dir->changes++;
    }
    pthread_mutex_unlock(&o->dirs->lock);
}

void dirs_forget(struct objects *o, const char *path)
{
    struct dir *dir;

    pthread_mutex_lock(&o->dirs->lock);
    dir = *slot_of(o->dirs, path);
    if (dir)
        dir->until = 0;
    pthread_mutex_unlock(&o->dirs->lock);
}
