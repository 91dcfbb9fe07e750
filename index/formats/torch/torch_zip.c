/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_zip.c - the archive of torch.save, and tensors in its object graph. */
#include "index/formats/torch/torch_zip.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "index/formats/torch/torch_holder.h"
#include "index/formats/torch/torch_legacy.h"
#include "index/formats/torch/zip.h"
#include "remote/source.h"

enum {
    MAX_INFLATED = 256 << 20, /* of a data.pkl that somebody compressed */
    MAX_WRAPPERS = 16,        /* parameter of a subclass of ...: seen: 2 */
    MAX_NAME = 4096,          /* of an entry */
    SMALL_FILE = 32 << 10,    /* one tensor, a step, a scheduler */
};

struct torch_zip {
    struct source *src;
    struct zip *zip;             /* or */
    struct torch_legacy *legacy; /* the container of before torch 1.6 */
    struct pickle *pickle;
    uint64_t pickle_len;
    uint64_t stored_len; /* the same as it lies in the file, maybe compressed */
    uint64_t json;       /* bytes that were written of its objects */
    char root[MAX_NAME]; /* "archive" */
    bool big_endian;
    bool packed_ok; /* the caller reads deflated storages, too */
};

static const struct {
    const char *name;
    enum dtype dtype;
} dtypes[] = {
    {"float32", DTYPE_F32},
    {"bfloat16", DTYPE_BF16},
    {"float16", DTYPE_F16},
    {"float64", DTYPE_F64},
    {"int64", DTYPE_I64},
    {"int32", DTYPE_I32},
    {"int16", DTYPE_I16},
    {"int8", DTYPE_I8},
    {"uint8", DTYPE_U8},
    {"uint16", DTYPE_U16},
    {"uint32", DTYPE_U32},
    {"uint64", DTYPE_U64},
    {"bool", DTYPE_BOOL},
    {"complex32", DTYPE_C32},
    {"complex64", DTYPE_C64},
    {"complex128", DTYPE_C128},
    {"float8_e4m3fn", DTYPE_F8_E4M3},
    {"float8_e5m2", DTYPE_F8_E5M2},
    {"float8_e4m3fnuz", DTYPE_F8_E4M3FNUZ},
    {"float8_e5m2fnuz", DTYPE_F8_E5M2FNUZ},
    {"float8_e8m0fnu", DTYPE_F8_E8M0},
    {"float4_e2m1fn_x2", DTYPE_F4},
};

/* Quantised ones: the type of the integers, DTYPE_NONE where several share a byte. */
static const struct {
    const char *name;
    struct torch_class class;
} storages[] = {
    {"FloatStorage", {DTYPE_F32, 4, false}},
    {"BFloat16Storage", {DTYPE_BF16, 2, false}},
    {"HalfStorage", {DTYPE_F16, 2, false}},
    {"DoubleStorage", {DTYPE_F64, 8, false}},
    {"LongStorage", {DTYPE_I64, 8, false}},
    {"IntStorage", {DTYPE_I32, 4, false}},
    {"ShortStorage", {DTYPE_I16, 2, false}},
    {"CharStorage", {DTYPE_I8, 1, false}},
    {"ByteStorage", {DTYPE_U8, 1, false}},
    {"BoolStorage", {DTYPE_BOOL, 1, false}},
    {"ComplexFloatStorage", {DTYPE_C64, 8, false}},
    {"ComplexDoubleStorage", {DTYPE_C128, 16, false}},
    {"UntypedStorage", {DTYPE_NONE, 1, false}},
    {"QInt8Storage", {DTYPE_I8, 1, true}},
    {"QUInt8Storage", {DTYPE_U8, 1, true}},
    {"QInt32Storage", {DTYPE_I32, 4, true}},
    {"QUInt4x2Storage", {DTYPE_NONE, 1, true}},
    {"QUInt2x4Storage", {DTYPE_NONE, 1, true}},
};

/* Rebuild functions of tensors that are no strided elements of one storage. */
static const char *const unsupported[] = {
    "_rebuild_qtensor",
    "_rebuild_sparse_tensor",
    "_rebuild_sparse_csr_tensor",
    "_rebuild_nested_tensor",
    "_rebuild_meta_tensor_no_storage",
    "_rebuild_wrapper_subclass",
    "_rebuild_device_tensor_from_numpy",
    "_rebuild_device_tensor_from_cpu_tensor",
    "_rebuild_xla_tensor",
};

