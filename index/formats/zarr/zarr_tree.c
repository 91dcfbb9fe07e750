/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_tree.c - a walk over groups and arrays, and their consolidated copies. */
#include "index/formats/zarr/zarr_tree.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/vec.h"
#include "index/formats/format.h"
#include "index/formats/jax_role.h"
#include "index/formats/json_object.h"
#include "index/formats/zarr/zarr_dir.h"
#include "index/formats/zarr/zarr_listed.h"
#include "index/formats/zarr/zarr_priv.h"

enum {
    MAX_GROUP = 64 << 20,      /* metadata of all arrays once more: 100,000 of them */
    MAX_ATTRIBUTES = 16 << 20, /* of one node */
    MAX_DEPTH = 64,            /* directories below each other */
    MAX_DIRS = 4 << 20,
    TREE_MEMORY = 1 << 30,
};

static const char ZARRAY[] = ".zarray";
static const char ZARR_JSON[] = "zarr.json";
static const char ZATTRS[] = ".zattrs";
static const char ZMETADATA[] = ".zmetadata";

/* A directory still to be looked at. */
struct todo {
    struct todo *next;
    const char *path; /* relative to the checkpoint's directory */
    unsigned depth;
    bool is_link; /* then only an array is of interest: links can lead in circles */
};

/* An array that was reported, to be held against consolidated metadata. */
struct seen {
    uint64_t path, meaning; /* hashes */
    bool told;              /* consolidated metadata have it too */
};

struct tree {
    const struct scan_context *c;
    struct sink *sink;
    struct zarr_found *found;
    struct arena *arena;
    struct todo *todo, **last;
    size_t dirs;
    struct seen *seen; /* malloc */
    size_t nseen, cap;
    struct buf text; /* of the consolidated metadata, or empty */
    bool listed;     /* by EasyDeL's index */
};

static int join(const char *dir, const char *name, char *dst, struct err *e)
{
    if (store_join(dir, name, dst, PATH_MAX) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir, name);
    return 0;
}

static bool stops_scan(int code)
{
    return code == ENOMEM || code == ESTALE || code == EMFILE || code == ENFILE;
}

static int warn(struct tree *t, const char *code, const char *path, const char *why,
                struct err *e)
{
    return sink_warning(t->sink, code, "%.300s: %.300s", path[0] ? path : ".", why) < 0
               ? err_nomem(e)
               : 0;
}

static int push(struct tree *t, const struct todo *from, struct err *e)
{
    struct todo *copy = arena_alloc(t->arena, sizeof *copy);

    if (t->dirs++ >= MAX_DIRS)
        return err_set(e, EFBIG, "more than %d directories", MAX_DIRS);
    if (!copy)
        return err_nomem(e);
    *copy = *from;
    copy->next = NULL;
    copy->path = arena_memdup(t->arena, from->path, strlen(from->path));
    *t->last = copy;
    t->last = &copy->next;
    return copy->path ? 0 : err_nomem(e);
}

/* The name in the checkpoint's directory below which `path` lies. */
static int hide_top(struct tree *t, const char *path, struct err *e)
{
    char name[NAME_MAX + 1];
    size_t len = strcspn(path, "/");

    if (len == 0 || len > NAME_MAX)
        return 0;
    memcpy(name, path, len);
    name[len] = '\0';
    return sink_hide(t->sink, name, false, e);
}

/* Machinery: hidden where it would be seen, and watched. */
static int hide_file(struct tree *t, const char *path, const char *name, struct err *e)
{
    char full[PATH_MAX];

    TRY(join(path, name, full, e));
    return path[0] ? sink_watch(t->sink, full, e) : sink_hide(t->sink, full, true, e);
}

static void note_metadata(struct tree *t, const char *path, const char *name)
{
    char dir[PATH_MAX], full[PATH_MAX];

    if (t->found->metadata[0] || store_join(t->c->dir, path, dir, sizeof dir) < 0 ||
        store_join(dir, name, full, sizeof full) < 0 ||
        strlen(full) >= sizeof t->found->metadata)
        return;
    snprintf(t->found->metadata, sizeof t->found->metadata, "%s", full);
}

