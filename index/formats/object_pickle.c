/* SPDX-License-Identifier: MIT */
/* index/formats/object_pickle.c - walks a value of objects.json and writes its opcodes. */
#include "index/formats/object_pickle.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"

enum {
    MAX_DEPTH = 512, /* what json_parse() allows; our own values are below 200 */
    INT_BYTES = 255, /* of LONG1 */
};

/* What is open: its next child, and what is written when there is none. */
struct level {
    const struct json *next;
    enum closing {
        CLOSE_LIST,
        CLOSE_TUPLE,
        CLOSE_DICT,
        CLOSE_SET,
        CLOSE_PAIR,
        CLOSE_CALL,
        CLOSE_STATE,
    } closing;
    bool named;  /* members: each value has its key before it */
    bool alone;  /* `next` has no brothers that are children of this level */
    bool hashed; /* Python hashes `next`: a key, a set's item, or in a tuple that is */
};

struct walk {
    struct pickler *p;
    struct level level[MAX_DEPTH];
    unsigned depth;
    bool hashed;                         /* the value that is being put is */
    const struct object_pickle_how *how; /* NULL: plain values only */
    bool foreign;                        /* something was met that cannot be written */
};

static void open_level(struct walk *w, const struct json *of, enum closing closing,
                       bool named)
{
    if (w->depth == MAX_DEPTH) {
        w->foreign = true;
        return;
    }
    w->level[w->depth++] = (struct level){
        .next = json_first(of),
        .closing = closing,
        .named = named,
        .hashed = closing == CLOSE_PAIR || closing == CLOSE_SET ||
                  (closing == CLOSE_TUPLE && w->hashed),
    };
}

static void close_level(struct walk *w)
{
    switch (w->level[--w->depth].closing) {
    case CLOSE_LIST:
        pickle_append(w->p);
        break;
    case CLOSE_TUPLE:
        pickle_tuple(w->p);
        break;
    case CLOSE_DICT:
        pickle_set(w->p);
        break;
    case CLOSE_SET:
        pickle_append(w->p);
        pickle_tuple(w->p);
        pickle_reduce(w->p);
        break;
    case CLOSE_CALL:
        pickle_tuple(w->p);
        pickle_reduce(w->p);
        break;
    case CLOSE_STATE:
        pickle_build(w->p);
        break;
    case CLOSE_PAIR:
        break;
    }
}

/* ---- {"$type": ...} ---- */

/* Multiplies a little-endian number by ten and adds a digit; false: it grew too long. */
static bool shift_in(unsigned char *v, size_t size, unsigned digit)
{
    for (size_t i = 0; i < size; i++) {
        unsigned sum = v[i] * 10u + digit;

        v[i] = (unsigned char)sum;
        digit = sum >> 8;
    }
    return digit == 0;
}

/* Two's complement, little-endian, with the sign's bit. */
static bool put_large_int(struct pickler *p, const char *text)
{
    unsigned char v[INT_BYTES] = {0};
    bool negative = *text == '-';
    unsigned carry = 1;

    for (const char *s = text + negative; *s; s++)
        if (*s < '0' || *s > '9' || !shift_in(v, sizeof v, (unsigned)(*s - '0')))
            return false;
    if (v[sizeof v - 1] & 0x80)
        return false; /* no room for the sign */
    for (size_t i = 0; negative && i < sizeof v; i++) {
        unsigned sum = (unsigned char)~v[i] + carry;

        v[i] = (unsigned char)sum;
        carry = sum >> 8;
    }
    pickle_long(p, v, sizeof v);
    return text[negative] != '\0';
}

static bool put_int_text(struct pickler *p, const char *text)
{
    char *end;
    long long v;

    errno = 0;
    v = strtoll(text, &end, 10);
    if (errno == 0 && end != text && *end == '\0') {
        pickle_int(p, v);
        return true;
    }
    return errno == ERANGE && put_large_int(p, text);
}

static bool put_float_text(struct pickler *p, const char *text)
{
    if (strcmp(text, "nan") == 0)
        pickle_double(p, (double)NAN);
    else if (strcmp(text, "inf") == 0)
        pickle_double(p, HUGE_VAL);
    else if (strcmp(text, "-inf") == 0)
        pickle_double(p, -HUGE_VAL);
    else
        return false;
    return true;
}

