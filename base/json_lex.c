/* SPDX-License-Identifier: MIT */
/* base/json_lex.c - checks the text of a JSON value before cJSON sees it. */
#include "base/json_lex.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/utf8.h"

void json_lexer_release(struct json_lexer *l)
{
    for (size_t i = 0; i < ARRAY_SIZE(l->levels); i++)
        keyset_release(&l->levels[i].keys);
    buf_release(&l->marks);
    buf_release(&l->words);
    buf_release(&l->key);
}

int json_lex_fail(const struct json_lexer *l, size_t pos, const char *why,
                  struct err *e)
{
    size_t line = 1;
    char at[40] = "";

    for (size_t i = 0; i < MIN(pos, l->len); i++)
        line += l->text[i] == '\n';
    if (line > 1)
        snprintf(at, sizeof at, ", line %zu", line);
    return err_set(e, EBADMSG, "JSON byte %zu%s%s: %s", pos, at,
                   pos >= l->len ? " (the end)" : "", why);
}

static int fail(const struct json_lexer *l, const char *why, struct err *e)
{
    return json_lex_fail(l, l->pos, why, e);
}

/* The byte at pos, or -1 at the end. */
static int peek(const struct json_lexer *l)
{
    return l->pos < l->len ? (unsigned char)l->text[l->pos] : -1;
}

static bool accept(struct json_lexer *l, char c)
{
    if (peek(l) != c)
        return false;
    l->pos++;
    return true;
}

void json_lex_blanks(struct json_lexer *l)
{
    int c = peek(l);

    while (c == ' ' || c == '\n' || c == '\t' || c == '\r') {
        l->pos++;
        c = peek(l);
    }
}

int json_lex_end(struct json_lexer *l, struct err *e)
{
    json_lex_blanks(l);
    return l->pos < l->len ? fail(l, "text after the value", e) : 0;
}

static int hex_digit(int c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* The four digits at text[pos], or -1. */
static int hex4(const struct json_lexer *l, size_t pos)
{
    int v = 0;

    if (pos > l->len || l->len - pos < 4)
        return -1;
    for (size_t i = 0; i < 4; i++) {
        int digit = hex_digit((unsigned char)l->text[pos + i]);

        if (digit < 0)
            return -1;
        v = v * 16 + digit;
    }
    return v;
}

static void add_utf8(struct buf *b, unsigned c)
{
    char s[4];
    size_t n = 0;

    if (c < 0x80) {
        s[n++] = (char)c;
    } else {
        if (c < 0x800) {
            s[n++] = (char)(0xc0 | c >> 6);
        } else {
            if (c < 0x10000) {
                s[n++] = (char)(0xe0 | c >> 12);
            } else {
                s[n++] = (char)(0xf0 | c >> 18);
                s[n++] = (char)(0x80 | (c >> 12 & 0x3f));
            }
            s[n++] = (char)(0x80 | (c >> 6 & 0x3f));
        }
        s[n++] = (char)(0x80 | (c & 0x3f));
    }
    buf_add(b, s, n);
}

/* The escape \uXXXX at pos, with the second half of a pair where it needs one. */
static int lex_unicode(struct json_lexer *l, bool nul_ok, struct buf *out,
                       struct err *e)
{
    int c = hex4(l, l->pos + 2), low;
    size_t size = 6;

    if (c < 0)
        return fail(l, "\\u without four hex digits", e);
    if (c == 0 && !nul_ok)
        return fail(l, "a string that holds NUL", e);
    l->saw_nul = l->saw_nul || c == 0;
    if (c >= 0xdc00 && c <= 0xdfff)
        return fail(l, "lone surrogate", e);
    if (c >= 0xd800 && c <= 0xdbff) {
        low = -1;
        if (l->len - l->pos >= 12 && memcmp(l->text + l->pos + 6, "\\u", 2) == 0)
            low = hex4(l, l->pos + 8);
        if (low < 0xdc00 || low > 0xdfff)
            return fail(l, "lone surrogate", e);
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
        size = 12;
    }
    l->pos += size;
    if (out)
        add_utf8(out, (unsigned)c);
    return 0;
}

static int lex_escape(struct json_lexer *l, bool nul_ok, struct buf *out, struct err *e)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    char c = l->pos + 1 < l->len ? l->text[l->pos + 1] : '\0';
    const char *name;

    if (c == 'u')
        return lex_unicode(l, nul_ok, out, e);
    name = c ? strchr(names, c) : NULL;
    if (!name)
        return fail(l, "unknown escape", e);
    l->pos += 2;
    if (out)
        buf_addc(out, values[name - names]);
    return 0;
}

