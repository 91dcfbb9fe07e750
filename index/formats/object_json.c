/* SPDX-License-Identifier: MIT */
/* index/formats/object_json.c - an unpickled graph as the JSON of objects.json. */
#include <errno.h>
#include <locale.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/object_json_priv.h"
#include "index/formats/object_json_writer.h"
#include "index/formats/object_value.h"
#include "index/formats/rankfiles/dist_tensor.h"
#include "index/formats/torch/torch_walk.h"
#include "index/formats/torch/torch_zip.h"

enum {
    MAX_PATH = 64 << 10,
    MAX_TEXT = 1 << 30,
    BYTES_A_VISIT = 1024 /* so that shared strings cannot multiply without cost */
};

static const uint64_t DEFAULT_BUDGET = 1000000;

static void write_value(struct object_writer *w, struct pv v);

bool object_writer_found(struct object_writer *w, int rc)
{
    w->no_memory = w->no_memory || rc < 0;
    return rc > 0;
}

/* Scalars. */

void object_write_text(struct object_writer *w, const char *text)
{
    buf_adds(w->out, text);
}

void object_write_type(struct object_writer *w, const char *type)
{
    buf_addf(w->out, "{\"$type\":\"%s\"", type);
}

/* Text and bytes cost by their length. */
static void spend_bytes(struct object_writer *w, size_t len)
{
    w->budget -= MIN(w->budget, len / BYTES_A_VISIT);
}

void object_write_base64(struct object_writer *w, const char *data, size_t len)
{
    spend_bytes(w, len);
    object_value_base64(w->out, data, len);
}

static void write_str(struct object_writer *w, const struct pv *v)
{
    size_t len;
    const char *s = pv_bytes(v, &len);

    spend_bytes(w, len);
    object_value_text(w->out, s, len);
}

void object_write_bytes(struct object_writer *w, const struct object_bytes *b)
{
    spend_bytes(w, b->len);
    object_value_bytes(w->out, b->data, b->len);
}

/* Names. Python 2's module of built-in classes is today's. */

void object_write_name(struct object_writer *w, const struct pv *global)
{
    struct buf text = {.max = 1 << 18}; /* two names of 64 KiB at most */
    const char *module, *name;

    if (pv_global(global, &module, &name)) {
        bool builtin = strcmp(module, "__builtin__") == 0;

        buf_adds(&text, builtin ? "builtins" : module);
        buf_adds(&text, ".");
        buf_adds(&text, builtin && strcmp(name, "xrange") == 0 ? "range" : name);
    } else {
        buf_adds(&text, "object"); /* of a class that is itself the result of a call */
    }
    w->no_memory = w->no_memory || buf_failed(&text) < 0;
    buf_add_json(w->out, text.data ? text.data : "", text.len);
    buf_release(&text);
}

static void write_class(struct object_writer *w, const struct pv *v)
{
    static const char *const names[] = {
        [PV_TUPLE] = "builtins.tuple", [PV_LIST] = "builtins.list",
        [PV_SET] = "builtins.set",     [PV_FROZENSET] = "builtins.frozenset",
        [PV_DICT] = "builtins.dict",   [PV_PERSID] = "persistent_id",
    };
    struct pv class;

    if (v->kind == PV_OBJECT) {
        class = pv_class(v);
        object_write_name(w, &class);
    } else {
        const char *name = v->kind < ARRAY_SIZE(names) ? names[v->kind] : NULL;

        buf_addf(w->out, "\"%s\"", name ? name : "object");
    }
}

/* Path and depth. Paths are spelt as torch_walk.h spells them, which gives tensors their keys. */

static void add_part(struct buf *path, const struct object_step *p)
{
    CLEANUP(buf_release) struct buf part = {.max = MAX_PATH};

    if (p->keyed)
        torch_key_part(&p->key, p->position, &part);
    else
        buf_addf(&part, "%zu", p->position);
    if (buf_failed(&part))
        path->failed = part.failed;
    else
        torch_path_add(path, part.data ? part.data : "", part.len);
}

/* The path of the value that is being written. */
static void build_path(const struct object_writer *w, struct buf *path)
{
    buf_adds(path, "");
    for (unsigned i = 0; i < w->parts; i++)
        add_part(path, &w->part[i]);
}

static void write_child(struct object_writer *w, struct object_step step, struct pv v)
{
    w->part[w->parts++] = step;
    write_value(w, v);
    w->parts--;
}

static void write_item(struct object_writer *w, size_t position, struct pv v)
{
    write_child(w, (struct object_step){.position = position}, v);
}

