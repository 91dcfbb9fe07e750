/* SPDX-License-Identifier: MIT */
/* remote/page.c - the links of a web server's listing page. */
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "remote/http.h"
#include "remote/web.h"

/* Does "href" and maybe blanks stand before this equals sign? */
static bool is_href(const char *html, const char *equals)
{
    while (equals > html && (equals[-1] == ' ' || equals[-1] == '\t'))
        equals--;
    return equals - html >= 4 && strncasecmp(equals - 4, "href", 4) == 0;
}

/* The value of an attribute: quoted by ' or ", or up to a blank. */
static const char *value_of(const char *p, const char *end, size_t *len)
{
    const char *close;

    while (p < end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r'))
        p++;
    if (p < end && (*p == '"' || *p == '\'')) {
        close = memchr(p + 1, *p, (size_t)(end - p - 1));
        *len = close ? (size_t)(close - p - 1) : 0;
        return p + 1;
    }
    for (close = p; close < end && !strchr(" \t\r\n>", *close); close++)
        ;
    *len = (size_t)(close - p);
    return p;
}

static void add_utf8(struct buf *out, unsigned long c)
{
    if (c < 0x80) {
        buf_addc(out, (char)c);
    } else if (c < 0x800) {
        buf_addc(out, (char)(0xc0 | c >> 6));
        buf_addc(out, (char)(0x80 | (c & 0x3f)));
    } else {
        if (c < 0x10000) {
            buf_addc(out, (char)(0xe0 | c >> 12));
        } else {
            buf_addc(out, (char)(0xf0 | c >> 18));
            buf_addc(out, (char)(0x80 | (c >> 12 & 0x3f)));
        }
        buf_addc(out, (char)(0x80 | (c >> 6 & 0x3f)));
        buf_addc(out, (char)(0x80 | (c & 0x3f)));
    }
}

/* "&#43;" or "&#x2b;" at the start of text: its length and the character; 0: it is none. */
static size_t number_reference(const char *text, size_t len, unsigned long *c)
{
    bool hex = len > 2 && (text[2] == 'x' || text[2] == 'X');
    size_t at = hex ? 3 : 2, start = at;

    *c = 0;
    if (len < 4 || text[1] != '#')
        return 0;
    for (; at < len && at < start + 7; at++) {
        const char *digits = "0123456789abcdef", *d;

        d = text[at] ? strchr(digits, text[at] | (text[at] >= 'A' ? 0x20 : 0)) : NULL;
        if (!d || (!hex && d - digits >= 10))
            break;
        *c = *c * (hex ? 16 : 10) + (unsigned long)(d - digits);
    }
    if (at == start || at == len || text[at] != ';' || *c == 0 || *c > 0x10ffff ||
        (*c >= 0xd800 && *c < 0xe000))
        return 0;
    return at + 1;
}

/* The same for one that has a name. */
static size_t named_reference(const char *text, size_t len, unsigned long *c)
{
    static const struct {
        const char *name;
        char c;
    } entity[] = {{"&amp;", '&'},
                  {"&quot;", '"'},
                  {"&apos;", '\''},
                  {"&lt;", '<'},
                  {"&gt;", '>'}};

    for (size_t k = 0; k < ARRAY_SIZE(entity); k++) {
        size_t n = strlen(entity[k].name);

        if (len >= n && strncasecmp(text, entity[k].name, n) == 0) {
            *c = (unsigned char)entity[k].c;
            return n;
        }
    }
    return 0;
}

/* Character references as pages put them into links (Go's templates write &#43; for a +). */
static int add_unescaped(struct buf *out, const char *text, size_t len)
{
    for (size_t i = 0, n; i < len; i += n) {
        unsigned long c;

        n = text[i] == '&' ? number_reference(text + i, len - i, &c) : 0;
        if (text[i] == '&' && n == 0)
            n = named_reference(text + i, len - i, &c);
        if (n > 0) {
            add_utf8(out, c);
        } else {
            buf_addc(out, text[i]);
            n = 1;
        }
    }
    return buf_failed(out);
}

/* The one name below `dir` that a decoded link leads to, or NULL; cuts its slash off. */
static char *name_below(char *link, const char *dir, bool *is_dir)
{
    size_t len = strlen(dir);

    if (strncmp(link, "./", 2) == 0)
        link += 2;
    else if (link[0] == '/' && strncmp(link, dir, len) == 0)
        link += len;
    len = strlen(link);
    *is_dir = len > 0 && link[len - 1] == '/';
    if (*is_dir)
        link[--len] = '\0';
    if (len == 0 || len > NAME_MAX || strchr(link, '/') || strcmp(link, ".") == 0 ||
        strcmp(link, "..") == 0)
        return NULL;
    return link;
}

/* Links to other sites, to orders of the same page (?C=M) and into pages are not files. */
static int take_link(const char *text, size_t len, const char *dir, page_link_fn *fn,
                     void *user)
{
    CLEANUP(buf_release) struct buf raw = {.max = 4 * PATH_MAX};
    CLEANUP(buf_release) struct buf link = {.max = 4 * PATH_MAX};
    const char *colon;
    char *name;
    bool is_dir;

    if (len == 0 || len >= 3 * PATH_MAX)
        return 0;
    if (add_unescaped(&raw, text, len) < 0)
        return -ENOMEM;
    if (memchr(raw.data, '\0', raw.len) || raw.data[0] == '?' || raw.data[0] == '#')
        return 0;
    raw.data[strcspn(raw.data, "?#")] = '\0';
    colon = strchr(raw.data, ':');
    if (colon && !memchr(raw.data, '/', (size_t)(colon - raw.data)))
        return 0; /* a scheme: names with a colon are written ./a:b */
    if (http_decode(raw.data, strlen(raw.data), &link) < 0 || !link.data)
        return link.failed == ENOMEM ? -ENOMEM : 0;
    name = name_below(link.data, dir, &is_dir);
    return name ? fn(user, name, is_dir) : 0;
}

int page_links(const char *html, size_t len, const char *dir, page_link_fn *fn,
               void *user)
{
    const char *end = html + len, *p = html;
    int rc = 0;

    while (rc == 0 && p < end && (p = memchr(p, '=', (size_t)(end - p)))) {
        const char *equals = p++;
        size_t n;

        if (!is_href(html, equals))
            continue;
        p = value_of(p, end, &n);
        rc = take_link(p, n, dir, fn, user);
        p += n;
    }
    return rc;
}