/* A call as the graph has it: what is called and its arguments. */
struct call {
    struct pv fn, args;
    struct pv outer; /* of a tensor that is held by another: what that one says of it */
    bool built;      /* something was put on the result: torch itself never does */
    bool held;
};

enum rebuild { REBUILD_NONE, REBUILD_V1, REBUILD_V2, REBUILD_V3, REBUILD_UNSUPPORTED };

static bool is_global_of(const struct pv *v, const char *module, const char **name)
{
    const char *m;

    return pv_global(v, &m, name) && strcmp(m, module) == 0;
}

static bool is_exactly(const struct pv *v, const char *module, const char *name)
{
    return v->kind == PV_GLOBAL && pv_is(v, module, name);
}

enum dtype torch_dtype_of_name(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(dtypes); i++) {
        if (strcmp(dtypes[i].name, name) == 0)
            return dtypes[i].dtype;
    }
    return DTYPE_NONE;
}

enum dtype torch_dtype(const struct pv *v)
{
    const char *name;

    return is_global_of(v, "torch", &name) ? torch_dtype_of_name(name) : DTYPE_NONE;
}

static bool call_of(const struct pv *v, struct call *c)
{
    if (v->kind != PV_OBJECT)
        return false;
    c->fn = pv_class(v);
    c->args = pv_args(v);
    c->built = c->built || pv_state(v).kind != PV_NONE ||
               pv_list_items(v).kind != PV_NONE || pv_dict_items(v).kind != PV_NONE;
    return true;
}

bool torch_is_from_type(const struct pv *fn)
{
    return is_exactly(fn, "torch._tensor", "_rebuild_from_type_v2") ||
           is_exactly(fn, "torch._tensor", "_rebuild_from_type") ||
           is_exactly(fn, "torch.tensor", "_rebuild_from_type");
}

static bool is_parameter(const struct pv *fn)
{
    return is_exactly(fn, "torch._utils", "_rebuild_parameter") ||
           is_exactly(fn, "torch._utils", "_rebuild_parameter_with_state") ||
           is_exactly(fn, "torch.nn.parameter", "Parameter");
}

/* Takes parameters and subclasses off, down to the call that rebuilds a tensor. */
static bool unwrap(const struct pv *v, struct call *c)
{
    *c = (struct call){0};
    if (!call_of(v, c))
        return false;
    for (int i = 0; i < MAX_WRAPPERS; i++) {
        struct pv args = c->args, inner;

        if (torch_is_from_type(&c->fn) && !c->held &&
            torch_held(&args, &inner, &c->outer)) {
            c->held = true;
            if (!call_of(&inner, c))
                return false;
            continue;
        }
        if (torch_is_from_type(&c->fn)) {
            /* (function, type, arguments, state) */
            if (pv_count(&args) != 4 || pv_at(&args, 2).kind != PV_TUPLE)
                return false;
            c->fn = pv_at(&args, 0);
            c->args = pv_at(&args, 2);
            continue;
        }
        if (!is_parameter(&c->fn))
            return true;
        if (pv_count(&args) == 0)
            return false;
        inner = pv_at(&args, 0);
        if (!call_of(&inner, c))
            return false;
    }
    return false;
}

static enum rebuild which(const struct call *c)
{
    const char *name;

    if (!is_global_of(&c->fn, "torch._utils", &name))
        return REBUILD_NONE;
    if (strcmp(name, "_rebuild_tensor") == 0)
        return REBUILD_V1;
    if (strcmp(name, "_rebuild_tensor_v2") == 0)
        return REBUILD_V2;
    if (strcmp(name, "_rebuild_tensor_v3") == 0)
        return REBUILD_V3;
    for (size_t i = 0; i < ARRAY_SIZE(unsupported); i++) {
        if (strcmp(name, unsupported[i]) == 0)
            return REBUILD_UNSUPPORTED;
    }
    return REBUILD_NONE;
}

