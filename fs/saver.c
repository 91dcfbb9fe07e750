/* SPDX-License-Identifier: MIT */
/* fs/saver.c - the thread that publishes what was not touched for a while. */
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "base/env.h"
#include "base/err.h"
#include "fs/save.h"

enum { IDLE_SECONDS = 5, TICK_NS = 250000000 };

struct saver {
    struct fs *fs;
    int64_t idle_ns;
    pthread_t thread;
    atomic_bool stop;
};

/*
 * What is below is published first, and is not whole while a step comes there, one file after the
 * other. Nor has an rm -r ended that is there by now.
 */
static bool is_touched_below(struct fs *fs, const struct stage *s, int64_t before)
{
    const struct stage *x = NULL;

    while ((x = stage_inside(fs, s, x)))
        if (x->touched_ns > before)
            return true;
    return false;
}

/* A new directory that nothing has come to: who made it will write there. */
static bool is_empty(const struct stage *s)
{
    return !s->slot && !s->over && s->root->count == 0;
}

/* With the lock: a stage that nobody has touched for so long. */
static struct stage *find_idle(struct fs *fs, int64_t idle_ns)
{
    int64_t before = now_ns() - idle_ns;
    struct stage *s = stage_first(fs);

    while (s &&
           (save_is_written(s) || s->publishing || s->failed ||
            s->touched_ns > before || is_empty(s) || is_touched_below(fs, s, before)))
        s = s->next;
    return s;
}

static void *saver_thread(void *user)
{
    struct saver *v = user;
    const struct timespec tick = {.tv_nsec = TICK_NS};
    struct stage *s;

    while (!v->stop) {
        struct err e = {0};

        stages_lock(v->fs);
        s = find_idle(v->fs, v->idle_ns);
        if (s && save_publish(v->fs, s, &e) < 0)
            last_error_report(&v->fs->last_error, &e);
        stages_unlock(v->fs);
        if (!s)
            nanosleep(&tick, NULL);
    }
    return NULL;
}

int saver_new(struct fs *fs, struct saver **out, struct err *e)
{
    struct saver *v = calloc(1, sizeof *v);
    int rc;

    if (!v)
        return err_nomem(e);
    v->fs = fs;
    v->idle_ns =
        MAX(env_seconds("UNSHARD_IDLE_SECONDS", IDLE_SECONDS), 1u) * 1000000000ll;
    rc = pthread_create(&v->thread, NULL, saver_thread, v);
    if (rc) {
        free(v);
        return err_set(e, rc, "start a thread: %s", strerror(rc));
    }
    *out = v;
    return 0;
}

void saver_free(struct saver *s)
{
    if (!s)
        return;
    s->stop = true;
    pthread_join(s->thread, NULL);
    free(s);
}
