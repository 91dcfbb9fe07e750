/* SPDX-License-Identifier: MIT */
/* index/formats/json_object.c - a JSON file of a checkpoint, as one value of objects.json. */
#include "index/formats/json_object.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/object_value.h"
#include "index/sink.h"
#include "remote/listing.h"

enum {
    MAX_FILE = 64 << 20, /* a log of a million steps */
    SHORT_DIGITS = 15,   /* always below 2^53 */
};

/* Text that is looked at from left to right. */
struct text {
    const char *at, *end;
};

static size_t left(const struct text *t)
{
    return (size_t)(t->end - t->at);
}

static bool take_word(struct text *t, const char *word)
{
    size_t n = strlen(word);

    if (left(t) < n || memcmp(t->at, word, n) != 0)
        return false;
    t->at += n;
    return true;
}

/* Behind the quote that ends the string which starts here, or the end. */
static const char *end_of_string(const struct text *t)
{
    const char *s = t->at + 1;

    while (s < t->end && *s != '"')
        s += *s == '\\' && s + 1 < t->end ? 2 : 1;
    return s < t->end ? s + 1 : t->end;
}

static bool is_name(const struct text *t, const char *end)
{
    while (end < t->end && strchr(" \t\r\n", *end) && *end)
        end++;
    return end < t->end && *end == ':';
}

/* A name may be spelt with escapes ("\\u0024type"): it counts as what it means. */
static bool add_escaped_name(const char *token, size_t len, struct buf *out)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err ignored = {0};
    const char *name;

    if (json_parse(token, len, NULL, &doc, &ignored) < 0 || !json_string(doc, &name))
        return false;
    object_value_name(out, name, strlen(name));
    return true;
}

static bool add_name(const char *token, size_t len, struct buf *out)
{
    if (memchr(token, '\\', len))
        return add_escaped_name(token, len, out);
    object_value_name(out, token + 1, len - 2);
    return true;
}

static void add_string(struct text *t, struct buf *out)
{
    const char *end = end_of_string(t);
    size_t len = (size_t)(end - t->at);
    bool closed = len >= 2 && end[-1] == '"';

    if (!closed || !is_name(t, end) || !add_name(t->at, len, out))
        buf_add(out, t->at, len);
    t->at = end;
}

static bool is_number(char c)
{
    return (c >= '0' && c <= '9') || c == '-' || c == '+' || c == '.' || c == 'e' ||
           c == 'E';
}

static bool is_digits(const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (s[i] < '0' || s[i] > '9')
            return false;
    return true;
}

/* 2^53 has 16 digits: of two texts of one length the larger number is the larger text. */
static bool is_beyond(const char *digits, size_t len)
{
    static const char most[] = "9007199254740992";
    size_t n = sizeof most - 1;

    if (len <= SHORT_DIGITS || digits[0] == '0' || !is_digits(digits, len))
        return false;
    return len > n || (len == n && memcmp(digits, most, n) > 0);
}

static void add_number(struct text *t, struct buf *out)
{
    const char *start = t->at;
    size_t len, sign = *start == '-';

    while (t->at < t->end && is_number(*t->at))
        t->at++;
    len = (size_t)(t->at - start);
    if (is_beyond(start + sign, len - sign))
        buf_addf(out, "{\"$type\":\"int\",\"value\":\"%.*s\"}", (int)len, start);
    else
        buf_add(out, start, len);
}

static void add_next(struct text *t, struct buf *out)
{
    if (*t->at == '"')
        add_string(t, out);
    else if (take_word(t, "NaN"))
        object_value_double(out, (double)NAN);
    else if (take_word(t, "Infinity"))
        object_value_double(out, (double)INFINITY);
    else if (take_word(t, "-Infinity"))
        object_value_double(out, -(double)INFINITY);
    else if (is_number(*t->at) && *t->at != 'e' && *t->at != 'E')
        add_number(t, out);
    else
        buf_addc(out, *t->at++);
}

int json_to_object(const char *text, size_t len, struct buf *out, struct err *e)
{
    struct text t = {text, text + len};

    while (t.at < t.end && !buf_failed(out))
        add_next(&t, out);
    if (buf_failed(out) == -EFBIG)
        return err_set(e, EFBIG, "more than %zu bytes", out->max);
    return buf_failed(out) ? err_nomem(e) : 0;
}

int object_unreadable(struct sink *sink, const char *key, size_t key_len,
                      const struct err *why, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {0};

    buf_adds(&json, "{\"$type\":\"opaque\",\"class\":\"unreadable\",\"error\":");
    buf_add_json(&json, why->text, strlen(why->text));
    buf_addc(&json, '}');
    if (buf_failed(&json) ||
        sink_warning(sink, "object", "%.*s: %s", (int)MIN(key_len, (size_t)256), key,
                     why->text) < 0)
        return err_nomem(e);
    return sink_object(sink, key, key_len, json.data, json.len, e);
}

int json_file_object(struct listing *l, const char *name, struct sink *sink,
                     struct json **doc, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {.max = MAX_FILE};
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len;

    *doc = NULL;
    TRY(sink_watch(sink, name, e));
    if (listing_read(l, name, MAX_FILE, &text, &len, &why) == 0 &&
        json_to_object(text, len, &json, &why) == 0 &&
        json_parse(json.data ? json.data : "", json.len, NULL, doc, &why) == 0)
        return sink_object(sink, name, strlen(name), json.data, json.len, e);
    if (why.code != ENOMEM && why.code != ESTALE)
        return object_unreadable(sink, name, strlen(name), &why, e);
    *e = why;
    return err_wrap(e, "%s", name);
}
