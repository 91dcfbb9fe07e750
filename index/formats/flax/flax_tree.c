/* SPDX-License-Identifier: MIT */
/* index/formats/flax/flax_tree.c - the tree that flax.serialization packed: arrays and values. */
#include "index/formats/flax/flax_tree.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/keyset.h"
#include "index/formats/flax/flax_array.h"
#include "index/formats/flax/msgpack.h"
#include "index/formats/object_value.h"
#include "remote/source.h"

enum {
    MAX_DEPTH = 100,       /* modules in modules: real trees are under 30 deep */
    MAX_KEY = 64 << 10,    /* of one key, and of a path */
    MAX_BYTES = 16 << 20,  /* of one text or bytes that is no array */
    MAX_OBJECT = 64 << 20, /* JSON of one entry of the outermost map */
};

static const uint64_t MAX_VALUES = 20 * 1000 * 1000; /* of one file */

/* A map or list whose values are being read. */
struct level {
    bool is_map;
    uint64_t left, position;
    uint64_t number; /* of this map: a key is looked for in one map only */
    size_t path_len; /* of its own path */
};

struct walk {
    const struct flax_visitor *v;
    struct msgpack m;
    struct level level[MAX_DEPTH];
    unsigned depth;
    struct buf path, json, key;
    struct keyset seen;
    uint64_t maps, values;
    bool is_object; /* the entry of the outermost map holds more than arrays */
};

static void walk_release(struct walk *w)
{
    buf_release(&w->path);
    buf_release(&w->json);
    buf_release(&w->key);
    keyset_release(&w->seen);
}

static int bad(const struct walk *w, int code, const char *what, struct err *e)
{
    err_set(e, code, "byte %" PRIu64 ": %s", w->m.pos, what);
    return err_wrap(e, "%s", w->m.src->name);
}

/* ---- values ---- */

static int write_bytes(struct walk *w, const struct msgpack_value *v, struct err *e)
{
    buf_clear(&w->key);
    if (v->len > MAX_BYTES) {
        buf_addf(&w->json, "{\"$type\":\"opaque\",\"class\":\"%s\",\"truncated\":true}",
                 v->kind == MSGPACK_STR ? "builtins.str" : "builtins.bytes");
        return 0;
    }
    TRY(msgpack_bytes(&w->m, v, MAX_BYTES, &w->key, e));
    if (v->kind == MSGPACK_STR)
        object_value_text(&w->json, w->key.data ? w->key.data : "", w->key.len);
    else
        object_value_bytes(&w->json, w->key.data, w->key.len);
    return 0;
}

/* A Python complex: [real, imaginary]. */
static int write_complex(struct walk *w, const struct msgpack_value *v, struct err *e)
{
    struct msgpack in;
    struct msgpack_value part[3];

    msgpack_enter(&w->m, v, &in);
    for (size_t i = 0; i < 3; i++)
        TRY(msgpack_need(&in, &part[i], e));
    if (part[0].kind != MSGPACK_ARRAY || part[0].len != 2 ||
        part[1].kind != MSGPACK_FLOAT || part[2].kind != MSGPACK_FLOAT)
        return bad(w, EBADMSG, "a complex number that flax does not write", e);
    buf_adds(&w->json,
             "{\"$type\":\"opaque\",\"class\":\"builtins.complex\",\"args\":[");
    object_value_double(&w->json, part[1].f);
    buf_addc(&w->json, ',');
    object_value_double(&w->json, part[2].f);
    buf_adds(&w->json, "]}");
    return 0;
}

/* Extensions of others, as the Python package shows them. */
static int write_ext(struct walk *w, const struct msgpack_value *v, struct err *e)
{
    buf_addf(&w->json,
             "{\"$type\":\"opaque\",\"class\":\"msgpack.ExtType\",\"args\":[%d,",
             v->ext);
    TRY(write_bytes(w, v, e));
    buf_adds(&w->json, "]}");
    return 0;
}

static int report_array(struct walk *w, const struct flax_array *a, struct err *e)
{
    size_t len = w->path.len;

    if (a->dtype == DTYPE_NONE) {
        w->is_object = true;
        buf_adds(&w->json,
                 "{\"$type\":\"opaque\",\"class\":\"numpy.ndarray\",\"dtype\":");
        object_value_text(&w->json, a->name, strlen(a->name));
        buf_adds(&w->json, ",\"shape\":");
        shape_format(&a->shape, &w->json);
        buf_addc(&w->json, '}');
        return 0;
    }
    TRY(w->v->array(w->v->user, &w->path, a, e));
    buf_adds(&w->json, "{\"$type\":\"tensor\",\"key\":");
    buf_add_json(&w->json, w->path.data, w->path.len);
    buf_addc(&w->json, '}');
    w->path.len = len;
    return 0;
}

