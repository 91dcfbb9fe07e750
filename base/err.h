/* SPDX-License-Identifier: MIT */
/* base/err.h - an error: an errno value and a message that grows outward. */
#ifndef UFS_BASE_ERR_H
#define UFS_BASE_ERR_H

#include "base/base.h"

/*
 * A plain value: `struct err e = {0};` is ready, nothing needs to be freed. The message
 * reads outermost first, "WHAT: WHY"; the hint says what the user can do about it.
 * Text that does not fit is cut, never overflows.
 */
struct err {
    int code; /* positive errno, 0: no error */
    unsigned
        cause_len; /* the end of the text that err_set() gave: without the places */
    char text[1024];
    char hint[256];
};

/* Sets code and message (replacing what was there). Returns -code. */
int err_set(struct err *e, int code, const char *fmt, ...) PRINTF(3, 4);

/* What err_set() was given, without the places that were put before it. */
const char *err_cause(const struct err *e);

/* Takes over an error that was kept, or that a copy was made of. Returns -from->code. */
int err_copy(struct err *e, const struct err *from);

/*
 * Ends the function with what `call` returns, where that is an error. The errno is the return
 * value: nobody reads it out of `struct err`, which has the words.
 */
#define TRY(call)                                                                      \
    do {                                                                               \
        int try_rc = (call);                                                           \
                                                                                       \
        if (try_rc < 0)                                                                \
            return try_rc;                                                             \
    } while (0)

/* Puts "place: " in front of the message, once. Returns -e->code. */
int err_wrap(struct err *e, const char *fmt, ...) PRINTF(2, 3);

/* What the user should do. Returns -e->code. */
int err_hint(struct err *e, const char *fmt, ...) PRINTF(2, 3);

/* err_set with "out of memory". Returns -ENOMEM. */
int err_nomem(struct err *e);

/*
 * The one-line form "TEXT (HINT)" with control bytes and invalid UTF-8 as %XX, for
 * terminals and logs. Always ends in NUL. Returns dst.
 */
const char *err_line(const struct err *e, char *dst, size_t size);

/* The errno that a reader of a file gets: damage and missing shards become EIO. */
int err_for_reader(const struct err *e);

#endif
