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

/* The entities that pages put into links; what is none stays. */
static int add_unescaped(struct buf *out, const char *text, size_t len)
{
    static const struct {
        const char *name;
        char c;
    } entity[] = {{"&amp;", '&'},  {"&#38;", '&'},   {"&quot;", '"'}, {"&#34;", '"'},
                  {"&#39;", '\''}, {"&#x27;", '\''}, {"&lt;", '<'},   {"&gt;", '>'}};

    for (size_t i = 0; i < len; i++) {
        size_t n = 0, k;

        for (k = 0; text[i] == '&' && k < ARRAY_SIZE(entity); k++) {
            n = strlen(entity[k].name);
            if (len - i >= n && strncasecmp(text + i, entity[k].name, n) == 0)
                break;
        }
        if (text[i] == '&' && k < ARRAY_SIZE(entity)) {
            buf_addc(out, entity[k].c);
            i += n - 1;
        } else {
            buf_addc(out, text[i]);
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
