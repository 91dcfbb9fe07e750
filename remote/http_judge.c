/* SPDX-License-Identifier: MIT */
/* remote/http_judge.c - what an answer means: done, try again, go elsewhere, or an error. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/log.h"
#include "remote/http_call.h"

enum {
    BACKOFF_FIRST_MS = 100,
    BACKOFF_MAX_MS = 5000,
    SKEW_SECONDS = 240, /* S3 takes 15 minutes, others 5 */
    BODY_DEFAULT = 8 << 20,
    CODE_SIZE = 48,
};

static const int64_t ms_ns = 1000000, second_ns = 1000000000;

static const char *header(const struct call *c, const char *name)
{
    return wire_header(&c->t.head, name);
}

static struct call *call_of(struct wire_try *t)
{
    return container_of(t, struct call, t);
}

/* ---- headers, on the wire's thread ---- */

static bool number(const char **text, uint64_t *out)
{
    char *end;

    if (**text < '0' || **text > '9')
        return false;
    errno = 0;
    *out = strtoull(*text, &end, 10);
    *text = end;
    return errno == 0;
}

/* "bytes 0-99/1234" (RFC 9110, 14.4); total UINT64_MAX: "*". */
static bool content_range(const char *text, uint64_t *first, uint64_t *last,
                          uint64_t *total)
{
    if (!text || strncasecmp(text, "bytes ", 6) != 0)
        return false;
    text += 6;
    if (!number(&text, first) || *text++ != '-' || !number(&text, last) ||
        *text++ != '/')
        return false;
    *total = UINT64_MAX;
    return strcmp(text, "*") == 0 || (number(&text, total) && *text == '\0');
}

static uint64_t content_length(const struct call *c)
{
    const char *text = header(c, "Content-Length");
    uint64_t n;

    return text && number(&text, &n) && *text == '\0' ? n : UINT64_MAX;
}

static bool wrong(struct call *c, int code, const char *fmt, ...) PRINTF(3, 4);
static bool wrong(struct call *c, int code, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(c->why, sizeof c->why, fmt, args);
    va_end(args);
    c->wrong = code;
    return false;
}

/* Is it the object that was asked for? Of bytes that is not taken on trust. */
static bool same_object(struct call *c, uint64_t total)
{
    const struct http_request *r = c->r;
    const char *etag = header(c, "ETag"), *modified = header(c, "Last-Modified");

    if (r->size && total != UINT64_MAX && total != r->size)
        return wrong(c, ESTALE, "the object changed: %" PRIu64 " bytes, was %" PRIu64,
                     total, r->size);
    if (r->etag && etag)
        return strcmp(etag, r->etag) == 0 ||
               wrong(c, ESTALE, "the object changed: ETag %.60s, was %.60s", etag,
                     r->etag);
    if (r->modified && modified)
        return http_date(modified) == r->modified ||
               wrong(c, ESTALE, "the object changed: it was modified %.40s", modified);
    if (r->dst && (r->etag || r->modified))
        return wrong(c, EREMOTEIO,
                     "the answer tells no %s: it may be of another object",
                     r->etag ? "ETag" : "Last-Modified");
    return true;
}

static bool begin_range(struct call *c)
{
    const struct http_request *r = c->r;
    const char *text = header(c, "Content-Range");
    uint64_t first, last, total;

    if (!content_range(text, &first, &last, &total))
        return wrong(c, EREMOTEIO, "HTTP 206 with%s Content-Range",
                     text ? " a bad" : "out");
    if (first != r->off || last != r->off + r->len - 1)
        return wrong(c, EREMOTEIO, "wrong Content-Range: bytes %" PRIu64 "-%" PRIu64,
                     first, last);
    if (!same_object(c, total))
        return false;
    c->t.to = r->dst;
    c->t.room = r->len;
    return true;
}

/* The whole object is as good as a range when all of it was asked for. */
static bool begin_whole(struct call *c)
{
    const struct http_request *r = c->r;
    uint64_t len = content_length(c);

    if (r->off != 0 || (r->size && r->size != r->len))
        return wrong(c, EREMOTEIO, "HTTP 200 instead of 206: the range is ignored");
    if (!same_object(c, len))
        return false;
    if (len != UINT64_MAX && len != r->len)
        return wrong(c, EREMOTEIO, "HTTP 200 instead of 206: the range is ignored");
    c->t.to = r->dst;
    c->t.room = r->len;
    return true;
}

