/* SPDX-License-Identifier: MIT */
/* index/formats/object_json.c - an unpickled graph as the JSON of objects.json. */
#include <errno.h>
#include <locale.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/object_json_priv.h"
#include "index/formats/object_value.h"
#include "index/formats/rankfiles/dist_tensor.h"
#include "index/formats/torch/torch_zip.h"

enum {
    /*
     * Values in each other. A value takes up to four levels of JSON, and readers of JSON
     * stop at 256 (jq) to 1000 (Python); real objects are under 20 deep.
     */
    MAX_DEPTH = 60,
    MAX_PATH = 64 << 10,
    BYTES_A_VISIT = 1024 /* so that shared strings cannot multiply without cost */
};

static const uint64_t DEFAULT_BUDGET = 1000000;

/* A step on the way to a value: the key of a dict, or a position (key is PV_NONE). */
struct part {
    struct pv key;
    size_t position;
};

struct writer {
    struct torch_zip *t;
    const struct object_keys *keys;
    struct buf *out;
    uint64_t budget;
    bool no_memory;
    uintptr_t open[MAX_DEPTH]; /* what is being written: cycles end here */
    unsigned depth;
    struct part part[MAX_DEPTH]; /* one for each that is open, at most */
    unsigned parts;
};

static void write_value(struct writer *w, struct pv v);

/* Remembers that memory ran out; true when the helper found what it looks for. */
static bool found(struct writer *w, int rc)
{
    w->no_memory = w->no_memory || rc < 0;
    return rc > 0;
}

/* Scalars. */

static void add_text(struct writer *w, const char *text)
{
    buf_adds(w->out, text);
}

static void begin(struct writer *w, const char *type)
{
    buf_addf(w->out, "{\"$type\":\"%s\"", type);
}

/* Text and bytes cost by their length. */
static void spend_bytes(struct writer *w, size_t len)
{
    w->budget -= MIN(w->budget, len / BYTES_A_VISIT);
}

static void write_base64(struct writer *w, const char *data, size_t len)
{
    spend_bytes(w, len);
    object_value_base64(w->out, data, len);
}

static void write_str(struct writer *w, const struct pv *v)
{
    size_t len;
    const char *s = pv_bytes(v, &len);

    spend_bytes(w, len);
    object_value_text(w->out, s, len);
}

static void write_bytes(struct writer *w, const struct object_bytes *b)
{
    spend_bytes(w, b->len);
    object_value_bytes(w->out, b->data, b->len);
}

/* Names. Python 2's module of built-in classes is today's. */

static void write_name(struct writer *w, const struct pv *global)
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

static void write_class(struct writer *w, const struct pv *v)
{
    static const char *const names[] = {
        [PV_TUPLE] = "builtins.tuple", [PV_LIST] = "builtins.list",
        [PV_SET] = "builtins.set",     [PV_FROZENSET] = "builtins.frozenset",
        [PV_DICT] = "builtins.dict",   [PV_PERSID] = "persistent_id",
    };
    struct pv class;

    if (v->kind == PV_OBJECT) {
        class = pv_class(v);
        write_name(w, &class);
    } else {
        const char *name = v->kind < ARRAY_SIZE(names) ? names[v->kind] : NULL;

        buf_addf(w->out, "\"%s\"", name ? name : "object");
    }
}

/* Path and depth. Keys that are no text, number or name give their place. */

static void add_part(struct buf *path, const struct part *p)
{
    const char *s, *name;
    size_t len;

    if (path->len > 0)
        buf_addc(path, '.');
    switch (p->key.kind) {
    case PV_STR:
    case PV_BIGINT:
        s = pv_bytes(&p->key, &len);
        buf_add(path, s, len);
        break;
    case PV_INT:
        buf_addf(path, "%" PRId64, p->key.i);
        break;
    case PV_GLOBAL:
        pv_global(&p->key, &s, &name);
        buf_addf(path, "%s.%s", s, name);
        break;
    default: /* no key, or one that has no plain text: its place */
        buf_addf(path, "%zu", p->position);
        break;
    }
}

