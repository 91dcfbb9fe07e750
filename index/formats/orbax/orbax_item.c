/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_item.c - one directory that Orbax saved a tree of arrays in. */
#include "index/formats/orbax/orbax_item.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "index/formats/jax_role.h"
#include "index/formats/json_object.h"
#include "index/formats/object_value.h"
#include "index/formats/orbax/orbax_aggregate.h"
#include "index/formats/orbax/orbax_files.h"
#include "index/formats/orbax/orbax_store.h"
#include "index/formats/orbax/orbax_tree.h"

enum {
    MAX_METADATA = 100 * 1000 * 1000, /* 250 bytes a leaf */
    MAX_SHARDING = 64 << 20,
    MAX_STRINGS = 64 << 20,
    SHOWN = 200,
};

static const char METADATA[] = "_METADATA";
static const char SHARDING[] = "_sharding";
static const char STRINGS[] = "_strings.json";
static const char MARK[] = "commit_success.txt";
static const char PROCESS[] = "ocdbt.process_";
static const char CUSTOM[] = "custom_metadata";
static const char ALWAYS_STORED[] = "store_array_data_equal_to_fill_value";

/* ---- what a directory is ---- */

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

bool orbax_is_process(const char *name)
{
    return strncmp(name, PROCESS, strlen(PROCESS)) == 0;
}

static bool has_process(const struct listing *l)
{
    for (size_t i = 0; i < listing_count(l); i++)
        if (orbax_is_process(listing_at(l, i)->name))
            return true;
    return false;
}

/* The one file beside marks, when it holds JSON by its first byte. */
static const char *only_json(struct listing *l)
{
    const char *found = NULL;
    char first;
    size_t got = 0;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (strcmp(entry->name, MARK) == 0)
            continue;
        if (found || entry->st.kind != ENTRY_FILE)
            return NULL;
        found = entry->name;
    }
    if (!found || listing_peek(l, found, &first, 1, &got) < 0 || got == 0 ||
        (first != '{' && first != '['))
        return NULL;
    return found;
}

static bool is_tree_metadata(struct listing *l)
{
    char head[64];
    size_t got = 0;

    return has_file(l, METADATA) &&
           listing_peek(l, METADATA, head, sizeof head, &got) == 0 &&
           memmem(head, got, "\"tree_metadata\"", 15);
}

enum orbax_dir orbax_dir_kind(struct listing *l, const char **file)
{
    bool store = orbax_has_ocdbt(l);

    *file = NULL;
    if (orbax_is_process(listing_name(l)))
        return ORBAX_NONE;
    if (!store && has_process(l))
        return ORBAX_UNFINISHED;
    if (is_tree_metadata(l) || orbax_has_aggregate(l))
        return ORBAX_TREE;
    if (store)
        return ORBAX_STORE;
    *file = only_json(l);
    return *file ? ORBAX_JSON : ORBAX_NONE;
}

/* ---- JSON ---- */

int orbax_read_json(struct listing *l, const char *name, size_t max, char **text,
                    size_t *len, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {0};
    CLEANUP_FREE char *read = NULL;
    size_t read_len;

    if (listing_read(l, name, max, &read, &read_len, e) < 0 ||
        json_to_object(read, read_len, &json, e) < 0 || buf_adds(&json, "") < 0)
        return e->code ? -e->code : err_nomem(e);
    *text = buf_steal(&json, len);
    return *text ? 0 : err_nomem(e);
}

int orbax_member_object(struct sink *sink, const char *key, size_t key_len,
                        const struct orbax_member *m, struct err *e)
{
    if (!m->value || (m->len == 4 && memcmp(m->value, "null", 4) == 0) ||
        (m->len == 2 &&
         (memcmp(m->value, "{}", 2) == 0 || memcmp(m->value, "[]", 2) == 0)))
        return 0;
    return sink_object(sink, key, key_len, m->value, m->len, e);
}

/* ---- an item's files ---- */