static bool begin_body(struct call *c)
{
    size_t max = c->r->max ? c->r->max : BODY_DEFAULT;
    uint64_t len = content_length(c);
    bool head = c->r->method && strcmp(c->r->method, "HEAD") == 0;

    if (!same_object(c, UINT64_MAX))
        return false;
    if (!head && len != UINT64_MAX && len > max)
        return wrong(c, EFBIG,
                     "the answer has %" PRIu64 " bytes, at most %zu are taken", len,
                     max);
    c->t.room = max;
    c->t.body.max = max + 1;
    return true;
}

bool call_begin(struct wire_try *t)
{
    struct call *c = call_of(t);

    if (t->status / 100 == 2 && c->r->dst) {
        if (t->status == 206)
            return begin_range(c);
        if (t->status == 200)
            return begin_whole(c);
        return wrong(c, EREMOTEIO, "HTTP %d instead of 206", t->status);
    }
    if (t->status / 100 == 2)
        return begin_body(c);
    t->room = WIRE_ERROR_BODY; /* what is wrong, in the server's words */
    t->body.max = WIRE_ERROR_BODY + 1;
    return true;
}

/* ---- verdicts, on the caller's thread ---- */

/* The path of a URL, for who gave no better name. */
static const char *path_of(const char *url, int *len)
{
    const char *p = strstr(url, "://");

    p = p ? p + 3 : url;
    p += strcspn(p, "/?#");
    *len = (int)strcspn(p, "?#");
    return p;
}

static void name_call(const struct call *c, struct buf *out)
{
    int len;
    const char *path = path_of(c->r->url, &len);

    if (c->r->what)
        buf_adds(out, c->r->what);
    else
        buf_addf(out, "%.*s", len, path);
    if (c->r->dst)
        buf_addf(out, ", bytes %" PRIu64 "+%zu", c->r->off, c->r->len);
}

void call_fail(struct call *c, int code)
{
    CLEANUP(buf_release) struct buf name = {.max = 600};
    const char *host = c->origin ? strstr(c->origin, "://") + 3 : "no host";
    double seconds = (double)(http_clock() - c->begun) / 1e9;
    char status[24] = "";

    name_call(c, &name);
    c->state = CALL_ENDED;
    c->rc = -code;
    if (c->status)
        snprintf(status, sizeof status, "status %d, ", c->status);
    err_set(&c->err, code, "%s, from %s: %s (%s%u %s, %.1f s)",
            name.data ? name.data : "", host, c->why, status, c->tries,
            c->tries == 1 ? "try" : "tries", seconds);
    if (c->todo)
        err_hint(&c->err, "%s", c->todo);
}

/* "Code" of S3's error documents: <Error><Code>SlowDown</Code>... ; "" when none. */
static void error_code(const struct call *c, char out[CODE_SIZE])
{
    const char *at = c->t.body.data ? strstr(c->t.body.data, "<Code>") : NULL;
    size_t n = 0;

    for (at = at ? at + 6 : ""; n < CODE_SIZE - 1 && ((at[n] >= 'A' && at[n] <= 'Z') ||
                                                      (at[n] >= 'a' && at[n] <= 'z'));
         n++)
        out[n] = at[n];
    out[n] = '\0';
}

static void say_status(struct call *c)
{
    char code[CODE_SIZE];

    error_code(c, code);
    c->todo = NULL;
    snprintf(c->why, sizeof c->why, "HTTP %d%s%s", c->t.status, *code ? " " : "", code);
}

/* Between half and all of what doubles each time: many clients spread out. */
static int64_t backoff_ns(const struct call *c)
{
    int64_t ms = BACKOFF_FIRST_MS;
    uint64_t chance = (uint64_t)http_clock() * 0x9e3779b97f4a7c15u;

    for (unsigned i = 1; i < c->tries && ms < BACKOFF_MAX_MS; i++)
        ms *= 2;
    ms = MIN(ms, BACKOFF_MAX_MS);
    return ms * ms_ns / 2 + (int64_t)(chance >> 32) % (ms * ms_ns / 2);
}

