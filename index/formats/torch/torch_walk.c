/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_walk.c - finds the tensors of an object graph, however it is nested. */
#include "index/formats/torch/torch_walk.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/vec.h"

enum {
    MAX_FRAMES = 512,  /* real objects: under 60 */
    MAX_UNSAVED = 256, /* each buffer of a module is compared with so many; real: 4 */
    VISITS_A_BYTE = 4, /* of the pickle: an honest value takes a byte or more */
    FREE_VISITS = 1 << 16 /* so many are no attack */
};

/*
 * What the items of a tuple are called in keys: NULL by their number, "" not at all; those
 * past the end by their number. `below`: the same for the items of those called "".
 */
struct naming {
    const char *const *name;
    size_t count;
    const struct naming *below;
};

#define NAMES(...)                                                                     \
    .name = (const char *const[]){__VA_ARGS__},                                        \
    .count = sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *)

static const struct naming coo_parts = {NAMES("indices", "values")};
static const struct naming csr_parts = {NAMES("crow_indices", "col_indices", "values")};
static const struct naming csc_parts = {NAMES("ccol_indices", "row_indices", "values")};
static const struct naming quantizer_parts = {NAMES(NULL, "scales", "zero_points")};
static const struct naming coo = {NAMES(NULL, ""), .below = &coo_parts};
static const struct naming csr = {NAMES(NULL, ""), .below = &csr_parts};
static const struct naming csc = {NAMES(NULL, ""), .below = &csc_parts};
static const struct naming quantized = {NAMES(NULL, NULL, NULL, NULL, ""),
                                        .below = &quantizer_parts};
static const struct naming nested = {NAMES("buffer", "sizes", "strides", "offsets")};
/* (function, type, arguments, state): attributes of a tensor of some class, the state
 * a dict or a pair of them. */
static const struct naming states = {NAMES("", "")};
static const struct naming subclass = {NAMES(NULL, NULL, NULL, ""), .below = &states};
static const struct naming first_only = {NAMES("")};

/* How the items of a container are met. */
enum rule {
    RULE_ITEMS,  /* each with its key or number */
    RULE_OBJECT, /* class, arguments, ... of an instance, without a part of a path */
    RULE_MODULE, /* attributes of a module: its dicts of tensors have no part in keys */
};

struct frame {
    struct pv v;
    size_t i; /* the next item */
    size_t key_len, path_len;
    const struct naming *naming;
    bool skip; /* the arguments of an instance only tell its class */
    enum rule rule;
    bool opaque, shard;
    bool told; /* its first argument is a storage whose elements were shown already */
    struct pv unsaved; /* names of buffers that state_dict() leaves out, or none */
};

/* The next value to look at, and what it is within. */
struct visit {
    struct pv v;
    const struct naming *naming;
    enum rule rule;
    bool skip;
    bool opaque, shard;
    bool told;         /* a storage whose elements were shown already */
    struct pv unsaved; /* struct frame */
};

struct stack {
    struct frame *frame;
    size_t count, cap;
};

void torch_walk_release(struct torch_walk *w)
{
    buf_release(&w->key);
    buf_release(&w->path);
}

int torch_path_add(struct buf *path, const char *part, size_t len)
{
    if (path->len > 0)
        buf_addc(path, '.');
    return buf_add(path, part, len);
}

bool torch_mapping(const struct pv *v, struct pv *items)
{
    struct pv args;
    size_t most;

    *items = *v;
    if (v->kind == PV_DICT)
        return true;
    if (v->kind != PV_OBJECT ||
        !(pv_is(v, "collections", "OrderedDict") ||
          pv_is(v, "collections", "Counter") || pv_is(v, "collections", "defaultdict")))
        return false;
    args = pv_args(v);
    most = pv_is(v, "collections", "defaultdict") ? 1 : 0;
    *items = pv_dict_items(v);
    return pv_count(&args) <= most && pv_list_items(v).kind == PV_NONE &&
           pv_kwargs(v).kind == PV_NONE;
}

/* ---- what a value is ---- */

static bool in_module(const struct pv *v, const char *prefix)
{
    const char *module, *name;

    return pv_global(v, &module, &name) && strncmp(module, prefix, strlen(prefix)) == 0;
}