static int write_array(struct walk *w, const struct msgpack_value *v, struct err *e)
{
    CLEANUP(flax_array_release) struct flax_array a = {0};

    TRY(flax_array_read(&w->m, v, &a, e));
    return report_array(w, &a, e);
}

static int write_scalar(struct walk *w, const struct msgpack_value *v, struct err *e)
{
    if (v->kind == MSGPACK_EXT &&
        (v->ext == FLAX_EXT_ARRAY || v->ext == FLAX_EXT_SCALAR))
        return write_array(w, v, e);
    w->is_object = true;
    switch (v->kind) {
    case MSGPACK_BOOL:
        buf_adds(&w->json, v->b ? "true" : "false");
        return 0;
    case MSGPACK_INT:
        object_value_int(&w->json, v->i);
        return 0;
    case MSGPACK_UINT:
        object_value_uint(&w->json, v->u);
        return 0;
    case MSGPACK_FLOAT:
        object_value_double(&w->json, v->f);
        return 0;
    case MSGPACK_STR:
    case MSGPACK_BIN:
        return write_bytes(w, v, e);
    case MSGPACK_EXT:
        return v->ext == FLAX_EXT_COMPLEX ? write_complex(w, v, e) : write_ext(w, v, e);
    case MSGPACK_NIL:
    case MSGPACK_ARRAY:
    case MSGPACK_MAP:
        break;
    }
    buf_adds(&w->json, "null");
    return 0;
}

/* ---- maps and lists ---- */

/* Reads the key of a map's next value into w->key; no key is there twice. */
static int read_key(struct walk *w, struct level *l, struct err *e)
{
    struct msgpack_value v;
    size_t len;
    int rc;

    TRY(msgpack_need(&w->m, &v, e));
    if (v.kind != MSGPACK_STR)
        return bad(w, ENOTSUP, "a map has a key that is no text", e);
    buf_clear(&w->key);
    rc = msgpack_bytes(&w->m, &v, MAX_KEY, &w->key, e);
    len = w->key.len;
    buf_add(&w->key, &l->number, sizeof l->number);
    if (rc < 0 || buf_failed(&w->key))
        return rc < 0 ? rc : err_nomem(e);
    if (!object_text_is_utf8(w->key.data, len) || memchr(w->key.data, '\0', len))
        return bad(w, EBADMSG, "a key of a map is no text in UTF-8", e);
    rc = keyset_add(&w->seen, w->key.data, w->key.len);
    w->key.len = len;
    if (rc == 0)
        return bad(w, EBADMSG, "a key is there twice in one map", e);
    return rc < 0 ? err_nomem(e) : 0;
}

/* The path of the value that comes next. */
static int set_path(struct walk *w, const struct level *l, struct err *e)
{
    w->path.len = l->path_len;
    if (w->depth > 1)
        buf_addc(&w->path, '.');
    if (l->is_map)
        buf_add(&w->path, w->key.data, w->key.len);
    else
        buf_addf(&w->path, "%" PRIu64, l->position);
    if (buf_failed(&w->path))
        return bad(w, EFBIG, "a path of more than 64 KiB", e);
    return 0;
}

static int begin_entry(struct walk *w, struct level *l, struct err *e)
{
    if (w->depth == 1) {
        buf_clear(&w->json);
        w->is_object = false;
        return 0;
    }
    if (l->position > 0)
        buf_addc(&w->json, ',');
    if (l->is_map) {
        object_value_name(&w->json, w->key.data, w->key.len);
        buf_addc(&w->json, ':');
    }
    return buf_failed(&w->json) ? bad(w, EFBIG, "objects of more than 64 MiB", e) : 0;
}

/* An entry of the outermost map is complete. */
static int end_entry(struct walk *w, struct err *e)
{
    if (w->depth != 1 || !w->is_object)
        return 0;
    if (buf_failed(&w->json))
        return bad(w, EFBIG, "objects of more than 64 MiB", e);
    return w->v->object(w->v->user, w->path.data, w->path.len, w->json.data,
                        w->json.len, e);
}

static int enter(struct walk *w, const struct msgpack_value *v, struct err *e)
{
    if (w->depth == MAX_DEPTH)
        return bad(w, EFBIG, "values are more than 100 deep in each other", e);
    w->level[w->depth++] = (struct level){.is_map = v->kind == MSGPACK_MAP,
                                          .left = v->len,
                                          .number = w->maps++,
                                          .path_len = w->path.len};
    if (w->depth > 1)
        buf_addc(&w->json, v->kind == MSGPACK_MAP ? '{' : '[');
    return 0;
}