/* Seconds, or a date by the server's own clock. */
static int64_t retry_after_ns(const struct call *c)
{
    const char *text = header(c, "Retry-After"), *date = header(c, "Date");
    const char *p = text;
    uint64_t seconds;
    time_t until;

    if (!text)
        return 0;
    if (number(&p, &seconds) && *p == '\0')
        return (int64_t)MIN(seconds, 86400u) * second_ns;
    until = http_date(text);
    if (!until || !date || until <= http_date(date))
        return 0;
    return (int64_t)MIN(until - http_date(date), 86400) * second_ns;
}

/* Once more, if there is time; why says what went wrong. */
static void again(struct call *c)
{
    int64_t now = http_clock(), after = retry_after_ns(c);

    c->at = now + MAX(after, backoff_ns(c));
    if (c->tries >= c->h->options.tries) {
        call_fail(c, EREMOTEIO);
    } else if (c->at >= c->deadline) {
        if (after) {
            size_t len = strlen(c->why);

            snprintf(c->why + len, sizeof c->why - len, ", asks to wait %" PRId64 " s",
                     after / second_ns);
        }
        call_fail(c, EREMOTEIO);
    } else {
        atomic_fetch_add(&c->h->retries, 1);
        log_msg(LOG_REMOTE, LOG_INFO, "%s from %s: %s, try %u",
                c->r->what ? c->r->what : "", c->origin, c->why, c->tries);
        c->state = CALL_WAITS;
    }
}

static void at_once(struct call *c)
{
    c->state = CALL_WAITS;
    c->at = http_clock();
}

static void finish(struct call *c)
{
    struct http_answer *a = c->a;
    const char *modified = header(c, "Last-Modified");
    uint64_t first, last;

    a->status = c->t.status;
    a->tries = c->tries;
    if (!content_range(header(c, "Content-Range"), &first, &last, &a->size))
        a->size = content_length(c);
    a->modified = modified ? http_date(modified) : 0;
    buf_release(&a->headers);
    a->headers = c->t.head;
    c->t.head = (struct buf){0};
    buf_adds(&c->t.body, "");
    buf_release(&a->body);
    a->body = c->t.body;
    c->t.body = (struct buf){0};
    c->state = CALL_ENDED;
    c->rc = 0;
}

static void redirect(struct call *c)
{
    const char *location = header(c, "Location");
    CLEANUP_FREE char *url = location ? wire_redirect(c->url, location) : NULL;
    CLEANUP_FREE char *origin = NULL;
    bool secure;

    if (!url || ++c->hops > HOPS_MAX || !(origin = wire_origin(url, &secure, NULL))) {
        snprintf(c->why, sizeof c->why, "HTTP %d, %s", c->t.status,
                 url ? "redirected too often" : "a redirection that is not followed");
        call_fail(c, EPROTO);
        return;
    }
    c->foreign = c->foreign || strcmp(origin, c->origin) != 0;
    free(c->url);
    free(c->origin);
    c->url = steal(&url);
    c->origin = steal(&origin);
    at_once(c);
}

/* True: the server's clock is another one than ours, and is taken from now on. */
static bool set_clock(struct call *c)
{
    const char *date = header(c, "Date");
    time_t theirs = date ? http_date(date) : 0, ours = time(NULL), off;
    char code[CODE_SIZE];

    error_code(c, code);
    off = theirs - ours - http_skew_get(c->h, c->origin);
    if (!c->r->auth || c->skewed || !theirs ||
        (strcmp(code, "RequestTimeTooSkewed") != 0 && off > -SKEW_SECONDS &&
         off < SKEW_SECONDS))
        return false;
    c->skewed = true;
    http_skew_set(c->h, c->origin, theirs - ours);
    return true;
}

/* An answer for refused() to look at; it goes back afterwards. */
static bool others_fetched(struct call *c)
{
    struct http_answer a = {.status = c->t.status,
                            .tries = c->tries,
                            .body = c->t.body,
                            .headers = c->t.head};

    return c->r->auth && c->r->auth->refused && !c->foreign &&
           c->refusals++ < REFUSALS_MAX && c->r->auth->refused(c->r->auth_user, &a);
}