static bool is_distributed(const struct pv *v)
{
    struct pv class = pv_class(v), args, type;

    if (class.kind != PV_GLOBAL)
        return false;
    if (in_module(&class, "torch.distributed."))
        return true;
    args = pv_args(v);
    if (!pv_is(&class, "torch._tensor", "_rebuild_from_type_v2") || pv_count(&args) < 2)
        return false;
    type = pv_at(&args, 1);
    return type.kind == PV_GLOBAL && in_module(&type, "torch.distributed.");
}

/* "torch.sparse_coo" of _get_layout("torch.sparse_coo"), or of the global itself. */
static bool layout_is(const struct pv *v, const char *name)
{
    struct pv args, text;
    const char *s;
    size_t len;

    if (v->kind != PV_OBJECT)
        return v->kind == PV_GLOBAL && pv_is(v, "torch", name);
    args = pv_args(v);
    if (pv_count(&args) != 1)
        return false;
    text = pv_at(&args, 0);
    if (text.kind != PV_STR)
        return false;
    s = pv_bytes(&text, &len);
    return len == strlen(name) + 6 && memcmp(s, "torch.", 6) == 0 &&
           memcmp(s + 6, name, len - 6) == 0;
}

static const struct naming *sparse_naming(const struct pv *v)
{
    struct pv args = pv_args(v), layout;

    if (pv_count(&args) == 0)
        return NULL;
    layout = pv_at(&args, 0);
    if (layout_is(&layout, "sparse_coo"))
        return &coo;
    if (layout_is(&layout, "sparse_csr") || layout_is(&layout, "sparse_bsr"))
        return &csr;
    if (layout_is(&layout, "sparse_csc") || layout_is(&layout, "sparse_bsc"))
        return &csc;
    return NULL;
}

/* Calls whose arguments have names in keys. False: some other instance. */
static bool is_known_call(const struct pv *v, const struct naming **naming)
{
    struct pv class = pv_class(v);

    *naming = NULL;
    if (class.kind != PV_GLOBAL)
        return false;
    if (in_module(&class, "torch.jit._pickle"))
        *naming = &first_only; /* build_tensorlist([...]), restore_type_tag(x, "...") */
    else if (pv_is(&class, "torch._utils", "_rebuild_qtensor"))
        *naming = &quantized;
    else if (pv_is(&class, "torch._utils", "_rebuild_sparse_tensor") ||
             pv_is(&class, "torch._utils", "_rebuild_sparse_csr_tensor"))
        *naming = sparse_naming(v);
    else if (pv_is(&class, "torch._utils", "_rebuild_nested_tensor"))
        *naming = &nested;
    else if (pv_is(&class, "torch._utils", "_rebuild_parameter") ||
             pv_is(&class, "torch._utils", "_rebuild_parameter_with_state") ||
             pv_is(&class, "torch.nn.parameter", "Parameter"))
        *naming = &first_only; /* of a tensor that is no plain one */
    else
        return false;
    return true;
}

static bool is_module_state(const struct pv *state)
{
    struct pv ignored;

    return state->kind == PV_DICT && pv_dict_get(state, "_parameters", &ignored) &&
           pv_dict_get(state, "_buffers", &ignored) &&
           pv_dict_get(state, "_modules", &ignored);
}

static bool is_module_dict(const struct pv *key)
{
    return pv_str_is(key, "_parameters") || pv_str_is(key, "_buffers") ||
           pv_str_is(key, "_modules");
}

/*
 * The names of a module's buffers that are not persistent: a set, or with protocols below 4 a
 * call of one with a list (torch/nn/modules/module.py of torch 2.1 to 2.14, register_buffer and
 * _save_to_state_dict).
 */
static struct pv unsaved_buffers(const struct pv *state)
{
    struct pv names, class, args;

    if (!pv_dict_get(state, "_non_persistent_buffers_set", &names))
        return (struct pv){.kind = PV_NONE};
    if (names.kind == PV_OBJECT) {
        class = pv_class(&names);
        args = pv_args(&names);
        if (class.kind == PV_GLOBAL && pv_count(&args) == 1 &&
            (pv_is(&class, "builtins", "set") || pv_is(&class, "__builtin__", "set")))
            names = pv_at(&args, 0);
    }
    if ((names.kind == PV_SET || names.kind == PV_LIST) &&
        pv_count(&names) <= MAX_UNSAVED)
        return names;
    return (struct pv){.kind = PV_NONE};
}

