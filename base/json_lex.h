/* SPDX-License-Identifier: MIT */
/* base/json_lex.h - checks the text of a JSON value before cJSON sees it. */
#ifndef UFS_BASE_JSON_LEX_H
#define UFS_BASE_JSON_LEX_H

#include "base/base.h"
#include "base/buf.h"
#include "base/keyset.h"

struct err;

/* MARK_SPECIAL: a number of only digits, or a string that holds NUL. */
enum json_mark { MARK_NONE, MARK_SPECIAL, MARK_NOT_FINITE };

enum {
    JSON_MAX_DEPTH = 512, /* half of what cJSON, which recurses, allows */
    JSON_MAX_NUMBER = 63, /* characters; cJSON would cut the rest off */
};

/*
 * Reads text[0..len) from `pos` on. Fill in the first group; all else is zero at the
 * start. Objects remember their keys by depth, so siblings share one set.
 */
struct json_lexer {
    const char *text;
    size_t len;
    unsigned max_depth; /* at most JSON_MAX_DEPTH */
    size_t max_values;
    bool nul_in_top_keys; /* the keys of the outermost object may hold NUL */
    bool nul_in_values;   /* strings that are values may */
    bool python;          /* NaN, Infinity and -Infinity are numbers */

    size_t pos;
    size_t values; /* seen so far */
    /* One byte per scalar, in order: enum json_mark. */
    struct buf marks;
    struct buf words; /* where NaN and its like begin: a size_t for each, in order */
    bool saw_nul;     /* the last string holds one */
    struct buf key;   /* the last key, decoded */
    unsigned depth;
    struct json_level {
        bool object;
        struct keyset keys;
    } levels[JSON_MAX_DEPTH];
};

void json_lexer_release(struct json_lexer *l);

/* -EBADMSG with the offset and `why`. */
int json_lex_fail(const struct json_lexer *l, size_t pos, const char *why,
                  struct err *e);

/* What the steps return beside -EBADMSG and -ENOMEM. */
enum json_step {
    JSON_ENDED, /* a value (or the container) ended here */
    JSON_VALUE, /* a value must follow; in an object its key is in l->key */
};

/* Enters the object that must stand here: JSON_ENDED if it is empty. */
int json_lex_enter_object(struct json_lexer *l, struct err *e);

/* Behind a member or element: on to the next one, or out of the container. */
int json_lex_next(struct json_lexer *l, struct err *e);

/* One whole value. */
int json_lex_value(struct json_lexer *l, struct err *e);

void json_lex_blanks(struct json_lexer *l);

/* The length of NaN, Infinity or -Infinity, if one stands here; else 0. */
size_t json_not_finite(const char *text, size_t len);

/* Nothing but blanks may be left. */
int json_lex_end(struct json_lexer *l, struct err *e);

#endif
