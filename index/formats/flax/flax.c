/* SPDX-License-Identifier: MIT */
/* index/formats/flax/flax.c - files of flax.serialization, HF's shards, EasyLM's streams. */
#include "index/formats/flax/flax_tree.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/keyset.h"
#include "index/formats/flat_boxes.h"
#include "index/formats/flax/flax_elsewhere.h"
#include "index/formats/format.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/jax_role.h"
#include "index/formats/zarr/zarr_dir.h"

enum {
    HEAD_BYTES = 512,
    MAX_INDEX = 100000000, /* what the JSON reader takes */
    MAX_BOXES = 1 << 20,   /* of one tensor */
    MAX_SAME = 1000,       /* tensors that would have one key */
    MAX_BESIDE = 64, /* names in a directory whose files are opened to know them */
};

static const char suffix[] = ".msgpack";
static const char index_name[] = "flax_model.msgpack.index.json";

/* ---- bids ---- */

enum content { NO_FLAX, FLAX_MAP, EASYLM_STREAM };

static enum content content_of(struct listing *l, const char *name)
{
    char head[HEAD_BYTES];
    size_t got = 0;

    if (listing_peek(l, name, head, sizeof head, &got) < 0)
        return NO_FLAX;
    if (flax_sniff_stream(head, got))
        return EASYLM_STREAM;
    return flax_sniff(head, got) ? FLAX_MAP : NO_FLAX;
}

/* What EasyLM's trainers call their files; a milestone has its step behind that. */
static const char *const streams[] = {"streaming_params", "streaming_train_state"};

static bool is_stream_name(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(streams); i++)
        if (strncmp(name, streams[i], strlen(streams[i])) == 0)
            return true;
    return false;
}

/* "PREFIX_1000": the number is the step. */
static bool number_behind(const char *name, const char *prefix, int64_t *step)
{
    size_t len = strlen(prefix);
    const char *p = name + MIN(len, strlen(name));
    int64_t number = 0;

    if (strncmp(name, prefix, len) != 0 || *p != '_' || !*++p)
        return false;
    for (; isdigit((unsigned char)*p) && number < INT64_MAX / 10 - 9; p++)
        number = number * 10 + (*p - '0');
    if (*p)
        return false;
    *step = number;
    return true;
}

/*
 * Of flax.training.checkpoints, or a milestone of EasyLM. Trainers may give a prefix of
 * their own: such a file is believed by the array that its first bytes have.
 */
static bool step_of(const char *name, bool any_prefix, int64_t *step)
{
    const char *last = strrchr(name, '_');
    char prefix[NAME_MAX + 1];

    if (any_prefix && last && last > name) {
        snprintf(prefix, sizeof prefix, "%.*s", (int)(last - name), name);
        return number_behind(name, prefix, step);
    }
    return number_behind(name, "checkpoint", step) ||
           number_behind(name, streams[0], step) ||
           number_behind(name, streams[1], step);
}

/* flax takes fractions for a step, too: checkpoint_0.5, which is no step of ours. */
static bool is_fraction(const char *name)
{
    static const char before[] = "checkpoint_";
    const char *number = name + sizeof before - 1;
    size_t digits;

    if (strncmp(name, before, sizeof before - 1) != 0)
        return false;
    digits = strspn(number, "0123456789");
    return digits > 0 && number[digits] == '.' && number[digits + 1] &&
           strspn(number + digits + 1, "0123456789") == strlen(number + digits + 1);
}

/* Does an array, ext 1 of [shape, ...], stand in the first bytes? */
static bool begins_with_array(struct listing *l, const char *name)
{
    static const unsigned char lengths[] = {1, 2, 4}; /* of ext 8, 16 and 32 */
    unsigned char head[HEAD_BYTES];
    size_t got = 0;

    if (listing_peek(l, name, head, sizeof head, &got) < 0 || !flax_sniff(head, got))
        return false;
    for (size_t i = 0; i < got; i++) {
        size_t type =
            head[i] >= 0xc7 && head[i] <= 0xc9 ? i + 1 + lengths[head[i] - 0xc7] : got;

        if (type + 2 < got && head[type] == 1 && head[type + 1] == 0x93 &&
            (head[type + 2] & 0xf0) == 0x90)
            return true;
    }
    return false;
}

static void flax_bid(struct listing *l, struct bid *out)
{
    const struct listing_entry *entry = listing_find(l, index_name);

    *out = (struct bid){0};
    if (!entry || entry->st.kind != ENTRY_FILE)
        return;
    out->score = 70; /* what PyTorch and safetensors have is preferred */
    snprintf(out->reason, sizeof out->reason, "%s", index_name);
}

