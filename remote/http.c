/* SPDX-License-Identifier: MIT */
/* remote/http.c - HTTP requests that are tried again, bounded in time, many at once. */
#include "remote/http.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/interrupt.h"
#include "remote/http_call.h"

enum {
    IN_FLIGHT = 64,      /* of one http_do_many() */
    LOOK_NS = 100000000, /* an interrupt is seen within this */
    /* What moves so many bytes a second has not hung, however long it takes: a slow link
     * that all requests share. */
    SLOWEST = 4096,
    OPTION_MAX = 24 * 3600,
};

static const int64_t second_ns = 1000000000;

int64_t http_clock(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * second_ns + t.tv_nsec;
}

/* ---- options ---- */

static int option_from(const char *name, unsigned *out, struct err *e)
{
    const char *text = getenv(name);
    char *end;
    unsigned long v;

    if (!text || !*text)
        return 0;
    errno = 0;
    v = strtoul(text, &end, 10);
    if (errno || *end || *text == '-' || v < 1 || v > OPTION_MAX)
        return err_set(e, EINVAL, "%s=%.20s: a number from 1 to %d is meant", name,
                       text, OPTION_MAX);
    *out = (unsigned)v;
    return 0;
}

int http_options_get(struct http_options *out, struct err *e)
{
    *out = (struct http_options){
        .connect_s = 10, .stall_s = 10, .deadline_s = 60, .tries = 6, .per_host = 32};
    TRY(option_from("UNSHARD_HTTP_CONNECT", &out->connect_s, e));
    TRY(option_from("UNSHARD_HTTP_STALL", &out->stall_s, e));
    TRY(option_from("UNSHARD_HTTP_DEADLINE", &out->deadline_s, e));
    TRY(option_from("UNSHARD_HTTP_TRIES", &out->tries, e));
    TRY(option_from("UNSHARD_HTTP_CONNECTIONS", &out->per_host, e));
    return 0;
}

static unsigned or_default(unsigned given, unsigned otherwise)
{
    return given ? given : otherwise;
}

int http_new(const struct http_options *options, struct http **out, struct err *e)
{
    struct http_options o;
    struct http *h;

    TRY(http_options_get(&o, e));
    if (options)
        o = (struct http_options){
            .connect_s = or_default(options->connect_s, o.connect_s),
            .stall_s = or_default(options->stall_s, o.stall_s),
            .deadline_s = or_default(options->deadline_s, o.deadline_s),
            .tries = or_default(options->tries, o.tries),
            .per_host = or_default(options->per_host, o.per_host)};
    h = calloc(1, sizeof *h);
    if (!h)
        return err_nomem(e);
    h->options = o;
    pthread_mutex_init(&h->lock, NULL);
    if (wire_new(&o, &h->wire, e) < 0) {
        http_free(h);
        return -e->code;
    }
    *out = h;
    return 0;
}

void http_stop(struct http *h)
{
    atomic_store(&h->stopped, true);
}

uint64_t http_retries(struct http *h)
{
    return atomic_load(&h->retries);
}

void http_free(struct http *h)
{
    if (!h)
        return;
    wire_free(h->wire);
    for (size_t i = 0; i < SKEWS; i++)
        free(h->skew[i].origin);
    pthread_mutex_destroy(&h->lock);
    free(h);
}

/* ---- clocks of servers ---- */

time_t http_skew_get(struct http *h, const char *origin)
{
    time_t seconds = 0;

    pthread_mutex_lock(&h->lock);
    for (size_t i = 0; i < SKEWS && h->skew[i].origin; i++)
        if (strcmp(h->skew[i].origin, origin) == 0)
            seconds = h->skew[i].seconds;
    pthread_mutex_unlock(&h->lock);
    return seconds;
}

/* Of more hosts than there are places for the last place is anybody's. */
void http_skew_set(struct http *h, const char *origin, time_t seconds)
{
    char *copy = strdup(origin);
    size_t i = 0;

    if (!copy)
        return;
    pthread_mutex_lock(&h->lock);
    while (i < SKEWS - 1 && h->skew[i].origin && strcmp(h->skew[i].origin, origin) != 0)
        i++;
    free(h->skew[i].origin);
    h->skew[i] = (struct skew){.origin = copy, .seconds = seconds};
    pthread_mutex_unlock(&h->lock);
}

/* ---- one call ---- */

int http_try_header(struct http_try *t, const char *name, const char *value,
                    struct err *e)
{
    CLEANUP(buf_release) struct buf line = {0};
    int rc = -ENOMEM;

    /* Without a value libcurl leaves out what it would send by itself. */
    if (buf_addf(&line, *value ? "%s: %s" : "%s:%s", name, value) == 0)
        rc = wire_header_add(&t->headers, line.data);
    if (rc == -EINVAL)
        return err_set(e, EINVAL, "header %s: its value has a line's end in it", name);
    return rc < 0 ? err_nomem(e) : 0;
}

