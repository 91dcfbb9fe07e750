/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_report.c - one torch.save file: its tensors and objects to the sink. */
#include "index/formats/torch/torch_file.h"

#include <errno.h>
#include <limits.h>
#include <search.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/keyset.h"
#include "index/formats/format.h"
#include "index/formats/json_object.h"
#include "index/formats/rankfiles/dist_tensor.h"
#include "index/formats/torch/torch_walk.h"
#include "index/names.h"
#include "remote/source.h"

enum {
    MAX_JSON = 64 << 20, /* of one object */
    MAX_SAME = 1000,     /* tensors that would have one key */
    /*
     * How often a storage may be repeated by strides of 0, once the tensor is this large:
     * else a file of a hundred bytes shows as one of petabytes.
     */
    MAX_REPEAT = 1 << 16,
};

static const uint64_t LARGE = UINT64_C(1) << 30;

/* ---- the file ---- */

int torch_file_register(struct sink *sink, struct torch_file *f, struct err *e)
{
    int rc = f->shown ? sink_file_shown(sink, f->path, strlen(f->path), &f->number, e)
                      : sink_file(sink, f->path, strlen(f->path), &f->number, e);

    if (rc < 0)
        return rc;
    if (!sink_file_id(sink, f->number, &f->id))
        return err_set(e, ENOENT, "%s is missing", f->path);
    return 0;
}

bool torch_file_is_damaged(int code)
{
    return code == EBADMSG || code == ENOTSUP || code == EFBIG || code == EOVERFLOW ||
           code == ENOENT || code == EINVAL || code == EIO || code == EACCES;
}

