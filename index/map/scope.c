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

/* "config.a.b" in config.json; NULL: there is no such member. The name is not too long. */
static const struct json *config_member(const struct json *config, const char *name,
                                        size_t len)
{
    char path[NAME_MAX_BYTES], *rest = path, *part;

    memcpy(path, name, len);
    path[len] = '\0';
    strsep(&rest, "."); /* "config" */
    while ((part = strsep(&rest, ".")))
        config = json_get(config, part);
    return config;
}

static int config_value(const struct scope *s, const char *name, size_t len,
                        int64_t *out, struct err *e)
{
    const struct json *v = s->config;
    bool flag;

    if (!v) {
        err_set(e, ENOENT, "%.*s: there is no config.json", (int)len, name);
        return err_hint(e, "give one with -o hf=DIR");
    }
    if (len >= NAME_MAX_BYTES)
        return err_set(e, EINVAL, "config.%.40s...: too long", name);
    v = config_member(v, name, len);
    if (json_bool(v, &flag))
        *out = flag;
    else if (!v || json_kind(v) == JSON_NULL)
        return err_set(e, ENOENT, "config.json has no %.*s", (int)len - 7, name + 7);
    else if (!json_i64(v, out))
        return err_set(e, EINVAL, "config.json: %.*s is no whole number", (int)len - 7,
                       name + 7);
    return 0;
}

static int lookup(void *user, const char *name, size_t len, int64_t *out, struct err *e)
{
    struct scope *s = user;
    const struct capture *c;
    uint64_t n = s->dim;

    if (len > 7 && memcmp(name, "config.", 7) == 0)
        return config_value(s, name, len, out, e);
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

bool scope_has_text(const struct scope *s, const struct map_text *t)
{
    size_t len = strlen(t->name);
    const char *text;

    if (!s->config || len >= NAME_MAX_BYTES ||
        !json_string(config_member(s->config, t->name, len), &text))
        return false;
    for (size_t i = 0; i < t->nchoice; i++)
        if (strcmp(text, t->choice[i]) == 0)
            return true;
    return false;
}