static int add_own_headers(const struct call *c, struct http_try *t, struct err *e)
{
    const struct http_request *r = c->r;
    CLEANUP(buf_release) struct buf range = {0};

    for (const char *const *line = r->headers; line && *line; line++)
        if (wire_header_add(&t->headers, *line) < 0)
            return err_set(e, EINVAL, "a header cannot be sent");
    if (r->dst) {
        buf_addf(&range, "bytes=%" PRIu64 "-%" PRIu64, r->off, r->off + r->len - 1);
        if (buf_failed(&range) < 0)
            return err_nomem(e);
        TRY(http_try_header(t, "Range", range.data, e));
    }
    if (r->etag && strncmp(r->etag, "W/", 2) != 0)
        TRY(http_try_header(t, "If-Match", r->etag, e));
    return r->body_size ? http_try_header(t, "Expect", "", e) : 0;
}

static void try_reset(struct call *c)
{
    wire_header_free(c->t.headers);
    buf_release(&c->t.head);
    buf_release(&c->t.body);
    c->t = (struct wire_try){0};
}

static void start_try(struct call *c, struct wire_waiter *waiter)
{
    struct http_try t = {.request = c->r, .url = c->url};
    const struct http_auth *auth = c->foreign ? NULL : c->r->auth;
    int rc;

    try_reset(c);
    c->wrong = 0;
    c->seen = 0;
    c->seen_ns = 0;
    c->moved = 0;
    c->stalled = false;
    c->tries++;
    t.now = time(NULL) + http_skew_get(c->h, c->origin);
    rc = add_own_headers(c, &t, &c->err);
    if (rc == 0 && auth && auth->authorize)
        rc = auth->authorize(c->r->auth_user, &t, &c->err);
    if (rc < 0) {
        wire_header_free(t.headers);
        c->state = CALL_ENDED;
        c->rc = rc;
        return;
    }
    c->t.request = c->r;
    c->t.url = c->url;
    c->t.headers = t.headers;
    c->t.waiter = waiter;
    c->t.stall_s = or_default(c->r->stall_s, c->h->options.stall_s);
    c->t.begin = call_begin;
    c->state = CALL_FLIES;
    wire_start(c->h->wire, &c->t);
}

static void call_free(struct call *c)
{
    if (!c)
        return;
    try_reset(c);
    http_answer_release(&c->own);
    free(c->url);
    free(c->origin);
    free(c);
}

static int call_new(struct http *h, const struct http_request *r, struct http_answer *a,
                    struct call **out, struct err *e)
{
    struct call *c = calloc(1, sizeof *c);
    bool secure, secrets = false;

    if (!c)
        return err_nomem(e);
    *c = (struct call){.h = h, .r = r, .a = a ? a : &c->own, .begun = http_clock()};
    c->at = c->begun;
    c->allowed_ns = or_default(r->deadline_s, h->options.deadline_s) * second_ns;
    c->deadline = c->begun + c->allowed_ns;
    c->url = strdup(r->url);
    c->origin = wire_origin(r->url, &secure, &secrets);
    if (c->url && c->origin && !secrets) {
        *out = c;
        return 0;
    }
    err_set(e, c->url ? EINVAL : ENOMEM, "%s: %s", r->what ? r->what : "request",
            secrets ? "a URL with a password in it" : "not a URL of http or https");
    call_free(c);
    return -e->code;
}

/* ---- many calls ---- */

struct batch {
    struct http *h;
    const struct http_request *r;
    struct http_answer *a;
    size_t n, next;
    struct wire_waiter waiter;
    struct call *call[IN_FLIGHT];
    size_t count;
    size_t failed; /* lowest number of those that failed */
    struct err *e;
};

static void note_failure(struct batch *b, size_t i, const struct err *e)
{
    if (i >= b->failed)
        return;
    b->failed = i;
    *b->e = *e;
}

static void begin_calls(struct batch *b)
{
    while (b->count < IN_FLIGHT && b->next < b->n && b->failed > b->next) {
        struct err e = {0};
        size_t i = b->next++;

        if (call_new(b->h, &b->r[i], b->a ? &b->a[i] : NULL, &b->call[b->count], &e) <
            0)
            note_failure(b, i, &e);
        else
            b->call[b->count++]->index = i;
    }
}

/* Of one whose turn has not come: does anything move on the link? */
static bool goes_on(struct call *c, int64_t now)
{
    int64_t since = MAX((int64_t)atomic_load(&c->t.flew_ns), c->seen_ns);
    uint64_t moved = atomic_load(&c->t.moved) - c->seen;

    if (!since)
        return now - wire_moved(c->h->wire) < c->t.stall_s * second_ns;
    c->seen += moved;
    c->seen_ns = now;
    return (int64_t)moved > (now - since) / second_ns * SLOWEST;
}

