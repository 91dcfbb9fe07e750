/* SPDX-License-Identifier: MIT */
/* index/formats/flax/flax_elsewhere.c - arrays of several processes, which flax keeps beside its file. */
#include "index/formats/flax/flax_elsewhere.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

enum { MAX_LEVELS = 128 }; /* of JSON; flax_walk() goes down 100 */

/* MP_ARRAY_PH of flax/training/checkpoints.py, behind the quote of JSON. */
static const char PLACE[] = "\"//GDAPlaceholder:";

bool flax_has_elsewhere(const char *json, size_t len)
{
    return memmem(json, len, PLACE, sizeof PLACE - 1);
}

struct level {
    const struct json *v; /* the next value; NULL: none is left */
    size_t path;          /* bytes of the path to what holds it */
    size_t index;
    bool list;
};

struct walk {
    struct level level[MAX_LEVELS];
    unsigned depth;
    struct buf path;
    const char *text, *end; /* what is not copied yet */
    struct buf *out;
    bool other; /* a value that is no array */
    flax_elsewhere_fn *fn;
    void *user;
};

/* Behind the string that begins at this quote. */
static const char *behind_string(const char *at, const char *end)
{
    for (at++; at < end && *at != '"'; at++)
        at += *at == '\\' && at + 1 < end;
    return at < end ? at + 1 : end;
}

/*
 * The next text of the kind from `at` on, where no string has begun: its quote; NULL: there
 * is none. A name of a member is passed over.
 */
static const char *find_text(const char *at, const char *end, const char **behind)
{
    while ((at = memchr(at, '"', (size_t)(end - at)))) {
        bool fits = (size_t)(end - at) >= sizeof PLACE - 1 &&
                    memcmp(at, PLACE, sizeof PLACE - 1) == 0;

        *behind = behind_string(at, end);
        if (fits && (*behind == end || **behind != ':'))
            return at;
        at = *behind;
    }
    return NULL;
}

/* The place in the text stands in the order of the walk. */
static int take_place(struct walk *w, const char *path, struct err *e)
{
    const char *behind, *found = find_text(w->text, w->end, &behind);

    if (!found)
        return err_set(e, EBADMSG, "a place of an array that is not in the text");
    TRY(w->fn(w->user, &w->path, path, e));
    buf_add(w->out, w->text, (size_t)(found - w->text));
    buf_adds(w->out, "{\"$type\":\"tensor\",\"key\":");
    buf_add_json(w->out, w->path.data, w->path.len);
    buf_addc(w->out, '}');
    w->text = behind;
    return 0;
}

static int enter(struct walk *w, const struct json *v, struct err *e)
{
    if (w->depth == MAX_LEVELS)
        return err_set(e, EFBIG, "more than %d levels", MAX_LEVELS);
    w->level[w->depth++] = (struct level){
        .v = json_first(v), .path = w->path.len, .list = json_kind(v) == JSON_ARRAY};
    return 0;
}

static int take_value(struct walk *w, const struct json *v, struct err *e)
{
    enum json_kind kind = json_kind(v);
    const char *text;

    if (json_string(v, &text) && strncmp(text, PLACE + 1, sizeof PLACE - 2) == 0)
        return take_place(w, text + sizeof PLACE - 2, e);
    if ((kind == JSON_OBJECT || kind == JSON_ARRAY) && !json_get(v, "$type"))
        return enter(w, v, e);
    w->other |=
        !json_string(json_get(v, "$type"), &text) || strcmp(text, "tensor") != 0;
    return 0;
}

/* The next value of the innermost level, its path in w->path. */
static int step(struct walk *w, struct err *e)
{
    struct level *at = &w->level[w->depth - 1];
    const struct json *v = at->v;

    if (!v) {
        w->depth--;
        return 0;
    }
    at->v = json_next(v);
    w->path.len = at->path;
    if (at->list)
        buf_addf(&w->path, ".%zu", at->index++);
    else
        buf_addf(&w->path, ".%s", json_key(v));
    if (buf_failed(&w->path))
        return err_nomem(e);
    return take_value(w, v, e);
}

int flax_elsewhere(const char *name, size_t name_len, const char *json, size_t len,
                   flax_elsewhere_fn *fn, void *user, struct buf *out, struct err *e)
{
    static const struct json_limits limits = {.depth = MAX_LEVELS, .nul_ok = true};
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE struct walk *w = calloc(1, sizeof *w);
    int rc;

    if (!w)
        return err_nomem(e);
    w->text = json;
    w->end = json + len;
    w->out = out;
    w->fn = fn;
    w->user = user;
    buf_add(&w->path, name, name_len);
    rc = buf_failed(&w->path) ? err_nomem(e) : json_parse(json, len, &limits, &doc, e);
    if (rc == 0)
        rc = take_value(w, doc, e);
    while (rc == 0 && w->depth > 0)
        rc = step(w, e);
    buf_release(&w->path);
    if (rc < 0)
        return rc;
    if (!w->other) {
        buf_clear(out);
        return 0;
    }
    buf_add(out, w->text, (size_t)(w->end - w->text));
    return buf_failed(out) ? err_nomem(e) : 0;
}
