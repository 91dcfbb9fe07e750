/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_tree.c - _METADATA: which leaves a saved tree has. */
#include "index/formats/orbax/orbax_tree.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/json_lex.h"
#include "index/shape.h"

enum {
    MAX_PATH = 64 << 10, /* of a leaf's path: what OCDBT takes for a key */
    STOP = 1,            /* ends a walk over members early */
    MAX_DEPTH = 64,
};

/* ---- leaves ---- */

static const struct {
    const char *type;
    enum orbax_kind kind;
    const char *value;
} types[] = {
    {"jax.Array", ORBAX_ARRAY, NULL},
    {"np.ndarray", ORBAX_ARRAY, NULL},
    {"scalar", ORBAX_SCALAR, NULL},
    {"string", ORBAX_STRING, NULL},
    {"None", ORBAX_EMPTY, "null"},
    {"Dict", ORBAX_EMPTY, "{}"},
    {"List", ORBAX_EMPTY, "[]"},
    {"Tuple", ORBAX_EMPTY, "{\"$type\":\"tuple\",\"items\":[]}"},
    {"NamedTuple", ORBAX_EMPTY, "{\"$type\":\"tuple\",\"items\":[]}"},
};

static void take_type(const struct json *value, struct orbax_leaf *leaf)
{
    leaf->kind = ORBAX_OTHER;
    if (!json_string(json_get(value, "value_type"), &leaf->type))
        return;
    for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
        if (strcmp(leaf->type, types[i].type) == 0) {
            leaf->kind = types[i].kind;
            leaf->value = types[i].value;
        }
    }
}

/* The member's own name is a Python tuple as text; key_metadata has its parts apart. */
static int take_path(const struct json *keys, struct buf *out, struct err *e)
{
    if (!keys || json_kind(keys) != JSON_ARRAY)
        return err_set(e, EBADMSG, "there is no key_metadata");
    for (const struct json *v = json_first(keys); v; v = json_next(v)) {
        const char *part;

        if (!json_string(json_get(v, "key"), &part))
            return err_set(e, EBADMSG, "a key of key_metadata is no text");
        if (v != json_first(keys))
            buf_addc(out, '.');
        buf_adds(out, part);
    }
    if (out->failed == EFBIG)
        return err_set(e, EBADMSG, "a path of more than %d bytes", MAX_PATH);
    return buf_failed(out) ? err_nomem(e) : 0;
}

struct each {
    orbax_leaf_fn *fn;
    void *user;
    struct buf name;
};

static int on_leaf(void *user, const char *key, size_t key_len,
                   const struct json *value, struct err *e)
{
    struct each *x = user;
    const struct json *about = json_get(value, "value_metadata");
    struct orbax_leaf leaf = {0};

    buf_clear(&x->name);
    buf_adds(&x->name, "");
    if (take_path(json_get(value, "key_metadata"), &x->name, e) < 0)
        return err_wrap(e, "%.*s", (int)MIN(key_len, (size_t)200), key);
    leaf.name = x->name.data;
    leaf.len = x->name.len;
    take_type(about, &leaf);
    if (!json_bool(json_get(about, "skip_deserialize"), &leaf.not_stored))
        leaf.not_stored = false;
    return x->fn(x->user, &leaf, e);
}

int orbax_tree_each(const char *text, size_t len, orbax_leaf_fn *fn, void *user,
                    struct err *e)
{
    struct each x = {.fn = fn, .user = user, .name = {.max = MAX_PATH}};
    int rc = json_each_member_of(text, len, NULL, "tree_metadata", on_leaf, &x, e);

    buf_release(&x.name);
    return rc;
}

/* One value of the outermost object, whose key was read just before. */
static int take_member(struct json_lexer *l, struct orbax_member *m, size_t n,
                       struct err *e)
{
    struct orbax_member *found = NULL;
    size_t at;

    for (size_t i = 0; i < n; i++)
        if (l->key.len == strlen(m[i].name) &&
            memcmp(l->key.data ? l->key.data : "", m[i].name, l->key.len) == 0)
            found = &m[i];
    json_lex_blanks(l);
    at = l->pos;
    TRY(json_lex_value(l, e));
    if (found) {
        found->value = l->text + at;
        found->len = l->pos - at;
    }
    return json_lex_next(l, e);
}

bool orbax_members(const char *text, size_t len, struct orbax_member *m, size_t n)
{
    struct json_lexer *l = calloc(1, sizeof *l);
    struct err unread = {0};
    int step;

    for (size_t i = 0; i < n; i++)
        m[i].value = NULL;
    if (!l)
        return false;
    *l = (struct json_lexer){
        .text = text, .len = len, .max_depth = MAX_DEPTH, .max_values = SIZE_MAX};
    step = json_lex_enter_object(l, &unread);
    while (step == JSON_VALUE)
        step = take_member(l, m, n, &unread);
    json_lexer_release(l);
    free(l);
    return step == JSON_ENDED;
}

/* ---- the mesh ---- */

/* "shape" and "axis_names", of one length. */
static bool format_mesh(const struct json *shape, const struct json *names,
                        struct buf *out)
{
    const struct json *s = json_first(shape), *n = json_first(names);

    if (!s || json_count(shape) != json_count(names) ||
        json_count(shape) > SHAPE_MAX_DIMS)
        return false;
    buf_addc(out, '{');
    for (; s && n; s = json_next(s), n = json_next(n)) {
        const char *name;
        uint64_t size;

        if (!json_u64(s, &size) || !json_string(n, &name))
            return false;
        buf_add_json(out, name, strlen(name));
        buf_addf(out, ": %" PRIu64 "%s", size, json_next(s) ? ", " : "}");
    }
    return buf_failed(out) == 0;
}

/* Each value is itself JSON, as text. The first one with a mesh speaks for all. */
static int on_sharding(void *user, const char *key, size_t key_len,
                       const struct json *value, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct buf *out = user;
    struct err unread = {0};
    const char *text;

    (void)key;
    (void)key_len;
    (void)e;
    if (!json_string(value, &text) ||
        json_parse(text, strlen(text), NULL, &doc, &unread) < 0)
        return 0;
    buf_clear(out);
    return format_mesh(json_get(doc, "shape"), json_get(doc, "axis_names"), out) ? STOP
                                                                                 : 0;
}

bool orbax_mesh(const char *text, size_t len, struct buf *out)
{
    struct err unread = {0};

    return json_each_member(text, len, NULL, on_sharding, out, &unread) == STOP;
}
