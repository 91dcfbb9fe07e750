/* SPDX-License-Identifier: MIT */
/* remote/http_wire_text.c - headers and URLs, read as libcurl reads them. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "remote/http_wire_priv.h"

/* ---- headers ---- */

const char *wire_header(const struct buf *head, const char *name)
{
    const char *p = head->data, *end = p ? p + head->len : NULL;

    while (p < end) {
        const char *value = p + strlen(p) + 1;

        if (strcasecmp(p, name) == 0)
            return value;
        p = value + strlen(value) + 1;
    }
    return NULL;
}

int wire_header_line(struct buf *head, const char *line, size_t len)
{
    const char *end = line + len;
    size_t had = head->len, name, value;

    while (end > line && (end[-1] == '\r' || end[-1] == '\n' || end[-1] == ' '))
        end--;
    if (len > 5 && memcmp(line, "HTTP/", 5) == 0) {
        buf_clear(head);
        return 0;
    }
    for (name = 0; line + name < end && line[name] != ':'; name++)
        ;
    if (line + name >= end || memchr(line, '\0', (size_t)(end - line)))
        return 0; /* the empty line, or one that says nothing to us */
    for (value = name + 1; line + value < end && line[value] == ' '; value++)
        ;
    if (line + value >= end)
        return 0; /* an ETag of nothing would be the same for all that there is */
    buf_add(head, line, name);
    buf_addc(head, '\0');
    buf_add(head, line + value, (size_t)(end - line) - value);
    buf_addc(head, '\0');
    if (buf_failed(head))
        head->len = had; /* half a line would have readers look behind it */
    return buf_failed(head);
}

/* The line of the same name, or NULL. */
static struct curl_slist *same_name(struct curl_slist *line, const char *text)
{
    size_t len = strcspn(text, ":") + 1;

    while (line && strncasecmp(line->data, text, len) != 0)
        line = line->next;
    return line;
}

int wire_header_add(struct http_header_list **list, const char *line)
{
    struct curl_slist *same, *grown;

    if (line[strcspn(line, "\r\n")] || !strchr(line, ':'))
        return -EINVAL;
    if (!*list && !(*list = calloc(1, sizeof **list)))
        return -ENOMEM;
    same = same_name((*list)->line, line);
    if (same) {
        char *copy = strdup(line);

        if (!copy)
            return -ENOMEM;
        free(same->data);
        same->data = copy;
        return 0;
    }
    grown = curl_slist_append((*list)->line, line);
    if (!grown)
        return -ENOMEM;
    (*list)->line = grown;
    return 0;
}

void wire_header_free(struct http_header_list *list)
{
    if (!list)
        return;
    curl_slist_free_all(list->line);
    free(list);
}

/* ---- URLs ---- */

static char *part_of(CURLU *u, CURLUPart part, unsigned flags)
{
    char *text = NULL, *copy;

    if (curl_url_get(u, part, &text, flags) != CURLUE_OK)
        return NULL;
    copy = strdup(text);
    curl_free(text);
    return copy;
}

static bool has_part(CURLU *u, CURLUPart part)
{
    char *text = NULL;
    bool there = curl_url_get(u, part, &text, 0) == CURLUE_OK;

    curl_free(text);
    return there;
}

static void url_cleanup(CURLU **u)
{
    curl_url_cleanup(*u);
}

char *wire_origin(const char *url, bool *secure, bool *secrets)
{
    CLEANUP(url_cleanup) CURLU *u = curl_url();
    CLEANUP_FREE char *scheme = NULL;
    CLEANUP_FREE char *host = NULL;
    CLEANUP_FREE char *port = NULL;
    char *origin;

    if (!u || curl_url_set(u, CURLUPART_URL, url, 0) != CURLUE_OK)
        return NULL;
    scheme = part_of(u, CURLUPART_SCHEME, 0);
    host = part_of(u, CURLUPART_HOST, 0);
    port = part_of(u, CURLUPART_PORT, CURLU_DEFAULT_PORT);
    if (!scheme || !host || !port)
        return NULL;
    *secure = strcmp(scheme, "https") == 0;
    if (!*secure && strcmp(scheme, "http") != 0)
        return NULL;
    if (secrets)
        *secrets = has_part(u, CURLUPART_USER) || has_part(u, CURLUPART_PASSWORD);
    for (char *p = host; *p; p++)
        if (*p >= 'A' && *p <= 'Z')
            *p = (char)(*p + 'a' - 'A');
    return asprintf(&origin, "%s://%s:%s", scheme, host, port) < 0 ? NULL : origin;
}

char *wire_redirect(const char *url, const char *location)
{
    CLEANUP(url_cleanup) CURLU *u = curl_url();
    CLEANUP_FREE char *target = NULL;
    CLEANUP_FREE char *from = NULL;
    CLEANUP_FREE char *to = NULL;
    bool was_secure, secure, secrets;

    if (!u || curl_url_set(u, CURLUPART_URL, url, 0) != CURLUE_OK ||
        curl_url_set(u, CURLUPART_URL, location, 0) != CURLUE_OK ||
        curl_url_set(u, CURLUPART_FRAGMENT, NULL, 0) != CURLUE_OK)
        return NULL;
    target = part_of(u, CURLUPART_URL, 0);
    from = wire_origin(url, &was_secure, NULL);
    to = target ? wire_origin(target, &secure, &secrets) : NULL;
    if (!from || !to || secrets || (was_secure && !secure))
        return NULL;
    return steal(&target);
}