/* Steps over characters that stand for themselves. */
static void lex_plain(struct json_lexer *l)
{
    const unsigned char *p = (const unsigned char *)l->text;
    size_t n;

    while (l->pos < l->len) {
        unsigned char c = p[l->pos];

        if (c < 0x20 || c == '"' || c == '\\')
            return;
        n = c < 0x80 ? 1 : utf8_char(p + l->pos, l->len - l->pos);
        if (n == 0)
            return;
        l->pos += n;
    }
}

/* The string at pos; its characters are appended to out unless that is NULL. */
static int lex_string(struct json_lexer *l, bool nul_ok, struct buf *out, struct err *e)
{
    int rc = 0;

    l->pos++;
    l->saw_nul = false;
    while (rc == 0) {
        size_t start = l->pos;
        int c;

        lex_plain(l);
        if (out)
            buf_add(out, l->text + start, l->pos - start);
        c = peek(l);
        if (c == '\\')
            rc = lex_escape(l, nul_ok, out, e);
        else if (c != '"')
            return fail(l,
                        c < 0      ? "string without its end"
                        : c < 0x20 ? "control byte in a string"
                                   : "invalid UTF-8",
                        e);
        else
            break;
    }
    if (rc < 0)
        return rc;
    l->pos++;
    return out && buf_failed(out) ? err_nomem(e) : 0;
}

/* A string that is a value. */
static int lex_text(struct json_lexer *l, struct err *e)
{
    TRY(lex_string(l, l->nul_in_values, NULL, e));
    return buf_addc(&l->marks, l->saw_nul) < 0 ? err_nomem(e) : 0;
}

/* Steps over digits; false if there is none. */
static bool lex_digits(struct json_lexer *l)
{
    size_t start = l->pos;

    while (peek(l) >= '0' && peek(l) <= '9')
        l->pos++;
    return l->pos > start;
}

static int lex_number(struct json_lexer *l, struct err *e)
{
    size_t start = l->pos;
    bool integer = true;

    accept(l, '-');
    if (!accept(l, '0') && !lex_digits(l))
        return fail(l, "no digit where a number has one", e);
    if (accept(l, '.')) {
        integer = false;
        if (!lex_digits(l))
            return fail(l, "no digit where a number has one", e);
    }
    if (peek(l) == 'e' || peek(l) == 'E') {
        integer = false;
        l->pos++;
        if (!accept(l, '+'))
            accept(l, '-');
        if (!lex_digits(l))
            return fail(l, "no digit where a number has one", e);
    }
    if (l->pos - start > JSON_MAX_NUMBER)
        return json_lex_fail(l, start, "a number of more than 63 characters", e);
    return buf_addc(&l->marks, integer) < 0 ? err_nomem(e) : 0;
}

static int lex_word(struct json_lexer *l, const char *word, struct err *e)
{
    size_t len = strlen(word);

    if (l->len - l->pos < len || memcmp(l->text + l->pos, word, len) != 0)
        return fail(l, "no JSON value", e);
    l->pos += len;
    return 0;
}

size_t json_not_finite(const char *text, size_t len)
{
    static const char *const words[] = {"NaN", "Infinity", "-Infinity"};

    for (size_t i = 0; i < ARRAY_SIZE(words); i++)
        if (len >= strlen(words[i]) && memcmp(text, words[i], strlen(words[i])) == 0)
            return strlen(words[i]);
    return 0;
}

