/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_json.c - any text: both JSON readers survive it and agree. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

/* Every getter on one value, and what must hold between them. */
static void check_value(const struct json *v, bool nul_ok, const struct err *e)
{
    const char *text;
    uint64_t u;
    int64_t i;
    double d;
    bool b;

    if (json_u64(v, &u))
        require(json_i64(v, &i) && (uint64_t)i == u && u < (uint64_t)1 << 53, "u64", e);
    if (json_i64(v, &i))
        require(json_double(v, &d) && (int64_t)d == i, "i64", e);
    if (json_string(v, &text))
        require(json_kind(v) == JSON_STRING, "string", e);
    else
        require(json_kind(v) != JSON_STRING || nul_ok, "no string", e);
    require(json_bool(v, &b) == (json_kind(v) == JSON_BOOL), "bool", e);
}

/* The values of the top two levels. */
static void check_tree(const struct json *doc, bool nul_ok, const struct err *e)
{
    check_value(doc, nul_ok, e);
    for (const struct json *v = json_first(doc); v; v = json_next(v)) {
        check_value(v, nul_ok, e);
        require(!!json_key(v) == (json_kind(doc) == JSON_OBJECT), "key", e);
        for (const struct json *w = json_first(v); w; w = json_next(w))
            check_value(w, nul_ok, e);
    }
}

struct member_count {
    size_t seen;
    const struct json *next; /* of the tree, when there is one */
    bool nul_ok;
    bool nul; /* a name had one */
};

static int count_member(void *user, const char *key, size_t key_len,
                        const struct json *value, struct err *e)
{
    struct member_count *c = user;

    require(key[key_len] == '\0', "key without its NUL", e);
    check_tree(value, c->nul_ok, e);
    c->nul = c->nul || strlen(key) != key_len;
    if (c->next) {
        require(strcmp(key, json_key(c->next)) == 0, "keys differ", e);
        require(json_kind(value) == json_kind(c->next), "kinds differ", e);
        c->next = json_next(c->next);
    }
    c->seen++;
    return 0;
}

static void check_text(const char *text, size_t size, bool nul_ok)
{
    const struct json_limits limits = {.nul_ok = nul_ok, .python = nul_ok};
    struct member_count count = {.nul_ok = nul_ok};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err e = {0};
    int parsed = json_parse(text, size, &limits, &doc, &e), walked;

    /* -ENOMEM would be text that the lexer passes and cJSON refuses. */
    require(parsed == 0 || parsed == -EBADMSG, "json_parse", &e);
    if (parsed == 0) {
        check_tree(doc, nul_ok, &e);
        count.next = json_first(doc);
    }
    walked = json_each_member(text, size, &limits, count_member, &count, &e);
    require(walked == 0 || walked == -EBADMSG, "json_each_member", &e);
    if (parsed == 0)
        require((walked == 0) == (json_kind(doc) == JSON_OBJECT) &&
                    (walked != 0 || count.seen == json_count(doc)),
                "readers differ", &e);
    else
        require(walked != 0 || count.nul, "only NUL in a name may make them differ",
                &e);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE char *text = malloc(size ? size : 1); /* no byte more than there is */

    if (!text)
        return 0;
    if (size > 0)
        memcpy(text, data, size);
    check_text(text, size, false);
    check_text(text, size, true);
    return 0;
}
