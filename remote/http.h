/* SPDX-License-Identifier: MIT */
/* remote/http.h - HTTP requests that are tried again, bounded in time, many at once. */
#ifndef UFS_REMOTE_HTTP_H
#define UFS_REMOTE_HTTP_H

#include <time.h>

#include "base/base.h"
#include "base/buf.h"

struct err;
struct http;
struct http_answer;
struct http_request;
struct http_try;

/*
 * The engine: one thread that moves all bytes, with connections that are used again. Any
 * thread may call what stands below, and waits for its own requests only. Make it after
 * a fork. Zero is the default of every option.
 */
struct http_options {
    unsigned connect_s;  /* seconds for a connection: 10 */
    unsigned stall_s;    /* seconds without one byte: 10 */
    unsigned deadline_s; /* seconds for a request with all its tries: 60 */
    unsigned tries;      /* 6 */
    unsigned per_host;   /* requests that one host has at a time: 32 */
};

/*
 * The defaults, and what the environment says of them: UNSHARD_HTTP_CONNECT, _STALL,
 * _DEADLINE (seconds), _TRIES, _CONNECTIONS. -EINVAL names the variable that is no number.
 */
int http_options_get(struct http_options *out, struct err *e);

int http_new(const struct http_options *options, struct http **out, struct err *e);

/* Ends all that is under way and all that comes later: -ECANCELED. Any thread. */
void http_stop(struct http *h);

/* How often a request was tried once more because a try had failed. */
uint64_t http_retries(struct http *h);

/* When nobody calls any more. NULL is fine. */
void http_free(struct http *h);

/*
 * What lets a request in. Both are called on the thread that called http_do(), and may do
 * requests of their own.
 */
struct http_auth {
    /*
     * Before each try, also of a redirection that stays on the same host: adds headers
     * by http_try_header(). Never called for another host.
     */
    int (*authorize)(void *user, struct http_try *t, struct err *e);
    /*
     * Optional: the server said 400, 401 or 403. True: other credentials were fetched, try
     * once more (asked at most twice a request).
     */
    bool (*refused)(void *user, const struct http_answer *a);
};

/* One try on its way out. */
struct http_try {
    const struct http_request *request;
    const char *url; /* as it is sent: a redirection may have changed it */
    time_t now;      /* as this server's clock has it, as far as we know */
    struct http_header_list *headers;
};

/* Adds "name: value" (copied). -ENOMEM; -EINVAL when it would break the line. */
int http_try_header(struct http_try *t, const char *name, const char *value,
                    struct err *e);

/*
 * The bytes [off, off + len) of a body into dst, the same each time it is asked: a body
 * is sent again when a try fails. On the engine's thread: it must not wait.
 */
typedef int http_body_fn(void *user, uint64_t off, size_t len, void *dst);

enum http_flags {
    HTTP_NO_REDIRECT = 1, /* 3xx is an answer */
    HTTP_ONCE = 2,        /* no second try once the server may have acted */
    HTTP_ANY_STATUS = 4,  /* 4xx (but 408, 425 and 429) and 501 are answers */
    HTTP_NO_PROXY =
        8, /* for this machine and its host: secrets that no proxy may see */
    HTTP_MAY_FAIL = 16, /* of http_do_many(): then its answer has the status 0 */
};

/*
 * A request; everything is borrowed until it has ended. The answer goes to
 *  - `dst`, when that is set: exactly the bytes [off, off + len) of an object. Checked:
 *    206 and its Content-Range, or 200 where that is the whole; the body's length; that
 *    the object has `size` bytes, where that is known; that it is the one with `etag`;
 *  - else to the answer's body, at most `max` bytes (0: 8 MiB; -EFBIG).
 */
struct http_request {
    const char *method; /* NULL: GET */
    const char *url;    /* absolute and encoded; user and password are refused */
    const char *what;   /* what messages call it, without secrets; NULL: the path */

    const char *const
        *headers; /* "Name: value", ends in NULL; or NULL. Go to any host */
    const struct http_auth *auth;
    void *auth_user;

    const void *body; /* bytes, or: */
    http_body_fn *body_at;
    void *body_user;
    uint64_t body_size;

    void *dst;
    uint64_t off;
    size_t len;
    /*
     * Of the object: 0, or its whole size; NULL, or the ETag as it was told (sent in If-Match
     * unless it is a weak one); 0, or Last-Modified, for what has no ETag and for answers
     * without one. Another one: -ESTALE. Bytes of which neither is told are not taken.
     */
    uint64_t size;
    const char *etag;
    time_t modified;

    size_t max;
    unsigned flags;      /* enum http_flags */
    unsigned deadline_s; /* 0: the engine's */
    unsigned stall_s;    /* the same */
};

/* Zero is ready; http_answer_release() frees what it got. */
struct http_answer {
    int status;
    unsigned tries;
    struct buf body;    /* with a NUL behind it, also when it is empty */
    struct buf headers; /* "name\0value\0...": ask http_answer_header() */
    uint64_t size;      /* of the whole object: Content-Range or Content-Length;
                           UINT64_MAX: not told */
    time_t modified;    /* Last-Modified; 0: not told */
};

/* The value of a header (any case) of the last answer, or NULL. */
const char *http_answer_header(const struct http_answer *a, const char *name);
void http_answer_release(struct http_answer *a);

/*
 * Does it, and tries again what may go better: connections that break or stall, names that
 * do not resolve, 408, 425, 429 and 5xx (after Retry-After, where that is in time), short
 * or wrong bodies, a clock that the server calls wrong (its own is taken then). Waits
 * double from 100 ms to 5 s, with chance in them. `a` may be NULL.
 *
 * -ENOENT: 404, 410. -EACCES: 401, 403. -ESTALE: the object is another one (412, 416, or
 * what it tells of itself). -EINTR: the caller's thread was interrupted (base/interrupt.h).
 * -ECANCELED: http_stop(). -EFBIG. -EREMOTEIO: all tries failed or the deadline is over
 * (while bytes move it begins anew). -EPROTO: an answer that no other try makes better.
 * The words name host, object, range, status and tries.
 */
int http_do(struct http *h, const struct http_request *r, struct http_answer *a,
            struct err *e);

/*
 * The same for n requests, in flight at once as far as hosts allow; `a` is NULL or n
 * answers. The first error (lowest i) ends the others.
 */
int http_do_many(struct http *h, const struct http_request *r, size_t n,
                 struct http_answer *a, struct err *e);

/*
 * The '@' behind the user and password of a URL, or NULL. In hf://NAME@REVISION it is the
 * revision's: there are only names, unless a colon says otherwise.
 */
const char *http_url_user(const char *url);

/* A URL as people may see it: without user, password, query and fragment. */
int http_url_shown(const char *url, struct buf *out);

/* Percent-encodes all but A-Z a-z 0-9 - . _ ~ and, with `slash`, "/". */
int http_encode(const char *text, bool slash, struct buf *out);

/* Percent-decodes; -EINVAL at a bad escape or NUL. */
int http_decode(const char *text, size_t len, struct buf *out);

/* "Sun, 06 Nov 1994 08:49:37 GMT" or ISO 8601, without a zone UTC; 0: neither. */
time_t http_date(const char *text);

#endif
