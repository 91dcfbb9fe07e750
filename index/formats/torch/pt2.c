/* SPDX-License-Identifier: MIT */
/* index/formats/torch/pt2.c - torch.export.save's .pt2: the weights of a program in a zip. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/json.h"
#include "base/keyset.h"
#include "index/formats/format.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/zip.h"
#include "remote/source.h"

enum {
    MAX_CONFIG = 64 << 20, /* some 300 bytes a tensor */
    MAX_NAME = 512,        /* of a member */
    STRIDED = 7,           /* schema.Layout.Strided */
};

static const char PT2[] = ".pt2";
/* Until torch 2.7 the members stand at the archive's root. */
static const char PROGRAM[] = "serialized_exported_program.json",
                  STATE[] = "serialized_state_dict.pt",
                  CONSTANTS[] = "serialized_constants.pt";

/* ---- bids ---- */

/* One file is a checkpoint: no directory is one. */
static void pt2_bid(struct listing *l, struct bid *out)
{
    (void)l;
    *out = (struct bid){0};
}

static bool is_named(const char *name)
{
    size_t len = strlen(name), n = sizeof PT2 - 1;

    return len > n && strcmp(name + len - n, PT2) == 0;
}

static void pt2_bid_file(struct listing *l, const char *name, struct bid *out)
{
    size_t got = 0;
    char head[4];

    *out = (struct bid){0};
    if (!is_named(name) || listing_peek(l, name, head, sizeof head, &got) < 0 ||
        got < sizeof head || memcmp(head, "PK\3\4", 4) != 0)
        return;
    out->score = 52;
    snprintf(out->reason, sizeof out->reason, "a zip archive called .pt2");
}

/* ---- the scan ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct zip *zip;
    struct torch_file file;
    size_t root;          /* bytes of the archive's folder, with its slash */
    const char *rootname; /* they */
    /* Of the config that is read. */
    const char *dir; /* "data/weights/" */
    const char *part;
    int role;
    struct keyset held; /* members, and MEMBER\nTYPE of the first tensor of each */
};

static void scan_release(struct scan *s)
{
    keyset_release(&s->held);
    zip_free(s->zip);
    torch_file_close(&s->file);
}

/* The member at this path below the archive's folder, or NULL. */
static const struct zip_entry *member(const struct scan *s, const char *dir,
                                      const char *name, const char *suffix)
{
    char path[MAX_NAME];
    int n = snprintf(path, sizeof path, "%.*s%s%s%s", (int)s->root, s->rootname, dir,
                     name, suffix);

    return n > 0 && (size_t)n < sizeof path ? zip_find(s->zip, path) : NULL;
}

/* ---- tensors of a config ---- */

/* schema.ScalarType of torch 2.8 to 2.15: numbers that never changed. */
static enum dtype dtype_of(uint64_t number)
{
    static const char *const names[] = {
        [1] = "uint8",
        [2] = "int8",
        [3] = "int16",
        [4] = "int32",
        [5] = "int64",
        [6] = "float16",
        [7] = "float32",
        [8] = "float64",
        [9] = "complex32",
        [10] = "complex64",
        [11] = "complex128",
        [12] = "bool",
        [13] = "bfloat16",
        [28] = "uint16",
        [29] = "float8_e4m3fn",
        [30] = "float8_e5m2",
        [31] = "float8_e4m3fnuz",
        [32] = "float8_e5m2fnuz",
        [33] = "float8_e8m0fnu",
        [34] = "uint32",
        [35] = "uint64",
    };

    return number < ARRAY_SIZE(names) && names[number]
               ? torch_dtype_of_name(names[number])
               : DTYPE_NONE;
}

/* [{"as_int": 4}, ...]: false for symbols, and for more than there may be. */
static bool numbers(const struct json *v, uint64_t *out, uint32_t *n)
{
    *n = 0;
    if (json_kind(v) != JSON_ARRAY || json_count(v) > SHAPE_MAX_DIMS)
        return false;
    for (const struct json *item = json_first(v); item; item = json_next(item))
        if (!json_u64(json_get(item, "as_int"), &out[(*n)++]))
            return false;
    return true;
}

