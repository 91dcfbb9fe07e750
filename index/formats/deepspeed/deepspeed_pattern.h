/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_pattern.h - patterns on the names of parameters. */
#ifndef UFS_INDEX_FORMATS_DEEPSPEED_DEEPSPEED_PATTERN_H
#define UFS_INDEX_FORMATS_DEEPSPEED_DEEPSPEED_PATTERN_H

#include "base/base.h"

struct arena;
struct err;

/*
 * Training scripts write regular expressions for Python's re.match(). Those of all known
 * writers are of this small set, and no others are taken: characters, ".", "\d", a
 * backslash before a character that is no letter or digit, each with "+", "*" or "?" or
 * nothing behind it, "^" at the beginning and "$" at the end. As with re.match() the rest of
 * the name is free unless there is a "$".
 */
struct ds_pattern {
    const char *text; /* as written; len bytes */
    size_t len;
    struct ds_pattern_step *step; /* nsteps of them */
    uint32_t nsteps;
    uint32_t number; /* the caller's */
    bool to_end;     /* "$" */
    bool exact;      /* one name only: `name`, nsteps bytes */
    bool used;       /* ds_pattern_matches() said yes once */
    const char *name;
};

/*
 * Takes a pattern apart, into memory of the arena; `text` is kept. -ENOTSUP: it has what is
 * not of the set, or is longer than 512 bytes.
 */
int ds_pattern_parse(struct arena *a, const char *text, size_t len,
                     struct ds_pattern *out, struct err *e);

/*
 * Does it match the name, of ASCII characters but control characters? `effort` grows by the
 * steps that took, at most name_len times the pattern's.
 */
bool ds_pattern_matches(struct ds_pattern *p, const char *name, size_t name_len,
                        uint64_t *effort);

/* Patterns of one kind. */
struct ds_patterns {
    struct ds_pattern *pattern; /* exact ones first, by their names */
    size_t count, exact;
};

/* Sorts them. */
void ds_patterns_begin(struct ds_patterns *s);

/* How many match (2: two or more); *first is one of them. */
unsigned ds_patterns_find(struct ds_patterns *s, const char *name, size_t len,
                          uint64_t *effort, struct ds_pattern **first);

#endif
