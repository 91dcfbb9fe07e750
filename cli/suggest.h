/* SPDX-License-Identifier: MIT */
/* cli/suggest.h - which of the names that there are a mistyped one may have meant. */
#ifndef UFS_CLI_SUGGEST_H
#define UFS_CLI_SUGGEST_H

#include "base/base.h"

enum { SUGGEST_MAX = 255 }; /* bytes of a name that is compared */

/*
 * The nearest name so far. A name that has the wanted one in it as a whole part comes
 * before one that is spelled like it.
 */
struct suggestion {
    const char *wanted; /* borrowed */
    size_t len;
    unsigned limit;    /* farther is no typing mistake */
    unsigned distance; /* of the best; limit + 1: none */
    char best[SUGGEST_MAX + 1];
};

void suggest_begin(struct suggestion *s, const char *wanted, size_t len);
void suggest_try(struct suggestion *s, const char *name, size_t len);

/* The nearest name, or NULL when none is near. Valid as long as s. */
const char *suggest_found(const struct suggestion *s);

/*
 * Letters to change, add, drop or swap with their neighbour to make b of a; limit + 1 when
 * they are more than limit.
 */
unsigned suggest_distance(const char *a, size_t alen, const char *b, size_t blen,
                          unsigned limit);

#endif
