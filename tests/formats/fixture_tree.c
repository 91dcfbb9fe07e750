/* SPDX-License-Identifier: MIT */
/* tests/formats/fixture_tree.c - a source of several checkpoints against NAME.expected.json. */
#include "fixture_tree.h"

#include <limits.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/json.h"
#include "fixture.h"
#include "tests/unit/unit.h"

enum { MAX_PLACES = 64 };

struct tree {
    struct opened o; /* its world, and one checkpoint at a time */
    char *place[MAX_PLACES];
    size_t count;
};

static int note_place(void *user, const char *dir, const char *file,
                      const struct format_driver *d)
{
    struct tree *t = user;
    const char *slash = dir[0] && file ? "/" : "";

    (void)d;
    assert_true(t->count < MAX_PLACES);
    assert_true(
        asprintf(&t->place[t->count++], "%s%s%s", dir, slash, file ? file : "") >= 0);
    return 0;
}

/* Is the tensor KEY of this checkpoint what is expected under `name`? */
static bool is_named(const char *name, const char *place, const char *key)
{
    size_t n = strlen(place);

    if (strcmp(name, key) == 0)
        return true;
    for (const char *colon = name; (colon = strchr(colon, ':')); colon++) {
        const char *part = name + n, *tail = colon + 1;
        size_t len;

        if ((size_t)(colon - name) < n || strncmp(name, place, n) != 0 ||
            (n > 0 && part < colon && *part != '/'))
            continue;
        part += part < colon && *part == '/';
        len = (size_t)(colon - part);
        if (strcmp(key, tail) == 0 ||
            (strncmp(key, part, len) == 0 && (key[len] == '/' || key[len] == ':') &&
             strcmp(key + len + 1, tail) == 0))
            return true;
    }
    return false;
}

/* Is it rather of a checkpoint below this one? */
static bool is_below(const struct tree *t, const char *name, const char *place)
{
    size_t len = strlen(place);

    for (size_t i = 0; i < t->count; i++) {
        size_t n = strlen(t->place[i]);

        if (n > len && strncmp(name, t->place[i], n) == 0 &&
            (name[n] == '/' || name[n] == ':'))
            return true;
    }
    return false;
}

static const struct json *expected_of(const struct tree *t, const struct json *tensors,
                                      const char *place, const char *key)
{
    const struct json *found = NULL;

    for (const struct json *v = json_first(tensors); v; v = json_next(v)) {
        if (is_below(t, json_key(v), place) || !is_named(json_key(v), place, key))
            continue;
        if (found)
            fail_msg("%s: expected as %s and %s", key, json_key(found), json_key(v));
        found = v;
    }
    return found;
}

static void check_tensors(struct tree *t, const char *place, const struct json *tensors,
                          size_t *found)
{
    for (size_t i = 0; i < t->o.count; i++) {
        const struct tensor_info *one = &t->o.t[i];
        const struct json *want = expected_of(t, tensors, place, one->key);

        if (!want)
            fail_msg("%s: %s should not be there", place, one->key);
        check_tensor(&t->o, one, want);
        ++*found;
    }
}

struct objects {
    const struct json *want;
    size_t count;
};

static int check_object(void *user, const char *key, size_t key_len, const char *text,
                        size_t len)
{
    struct objects *o = user;
    CLEANUP(json_freep) struct json *got = NULL;
    const struct json *want = json_get(o->want, key);
    struct err e = {0};

    assert_int_equal(strlen(key), key_len);
    if (!want)
        fail_msg("object %s: it should not be there", key);
    assert_ok(json_parse(text, len, NULL, &got, &e), &e);
    if (json_kind(want) != JSON_NULL && !same_json(got, want))
        fail_msg("object %s: %.*s", key, (int)len, text);
    o->count++;
    return 0;
}

static void check_text(const char *what, const char *got, const struct json *want)
{
    const char *text;

    if (!json_string(want, &text))
        text = "";
    if (strcmp(got ? got : "", text) != 0)
        fail_msg("%s \"%s\", not \"%s\"", what, got ? got : "", text);
}

static void check_topology(const char *got, const struct json *want)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err e = {0};

    assert_ok(json_parse(got, strlen(got), NULL, &doc, &e), &e);
    if (!same_json(doc, want))
        fail_msg("topology %s", got);
}

static void check_about(struct tree *t, const struct json *want)
{
    const struct checkpoint_info *info = &t->o.info;
    struct objects objects = {.want = json_get(want, "objects")};
    const struct json *role = json_first(json_get(want, "roles"));
    int64_t step = -1;
    uint64_t warnings = 0, tensors;
    struct err e = {0};

    check_text("format", info->format, json_get(want, "format"));
    check_text("framework", info->framework, json_get(want, "framework"));
    check_text("version", info->version, json_get(want, "version"));
    check_topology(info->topology, json_get(want, "topology"));
    json_i64(json_get(want, "step"), &step);
    assert_int_equal(info->has_step ? info->step : -1, step);
    for (int r = 0; r < 3; r++, role = json_next(role)) {
        assert_true(json_u64(role, &tensors));
        assert_int_equal(info->by_role[r], tensors);
    }
    json_u64(json_get(want, "warnings"), &warnings);
    assert_int_equal(info->warnings, warnings);
    assert_int_equal(info->faults, 0);
    assert_ok(catalog_objects(t->o.w.catalog, info->id, check_object, &objects, &e),
              &e);
    assert_int_equal(objects.count, json_count(objects.want));
}

static void check_place(struct tree *t, const char *place, const struct json *want,
                        size_t *found)
{
    const struct json *about = json_get(json_get(want, "checkpoints"), place);
    struct world *w = &t->o.w;
    struct err e = {0}, ignored = {0};

    if (!about)
        fail_msg("\"%s\" is a checkpoint", place);
    if (scanner_get(w->scanner, place, NULL, w->arena, &t->o.info, &ignored) < 0) {
        /* A file that is a checkpoint. */
        CLEANUP_FREE char *dir = strdup(place);
        char *slash = strrchr(dir, '/'), *file = slash ? slash + 1 : dir;

        if (slash)
            *slash = '\0';
        assert_ok(
            scanner_get(w->scanner, slash ? dir : "", file, w->arena, &t->o.info, &e),
            &e);
    }
    if (t->o.info.error)
        fail_msg("%s: %s", place, t->o.info.error);
    assert_ok(world_tensors(w, t->o.info.id, &t->o.t, &t->o.count, &e), &e);
    check_tensors(t, place, json_get(want, "tensors"), found);
    check_about(t, about);
}

void test_fixture_tree(void **state)
{
    const char *fixture = *state;
    CLEANUP(json_freep) struct json *want = NULL;
    struct tree t = {0};
    struct err e = {0};
    size_t found = 0;
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s.expected.json", fixture);
    want = read_json(path);
    assert_ok(world_open(fixture, &t.o.w, &e), &e);
    assert_ok(scanner_walk(t.o.w.scanner, "", note_place, &t, &e), &e);
    for (size_t i = 0; i < t.count; i++)
        check_place(&t, t.place[i], want, &found);
    assert_int_equal(t.count, json_count(json_get(want, "checkpoints")));
    assert_int_equal(found, json_count(json_get(want, "tensors")));
    for (size_t i = 0; i < t.count; i++)
        free(t.place[i]);
    world_close(&t.o.w);
}