/* Type and shape, as far as they can be had: what is wrong is a fault of that tensor. */
static int read_meta(const struct json *meta, struct torch_tensor *out, struct err *e)
{
    uint64_t stride[SHAPE_MAX_DIMS], dtype, layout, bytes;
    uint32_t nd = 0;

    if (!json_u64(json_get(meta, "dtype"), &dtype) ||
        !numbers(json_get(meta, "sizes"), out->shape.dim, &out->shape.nd)) {
        out->shape.nd = 0;
        return err_set(e, EBADMSG, "its type or sizes are not told");
    }
    out->dtype = dtype_of(dtype);
    if (out->dtype == DTYPE_NONE)
        return err_set(e, ENOTSUP, "its element type is number %" PRIu64, dtype);
    if (shape_bytes(&out->shape, out->dtype, &bytes, e) < 0) {
        out->shape.nd = 0;
        return -e->code;
    }
    if (!json_u64(json_get(meta, "layout"), &layout) || layout != STRIDED)
        return err_set(e, ENOTSUP, "its elements do not lie in strides");
    if (!numbers(json_get(meta, "strides"), stride, &nd) || nd != out->shape.nd ||
        !json_u64(json_get(json_get(meta, "storage_offset"), "as_int"),
                  &out->storage_offset))
        return err_set(e, EBADMSG, "its strides or its offset are not told");
    for (uint32_t k = 0; k < nd; k++)
        out->stride[k] = (int64_t)stride[k]; /* below 2^53 */
    return 0;
}

/* Bytes from the storage's first to the tensor's last; false: more than 2^64. */
static bool extent(const struct torch_tensor *x, uint64_t *out)
{
    uint64_t last = x->storage_offset, step;

    for (uint32_t k = 0; k < x->shape.nd; k++) {
        if (x->shape.dim[k] == 0) {
            *out = 0;
            return true;
        }
        if (mul_overflows(x->shape.dim[k] - 1, (uint64_t)x->stride[k], &step) ||
            add_overflows(last, step, &last))
            return false;
    }
    return !add_overflows(last, 1, &last) &&
           !mul_overflows(last, dtype_bits(x->dtype) / 8, out);
}

/*
 * The whole storage of a tensor of the CPU is saved. Of another device's torch copies the
 * tensor alone, and tells the strides and offset that it had there: those are good where they
 * are of all that was saved.
 */
static int check_place(const struct json *meta, const struct torch_tensor *x,
                       struct err *e)
{
    const char *device = "";
    uint64_t end, bytes;

    if (!extent(x, &end) || end > x->data_len)
        return err_set(e, EBADMSG,
                       "its elements reach past the %" PRIu64 " bytes that were saved",
                       x->data_len);
    TRY(shape_bytes(&x->shape, x->dtype, &bytes, e));
    json_string(json_get(json_get(meta, "device"), "type"), &device);
    if (strcmp(device, "cpu") != 0 &&
        (x->storage_offset != 0 || bytes != x->data_len || end != x->data_len))
        return err_set(e, ENOTSUP,
                       "it was a part of a storage on a device, of which nothing tells "
                       "how much was saved");
    return 0;
}

/*
 * torch.export.load gives all tensors of a member the type of the first, and save puts
 * no two types into one: where they differ one of them is damaged.
 */
static int check_type(struct scan *s, const struct zip_entry *entry,
                      const struct torch_tensor *x, struct err *e)
{
    char typed[MAX_NAME + 32];
    size_t len = strlen(entry->name), typed_len;
    int fresh;

    if (x->data_len % dtype_unit(x->dtype) != 0)
        return err_set(e, EBADMSG,
                       "the %" PRIu64 " bytes that were saved are no whole %s",
                       x->data_len, dtype_name(x->dtype));
    typed_len = (size_t)snprintf(typed, sizeof typed, "%.*s\n%s", MAX_NAME, entry->name,
                                 dtype_name(x->dtype));
    fresh = keyset_add(&s->held, entry->name, len);
    if (fresh < 0 || (fresh > 0 && keyset_add(&s->held, typed, typed_len) < 0))
        return err_nomem(e);
    if (!keyset_has(&s->held, typed, typed_len))
        return err_set(e, EBADMSG, "it is %s, and %.100s is of another type",
                       dtype_name(x->dtype), entry->name);
    return 0;
}

static int find_tensor(struct scan *s, const struct json *v, struct torch_tensor *x,
                       struct err *e)
{
    const struct json *meta = json_get(v, "tensor_meta");
    const struct zip_entry *entry;
    const char *path;
    bool pickled;

    TRY(read_meta(meta, x, e));
    if (!json_string(json_get(v, "path_name"), &path) ||
        !json_bool(json_get(v, "use_pickle"), &pickled))
        return err_set(e, EBADMSG, "its member is not told");
    if (pickled)
        return err_set(e, ENOTSUP, "it is a subclass of Tensor, pickled");
    entry = member(s, s->dir, path, "");
    if (!entry)
        return err_set(e, EBADMSG, "%.100s is not in the archive", path);
    TRY(zip_data_offset(s->zip, entry, &x->data, e));
    x->data_len = entry->size;
    TRY(check_type(s, entry, x, e));
    return check_place(meta, x, e);
}

static int report_fault(struct scan *s, struct sink_tensor *t,
                        const struct torch_tensor *x, const struct err *why,
                        struct err *e)
{
    static const struct shape none = {.nd = 1};
    bool known = x->dtype != DTYPE_NONE;

