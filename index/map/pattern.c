/* SPDX-License-Identifier: MIT */
/* index/map/pattern.c - matches keys part by part. */
#include "index/map/pattern.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "base/err.h"

/* One piece of a pattern: a name in braces, or literal bytes up to the next one. */
struct piece {
    const char *text;
    size_t len;
    bool name, rest;
};

/* The piece at *at, which moves behind it; false at the end or at a brace left open. */
static bool next_piece(const char **at, struct piece *out)
{
    const char *p = *at, *end;

    if (!*p)
        return false;
    if (*p != '{') {
        end = p + strcspn(p, "{");
        *out = (struct piece){.text = p, .len = (size_t)(end - p)};
        *at = end;
        return true;
    }
    end = strchr(p, '}');
    if (!end)
        return false;
    *out = (struct piece){.text = p + 1, .len = (size_t)(end - p - 1), .name = true};
    if (out->len > 3 && memcmp(end - 3, "...", 3) == 0) {
        out->rest = true;
        out->len -= 3;
    }
    *at = end + 1;
    return true;
}

static bool is_name(const struct piece *p)
{
    for (size_t i = 0; i < p->len; i++)
        if (!isalnum((unsigned char)p->text[i]) && p->text[i] != '_')
            return false;
    return p->len > 0 && !isdigit((unsigned char)p->text[0]);
}

bool pattern_is_name(const char *name)
{
    return is_name(&(struct piece){.text = name, .len = strlen(name)});
}

bool pattern_next_name(const char **at, const char **name, size_t *len)
{
    struct piece p;

    while (next_piece(at, &p)) {
        *name = p.text;
        *len = p.len;
        if (p.name)
            return true;
    }
    return false;
}

int template_check(const char *text, struct err *e)
{
    const char *at = text;
    struct piece p;

    while (next_piece(&at, &p))
        if (p.name && !is_name(&p))
            return err_set(e, EINVAL, "\"%s\": {%.*s} is no name", text, (int)p.len,
                           p.text);
    if (*at || !*text)
        return err_set(e, EINVAL, "\"%s\": %s", text,
                       *at ? "a { without its }" : "an empty name");
    return 0;
}

int pattern_check(const char *pattern, struct err *e)
{
    const char *at = pattern;
    unsigned names = 0;
    bool after_name = false;
    struct piece p;

    while (next_piece(&at, &p)) {
        if (p.name && !is_name(&p))
            return err_set(e, EINVAL, "\"%s\": {%.*s} is no name", pattern, (int)p.len,
                           p.text);
        if (p.name && after_name)
            return err_set(e, EINVAL, "\"%s\": nothing between two names", pattern);
        if (p.rest && *at)
            return err_set(e, EINVAL, "\"%s\": {%.*s...} must stand last", pattern,
                           (int)p.len, p.text);
        names += p.name;
        after_name = p.name;
    }
    if (*at)
        return err_set(e, EINVAL, "\"%s\": a { without its }", pattern);
    if (!*pattern || names > CAPTURES_MAX)
        return err_set(e, EINVAL, "\"%s\": empty, or more than %d names", pattern,
                       CAPTURES_MAX);
    return 0;
}

const struct capture *capture_find(const struct captures *c, const char *name,
                                   size_t len)
{
    for (unsigned i = 0; i < c->count; i++)
        if (c->at[i].name_len == len && memcmp(c->at[i].name, name, len) == 0)
            return &c->at[i];
    return NULL;
}

/* A name binds what it first meets; where it stands again, the same must be there. */
static bool bind_text(struct captures *c, const struct piece *p, const char *text,
                      size_t len)
{
    const struct capture *known = capture_find(c, p->text, p->len);

    if (known)
        return known->len == len && memcmp(known->text, text, len) == 0;
    if (c->count == CAPTURES_MAX)
        return false;
    c->at[c->count++] =
        (struct capture){.name = p->text, .name_len = p->len, .text = text, .len = len};
    return true;
}

/*
 * A name takes all up to the next dot, or to the literal byte behind it: parts such as
 * "layer_{n}-model" have no dot.
 */
static size_t name_length(const char *pattern, const char *key, size_t len)
{
    char stop = *pattern ? *pattern : '.';
    size_t n = 0;

    while (n < len && key[n] != '.' && key[n] != stop)
        n++;
    return n;
}

bool pattern_match(const char *pattern, const char *key, size_t len,
                   struct captures *out)
{
    struct piece p;

    out->count = 0;
    while (next_piece(&pattern, &p)) {
        size_t n = !p.name ? p.len : p.rest ? len : name_length(pattern, key, len);

        if (n > len || (p.name && n == 0) || (!p.name && memcmp(key, p.text, n) != 0) ||
            (p.name && !bind_text(out, &p, key, n)))
            return false;
        key += n;
        len -= n;
    }
    return len == 0;
}

bool pattern_has(const char *pattern, const char *name, size_t len)
{
    struct piece p;

    while (next_piece(&pattern, &p))
        if (p.name && p.len == len && memcmp(p.text, name, len) == 0)
            return true;
    return false;
}

bool capture_number(const struct capture *c, uint64_t *out)
{
    *out = c->number;
    if (!c->text)
        return true;
    *out = 0;
    for (size_t i = 0; i < c->len; i++)
        if (!isdigit((unsigned char)c->text[i]) ||
            __builtin_mul_overflow(*out, 10, out) ||
            __builtin_add_overflow(*out, (uint64_t)(c->text[i] - '0'), out))
            return false;
    return c->len > 0 && (c->len == 1 || c->text[0] != '0');
}

int capture_bind(struct captures *c, const char *name, uint64_t number, struct err *e)
{
    if (c->count == CAPTURES_MAX)
        return err_set(e, EINVAL, "more than %d names", CAPTURES_MAX);
    c->at[c->count++] =
        (struct capture){.name = name, .name_len = strlen(name), .number = number};
    return 0;
}

int template_write(const char *text, const struct captures *c, struct buf *out,
                   struct err *e)
{
    const char *at = text;
    struct piece p;

    while (next_piece(&at, &p)) {
        const struct capture *bound = p.name ? capture_find(c, p.text, p.len) : NULL;

        if (!p.name)
            buf_add(out, p.text, p.len);
        else if (!bound)
            return err_set(e, EINVAL, "\"%s\": nothing gives {%.*s}", text, (int)p.len,
                           p.text);
        else if (bound->text)
            buf_add(out, bound->text, bound->len);
        else
            buf_addf(out, "%" PRIu64, bound->number);
    }
    return buf_failed(out) ? err_nomem(e) : 0;
}