static int bad(const struct torch_zip *t, struct err *e, const char *why)
{
    return err_set(e, EBADMSG, "%s: tensor: %s", t->src->name, why);
}

/* A tuple, list or torch.Size of integers >= 0. */
static int read_numbers(const struct torch_zip *t, struct pv v, uint64_t *out,
                        uint32_t *n, struct err *e)
{
    if (v.kind == PV_OBJECT && pv_is(&v, "torch", "Size")) {
        struct pv args = pv_args(&v);

        if (pv_count(&args) == 1)
            v = pv_at(&args, 0);
    }
    if (v.kind != PV_TUPLE && v.kind != PV_LIST)
        return bad(t, e, "a size or stride that is no tuple");
    if (pv_count(&v) > SHAPE_MAX_DIMS)
        return bad(t, e, "too many dimensions");
    *n = (uint32_t)pv_count(&v);
    for (uint32_t i = 0; i < *n; i++) {
        struct pv item = pv_at(&v, i);

        if (!pv_u64(&item, &out[i]))
            return bad(t, e, "a size or stride that is no number");
    }
    return 0;
}

/* What a persistent id says: ('storage', class, key, location, count[, view]). */
struct storage {
    struct torch_class class; /* no dtype: untyped, count in bytes */
    uint64_t bytes;
    const struct zip_entry *entry; /* of a zip */
    uint64_t data;                 /* of a legacy file */
};

bool torch_storage_class(const struct pv *v, struct torch_class *out)
{
    const char *module, *name;

    if (v->kind != PV_GLOBAL || !pv_global(v, &module, &name) ||
        (strcmp(module, "torch") != 0 && strcmp(module, "torch.cuda") != 0 &&
         strcmp(module, "torch.storage") != 0))
        return false;
    for (size_t i = 0; i < ARRAY_SIZE(storages); i++) {
        if (strcmp(storages[i].name, name) == 0) {
            *out = storages[i].class;
            return true;
        }
    }
    return false;
}

/*
 * The entry ROOT/data/KEY; torch 1.4 wrote ROOT/tensors/KEY. The key is only ever compared
 * with names of entries.
 */
static const struct zip_entry *find_entry(const struct torch_zip *t,
                                          const struct pv *key)
{
    static const char *const folders[] = {"data", "tensors"};
    const struct zip_entry *entry = NULL;
    char name[MAX_NAME];
    const char *text;
    size_t len;
    int n;

    if (key->kind != PV_STR)
        return NULL;
    text = pv_bytes(key, &len);
    if (len >= sizeof name || memchr(text, '\0', len))
        return NULL;
    for (size_t i = 0; i < ARRAY_SIZE(folders) && !entry; i++) {
        n = snprintf(name, sizeof name, "%s/%s/%.*s", t->root, folders[i], (int)len,
                     text);
        entry = n > 0 && (size_t)n < sizeof name ? zip_find(t->zip, name) : NULL;
    }
    return entry;
}

static int find_storage(const struct torch_zip *t, const struct pv *id,
                        struct storage *s, struct err *e)
{
    struct pv key = pv_at(id, 2);

    if (t->legacy) {
        if (torch_legacy_find(t->legacy, id, &s->data, &s->bytes, e) < 0)
            return err_wrap(e, "%s: tensor", t->src->name);
        return 0;
    }
    s->entry = find_entry(t, &key);
    if (!s->entry)
        return bad(t, e, "its storage is not in the archive");
    if (s->entry->size != s->bytes)
        return err_set(e, EBADMSG,
                       "%s: tensor: its storage has %" PRIu64
                       " bytes, the archive %" PRIu64,
                       t->src->name, s->bytes, s->entry->size);
    return 0;
}

/*
 * ('storage', class, key, location, count), in legacy files with a view behind, in the
 * TorchScript of torch 1.4 with None.
 */
static bool is_storage_id(const struct torch_zip *t, const struct pv *id)
{
    struct pv view;

    if (id->kind != PV_TUPLE || pv_count(id) < 5 || pv_count(id) > 6)
        return false;
    if (pv_count(id) == 5 || t->legacy)
        return true;
    view = pv_at(id, 5);
    return view.kind == PV_NONE;
}

enum wanted { PLAIN, QUANTIZED, ANY };