/* The path of the value that is being written. */
static void build_path(const struct writer *w, struct buf *path)
{
    buf_adds(path, "");
    for (unsigned i = 0; i < w->parts; i++)
        add_part(path, &w->part[i]);
}

/* The value at `position` of its container, under `key` if that is a dict. */
static void write_child(struct writer *w, struct pv key, size_t position, struct pv v)
{
    w->part[w->parts++] = (struct part){key, position};
    write_value(w, v);
    w->parts--;
}

static void write_item(struct writer *w, size_t position, struct pv v)
{
    write_child(w, (struct pv){.kind = PV_NONE}, position, v);
}

static void truncated(struct writer *w, const struct pv *v)
{
    begin(w, "opaque");
    add_text(w, ",\"class\":");
    write_class(w, v);
    add_text(w, ",\"truncated\":true}");
}

/* True when v may be written now; otherwise it was cut. Pair with leave(). */
static bool enter(struct writer *w, const struct pv *v)
{
    uintptr_t id = pv_identity(v);
    bool fits = w->depth < MAX_DEPTH;

    for (unsigned i = 0; fits && i < w->depth; i++)
        fits = w->open[i] != id;
    if (!fits) {
        truncated(w, v);
        return false;
    }
    w->open[w->depth++] = id;
    return true;
}

static void leave(struct writer *w)
{
    w->depth--;
}

/* Containers. */

/* What comes next is the last item of its container: it says that more was cut. */
static bool is_spent(const struct writer *w)
{
    return w->budget == 0 || buf_failed(w->out);
}

static void write_items(struct writer *w, const struct pv *v)
{
    bool stop = false;

    add_text(w, "[");
    for (size_t i = 0; i < pv_count(v) && !stop; i++) {
        stop = is_spent(w);
        add_text(w, i > 0 ? "," : "");
        write_item(w, i, pv_at(v, i));
    }
    add_text(w, "]");
}

static void write_sequence(struct writer *w, const char *type, const struct pv *v,
                           bool frozen)
{
    begin(w, type);
    if (frozen)
        add_text(w, ",\"frozen\":true");
    add_text(w, ",\"items\":");
    write_items(w, v);
    add_text(w, "}");
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

static void write_member(struct writer *w, const struct pv *key)
{
    size_t len;
    const char *s = pv_bytes(key, &len);

    spend_bytes(w, len);
    object_value_name(w->out, s, len);
}

static void write_pairs(struct writer *w, const struct pv *dict, bool plain)
{
    bool stop = false;

    for (size_t i = 0; i < pv_count(dict) && !stop; i++) {
        struct pv key = pv_key_at(dict, i);

        stop = is_spent(w);
        add_text(w, i > 0 ? "," : "");
        if (plain) {
            write_member(w, &key);
            add_text(w, ":");
        } else {
            add_text(w, "[");
            write_value(w, key);
            add_text(w, ",");
        }
        write_child(w, key, i, pv_value_at(dict, i));
        add_text(w, plain ? "" : "]");
    }
}

static void write_dict(struct writer *w, const struct pv *dict)
{
    bool plain = keys_are_text(dict);

    if (plain) {
        add_text(w, "{");
    } else {
        begin(w, "dict");
        add_text(w, ",\"items\":[");
    }
    write_pairs(w, dict, plain);
    add_text(w, plain ? "}" : "]}");
}

/* Objects whose class is known. Each returns false when it does not look as it should. */

static bool has_extras(const struct pv *v)
{
    return pv_list_items(v).kind != PV_NONE || pv_dict_items(v).kind != PV_NONE ||
           pv_state(v).kind != PV_NONE || pv_kwargs(v).kind != PV_NONE;
}

/*
 * OrderedDict(), Counter({...}), defaultdict(factory): the dict that they are. Attributes
 * on top (state_dict's _metadata) are no entries and are left out.
 */
static bool write_mapping(struct writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), items = pv_dict_items(v), first;

    if (pv_list_items(v).kind != PV_NONE || pv_kwargs(v).kind != PV_NONE)
        return false;
    if (items.kind == PV_NONE && pv_count(&args) == 1 &&
        pv_is(v, "collections", "Counter")) {
        first = pv_at(&args, 0);
        if (first.kind != PV_DICT)
            return false;
        items = first;
    } else if (pv_count(&args) > (pv_is(v, "collections", "defaultdict") ? 1U : 0U)) {
        return false;
    }
    if (items.kind == PV_NONE)
        add_text(w, "{}");
    else
        write_dict(w, &items);
    return true;
}