static void truncated(struct object_writer *w, const struct pv *v)
{
    object_write_type(w, "opaque");
    object_write_text(w, ",\"class\":");
    write_class(w, v);
    object_write_text(w, ",\"truncated\":true}");
}

/* True when v may be written now; otherwise it was cut. Pair with leave(). */
static bool enter(struct object_writer *w, const struct pv *v)
{
    uintptr_t id = pv_identity(v);
    bool fits = w->depth < OBJECT_DEPTH_MAX;

    for (unsigned i = 0; fits && i < w->depth; i++)
        fits = w->open[i] != id;
    if (!fits) {
        truncated(w, v);
        return false;
    }
    w->open[w->depth++] = id;
    return true;
}

static void leave(struct object_writer *w)
{
    w->depth--;
}

/* Containers. */

/* What comes next is the last item of its container: it says that more was cut. */
static bool is_spent(const struct object_writer *w)
{
    return w->budget == 0 || buf_failed(w->out);
}

void object_write_items(struct object_writer *w, const struct pv *v)
{
    bool stop = false;

    object_write_text(w, "[");
    for (size_t i = 0; i < pv_count(v) && !stop; i++) {
        stop = is_spent(w);
        object_write_text(w, i > 0 ? "," : "");
        write_item(w, i, pv_at(v, i));
    }
    object_write_text(w, "]");
}

void object_write_sequence(struct object_writer *w, const char *type,
                           const struct pv *v, bool frozen)
{
    object_write_type(w, type);
    if (frozen)
        object_write_text(w, ",\"frozen\":true");
    object_write_text(w, ",\"items\":");
    object_write_items(w, v);
    object_write_text(w, "}");
}

/* Strict readers (ours) refuse a name that holds NUL. */
static bool keys_are_text(const struct pv *dict)
{
    for (size_t i = 0; i < pv_count(dict); i++) {
        struct pv key = pv_key_at(dict, i);
        const char *s;
        size_t len;

        if (key.kind != PV_STR)
            return false;
        s = pv_bytes(&key, &len);
        if (!object_text_is_utf8(s, len) || memchr(s, '\0', len))
            return false;
    }
    return true;
}

static void write_member(struct object_writer *w, const struct pv *key)
{
    size_t len;
    const char *s = pv_bytes(key, &len);

    spend_bytes(w, len);
    object_value_name(w->out, s, len);
}

static void write_pairs(struct object_writer *w, const struct pv *dict, bool plain)
{
    bool stop = false;

    for (size_t i = 0; i < pv_count(dict) && !stop; i++) {
        struct pv key = pv_key_at(dict, i);

        stop = is_spent(w);
        object_write_text(w, i > 0 ? "," : "");
        if (plain) {
            write_member(w, &key);
            object_write_text(w, ":");
        } else {
            object_write_text(w, "[");
            write_value(w, key);
            object_write_text(w, ",");
        }
        write_child(w, (struct object_step){true, key, i}, pv_value_at(dict, i));
        object_write_text(w, plain ? "" : "]");
    }
}

void object_write_dict(struct object_writer *w, const struct pv *dict)
{
    bool plain = keys_are_text(dict);

    if (plain) {
        object_write_text(w, "{");
    } else {
        object_write_type(w, "dict");
        object_write_text(w, ",\"items\":[");
    }
    write_pairs(w, dict, plain);
    object_write_text(w, plain ? "}" : "]}");
}

/* What is written for an object that is only data to us. */

bool object_has_extras(const struct pv *v)
{
    return pv_list_items(v).kind != PV_NONE || pv_dict_items(v).kind != PV_NONE ||
           pv_state(v).kind != PV_NONE || pv_kwargs(v).kind != PV_NONE;
}

static void write_part(struct object_writer *w, const char *member, const struct pv *v)
{
    if (v->kind == PV_NONE)
        return;
    buf_addf(w->out, ",\"%s\":", member);
    write_value(w, *v);
}

static bool is_simple(const struct pv *v)
{
    return v->kind == PV_NONE || v->kind == PV_BOOL || v->kind == PV_INT ||
           v->kind == PV_BIGINT || v->kind == PV_FLOAT || v->kind == PV_STR;
}