static int read_storage(const struct torch_zip *t, struct pv v, enum wanted wanted,
                        struct storage *s, struct err *e)
{
    struct pv id, tag, class, count;
    uint64_t n;

    if (v.kind != PV_PERSID)
        return bad(t, e, "a storage that is no persistent id");
    id = pv_persid(&v);
    if (!is_storage_id(t, &id))
        return bad(t, e, "a persistent id that is no storage");
    tag = pv_at(&id, 0);
    class = pv_at(&id, 1);
    count = pv_at(&id, 4);
    if (!pv_str_is(&tag, "storage"))
        return bad(t, e, "a persistent id that is no storage");
    if (!torch_storage_class(&class, &s->class) ||
        (wanted != ANY && s->class.quantized != (wanted == QUANTIZED)))
        return bad(t, e, "an unknown storage class");
    if (!pv_u64(&count, &n) || mul_overflows(n, s->class.size, &s->bytes))
        return bad(t, e, "a storage of an impossible size");
    return find_storage(t, &id, s, e);
}

/* Only there is negation one flipped bit: integers would need arithmetic. */
static bool has_sign_bit(enum dtype d)
{
    return d == DTYPE_F16 || d == DTYPE_BF16 || d == DTYPE_F32 || d == DTYPE_F64 ||
           dtype_is_complex(d);
}

/*
 * {'conj': True, 'neg': True}, which math views carry. torch never writes False, and where
 * it stands takes it for True: nobody knows what was meant.
 */
static int read_math_bits(const struct torch_zip *t, struct pv v,
                          struct torch_tensor *out, struct err *e)
{
    if (v.kind == PV_NONE)
        return 0;
    if (v.kind != PV_DICT)
        return bad(t, e, "metadata that is no dict");
    for (size_t i = 0; i < pv_count(&v); i++) {
        struct pv key = pv_key_at(&v, i), value = pv_value_at(&v, i);
        uint8_t flag = pv_str_is(&key, "conj")  ? CHUNK_CONJ
                       : pv_str_is(&key, "neg") ? CHUNK_NEG
                                                : 0;

        if (!flag || value.kind != PV_BOOL || !value.b)
            return err_set(e, ENOTSUP, "%s: tensor: metadata of an unknown kind",
                           t->src->name);
        out->flags |= flag;
    }
    if ((out->flags & CHUNK_CONJ) && !dtype_is_complex(out->dtype))
        return bad(t, e, "a conjugated tensor that is not complex");
    if ((out->flags & CHUNK_NEG) && !has_sign_bit(out->dtype))
        return err_set(e, ENOTSUP, "%s: tensor: negated, and of no floating point type",
                       t->src->name);
    return 0;
}

/* Element type and math bits: the storage's class says the type, or an argument of v3. */
static int read_type(const struct torch_zip *t, enum rebuild kind,
                     const struct pv *args, const struct storage *s,
                     struct torch_tensor *out, struct err *e)
{
    size_t extra = kind == REBUILD_V3 ? 7 : 6;
    struct pv dtype;

    out->dtype = s->class.dtype;
    if (kind == REBUILD_V3) {
        dtype = pv_at(args, 6);
        out->dtype = torch_dtype(&dtype);
    }
    if (out->dtype == DTYPE_NONE)
        return bad(t, e, "an unknown element type");
    if (kind != REBUILD_V1 && pv_count(args) > extra)
        return read_math_bits(t, pv_at(args, extra), out, e);
    return 0;
}

/* Every element that the strides reach must be in the storage. */
static int check_reach(const struct torch_zip *t, const struct torch_tensor *x,
                       const struct shape *units, const uint64_t *stride, struct err *e)
{
    uint64_t last = x->storage_offset, step;

    for (uint32_t k = 0; k < units->nd; k++) {
        if (mul_overflows(units->dim[k] - 1, stride[k], &step) ||
            add_overflows(last, step, &last))
            return bad(t, e, "it reaches past its storage");
    }
    if (last >= x->data_len / dtype_unit(x->dtype))
        return bad(t, e, "it reaches past its storage");
    return 0;
}