static bool write_size(struct writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), items;

    if (pv_count(&args) != 1 || has_extras(v))
        return false;
    items = pv_at(&args, 0);
    if (items.kind != PV_TUPLE)
        return false;
    write_sequence(w, "tuple", &items, false);
    return true;
}

static bool write_set_call(struct writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), class = pv_class(v), items;
    const char *module, *name;

    if (pv_count(&args) != 1 || has_extras(v) || !pv_global(&class, &module, &name))
        return false;
    items = pv_at(&args, 0);
    if (items.kind != PV_LIST && items.kind != PV_TUPLE)
        return false;
    write_sequence(w, "set", &items, strcmp(name, "frozenset") == 0);
    return true;
}

static bool write_bytes_call(struct writer *w, const struct pv *v)
{
    CLEANUP(object_bytes_release) struct object_bytes b = {0};

    if (has_extras(v) || !found(w, object_bytes(v, &b)))
        return false;
    write_bytes(w, &b);
    return true;
}

static bool write_device(struct writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), type, index;
    const char *s;
    size_t len;

    if (has_extras(v) || pv_count(&args) != 2)
        return false;
    type = pv_at(&args, 0);
    index = pv_at(&args, 1);
    if (type.kind != PV_STR || index.kind != PV_INT)
        return false;
    s = pv_bytes(&type, &len);
    if (len > 64 || !object_text_is_utf8(s, len) || memchr(s, '"', len) ||
        memchr(s, '\\', len))
        return false;
    begin(w, "opaque");
    buf_addf(w->out, ",\"class\":\"torch.device\",\"value\":\"%.*s:%" PRId64 "\"}",
             (int)len, s, index.i);
    return true;
}

static bool write_number(struct writer *w, const struct pv *v)
{
    struct object_number n;

    if (has_extras(v) || !found(w, object_number(v, &n)))
        return false;
    switch (n.kind) {
    case OBJECT_BOOL:
        add_text(w, n.b ? "true" : "false");
        break;
    case OBJECT_INT:
        object_value_int(w->out, n.i);
        break;
    case OBJECT_UINT:
        object_value_uint(w->out, n.u);
        break;
    case OBJECT_FLOAT:
        object_value_double(w->out, n.f);
        break;
    }
    return true;
}

static bool write_array(struct writer *w, const struct pv *v)
{
    struct object_array a;

    if (!found(w, object_array(v, &a)))
        return false;
    begin(w, "ndarray");
    buf_addf(w->out, ",\"dtype\":\"%s\",\"shape\":", a.dtype.descr);
    write_items(w, &a.shape);
    if (a.fortran)
        add_text(w, ",\"fortran_order\":true");
    add_text(w, ",\"data\":");
    write_base64(w, a.data.data, a.data.len);
    add_text(w, "}");
    object_bytes_release(&a.data);
    return true;
}

static bool write_numpy_dtype(struct writer *w, const struct pv *v)
{
    struct object_dtype d;

    if (!object_dtype(v, &d))
        return false;
    begin(w, "opaque");
    buf_addf(w->out, ",\"class\":\"numpy.dtype\",\"value\":\"%s\"}", d.descr);
    return true;
}

/* What is written for an object that is only data to us. */

