/* SPDX-License-Identifier: MIT */
/* base/json.h - strict JSON: exact integers, no duplicates, limits; cJSON underneath. */
#ifndef UFS_BASE_JSON_H
#define UFS_BASE_JSON_H

#include "base/base.h"

struct err;

/* A parsed value. Borrowed from its document, valid until json_free() of that. */
struct json;

enum json_kind {
    JSON_NULL,
    JSON_BOOL,
    JSON_NUMBER,
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT
};

/* Ceilings; 0 takes the default. */
struct json_limits {
    size_t bytes;   /* 100,000,000: the limit of a safetensors header */
    unsigned depth; /* 64; never more than 512 */
    size_t values;  /* 4,000,000 in one tree: 2 bytes of text can cost 80 of memory */
    bool nul_ok;    /* a value that holds NUL is no error; json_string() refuses it */
    /* NaN, Infinity and -Infinity are numbers that json_double() gives no value of */
    bool python;
};

/* What Python's json module writes and reads: config.json and all files like it. */
extern const struct json_limits json_python;

/*
 * Parses exactly one JSON value with nothing but blanks round it. Refused, with the byte
 * offset in the message: what RFC 8259 does not allow (leading zeros, comments,
 * trailing text, NUL, and NaN but for `python`), invalid UTF-8 (overlong, surrogates, lone surrogate escapes),
 * a member twice in one object (compared after decoding), a string that holds NUL
 * (which cJSON would cut), a number of more than 63 characters, and what passes a limit.
 * -EBADMSG, -ENOMEM.
 */
int json_parse(const char *text, size_t len, const struct json_limits *limits,
               struct json **out, struct err *e);

void json_free(struct json *doc);
void json_freep(struct json **doc);

/*
 * The same for an object too large to hold as a tree: calls fn for each member in file
 * order with the decoded key (which may hold NUL) and its value, valid during the call.
 * Memory is that of one member and of the key hashes. Stops when fn returns non-zero
 * and returns that. A fault further on is found only after fn has seen what stands before
 * it: what fn made is worth nothing unless 0 comes back. A NUL stands behind the key.
 */
typedef int json_member_fn(void *user, const char *key, size_t key_len,
                           const struct json *value, struct err *e);
int json_each_member(const char *text, size_t len, const struct json_limits *limits,
                     json_member_fn *fn, void *user, struct err *e);

/*
 * The same for an object in which one member holds nearly all: fn sees the members of
 * that one, which must be an object and be there (-EBADMSG); the others are only checked.
 */
int json_each_member_of(const char *text, size_t len, const struct json_limits *limits,
                        const char *member, json_member_fn *fn, void *user,
                        struct err *e);

enum json_kind json_kind(const struct json *v);

/* The member of that name, or NULL (also when v is NULL or no object). */
const struct json *json_get(const struct json *v, const char *key);

/* First child of an array or object and the next one; NULL at the end. */
const struct json *json_first(const struct json *v);
const struct json *json_next(const struct json *v);

/* The member's name of a child of an object. */
const char *json_key(const struct json *v);

size_t json_count(const struct json *v);

/*
 * True and the value, or false when v is NULL, of another kind, not finite (1e400) or a
 * string that holds NUL.
 */
bool json_string(const struct json *v, const char **out);
bool json_bool(const struct json *v, bool *out);
bool json_double(const struct json *v, double *out);

/* Integers only: no fraction or exponent in the text, 0 <= v < 2^53 (doubles are exact). */
bool json_u64(const struct json *v, uint64_t *out);
bool json_i64(const struct json *v, int64_t *out);

#endif