/* Sizes, strides and offset in units; out->shape then in elements. */
static int read_place(const struct torch_zip *t, const struct pv *args,
                      struct torch_tensor *out, struct err *e)
{
    uint64_t stride[SHAPE_MAX_DIMS] = {0}, elements = 1, bytes;
    struct pv offset = pv_at(args, 1);
    struct shape *shape = &out->shape, units;
    uint32_t nstride = 0;

    if (!pv_u64(&offset, &out->storage_offset))
        return bad(t, e, "a storage offset that is no number");
    TRY(read_numbers(t, pv_at(args, 2), shape->dim, &shape->nd, e));
    TRY(read_numbers(t, pv_at(args, 3), stride, &nstride, e));
    if (nstride != shape->nd)
        return bad(t, e, "sizes and strides of different rank");
    units = *shape;
    if (out->dtype == DTYPE_F4 &&
        (shape->nd == 0 ||
         mul_overflows(shape->dim[shape->nd - 1], 2, &shape->dim[shape->nd - 1])))
        return bad(t, e, "packed elements without a last dimension");
    if (shape_bytes(shape, out->dtype, &bytes, e) < 0 ||
        shape_elements(&units, &elements, e) < 0)
        return err_set(e, EBADMSG, "%s: tensor: more than 2^63 bytes", t->src->name);
    for (uint32_t k = 0; k < shape->nd; k++)
        out->stride[k] = units.dim[k] > 1 ? (int64_t)stride[k] : 0;
    if (elements > 0)
        return check_reach(t, out, &units, stride, e);
    out->storage_offset = 0; /* an empty slice may point anywhere */
    return 0;
}

/* Where the storage is; what the writer's machine did to it on the way. */
static int place_storage(struct torch_zip *t, const struct storage *s,
                         struct torch_tensor *out, struct err *e)
{
    if (t->big_endian && t->legacy) {
        /* torch turns elements of 2, 4 and 8 bytes round while it writes, as if complex
         * numbers were one integer. */
        if (dtype_is_complex(out->dtype))
            return err_set(
                e, ENOTSUP,
                "%s: tensor: complex numbers that a big-endian machine wrote "
                "in the legacy format",
                t->src->name);
    } else if (t->big_endian && dtype_component(out->dtype) > 1) {
        out->flags |= CHUNK_SWAP;
    }
    out->data = s->data;
    if (t->legacy)
        return 0;
    out->crc = s->entry->crc;
    if (!t->packed_ok || s->entry->method == 0)
        return zip_data_offset(t->zip, s->entry, &out->data, e);
    out->packed = s->entry->stored_size;
    return zip_packed_offset(t->zip, s->entry, &out->data, e);
}

static int read_tensor(struct torch_zip *t, enum rebuild kind, const struct pv *args,
                       struct torch_tensor *out, struct err *e)
{
    static const size_t least[] = {
        [REBUILD_V1] = 4, [REBUILD_V2] = 6, [REBUILD_V3] = 7};
    struct storage s = {0};

    *out = (struct torch_tensor){0};
    if (pv_count(args) < least[kind] || pv_count(args) > least[kind] + 1)
        return bad(t, e, "a rebuild call with a wrong number of arguments");
    TRY(read_storage(t, pv_at(args, 0), PLAIN, &s, e));
    TRY(read_type(t, kind, args, &s, out, e));
    out->data_len = s.bytes;
    TRY(read_place(t, args, out, e));
    return place_storage(t, &s, out, e);
}

int torch_zip_integers(struct torch_zip *t, const struct pv *v,
                       struct torch_tensor *out, struct err *e)
{
    struct storage s = {0};
    struct call c;

    if (!unwrap(v, &c) || !is_exactly(&c.fn, "torch._utils", "_rebuild_qtensor"))
        return 0;
    *out = (struct torch_tensor){0};
    /* (storage, offset, size, stride, quantiser, requires_grad, hooks) */
    if (pv_count(&c.args) < 6 || pv_count(&c.args) > 7)
        return bad(t, e, "a rebuild call with a wrong number of arguments");
    TRY(read_storage(t, pv_at(&c.args, 0), QUANTIZED, &s, e));
    if (s.class.dtype == DTYPE_NONE)
        return err_set(e, ENOTSUP, "%s: tensor: several quantised elements a byte",
                       t->src->name);
    out->dtype = s.class.dtype;
    out->data_len = s.bytes;
    TRY(read_place(t, &c.args, out, e));
    TRY(place_storage(t, &s, out, e));
    return 1;
}