struct item {
    const struct scan_context *c;
    struct sink *sink;
    const struct orbax_item *about;
    struct orbax_told *told;
    struct listing *l;
    struct orbax_files files;
    struct orbax_store *store;
    char *metadata; /* text of _METADATA, or NULL */
    size_t metadata_len;
    struct json *strings; /* of _strings.json, or NULL */
    bool *seen;           /* arrays that are leaves */
    bool all_chunks;
    bool leaves_told; /* by _METADATA, all of them */
    struct buf key;
};

static void item_release(struct item *x)
{
    orbax_store_free(x->store);
    orbax_files_release(&x->files);
    free(x->metadata);
    json_free(x->strings);
    free(x->seen);
    buf_release(&x->key);
}

/* Hides an entry of the item's directory. */
static int hide(struct item *x, const char *name, bool watch, struct err *e)
{
    char path[PATH_MAX];

    if (store_join(x->about->dir, name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", name);
    return sink_hide(x->sink, path, watch, e);
}

static bool is_machinery(const char *name)
{
    static const char *const names[] = {METADATA, SHARDING, STRINGS,
                                        MARK,     "d",      "array_metadatas"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return orbax_is_process(name) || strncmp(name, "manifest.", 9) == 0;
}

/* Also directories of arrays, up to the first slash of their names. */
static int hide_all(struct item *x, struct err *e)
{
    uint64_t processes = 0;

    for (size_t i = 0; i < listing_count(x->l); i++) {
        const struct listing_entry *entry = listing_at(x->l, i);

        processes += orbax_is_process(entry->name);
        if (is_machinery(entry->name))
            TRY(hide(x, entry->name, entry->st.kind == ENTRY_FILE, e));
    }
    x->told->processes = MAX(x->told->processes, processes);
    for (size_t i = 0;
         !orbax_store_is_ocdbt(x->store) && i < orbax_store_count(x->store); i++) {
        const char *name = orbax_store_at(x->store, i)->name;
        char top[NAME_MAX + 1];

        snprintf(top, sizeof top, "%.*s", (int)strcspn(name, "/"), name);
        if (top[0])
            TRY(hide(x, top, false, e));
    }
    return 0;
}

static int read_strings(struct item *x, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len;

    if (!has_file(x->l, STRINGS) ||
        (listing_read(x->l, STRINGS, MAX_STRINGS, &text, &len, &why) == 0 &&
         json_parse(text, len, NULL, &x->strings, &why) == 0))
        return 0;
    return sink_warning(x->sink, "damaged-file", "%s: %s", STRINGS, why.text) < 0
               ? err_nomem(e)
               : 0;
}

static void read_mesh(struct item *x)
{
    CLEANUP(buf_release) struct buf mesh = {.max = sizeof x->told->mesh - 1};
    CLEANUP_FREE char *text = NULL;
    struct err unread = {0};
    size_t len;

    if (x->told->mesh[0] || !has_file(x->l, SHARDING) ||
        listing_read(x->l, SHARDING, MAX_SHARDING, &text, &len, &unread) < 0)
        return;
    if (orbax_mesh(text, len, &mesh))
        snprintf(x->told->mesh, sizeof x->told->mesh, "%s", mesh.data);
}

/* ---- leaves ---- */

static int role_of_leaf(const char *part, const char *key, size_t len)
{
    static const char name[] = "opt_state", generator[] = "random_key";
    static const char states[] = "state.param_states."; /* T5X, of flax.optim */
    size_t n = sizeof name - 1, end = part ? strlen(part) : 0;

    if (end >= sizeof generator - 1 &&
        strcmp(part + end - (sizeof generator - 1), generator) == 0)
        return ROLE_OTHER; /* rng/jax_random_key: what its handler calls it */

    if (part && strncmp(part, name, n) == 0)
        return ROLE_OPTIMIZER;
    if (len >= sizeof states - 1 && memcmp(key, states, sizeof states - 1) == 0)
        return ROLE_OPTIMIZER;
    return (int)jax_role(part, key, len);
}

static int put_tensor(struct item *x, size_t i, struct err *e)
{
    const struct orbax_array *a = orbax_store_at(x->store, i);
    const struct sink_tensor t = {
        .key = a->name,
        .key_len = a->len,
        .part = x->about->part,
        .role = role_of_leaf(x->about->part, a->name, a->len),
    };

    int rc;

    x->told->zarr3 |= a->zarr3;
    rc = orbax_store_report(x->store, i, &t, x->all_chunks, e);
    if (rc != -EEXIST)
        return rc;
    *e = (struct err){0};
    return sink_warning(x->sink, "duplicate-key",
                        "%.*s: another tensor has that key, this one is not shown",
                        (int)MIN(a->len, (size_t)SHOWN), a->name) < 0
               ? err_nomem(e)
               : 0;
}

/* The object's key is PART/NAME, except in the main part. */
static int object_key(struct item *x, const char *name, size_t len, struct err *e)
{
    buf_clear(&x->key);
    if (x->about->part)
        buf_addf(&x->key, "%s/", x->about->part);
    buf_add(&x->key, name, len);
    return buf_failed(&x->key) ? err_nomem(e) : 0;
}

static int put_object(struct item *x, const struct orbax_leaf *leaf, const char *json,
                      size_t len, struct err *e)
{
    TRY(object_key(x, leaf->name, leaf->len, e));
    return sink_object(x->sink, x->key.data, x->key.len, json, len, e);
}

static int put_unreadable(struct item *x, const struct orbax_leaf *leaf,
                          const struct err *why, struct err *e)
{
    TRY(object_key(x, leaf->name, leaf->len, e));
    return object_unreadable(x->sink, x->key.data, x->key.len, why, e);
}

/* A leaf whose array is nowhere: listed, since its value is lost. `by`: a file's name. */
static int put_lost(struct item *x, const struct orbax_leaf *leaf, const char *by,
                    struct err *e)
{
    static const struct shape none = {.nd = 1};
    const struct sink_tensor t = {
        .key = leaf->name,
        .key_len = leaf->len,
        .part = x->about->part,
        .dtype = DTYPE_U8,
        .shape = &none,
        .role = role_of_leaf(x->about->part, leaf->name, leaf->len),
    };

    TRY(sink_tensor_begin(x->sink, &t, e));
    if (sink_fault(x->sink, "%s names it, but there is no such array", by) < 0)
        return err_nomem(e);
    return sink_tensor_end(x->sink, e);
}

/* Two leaves whose paths are joined to one name: Orbax wrote one over the other. */
static int tell_twice(struct item *x, const struct orbax_leaf *leaf, struct err *e)
{
    return sink_warning(x->sink, "duplicate-key",
                        "%.*s: two leaves were saved under this name, one of them is "
                        "there",
                        (int)MIN(leaf->len, (size_t)SHOWN), leaf->name) < 0
               ? err_nomem(e)
               : 0;
}

static int put_array(struct item *x, const struct orbax_leaf *leaf, struct err *e)
{
    size_t i;

    if (!orbax_store_find(x->store, leaf->name, leaf->len, &i))
        return put_lost(x, leaf, METADATA, e);
    if (x->seen[i])
        return tell_twice(x, leaf, e);
    x->seen[i] = true;
    return put_tensor(x, i, e);
}

static int put_number(struct item *x, const struct orbax_leaf *leaf, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {0};
    struct err why = {0};
    size_t i;
    int rc;

    if (!orbax_store_find(x->store, leaf->name, leaf->len, &i))
        return put_lost(x, leaf, METADATA, e);
    if (x->seen[i])
        return tell_twice(x, leaf, e);
    rc = orbax_store_number(x->store, i, &json, &why);
    if (rc == 0)
        return put_array(x, leaf, e);
    x->seen[i] = true;
    x->told->zarr3 |= orbax_store_at(x->store, i)->zarr3;
    if (rc == 1)
        return put_object(x, leaf, json.data, json.len, e);
    if (rc == -ENOMEM || rc == -ESTALE) {
        *e = why;
        return rc;
    }
    return put_unreadable(x, leaf, &why, e);
}

/*
 * A text is kept under the leaf's name as a JSON pointer (RFC 6901; orbax-checkpoint
 * 0.12.8, _src/serialization/type_handlers.py): "/" goes a level down, "~1" is "/" and
 * "~0" is "~". *out is NULL where nothing is.
 */
static int string_at(const struct json *doc, const char *name, const struct json **out,
                     struct err *e)
{
    CLEANUP_FREE char *part = malloc(strlen(name) + 1);
    size_t len = 0;

    if (!part)
        return err_nomem(e);
    for (; *name; name++) {
        if (*name == '/') {
            part[len] = '\0';
            doc = json_get(doc, part);
            len = 0;
        } else if (name[0] == '~' && (name[1] == '0' || name[1] == '1')) {
            part[len++] = *++name == '0' ? '~' : '/';
        } else {
            part[len++] = *name;
        }
    }
    part[len] = '\0';
    *out = json_get(doc, part);
    return 0;
}

static int put_string(struct item *x, const struct orbax_leaf *leaf, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {0};
    struct err why = {0};
    const struct json *value = NULL;
    const char *text;

    TRY(string_at(x->strings, leaf->name, &value, e));
    if (!json_string(value, &text)) {
        err_set(&why, EBADMSG, "%s does not hold it", STRINGS);
        return put_unreadable(x, leaf, &why, e);
    }
    object_value_text(&json, text, strlen(text));
    if (buf_failed(&json))
        return err_nomem(e);
    return put_object(x, leaf, json.data, json.len, e);
}

/* Of a handler of somebody's own: what it kept as an array is shown. */
static int put_other(struct item *x, const struct orbax_leaf *leaf, struct err *e)
{
    size_t i;

    if (orbax_store_find(x->store, leaf->name, leaf->len, &i))
        return put_array(x, leaf, e);
    return sink_warning(x->sink, "unknown-leaf",
                        "%.*s: a value of type %.100s, which has no array",
                        (int)MIN(leaf->len, (size_t)SHOWN), leaf->name,
                        leaf->type ? leaf->type : "unknown") < 0
               ? err_nomem(e)
               : 0;
}

static int on_leaf(void *user, const struct orbax_leaf *leaf, struct err *e)
{
    struct item *x = user;

    if (leaf->kind == ORBAX_EMPTY)
        return put_object(x, leaf, leaf->value, strlen(leaf->value), e);
    if (leaf->not_stored)
        return orbax_has_aggregate(x->l) ? 0 : put_other(x, leaf, e);
    switch (leaf->kind) {
    case ORBAX_SCALAR:
        return put_number(x, leaf, e);
    case ORBAX_STRING:
        return put_string(x, leaf, e);
    case ORBAX_ARRAY:
        return put_array(x, leaf, e);
    case ORBAX_EMPTY:
    case ORBAX_OTHER:
        break;
    }
    return put_other(x, leaf, e);
}

/* An array that the aggregate file names: a leaf of _METADATA may be known already. */
static int on_elsewhere(void *user, const char *name, size_t len, struct err *e)
{
    const struct orbax_leaf leaf = {.name = name, .len = len, .kind = ORBAX_ARRAY};
    struct item *x = user;
    const struct json *string = NULL;
    const char *text;
    size_t i;

    TRY(string_at(x->strings, name, &string, e));
    if (json_string(string, &text)) /* no array: 0.4 and 0.5 keep text elsewhere */
        return x->leaves_told ? 0 : put_string(x, &leaf, e);
    if (orbax_store_find(x->store, name, len, &i) ||
        put_lost(x, &leaf, "checkpoint", e) == 0)
        return 0;
    if (e->code != EEXIST)
        return -e->code;
    *e = (struct err){0};
    return 0;
}

/* Arrays that no leaf names; a store by itself has only those. */
static int put_others(struct item *x, struct err *e)
{
    uint64_t strange = 0;

    for (size_t i = 0; i < orbax_store_count(x->store); i++) {
        if (x->seen[i])
            continue;
        strange++;
        TRY(put_tensor(x, i, e));
    }
    if (strange == 0 || !x->metadata)
        return 0;
    return sink_warning(x->sink, "unlisted-array",
                        "%" PRIu64 " arrays are there that %s does not name", strange,
                        METADATA) < 0
               ? err_nomem(e)
               : 0;
}

/* ---- the item ---- */

static int open_item(struct item *x, struct err *e)
{
    x->l = listing_below(x->c->listing, x->about->dir);
    if (!x->l)
        return err_set(e, ESTALE, "%s is gone", x->about->dir);
    if (x->about->dir[0]) {
        TRY(sink_part(x->sink, x->about->dir, e));
        TRY(sink_watch(x->sink, x->about->dir, e));
    }
    TRY(orbax_store_open(&x->files, x->l, &x->store, e));
    x->told->ocdbt |= orbax_store_is_ocdbt(x->store);
    x->seen = calloc(orbax_store_count(x->store) + 1, sizeof *x->seen);
    if (!x->seen)
        return err_nomem(e);
    return hide_all(x, e);
}

/* Without its names a store still has its arrays; then no chunk of them may be missing. */
static int take_damage(struct item *x, const struct err *why, struct err *e)
{
    if (why->code != EBADMSG && why->code != EFBIG) {
        return err_copy(e, why);
    }
    x->all_chunks = true;
    return sink_warning(x->sink, "damaged-file",
                        "%s: %s: arrays are shown as they are stored", METADATA,
                        why->text) < 0
               ? err_nomem(e)
               : 0;
}

static int report_leaves(struct item *x, struct err *e)
{
    struct orbax_member m[2] = {{.name = ALWAYS_STORED}, {.name = CUSTOM}};
    struct err why = {0};
    bool sound;

    if (!has_file(x->l, METADATA))
        return 0;
    if (orbax_read_json(x->l, METADATA, MAX_METADATA, &x->metadata, &x->metadata_len,
                        &why) < 0)
        return take_damage(x, &why, e);
    sound = orbax_members(x->metadata, x->metadata_len, m, ARRAY_SIZE(m));
    x->all_chunks =
        !sound || (m[0].value && m[0].len == 4 && memcmp(m[0].value, "true", 4) == 0);
    if (orbax_tree_each(x->metadata, x->metadata_len, on_leaf, x, &why) < 0)
        return take_damage(x, &why, e);
    x->leaves_told = true;
    TRY(object_key(x, CUSTOM, strlen(CUSTOM), e));
    return orbax_member_object(x->sink, x->key.data, x->key.len, &m[1], e);
}

int orbax_item_report(const struct scan_context *c, struct sink *sink,
                      const struct orbax_item *item, struct orbax_told *told,
                      struct err *e)
{
    struct item x = {.c = c,
                     .sink = sink,
                     .about = item,
                     .told = told,
                     .files = {.c = c, .sink = sink, .dir = item->dir}};
    struct orbax_aggregate old = {.part = item->part,
                                  .role = role_of_leaf,
                                  .elsewhere = on_elsewhere,
                                  .user = &x};
    int rc = open_item(&x, e);

    if (rc == 0)
        rc = read_strings(&x, e);
    if (rc == 0)
        rc = report_leaves(&x, e);
    old.leaves_told = x.leaves_told;
    if (rc == 0 && orbax_has_aggregate(x.l))
        rc = orbax_aggregate_report(&x.files, &old, e);
    if (rc == 0)
        rc = put_others(&x, e);
    if (rc == 0)
        read_mesh(&x);
    item_release(&x);
    if (rc < 0 && item->dir[0])
        err_wrap(e, "%s", item->dir);
    return rc;
}