static bool is_unsaved(const struct frame *f, const struct pv *key)
{
    const char *name, *other;
    size_t len, other_len;

    if ((f->unsaved.kind != PV_SET && f->unsaved.kind != PV_LIST) ||
        key->kind != PV_STR)
        return false;
    name = pv_bytes(key, &len);
    for (size_t i = 0; i < pv_count(&f->unsaved); i++) {
        struct pv item = pv_at(&f->unsaved, i);

        if (item.kind != PV_STR)
            continue;
        other = pv_bytes(&item, &other_len);
        if (other_len == len && memcmp(other, name, len) == 0)
            return true;
    }
    return false;
}

/* A call whose arguments object_to_json() does not show: they only tell the class. */
static bool is_plain_instance(const struct pv *v)
{
    struct pv class = pv_class(v), args = pv_args(v), base;

    if (class.kind != PV_GLOBAL || pv_count(&args) != 3 ||
        !(pv_is(&class, "copyreg", "_reconstructor") ||
          pv_is(&class, "copy_reg", "_reconstructor")))
        return false;
    base = pv_at(&args, 1);
    return base.kind == PV_GLOBAL && (pv_is(&base, "builtins", "object") ||
                                      pv_is(&base, "__builtin__", "object"));
}

/* ---- the stack ---- */

static int fail_memory(const struct torch_walk *w, struct err *e)
{
    if (buf_failed(&w->key) == -ENOMEM || buf_failed(&w->path) == -ENOMEM)
        return err_nomem(e);
    return 0;
}

static bool is_open(const struct stack *s, const struct pv *v)
{
    uintptr_t id = pv_identity(v);

    for (size_t i = s->count; i-- > 0;)
        if (pv_identity(&s->frame[i].v) == id && s->frame[i].v.kind == v->kind)
            return true;
    return false;
}

/* The container that a node of OmegaConf is in, its _parent: that is being looked at. */
static bool is_parent(const struct stack *s, const struct pv *v)
{
    struct pv class;

    if (v->kind != PV_OBJECT)
        return false;
    class = pv_class(v);
    return class.kind == PV_GLOBAL && in_module(&class, "omegaconf.") && is_open(s, v);
}

static int push(struct torch_walk *w, struct stack *s, const struct visit *x,
                struct err *e)
{
    if (s->count == MAX_FRAMES || is_open(s, &x->v)) {
        w->too_deep += !is_parent(s, &x->v);
        w->others++; /* the object says so */
        return 0;
    }
    if (!VEC_ROOM(s->frame, s->count, s->cap))
        return err_nomem(e);
    s->frame[s->count++] = (struct frame){
        .v = x->v,
        .key_len = w->key.len,
        .path_len = w->path.len,
        .naming = x->naming,
        .skip = x->skip,
        .rule = x->rule,
        .opaque = x->opaque,
        .shard = x->shard,
        .told = x->told,
        .unsaved = x->unsaved,
    };
    return 0;
}

/* ---- values ---- */

/* `rc` from reading it: 1, or what is wrong with it. */
static int tell(struct torch_walk *w, const struct visit *x, int rc,
                const struct torch_tensor *tensor, const struct err *why, struct err *e)
{
    struct torch_item item = {
        .key = w->key.len ? w->key.data : "",
        .key_len = w->key.len,
        .path = w->path.len ? w->path.data : "",
        .path_len = w->path.len,
        .tensor = rc > 0 ? tensor : NULL,
        .why = why->text,
        .value = &x->v,
        .opaque = x->opaque,
        .shard = x->shard,
    };

    if (rc == -ENOMEM) {
        *e = *why;
        return rc;
    }
    if (buf_failed(&w->key) || buf_failed(&w->path)) {
        w->unnamed++;
        return fail_memory(w, e);
    }
    w->tensors++;
    return w->fn(w->user, &item, e);
}

/* The integers of a quantised tensor, called KEY.int_repr as torch's method is. */
static int visit_integers(struct torch_walk *w, struct visit *x, struct err *e)
{
    struct torch_tensor tensor;
    struct err why = {0};
    size_t key_len = w->key.len;
    int rc = torch_zip_integers(w->zip, &x->v, &tensor, &why);

    if (rc == 0 || rc == -ENOTSUP) /* then its storage is shown */
        return 0;
    torch_path_add(&w->key, "int_repr", 8);
    x->told = true;
    rc = tell(w, x, rc, &tensor, &why, e);
    if (!buf_failed(&w->key))
        w->key.len = key_len;
    return rc;
}

