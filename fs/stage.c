/* SPDX-License-Identifier: MIT */
/* fs/stage.c - stages: who waits for which, how one begins and ends. */
#include "fs/stage.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/fsutil.h"
#include "fs/save_upload.h"
#include "fs/slot.h"
#include "fs/stage_priv.h"
#include "save/staging.h"
#include "save/witness.h"

enum { FIRST_TABLE = 256 };

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
    pthread_cond_init(&t->drop_more, NULL);
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

/* ---- how one begins and ends ---- */

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
    claim.swept = &fs->stages->swept;
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

void stage_end(struct fs *fs, struct stage *s, bool published)
{
    struct stage **p = &fs->stages->first;

    while (*p && *p != s)
        p = &(*p)->next;
    if (*p)
        *p = s->next;
    staged_end(fs, s->root);
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
    pthread_cond_destroy(&t->drop_more);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->lock);
    free(t);
    fs->stages = NULL;
}