static void write_part(struct writer *w, const char *member, const struct pv *v)
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
static void write_args(struct writer *w, const struct pv *args, size_t from, bool alone)
{
    size_t n = pv_count(args);
    bool stop = false;
    struct pv first;

    if (n <= from)
        return;
    first = pv_at(args, from);
    if (alone && n - from == 1 && is_simple(&first)) {
        add_text(w, ",\"value\":");
        write_value(w, first);
        return;
    }
    add_text(w, ",\"args\":[");
    for (size_t i = from; i < n && !stop; i++) {
        stop = is_spent(w);
        add_text(w, i > from ? "," : "");
        write_item(w, i - from, pv_at(args, i));
    }
    add_text(w, "]");
}

static void write_extras(struct writer *w, const struct pv *v)
{
    struct pv kwargs = pv_kwargs(v), state = pv_state(v), list = pv_list_items(v),
              dict = pv_dict_items(v);

    write_part(w, "kwargs", &kwargs);
    write_part(w, "state", &state);
    write_part(w, "list", &list);
    write_part(w, "dict", &dict);
}

static void write_opaque(struct writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), class = pv_class(v);

    begin(w, "opaque");
    add_text(w, ",\"class\":");
    write_name(w, &class);
    if (class.kind != PV_GLOBAL)
        write_part(w, "function", &class);
    write_args(w, &args, 0, !has_extras(v));
    write_extras(w, v);
    add_text(w, "}");
}

/* copyreg._reconstructor(class, object, None): protocols 0 and 1 for a plain instance. */
static bool write_reconstructed(struct writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), class, base;

    if (pv_count(&args) != 3)
        return false;
    class = pv_at(&args, 0);
    base = pv_at(&args, 1);
    if (class.kind != PV_GLOBAL || base.kind != PV_GLOBAL)
        return false;
    begin(w, "opaque");
    add_text(w, ",\"class\":");
    write_name(w, &class);
    if (!pv_is(&base, "builtins", "object") && !pv_is(&base, "__builtin__", "object"))
        write_args(w, &args, 1, false);
    write_extras(w, v);
    add_text(w, "}");
    return true;
}

static const struct {
    const char *module, *name;
    bool (*write)(struct writer *w, const struct pv *v);
} known[] = {
    {"collections", "OrderedDict", write_mapping},
    {"collections", "Counter", write_mapping},
    {"collections", "defaultdict", write_mapping},
    {"torch", "Size", write_size},
    {"torch", "device", write_device},
    {"builtins", "set", write_set_call},
    {"__builtin__", "set", write_set_call},
    {"builtins", "frozenset", write_set_call},
    {"__builtin__", "frozenset", write_set_call},
    {"_codecs", "encode", write_bytes_call},
    {"builtins", "bytes", write_bytes_call},
    {"__builtin__", "bytes", write_bytes_call},
    {"builtins", "bytearray", write_bytes_call},
    {"__builtin__", "bytearray", write_bytes_call},
    {"numpy._core.multiarray", "scalar", write_number},
    {"numpy.core.multiarray", "scalar", write_number},
    {"numpy._core.multiarray", "_reconstruct", write_array},
    {"numpy.core.multiarray", "_reconstruct", write_array},
    {"numpy._core.numeric", "_frombuffer", write_array},
    {"numpy.core.numeric", "_frombuffer", write_array},
    {"numpy", "dtype", write_numpy_dtype},
    {"copyreg", "_reconstructor", write_reconstructed},
    {"copy_reg", "_reconstructor", write_reconstructed},
};

static void write_shape(struct writer *w, const struct shape *s)
{
    struct buf text = {.max = 1 << 12};

    if (shape_format(s, &text) == 0)
        buf_add(w->out, text.data, text.len);
    w->no_memory = w->no_memory || buf_failed(&text) < 0;
    buf_release(&text);
}

/* The key of what is here: a tensor, or a shard of one (NULL). */
static const char *key_of(const struct writer *w, const struct buf *path,
                          const struct torch_tensor *x)
{
    const struct object_keys *k = w->keys;

    return x ? k->on_tensor(k->user, path->data, path->len, x)
             : k->on_shard(k->user, path->data, path->len);
}