    t->dtype = known ? x->dtype : DTYPE_U8;
    t->shape = known ? &x->shape : &none;
    TRY(sink_tensor_begin(s->sink, t, e));
    if (sink_fault(s->sink, "%s", why->text) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

/* A constant that is no tensor: an instance of a C++ class, or an opaque value. */
static int report_object(struct scan *s, const char *key, size_t len,
                         const struct json *v, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {0};
    const char *path = "";

    json_string(json_get(v, "path_name"), &path);
    buf_adds(&json,
             "{\"$type\":\"opaque\",\"class\":\"torch.ScriptObject\",\"member\":");
    buf_add_json(&json, path, strlen(path));
    buf_addc(&json, '}');
    if (buf_failed(&json))
        return err_nomem(e);
    return sink_object(s->sink, key, len, json.data, json.len, e);
}

/* json_member_fn */
static int report_entry(void *user, const char *key, size_t len, const struct json *v,
                        struct err *e)
{
    struct scan *s = user;
    struct torch_tensor x = {.dtype = DTYPE_NONE};
    struct sink_tensor t = {
        .key = key, .key_len = len, .part = s->part, .role = s->role};
    const struct json *meta = json_get(v, "tensor_meta");
    struct err why = {0};

    if (!meta || json_kind(meta) == JSON_NULL)
        return report_object(s, key, len, v, e);
    if (find_tensor(s, v, &x, &why) == 0)
        return torch_file_tensor(s->sink, &s->file, &x, &t, e);
    if (!torch_file_is_damaged(why.code)) {
        return err_copy(e, &why);
    }
    return report_fault(s, &t, &x, &why, e);
}

static int report_config(struct scan *s, const struct zip_entry *entry, struct err *e)
{
    CLEANUP_FREE void *text = NULL;
    size_t len;

    if (torch_zip_check_record(s->file.src, s->zip, entry, e) < 0 ||
        zip_read(s->zip, entry, MAX_CONFIG, &text, &len, e) < 0 ||
        json_each_member_of(text, len, NULL, "config", report_entry, s, e) < 0)
        return err_wrap(e, "%.200s", entry->name);
    return 0;
}

/* ---- state dicts that torch.save wrote ---- */

/* A member that is a file of torch.save, as it is. */
static int report_saved(struct scan *s, const struct zip_entry *entry, struct err *e)
{
    CLEANUP(torch_zip_freep) struct torch_zip *inner = NULL;
    struct torch_file f = s->file;
    const struct torch_report how = {
        .prefix = "", .part = s->part, .role = s->role, .entries = true};
    uint64_t off;

    if (zip_data_offset(s->zip, entry, &off, e) < 0 ||
        torch_zip_open(s->file.src, off, entry->size, &inner, e) < 0)
        return err_wrap(e, "%.200s", entry->name);
    f.zip = inner;
    return torch_file_report_loaded(s->sink, &f, &how, e);
}

/* One of the two: a config with its members, or a file of torch.save (2.8). */
static int report_dir(struct scan *s, const char *dir, const char *model,
                      const char *config, struct err *e)
{
    const struct zip_entry *entry = member(s, dir, model, config);

    s->dir = dir;
    if (entry)
        return report_config(s, entry, e);
    entry = member(s, dir, model, ".pt");
    if (entry)
        return report_saved(s, entry, e);
    return err_set(e, EBADMSG, "%s%s%s is not in the archive", dir, model, config);
}

/* ---- programs ---- */

/* A program's tensors; `alone`: no other one's are in the archive. */
static int report_model(struct scan *s, const char *model, bool alone, struct err *e)
{
    char constants[MAX_NAME + sizeof "/constants"];

    s->part = alone ? NULL : model;
    s->role = ROLE_MODEL;
    TRY(report_dir(s, "data/weights/", model, "_weights_config.json", e));
    snprintf(constants, sizeof constants, "%s%sconstants", alone ? "" : model,
             alone ? "" : "/");
    s->part = constants;
    s->role = ROLE_OTHER;
    return report_dir(s, "data/constants/", model, "_constants_config.json", e);
}

/* "ROOT/models/NAME.json": NAME. */
static bool model_name(const struct scan *s, const char *path, char name[MAX_NAME])
{
    static const char dir[] = "models/", json[] = ".json";
    size_t len = strlen(path), skip = s->root + sizeof dir - 1, n = sizeof json - 1;

    if (len <= skip + n || len - skip - n >= MAX_NAME ||
        memcmp(path, s->rootname, s->root) != 0 ||
        memcmp(path + s->root, dir, sizeof dir - 1) != 0 ||
        strcmp(path + len - n, json) != 0)
        return false;
    memcpy(name, path + skip, len - skip - n);
    name[len - skip - n] = '\0';
    return true;
}

static int report_models(struct scan *s, struct err *e)
{
    char name[MAX_NAME];
    size_t models = 0;

    for (size_t i = 0; i < zip_count(s->zip); i++)
        models += model_name(s, zip_at(s->zip, i)->name, name);
    if (models == 0) {
        err_set(e, ENOTSUP, "the archive has no exported program");
        return err_hint(e,
                        "what AOTInductor has compiled has its weights in a library: "
                        "save the program itself with torch.export.save");
    }
    for (size_t i = 0; i < zip_count(s->zip); i++)
        if (model_name(s, zip_at(s->zip, i)->name, name))
            TRY(report_model(s, name, models == 1, e));
    return 0;
}

static int check_byteorder(struct scan *s, struct err *e)
{
    const struct zip_entry *entry = member(s, "", "byteorder", "");
    CLEANUP_FREE void *text = NULL;
    size_t len;

    if (!entry)
        return 0;
    TRY(zip_read(s->zip, entry, 16, &text, &len, e));
    if (len == 6 && memcmp(text, "little", 6) == 0)
        return 0;
    return err_set(e, ENOTSUP, "its byteorder is not \"little\"");
}

/* torch 2.5 to 2.7 */
static int report_flat(struct scan *s, struct err *e)
{
    const struct zip_entry *state = zip_find(s->zip, STATE),
                           *constants = zip_find(s->zip, CONSTANTS);

    if (!state || !constants)
        return err_set(e, EBADMSG, "%s without %s", PROGRAM, state ? CONSTANTS : STATE);
    s->role = ROLE_MODEL;
    TRY(report_saved(s, state, e));
    s->part = "constants";
    s->role = ROLE_OTHER;
    return report_saved(s, constants, e);
}

static int report_archive(struct scan *s, struct err *e)
{
    static const char mark[] = "archive_format";
    CLEANUP_FREE void *text = NULL;
    const struct zip_entry *entry;
    size_t len;

    TRY(zip_open(s->file.src, 0, s->file.src->size, &s->zip, e));
    if (zip_find(s->zip, PROGRAM))
        return report_flat(s, e);
    entry = zip_find_suffix(s->zip, "/archive_format");
    if (!entry || strchr(entry->name, '/') != strrchr(entry->name, '/'))
        return err_set(e, ENOTSUP, "a zip archive, but none of torch.export.save");
    TRY(zip_read(s->zip, entry, 16, &text, &len, e));
    if (len != 3 || memcmp(text, "pt2", 3) != 0)
        return err_set(e, ENOTSUP, "its archive_format is not \"pt2\"");
    s->rootname = entry->name;
    s->root = strlen(entry->name) - (sizeof mark - 1);
    TRY(check_byteorder(s, e));
    return report_models(s, e);
}

/* ---- the file ---- */

static int open_file(struct scan *s, struct err *e)
{
    struct torch_file *f = &s->file;
    char path[PATH_MAX];

    f->path = s->c->file;
    if (torch_file_register(s->sink, f, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", f->path) : -e->code;
    if (store_join(s->c->dir, f->path, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", s->c->dir,
                       f->path);
    if (s->c->store->ops->open(s->c->store, path, &f->src, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    if (!file_id_equal(&f->src->id, &f->id))
        return err_set(e, ESTALE, "%s was changed during the scan", path);
    return 0;
}

static int tell_checkpoint(const struct scan_context *c, struct sink *sink,
                           struct err *e)
{
    char path[PATH_MAX], stem[NAME_MAX + 1];
    struct sink_checkpoint about = {
        .format = "torch-export",
        .framework = "PyTorch",
        .topology = "{\"files\": 1}",
        .metadata_file = path,
    };

    if (store_join(c->dir, c->file, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", c->dir, c->file);
    snprintf(stem, sizeof stem, "%.*s", (int)(strlen(c->file) - strlen(PT2)), c->file);
    about.has_step = step_of_name(stem, &about.step);
    return sink_checkpoint(sink, &about, e);
}

static int pt2_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    CLEANUP(scan_release) struct scan s = {.c = c, .sink = sink, .rootname = ""};

    if (!c->file)
        return err_set(e, ESTALE, "no single .pt2 file any more");
    TRY(tell_checkpoint(c, sink, e));
    TRY(open_file(&s, e));
    if (report_archive(&s, e) < 0)
        return err_wrap(e, "%s", c->file);
    return source_check(s.file.src, e);
}

const struct format_driver format_pt2 = {
    .name = "pt2",
    .title = "torch.export: the weights of programs in .pt2 archives",
    .bid = pt2_bid,
    .bid_file = pt2_bid_file,
    .scan = pt2_scan,
};