int torch_zip_storage(struct torch_zip *t, const struct pv *v, struct torch_tensor *out,
                      struct err *e)
{
    struct storage s = {0};
    struct pv id = pv_persid(v), tag;

    if (v->kind != PV_PERSID || id.kind != PV_TUPLE || pv_count(&id) == 0)
        return 0;
    tag = pv_at(&id, 0);
    if (!pv_str_is(&tag, "storage"))
        return 0;
    *out = (struct torch_tensor){.shape = {.nd = 1}, .stride = {1}};
    TRY(read_storage(t, *v, ANY, &s, e));
    out->dtype = s.class.dtype != DTYPE_NONE ? s.class.dtype : DTYPE_U8;
    out->data_len = s.bytes;
    out->shape.dim[0] = s.bytes / dtype_unit(out->dtype);
    TRY(place_storage(t, &s, out, e));
    return 1;
}

/* A tensor that is held has to be what its holder says; else that is of no known class. */
static int check_held(const struct torch_zip *t, const struct call *c,
                      const struct torch_tensor *x, struct err *e)
{
    struct pv dtype = pv_at(&c->outer, 1);
    uint64_t dim[SHAPE_MAX_DIMS] = {0};
    uint32_t nd = 0;

    TRY(read_numbers(t, pv_at(&c->outer, 2), dim, &nd, e));
    if (torch_dtype(&dtype) == x->dtype && nd == x->shape.nd &&
        memcmp(dim, x->shape.dim, nd * sizeof *dim) == 0)
        return 0;
    return err_set(e, ENOTSUP, "%s: a tensor that holds one of another type or size",
                   t->src->name);
}

int torch_zip_tensor(struct torch_zip *t, const struct pv *v, struct torch_tensor *out,
                     struct err *e)
{
    struct call c;
    enum rebuild kind;

    if (!unwrap(v, &c))
        return 0;
    kind = which(&c);
    if (kind == REBUILD_NONE)
        return 0;
    if (kind == REBUILD_UNSUPPORTED || c.built || !t)
        return err_set(e, ENOTSUP, "%s: a tensor that is no strided elements",
                       t ? t->src->name : "object");
    TRY(read_tensor(t, kind, &c.args, out, e));
    if (c.held)
        TRY(check_held(t, &c, out, e));
    return 1;
}

struct pv torch_zip_root(const struct torch_zip *t)
{
    return pickle_root(t->pickle);
}

/* ROOT/byteorder, absent in files from before torch 2.1. */
static int read_byteorder(struct torch_zip *t, struct err *e)
{
    char name[MAX_NAME + sizeof "/byteorder"];
    CLEANUP_FREE void *text = NULL;
    const struct zip_entry *entry;
    size_t len = 0;

    snprintf(name, sizeof name, "%s/byteorder", t->root);
    entry = zip_find(t->zip, name);
    if (!entry)
        return 0;
    TRY(zip_read(t->zip, entry, 16, &text, &len, e));
    t->big_endian = len == 3 && memcmp(text, "big", 3) == 0;
    if (!t->big_endian && (len != 6 || memcmp(text, "little", 6) != 0))
        return err_set(e, EBADMSG, "%s: byteorder is neither \"little\" nor \"big\"",
                       t->src->name);
    return 0;
}

static int load_pickle(struct torch_zip *t, const struct zip_entry *entry,
                       struct err *e)
{
    CLEANUP(source_putp) struct source *inflated = NULL;
    CLEANUP_FREE void *data = NULL;
    uint64_t off = 0;
    size_t len;

    t->pickle_len = entry->size;
    t->stored_len = entry->stored_size;
    if (entry->method == 0) {
        TRY(zip_data_offset(t->zip, entry, &off, e));
        TRY(torch_zip_check_record(t->src, t->zip, entry, e));
        return pickle_load(t->src, off, entry->size, NULL, &t->pickle, NULL, e);
    }
    TRY(zip_read(t->zip, entry, MAX_INFLATED, &data, &len, e));
    TRY(source_from_memory(data, len, false, t->src->name, &inflated, e));
    return pickle_load(inflated, 0, len, NULL, &t->pickle, NULL, e);
}

