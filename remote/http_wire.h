/* SPDX-License-Identifier: MIT */
/* remote/http_wire.h - single tries of requests on the wire: libcurl on its own thread. */
#ifndef UFS_REMOTE_HTTP_WIRE_H
#define UFS_REMOTE_HTTP_WIRE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"
#include "base/buf.h"
#include "remote/http.h"

struct wire;
struct wire_slot;

/* Who waits for tries to end. */
struct wire_waiter {
    pthread_cond_t ended; /* with the wire's lock */
};

enum wire_end {
    WIRE_DONE,       /* an answer came, whole */
    WIRE_ABORTED,    /* wire_abort() */
    WIRE_UNRESOLVED, /* the name has no address now */
    WIRE_UNREACHED,  /* no connection */
    WIRE_BROKEN,     /* the connection went, or the answer was cut short or no HTTP */
    WIRE_STALLED,
    WIRE_UNTRUSTED, /* TLS: no other try will be better */
    WIRE_UNWANTED,  /* begin() or the room for the body said no */
    WIRE_FAILED,    /* on our side: out of memory, a URL that is none */
};

enum { WIRE_ERROR_SIZE = 256, WIRE_HEADERS_MAX = 64 << 10, WIRE_ERROR_BODY = 64 << 10 };

/*
 * One try. The upper part is set by who starts it and borrowed until it has ended; the lower
 * part belongs to the wire's thread until then.
 */
struct wire_try {
    const struct http_request *request;
    const char *url;
    struct http_header_list *headers;
    struct wire_waiter *waiter;
    unsigned stall_s;
    /*
     * On the wire's thread, once the headers are there: says where the body goes, `to` and
     * `room`, or (to NULL) `body` up to `room` bytes. False: it is not wanted.
     */
    bool (*begin)(struct wire_try *t);

    int status;
    struct buf head; /* as http_answer has them */
    struct buf body;
    unsigned char *to;
    uint64_t room, got;
    uint64_t sent; /* of the request's body */
    /* Anybody may look: bytes so far, both ways, and when it began (0: its host has enough). */
    atomic_uint_fast64_t moved;
    atomic_int_fast64_t flew_ns;
    bool begun, too_long;
    enum wire_end end;
    char error[WIRE_ERROR_SIZE];

    bool flying, abort;     /* guarded by the wire's lock */
    struct wire_try *next;  /* the same */
    struct wire_slot *slot; /* NULL: not begun yet */
};

int wire_new(const struct http_options *options, struct wire **out, struct err *e);
void wire_free(struct wire *w); /* nothing flies any more. NULL is fine */

int wire_waiter_init(struct wire_waiter *waiter);
void wire_waiter_destroy(struct wire_waiter *waiter);

/* Any thread. */
void wire_start(struct wire *w, struct wire_try *t);
void wire_abort(struct wire *w, struct wire_try *t);
bool wire_flies(struct wire *w, struct wire_try *t);

/* When the last byte of any try moved (monotonic ns). */
int64_t wire_moved(struct wire *w);

/*
 * Until one of these tries, all of this waiter, has ended, or the (monotonic) time has
 * come; may return early.
 */
void wire_wait(struct wire *w, struct wire_waiter *waiter, struct wire_try *const *of,
               size_t n, int64_t until_ns);

/*
 * Puts a line as it came, "Name: value\r\n", on the list of an answer's headers; a status
 * line begins the list anew (100 Continue), a line that says nothing is left out. -ENOMEM, or
 * -EFBIG beyond head->max.
 */
int wire_header_line(struct buf *head, const char *line, size_t len);

/* The answer's header in such a list, or NULL. */
const char *wire_header(const struct buf *head, const char *name);

/* "name: value"; a name that is there is replaced. -ENOMEM, -EINVAL. */
int wire_header_add(struct http_header_list **list, const char *line);
void wire_header_free(struct http_header_list *list); /* NULL is fine */

/* Scheme, host and port of a URL as one text ("https://host:443"); malloc'd or NULL. */
char *wire_origin(const char *url, bool *secure, bool *secrets);

/* Where a redirection leads: malloc'd, or NULL when that is nothing we follow. */
char *wire_redirect(const char *url, const char *location);

#endif
