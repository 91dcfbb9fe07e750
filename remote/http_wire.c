/* SPDX-License-Identifier: MIT */
/* remote/http_wire.c - single tries of requests on the wire: libcurl on its own thread. */
#include "remote/http_wire_priv.h"

#include <curl/curl.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "base/err.h"
#include "base/thread.h"

enum {
    FLYING_MAX = 256, /* of all hosts together */
    IDLE_HANDLES = 64,
    POLL_MS = 1000, /* wake-ups come when there is something to do */
    READ_SIZE = 256 << 10,
};

/* A try that libcurl works on. */
struct wire_slot {
    struct wire *wire;
    CURL *easy;
    struct wire_try *t;
    char *origin;
    char error[CURL_ERROR_SIZE];
};

struct wire {
    struct http_options options;
    CURLM *multi;
    pthread_t thread;
    bool running;
    atomic_int_fast64_t moved_ns;
    pthread_mutex_t lock;
    /* guarded by lock: */
    struct wire_try *started, **last; /* not seen by the thread yet */
    bool aborts;                      /* some try shall end */
    bool stop;
    /* the thread's own: */
    struct wire_try *waiting, **waiting_last; /* their host has enough */
    struct wire_slot *slot[FLYING_MAX];
    size_t count;
    CURL *idle[IDLE_HANDLES];
    size_t nidle;
};

/* ---- what libcurl calls ---- */

static int64_t clock_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void note_moved(struct wire_try *t, size_t len)
{
    atomic_fetch_add(&t->moved, len);
    atomic_store(&t->slot->wire->moved_ns, clock_ns());
}

static size_t on_header(char *data, size_t size, size_t n, void *user)
{
    struct wire_try *t = user;

    return wire_header_line(&t->head, data, size * n) < 0 ? 0 : size * n;
}

static bool begin(struct wire_try *t)
{
    long status = 0;

    curl_easy_getinfo(t->slot->easy, CURLINFO_RESPONSE_CODE, &status);
    t->status = (int)status;
    t->begun = true;
    if (t->begin(t))
        return true;
    t->end = WIRE_UNWANTED;
    return false;
}

static size_t on_body(char *data, size_t size, size_t n, void *user)
{
    struct wire_try *t = user;
    size_t len = size * n;

    if (!t->begun && !begin(t))
        return 0;
    if (len > t->room - t->got) {
        t->too_long = true;
        t->end = WIRE_UNWANTED;
        return 0;
    }
    if (t->to)
        memcpy(t->to + t->got, data, len);
    else if (buf_add(&t->body, data, len) < 0)
        return 0;
    t->got += len;
    note_moved(t, len);
    return len;
}

/* The request's body. */
static size_t on_send(char *data, size_t size, size_t n, void *user)
{
    struct wire_try *t = user;
    const struct http_request *r = t->request;
    size_t len = (size_t)MIN((uint64_t)(size * n), r->body_size - t->sent);

    if (len == 0)
        return 0;
    if (r->body_at) {
        if (r->body_at(r->body_user, t->sent, len, data) < 0)
            return CURL_READFUNC_ABORT;
    } else {
        memcpy(data, (const char *)r->body + t->sent, len);
    }
    t->sent += len;
    note_moved(t, len);
    return len;
}

/* A connection that was used before may turn out to be closed: the body begins again. */
static int on_rewind(void *user, curl_off_t off, int origin)
{
    struct wire_try *t = user;

    if (origin != SEEK_SET || off < 0 || (uint64_t)off > t->request->body_size)
        return CURL_SEEKFUNC_FAIL;
    t->sent = (uint64_t)off;
    return CURL_SEEKFUNC_OK;
}

/* ---- one try ---- */