static void flax_bid_file(struct listing *l, const char *name, struct bid *out)
{
    size_t len = strlen(name), end = sizeof suffix - 1;
    bool named = len > end && strcmp(name + len - end, suffix) == 0;
    enum content content;
    int64_t step;

    *out = (struct bid){0};
    if (!named && !step_of(name, false, &step) && !is_stream_name(name) &&
        !is_fraction(name) &&
        (listing_count(l) > MAX_BESIDE || !step_of(name, true, &step) ||
         !begins_with_array(l, name)))
        return;
    content = content_of(l, name);
    if (content == EASYLM_STREAM) {
        out->score = 50;
        snprintf(out->reason, sizeof out->reason,
                 "MessagePack: records of names and bytes, as EasyLM streams them");
    } else if (content == FLAX_MAP) {
        out->score = named ? 50 : 40;
        snprintf(out->reason, sizeof out->reason,
                 "MessagePack: a map whose keys are text");
    } else if (named) {
        out->score = 20;
        snprintf(out->reason, sizeof out->reason, "*%s by its name, no map inside",
                 suffix);
    }
}

/* ---- tensors ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct source *src; /* of the file that is read now */
    uint32_t file;
    size_t files;
    struct keyset keys; /* of a model in several files */
    bool indexed;
    bool has_step;
    int64_t step;
};

/* A piece that is elements [begin, end) of the tensor. */
static int add_piece(struct scan *s, const struct shape *shape, uint64_t begin,
                     uint64_t end, const struct flax_piece *p, struct err *e)
{
    struct flat_boxes boxes;
    struct flat_box box;

    if (!flat_boxes_begin(&boxes, shape, begin, end))
        return err_set(e, EBADMSG, "a chunk lies outside its tensor");
    while (flat_boxes_next(&boxes, &box)) {
        uint64_t unit = p->len / (end - begin), count = 1;
        struct chunk c = {.file = s->file, .start = box.start, .size = box.size};

        for (uint32_t k = 0; k < shape->nd; k++)
            count *= box.size[k];
        c.offset = p->off + box.first * unit;
        c.length = count * unit;
        TRY(sink_chunk(s->sink, &c, e));
    }
    return 0;
}

static int add_pieces(struct scan *s, const struct flax_array *a, struct err *e)
{
    unsigned unit = dtype_unit(a->dtype);
    uint64_t at = 0;

    for (size_t i = 0; i < a->count; i++) {
        uint64_t n = a->piece[i].len / unit;

        if (a->piece[i].len % unit)
            return sink_fault(s->sink, "a chunk ends within an element") < 0
                       ? err_nomem(e)
                       : 0;
        if (n > 0)
            TRY(add_piece(s, &a->shape, at, at + n, &a->piece[i], e));
        at += n;
    }
    return 0;
}

static int add_tensor(struct scan *s, const struct sink_tensor *t,
                      const struct flax_array *a, struct err *e)
{
    if (!a->fault && a->count == 1)
        return sink_tensor_plain(s->sink, t, s->file, a->piece[0].off, e);
    TRY(sink_tensor_begin(s->sink, t, e));
    if (a->fault && sink_fault(s->sink, "%s", a->fault) < 0)
        return err_nomem(e);
    if (!a->fault)
        TRY(add_pieces(s, a, e));
    return sink_tensor_end(s->sink, e);
}

/* An integer of a few bytes: the step that a train state has. */
static int take_step(struct scan *s, const struct flax_array *a, struct err *e)
{
    unsigned char bytes[8] = {0};
    unsigned size = dtype_unit(a->dtype);

    if (a->shape.nd != 0 || a->fault || a->count != 1 || a->piece[0].len != size ||
        (a->dtype != DTYPE_I32 && a->dtype != DTYPE_I64 && a->dtype != DTYPE_U32))
        return 0;
    TRY(source_read(s->src, a->piece[0].off, size, bytes, e));
    s->step =
        a->dtype == DTYPE_I32 ? (int32_t)get_le32(bytes) : (int64_t)get_le64(bytes);
    s->has_step = s->step >= 0;
    return 0;
}

/* Two keys of the tree may be one path: {"a.b": 1} and {"a": {"b": 1}}. */
static int same_key(struct scan *s, const struct buf *key, bool shown, struct err *e)
{
    *e = (struct err){0};
    return sink_warning(s->sink, "duplicate-key", "%.*s: another tensor has that key%s",
                        (int)MIN(key->len, 200), key->data,
                        shown ? "" : ", this one is not shown") < 0
               ? err_nomem(e)
               : 0;
}

