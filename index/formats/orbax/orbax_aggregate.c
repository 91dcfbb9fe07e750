/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_aggregate.c - the file `checkpoint`: small leaves in one MessagePack. */
#include "index/formats/orbax/orbax_aggregate.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/flax/flax_tree.h"
#include "index/formats/orbax/orbax_files.h"
#include "index/sink.h"
#include "remote/listing.h"
#include "remote/source.h"

enum {
    HEAD = 512,
    MAX_LEVELS = 64, /* of JSON */
};

static const char NAME[] = "checkpoint";
static const char PLACEHOLDER[] = "\"PLACEHOLDER://";

/* T5X's outermost map, {"version": N, "optimizer": …} (t5x/checkpoints.py, VERSION 3). */
static const char T5X_BEGIN[] = "\x82\xa7version", T5X_NEXT[] = "\xa9optimizer";
static const char T5X_TOP[] = "optimizer."; /* names of its directories lack that */
static const char T5X_KEY[] = "\"$type\":\"tensor\",\"key\":\"optimizer.";

bool orbax_has_aggregate(struct listing *l)
{
    const struct listing_entry *entry = listing_find(l, NAME);
    char head[HEAD];
    size_t got = 0;

    return entry && entry->st.kind == ENTRY_FILE &&
           listing_peek(l, NAME, head, sizeof head, &got) == 0 && flax_sniff(head, got);
}

struct aggregate {
    struct sink *sink;
    uint32_t file;
    bool t5x;
    const struct orbax_aggregate *how;
};

static int on_array(void *user, struct buf *key, const struct flax_array *a,
                    struct err *e)
{
    const struct aggregate *x = user;
    size_t top = sizeof T5X_TOP - 1;
    size_t cut =
        x->t5x && key->len > top && memcmp(key->data, T5X_TOP, top) == 0 ? top : 0;
    const struct sink_tensor t = {
        .key = key->data + cut,
        .key_len = key->len - cut,
        .part = x->how->part,
        .dtype = a->dtype,
        .shape = &a->shape,
        .role = x->how->role(x->how->part, key->data + cut, key->len - cut),
    };
    int rc;

    if (!a->fault && a->count == 1) {
        rc = sink_tensor_plain(x->sink, &t, x->file, a->piece[0].off, e);
    } else {
        rc = sink_tensor_begin(x->sink, &t, e);
        if (rc == 0)
            rc = sink_fault(x->sink, "%s",
                            a->fault ? a->fault
                                     : "it is split, which no leaf of this file is");
        if (rc == 0)
            rc = sink_tensor_end(x->sink, e);
    }
    if (rc != -EEXIST)
        return rc;
    *e = (struct err){0};
    return 0;
}

/* An array, which is listed: here or, by a placeholder, in the store. */
static bool is_array(const struct json *v)
{
    const char *text;

    if (json_kind(v) == JSON_OBJECT)
        return json_string(json_get(v, "$type"), &text) && strcmp(text, "tensor") == 0;
    return json_string(v, &text) &&
           strncmp(text, PLACEHOLDER + 1, strlen(PLACEHOLDER) - 1) == 0;
}

static bool is_empty(const struct json *v)
{
    enum json_kind kind = json_kind(v);

    return kind == JSON_NULL ||
           ((kind == JSON_OBJECT || kind == JSON_ARRAY) && json_count(v) == 0);
}

/*
 * Is any leaf of the value something else than an array? `told`: null and what is empty
 * count for none. Without recursion.
 */
static bool has_value(const struct json *doc, bool told)
{
    const struct json *stack[MAX_LEVELS] = {doc};
    unsigned depth = 1;

    while (depth > 0) {
        const struct json *v = stack[depth - 1];
        enum json_kind kind;

        if (!v) {
            depth--;
            continue;
        }
        stack[depth - 1] = v == doc ? NULL : json_next(v);
        kind = json_kind(v);
        if ((kind == JSON_OBJECT || kind == JSON_ARRAY) && json_count(v) > 0 &&
            !json_get(v, "$type")) {
            if (depth == MAX_LEVELS)
                return true;
            stack[depth++] = json_first(v);
        } else if (!is_array(v) && !(told && is_empty(v))) {
            return true;
        }
    }
    return false;
}