/* Tensors that have no bytes, or have them elsewhere. */
static bool is_hollow(const struct pv *v)
{
    struct pv class = pv_class(v);

    return class.kind == PV_GLOBAL &&
           (pv_is(&class, "torch._utils", "_rebuild_meta_tensor_no_storage") ||
            pv_is(&class, "torch._utils", "_rebuild_tensor") ||
            pv_is(&class, "torch._utils", "_rebuild_tensor_v2") ||
            pv_is(&class, "torch._utils", "_rebuild_tensor_v3"));
}

static void name_hollow(const struct pv *v, struct err *why)
{
    struct pv class = pv_class(v);

    if (pv_is(&class, "torch._utils", "_rebuild_meta_tensor_no_storage"))
        err_set(why, ENOTSUP, "a tensor of the device \"meta\": it has no bytes");
}

static int visit_instance(struct torch_walk *w, struct stack *s, struct visit x,
                          struct err *e)
{
    struct pv class = pv_class(&x.v), state = pv_state(&x.v);
    bool script = class.kind == PV_GLOBAL && in_module(&class, "__torch__");

    w->others++;
    x.rule = RULE_OBJECT;
    x.skip = is_plain_instance(&x.v);
    if (!x.shard && is_distributed(&x.v)) {
        x.shard = true;
        w->shards++;
    }
    if (!is_known_call(&x.v, &x.naming) && !script && !is_module_state(&state))
        x.opaque = true;
    if (torch_is_from_type(&class))
        x.naming = &subclass;
    return push(w, s, &x, e);
}

static int visit_object(struct torch_walk *w, struct stack *s, struct visit *x,
                        struct err *e)
{
    struct torch_tensor tensor;
    struct err why = {0};
    struct pv items;
    int rc;

    if (torch_mapping(&x->v, &items)) {
        x->v = items;
        if (items.kind == PV_DICT && pv_count(&items) > 0)
            return push(w, s, x, e);
        w->others++;
        return 0;
    }
    rc = torch_zip_tensor(w->zip, &x->v, &tensor, &why);
    if (rc < 0)
        name_hollow(&x->v, &why);
    if (rc > 0 || (rc < 0 && (rc != -ENOTSUP || is_hollow(&x->v))))
        return tell(w, x, rc, &tensor, &why, e);
    if (w->claims && !x->shard && w->claims(&x->v)) {
        why = (struct err){0};
        return tell(w, x, 0, NULL, &why, e);
    }
    TRY(visit_integers(w, x, e));
    return visit_instance(w, s, *x, e);
}

/* A storage that no tensor stands for: saved by itself, or for a kind nobody knows. */
static int visit_storage(struct torch_walk *w, struct visit *x, struct err *e)
{
    struct torch_tensor tensor;
    struct err why = {0};
    int rc = x->told ? 0 : torch_zip_storage(w->zip, &x->v, &tensor, &why);

    w->others++;
    if (rc == 0)
        return 0;
    x->opaque = true;
    return tell(w, x, rc, &tensor, &why, e);
}

static int visit_value(struct torch_walk *w, struct stack *s, struct visit *x,
                       struct err *e)
{
    uint64_t most = FREE_VISITS + VISITS_A_BYTE * torch_zip_pickle_len(w->zip);

    if (++w->visits > most)
        return err_set(e, EFBIG,
                       "more than %" PRIu64 " values: references multiply them", most);
    switch ((enum pv_kind)x->v.kind) {
    case PV_OBJECT:
        return visit_object(w, s, x, e);
    case PV_TUPLE:
    case PV_LIST:
    case PV_SET:
    case PV_FROZENSET:
    case PV_DICT:
        if (pv_count(&x->v) > 0)
            return push(w, s, x, e);
        break;
    case PV_PERSID:
        return visit_storage(w, x, e);
    case PV_NONE:
    case PV_BOOL:
    case PV_INT:
    case PV_BIGINT:
    case PV_FLOAT:
    case PV_STR:
    case PV_BYTES:
    case PV_GLOBAL:
    case PV_RECORD:
        break;
    }
    w->others++;
    return 0;
}

/* ---- items of containers ---- */