/* The second of a file is KEY:2; of several files one has a tensor too much. */
static int add_once(struct scan *s, struct sink_tensor *t, struct buf *key,
                    const struct flax_array *a, struct err *e)
{
    size_t len = key->len;
    bool alone = s->files == 0 && !s->indexed;
    int rc = add_tensor(s, t, a, e);

    for (int n = 2; rc == -EEXIST && alone && n <= MAX_SAME; n++) {
        *e = (struct err){0};
        key->len = len;
        buf_addf(key, ":%d", n);
        if (buf_failed(key))
            return buf_failed(key) == -ENOMEM
                       ? err_nomem(e)
                       : err_set(e, EFBIG, "a path of more than 64 KiB");
        t->key = key->data;
        t->key_len = key->len;
        rc = add_tensor(s, t, a, e);
    }
    if (rc == -EEXIST)
        key->len = len;
    return rc == -EEXIST || (rc == 0 && key->len > len) ? same_key(s, key, rc == 0, e)
                                                        : rc;
}

static int on_array(void *user, struct buf *key, const struct flax_array *a,
                    struct err *e)
{
    struct scan *s = user;
    char attributes[FLAX_DTYPE_NAME + 32];
    struct sink_tensor t = {.key = key->data,
                            .key_len = key->len,
                            .dtype = a->dtype,
                            .shape = &a->shape,
                            .role = (int)jax_role(NULL, key->data, key->len)};

    snprintf(attributes, sizeof attributes, "{\"numpy_dtype\": \"%s\"}", a->name);
    if (a->is_raw)
        t.attributes = attributes;
    if (key->len == 4 && memcmp(key->data, "step", 4) == 0)
        TRY(take_step(s, a, e));
    if (s->indexed && keyset_add(&s->keys, key->data, key->len) < 0)
        return err_nomem(e);
    return add_once(s, &t, key, a, e);
}

/* ---- arrays of several processes ---- */

/* Reports the array, or lists it with what its path has wrong. */
static int add_elsewhere(struct scan *s, const struct sink_tensor *t, const char *path,
                         struct err *e)
{
    static const struct shape none = {.nd = 1};
    struct sink_tensor lost = *t;
    char dir[PATH_MAX];
    const struct zarr_dir d = {
        .store = s->c->store, .root = s->c->dir, .path = dir, .metadata = ".zarray"};
    struct zarr_array a;

