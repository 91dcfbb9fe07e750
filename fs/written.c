/* SPDX-License-Identifier: MIT */
/* fs/written.c - the files of the source that programs wrote through this mount. */
#include "fs/written.h"

#include <pthread.h>
#include <string.h>
#include <sys/stat.h>

#include "base/err.h"

enum { FIRST_PLACES = 64 };

/* An open hash: no place behind its own is free before the one that a file has. */
struct written {
    pthread_mutex_t lock;
    /* guarded by lock */
    struct file {
        uint64_t dev, ino; /* 0: free; no file has this number */
    } * place;
    size_t places, count; /* places: a power of two */
};

int written_new(struct written **out, struct err *e)
{
    struct written *w = calloc(1, sizeof *w);

    if (!w)
        return err_nomem(e);
    w->place = calloc(FIRST_PLACES, sizeof *w->place);
    if (!w->place) {
        free(w);
        return err_nomem(e);
    }
    w->places = FIRST_PLACES;
    pthread_mutex_init(&w->lock, NULL);
    *out = w;
    return 0;
}

void written_free(struct written *w)
{
    if (!w)
        return;
    pthread_mutex_destroy(&w->lock);
    free(w->place);
    free(w);
}

/* ---- with the lock held ---- */

static size_t own_place(const struct written *w, const struct file *f)
{
    uint64_t hash = (f->ino + f->dev * 31) * 0x9e3779b97f4a7c15;

    return (size_t)(hash >> 32) & (w->places - 1);
}

/* Where it is, or would be. */
static size_t find(const struct written *w, const struct file *f)
{
    size_t i = own_place(w, f);

    while (w->place[i].ino && (w->place[i].ino != f->ino || w->place[i].dev != f->dev))
        i = (i + 1) & (w->places - 1);
    return i;
}

static bool grow(struct written *w)
{
    struct file *was = w->place;
    size_t old = w->places;

    w->place = calloc(2 * old, sizeof *w->place);
    if (!w->place) {
        w->place = was;
        return false;
    }
    w->places = 2 * old;
    for (size_t i = 0; i < old; i++)
        if (was[i].ino)
            w->place[find(w, &was[i])] = was[i];
    free(was);
    return true;
}

/* What stands behind a place that became free moves up, if it may. */
static void close_gap(struct written *w, size_t gap)
{
    for (size_t i = (gap + 1) & (w->places - 1); w->place[i].ino;
         i = (i + 1) & (w->places - 1)) {
        size_t own = own_place(w, &w->place[i]);

        if (((i - own) & (w->places - 1)) < ((i - gap) & (w->places - 1)))
            continue;
        w->place[gap] = w->place[i];
        w->place[i].ino = 0;
        gap = i;
    }
}

/* ---- for all ---- */

/* Out of memory it is shown as others are. */
void written_add(struct written *w, const struct stat *st)
{
    const struct file f = {.dev = st->st_dev, .ino = st->st_ino};
    size_t i;

    if (!w || f.ino == 0)
        return;
    pthread_mutex_lock(&w->lock);
    if (2 * (w->count + 1) <= w->places || grow(w)) {
        i = find(w, &f);
        w->count += w->place[i].ino == 0;
        w->place[i] = f;
    }
    pthread_mutex_unlock(&w->lock);
}

void written_remove(struct written *w, const struct stat *st)
{
    const struct file f = {.dev = st->st_dev, .ino = st->st_ino};
    size_t i;

    if (!w || f.ino == 0)
        return;
    pthread_mutex_lock(&w->lock);
    i = find(w, &f);
    if (w->place[i].ino) {
        w->place[i].ino = 0;
        w->count--;
        close_gap(w, i);
    }
    pthread_mutex_unlock(&w->lock);
}

bool written_has(struct written *w, uint64_t dev, uint64_t ino)
{
    const struct file f = {.dev = dev, .ino = ino};
    bool has;

    if (!w || ino == 0)
        return false;
    pthread_mutex_lock(&w->lock);
    has = w->place[find(w, &f)].ino != 0;
    pthread_mutex_unlock(&w->lock);
    return has;
}
