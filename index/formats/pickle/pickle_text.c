/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle_text.c - numbers and strings of the text opcodes, and long integers. */
#include "index/formats/pickle/pickle_priv.h"

#include <errno.h>
#include <locale.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/utf8.h"

static int big_integer(struct pickle *p, const char *text, size_t len, struct pv *out,
                       struct err *e)
{
    struct pn_bytes *n;

    TRY(pnode_bytes(p, PV_BIGINT, len, &n, e));
    memcpy(n->data, text, len);
    *out = pv_of_node(&n->node);
    return 0;
}

/*
 * Decimal only: that is what every pickler writes. Python's readers differ about leading
 * zeros (octal or an error), so those are refused.
 */
int ptext_int(struct pickle *p, const char *s, size_t len, struct pv *out,
              struct err *e)
{
    bool negative = len > 0 && s[0] == '-', big = false;
    const char *digits = s + negative;
    size_t n = len - negative;
    int64_t value = 0;

    if (n == 0 || (n > 1 && digits[0] == '0'))
        return err_set(e, EBADMSG, "an integer that is no plain decimal number");
    if (n > PTEXT_MAX_DIGITS)
        return err_set(e, EBADMSG, "an integer of %zu digits", n);
    for (size_t i = 0; i < n; i++) {
        if (digits[i] < '0' || digits[i] > '9')
            return err_set(e, EBADMSG, "an integer that is no plain decimal number");
        big = big || __builtin_mul_overflow(value, 10, &value) ||
              __builtin_add_overflow(
                  value, negative ? -(digits[i] - '0') : digits[i] - '0', &value);
    }
    if (big)
        return big_integer(p, s, len, out, e);
    *out = (struct pv){.kind = PV_INT, .i = value};
    return 0;
}

int ptext_memo_id(const char *s, size_t len, uint64_t *out, struct err *e)
{
    uint64_t value = 0;

    for (size_t i = 0; i < len; i++) {
        if (s[i] < '0' || s[i] > '9' || value > UINT32_MAX)
            return err_set(e, EBADMSG, "a memo entry that is no number of 32 bits");
        value = value * 10 + (uint64_t)(s[i] - '0');
    }
    if (len == 0 || value > UINT32_MAX)
        return err_set(e, EBADMSG, "a memo entry that is no number of 32 bits");
    *out = value;
    return 0;
}

/* Sign, digits with a point, exponent; or the names that Python's repr() gives. */
static bool is_float(const char *s)
{
    s += *s == '-' || *s == '+';
    if (strcmp(s, "inf") == 0 || strcmp(s, "nan") == 0)
        return true;
    /* strtod takes more (hexadecimal, "infinity", blanks), so the letters decide. */
    return *s != '\0' && strspn(s, "0123456789.eE+-") == strlen(s);
}

int ptext_float(const char *s, size_t len, double *out, struct err *e)
{
    char text[512]; /* longer than what repr() or '%.17g' can give */
    locale_t c;
    char *end;

    if (len >= sizeof text || memchr(s, '\0', len))
        return err_set(e, EBADMSG, "a float of %zu characters", len);
    memcpy(text, s, len);
    text[len] = '\0';
    if (!is_float(text))
        return err_set(e, EBADMSG, "a float that is no number");
    c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c)
        return err_nomem(e);
    *out = strtod_l(text, &end, c);
    freelocale(c);
    return *end ? err_set(e, EBADMSG, "a float that is no number") : 0;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Reads exactly n hexadecimal digits; false when they are not there. */
static bool hex_number(const char *s, size_t len, size_t n, uint32_t *out)
{
    uint32_t value = 0;

    if (len < n)
        return false;
    for (size_t i = 0; i < n; i++) {
        int digit = hex_digit(s[i]);

        if (digit < 0)
            return false;
        value = value << 4 | (uint32_t)digit;
    }
    *out = value;
    return true;
}

/* One escape of a Python 2 string, s behind its backslash. Returns what it took, 0: bad. */
static size_t unescape(const char *s, size_t len, char *dst, size_t *n)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char *known = len > 0 && s[0] ? strchr(from, s[0]) : NULL;
    uint32_t value = 0;
    size_t i = 0;

    if (len == 0)
        return 0;
    if (known) {
        dst[(*n)++] = to[known - from];
        return 1;
    }
    if (s[0] == 'x') {
        if (!hex_number(s + 1, len - 1, 2, &value))
            return 0;
        dst[(*n)++] = (char)value;
        return 3;
    }
    for (; i < 3 && i < len && s[i] >= '0' && s[i] <= '7'; i++)
        value = value * 8 + (uint32_t)(s[i] - '0');
    if (i > 0) {
        dst[(*n)++] = (char)value;
        return i;
    }
    dst[(*n)++] = '\\'; /* Python keeps an escape that it does not know */
    dst[(*n)++] = s[0];
    return 1;
}

int ptext_string(struct buf *line, struct err *e)
{
    char *s = line->data;
    size_t len = line->len, n = 0, took;

    if (len < 2 || s[0] != s[len - 1] || (s[0] != '\'' && s[0] != '"'))
        return err_set(e, EBADMSG, "a string argument that is not quoted");
    for (size_t i = 1; i < len - 1; i++) {
        if (s[i] != '\\') {
            s[n++] = s[i];
            continue;
        }
        /* In place: an escape never gives more bytes than it has. */
        took = unescape(s + i + 1, len - 2 - i, s, &n);
        if (took == 0)
            return err_set(e, EBADMSG, "a string argument with a bad escape");
        i += took;
    }
    line->len = n;
    return 0;
}

