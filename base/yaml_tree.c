/* SPDX-License-Identifier: MIT */
/* base/yaml_tree.c - YAML of configuration files as a tree of JSON: libyaml underneath, with limits. */
#include "base/yaml_tree.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include <yaml.h>

#include "base/buf.h"
#include "base/err.h"

enum {
    MAX_BYTES =
        16 << 20,   /* speech models have their labels in there: 300 KiB were seen */
    MAX_DEPTH = 64, /* as of JSON; real ones have 10 */
    MAX_NODES = 1000000,
    MAX_NUMBER = 63, /* characters: what json_parse() takes */
};

/* A collection that is open. */
struct level {
    bool mapping;
    bool value; /* of a mapping: a key was there, its value comes next */
    bool any;   /* it has children */
};

struct reading {
    yaml_parser_t parser;
    struct buf json;
    struct level level[MAX_DEPTH];
    size_t depth, nodes;
    bool root, end; /* the root node is there; the stream has ended */
};

static int refuse(const yaml_event_t *event, const char *what, struct err *e)
{
    return err_set(e, EBADMSG, "YAML, line %zu: %s", event->start_mark.line + 1, what);
}

/* ---- scalars ---- */

static bool is_one_of(const char *text, size_t len, const char *const *words)
{
    for (; *words; words++)
        if (strlen(*words) == len && memcmp(text, *words, len) == 0)
            return true;
    return false;
}

static size_t digits(const char *text, size_t len)
{
    size_t n = 0;

    while (n < len && isdigit((unsigned char)text[n]))
        n++;
    return n;
}

/*
 * What is a number to JSON and to PyYAML: -12, 1.5, 1.0e-05. Without a point 1e-05 is a
 * string to PyYAML and a number to OmegaConf, whose files these are.
 */
static bool is_number(const char *text, size_t len)
{
    size_t at = len > 0 && text[0] == '-', n = digits(text + at, len - at);

    if (len > MAX_NUMBER || n == 0 || (n > 1 && text[at] == '0'))
        return false;
    at += n;
    if (at < len && text[at] == '.') {
        n = digits(text + at + 1, len - at - 1);
        if (n == 0)
            return false;
        at += 1 + n;
    }
    if (at < len && (text[at] == 'e' || text[at] == 'E')) {
        at++;
        at += at < len && (text[at] == '-' || text[at] == '+');
        n = digits(text + at, len - at);
        if (n == 0)
            return false;
        at += n;
    }
    return at == len;
}

static void add_plain(struct buf *out, const char *text, size_t len)
{
    static const char *const none[] = {"", "~", "null", "Null", "NULL", NULL};
    static const char *const yes[] = {"true", "True", "TRUE", "yes", "Yes",
                                      "YES",  "on",   "On",   "ON",  NULL};
    static const char *const no[] = {"false", "False", "FALSE", "no",  "No",
                                     "NO",    "off",   "Off",   "OFF", NULL};

    if (is_one_of(text, len, none))
        buf_adds(out, "null");
    else if (is_one_of(text, len, yes))
        buf_adds(out, "true");
    else if (is_one_of(text, len, no))
        buf_adds(out, "false");
    else if (is_number(text, len))
        buf_add(out, text, len);
    else
        buf_add_json(out, text, len);
}

static void add_scalar(struct reading *r, const yaml_event_t *event, bool key)
{
    const char *text = (const char *)event->data.scalar.value;
    size_t len = event->data.scalar.length;

    if (!key && event->data.scalar.plain_implicit)
        add_plain(&r->json, text, len);
    else
        buf_add_json(&r->json, text, len);
}

/* ---- nodes ---- */

/* Before a node: what JSON has between it and the one before. *key: it is a mapping's key. */
static int begin_node(struct reading *r, const yaml_event_t *event, bool *key,
                      struct err *e)
{
    struct level *top = r->depth > 0 ? &r->level[r->depth - 1] : NULL;

    if (++r->nodes > MAX_NODES)
        return refuse(event, "more than 1,000,000 nodes", e);
    r->root = true;
    *key = top && top->mapping && !top->value;
    if (!top)
        return 0;
    if (top->mapping && top->value)
        buf_adds(&r->json, ": ");
    else if (top->any)
        buf_adds(&r->json, ", ");
    top->any = true;
    top->value = *key;
    return 0;
}

static int open_level(struct reading *r, const yaml_event_t *event, bool mapping,
                      struct err *e)
{
    bool key;

    TRY(begin_node(r, event, &key, e));
    if (key)
        return refuse(event, "a key that is no scalar", e);
    if (r->depth == MAX_DEPTH)
        return refuse(event, "nested too deep", e);
    r->level[r->depth++] = (struct level){.mapping = mapping};
    buf_addc(&r->json, mapping ? '{' : '[');
    return 0;
}

static int take(struct reading *r, const yaml_event_t *event, struct err *e)
{
    bool key;

    switch (event->type) {
    case YAML_SCALAR_EVENT:
        if (begin_node(r, event, &key, e) == 0)
            add_scalar(r, event, key);
        return -e->code;
    case YAML_MAPPING_START_EVENT:
        return open_level(r, event, true, e);
    case YAML_SEQUENCE_START_EVENT:
        return open_level(r, event, false, e);
    case YAML_MAPPING_END_EVENT:
    case YAML_SEQUENCE_END_EVENT:
        buf_addc(&r->json, r->level[--r->depth].mapping ? '}' : ']');
        return 0;
    case YAML_ALIAS_EVENT:
        return refuse(event, "an alias, which is not followed", e);
    case YAML_DOCUMENT_START_EVENT:
        return r->root ? refuse(event, "a second document", e) : 0;
    case YAML_STREAM_END_EVENT:
        r->end = true;
        return 0;
    case YAML_NO_EVENT:
    case YAML_STREAM_START_EVENT:
    case YAML_DOCUMENT_END_EVENT:
        break;
    }
    return 0;
}

static int parse_failed(const yaml_parser_t *p, struct err *e)
{
    if (p->error == YAML_MEMORY_ERROR)
        return err_nomem(e);
    return err_set(e, EBADMSG, "YAML, line %zu: %s", p->problem_mark.line + 1,
                   p->problem ? p->problem : "not understood");
}

static int next_event(struct reading *r, struct err *e)
{
    yaml_event_t event;

    if (!yaml_parser_parse(&r->parser, &event))
        return parse_failed(&r->parser, e);
    take(r, &event, e);
    yaml_event_delete(&event);
    return -e->code;
}

static int read_json(struct reading *r, struct json **out, struct err *e)
{
    const struct json_limits limits = {.nul_ok = true, .depth = MAX_DEPTH + 1};

    while (!r->end)
        TRY(next_event(r, e));
    if (!r->root)
        buf_adds(&r->json, "null");
    if (buf_failed(&r->json))
        return err_nomem(e);
    return json_parse(r->json.data, r->json.len, &limits, out, e) < 0
               ? err_wrap(e, "YAML")
               : 0;
}

int yaml_parse(const char *text, size_t len, struct json **out, struct err *e)
{
    struct reading r = {.depth = 0};
    int rc;

    if (len > MAX_BYTES)
        return err_set(e, EBADMSG, "YAML of %zu bytes, more than the limit of %d", len,
                       MAX_BYTES);
    if (!yaml_parser_initialize(&r.parser))
        return err_nomem(e);
    yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, len);
    rc = read_json(&r, out, e);
    yaml_parser_delete(&r.parser);
    buf_release(&r.json);
    return rc;
}