/* Arguments from `from` on; a single simple one (enums, devices, paths) as "value". */
void object_write_args(struct object_writer *w, const struct pv *args, size_t from,
                       bool alone)
{
    size_t n = pv_count(args);
    bool stop = false;
    struct pv first;

    if (n <= from)
        return;
    first = pv_at(args, from);
    if (alone && n - from == 1 && is_simple(&first)) {
        object_write_text(w, ",\"value\":");
        write_value(w, first);
        return;
    }
    object_write_text(w, ",\"args\":[");
    for (size_t i = from; i < n && !stop; i++) {
        stop = is_spent(w);
        object_write_text(w, i > from ? "," : "");
        write_item(w, i, pv_at(args, i));
    }
    object_write_text(w, "]");
}

void object_write_extras(struct object_writer *w, const struct pv *v)
{
    struct pv kwargs = pv_kwargs(v), state = pv_state(v), list = pv_list_items(v),
              dict = pv_dict_items(v);

    write_part(w, "kwargs", &kwargs);
    write_part(w, "state", &state);
    write_part(w, "list", &list);
    write_part(w, "dict", &dict);
}

static void write_opaque(struct object_writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), class = pv_class(v);

    object_write_type(w, "opaque");
    object_write_text(w, ",\"class\":");
    object_write_name(w, &class);
    if (class.kind != PV_GLOBAL)
        write_part(w, "function", &class);
    object_write_args(w, &args, 0, !object_has_extras(v));
    object_write_extras(w, v);
    object_write_text(w, "}");
}

static void write_shape(struct object_writer *w, const struct shape *s)
{
    struct buf text = {.max = 1 << 12};

    if (shape_format(s, &text) == 0)
        buf_add(w->out, text.data, text.len);
    w->no_memory = w->no_memory || buf_failed(&text) < 0;
    buf_release(&text);
}

/* The key of what is here: a tensor, or a shard of one (NULL). */
static const char *key_of(const struct object_writer *w, const struct buf *path,
                          const struct torch_tensor *x)
{
    const struct object_keys *k = w->keys;

    return x ? k->on_tensor(k->user, path->data, path->len, x)
             : k->on_shard(k->user, path->data, path->len);
}

/* True when there is a key for what is here, and it was written. */
static bool write_key(struct object_writer *w, const struct torch_tensor *x)
{
    CLEANUP(buf_release) struct buf path = {.max = MAX_PATH};
    const char *key = NULL;

    if (x ? !w->keys->on_tensor : !w->keys->on_shard)
        return false;
    build_path(w, &path);
    w->no_memory = w->no_memory || buf_failed(&path) == -ENOMEM;
    if (!buf_failed(&path)) /* one over 64 KiB is no name for a tensor */
        key = key_of(w, &path, x);
    if (!key)
        return false;
    object_write_type(w, "tensor");
    object_write_text(w, ",\"key\":");
    buf_add_json(w->out, key, strlen(key));
    object_write_text(w, "}");
    return true;
}

static void write_tensor(struct object_writer *w, const struct torch_tensor *x)
{
    if (write_key(w, x))
        return;
    object_write_type(w, "opaque");
    buf_addf(w->out, ",\"class\":\"torch.Tensor\",\"dtype\":\"%s\",\"shape\":",
             dtype_name(x->dtype));
    write_shape(w, &x->shape);
    object_write_text(w, "}");
}

/* True when it is a tensor, sound or damaged; kinds that are not supported are objects. */
static bool try_tensor(struct object_writer *w, const struct pv *v)
{
    struct torch_tensor x;
    struct err e = {0};
    int rc = torch_zip_tensor(w->t, v, &x, &e);

    if ((rc == 0 || rc == -ENOTSUP) && dist_tensor_is(v))
        return write_key(w, NULL);
    if (rc == 0 || rc == -ENOTSUP)
        return false;
    if (rc > 0) {
        write_tensor(w, &x);
        return true;
    }
    object_write_type(w, "opaque");
    object_write_text(w, ",\"class\":\"torch.Tensor\",\"error\":");
    buf_add_json(w->out, e.text, strlen(e.text));
    object_write_text(w, "}");
    return true;
}

static void write_object(struct object_writer *w, const struct pv *v)
{
    if (!try_tensor(w, v) && !object_write_known(w, v))
        write_opaque(w, v);
}

/* A class or function by itself; element types of torch are such, too. */
static void write_global(struct object_writer *w, const struct pv *v)
{
    object_write_type(w, "opaque");
    buf_addf(w->out, ",\"class\":\"%s\",\"value\":",
             torch_dtype(v) != DTYPE_NONE ? "torch.dtype" : "global");
    object_write_name(w, v);
    object_write_text(w, "}");
}