/*
 * Did a body that had begun to come stop coming? libcurl looks at the mean of some seconds,
 * in which what came before hides it.
 */
static bool has_stalled(struct call *c, int64_t now)
{
    uint64_t moved = atomic_load(&c->t.moved);

    if (moved != c->moved) {
        c->moved = moved;
        c->moved_ns = now;
    }
    return moved > 0 && !c->r->body_size &&
           now - c->moved_ns >= c->t.stall_s * second_ns;
}

static void step(struct batch *b, struct call *c)
{
    int64_t now = http_clock();

    /* The time is for what hangs: while it goes on there is as much again for the rest. */
    if (c->state == CALL_FLIES && now >= c->deadline && goes_on(c, now))
        c->deadline = now + c->allowed_ns;
    if (c->state == CALL_FLIES && !wire_flies(b->h->wire, &c->t)) {
        call_judge(c);
    } else if (c->state == CALL_FLIES && now >= c->deadline && !c->too_late) {
        c->too_late = true;
        wire_abort(b->h->wire, &c->t);
    } else if (c->state == CALL_FLIES && !c->too_late && !c->stalled &&
               has_stalled(c, now)) {
        c->stalled = true;
        wire_abort(b->h->wire, &c->t);
    }
    if (c->state == CALL_WAITS && now >= c->at)
        start_try(c, &b->waiter);
}

/* What has ended leaves; true: something moved, so look again. */
static bool step_all(struct batch *b)
{
    bool moved = false;

    for (size_t i = b->count; i-- > 0;) {
        struct call *c = b->call[i];

        step(b, c);
        if (c->state != CALL_ENDED)
            continue;
        if (c->rc < 0 && !(c->r->flags & HTTP_MAY_FAIL))
            note_failure(b, c->index, &c->err);
        call_free(c);
        b->call[i] = b->call[--b->count];
        moved = true;
    }
    return moved;
}

/* Until something ends, is due, or may be interrupted. */
static void wait_for_some(struct batch *b)
{
    struct wire_try *flying[IN_FLIGHT];
    int64_t until = http_clock() + LOOK_NS;
    size_t n = 0;

    for (size_t i = 0; i < b->count; i++) {
        struct call *c = b->call[i];

        if (c->state == CALL_FLIES)
            flying[n++] = &c->t;
        else
            until = MIN(until, c->at);
    }
    wire_wait(b->h->wire, &b->waiter, flying, n, until);
}

static void end_calls(struct batch *b)
{
    for (size_t i = 0; i < b->count; i++)
        if (b->call[i]->state == CALL_FLIES)
            wire_abort(b->h->wire, &b->call[i]->t);
    for (size_t i = 0; i < b->count; i++) {
        struct wire_try *t = &b->call[i]->t;

        while (b->call[i]->state == CALL_FLIES && wire_flies(b->h->wire, t))
            wire_wait(b->h->wire, &b->waiter, &t, 1, http_clock() + LOOK_NS);
        call_free(b->call[i]);
    }
    b->count = 0;
}

static bool interrupted(const struct batch *b)
{
    struct err e = {0};
    bool stopped = atomic_load(&b->h->stopped);

    if (!stopped && !interrupt_asked())
        return false;
    err_set(&e, stopped ? ECANCELED : EINTR, "%s: %s",
            b->r[0].what ? b->r[0].what : "request",
            stopped ? "the mount ends" : "interrupted");
    *b->e = e;
    return true;
}

int http_do_many(struct http *h, const struct http_request *r, size_t n,
                 struct http_answer *a, struct err *e)
{
    struct batch b = {.h = h, .r = r, .a = a, .n = n, .failed = SIZE_MAX, .e = e};
    bool ended = false;

    if (n == 0)
        return 0;
    if (wire_waiter_init(&b.waiter) < 0)
        return err_nomem(e);
    begin_calls(&b);
    while (b.failed == SIZE_MAX && b.count > 0 && !(ended = interrupted(&b))) {
        if (!step_all(&b))
            wait_for_some(&b);
        begin_calls(&b);
    }
    end_calls(&b);
    wire_waiter_destroy(&b.waiter);
    return ended || b.failed != SIZE_MAX ? -e->code : 0;
}

int http_do(struct http *h, const struct http_request *r, struct http_answer *a,
            struct err *e)
{
    return http_do_many(h, r, 1, a, e);
}

/* ---- answers ---- */

const char *http_answer_header(const struct http_answer *a, const char *name)
{
    return wire_header(&a->headers, name);
}

void http_answer_release(struct http_answer *a)
{
    buf_release(&a->body);
    buf_release(&a->headers);
}
