/* SPDX-License-Identifier: MIT */
/* index/map/map_check.c - for which checkpoints a map is: what it refuses, and what must come out. */
#include "index/map/map_check.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/key_text.h"
#include "index/map/scope.h"

static struct scope filter_scope(const struct filter *f)
{
    return (struct scope){.map = f->map, .config = f->config, .source = f->source};
}

/* "llama, mistral, qwen2" */
static void list_choices(const struct map_text *t, char *dst, size_t size)
{
    size_t len = 0;

    dst[0] = '\0';
    for (size_t i = 0; i < t->nchoice && len < size; i++)
        len += (size_t)snprintf(dst + len, size - len, "%s%s", i ? ", " : "",
                                t->choice[i]);
}

static int no_rules(const struct filter *f, const char *model, struct err *e)
{
    char known[sizeof e->hint - 32];

    list_choices(f->map->models, known, sizeof known);
    if (model)
        err_set(e, EINVAL, "there are no rules for models of type %.100s", model);
    else if (f->config)
        err_set(e, EINVAL, "config.json has no %s, which says what model it is",
                f->map->models->name + strlen("config."));
    else
        err_set(e, EINVAL, "which model it is, config.json tells: there is none");
    return model || f->config ? err_hint(e, "supported are %s", known)
                              : err_hint(e, "give one with -o hf=DIR");
}

static int check_family(const struct filter *f, struct err *e)
{
    const struct map_text *models = f->map->models;
    struct scope s = filter_scope(f);
    const char *model;

    if (!models)
        return 0;
    model = scope_text(&s, models->name);
    if (!model)
        return models->or_none ? 0 : no_rules(f, NULL, e);
    return scope_has_text(&s, models) ? 0 : no_rules(f, model, e);
}

/* 1: it is one of those that are refused; what has no value is no reason. */
static int is_refused(const struct filter *f, const struct map_refusal *r,
                      struct err *e)
{
    struct scope s = filter_scope(f);
    int64_t n = 1;
    int ret;

    for (size_t i = 0; i < r->ntext; i++)
        if (!scope_has_text(&s, &r->text[i]))
            return 0;
    if (!r->when)
        return 1;
    ret = scope_number(&s, r->when, &n, e);
    if (ret == -ENOENT) {
        *e = (struct err){0};
        return 0;
    }
    return ret < 0 ? ret : n != 0;
}

int map_check_model(struct filter *f, struct err *e)
{
    int ret = check_family(f, e);

    for (size_t i = 0; ret == 0 && i < f->map->nrefusal; i++) {
        const struct map_refusal *r = &f->map->refusal[i];

        ret = is_refused(f, r, e);
        if (ret > 0)
            return err_set(e, EINVAL, "%s", r->why);
        if (ret < 0)
            return err_wrap(e, "\"refuse\" %zu", i + 1);
    }
    return ret;
}

/* ---- shapes ---- */

/* The number that config.json gives for this axis, or `have` where it gives none. */
static int wanted_size(const struct filter *f, const struct captures *c,
                       const char *text, uint64_t have, uint64_t *out, struct err *e)
{
    struct scope s = filter_scope(f);
    int ret;

    s.captures = c;
    s.dim = have;
    ret = scope_count(&s, text, have, out, e);
    if (ret == -ENOENT) {
        *e = (struct err){0};
        *out = have;
        return 0;
    }
    return ret;
}

static int other_shape(const char *key, size_t len, const struct shape *have,
                       const struct shape *want, struct err *e)
{
    CLEANUP(buf_release) struct buf is = {.max = 2048}, must = {.max = 2048};
    char name[200];

    key_text(name, sizeof name, key, len);
    shape_format(have, &is);
    shape_format(want, &must);
    if (!is.data || !must.data)
        return err_nomem(e);
    err_set(e, EINVAL, "%s would have the shape %s, by config.json it is %s", name,
            is.data, must.data);
    return err_hint(e, "is it the config.json of this model?");
}

int map_check_shape(const struct filter *f, const char *key, size_t len,
                    const struct shape *shape, struct err *e)
{
    struct captures captures;
    int ret = 0;

    for (size_t i = 0; i < f->map->nshape; i++) {
        const struct map_shape *m = &f->map->shape[i];
        struct shape want = {.nd = (uint32_t)m->ndim};

        if (!pattern_match(m->of, key, len, &captures))
            continue;
        for (size_t k = 0; ret == 0 && k < m->ndim; k++)
            ret = wanted_size(f, &captures, m->dim[k],
                              k < shape->nd ? shape->dim[k] : 0, &want.dim[k], e);
        if (ret < 0)
            return err_wrap(e, "the shape of %s", m->of);
        return shape_equal(&want, shape) ? 0 : other_shape(key, len, shape, &want, e);
    }
    return 0;
}