/* UTF-8, also of surrogates, as Python's surrogatepass writes them. */
static int add_character(struct buf *out, uint32_t c)
{
    unsigned char u[4];
    size_t n;

    if (c < 0x80) {
        u[0] = (unsigned char)c;
        n = 1;
    } else if (c < 0x800) {
        u[0] = (unsigned char)(0xc0 | c >> 6);
        n = 2;
    } else if (c < 0x10000) {
        u[0] = (unsigned char)(0xe0 | c >> 12);
        n = 3;
    } else {
        u[0] = (unsigned char)(0xf0 | c >> 18);
        n = 4;
    }
    for (size_t i = 1; i < n; i++)
        u[i] = (unsigned char)(0x80 | (c >> 6 * (n - 1 - i) & 0x3f));
    return buf_add(out, u, n);
}

/* "raw-unicode-escape": Latin-1 bytes, \uXXXX and \UXXXXXXXX. */
int ptext_unicode(const struct buf *line, struct buf *out, struct err *e)
{
    const char *s = line->data;
    size_t len = line->len;

    for (size_t i = 0; i < len; i++) {
        uint32_t c = (unsigned char)s[i];

        if (c == '\\' && i + 1 < len && (s[i + 1] == 'u' || s[i + 1] == 'U')) {
            size_t digits = s[i + 1] == 'u' ? 4 : 8;

            if (!hex_number(s + i + 2, len - i - 2, digits, &c) || c > 0x10ffff)
                return err_set(e, EBADMSG, "a unicode argument with a bad escape");
            i += 1 + digits;
        } else if (c == '\\' && i + 1 < len) {
            if (add_character(out, c) < 0) /* a pair of backslashes stays one pair */
                return err_nomem(e);
            c = (unsigned char)s[++i];
        }
        if (add_character(out, c) < 0)
            return err_nomem(e);
    }
    return 0;
}

bool ptext_is_utf8(const char *s, size_t len, bool surrogates)
{
    for (size_t i = 0; i < len;) {
        size_t n = (unsigned char)s[i] < 0x80 ? 1 : utf8_char(s + i, len - i);

        if (n == 0 && surrogates && len - i >= 3 && (unsigned char)s[i] == 0xed &&
            ((unsigned char)s[i + 1] & 0xe0) == 0xa0 &&
            ((unsigned char)s[i + 2] & 0xc0) == 0x80)
            n = 3;
        if (n == 0)
            return false;
        i += n;
    }
    return true;
}

enum { LONG_WORDS = 448, CHUNK_DIGITS = 9, CHUNK_BASE = 1000000000 };

/* Divides the number (little-endian words) by 10^9 in place; returns the remainder. */
static uint32_t divide(uint32_t *word, size_t *n)
{
    uint64_t rest = 0;

    for (size_t i = *n; i-- > 0;) {
        rest = rest << 32 | word[i];
        word[i] = (uint32_t)(rest / CHUNK_BASE);
        rest %= CHUNK_BASE;
    }
    while (*n > 0 && word[*n - 1] == 0)
        (*n)--;
    return (uint32_t)rest;
}

/* The magnitude of a two's complement number as 32-bit words. */
static size_t magnitude(const unsigned char *le, size_t n, bool negative,
                        uint32_t *word)
{
    size_t words = (n + 3) / 4;
    unsigned carry = negative;

    memset(word, 0, words * sizeof *word);
    for (size_t i = 0; i < n; i++) {
        unsigned byte = (negative ? le[i] ^ 0xffU : le[i]) + carry;

        carry = byte >> 8;
        word[i / 4] |= (byte & 0xff) << 8 * (i % 4);
    }
    while (words > 0 && word[words - 1] == 0)
        words--;
    return words;
}

static int long_text(struct pickle *p, const unsigned char *le, size_t n, bool negative,
                     struct pv *out, struct err *e)
{
    char text[1 + LONG_WORDS * 10 + CHUNK_DIGITS];
    uint32_t word[LONG_WORDS + 1];
    size_t words = magnitude(le, n, negative, word), at = sizeof text;

    while (words > 0) {
        uint32_t chunk = divide(word, &words);

        for (unsigned i = 0; i < CHUNK_DIGITS && (words > 0 || chunk > 0); i++) {
            text[--at] = (char)('0' + chunk % 10);
            chunk /= 10;
        }
    }
    if (sizeof text - at > PTEXT_MAX_DIGITS)
        return err_set(e, EBADMSG, "an integer of over %d digits", PTEXT_MAX_DIGITS);
    if (negative)
        text[--at] = '-';
    return big_integer(p, text + at, sizeof text - at, out, e);
}

int ptext_long(struct pickle *p, const unsigned char *le, size_t n, struct pv *out,
               struct err *e)
{
    bool negative = n > 0 && le[n - 1] & 0x80;
    unsigned char sign = negative ? 0xff : 0;
    uint64_t value = 0;

    while (n > 1 && le[n - 1] == sign && (le[n - 2] & 0x80) == (sign & 0x80))
        n--; /* bytes that only repeat the sign */
    if (n > LONG_WORDS * sizeof(uint32_t))
        return err_set(e, EBADMSG, "an integer of %zu bytes", n);
    if (n > sizeof value)
        return long_text(p, le, n, negative, out, e);
    for (size_t i = 0; i < sizeof value; i++)
        value |= (uint64_t)(i < n ? le[i] : sign) << 8 * i;
    *out = (struct pv){.kind = PV_INT, .i = (int64_t)value};
    return 0;
}