static int leave(struct walk *w, struct err *e)
{
    const struct level *l = &w->level[--w->depth];

    if (w->depth == 0)
        return 0;
    buf_addc(&w->json, l->is_map ? '}' : ']');
    w->path.len = l->path_len;
    return end_entry(w, e);
}

/* A map that was just read: is it an array in chunks? Nothing is taken if not. */
static int try_chunked(struct walk *w, const struct msgpack_value *map, struct err *e)
{
    CLEANUP(flax_array_release) struct flax_array a = {0};
    struct msgpack ahead = w->m;
    struct msgpack_value v;

    if (map->kind != MSGPACK_MAP || map->len == 0)
        return 0;
    TRY(msgpack_need(&ahead, &v, e));
    if (v.kind != MSGPACK_STR || v.len != strlen(flax_chunked_mark))
        return 0;
    buf_clear(&w->key);
    TRY(msgpack_bytes(&ahead, &v, MAX_KEY, &w->key, e));
    if (memcmp(w->key.data, flax_chunked_mark, w->key.len) != 0)
        return 0;
    w->m = ahead;
    TRY(flax_chunked_read(&w->m, map->len, &a, e));
    TRY(report_array(w, &a, e));
    return 1;
}

/* The value whose path is set: whole, or its first step. */
static int take_value(struct walk *w, struct err *e)
{
    struct msgpack_value v;
    int rc;

    if (++w->values > MAX_VALUES)
        return bad(w, EFBIG, "more than 20 million values", e);
    TRY(msgpack_need(&w->m, &v, e));
    if (v.kind != MSGPACK_MAP && v.kind != MSGPACK_ARRAY) {
        TRY(write_scalar(w, &v, e));
        return end_entry(w, e);
    }
    rc = try_chunked(w, &v, e);
    if (rc != 0)
        return rc < 0 ? rc : end_entry(w, e);
    return enter(w, &v, e);
}

static int walk_value(struct walk *w, struct err *e)
{
    struct level *l = &w->level[w->depth - 1];

    if (l->is_map)
        TRY(read_key(w, l, e));
    TRY(set_path(w, l, e));
    TRY(begin_entry(w, l, e));
    l->position++;
    l->left--;
    return take_value(w, e);
}

/* ---- EasyLM's stream ---- */

/* The key of a record, a list of names: into w->key, joined by dots. */
static int read_names(struct walk *w, struct err *e)
{
    struct msgpack_value list, v;
    size_t len;
    int rc = 0;

    TRY(msgpack_need(&w->m, &list, e));
    if (list.kind != MSGPACK_ARRAY || list.len == 0 || list.len > MAX_DEPTH)
        return bad(w, EBADMSG, "the key of a record is no list of names", e);
    buf_clear(&w->key);
    for (uint64_t i = 0; rc == 0 && i < list.len; i++) {
        TRY(msgpack_need(&w->m, &v, e));
        if (v.kind != MSGPACK_STR)
            return bad(w, EBADMSG, "the key of a record is no list of names", e);
        len = w->key.len;
        rc = msgpack_bytes(&w->m, &v, MAX_KEY, &w->key, e);
        if (rc == 0 && w->key.len > len &&
            memchr(w->key.data + len, '\0', w->key.len - len))
            return bad(w, EBADMSG, "a name in a key has a NUL", e);
        buf_addc(&w->key, '\0'); /* two lists of names may be one path */
    }
    if (rc < 0 || buf_failed(&w->key))
        return rc < 0 ? rc : bad(w, EFBIG, "a path of more than 64 KiB", e);
    rc = keyset_add(&w->seen, w->key.data, w->key.len);
    if (rc <= 0)
        return rc < 0 ? err_nomem(e) : bad(w, EBADMSG, "a key is there twice", e);
    w->key.len--;
    for (size_t i = 0; i < w->key.len; i++)
        if (w->key.data[i] == '\0')
            w->key.data[i] = '.';
    if (!object_text_is_utf8(w->key.data, w->key.len))
        return bad(w, EBADMSG, "a name in a key is no text in UTF-8", e);
    return 0;
}

/* Bytes that are one value by themselves, as flax packs it. */
static int walk_packed(struct walk *w, const struct msgpack_value *v, struct err *e)
{
    struct msgpack outer = w->m;
    int rc;

    msgpack_enter(&outer, v, &w->m);
    rc = take_value(w, e);
    while (rc == 0 && w->depth > 1)
        rc = w->level[w->depth - 1].left > 0 ? walk_value(w, e) : leave(w, e);
    if (rc < 0)
        return rc;
    if (w->m.pos != w->m.end)
        return bad(w, EBADMSG, "there are bytes behind the end of a value", e);
    w->m = outer;
    return 0;
}