static void set_method(CURL *c, const struct http_request *r)
{
    const char *method = r->method ? r->method : "GET";

    if (strcmp(method, "HEAD") == 0) {
        curl_easy_setopt(c, CURLOPT_NOBODY, 1L);
    } else if (strcmp(method, "PUT") == 0 || strcmp(method, "POST") == 0) {
        curl_easy_setopt(c, CURLOPT_UPLOAD, 1L);
        curl_easy_setopt(c, CURLOPT_INFILESIZE_LARGE, (curl_off_t)r->body_size);
        curl_easy_setopt(c, CURLOPT_CUSTOMREQUEST, method);
    } else if (strcmp(method, "GET") != 0) {
        curl_easy_setopt(c, CURLOPT_CUSTOMREQUEST, method);
    }
}

static void set_limits(const struct wire *w, CURL *c, const struct wire_try *t)
{
    curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT, (long)w->options.connect_s);
    curl_easy_setopt(c, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(c, CURLOPT_LOW_SPEED_TIME, (long)t->stall_s);
    curl_easy_setopt(c, CURLOPT_BUFFERSIZE, (long)READ_SIZE);
    curl_easy_setopt(c, CURLOPT_TCP_KEEPALIVE, 1L);
    /* Names that do not resolve are looked up on threads, which nobody waits for. */
    curl_easy_setopt(c, CURLOPT_QUICK_EXIT, 1L);
}