/* ---- attributes ---- */

static void learn_step(struct tree *t, const struct json *doc)
{
    if (json_i64(json_get(doc, "step"), &t->found->step))
        t->found->has_step = true;
}

/* Python's JSON of one node's attributes; empty ones are not worth an object. */
static int report_attributes(struct tree *t, const char *path, const char *text,
                             size_t len, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {.max = MAX_ATTRIBUTES}, key = {0};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0};

    buf_addf(&key, "%s%sattributes", path, path[0] ? "/" : "");
    if (buf_failed(&key))
        return err_nomem(e);
    if (json_to_object(text, len, &json, &why) < 0 ||
        json_parse(json.data ? json.data : "", json.len, NULL, &doc, &why) < 0)
        return why.code == ENOMEM
                   ? err_nomem(e)
                   : object_unreadable(t->sink, key.data, key.len, &why, e);
    if (json_kind(doc) == JSON_OBJECT && json_count(doc) == 0)
        return 0;
    if (!path[0])
        learn_step(t, doc);
    return sink_object(t->sink, key.data, key.len, json.data, json.len, e);
}

/* All of a file; 0: it cannot be read, which is told. */
static int read_node(struct tree *t, const char *path, const char *name, size_t max,
                     char **text, size_t *len, struct err *e)
{
    struct err why = {0};

    if (zarr_dir_read(t->c->store, t->c->dir, path, name, max, text, len, &why) == 0)
        return 1;
    if (stops_scan(why.code)) {
        return err_copy(e, &why);
    }
    return warn(t, "unreadable", path, why.text, e);
}

static int report_zattrs(struct tree *t, const char *path, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    size_t len;
    int rc = hide_file(t, path, ZATTRS, e);

    if (rc == 0)
        rc = read_node(t, path, ZATTRS, MAX_ATTRIBUTES, &text, &len, e);
    return rc <= 0 ? rc : report_attributes(t, path, text, len, e);
}

static int report_v3_attributes(struct tree *t, const char *path, const char *text,
                                size_t len, struct err *e)
{
    struct zarr_slice attributes;

    if (!zarr_member(text, len, "attributes", &attributes))
        return 0;
    return report_attributes(t, path, attributes.text, attributes.len, e);
}

/* ---- arrays ---- */

/* What an array means, as far as readers can tell. */
static uint64_t meaning_of(const struct zarr_array *a)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct err ignored = {0};
    uint64_t h;

    buf_addf(&b, "%s %d ", a->why, a->dtype);
    shape_format(&a->shape, &b);
    shape_format(&a->grid_chunk, &b);
    shape_format(&a->inner, &b);
    zarr_spec_write(a, &b, &ignored);
    buf_add(&b, a->fill, sizeof a->fill);
    buf_add(&b, a->order, a->shape.nd);
    buf_addc(&b, a->separator);
    buf_addc(&b, (char)(a->has_fill | a->big_endian << 1 | a->sharded << 2));
    h = buf_failed(&b) ? 0 : XXH3_64bits(b.data, b.len);
    return h;
}

static int note_seen(struct tree *t, const char *path, const struct zarr_array *a,
                     struct err *e)
{
    if (!VEC_ROOM(t->seen, t->nseen, t->cap))
        return err_nomem(e);
    t->seen[t->nseen++] =
        (struct seen){XXH3_64bits(path, strlen(path)), meaning_of(a), false};
    return 0;
}

/* An array at the root has the directory's name, without the ending that many give it. */
static size_t key_of(const struct tree *t, const char *path, const char **key)
{
    static const char ending[] = ".zarr";
    size_t len;

    *key = path[0] ? path : listing_name(t->c->listing);
    len = strlen(*key);
    if (!path[0] && len >= sizeof ending &&
        strcmp(*key + len - (sizeof ending - 1), ending) == 0)
        len -= sizeof ending - 1;
    return len;
}