/* 1: one of Python's words for a number that is not finite stood here; 0: none. */
static int lex_not_finite(struct json_lexer *l, struct err *e)
{
    size_t n = l->python ? json_not_finite(l->text + l->pos, l->len - l->pos) : 0;

    if (n == 0)
        return 0;
    if (buf_add(&l->words, &l->pos, sizeof l->pos) < 0 ||
        buf_addc(&l->marks, MARK_NOT_FINITE) < 0)
        return err_nomem(e);
    l->pos += n;
    return 1;
}

/* The key at pos, which must be new in its object, and the colon. */
static int lex_key(struct json_lexer *l, struct err *e)
{
    bool nul_ok = l->nul_in_top_keys && l->depth == 1;
    size_t start = l->pos;
    int rc;

    if (peek(l) != '"')
        return fail(l, "a member's name is missing", e);
    buf_clear(&l->key);
    TRY(lex_string(l, nul_ok, &l->key, e));
    rc = keyset_add(&l->levels[l->depth - 1].keys, l->key.data, l->key.len);
    if (rc < 0)
        return err_nomem(e);
    if (rc == 0) {
        json_lex_fail(l, start, "twice in one object", e);
        return err_wrap(e, "member \"%.200s\"", l->key.data);
    }
    json_lex_blanks(l);
    if (!accept(l, ':'))
        return fail(l, "no colon after a member's name", e);
    return JSON_VALUE;
}

/* Enters the container whose bracket stands here. */
static int lex_enter(struct json_lexer *l, bool object, struct err *e)
{
    struct json_level *level;

    if (l->depth >= l->max_depth)
        return fail(l, "nested too deep", e);
    level = &l->levels[l->depth++];
    level->object = object;
    keyset_clear(&level->keys);
    l->pos++;
    json_lex_blanks(l);
    if (accept(l, object ? '}' : ']')) {
        l->depth--;
        return JSON_ENDED;
    }
    return object ? lex_key(l, e) : JSON_VALUE;
}

int json_lex_enter_object(struct json_lexer *l, struct err *e)
{
    json_lex_blanks(l);
    if (peek(l) != '{')
        return fail(l, "no object", e);
    return lex_enter(l, true, e);
}

int json_lex_next(struct json_lexer *l, struct err *e)
{
    bool object = l->levels[l->depth - 1].object;

    json_lex_blanks(l);
    if (accept(l, ',')) {
        json_lex_blanks(l);
        return object ? lex_key(l, e) : JSON_VALUE;
    }
    if (!accept(l, object ? '}' : ']'))
        return fail(l, object ? "no comma or } after a member" : "no comma or ]", e);
    l->depth--;
    return JSON_ENDED;
}

/* The start of a value: all of a scalar, or the way into a container. */
static int lex_begin(struct json_lexer *l, struct err *e)
{
    int rc;

    json_lex_blanks(l);
    if (++l->values > l->max_values)
        return fail(l, "too many values", e);
    switch (peek(l)) {
    case '{':
    case '[':
        return lex_enter(l, peek(l) == '{', e);
    case '"':
        return lex_text(l, e);
    case 't':
        return lex_word(l, "true", e);
    case 'f':
        return lex_word(l, "false", e);
    case 'n':
        return lex_word(l, "null", e);
    default:
        rc = lex_not_finite(l, e);
        if (rc != 0)
            return MIN(rc, JSON_ENDED);
        if (peek(l) != '-' && (peek(l) < '0' || peek(l) > '9'))
            return fail(l, "no JSON value", e);
        return lex_number(l, e);
    }
}

int json_lex_value(struct json_lexer *l, struct err *e)
{
    unsigned base = l->depth;
    int rc = lex_begin(l, e);

    while (rc >= 0 && (rc == JSON_VALUE || l->depth > base))
        rc = rc == JSON_VALUE ? lex_begin(l, e) : json_lex_next(l, e);
    return rc;
}