static int base64_digit(char c)
{
    static const char digits[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *at = c ? strchr(digits, c) : NULL;

    return at ? (int)(at - digits) : -1;
}

bool object_base64(const char *text, struct buf *out)
{
    unsigned bits = 0, have = 0;

    for (; *text && *text != '='; text++) {
        int d = base64_digit(*text);

        if (d < 0)
            return false;
        bits = bits << 6 | (unsigned)d;
        have += 6;
        if (have >= 8) {
            have -= 8;
            buf_addc(out, (char)(bits >> have));
            bits &= (1u << have) - 1;
        }
    }
    return bits == 0;
}

static bool put_bytes_text(struct pickler *p, const char *text)
{
    CLEANUP(buf_release) struct buf bytes = {0};

    if (!object_base64(text, &bytes) || buf_failed(&bytes))
        return false;
    pickle_bytes(p, bytes.data, bytes.len);
    return true;
}

static bool put_set(struct walk *w, const struct json *v)
{
    bool frozen = false;

    json_bool(json_get(v, "frozen"), &frozen);
    pickle_global(w->p, "__builtin__", frozen ? "frozenset" : "set");
    pickle_mark(w->p);
    pickle_list(w->p);
    pickle_mark(w->p);
    open_level(w, json_get(v, "items"), CLOSE_SET, false);
    return true;
}

/* ---- classes ---- */

static void open_state(struct walk *w, const struct json *state)
{
    open_level(w, NULL, CLOSE_STATE, false);
    if (!w->foreign) {
        w->level[w->depth - 1].next = state;
        w->level[w->depth - 1].alone = true;
    }
}

/*
 * Instances that are a class and what is put on it. BytesIO's state is a tuple (bytes,
 * position, attributes).
 */
static bool put_instance(struct walk *w, const struct json *v, const char *class)
{
    static const struct {
        const char *class, *module, *name;
    } known[] = {
        {"argparse.Namespace", "argparse", "Namespace"},
        {"_io.BytesIO", "_io", "BytesIO"},
        {"types.SimpleNamespace", "types", "SimpleNamespace"},
    };
    const struct json *state = json_get(v, "state");

    for (size_t i = 0; i < ARRAY_SIZE(known); i++) {
        if (strcmp(class, known[i].class) != 0)
            continue;
        if (json_count(v) != (state ? 3u : 2u))
            return false;
        pickle_global(w->p, known[i].module, known[i].name);
        pickle_empty_tuple(w->p);
        pickle_new(w->p);
        if (state)
            open_state(w, state);
        return true;
    }
    return false;
}

/*
 * A dotted Python name, cut at its last dot; it is not ours, so it does not go to the memo.
 * `class`: its last part has to begin as classes do; functions do not get into a pickle of
 * ours.
 */
static bool put_name_of(struct pickler *p, const char *name, bool class)
{
    const char *dot = strrchr(name, '.');

    for (const char *c = name; *c; c++)
        if (!isalnum((unsigned char)*c) && *c != '_' && *c != '.')
            return false;
    if (!dot || dot == name || !dot[1] || (class && !isupper((unsigned char)dot[1])))
        return false;
    buf_addf(&p->out, "c%.*s\n%s\n", (int)(dot - name), name, dot + 1);
    return true;
}

/* Enums are called with their value; torch's element types are names in its module. */
static bool put_called(struct walk *w, const struct json *v, const char *class)
{
    const struct json *value = json_get(v, "value");
    const char *text;
    int64_t number;

    if (!value || json_count(v) != 3)
        return false;
    if (strcmp(class, "torch.dtype") == 0)
        return json_string(value, &text) && strncmp(text, "torch.", 6) == 0 &&
               put_name_of(w->p, text, false);
    if (strcmp(class, "torch.device") == 0)
        pickle_global(w->p, "torch", "device");
    else if ((strcmp(class, "signal.Signals") != 0 &&
              strncmp(class, "megatron.", 9) != 0) ||
             !put_name_of(w->p, class, true))
        return false;
    pickle_mark(w->p);
    if (json_string(value, &text))
        pickle_string(w->p, text);
    else if (json_i64(value, &number))
        pickle_int(w->p, number);
    else
        return false;
    pickle_tuple(w->p);
    pickle_reduce(w->p);
    return true;
}

/* pathlib: a class of the system's own kind, with the parts of the path. */
static bool put_path(struct walk *w, const struct json *v, const char *class)
{
    const struct json *args = json_get(v, "args");

    if (strcmp(class, "pathlib.PosixPath") != 0 || !args || json_count(v) != 3 ||
        json_kind(args) != JSON_ARRAY)
        return false;
    pickle_global(w->p, "pathlib", "PosixPath");
    pickle_mark(w->p);
    open_level(w, args, CLOSE_CALL, false);
    return true;
}

static bool put_class(struct walk *w, const struct json *v, const char *type)
{
    const char *text;

    if (strcmp(type, "tensor") == 0)
        return json_string(json_get(v, "key"), &text) &&
               w->how->tensor(w->how->user, text, w->p);
    if (strcmp(type, "ndarray") == 0)
        return object_pickle_array(w->p, v);
    return strcmp(type, "opaque") == 0 && json_string(json_get(v, "class"), &text) &&
           (put_instance(w, v, text) || put_called(w, v, text) || put_path(w, v, text));
}

static bool is_class(const char *type)
{
    return strcmp(type, "tensor") == 0 || strcmp(type, "ndarray") == 0 ||
           strcmp(type, "opaque") == 0;
}

static bool put_typed(struct walk *w, const struct json *v, const char *type)
{
    const struct json *items = json_get(v, "items");
    const char *text = NULL;

    if (is_class(type))
        return w->how && put_class(w, v, type);
    if (json_string(json_get(v, "value"), &text)) {
        if (strcmp(type, "int") == 0)
            return put_int_text(w->p, text);
        if (strcmp(type, "float") == 0)
            return put_float_text(w->p, text);
        return strcmp(type, "bytes") == 0 && put_bytes_text(w->p, text);
    }
    if (!items || json_kind(items) != JSON_ARRAY)
        return false;
    if (strcmp(type, "set") == 0)
        return put_set(w, v);
    if (strcmp(type, "tuple") == 0) {
        pickle_mark(w->p);
        open_level(w, items, CLOSE_TUPLE, false);
    } else if (strcmp(type, "dict") == 0) {
        pickle_dict(w->p);
        pickle_mark(w->p);
        for (const struct json *pair = json_first(items); pair; pair = json_next(pair))
            if (json_kind(pair) != JSON_ARRAY || json_count(pair) != 2)
                return false;
        open_level(w, items, CLOSE_DICT, false);
    } else {
        return false;
    }
    return true;
}

/*
 * Python has no hash of what can change: a pickle with such a key cannot be loaded. The
 * two classes compare by their attributes. A tuple's items are seen when they come.
 */
static bool has_hash(const struct json *v)
{
    const char *type, *class;
    bool frozen = false;

    if (json_kind(v) == JSON_ARRAY)
        return false;
    if (json_kind(v) != JSON_OBJECT)
        return true;
    if (!json_string(json_get(v, "$type"), &type) || strcmp(type, "dict") == 0 ||
        strcmp(type, "ndarray") == 0)
        return false;
    if (strcmp(type, "set") == 0)
        return json_bool(json_get(v, "frozen"), &frozen) && frozen;
    return !json_string(json_get(v, "class"), &class) ||
           (strcmp(class, "argparse.Namespace") != 0 &&
            strcmp(class, "types.SimpleNamespace") != 0);
}

/* ---- plain values ---- */

/* A number of 2^53 has lost whether it was an integer (object_value_int's limit). */
static bool put_number(struct pickler *p, const struct json *v)
{
    static const double ambiguous = 9007199254740992.0;
    int64_t i;
    double d;

    if (json_i64(v, &i))
        pickle_int(p, i);
    else if (json_double(v, &d) && fabs(d) != ambiguous)
        pickle_double(p, d);
    else
        return false;
    return true;
}

/* A pair of {"$type":"dict"} is an array that stands for two values. */
static bool is_pair(const struct walk *w)
{
    const struct level *l = w->depth ? &w->level[w->depth - 1] : NULL;

    return l && l->closing == CLOSE_DICT && !l->named;
}

static bool put_value(struct walk *w, const struct json *v)
{
    const char *text;
    bool b = false;

    switch (json_kind(v)) {
    case JSON_NULL:
        pickle_none(w->p);
        return true;
    case JSON_BOOL:
        json_bool(v, &b);
        pickle_bool(w->p, b);
        return true;
    case JSON_NUMBER:
        return put_number(w->p, v);
    case JSON_STRING:
        if (!json_string(v, &text))
            return false;
        pickle_string(w->p, text);
        return true;
    case JSON_ARRAY:
        if (is_pair(w)) {
            open_level(w, v, CLOSE_PAIR, false);
            return true;
        }
        pickle_list(w->p);
        pickle_mark(w->p);
        open_level(w, v, CLOSE_LIST, false);
        return true;
    case JSON_OBJECT:
        if (json_get(v, "$type"))
            return json_string(json_get(v, "$type"), &text) && put_typed(w, v, text);
        pickle_dict(w->p);
        pickle_mark(w->p);
        open_level(w, v, CLOSE_DICT, true);
        return true;
    }
    return false;
}

/* A key of the file's own that is dollars and "type" has one dollar more than there. */
static void put_name(struct pickler *p, const char *name)
{
    size_t dollars = strspn(name, "$");

    pickle_string(p, dollars && strcmp(name + dollars, "type") == 0 ? name + 1 : name);
}

static void walk_all(struct walk *w, const struct json *root)
{
    w->foreign = !put_value(w, root);
    while (w->depth > 0 && !w->foreign) {
        struct level *l = &w->level[w->depth - 1];
        const struct json *child = l->next;

        if (!child) {
            close_level(w);
            continue;
        }
        l->next = l->alone ? NULL : json_next(child);
        if (l->named)
            put_name(w->p, json_key(child));
        w->hashed = l->hashed;
        if (l->closing == CLOSE_PAIR)
            l->hashed = false; /* the value comes next */
        w->foreign |= (w->hashed && !has_hash(child)) || !put_value(w, child);
    }
}

int object_pickle_with(const char *json, size_t len,
                       const struct object_pickle_how *how, struct pickler *p,
                       struct err *e)
{
    static const struct json_limits limits = {.depth = MAX_DEPTH, .nul_ok = true};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct walk w = {.p = p, .how = how};

    if (json_parse(json, len, &limits, &doc, e) < 0)
        return e->code == EBADMSG ? 0 : -e->code;
    walk_all(&w, doc);
    if (buf_failed(&p->out))
        return err_nomem(e);
    return !w.foreign;
}

int object_pickle(const char *json, size_t len, struct pickler *p, struct err *e)
{
    return object_pickle_with(json, len, NULL, p, e);
}