static int set_up(const struct wire *w, struct wire_slot *s)
{
    struct wire_try *t = s->t;
    CURL *c = s->easy;

    set_method(c, t->request);
    set_limits(w, c, t);
    curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(c, CURLOPT_FOLLOWLOCATION, 0L);
    curl_easy_setopt(c, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(c, CURLOPT_NOPROXY,
                     t->request->flags & HTTP_NO_PROXY ? "*" : NULL);
    curl_easy_setopt(c, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_2TLS);
    curl_easy_setopt(c, CURLOPT_USERAGENT, "unshardfs/" UFS_VERSION);
    curl_easy_setopt(c, CURLOPT_HTTPHEADER, t->headers ? t->headers->line : NULL);
    curl_easy_setopt(c, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(c, CURLOPT_HEADERDATA, t);
    curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(c, CURLOPT_WRITEDATA, t);
    curl_easy_setopt(c, CURLOPT_READFUNCTION, on_send);
    curl_easy_setopt(c, CURLOPT_READDATA, t);
    curl_easy_setopt(c, CURLOPT_SEEKFUNCTION, on_rewind);
    curl_easy_setopt(c, CURLOPT_SEEKDATA, t);
    curl_easy_setopt(c, CURLOPT_ERRORBUFFER, s->error);
    curl_easy_setopt(c, CURLOPT_PRIVATE, s);
    return curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK &&
                   curl_easy_setopt(c, CURLOPT_URL, t->url) == CURLE_OK
               ? 0
               : -ENOMEM;
}

static enum wire_end end_of(CURLcode code)
{
    switch ((int)code) {
    case CURLE_OK:
        return WIRE_DONE;
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
        return WIRE_UNRESOLVED;
    case CURLE_COULDNT_CONNECT:
        return WIRE_UNREACHED;
    case CURLE_OPERATION_TIMEDOUT:
        return WIRE_STALLED;
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_CERTPROBLEM:
    case CURLE_SSL_ISSUER_ERROR:
        return WIRE_UNTRUSTED;
    case CURLE_OUT_OF_MEMORY:
    case CURLE_URL_MALFORMAT:
    case CURLE_BAD_FUNCTION_ARGUMENT:
    case CURLE_ABORTED_BY_CALLBACK:
        return WIRE_FAILED;
    default:
        return WIRE_BROKEN;
    }
}

static void tell_end(struct wire *w, struct wire_try *t)
{
    pthread_mutex_lock(&w->lock);
    t->flying = false;
    pthread_cond_signal(&t->waiter->ended);
    pthread_mutex_unlock(&w->lock);
}

/* Frees the slot and keeps the handle for the next one. */
static void leave_slot(struct wire *w, struct wire_slot *s)
{
    for (size_t i = 0; i < w->count; i++)
        if (w->slot[i] == s)
            w->slot[i] = w->slot[--w->count];
    s->t->slot = NULL;
    if (s->easy && w->nidle < IDLE_HANDLES) {
        curl_easy_reset(s->easy);
        w->idle[w->nidle++] = s->easy;
    } else {
        curl_easy_cleanup(s->easy);
    }
    free(s->origin);
    free(s);
}

static void end_slot(struct wire *w, struct wire_slot *s, enum wire_end end)
{
    struct wire_try *t = s->t;

    curl_multi_remove_handle(w->multi, s->easy);
    if (end == WIRE_DONE && !t->begun && !begin(t))
        end = WIRE_UNWANTED;
    if (t->end != WIRE_UNWANTED)
        t->end = end;
    snprintf(t->error, sizeof t->error, "%s", s->error);
    leave_slot(w, s);
    tell_end(w, t);
}

/* A try that libcurl never saw. */
static void end_unstarted(struct wire *w, struct wire_try *t, enum wire_end end)
{
    t->end = end;
    tell_end(w, t);
}

static void fly(struct wire *w, struct wire_try *t, char *origin)
{
    struct wire_slot *s = calloc(1, sizeof *s);

    if (!s) {
        free(origin);
        end_unstarted(w, t, WIRE_FAILED);
        return;
    }
    s->wire = w;
    s->t = t;
    s->origin = origin;
    atomic_store(&t->flew_ns, clock_ns());
    s->easy = w->nidle ? w->idle[--w->nidle] : curl_easy_init();
    t->slot = s;
    w->slot[w->count++] = s;
    if (!s->easy || set_up(w, s) < 0 ||
        curl_multi_add_handle(w->multi, s->easy) != CURLM_OK) {
        leave_slot(w, s);
        end_unstarted(w, t, WIRE_FAILED);
    }
}

/* ---- the thread ---- */

static size_t flying_to(const struct wire *w, const char *origin)
{
    size_t n = 0;

    for (size_t i = 0; i < w->count; i++)
        n += strcmp(w->slot[i]->origin, origin) == 0;
    return n;
}

static void take_started(struct wire *w)
{
    pthread_mutex_lock(&w->lock);
    if (w->started) {
        *w->waiting_last = w->started;
        w->waiting_last = w->last;
        w->started = NULL;
        w->last = &w->started;
    }
    pthread_mutex_unlock(&w->lock);
}

/* Starts those that wait, in order, as far as their hosts have room. */
static void start_waiting(struct wire *w)
{
    struct wire_try **p = &w->waiting;

    while (*p) {
        struct wire_try *t = *p;
        bool secure;
        char *origin =
            w->count < FLYING_MAX ? wire_origin(t->url, &secure, NULL) : NULL;

        if (w->count == FLYING_MAX ||
            (origin && flying_to(w, origin) >= w->options.per_host)) {
            free(origin);
            p = &t->next;
            continue;
        }
        *p = t->next;
        if (w->waiting_last == &t->next)
            w->waiting_last = p;
        if (origin)
            fly(w, t, origin);
        else
            end_unstarted(w, t, WIRE_FAILED);
    }
}

static bool is_aborted(struct wire *w, const struct wire_try *t)
{
    bool abort;

    pthread_mutex_lock(&w->lock);
    abort = t->abort;
    pthread_mutex_unlock(&w->lock);
    return abort;
}

static void end_aborted(struct wire *w)
{
    bool any;

    pthread_mutex_lock(&w->lock);
    any = w->aborts;
    w->aborts = false;
    pthread_mutex_unlock(&w->lock);
    if (!any)
        return;
    for (size_t i = w->count; i-- > 0;)
        if (is_aborted(w, w->slot[i]->t))
            end_slot(w, w->slot[i], WIRE_ABORTED);
    for (struct wire_try **p = &w->waiting; *p;) {
        struct wire_try *t = *p;

        if (!is_aborted(w, t)) {
            p = &t->next;
            continue;
        }
        *p = t->next;
        if (w->waiting_last == &t->next)
            w->waiting_last = p;
        end_unstarted(w, t, WIRE_ABORTED);
    }
}

static void end_finished(struct wire *w)
{
    const CURLMsg *m;
    int left;

    while ((m = curl_multi_info_read(w->multi, &left))) {
        char *user = NULL;
        CURLcode code = m->data.result;

        if (m->msg != CURLMSG_DONE)
            continue;
        curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &user);
        end_slot(w, (struct wire_slot *)(void *)user, end_of(code));
    }
}

static bool is_stopped(struct wire *w)
{
    bool stop;

    pthread_mutex_lock(&w->lock);
    stop = w->stop;
    pthread_mutex_unlock(&w->lock);
    return stop;
}

static void *wire_thread(void *user)
{
    struct wire *w = user;
    int running;

    while (!is_stopped(w)) {
        take_started(w);
        end_aborted(w);
        start_waiting(w);
        curl_multi_perform(w->multi, &running);
        end_finished(w);
        start_waiting(w);
        curl_multi_poll(w->multi, NULL, 0, POLL_MS, NULL);
    }
    return NULL;
}

/* ---- from outside ---- */

int wire_waiter_init(struct wire_waiter *waiter)
{
    pthread_condattr_t monotonic;
    int rc;

    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    rc = pthread_cond_init(&waiter->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return -rc;
}

void wire_waiter_destroy(struct wire_waiter *waiter)
{
    pthread_cond_destroy(&waiter->ended);
}

void wire_start(struct wire *w, struct wire_try *t)
{
    t->head = (struct buf){.max = WIRE_HEADERS_MAX};
    pthread_mutex_lock(&w->lock);
    t->flying = true;
    t->abort = false;
    t->next = NULL;
    *w->last = t;
    w->last = &t->next;
    pthread_mutex_unlock(&w->lock);
    curl_multi_wakeup(w->multi);
}

void wire_abort(struct wire *w, struct wire_try *t)
{
    pthread_mutex_lock(&w->lock);
    t->abort = true;
    w->aborts = true;
    pthread_mutex_unlock(&w->lock);
    curl_multi_wakeup(w->multi);
}

bool wire_flies(struct wire *w, struct wire_try *t)
{
    bool flying;

    pthread_mutex_lock(&w->lock);
    flying = t->flying;
    pthread_mutex_unlock(&w->lock);
    return flying;
}

int64_t wire_moved(struct wire *w)
{
    return atomic_load(&w->moved_ns);
}

void wire_wait(struct wire *w, struct wire_waiter *waiter, struct wire_try *const *of,
               size_t n, int64_t until_ns)
{
    const struct timespec until = {.tv_sec = until_ns / 1000000000,
                                   .tv_nsec = until_ns % 1000000000};
    bool ended = false;

    pthread_mutex_lock(&w->lock);
    for (size_t i = 0; i < n; i++)
        ended = ended || !of[i]->flying;
    if (!ended)
        pthread_cond_timedwait(&waiter->ended, &w->lock, &until);
    pthread_mutex_unlock(&w->lock);
}

int wire_new(const struct http_options *options, struct wire **out, struct err *e)
{
    struct wire *w = calloc(1, sizeof *w);
    int rc;

    if (!w || curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
        free(w);
        return err_nomem(e);
    }
    w->options = *options;
    w->last = &w->started;
    w->waiting_last = &w->waiting;
    pthread_mutex_init(&w->lock, NULL);
    w->multi = curl_multi_init();
    if (!w->multi) {
        wire_free(w);
        return err_nomem(e);
    }
    curl_multi_setopt(w->multi, CURLMOPT_MAXCONNECTS, (long)FLYING_MAX);
    rc = thread_start(&w->thread, wire_thread, w);
    w->running = rc == 0;
    if (rc) {
        wire_free(w);
        return err_set(e, rc, "start a thread: %s", strerror(rc));
    }
    *out = w;
    return 0;
}

void wire_free(struct wire *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_mutex_unlock(&w->lock);
    if (w->running) {
        curl_multi_wakeup(w->multi);
        pthread_join(w->thread, NULL);
    }
    for (size_t i = 0; i < w->nidle; i++)
        curl_easy_cleanup(w->idle[i]);
    curl_multi_cleanup(w->multi);
    pthread_mutex_destroy(&w->lock);
    curl_global_cleanup();
    free(w);
}
