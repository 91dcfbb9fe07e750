/* SPDX-License-Identifier: MIT */
/* index/formats/object_json_known.c - objects whose class is known, as what they mean. */
#include <string.h>

#include "base/buf.h"
#include "index/formats/object_json_priv.h"
#include "index/formats/object_json_writer.h"
#include "index/formats/object_value.h"

/* Each returns false when the object does not look as one of its class should. */

/*
 * OrderedDict(), Counter({...}), defaultdict(factory): the dict that they are. Attributes
 * on top (state_dict's _metadata) are no entries and are left out.
 */
static bool write_mapping(struct object_writer *w, const struct pv *v)
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
        object_write_text(w, "{}");
    else
        object_write_dict(w, &items);
    return true;
}

static bool write_size(struct object_writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), items;

    if (pv_count(&args) != 1 || object_has_extras(v))
        return false;
    items = pv_at(&args, 0);
    if (items.kind != PV_TUPLE)
        return false;
    object_write_sequence(w, "tuple", &items, false);
    return true;
}

static bool write_set_call(struct object_writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), class = pv_class(v), items;
    const char *module, *name;

    if (pv_count(&args) != 1 || object_has_extras(v) ||
        !pv_global(&class, &module, &name))
        return false;
    items = pv_at(&args, 0);
    if (items.kind != PV_LIST && items.kind != PV_TUPLE)
        return false;
    object_write_sequence(w, "set", &items, strcmp(name, "frozenset") == 0);
    return true;
}

static bool write_bytes_call(struct object_writer *w, const struct pv *v)
{
    CLEANUP(object_bytes_release) struct object_bytes b = {0};

    if (object_has_extras(v) || !object_writer_found(w, object_bytes(v, &b)))
        return false;
    object_write_bytes(w, &b);
    return true;
}

static bool write_device(struct object_writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), type, index;
    const char *s;
    size_t len;

    if (object_has_extras(v) || pv_count(&args) != 2)
        return false;
    type = pv_at(&args, 0);
    index = pv_at(&args, 1);
    if (type.kind != PV_STR || index.kind != PV_INT)
        return false;
    s = pv_bytes(&type, &len);
    if (len > 64 || !object_text_is_utf8(s, len) || memchr(s, '"', len) ||
        memchr(s, '\\', len))
        return false;
    object_write_type(w, "opaque");
    buf_addf(w->out, ",\"class\":\"torch.device\",\"value\":\"%.*s:%" PRId64 "\"}",
             (int)len, s, index.i);
    return true;
}

static bool write_number(struct object_writer *w, const struct pv *v)
{
    struct object_number n;

    if (object_has_extras(v) || !object_writer_found(w, object_number(v, &n)))
        return false;
    switch (n.kind) {
    case OBJECT_BOOL:
        object_write_text(w, n.b ? "true" : "false");
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

static bool write_array(struct object_writer *w, const struct pv *v)
{
    struct object_array a;

    if (!object_writer_found(w, object_array(v, &a)))
        return false;
    object_write_type(w, "ndarray");
    buf_addf(w->out, ",\"dtype\":\"%s\",\"shape\":", a.dtype.descr);
    object_write_items(w, &a.shape);
    if (a.fortran)
        object_write_text(w, ",\"fortran_order\":true");
    object_write_text(w, ",\"data\":");
    object_write_base64(w, a.data.data, a.data.len);
    object_write_text(w, "}");
    object_bytes_release(&a.data);
    return true;
}

static bool write_numpy_dtype(struct object_writer *w, const struct pv *v)
{
    struct object_dtype d;

    if (!object_dtype(v, &d))
        return false;
    object_write_type(w, "opaque");
    buf_addf(w->out, ",\"class\":\"numpy.dtype\",\"value\":\"%s\"}", d.descr);
    return true;
}

/* copyreg._reconstructor(class, object, None): protocols 0 and 1 for a plain instance. */
static bool write_reconstructed(struct object_writer *w, const struct pv *v)
{
    struct pv args = pv_args(v), class, base;

    if (pv_count(&args) != 3)
        return false;
    class = pv_at(&args, 0);
    base = pv_at(&args, 1);
    if (class.kind != PV_GLOBAL || base.kind != PV_GLOBAL)
        return false;
    object_write_type(w, "opaque");
    object_write_text(w, ",\"class\":");
    object_write_name(w, &class);
    if (!pv_is(&base, "builtins", "object") && !pv_is(&base, "__builtin__", "object"))
        object_write_args(w, &args, 1, false);
    object_write_extras(w, v);
    object_write_text(w, "}");
    return true;
}

static const struct {
    const char *module, *name;
    bool (*write)(struct object_writer *w, const struct pv *v);
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

bool object_write_known(struct object_writer *w, const struct pv *v)
{
    struct pv class = pv_class(v);

    for (size_t i = 0; class.kind == PV_GLOBAL && i < ARRAY_SIZE(known); i++)
        if (pv_is(&class, known[i].module, known[i].name) && known[i].write(w, v))
            return true;
    return false;
}