/* True when there is a key for what is here, and it was written. */
static bool write_key(struct writer *w, const struct torch_tensor *x)
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
    begin(w, "tensor");
    add_text(w, ",\"key\":");
    buf_add_json(w->out, key, strlen(key));
    add_text(w, "}");
    return true;
}

static void write_tensor(struct writer *w, const struct torch_tensor *x)
{
    if (write_key(w, x))
        return;
    begin(w, "opaque");
    buf_addf(w->out, ",\"class\":\"torch.Tensor\",\"dtype\":\"%s\",\"shape\":",
             dtype_name(x->dtype));
    write_shape(w, &x->shape);
    add_text(w, "}");
}

/* True when it is a tensor, sound or damaged; kinds that are not supported are objects. */
static bool try_tensor(struct writer *w, const struct pv *v)
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
    begin(w, "opaque");
    add_text(w, ",\"class\":\"torch.Tensor\",\"error\":");
    buf_add_json(w->out, e.text, strlen(e.text));
    add_text(w, "}");
    return true;
}

static void write_object(struct writer *w, const struct pv *v)
{
    struct pv class = pv_class(v);

    if (try_tensor(w, v))
        return;
    for (size_t i = 0; class.kind == PV_GLOBAL && i < ARRAY_SIZE(known); i++) {
        if (pv_is(&class, known[i].module, known[i].name) && known[i].write(w, v))
            return;
    }
    write_opaque(w, v);
}

/* A class or function by itself; element types of torch are such, too. */
static void write_global(struct writer *w, const struct pv *v)
{
    begin(w, "opaque");
    buf_addf(w->out, ",\"class\":\"%s\",\"value\":",
             torch_dtype(v) != DTYPE_NONE ? "torch.dtype" : "global");
    write_name(w, v);
    add_text(w, "}");
}

static void write_persid(struct writer *w, const struct pv *v)
{
    struct pv arg = pv_persid(v);

    begin(w, "opaque");
    add_text(w, ",\"class\":\"persistent_id\"");
    write_part(w, "value", &arg);
    add_text(w, "}");
}

/* What holds other values: entered once on the way, never deeper than the limit. */
static void write_nested(struct writer *w, const struct pv *v)
{
    if (!enter(w, v))
        return;
    switch (v->kind) {
    case PV_TUPLE:
        write_sequence(w, "tuple", v, false);
        break;
    case PV_LIST:
        write_items(w, v);
        break;
    case PV_SET:
    case PV_FROZENSET:
        write_sequence(w, "set", v, v->kind == PV_FROZENSET);
        break;
    case PV_DICT:
        write_dict(w, v);
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

static void write_bigint(struct writer *w, const struct pv *v)
{
    size_t len;
    const char *digits = pv_bytes(v, &len);

    begin(w, "int");
    buf_addf(w->out, ",\"value\":\"%.*s\"}", (int)len, digits);
}

static void write_value(struct writer *w, struct pv v)
{
    struct object_bytes bytes = {0};

    if (w->budget == 0) {
        truncated(w, &v);
        return;
    }
    w->budget--;
    switch ((enum pv_kind)v.kind) {
    case PV_NONE:
        add_text(w, "null");
        break;
    case PV_BOOL:
        add_text(w, v.b ? "true" : "false");
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
        if (found(w, object_bytes(&v, &bytes)))
            write_bytes(w, &bytes);
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

int object_to_json_keys(struct torch_zip *t, const struct pv *v, uint64_t budget,
                        const struct object_keys *keys, struct buf *out, struct err *e)
{
    struct writer w = {
        .t = t,
        .keys = keys,
        .out = out,
        .budget = budget ? budget : DEFAULT_BUDGET,
    };
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0), before;

    if (!c)
        return err_nomem(e);
    before = uselocale(c); /* of this thread: a decimal point is a point */
    write_value(&w, *v);
    uselocale(before);
    freelocale(c);
    if (buf_failed(out) == -EFBIG)
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