/* The arrays that placeholders name, which must be in the store. */
static int tell_elsewhere(const struct aggregate *x, const struct json *doc,
                          struct err *e)
{
    const struct json *stack[MAX_LEVELS] = {doc};
    size_t n = strlen(PLACEHOLDER) - 1;
    unsigned depth = 1;

    while (depth > 0) {
        const struct json *v = stack[depth - 1];
        const char *text;

        if (!v) {
            depth--;
            continue;
        }
        stack[depth - 1] = v == doc ? NULL : json_next(v);
        if (json_kind(v) == JSON_OBJECT || json_kind(v) == JSON_ARRAY) {
            if (depth == MAX_LEVELS)
                return err_set(e, EFBIG, "more than %d levels", MAX_LEVELS);
            stack[depth++] = json_first(v);
        } else if (json_string(v, &text) && strncmp(text, PLACEHOLDER + 1, n) == 0 &&
                   x->how->elsewhere(x->how->user, text + n, strlen(text + n), e) < 0) {
            return -e->code;
        }
    }
    return 0;
}

/* "PLACEHOLDER://NAME" becomes what objects.json says of a tensor. */
static void replace(const char *json, size_t len, struct buf *out)
{
    const char *end = json + len, *p = json, *found;
    size_t n = strlen(PLACEHOLDER);

    while ((found = memmem(p, (size_t)(end - p), PLACEHOLDER, n))) {
        const char *close = found + n;

        while (close < end && *close != '"')
            close += *close == '\\' ? 2 : 1;
        if (close >= end)
            break;
        buf_add(out, p, (size_t)(found - p));
        buf_adds(out, "{\"$type\":\"tensor\",\"key\":\"");
        buf_add(out, found + n, (size_t)(close - found) - n);
        buf_adds(out, "\"}");
        p = close + 1;
    }
    buf_add(out, p, (size_t)(end - p));
}

/* Tensors that T5X's "optimizer" names, by the keys that they are shown under. */
static void replace_t5x(const char *json, size_t len, struct buf *out)
{
    const char *end = json + len, *p = json, *found;
    size_t n = sizeof T5X_KEY - 1, kept = n - (sizeof T5X_TOP - 1);

    while ((found = memmem(p, (size_t)(end - p), T5X_KEY, n))) {
        buf_add(out, p, (size_t)(found - p) + kept);
        p = found + n;
    }
    buf_add(out, p, (size_t)(end - p));
}

static bool is_t5x(const char *head, size_t len)
{
    size_t begin = sizeof T5X_BEGIN - 1, next = sizeof T5X_NEXT - 1;

    return len >= begin + 1 + next && memcmp(head, T5X_BEGIN, begin) == 0 &&
           memcmp(head + begin + 1, T5X_NEXT, next) == 0;
}

static int on_object(void *user, const char *key, size_t len, const char *json,
                     size_t json_len, struct err *e)
{
    const struct aggregate *x = user;
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP(buf_release) struct buf name = {0}, value = {0};

    TRY(json_parse(json, json_len, NULL, &doc, e));
    TRY(tell_elsewhere(x, doc, e));
    if (!has_value(doc, x->how->leaves_told))
        return 0;
    if (x->how->part)
        buf_addf(&name, "%s/", x->how->part);
    buf_add(&name, key, len);
    if (x->t5x)
        replace_t5x(json, json_len, &value);
    else
        replace(json, json_len, &value);
    if (buf_failed(&name) || buf_failed(&value))
        return err_nomem(e);
    return sink_object(x->sink, name.data, name.len, value.data, value.len, e);
}

int orbax_aggregate_report(struct orbax_files *files, const struct orbax_aggregate *how,
                           struct err *e)
{
    struct aggregate x = {.sink = files->sink, .how = how};
    const struct flax_visitor v = {.array = on_array, .object = on_object, .user = &x};
    struct source *src;
    char head[HEAD];
    size_t len;

    TRY(orbax_files_add(files, NAME, strlen(NAME), &x.file, e));
    TRY(orbax_files_source(files, x.file, &src, e));
    src = source_get(src);
    len = MIN(src->size, sizeof head);
    if (source_read(src, 0, len, head, e) < 0) {
        source_put(src);
        return -e->code;
    }
    x.t5x = is_t5x(head, len);
    if (flax_walk(src, 0, src->size, &v, e) < 0)
        err_wrap(e, "%s", NAME);
    source_put(src);
    return -e->code;
}
