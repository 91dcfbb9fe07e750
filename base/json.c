/* SPDX-License-Identifier: MIT */
/* base/json.c - strict JSON: exact integers, no duplicates, limits; cJSON underneath. */
#include "base/json.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "base/err.h"
#include "base/json_lex.h"

enum {
    DEFAULT_BYTES = 100000000,
    DEFAULT_DEPTH = 64,
    DEFAULT_VALUES = 4000000,
    MARK_FLAG = 1 << 16, /* ours in cJSON's type, which uses the lowest ten bits */
};

const struct json_limits json_python = {.python = true};

/* Whole numbers up to here are exact as doubles. */
static const double integer_end = 9007199254740992.0;

/*
 * A `struct json` is a cJSON node. cJSON alone accepts too much (leading zeros, invalid
 * UTF-8, duplicates, trailing text) and forgets how a number was written, so it is only
 * given text that the lexer has passed; what fails then can only be memory.
 */
static const cJSON *node_of(const struct json *v)
{
    return (const cJSON *)(const void *)v;
}

static const struct json *value_of(const cJSON *node)
{
    return (const struct json *)(const void *)node;
}

static int lexer_init(struct json_lexer *l, const char *text, size_t len,
                      const struct json_limits *limits, struct err *e)
{
    size_t bytes = limits && limits->bytes ? limits->bytes : DEFAULT_BYTES;
    unsigned depth = limits && limits->depth ? limits->depth : DEFAULT_DEPTH;
    size_t values = limits && limits->values ? limits->values : DEFAULT_VALUES;

    if (len > bytes)
        return err_set(e, EBADMSG, "JSON of %zu bytes, more than the limit of %zu", len,
                       bytes);
    l->text = text;
    l->len = len;
    l->max_depth = MIN(depth, (unsigned)JSON_MAX_DEPTH);
    l->max_values = values;
    l->nul_in_values = limits && limits->nul_ok;
    l->python = limits && limits->python;
    return 0;
}

static void mark_scalar(cJSON *node, enum json_mark mark)
{
    if (mark == MARK_NOT_FINITE)
        node->valuedouble = (double)NAN;
    else if (mark == MARK_SPECIAL)
        node->type |= MARK_FLAG;
}

/*
 * Flags the numbers that the lexer saw to be integers and the strings that hold NUL, in
 * document order.
 */
static void mark_scalars(cJSON *root, const char *marks)
{
    cJSON *parents[JSON_MAX_DEPTH], *node = root;
    size_t depth = 0, n = 0;

    while (node) {
        int type = node->type & 0xff;

        if (type == cJSON_Number || type == cJSON_String)
            mark_scalar(node, (enum json_mark)marks[n++]);
        if (node->child) {
            parents[depth++] = node;
            node = node->child;
            continue;
        }
        while (!node->next && depth > 0)
            node = parents[--depth];
        node = node->next; /* NULL behind the root */
    }
}

/* cJSON knows no NaN: it gets a 0 and blanks there, and the mark says what it was. */
static char *without_words(const struct json_lexer *l, size_t start)
{
    char *copy = malloc(l->pos - start);
    size_t at, n;

    if (!copy)
        return NULL;
    memcpy(copy, l->text + start, l->pos - start);
    for (size_t i = 0; i < l->words.len; i += sizeof at) {
        memcpy(&at, l->words.data + i, sizeof at);
        n = json_not_finite(l->text + at, l->len - at);
        memset(copy + (at - start), ' ', n);
        copy[at - start] = '0';
    }
    return copy;
}

/* The tree of text[start..l->pos), which the lexer has passed, or NULL: no memory. */
static cJSON *build(const struct json_lexer *l, size_t start)
{
    CLEANUP_FREE char *copy = l->words.len > 0 ? without_words(l, start) : NULL;
    cJSON *root;

    if (l->words.len > 0 && !copy)
        return NULL;
    root = cJSON_ParseWithLengthOpts(copy ? copy : l->text + start, l->pos - start,
                                     NULL, false);
    if (root)
        mark_scalars(root, l->marks.data);
    return root;
}

int json_parse(const char *text, size_t len, const struct json_limits *limits,
               struct json **out, struct err *e)
{
    CLEANUP(json_lexer_release) struct json_lexer l = {0};
    int rc = lexer_init(&l, text, len, limits, e);
    cJSON *root;

    if (rc == 0)
        rc = json_lex_value(&l, e);
    if (rc == 0)
        rc = json_lex_end(&l, e);
    if (rc < 0)
        return rc;
    root = build(&l, 0);
    if (!root)
        return err_nomem(e);
    *out = (struct json *)(void *)root;
    return 0;
}

void json_free(struct json *doc)
{
    cJSON_Delete((cJSON *)(void *)doc);
}

void json_freep(struct json **doc)
{
    json_free(*doc);
    *doc = NULL;
}

