/* SPDX-License-Identifier: MIT */
/* index/map/pattern.h - patterns of keys with captures, and templates that use them. */
#ifndef UFS_INDEX_MAP_PATTERN_H
#define UFS_INDEX_MAP_PATTERN_H

#include "base/base.h"
#include "base/buf.h"

struct err;

enum { CAPTURES_MAX = 8 };

/*
 * What a match has bound: pieces of the key by name, and numbers that were bound by
 * other means (the index along an axis that is taken apart). Texts are borrowed.
 */
struct captures {
    unsigned count;
    struct capture {
        const char *name;
        size_t name_len;
        const char *text; /* NULL: the number */
        size_t len;
        uint64_t number;
    } at[CAPTURES_MAX];
};

/*
 * A pattern is literal text with {name} for one dotted part (one byte or more, no dot) and
 * {name...} for the rest of the key, dots included, which must stand last. Checks it:
 * -EINVAL.
 */
int pattern_check(const char *pattern, struct err *e);

/* Does the whole key match? Fills `out` when it does. The pattern was checked. */
bool pattern_match(const char *pattern, const char *key, size_t len,
                   struct captures *out);

/* A template is a pattern whose names may stand anywhere. Checks it: -EINVAL. */
int template_check(const char *text, struct err *e);

/* Is it one that braces may hold: letters, digits and '_', no digit first? */
bool pattern_is_name(const char *name);

/*
 * The next name of a pattern or template that was checked, from *at on, which moves
 * behind it; false: there is no further one.
 */
bool pattern_next_name(const char **at, const char **name, size_t *len);

/* Does the pattern have this name? */
bool pattern_has(const char *pattern, const char *name, size_t len);

const struct capture *capture_find(const struct captures *c, const char *name,
                                   size_t len);
/* The number that it is: decimal digits without more; false otherwise. */
bool capture_number(const struct capture *c, uint64_t *out);
/* -EINVAL: more than CAPTURES_MAX. */
int capture_bind(struct captures *c, const char *name, uint64_t number, struct err *e);

/*
 * Writes a template: literal text with {name} for what was bound. -EINVAL names one that
 * was not.
 */
int template_write(const char *text, const struct captures *c, struct buf *out,
                   struct err *e);

#endif
