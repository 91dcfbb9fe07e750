/* SPDX-License-Identifier: MIT */
/* remote/kept_keys.c - keys that expire, fetched anew before they do. */
#include "remote/kept_keys.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/err.h"
#include "base/interrupt.h"
#include "base/log.h"

enum {
    AHEAD_S = 300,      /* keys are renewed that long before they expire, */
    RETRY_S = 30,       /* and after a failure so long after it */
    JUST_RENEWED_S = 2, /* another thread has just done it */
};

struct kept_keys {
    fetch_keys_fn *fetch;
    void *user;

    pthread_mutex_t lock;
    pthread_cond_t fetched;
    struct aws_keys keys; /* guarded by lock, and all below */
    bool have, fetching;
    time_t since, retry; /* when they were fetched; not before then again */
    time_t refused;      /* when others came in the place of some that were refused */
};

void aws_keys_release(struct aws_keys *k)
{
    if (k->secret)
        explicit_bzero(k->secret, strlen(k->secret));
    if (k->token)
        explicit_bzero(k->token, strlen(k->token));
    free(k->id);
    free(k->secret);
    free(k->token);
    *k = (struct aws_keys){0};
}

int aws_keys_copy(const struct aws_keys *from, struct aws_keys *to, struct err *e)
{
    struct aws_keys k = {.expires = from->expires};

    if ((from->id && !(k.id = strdup(from->id))) ||
        (from->secret && !(k.secret = strdup(from->secret))) ||
        (from->token && !(k.token = strdup(from->token)))) {
        aws_keys_release(&k);
        return err_nomem(e);
    }
    *to = k;
    return 0;
}

struct kept_keys *kept_keys_new(fetch_keys_fn *fetch, void *user)
{
    struct kept_keys *k = calloc(1, sizeof *k);

    if (!k)
        return NULL;
    k->fetch = fetch;
    k->user = user;
    pthread_mutex_init(&k->lock, NULL);
    interrupt_cond_init(&k->fetched);
    return k;
}

void kept_keys_free(struct kept_keys *k)
{
    if (!k)
        return;
    pthread_cond_destroy(&k->fetched);
    pthread_mutex_destroy(&k->lock);
    aws_keys_release(&k->keys);
    free(k);
}

/* A short life is not spent on renewing: a quarter of it is time enough. */
static bool is_due(const struct kept_keys *k, time_t now)
{
    time_t ahead = MIN((time_t)AHEAD_S, (k->keys.expires - k->since) / 4);

    return k->keys.expires && now >= k->keys.expires - ahead && now >= k->retry;
}

static bool is_valid(const struct kept_keys *k, time_t now)
{
    return k->have && (!k->keys.expires || now < k->keys.expires);
}

/* Called locked, and lets go of the lock in between. Sets *changed. */
static int renew(struct kept_keys *k, bool *changed, struct err *e)
{
    struct aws_keys got = {0};
    int rc;

    k->fetching = true;
    pthread_mutex_unlock(&k->lock);
    rc = k->fetch(k->user, &got, e);
    pthread_mutex_lock(&k->lock);
    k->fetching = false;
    pthread_cond_broadcast(&k->fetched);
    if (rc < 0) {
        if (rc != -EINTR) /* one impatient reader says nothing about the keys */
            k->retry = time(NULL) + RETRY_S;
        return rc;
    }
    *changed =
        !k->have || !got.id != !k->keys.id ||
        (got.id &&
         (strcmp(got.id, k->keys.id) != 0 || strcmp(got.secret, k->keys.secret) != 0 ||
          strcmp(got.token ? got.token : "", k->keys.token ? k->keys.token : "") != 0));
    aws_keys_release(&k->keys);
    k->keys = got;
    k->have = true;
    k->since = time(NULL);
    k->retry = 0;
    return 0;
}

static int get_locked(struct kept_keys *k, struct aws_keys *out, struct err *e)
{
    bool changed;
    int rc = 0;

    while (rc == 0 && (!is_valid(k, time(NULL)) || is_due(k, time(NULL)))) {
        if (!k->fetching) {
            rc = renew(k, &changed, e);
            if (rc < 0 && rc != -EINTR && is_valid(k, time(NULL))) {
                err_wrap(e, "the old credentials are still used");
                log_err(LOG_REMOTE, e);
                rc = 0;
            }
            break;
        }
        if (is_valid(k, time(NULL)))
            break;
        rc = interrupt_wait(&k->fetched, &k->lock, e);
    }
    return rc < 0 ? rc : aws_keys_copy(&k->keys, out, e);
}

int kept_keys_get(struct kept_keys *k, struct aws_keys *out, struct err *e)
{
    int rc;

    *out = (struct aws_keys){0};
    pthread_mutex_lock(&k->lock);
    rc = get_locked(k, out, e);
    pthread_mutex_unlock(&k->lock);
    return rc;
}

bool kept_keys_renew(struct kept_keys *k)
{
    struct err e = {0};
    bool changed = false;
    int rc = 0;

    pthread_mutex_lock(&k->lock);
    while (rc == 0 && k->fetching)
        rc = interrupt_wait(&k->fetched, &k->lock, &e);
    if (rc == 0 && k->refused && time(NULL) - k->refused < JUST_RENEWED_S) {
        changed = true;
    } else if (rc == 0) {
        rc = renew(k, &changed, &e);
        k->refused = rc == 0 && changed ? k->since : 0;
    }
    pthread_mutex_unlock(&k->lock);
    if (rc < 0 && rc != -EINTR)
        log_err(LOG_REMOTE, &e);
    return rc == 0 && changed;
}