/* [[name, ...], bytes] */
static int walk_record(struct walk *w, struct err *e)
{
    struct msgpack_value v;

    TRY(read_names(w, e));
    TRY(set_path(w, &w->level[0], e));
    TRY(begin_entry(w, &w->level[0], e));
    TRY(msgpack_need(&w->m, &v, e));
    if (v.kind != MSGPACK_BIN && v.kind != MSGPACK_STR)
        return bad(w, EBADMSG, "the value of a record is no bytes", e);
    return walk_packed(w, &v, e);
}

/* Nothing says how many there are: a file that was cut between two looks whole. */
static int walk_stream(struct walk *w, struct err *e)
{
    struct msgpack_value v;
    int rc;

    buf_adds(&w->path, "");
    w->level[w->depth++] = (struct level){.is_map = true, .number = w->maps++};
    while ((rc = msgpack_next(&w->m, &v, e)) > 0) {
        if (v.kind != MSGPACK_ARRAY || v.len != 2)
            return bad(w, EBADMSG, "a record is no pair of key and value", e);
        TRY(walk_record(w, e));
    }
    return rc;
}

static int walk_all(struct walk *w, struct err *e)
{
    struct msgpack start = w->m;
    struct msgpack_value v;

    TRY(msgpack_need(&w->m, &v, e));
    if (v.kind == MSGPACK_ARRAY && v.len == 2) {
        w->m = start;
        return walk_stream(w, e);
    }
    if (v.kind != MSGPACK_MAP)
        return bad(w, ENOTSUP, "the outermost value is no map", e);
    buf_adds(&w->path, "");
    TRY(enter(w, &v, e));
    while (w->depth > 0) {
        int rc = w->level[w->depth - 1].left > 0 ? walk_value(w, e) : leave(w, e);

        if (rc < 0)
            return rc;
    }
    if (w->m.pos != w->m.end)
        return bad(w, EBADMSG, "there are bytes behind the end of the map", e);
    return 0;
}

int flax_walk(struct source *src, uint64_t off, uint64_t len,
              const struct flax_visitor *v, struct err *e)
{
    CLEANUP_FREE struct walk *w = calloc(1, sizeof *w);
    int rc;

    if (!w)
        return err_nomem(e);
    w->v = v;
    w->path.max = MAX_KEY;
    w->key.max = MAX_BYTES + 64;
    w->json.max = MAX_OBJECT;
    rc = msgpack_init(&w->m, src, off, len, e);
    if (rc == 0)
        rc = walk_all(w, e);
    walk_release(w);
    return rc;
}

/* How many bytes begin a map, or 0. */
static size_t map_mark(const unsigned char *head, size_t len)
{
    if (len == 0 || (head[0] & 0xf0) == 0x80)
        return len > 0;
    return head[0] == 0xde ? 3 : head[0] == 0xdf ? 5 : 0;
}

bool flax_sniff(const void *head, size_t len)
{
    CLEANUP(source_putp) struct source *src = NULL;
    struct err ignored = {0};
    struct msgpack_value v;
    struct msgpack m;
    size_t mark = map_mark(head, len);

    /* The map counts more entries than these first bytes have: its mark is stepped over. */
    if (mark == 0 || mark >= len ||
        source_from_memory(head, len, false, "head", &src, &ignored) < 0 ||
        msgpack_init(&m, src, mark, len - mark, &ignored) < 0)
        return false;
    return msgpack_need(&m, &v, &ignored) == 0 && v.kind == MSGPACK_STR;
}

bool flax_sniff_stream(const void *head, size_t len)
{
    CLEANUP(source_putp) struct source *src = NULL;
    const unsigned char *byte = head;
    struct err ignored = {0};
    struct msgpack_value list, v;
    struct msgpack m;

    if (len < 2 || byte[0] != 0x92 ||
        source_from_memory(head, len, false, "head", &src, &ignored) < 0 ||
        msgpack_init(&m, src, 1, len - 1, &ignored) < 0 ||
        msgpack_need(&m, &list, &ignored) < 0 || list.kind != MSGPACK_ARRAY ||
        list.len == 0)
        return false;
    for (uint64_t i = 0; i < list.len; i++)
        if (msgpack_need(&m, &v, &ignored) < 0 || v.kind != MSGPACK_STR)
            return false;
    /* Bytes follow, of any length. */
    return m.pos < len && byte[m.pos] >= 0xc4 && byte[m.pos] <= 0xc6;
}