int torch_file_load(const struct scan_context *c, struct torch_file *f, struct err *e)
{
    char path[PATH_MAX];

    if (store_join(c->dir, f->path, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", c->dir, f->path);
    if (c->store->ops->open(c->store, path, &f->src, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    if (!file_id_equal(&f->src->id, &f->id))
        return err_set(e, ESTALE, "%s was changed during the scan", path);
    TRY(torch_open(f->src, &f->zip, e));
    return source_check(f->src, e);
}

void torch_file_close(struct torch_file *f)
{
    torch_zip_freep(&f->zip);
    source_putp(&f->src);
}

/* ---- one tensor ---- */

static void make_chunk(const struct torch_file *f, const struct torch_tensor *x,
                       const uint64_t *start, const struct shape *units,
                       struct chunk *out)
{
    *out = (struct chunk){
        .file = f->number,
        .encoding = x->packed ? CHUNK_ZIP_DEFLATE : CHUNK_PLAIN,
        .flags = x->flags,
        .offset = x->data,
        .length = x->packed ? x->packed : x->data_len,
        .start = start,
        .size = units->dim,
        .first = x->storage_offset,
        .step = x->stride,
    };
}

/* Row-major from the first byte of its storage to the last: then no steps are needed. */
static bool is_whole_storage(const struct torch_tensor *x, const struct shape *units)
{
    uint64_t step = 1;

    if (x->packed || x->storage_offset != 0)
        return false;
    for (uint32_t k = units->nd; k-- > 0; step *= units->dim[k])
        if (units->dim[k] == 0 || (units->dim[k] > 1 && (uint64_t)x->stride[k] != step))
            return false;
    return step * dtype_unit(x->dtype) == x->data_len;
}

void torch_file_param(const struct torch_tensor *x, char param[TORCH_MAX_PARAM])
{
    snprintf(param, TORCH_MAX_PARAM, "%" PRIu64 " %08" PRIx32, x->data_len, x->crc);
}

int torch_file_piece(struct sink *sink, const struct torch_file *f,
                     const struct torch_tensor *x, const uint64_t *start,
                     const char *param, struct err *e)
{
    static const uint64_t zeros[SHAPE_MAX_DIMS];
    struct shape units;
    struct chunk c;

    TRY(shape_units(&x->shape, x->dtype, &units, e));
    make_chunk(f, x, start ? start : zeros, &units, &c);
    if (is_whole_storage(x, &units))
        c.step = NULL;
    if (param) {
        c.param = param;
        c.param_len = (uint32_t)strlen(param);
    }
    return sink_chunk(sink, &c, e);
}

int torch_file_chunk(struct sink *sink, const struct torch_file *f,
                     const struct torch_tensor *x, const uint64_t *start, struct err *e)
{
    return torch_file_piece(sink, f, x, start, NULL, e);
}

/* True when strides of 0 make it absurdly larger than what is stored. */
static bool is_blown_up(const struct torch_tensor *x, uint64_t bytes)
{
    return bytes > LARGE && bytes / MAX_REPEAT > x->data_len;
}

int torch_file_tensor(struct sink *sink, const struct torch_file *f,
                      const struct torch_tensor *x, struct sink_tensor *t,
                      struct err *e)
{
    char codec_key[TORCH_MAX_PARAM];
    uint64_t bytes = 0;

    t->dtype = x->dtype;
    t->shape = &x->shape;
    if (x->packed) {
        torch_file_param(x, codec_key);
        t->codec_key = codec_key;
    }
    TRY(shape_bytes(&x->shape, x->dtype, &bytes, e));
    TRY(sink_tensor_begin(sink, t, e));
    t->codec_key = NULL;
    TRY(torch_file_chunk(sink, f, x, NULL, e));
    if (is_blown_up(x, bytes) &&
        sink_fault(sink,
                   "%" PRIu64 " bytes, repeated out of a storage of %" PRIu64
                   " by strides of 0",
                   bytes, x->data_len) < 0)
        return err_nomem(e);
    return sink_tensor_end(sink, e);
}

/* ---- the content of a file ---- */

/*
 * A path of a tensor whose key is another one. NULL: two tensors have it (those of {"a.b": x,
 * "a": {"b": y}}), so that it tells of neither.
 */
struct renamed {
    char *path, *key;
};

struct report {
    struct sink *sink;
    const struct torch_file *f;
    const struct torch_report *how;
    struct buf prefix;   /* before each key */
    struct keyset paths; /* of tensors, whose key is the path unless renamed */
    void *renamed;       /* tsearch: struct renamed, by path */
    struct buf text;     /* a key with its prefix */
    struct buf base;     /* what the JSON's paths are relative to */
    size_t wrapper;      /* bytes of a key of this entry that are a wrapper */
    bool wrapped;        /* some entry is one: what is beside it is not the model */
    uint64_t damaged;
};

static int compare_renamed(const void *a, const void *b)
{
    const struct renamed *x = a, *y = b;

    return strcmp(x->path, y->path);
}

static void free_renamed(void *p)
{
    struct renamed *r = p;

    free(r->path);
    free(r->key);
    free(r);
}

static void report_release(struct report *r)
{
    buf_release(&r->prefix);
    buf_release(&r->text);
    buf_release(&r->base);
    keyset_release(&r->paths);
    tdestroy(r->renamed, free_renamed);
}

static int note_renamed(struct report *r, const struct torch_item *item, bool fresh,
                        struct err *e)
{
    struct renamed *n = calloc(1, sizeof *n), **found;

    if (n) {
        n->path = strndup(item->path, item->path_len);
        n->key = fresh ? strndup(r->text.data, r->text.len) : NULL;
    }
    found = n && n->path && (n->key || !fresh)
                ? tsearch(n, &r->renamed, compare_renamed)
                : NULL;
    if (!found) {
        if (n)
            free_renamed(n);
        return err_nomem(e);
    }
    if (*found != n) {
        free(steal(&(*found)->key));
        free_renamed(n);
    }
    return 0;
}

/* Remembers under which key the tensor of this path is to be found. */
static int note_key(struct report *r, const struct torch_item *item, struct err *e)
{
    const char *key = r->text.data + r->prefix.len;
    int fresh = keyset_add(&r->paths, item->path, item->path_len);

    if (fresh < 0)
        return err_nomem(e);
    if (fresh && r->text.len - r->prefix.len == item->path_len &&
        memcmp(key, item->path, item->path_len) == 0)
        return 0;
    return note_renamed(r, item, fresh, e);
}

/* Others report it: only its key is noted. */
static int note_elsewhere(struct report *r, const struct torch_item *item,
                          struct err *e)
{
    int fresh = keyset_add(&r->paths, item->path, item->path_len);

    buf_clear(&r->text);
    if (fresh < 0 ||
        r->how->elsewhere(r->how->user, item->path, item->path_len, &r->text) < 0 ||
        buf_failed(&r->text))
        return err_nomem(e);
    return note_renamed(r, item, fresh, e);
}

/* "optimizer_state_dict" and the like are what most scripts write beside the model. */
static int role_by_entry(const struct report *r, const struct torch_item *item)
{
    static const struct {
        const char *entry;
        enum role role;
    } entries[] = {{"optimizer_state_dict", ROLE_OPTIMIZER},
                   {"optim_state_dict", ROLE_OPTIMIZER},
                   {"scheduler_state_dict", ROLE_OTHER},
                   {"lr_scheduler_state_dict", ROLE_OTHER},
                   {"scaler_state_dict", ROLE_OTHER},
                   {"rng_state", ROLE_OTHER},
                   {"rng_states", ROLE_OTHER},
                   {"cuda_rng_state", ROLE_OTHER}};

    if (item->shard)
        return ROLE_OTHER;
    if (r->how->role >= 0)
        return r->how->role;
    if (item->opaque)
        return ROLE_OTHER;
    for (size_t i = 0; i < ARRAY_SIZE(entries); i++) {
        size_t n = strlen(entries[i].entry);

        if (item->key_len >= n && memcmp(item->key, entries[i].entry, n) == 0 &&
            (item->key_len == n || item->key[n] == '.'))
            return (int)entries[i].role;
    }
    return (int)role_of(r->how->part, item->key, item->key_len);
}

/* Steps, losses and EMA copies beside the model's own entry. */
static int role_of_item(const struct report *r, const struct torch_item *item)
{
    int role = role_by_entry(r, item);

    return role == ROLE_MODEL && r->wrapped && !r->wrapper ? ROLE_OTHER : role;
}

/* A tensor of which only the name is known: shown as empty bytes that cannot be read. */
static int add_damaged(struct report *r, const struct torch_item *item,
                       struct sink_tensor *t, struct err *e)
{
    static const struct shape none = {.nd = 1};

    t->dtype = DTYPE_U8;
    t->shape = &none;
    TRY(sink_tensor_begin(r->sink, t, e));
    r->damaged++;
    if (sink_fault(r->sink, "%s", item->why) < 0)
        return err_nomem(e);
    return sink_tensor_end(r->sink, e);
}

static size_t whole_wrapper(const struct report *r, const struct torch_item *item)
{
    if (r->wrapper && r->wrapper < item->key_len)
        return r->prefix.len + r->wrapper;
    return r->how->prefix_is_wrapper ? r->prefix.len : 0;
}

static int add_once(struct report *r, const struct torch_item *item, struct err *e)
{
    struct sink_tensor t = {
        .key = r->text.data,
        .key_len = r->text.len,
        .part = r->how->part,
        .role = role_of_item(r, item),
        .wrapper = whole_wrapper(r, item),
        .modules = r->how->wrappers,
    };

    return item->tensor ? torch_file_tensor(r->sink, r->f, item->tensor, &t, e)
                        : add_damaged(r, item, &t, e);
}

/* Two tensors whose paths are spelt the same (0 and "0"): the second one is KEY:2. */
static int add_item(void *user, const struct torch_item *item, struct err *e)
{
    struct report *r = user;
    int rc = -EEXIST;

    if (r->how->elsewhere)
        return note_elsewhere(r, item, e);
    if (r->how->wants && !r->how->wants(r->how->user, item->key, item->key_len))
        return 0;
    for (int n = 1; rc == -EEXIST && n <= MAX_SAME; n++) {
        *e = (struct err){0};
        buf_clear(&r->text);
        buf_add(&r->text, r->prefix.data, r->prefix.len);
        buf_add(&r->text, item->key, item->key_len);
        if (n > 1)
            buf_addf(&r->text, ":%d", n);
        if (buf_failed(&r->text))
            return err_nomem(e);
        rc = add_once(r, item, e);
        if (rc == 0 && n > 1 &&
            sink_warning(r->sink, "duplicate-key", "%s: another tensor has that key",
                         r->text.data) < 0)
            return err_nomem(e);
    }
    return rc < 0 ? rc : note_key(r, item, e);
}

/* ---- objects ---- */

/* Under which key the tensor of this path was reported, or NULL. */
static const char *key_of_path(void *user, const char *path, size_t path_len)
{
    struct report *r = user;
    size_t base = r->base.len;
    struct renamed want, *const *found;
    const char *key = NULL;

    if (base > 0 && path_len > 0)
        buf_addc(&r->base, '.');
    buf_add(&r->base, path, path_len);
    if (!buf_failed(&r->base) && !memchr(r->base.data, '\0', r->base.len)) {
        want.path = r->base.data;
        found = tfind(&want, &r->renamed, compare_renamed);
        if (found) {
            key = (*found)->key;
        } else if (keyset_has(&r->paths, r->base.data, r->base.len)) {
            buf_clear(&r->text);
            buf_add(&r->text, r->prefix.data, r->prefix.len);
            buf_add(&r->text, r->base.data, r->base.len);
            key = buf_failed(&r->text) ? NULL : r->text.data;
        }
    }
    r->base.len = base;
    return key;
}

/* object_tensor_fn: under which key the tensor of this path was reported. */
static const char *key_of_tensor(void *user, const char *path, size_t path_len,
                                 const struct torch_tensor *tensor)
{
    (void)tensor;
    return key_of_path(user, path, path_len);
}

/* `base`: the path of v in the object; `visits`: how many values it has. */
static int add_object(struct report *r, const char *key, size_t key_len,
                      const struct pv *v, const struct buf *base, uint64_t visits,
                      struct err *e)
{
    CLEANUP(buf_release) struct buf json = {.max = MAX_JSON};
    const struct object_keys keys = {
        .on_tensor = key_of_tensor,
        .on_shard = r->how->elsewhere ? key_of_path : NULL,
        .user = r,
    };
    struct err why = {0};

    buf_clear(&r->base);
    if (base && buf_add(&r->base, base->data, base->len) < 0)
        return err_nomem(e);
    if (object_to_json_keys(r->f->zip, v, visits * 2 + 1000, &keys, &json, &why) == 0)
        return sink_object(r->sink, key, key_len, json.data, json.len, e);
    if (why.code != ENOMEM)
        return object_unreadable(r->sink, key, key_len, &why, e);
    return err_copy(e, &why);
}

/* ---- entries ---- */

static bool is_text(const struct pv *v, const char *text)
{
    return v->kind == PV_STR && pv_str_is(v, text);
}

static bool is_mapping(const struct pv *v)
{
    struct pv items;

    return torch_mapping(v, &items);
}

/* How many bytes of the keys of this entry's tensors are a wrapper. */
static size_t wrapper_of(const struct report *r, const struct pv *key,
                         const struct pv *value)
{
    static const char *const names[] = {"model", "module", "state_dict",
                                        "model_state_dict"};

    if (!r->how->wrappers || !is_mapping(value))
        return 0;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (is_text(key, names[i]))
            return strlen(names[i]) + 1;
    return 0;
}

static bool is_skipped(const struct report *r, const struct pv *key)
{
    if ((r->how->only && !is_text(key, r->how->only)) ||
        (r->how->wants_entry && !r->how->wants_entry(r->how->user, key)))
        return true;
    for (const char *const *s = r->how->skip; s && *s; s++)
        if (is_text(key, *s))
            return true;
    return false;
}

/* Composer: {"state": {"model": {...}, "optimizers": ...}, "rng": ...}. */
static bool has_inner_model(const struct report *r, const struct pv *key,
                            const struct pv *value)
{
    struct pv items, model;

    return r->how->wrappers && is_text(key, "state") && torch_mapping(value, &items) &&
           items.kind == PV_DICT && pv_dict_get(&items, "model", &model) &&
           is_mapping(&model);
}

/* torch_item_fn: those of state.model have a longer wrapper than the rest of state. */
static int add_state_item(void *user, const struct torch_item *item, struct err *e)
{
    static const char inner[] = "state.model.";
    struct report *r = user;
    int rc;

    r->wrapper = item->key_len > sizeof inner - 1 &&
                         memcmp(item->key, inner, sizeof inner - 1) == 0
                     ? sizeof inner - 1
                     : 0;
    rc = add_item(user, item, e);
    r->wrapper = 0;
    return rc;
}

/* torch_item_fn: the first tensor ends the walk. */
static int see_tensor(void *user, const struct torch_item *item, struct err *e)
{
    (void)item;
    *(bool *)user = true;
    return err_set(e, ECANCELED, "seen");
}

static bool has_tensor(const struct report *r, struct pv v)
{
    bool seen = false;
    CLEANUP(torch_walk_release)
    struct torch_walk w = {.zip = r->f->zip,
                           .fn = see_tensor,
                           .user = &seen,
                           .key = {.max = TORCH_MAX_PATH},
                           .path = {.max = TORCH_MAX_PATH}};
    struct err ignored = {0};

    torch_walk_value(&w, v, &ignored);
    return seen;
}

/* Is the model an entry of the outermost dict? */
static bool has_wrapper(const struct report *r, const struct pv *root)
{
    struct pv items;

    if (!r->how->wrappers || !torch_mapping(root, &items) || items.kind != PV_DICT)
        return false;
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv key = pv_key_at(&items, i), v = pv_value_at(&items, i);

        if ((wrapper_of(r, &key, &v) || has_inner_model(r, &key, &v)) &&
            has_tensor(r, v))
            return true;
    }
    return false;
}

static int add_entry(struct report *r, struct torch_walk *w, const struct pv *key,
                     size_t i, struct pv v, struct err *e)
{
    uint64_t tensors = w->tensors, others = w->others, visits = w->visits;
    CLEANUP(buf_release) struct buf name = {0}, object = {0};

    if (torch_key_part(key, i, &name) < 0)
        return err_nomem(e);
    buf_clear(&w->key);
    buf_clear(&w->path);
    buf_add(&w->key, name.data, name.len);
    buf_add(&w->path, name.data, name.len);
    r->wrapper = wrapper_of(r, key, &v);
    w->fn = has_inner_model(r, key, &v) ? add_state_item : add_item;
    TRY(torch_walk_value(w, v, e));
    if (!r->how->entries || (w->others == others && w->tensors > tensors))
        return 0;
    buf_adds(&object, r->how->object ? r->how->object : "");
    buf_add(&object, name.data, name.len);
    if (buf_failed(&object))
        return err_nomem(e);
    return add_object(r, object.len ? object.data : "", object.len, &v, &name,
                      w->visits - visits, e);
}

/* The entries of the outermost dict or list; anything else is one value without a name. */
static int add_entries(struct report *r, struct torch_walk *w, const struct pv *root,
                       bool *one, struct err *e)
{
    struct pv items;
    bool dict = torch_mapping(root, &items);

    *one = !dict && root->kind != PV_LIST && root->kind != PV_TUPLE;
    if (*one)
        return torch_walk_value(w, *root, e);
    if (dict && items.kind != PV_DICT) /* an OrderedDict without any */
        return 0;
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv key =
            dict ? pv_key_at(&items, i) : (struct pv){.kind = PV_INT, .i = (int64_t)i};

        if (is_skipped(r, &key))
            continue;
        TRY(add_entry(r, w, &key, i, dict ? pv_value_at(&items, i) : pv_at(&items, i),
                      e));
    }
    return 0;
}

static int warn(struct report *r, const struct torch_walk *w, struct err *e)
{
    const char *path = r->f->path;

    if ((w->shards > 0 &&
         sink_warning(r->sink, "shards",
                      "%s holds %" PRIu64
                      " shards of tensors (torch.distributed): they "
                      "are shown as what they are, not as the whole tensors",
                      path, w->shards) < 0) ||
        (w->too_deep > 0 &&
         sink_warning(r->sink, "nested",
                      "%s: %" PRIu64
                      " values are nested in themselves or too deep: what "
                      "they hold is not shown",
                      path, w->too_deep) < 0) ||
        (w->unnamed > 0 &&
         sink_warning(r->sink, "long-key",
                      "%s: %" PRIu64 " tensors have keys over %d bytes: they are not "
                      "shown",
                      path, w->unnamed, TORCH_MAX_PATH) < 0) ||
        (r->damaged > 0 &&
         sink_warning(r->sink, "damaged-tensor",
                      "%s: %" PRIu64 " tensors cannot be read", path, r->damaged) < 0))
        return err_nomem(e);
    return 0;
}

static int report_graph(struct report *r, struct torch_walk *w, struct err *e)
{
    const char *object =
        r->how->object && !r->how->entries ? r->how->object : r->f->path;
    struct pv root = torch_zip_root(r->f->zip);
    bool one;

    r->wrapped = has_wrapper(r, &root);
    TRY(add_entries(r, w, &root, &one, e));
    /* One tensor and nothing else is no object. */
    if ((one || !r->how->entries) && (w->others > 0 || w->tensors == 0))
        TRY(add_object(r, object, strlen(object), &root, NULL, w->visits, e));
    return warn(r, w, e);
}

int torch_file_report_loaded(struct sink *sink, const struct torch_file *f,
                             const struct torch_report *how, struct err *e)
{
    CLEANUP(report_release) struct report r = {.sink = sink, .f = f, .how = how};
    CLEANUP(torch_walk_release)
    struct torch_walk w = {
        .zip = f->zip,
        .fn = add_item,
        .user = &r,
        .claims = how->elsewhere ? dist_tensor_is : NULL,
        .key = {.max = TORCH_MAX_PATH},
        .path = {.max = TORCH_MAX_PATH},
    };

    buf_adds(&r.prefix, how->prefix ? how->prefix : f->path);
    if (!how->prefix)
        buf_addc(&r.prefix, ':');
    if (buf_failed(&r.prefix))
        return err_nomem(e);
    return report_graph(&r, &w, e);
}

int torch_file_report(const struct scan_context *c, struct sink *sink, const char *path,
                      const struct torch_report *how, struct err *e)
{
    CLEANUP(torch_file_close) struct torch_file f = {.path = path, .shown = how->shown};
    const char *object = how->object ? how->object : path;
    struct err why = {0};

    /* What was reported until references multiplied the values is right all the same. */
    if (torch_file_register(sink, &f, &why) == 0 && torch_file_load(c, &f, &why) == 0) {
        if (how->loaded)
            how->loaded(how->user, f.zip);
        if (torch_file_report_loaded(sink, &f, how, &why) == 0)
            return 0;
    }
    if (!how->strict && torch_file_is_damaged(why.code))
        return object_unreadable(sink, object, strlen(object), &why, e);
    return err_copy(e, &why);
}
