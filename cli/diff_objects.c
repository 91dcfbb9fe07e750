/* SPDX-License-Identifier: MIT */
/* cli/diff_objects.c - holds the objects of one side and meets them with the other's. */
#include "cli/diff_objects.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/json.h"
#include "base/vec.h"
#include "index/catalog.h"

static const size_t objects_max = (size_t)512 << 20; /* of one side */

/* ---- values ---- */

struct couple {
    const struct json *a, *b;
};

struct couples {
    struct couple *at;
    size_t n, cap;
};

static int push(struct couples *c, const struct json *a, const struct json *b)
{
    if (!VEC_ROOM(c->at, c->n, c->cap))
        return -ENOMEM;
    c->at[c->n++] = (struct couple){a, b};
    return 0;
}

static bool same_scalar(const struct json *a, const struct json *b)
{
    const char *text_a = "", *text_b = "";
    double number_a = 0, number_b = 0;
    bool bool_a = false, bool_b = false;

    json_string(a, &text_a);
    json_string(b, &text_b);
    json_double(a, &number_a);
    json_double(b, &number_b);
    json_bool(a, &bool_a);
    json_bool(b, &bool_b);
    return strcmp(text_a, text_b) == 0 && number_a == number_b && bool_a == bool_b;
}

/* Children of both, to be compared later: 1, 0 when they cannot be equal, -ENOMEM. */
static int push_children(struct couples *c, const struct json *a, const struct json *b)
{
    bool object = json_kind(a) == JSON_OBJECT;
    const struct json *y = json_first(b);

    if (json_count(a) != json_count(b))
        return 0;
    for (const struct json *x = json_first(a); x; x = json_next(x)) {
        const struct json *other = y;

        /* Mostly they stand in one order, and nothing has to be looked for. */
        if (object && (!y || strcmp(json_key(x), json_key(y)) != 0))
            other = json_get(b, json_key(x));
        if (!other)
            return 0;
        if (push(c, x, other) < 0)
            return -ENOMEM;
        y = y ? json_next(y) : NULL;
    }
    return 1;
}

/* 1, 0 or -ENOMEM. */
static int same_trees(const struct json *a, const struct json *b)
{
    struct couples c = {0};
    int same = push(&c, a, b) == 0 ? 1 : -ENOMEM;

    while (same == 1 && c.n > 0) {
        struct couple top = c.at[--c.n];
        enum json_kind kind = json_kind(top.a);

        if (kind != json_kind(top.b))
            same = 0;
        else if (kind == JSON_ARRAY || kind == JSON_OBJECT)
            same = push_children(&c, top.a, top.b);
        else
            same = same_scalar(top.a, top.b);
    }
    free(c.at);
    return same;
}

int same_json(const char *a, size_t a_len, const char *b, size_t b_len, bool *same,
              struct err *e)
{
    CLEANUP(json_freep) struct json *tree_a = NULL;
    CLEANUP(json_freep) struct json *tree_b = NULL;
    struct err ignored = {0};
    int ret;

    *same = a_len == b_len && memcmp(a, b, a_len) == 0;
    if (*same)
        return 0;
    ret = json_parse(a, a_len, NULL, &tree_a, &ignored);
    if (ret == 0)
        ret = json_parse(b, b_len, NULL, &tree_b, &ignored);
    if (ret < 0)
        return ret == -ENOMEM ? err_nomem(e) : 0; /* other texts, that is all we know */
    ret = same_trees(tree_a, tree_b);
    *same = ret == 1;
    return ret < 0 ? err_nomem(e) : 0;
}

/* ---- lists ---- */

struct object {
    const char *key, *json;
    size_t key_len, json_len;
};

struct object_list {
    struct arena *texts;
    struct object *at;
    size_t n, cap;
    struct err *e;
};

static int add_object(void *user, const char *key, size_t key_len, const char *json,
                      size_t len)
{
    struct object_list *l = user;
    struct object *at;

    if (!VEC_ROOM(l->at, l->n, l->cap))
        return err_nomem(l->e);
    at = &l->at[l->n];
    *at = (struct object){.key = arena_memdup(l->texts, key, key_len),
                          .json = arena_memdup(l->texts, json, len),
                          .key_len = key_len,
                          .json_len = len};
    if (!at->key || !at->json) {
        err_set(l->e, EFBIG, "the objects are more than %zu MiB", objects_max >> 20);
        return err_hint(l->e, "leave them out: --drop objects");
    }
    l->n++;
    return 0;
}

static int compare_objects(const void *x, const void *y)
{
    const struct object *a = x, *b = y;
    int order = memcmp(a->key, b->key, MIN(a->key_len, b->key_len));

    return order ? order : (a->key_len > b->key_len) - (a->key_len < b->key_len);
}

static int load_objects(struct catalog *c, int64_t checkpoint, struct object_list *out,
                        struct err *e)
{
    int ret;

    out->e = e;
    out->texts = arena_new(objects_max);
    if (!out->texts)
        return err_nomem(e);
    ret = catalog_objects(c, checkpoint, add_object, out, e);
    if (ret == 0 && out->n > 0)
        qsort(out->at, out->n, sizeof *out->at, compare_objects);
    return ret;
}

static void object_list_release(struct object_list *l)
{
    arena_free(l->texts);
    free(l->at);
}

int diff_objects(struct catalog *a, int64_t checkpoint_a, struct catalog *b,
                 int64_t checkpoint_b,
                 void (*tell)(void *user, enum object_state state, const char *key,
                              size_t key_len),
                 void *user, struct object_totals *out, struct err *e)
{
    CLEANUP(object_list_release) struct object_list la = {0};
    CLEANUP(object_list_release) struct object_list lb = {0};
    int ret = load_objects(a, checkpoint_a, &la, e);

    if (ret == 0)
        ret = load_objects(b, checkpoint_b, &lb, e);
    for (size_t i = 0, j = 0; ret == 0 && (i < la.n || j < lb.n);) {
        int order = i == la.n   ? 1
                    : j == lb.n ? -1
                                : compare_objects(&la.at[i], &lb.at[j]);
        const struct object *one = order <= 0 ? &la.at[i] : &lb.at[j];
        enum object_state state = order < 0   ? OBJECT_ONLY_A
                                  : order > 0 ? OBJECT_ONLY_B
                                              : OBJECT_DIFFERS;
        bool same = false;

        if (order == 0)
            ret = same_json(la.at[i].json, la.at[i].json_len, lb.at[j].json,
                            lb.at[j].json_len, &same, e);
        i += order <= 0;
        j += order >= 0;
        out->equal += same;
        out->other[state] += !same;
        if (ret == 0 && !same)
            tell(user, state, one->key, one->key_len);
    }
    return ret;
}
