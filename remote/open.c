/* SPDX-License-Identifier: MIT */
/* remote/open.c - which kind of store a source's name means. */
#include <errno.h>
#include <string.h>
#include <strings.h>

#include "base/err.h"
#include "remote/http.h"
#include "remote/hub.h"
#include "remote/s3.h"
#include "remote/web.h"
#include "remote/store.h"

typedef int open_fn(const char *name, const struct store_options *options,
                    struct store **out, struct err *e);

static const struct {
    const char *scheme;
    open_fn *open;
} kinds[] = {
    {"https", web_open}, {"http", web_open}, {"s3", s3_open},
    {"gs", s3_open},     {"hf", hub_open},
};

static size_t scheme_len(const char *name)
{
    const char *sep = strstr(name, "://");

    return sep && !memchr(name, '/', (size_t)(sep - name)) ? (size_t)(sep - name) : 0;
}

bool store_is_url(const char *name)
{
    return scheme_len(name) > 0;
}

char *store_name_shown(const char *name)
{
    CLEANUP(buf_release) struct buf shown = {0};

    if (!store_is_url(name))
        return strdup(name);
    http_url_shown(name, &shown);
    return buf_steal(&shown, NULL);
}

/* "s3:/bucket" is a path, though none that anybody has. */
static int hint_scheme(const char *name, struct err *e)
{
    for (size_t i = 0; e->code == ENOENT && i < ARRAY_SIZE(kinds); i++) {
        size_t len = strlen(kinds[i].scheme);

        if (strncasecmp(kinds[i].scheme, name, len) == 0 && name[len] == ':')
            return err_hint(e, "is %s:// meant?", kinds[i].scheme);
    }
    return -e->code;
}

int store_open(const char *name, const struct store_options *options,
               struct store **out, struct err *e)
{
    size_t len = scheme_len(name);

    if (len == 0)
        return store_open_local(name, options, out, e) < 0 ? hint_scheme(name, e) : 0;
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        if (strlen(kinds[i].scheme) == len &&
            strncasecmp(kinds[i].scheme, name, len) == 0)
            return kinds[i].open(name, options, out, e);
    err_set(e, ENOTSUP, "%.*s://: no such kind of source", (int)MIN(len, (size_t)32),
            name);
    return err_hint(e, "https://, s3://, gs://, hf:// or a local path is meant");
}
