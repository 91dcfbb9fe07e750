/* SPDX-License-Identifier: MIT */
/* remote/http_call.h - one request with its tries: what http*.c share. */
#ifndef UFS_REMOTE_HTTP_CALL_H
#define UFS_REMOTE_HTTP_CALL_H

#include <stdatomic.h>

#include "base/err.h"
#include "remote/http_wire.h"

enum { SKEWS = 16, REFUSALS_MAX = 2, HOPS_MAX = 5 };

struct http {
    struct http_options options;
    struct wire *wire;
    atomic_bool stopped;
    atomic_uint_least64_t retries;
    pthread_mutex_t lock;
    struct skew {
        char *origin;
        time_t seconds; /* its clock is ahead of ours by so much */
    } skew[SKEWS];      /* guarded by lock */
};

enum call_state { CALL_WAITS, CALL_FLIES, CALL_ENDED };

struct call {
    struct http *h;
    const struct http_request *r;
    struct http_answer *a; /* the caller's, or: */
    struct http_answer own;
    size_t index; /* in the caller's array */
    struct wire_try t;
    enum call_state state;
    char *url, *origin; /* as of now: a redirection changes them */
    bool foreign;       /* of another host than was asked: no authorization */
    bool skewed;        /* the clock was set by this request already */
    bool too_late;
    unsigned tries, refusals, hops;
    int64_t begun, at, deadline; /* monotonic ns; at: of the next try */
    int64_t allowed_ns;
    uint64_t seen;   /* bytes of this try that had moved when it was looked at last, */
    int64_t seen_ns; /* which was then */
    uint64_t moved;  /* bytes of this try when they were seen to grow last, */
    int64_t moved_ns;
    bool stalled;
    int status; /* the last one seen; 0: none */
    /* What begin() found wrong: 0, or the errno (EREMOTEIO: worth another try). */
    int wrong;
    char why[200];    /* of the last failure */
    const char *todo; /* about it; NULL: nothing is known that helps */
    int rc;
    struct err err;
};

int64_t http_clock(void);

/* The try has ended: sets state, and at or rc and err. On the caller's thread. */
void call_judge(struct call *c);

/* wire_try.begin: looks at the headers and says where the body goes. */
bool call_begin(struct wire_try *t);

/* Ends the call with this code; the words are put together from what is known of it. */
void call_fail(struct call *c, int code);

/* The seconds that a server's clock is ahead of ours. */
time_t http_skew_get(struct http *h, const char *origin);
void http_skew_set(struct http *h, const char *origin, time_t seconds);

#endif