static void write_persid(struct object_writer *w, const struct pv *v)
{
    struct pv arg = pv_persid(v);

    object_write_type(w, "opaque");
    object_write_text(w, ",\"class\":\"persistent_id\"");
    write_part(w, "value", &arg);
    object_write_text(w, "}");
}

/* What holds other values: entered once on the way, never deeper than the limit. */
static void write_nested(struct object_writer *w, const struct pv *v)
{
    if (!enter(w, v))
        return;
    switch (v->kind) {
    case PV_TUPLE:
        object_write_sequence(w, "tuple", v, false);
        break;
    case PV_LIST:
        object_write_items(w, v);
        break;
    case PV_SET:
    case PV_FROZENSET:
        object_write_sequence(w, "set", v, v->kind == PV_FROZENSET);
        break;
    case PV_DICT:
        object_write_dict(w, v);
        break;
    case PV_OBJECT:
        write_object(w, v);
        break;
    default:
        write_persid(w, v);
        break;
    }
    leave(w);
}

static void write_bigint(struct object_writer *w, const struct pv *v)
{
    size_t len;
    const char *digits = pv_bytes(v, &len);

    object_write_type(w, "int");
    buf_addf(w->out, ",\"value\":\"%.*s\"}", (int)len, digits);
}

static void write_value(struct object_writer *w, struct pv v)
{
    struct object_bytes bytes = {0};

    if (w->budget == 0) {
        truncated(w, &v);
        return;
    }
    w->budget--;
    switch ((enum pv_kind)v.kind) {
    case PV_NONE:
        object_write_text(w, "null");
        break;
    case PV_BOOL:
        object_write_text(w, v.b ? "true" : "false");
        break;
    case PV_INT:
        object_value_int(w->out, v.i);
        break;
    case PV_BIGINT:
        write_bigint(w, &v);
        break;
    case PV_FLOAT:
        object_value_double(w->out, v.f);
        break;
    case PV_STR:
        write_str(w, &v);
        break;
    case PV_BYTES:
        if (object_writer_found(w, object_bytes(&v, &bytes)))
            object_write_bytes(w, &bytes);
        break;
    case PV_GLOBAL:
        write_global(w, &v);
        break;
    case PV_RECORD:
        buf_addf(w->out,
                 "{\"$type\":\"opaque\",\"class\":\"record\",\"value\":%" PRIu64 "}",
                 v.record);
        break;
    case PV_TUPLE:
    case PV_LIST:
    case PV_SET:
    case PV_FROZENSET:
    case PV_DICT:
    case PV_OBJECT:
    case PV_PERSID:
        write_nested(w, &v);
        break;
    }
}

/* As write_value(), for no more than the file's objects may have; 0 or -EFBIG. */
static int write_root(struct object_writer *w, struct pv v)
{
    struct buf *out = w->out;
    size_t before = out->len, max = out->max, room = max ? max : MAX_TEXT;
    uint64_t left = w->t ? torch_zip_json_left(w->t) : MAX_TEXT;

    if (left == 0)
        return -EFBIG;
    out->max = MIN(room, before + MIN(left, MAX_TEXT));
    write_value(w, v);
    /* What did not fit took its time, too: nothing of the file is tried after it. */
    if (w->t)
        torch_zip_spend_json(w->t, buf_failed(out) == -EFBIG && out->max < room
                                       ? left
                                       : out->len - before);
    out->max = max;
    return buf_failed(out) == -EFBIG ? -EFBIG : 0;
}

int object_to_json_keys(struct torch_zip *t, const struct pv *v, uint64_t budget,
                        const struct object_keys *keys, struct buf *out, struct err *e)
{
    struct object_writer w = {
        .t = t,
        .keys = keys,
        .out = out,
        .budget = budget ? budget : DEFAULT_BUDGET,
    };
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0), before;
    int rc;

    if (!c)
        return err_nomem(e);
    before = uselocale(c); /* of this thread: a decimal point is a point */
    rc = write_root(&w, *v);
    uselocale(before);
    freelocale(c);
    if (rc == -EFBIG)
        return err_set(e, EFBIG, "the object is too large for objects.json");
    return buf_failed(out) < 0 || w.no_memory ? err_nomem(e) : 0;
}

int object_to_json(struct torch_zip *t, const struct pv *v, uint64_t budget,
                   object_tensor_fn *on_tensor, void *user, struct buf *out,
                   struct err *e)
{
    const struct object_keys keys = {.on_tensor = on_tensor, .user = user};

    return object_to_json_keys(t, v, budget, &keys, out, e);
}