    if (store_name_is_safe(path, strlen(path)) &&
        snprintf(dir, sizeof dir, "%s%s/%s", s->c->file, FLAX_ELSEWHERE_DIR, path) <
            (int)sizeof dir)
        return zarr_dir_report(&d, t, s->sink, &a, e);
    lost.dtype = DTYPE_U8;
    lost.shape = &none;
    TRY(sink_tensor_begin(s->sink, &lost, e));
    if (sink_fault(s->sink, "the path of its directory is none: %.100s", path) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

static int on_elsewhere(void *user, struct buf *key, const char *path, struct err *e)
{
    struct scan *s = user;
    struct sink_tensor t = {.key = key->data,
                            .key_len = key->len,
                            .role = (int)jax_role(NULL, key->data, key->len)};
    int rc = add_elsewhere(s, &t, path, e);

    return rc == -EEXIST ? same_key(s, key, false, e) : rc;
}

/* The object without the arrays that it only names, which are shown as tensors. */
static int split_object(struct scan *s, const char *key, size_t len, const char *json,
                        size_t json_len, struct err *e)
{
    CLEANUP(buf_release) struct buf rest = {0};
    char dir[NAME_MAX + 1];

    TRY(flax_elsewhere(key, len, json, json_len, on_elsewhere, s, &rest, e));
    if (!s->c->among && snprintf(dir, sizeof dir, "%s%s", s->c->file,
                                 FLAX_ELSEWHERE_DIR) < (int)sizeof dir)
        TRY(sink_hide(s->sink, dir, false, e));
    return rest.len > 0 ? sink_object(s->sink, key, len, rest.data, rest.len, e) : 0;
}

static int on_object(void *user, const char *key, size_t len, const char *json,
                     size_t json_len, struct err *e)
{
    struct scan *s = user;

    if (len == 4 && memcmp(key, "step", 4) == 0 && json_len < 17 &&
        isdigit((unsigned char)json[0])) {
        char *end;
        char text[24];

        snprintf(text, sizeof text, "%.*s", (int)json_len, json);
        s->step = strtoll(text, &end, 10);
        s->has_step = *end == '\0';
    }
    return s->c->file && flax_has_elsewhere(json, json_len)
               ? split_object(s, key, len, json, json_len, e)
               : sink_object(s->sink, key, len, json, json_len, e);
}

/* ---- files ---- */

static int open_file(struct scan *s, const char *name, struct err *e)
{
    char path[PATH_MAX];
    struct file_id id;

    if (store_join(s->c->dir, name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", name);
    TRY(sink_file(s->sink, name, strlen(name), &s->file, e));
    if (!sink_file_id(s->sink, s->file, &id))
        return err_set(e, ENOENT, "%s is missing", name);
    TRY(s->c->store->ops->open(s->c->store, path, &s->src, e));
    if (!file_id_equal(&s->src->id, &id))
        return source_stale(path, &id, &s->src->id, e);
    return 0;
}

static int scan_file(struct scan *s, const char *name, struct err *e)
{
    const struct flax_visitor v = {.array = on_array, .object = on_object, .user = s};
    int rc = open_file(s, name, e);

    if (rc == 0)
        rc = flax_walk(s->src, 0, s->src->size, &v, e);
    source_putp(&s->src);
    s->files++;
    return rc;
}

/* Of a tensor that no file has only the name is known. */
static int add_missing(struct scan *s, const char *key, size_t len, const char *file,
                       struct err *e)
{
    static const struct shape none = {.nd = 1};
    const struct sink_tensor t = {
        .key = key, .key_len = len, .dtype = DTYPE_U8, .shape = &none, .role = -1};

    TRY(sink_tensor_begin(s->sink, &t, e));
    if (sink_fault(s->sink,
                   "the index says that it is in %.200s, which does not hold it",
                   file) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

/* The index joins the keys of a path by slashes. */
static int check_entries(struct scan *s, const struct hf_index *x, struct err *e)
{
    for (size_t i = 0; i < x->count; i++) {
        CLEANUP_FREE char *key = strdup(x->entry[i].key);
        size_t len = key ? strlen(key) : 0;
        int rc;

        if (!key)
            return err_nomem(e);
        for (char *c = key; *c; c++)
            if (*c == '/')
                *c = '.';
        rc = keyset_add(&s->keys, key, len);
        if (rc > 0)
            rc = add_missing(s, key, len, x->file[x->entry[i].file].name, e);
        if (rc < 0)
            return e->code ? -e->code : err_nomem(e);
    }
    return 0;
}

/* A shard that cannot be read leaves its tensors unreadable, and the others as they are. */
static int scan_shard(struct scan *s, const struct hf_index_file *f, struct err *e)
{
    struct err why = {0};
    int rc = f->fault ? -EBADMSG : scan_file(s, f->name, &why);

    if (rc == 0 || (why.code != EBADMSG && why.code != ENOENT && why.code != 0)) {
        *e = why;
        return rc;
    }
    return sink_warning(s->sink, "damaged-file", "%.200s: %s", f->name,
                        f->fault ? f->fault : why.text) < 0
               ? err_nomem(e)
               : 0;
}

static int scan_indexed(struct scan *s, struct err *e)
{
    CLEANUP(hf_index_release) struct hf_index x = {0};
    CLEANUP_FREE char *text = NULL;
    size_t len;

    s->indexed = true;
    /* First watched, then read: also a damaged index is read anew when it changes. */
    TRY(sink_hide(s->sink, index_name, true, e));
    if (listing_read(s->c->listing, index_name, MAX_INDEX, &text, &len, e) < 0 ||
        hf_index_parse(text, len, suffix, &x, e) < 0)
        return err_wrap(e, "%s", index_name);
    for (size_t i = 0; i < x.nfiles; i++)
        TRY(scan_shard(s, &x.file[i], e));
    return check_entries(s, &x, e);
}

/* ---- the checkpoint ---- */

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    char topology[64], path[PATH_MAX];
    struct sink_checkpoint out = {.format = "flax-msgpack",
                                  .framework = "Flax",
                                  .topology = topology,
                                  .metadata_file = path,
                                  .has_step = s->has_step,
                                  .step = s->step};
    const char *main = s->c->file ? s->c->file : index_name;

    if (s->c->file && content_of(s->c->listing, main) == EASYLM_STREAM) {
        out.format = "easylm-stream";
        out.framework = "EasyLM";
    }
    if (s->c->file && step_of(main, true, &out.step))
        out.has_step = true;
    snprintf(topology, sizeof topology, "{\"files\": %zu}", MAX(s->files, (size_t)1));
    if (store_join(s->c->dir, main, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", s->c->dir, main);
    return sink_checkpoint(s->sink, &out, e);
}

static int flax_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct scan s = {.c = c, .sink = sink};
    int rc;

    /* First without what the file tells: also a scan that fails has a format. */
    TRY(tell_checkpoint(&s, e));
    rc = c->file ? scan_file(&s, c->file, e) : scan_indexed(&s, e);
    keyset_release(&s.keys);
    return rc < 0 ? rc : tell_checkpoint(&s, e);
}

const struct format_driver format_flax = {
    .name = "flax",
    .title = "Flax: msgpack files, flax_model.msgpack, checkpoint_N, EasyLM's streams",
    .bid = flax_bid,
    .bid_file = flax_bid_file,
    .scan = flax_scan,
};