static bool is_redirect(const struct call *c)
{
    int s = c->t.status;

    return !(c->r->flags & HTTP_NO_REDIRECT) && header(c, "Location") &&
           (s == 301 || s == 302 || s == 303 || s == 307 || s == 308);
}

static bool is_passing(const struct call *c)
{
    char code[CODE_SIZE];
    int s = c->t.status;

    error_code(c, code);
    return s == 408 || s == 425 || s == 429 || (s >= 500 && s != 501 && s != 505) ||
           (s == 400 && strcmp(code, "RequestTimeout") == 0);
}

static int code_of(int status)
{
    switch (status) {
    case 401:
    case 403:
        return EACCES;
    case 404:
    case 410:
        return ENOENT;
    case 412:
    case 416:
        return ESTALE;
    default:
        return EPROTO;
    }
}

static void judge_status(struct call *c)
{
    int s = c->t.status;

    say_status(c);
    if (is_redirect(c))
        redirect(c);
    else if (is_passing(c))
        again(c);
    else if ((s == 400 || s == 401 || s == 403) && (set_clock(c) || others_fetched(c)))
        at_once(c);
    else if (((s / 100 == 4 || s == 501) && (c->r->flags & HTTP_ANY_STATUS)) ||
             (s / 100 == 3 && (c->r->flags & HTTP_NO_REDIRECT)))
        finish(c);
    else
        call_fail(c, code_of(s));
}

static void judge_answer(struct call *c)
{
    if (c->t.status / 100 != 2) {
        judge_status(c);
    } else if (c->t.too_long) {
        wrong(c, c->r->dst ? EREMOTEIO : EFBIG, "a body of more than %" PRIu64 " bytes",
              c->t.room);
    } else if (!c->wrong && c->r->dst && c->t.got != c->r->len) {
        wrong(c, EREMOTEIO, "a body of %" PRIu64 " bytes", c->t.got);
    } else if (!c->wrong) {
        finish(c);
    }
    if (!c->wrong)
        return;
    if (c->wrong == EREMOTEIO)
        again(c);
    else
        call_fail(c, c->wrong);
}

static void say_broken(struct call *c)
{
    static const char *const word[] = {
        [WIRE_UNRESOLVED] = "the name cannot be resolved",
        [WIRE_UNREACHED] = "no connection",
        [WIRE_BROKEN] = "the connection broke",
        [WIRE_STALLED] = "the server stalled",
        [WIRE_UNTRUSTED] = "its certificate is not trusted",
        [WIRE_FAILED] = "the request cannot be sent",
    };
    static const char *const todo[] = {
        [WIRE_UNRESOLVED] = "check the name in the URL, the network, and HTTPS_PROXY "
                            "where one is needed",
        [WIRE_UNREACHED] = "check host and port, in the URL or in AWS_ENDPOINT_URL",
        [WIRE_UNTRUSTED] = "let the machine know who signed it: "
                           "update-ca-certificates(8)",
        [WIRE_FAILED] = NULL,
    };
    const struct wire_try *t = &c->t;

    c->todo = todo[t->end];
    snprintf(c->why, sizeof c->why, "%s%s%.150s", word[t->end], t->error[0] ? ": " : "",
             t->error);
}

void call_judge(struct call *c)
{
    if (c->t.begun)
        c->status = c->t.status;
    if (c->t.end == WIRE_DONE || c->t.end == WIRE_UNWANTED) {
        judge_answer(c);
        return;
    }
    if (c->t.end == WIRE_ABORTED && c->stalled)
        c->t.end = WIRE_STALLED;
    if (c->t.end == WIRE_ABORTED) {
        if (!c->why[0] || c->t.begun)
            snprintf(c->why, sizeof c->why, "no answer in time");
        call_fail(c, c->too_late ? EREMOTEIO : EINTR);
        return;
    }
    say_broken(c);
    if (c->t.end == WIRE_FAILED)
        call_fail(c, EPROTO);
    else if (c->t.end == WIRE_UNTRUSTED)
        call_fail(c, EREMOTEIO);
    else if ((c->r->flags & HTTP_ONCE) && c->t.end != WIRE_UNRESOLVED &&
             c->t.end != WIRE_UNREACHED)
        call_fail(c, EREMOTEIO);
    else
        again(c);
}