/* EasyDeL calls the optimizer's tree tx. */
static int role_of_path(const struct tree *t, const char *path)
{
    return t->listed && strncmp(path, "tx/", 3) == 0
               ? ROLE_OPTIMIZER
               : (int)jax_role(NULL, path, strlen(path));
}

/* `text` is what metadata hold, or NULL: they are not read yet. */
static int report_array(struct tree *t, const char *path, const struct listing *l,
                        const char *metadata, const char *text, size_t len,
                        struct err *e)
{
    const struct zarr_dir d = {
        .store = t->c->store,
        .root = t->c->dir,
        .path = path,
        .metadata = metadata,
        .listing = l,
        .text = text,
        .len = len,
    };
    struct sink_tensor about = {.role = role_of_path(t, path)};
    struct zarr_array a;

    about.key_len = key_of(t, path, &about.key);
    TRY(hide_top(t, path, e));
    TRY(hide_file(t, path, metadata, e));
    TRY(zarr_dir_report(&d, &about, t->sink, &a, e));
    note_metadata(t, path, metadata);
    t->found->arrays[a.format == 3 ? 3 : 2]++;
    return note_seen(t, path, &a, e);
}

/* Directories of chunks of an array that is the checkpoint itself are seen at its top. */
static int hide_chunks(struct tree *t, const struct listing *l, struct err *e)
{
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        const char *name = entry->name;

        if (entry->st.kind == ENTRY_DIR &&
            (strcmp(name, "c") == 0 || strspn(name, "0123456789") == strlen(name)))
            TRY(sink_hide(t->sink, name, false, e));
    }
    return 0;
}

/* ---- directories ---- */

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

/* The children of a group, or of a directory in which there may be some. */
static int push_children(struct tree *t, const struct todo *at, const struct listing *l,
                         struct err *e)
{
    char path[PATH_MAX];

    if (at->is_link || at->depth >= MAX_DEPTH)
        return 0;
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        const struct todo child = {
            .path = path, .depth = at->depth + 1, .is_link = entry->st.is_link};

        if (entry->st.kind == ENTRY_DIR && entry->name[0] != '.') {
            TRY(join(at->path, entry->name, path, e));
            TRY(push(t, &child, e));
        }
    }
    return 0;
}

/* The copies of all nodes below the root, for check_consolidated(). */
static int keep_consolidated(struct tree *t, const char *text, size_t len,
                             const char *member, struct err *e)
{
    struct zarr_slice outer, inner;

    if (!zarr_member(text, len, member, &outer))
        return 0;
    if (strcmp(member, "metadata") == 0)
        inner = outer;
    else if (!zarr_member(outer.text, outer.len, "metadata", &inner))
        return 0;
    buf_add(&t->text, inner.text, inner.len);
    return buf_failed(&t->text) ? err_nomem(e) : 0;
}

static int visit_v2_group(struct tree *t, const struct todo *at,
                          const struct listing *l, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    size_t len;
    int rc = 0;

    if (has_file(l, ".zgroup")) {
        t->found->groups++;
        note_metadata(t, at->path, ".zgroup");
        rc = hide_file(t, at->path, ".zgroup", e);
        if (rc == 0)
            rc = hide_top(t, at->path, e);
    }
    if (rc == 0 && !at->path[0] && has_file(l, ZMETADATA)) {
        note_metadata(t, at->path, ZMETADATA);
        rc = hide_file(t, at->path, ZMETADATA, e);
        if (rc == 0)
            rc = read_node(t, at->path, ZMETADATA, MAX_GROUP, &text, &len, e);
        if (rc > 0)
            rc = keep_consolidated(t, text, len, "metadata", e);
    }
    return rc < 0 ? rc : push_children(t, at, l, e);
}

static bool is_group(const char *text, size_t len)
{
    struct zarr_slice type;

    return zarr_member(text, len, "node_type", &type) && type.len == 7 &&
           memcmp(type.text, "\"group\"", 7) == 0;
}

