/* SPDX-License-Identifier: MIT */
/* index/map/scope.c - looks names up: captures, variables, config.json. */
#include "index/map/scope.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/map/expr.h"

/* Variables name others three deep or so; one that names itself comes here. */
enum {
    VARIABLE_DEPTH = 16,
    VARIABLES_MAX = 10000, /* of one number: each may name others many times */
    NAME_MAX_BYTES = 200,
};

static bool is_called(const char *name, size_t len, const char *what)
{
    return strlen(what) == len && memcmp(name, what, len) == 0;
}

static int lookup(void *user, const char *name, size_t len, int64_t *out,
                  struct err *e);

/* The first choice that has a value; what is wrong in another way stops. */
static int variable_value(struct scope *s, const struct map_variable *v, int64_t *out,
                          struct err *e)
{
    int ret = -ENOENT;

    if (s->depth == VARIABLE_DEPTH)
        return err_set(e, EINVAL, "variable %s is made of itself", v->name);
    if (s->looked_up++ == VARIABLES_MAX)
        return err_set(e, EINVAL, "variable %s is made of more than %d others", v->name,
                       VARIABLES_MAX);
    s->depth++;
    for (size_t i = 0; ret == -ENOENT && i < v->nchoice; i++) {
        *e = (struct err){0};
        ret = expr_eval(v->choice[i], lookup, s, out, e);
    }
    s->depth--;
    return ret < 0 ? err_wrap(e, "%s", v->name) : 0;
}

static bool is_of_config(const char *name, size_t len)
{
    return len > 7 && memcmp(name, "config.", 7) == 0;
}

static bool is_of_source(const char *name, size_t len)
{
    return len > 7 && memcmp(name, "source.", 7) == 0;
}

/*
 * "config.a.b" in config.json, "source.a" in the settings; NULL: there is no such
 * member. The name is not too long.
 */
static const struct json *member(const struct scope *s, const char *name, size_t len)
{
    const struct json *v = is_of_config(name, len) ? s->config : s->source;
    char path[NAME_MAX_BYTES], *rest = path, *part;

    memcpy(path, name, len);
    path[len] = '\0';
    strsep(&rest, "."); /* "config" */
    while (v && (part = strsep(&rest, ".")))
        v = json_get(v, part);
    return v;
}

static int no_value(const struct scope *s, const char *name, size_t len, struct err *e)
{
    if (is_of_source(name, len))
        return err_set(e, ENOENT, "the checkpoint does not tell %.*s", (int)len, name);
    if (s->config)
        return err_set(e, ENOENT, "config.json has no %.*s", (int)len - 7, name + 7);
    err_set(e, ENOENT, "%.*s: there is no config.json", (int)len, name);
    return err_hint(e, "give one with -o hf=DIR");
}

static int member_value(const struct scope *s, const char *name, size_t len,
                        int64_t *out, struct err *e)
{
    const struct json *v;
    bool flag;

    if (len >= NAME_MAX_BYTES)
        return err_set(e, EINVAL, "%.40s...: too long", name);
    v = member(s, name, len);
    if (json_bool(v, &flag))
        *out = flag;
    else if (!v || json_kind(v) == JSON_NULL)
        return no_value(s, name, len, e);
    else if (!json_i64(v, out))
        return err_set(e, EINVAL, "%s: %.*s is no whole number",
                       is_of_config(name, len) ? "config.json" : "the checkpoint",
                       (int)len - 7, name + 7);
    return 0;
}

static int lookup(void *user, const char *name, size_t len, int64_t *out, struct err *e)
{
    struct scope *s = user;
    const struct capture *c;
    uint64_t n = s->dim;

    if (is_of_config(name, len) || is_of_source(name, len))
        return member_value(s, name, len, out, e);
    c = s->captures ? capture_find(s->captures, name, len) : NULL;
    if (is_called(name, len, "dim") || (c && capture_number(c, &n))) {
        if (n > INT64_MAX)
            return err_set(e, ERANGE, "%.*s passes 2^63", (int)len, name);
        *out = (int64_t)n;
        return 0;
    }
    for (size_t i = 0; i < s->map->nvariable; i++)
        if (is_called(name, len, s->map->variable[i].name))
            return variable_value(s, &s->map->variable[i], out, e);
    return -ENOENT;
}

int scope_count(struct scope *s, const char *text, uint64_t absent, uint64_t *out,
                struct err *e)
{
    int64_t n;
    int ret;

    *out = absent;
    if (!text)
        return 0;
    ret = expr_eval(text, lookup, s, &n, e);
    if (ret == 0 && n < 0)
        ret = err_set(e, EINVAL, "\"%s\" is %" PRId64, text, n);
    *out = (uint64_t)n;
    return ret;
}

int scope_number(struct scope *s, const char *text, int64_t *out, struct err *e)
{
    return expr_eval(text, lookup, s, out, e);
}

const char *scope_text(const struct scope *s, const char *name)
{
    size_t len = strlen(name);
    const char *text;

    return len < NAME_MAX_BYTES && json_string(member(s, name, len), &text) ? text
                                                                            : NULL;
}

bool scope_has_text(const struct scope *s, const struct map_text *t)
{
    const char *text = scope_text(s, t->name);

    if (!text)
        return t->or_none;
    for (size_t i = 0; i < t->nchoice; i++)
        if (strcmp(text, t->choice[i]) == 0)
            return true;
    return false;
}