/* What an instance consists of, one after the other; false at the end. */
static bool next_part(struct frame *f, struct visit *x)
{
    struct pv class = pv_class(&f->v), state = pv_state(&f->v);

    x->naming = NULL;
    x->rule = RULE_ITEMS;
    switch (f->i++) {
    case 0:
        x->v = class;
        return true;
    case 1:
        x->v = f->skip ? (struct pv){.kind = PV_NONE} : pv_args(&f->v);
        x->naming = f->naming;
        x->told = f->told;
        return true;
    case 2:
        x->v = pv_kwargs(&f->v);
        return true;
    case 3:
        x->v = state;
        x->rule = is_module_state(&state) ? RULE_MODULE : RULE_ITEMS;
        return true;
    case 4:
        x->v = pv_list_items(&f->v);
        return true;
    case 5:
        x->v = pv_dict_items(&f->v);
        return true;
    default:
        return false;
    }
}

static void add_number(struct buf *b, size_t i)
{
    char text[24];

    torch_path_add(b, text, (size_t)snprintf(text, sizeof text, "%zu", i));
}

static void add_key(struct torch_walk *w, const struct frame *f, const struct pv *key)
{
    struct buf part = {.max = TORCH_MAX_PATH};

    /* A part that is too long spoils the path, and the tensor stays unnamed. */
    if (torch_key_part(key, f->i, &part) < 0) {
        w->path.failed = w->key.failed = part.failed;
    } else {
        torch_path_add(&w->path, part.len ? part.data : "", part.len);
        if (f->rule != RULE_MODULE || !is_module_dict(key))
            torch_path_add(&w->key, part.len ? part.data : "", part.len);
    }
    buf_release(&part);
}

/* What the items of the next item are called is `below`. */
static void add_position(struct torch_walk *w, const struct frame *f,
                         const struct naming **below)
{
    const struct naming *n = f->naming;
    const char *name = n && f->i < n->count ? n->name[f->i] : NULL;

    add_number(&w->path, f->i);
    if (!name)
        add_number(&w->key, f->i);
    else if (*name)
        torch_path_add(&w->key, name, strlen(name));
    else
        *below = n->below;
}

/* The next item of the container, its parts on the paths; false at the end. */
static bool next_item(struct torch_walk *w, struct frame *f, struct visit *x)
{
    struct pv key;

    w->key.len = f->key_len;
    w->path.len = f->path_len;
    w->key.failed = w->path.failed = 0;
    *x = (struct visit){.opaque = f->opaque, .shard = f->shard};
    if (f->rule == RULE_OBJECT)
        return next_part(f, x);
    if (f->i >= pv_count(&f->v))
        return false;
    if (f->v.kind == PV_DICT) {
        key = pv_key_at(&f->v, f->i);
        x->v = pv_value_at(&f->v, f->i);
        add_key(w, f, &key);
        /* Other attributes are not in state_dict(): LSTM's list of all its weights. */
        x->opaque = x->opaque || (f->rule == RULE_MODULE && !is_module_dict(&key)) ||
                    is_unsaved(f, &key);
        if (f->rule == RULE_MODULE && pv_str_is(&key, "_buffers"))
            x->unsaved = unsaved_buffers(&f->v);
    } else {
        x->v = pv_at(&f->v, f->i);
        x->told = f->told && f->i == 0;
        add_position(w, f, &x->naming);
    }
    f->i++;
    return true;
}

/* NUL behind what is there, as users of the path expect. */
static void terminate(struct buf *b)
{
    if (b->len > 0 && !b->failed)
        b->data[b->len] = '\0';
}

int torch_walk_value(struct torch_walk *w, struct pv v, struct err *e)
{
    struct visit x = {.v = v};
    struct stack s = {0};
    size_t key_len = w->key.len, path_len = w->path.len;
    int rc = visit_value(w, &s, &x, e);

    while (rc >= 0 && s.count > 0) {
        struct frame *f = &s.frame[s.count - 1];

        if (!next_item(w, f, &x)) {
            s.count--;
            continue;
        }
        terminate(&w->key);
        terminate(&w->path);
        /* Parts of an instance that are not there are no values. */
        if (f->rule == RULE_OBJECT && !pv_identity(&x.v))
            continue;
        rc = visit_value(w, &s, &x, e);
        if (rc >= 0)
            rc = fail_memory(w, e);
    }
    free(s.frame);
    w->key.len = key_len;
    w->path.len = path_len;
    return rc < 0 ? rc : 0;
}