static int open_archive(struct torch_zip *t, uint64_t off, uint64_t len, struct err *e)
{
    static const char suffix[] = "/data.pkl";
    const struct zip_entry *entry;
    size_t root;

    TRY(zip_open(t->src, off, len, &t->zip, e));
    entry = zip_find_suffix(t->zip, suffix);
    root = entry ? strlen(entry->name) - strlen(suffix) : 0;
    if (!entry || root >= sizeof t->root)
        return err_set(e, EBADMSG,
                       "%s: a zip archive, but not torch.save's (no data.pkl, "
                       "or several)",
                       t->src->name);
    memcpy(t->root, entry->name, root);
    TRY(read_byteorder(t, e));
    return load_pickle(t, entry, e);
}

int torch_zip_open(struct source *s, uint64_t off, uint64_t len, struct torch_zip **out,
                   struct err *e)
{
    CLEANUP(torch_zip_freep) struct torch_zip *t = calloc(1, sizeof *t);

    if (!t)
        return err_nomem(e);
    t->src = source_get(s);
    TRY(open_archive(t, off, len, e));
    *out = steal(&t);
    return 0;
}

bool torch_zip_is_script(const struct torch_zip *t)
{
    char name[MAX_NAME + sizeof "/constants.pkl"];

    snprintf(name, sizeof name, "%s/constants.pkl", t->root);
    return t->zip && zip_find(t->zip, name);
}

uint64_t torch_zip_constants(const struct torch_zip *t)
{
    char folder[MAX_NAME + sizeof "/constants/"];
    int len = snprintf(folder, sizeof folder, "%s/constants/", t->root);
    uint64_t n = 0;

    for (size_t i = 0; t->zip && i < zip_count(t->zip); i++)
        n += strncmp(zip_at(t->zip, i)->name, folder, (size_t)len) == 0;
    return n;
}

uint64_t torch_zip_pickle_len(const struct torch_zip *t)
{
    return t->pickle_len;
}

uint64_t torch_zip_json_left(const struct torch_zip *t)
{
    uint64_t most = object_json_most(t->stored_len);

    return most - MIN(most, t->json);
}

void torch_zip_spend_json(struct torch_zip *t, uint64_t len)
{
    t->json += len;
}

static int open_file(struct torch_zip *t, struct err *e)
{
    unsigned char head[4];

    t->packed_ok = true;
    if (t->src->size >= sizeof head) {
        TRY(source_read(t->src, 0, sizeof head, head, e));
        if (memcmp(head, "PK\3\4", sizeof head) == 0)
            return open_archive(t, 0, t->src->size, e);
    }
    TRY(torch_legacy_open(t->src, &t->legacy, &t->pickle, &t->pickle_len,
                          &t->big_endian, e));
    t->stored_len = t->pickle_len;
    return 0;
}

/* A small file is read at once: its parts would be ten calls, or requests. */
static int hold(struct source *s, struct source **out, struct err *e)
{
    char *data;

    if (s->size > SMALL_FILE) {
        *out = source_get(s);
        return 0;
    }
    data = malloc(s->size + 1);
    if (!data)
        return err_nomem(e);
    if (source_read(s, 0, (size_t)s->size, data, e) < 0) {
        free(data);
        return -e->code;
    }
    return source_from_memory(data, (size_t)s->size, true, s->name, out, e);
}

int torch_open(struct source *s, struct torch_zip **out, struct err *e)
{
    CLEANUP(torch_zip_freep) struct torch_zip *t = calloc(1, sizeof *t);

    if (!t)
        return err_nomem(e);
    TRY(hold(s, &t->src, e));
    TRY(open_file(t, e));
    *out = steal(&t);
    return 0;
}

void torch_zip_free(struct torch_zip *t)
{
    if (!t)
        return;
    torch_legacy_free(t->legacy);
    pickle_free(t->pickle);
    zip_free(t->zip);
    source_put(t->src);
    free(t);
}

void torch_zip_freep(struct torch_zip **t)
{
    torch_zip_free(*t);
    *t = NULL;
}