/* Gives the member whose key was just read to the caller's function. */
static int give_member(struct json_lexer *l, struct buf *name, json_member_fn *fn,
                       void *user, struct err *e)
{
    struct buf spare = *name;
    size_t start = l->pos;
    cJSON *value;
    int rc;

    *name = l->key; /* out of the way of the keys within the value */
    l->key = spare;
    l->values = 0;
    buf_clear(&l->marks);
    buf_clear(&l->words);
    TRY(json_lex_value(l, e));
    value = build(l, start);
    if (!value)
        return err_nomem(e);
    rc = fn(user, name->data, name->len, value_of(value), e);
    cJSON_Delete(value);
    return rc;
}

/* All members of the object that must stand here. JSON_ENDED, or what stopped it. */
static int give_members(struct json_lexer *l, json_member_fn *fn, void *user,
                        struct err *e)
{
    CLEANUP(buf_release) struct buf name = {0};
    int rc = json_lex_enter_object(l, e);

    while (rc == JSON_VALUE) {
        rc = give_member(l, &name, fn, user, e);
        if (rc != 0)
            return rc;
        rc = json_lex_next(l, e);
    }
    return rc;
}

int json_each_member(const char *text, size_t len, const struct json_limits *limits,
                     json_member_fn *fn, void *user, struct err *e)
{
    CLEANUP(json_lexer_release) struct json_lexer l = {.nul_in_top_keys = true};
    int rc = lexer_init(&l, text, len, limits, e);

    if (rc == 0)
        rc = give_members(&l, fn, user, e);
    return rc == 0 ? json_lex_end(&l, e) : rc;
}

static bool key_is(const struct json_lexer *l, const char *text)
{
    return l->key.len == strlen(text) && memcmp(l->key.data, text, l->key.len) == 0;
}

int json_each_member_of(const char *text, size_t len, const struct json_limits *limits,
                        const char *member, json_member_fn *fn, void *user,
                        struct err *e)
{
    CLEANUP(json_lexer_release) struct json_lexer l = {0};
    int rc = lexer_init(&l, text, len, limits, e);
    bool found = false;

    if (rc == 0)
        rc = json_lex_enter_object(&l, e);
    while (rc == JSON_VALUE) {
        bool wanted = key_is(&l, member);

        found |= wanted;
        l.values = 0;
        rc = wanted ? give_members(&l, fn, user, e) : json_lex_value(&l, e);
        if (rc == 0)
            rc = json_lex_next(&l, e);
    }
    if (rc == 0)
        rc = json_lex_end(&l, e);
    if (rc == 0 && !found)
        rc = err_set(e, EBADMSG, "there is no member \"%s\"", member);
    return rc;
}

enum json_kind json_kind(const struct json *v)
{
    switch (node_of(v)->type & 0xff) {
    case cJSON_True:
    case cJSON_False:
        return JSON_BOOL;
    case cJSON_Number:
        return JSON_NUMBER;
    case cJSON_String:
        return JSON_STRING;
    case cJSON_Array:
        return JSON_ARRAY;
    case cJSON_Object:
        return JSON_OBJECT;
    default:
        return JSON_NULL;
    }
}

static bool is_kind(const struct json *v, enum json_kind kind)
{
    return v && json_kind(v) == kind;
}

const struct json *json_get(const struct json *v, const char *key)
{
    if (!is_kind(v, JSON_OBJECT))
        return NULL;
    return value_of(cJSON_GetObjectItemCaseSensitive(node_of(v), key));
}

const struct json *json_first(const struct json *v)
{
    return v ? value_of(node_of(v)->child) : NULL;
}

const struct json *json_next(const struct json *v)
{
    return v ? value_of(node_of(v)->next) : NULL;
}

const char *json_key(const struct json *v)
{
    return v ? node_of(v)->string : NULL;
}

size_t json_count(const struct json *v)
{
    size_t n = 0;

    for (v = json_first(v); v; v = json_next(v))
        n++;
    return n;
}

bool json_string(const struct json *v, const char **out)
{
    if (!is_kind(v, JSON_STRING) || (node_of(v)->type & MARK_FLAG))
        return false;
    *out = node_of(v)->valuestring;
    return true;
}

bool json_bool(const struct json *v, bool *out)
{
    if (!is_kind(v, JSON_BOOL))
        return false;
    *out = cJSON_IsTrue(node_of(v));
    return true;
}

bool json_double(const struct json *v, double *out)
{
    if (!is_kind(v, JSON_NUMBER) || !isfinite(node_of(v)->valuedouble))
        return false;
    *out = node_of(v)->valuedouble;
    return true;
}

/* A number written as an integer that a double holds exactly. */
static bool exact_integer(const struct json *v, double *out)
{
    return json_double(v, out) && (node_of(v)->type & MARK_FLAG) &&
           fabs(*out) < integer_end;
}

bool json_u64(const struct json *v, uint64_t *out)
{
    double d;

    if (!exact_integer(v, &d) || signbit(d)) /* "-0" too is no count */
        return false;
    *out = (uint64_t)d;
    return true;
}

bool json_i64(const struct json *v, int64_t *out)
{
    double d;

    if (!exact_integer(v, &d))
        return false;
    *out = (int64_t)d;
    return true;
}