static int visit_v3(struct tree *t, const struct todo *at, const struct listing *l,
                    struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    size_t len = 0;
    int rc = hide_file(t, at->path, ZARR_JSON, e);

    if (rc == 0)
        rc = read_node(t, at->path, ZARR_JSON, MAX_GROUP, &text, &len, e);
    if (rc < 0)
        return rc;
    note_metadata(t, at->path, ZARR_JSON);
    if (rc > 0)
        TRY(report_v3_attributes(t, at->path, text, len, e));
    if (rc == 0 || !is_group(text, len))
        return report_array(t, at->path, l, ZARR_JSON, text, len, e);
    t->found->groups++;
    TRY(hide_top(t, at->path, e));
    if (!at->path[0])
        TRY(keep_consolidated(t, text, len, "consolidated_metadata", e));
    return push_children(t, at, l, e);
}

static int visit_listed(struct tree *t, const struct todo *at, const struct listing *l,
                        struct err *e)
{
    bool v3 = has_file(l, ZARR_JSON), v2 = has_file(l, ZARRAY);

    if (!at->path[0] && (v2 || v3))
        TRY(hide_chunks(t, l, e));
    if (has_file(l, ZATTRS))
        TRY(report_zattrs(t, at->path, e));
    if (v3 && v2)
        TRY(warn(t, "two-formats", at->path, "zarr.json is read, .zarray is not", e));
    if (v3)
        return visit_v3(t, at, l, e);
    return v2 ? report_array(t, at->path, l, ZARRAY, NULL, 0, e)
              : visit_v2_group(t, at, l, e);
}

static int visit(struct tree *t, const struct todo *at, struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    char full[PATH_MAX];

    if (!at->path[0])
        return visit_listed(t, at, t->c->listing, e);
    TRY(sink_watch(t->sink, at->path, e));
    TRY(join(t->c->dir, at->path, full, e));
    TRY(t->c->store->ops->list(t->c->store, full, &l, e));
    return visit_listed(t, at, l, e);
}

/* ---- consolidated metadata ---- */

/* Reports an array that only the copy knows. */
static int report_lost(struct tree *t, const char *path, struct zarr_array *a,
                       struct err *e)
{
    CLEANUP(zarr_chunks_freep) struct zarr_chunks *chunks = NULL;
    const struct sink_tensor about = {.key = path,
                                      .key_len = strlen(path),
                                      .role = (int)jax_role(NULL, path, strlen(path))};
    static const struct zarr_how how;

    if (!store_name_is_safe(path, strlen(path)))
        zarr_refuse(a, "consolidated metadata name a path that leads elsewhere");
    zarr_refuse(a, "it stands in consolidated metadata, its own are missing");
    t->found->arrays[a->format == 3 ? 3 : 2]++;
    TRY(zarr_chunks_new(a, &chunks, e));
    return zarr_report(a, chunks, &about, &how, t->sink, e);
}

static int by_path(const void *a, const void *b)
{
    const struct seen *x = a, *y = b;

    return (x->path > y->path) - (x->path < y->path);
}

static int check_array(struct tree *t, const char *path, struct zarr_array *a,
                       struct err *e)
{
    const struct seen key = {.path = XXH3_64bits(path, strlen(path))};
    struct seen *found =
        t->nseen ? bsearch(&key, t->seen, t->nseen, sizeof key, by_path) : NULL;

    if (!found)
        return report_lost(t, path, a, e);
    found->told = true;
    if (found->meaning != meaning_of(a))
        return warn(t, "consolidated", path,
                    "consolidated metadata differ from its own, which are used", e);
    return 0;
}

/* "a/b/.zarray" of version 2; "a/b" of version 3, where it is an array. */
static int check_node(void *user, const char *key, size_t key_len, const char *text,
                      size_t len, struct err *e)
{
    struct tree *t = user;
    CLEANUP(buf_release) struct buf path = {0};
    struct zarr_array a;
    size_t cut = sizeof ZARRAY - 1;
    struct zarr_slice type;
    bool v2 = key_len >= cut && memcmp(key + key_len - cut, ZARRAY, cut) == 0 &&
              (key_len == cut || key[key_len - cut - 1] == '/');
    int rc;

    if (!v2 && (!zarr_member(text, len, "node_type", &type) || is_group(text, len)))
        return 0;
    if (v2)
        key_len -= MIN(key_len, cut + 1);
    buf_add(&path, key, key_len);
    buf_addc(&path, '\0');
    if (buf_failed(&path))
        return err_nomem(e);
    rc = v2 ? zarr_parse_v2(text, len, &a, e) : zarr_parse_v3(text, len, &a, e);
    return rc < 0 ? rc : check_array(t, path.data, &a, e);
}

static int check_consolidated(struct tree *t, struct err *e)
{
    struct err why = {0};
    uint64_t untold = 0;
    char text[80];
    int rc;

    if (t->text.len == 0)
        return 0;
    if (t->nseen > 0)
        qsort(t->seen, t->nseen, sizeof *t->seen, by_path);
    rc = zarr_each_member(t->text.data, t->text.len, check_node, t, &why);
    if (rc < 0 && why.code != EBADMSG) {
        *e = why;
        return rc;
    }
    if (rc < 0)
        return warn(t, "consolidated", "consolidated metadata", why.text, e);
    for (size_t i = 0; i < t->nseen; i++)
        untold += !t->seen[i].told;
    snprintf(text, sizeof text, "%" PRIu64 " arrays are not in it", untold);
    return untold ? warn(t, "consolidated", "consolidated metadata", text, e) : 0;
}

/* ---- EasyDeL's list ---- */

static int check_listed(void *user, const char *path, struct err *e)
{
    static const struct shape none = {.nd = 1};
    struct tree *t = user;
    const struct seen key = {.path = XXH3_64bits(path, strlen(path))};
    const struct sink_tensor lost = {.key = path,
                                     .key_len = strlen(path),
                                     .dtype = DTYPE_U8,
                                     .shape = &none,
                                     .role = role_of_path(t, path)};
    int rc;

    if (t->nseen > 0 && bsearch(&key, t->seen, t->nseen, sizeof key, by_path))
        return 0;
    rc = sink_tensor_begin(t->sink, &lost, e);
    if (rc == -EEXIST) {
        *e = (struct err){0};
        return 0;
    }
    if (rc < 0)
        return rc;
    if (sink_fault(t->sink, "%s names it, but there is no such array", ZARR_LISTED) < 0)
        return err_nomem(e);
    return sink_tensor_end(t->sink, e);
}

static int check_list(struct tree *t, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len;
    int rc;

    if (!t->listed)
        return 0;
    if (t->nseen > 0)
        qsort(t->seen, t->nseen, sizeof *t->seen, by_path);
    rc = hide_file(t, "", ZARR_LISTED, e);
    if (rc == 0)
        rc = read_node(t, "", ZARR_LISTED, MAX_GROUP, &text, &len, e);
    if (rc <= 0)
        return rc;
    rc = zarr_listed_each(text, len, check_listed, t, &why);
    if (rc == 0 || why.code == EBADMSG || why.code == EFBIG)
        return rc == 0 ? 0 : warn(t, "damaged-file", ZARR_LISTED, why.text, e);
    *e = why;
    return rc;
}

/* ---- all of it ---- */

static int walk(struct tree *t, struct err *e)
{
    const struct todo root = {.path = ""};

    TRY(push(t, &root, e));
    while (t->todo) {
        const struct todo *at = t->todo;

        TRY(visit(t, at, e));
        t->todo = at->next;
    }
    TRY(check_consolidated(t, e));
    return check_list(t, e);
}

int zarr_tree_report(const struct scan_context *c, struct sink *sink,
                     struct zarr_found *out, struct err *e)
{
    struct tree t = {
        .c = c,
        .sink = sink,
        .found = out,
        .arena = arena_new(TREE_MEMORY),
        .text.max = MAX_GROUP,
    };
    int rc;

    *out = (struct zarr_found){0};
    t.last = &t.todo;
    t.listed = has_file(c->listing, ZARR_LISTED);
    rc = t.arena ? walk(&t, e) : err_nomem(e);
    arena_free(t.arena);
    free(t.seen);
    buf_release(&t.text);
    return rc;
}
