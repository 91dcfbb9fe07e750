/* SPDX-License-Identifier: MIT */
/* remote/store.c - what all kinds of stores share: closing, and names as paths. */
#include "remote/store.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

void store_close(struct store *s)
{
    if (!s)
        return;
    free(s->url);
    free(s->file);
    free(s->dir);
    free(s->identity);
    s->ops->close(s);
}

void store_closep(struct store **s)
{
    store_close(*s);
    *s = NULL;
}

void store_stop(struct store *s)
{
    if (s && s->ops->stop)
        s->ops->stop(s);
}

void store_follow(struct store *s)
{
    if (s->ops->follow)
        s->ops->follow(s);
}

uint64_t store_retries(struct store *s)
{
    return s->ops->retries ? s->ops->retries(s) : 0;
}

void store_forget(struct store *s, const char *path)
{
    if (s->ops->forget)
        s->ops->forget(s, path);
}

bool store_is_remote(const struct store *s)
{
    return s->remote;
}

int store_join(const char *dir, const char *name, char *dst, size_t size)
{
    const char *slash = dir[0] && name[0] ? "/" : "";
    size_t len = strlen(dir) + strlen(slash) + strlen(name);

    if (len >= size || len >= PATH_MAX)
        return -ENAMETOOLONG;
    snprintf(dst, size, "%s%s%s", dir, slash, name);
    return 0;
}

static bool part_is_safe(const char *part, size_t len)
{
    return len > 0 && !(len == 1 && part[0] == '.') &&
           !(len == 2 && part[0] == '.' && part[1] == '.');
}

bool store_name_is_safe(const char *name, size_t len)
{
    size_t start = 0;

    if (len >= PATH_MAX || memchr(name, '\0', len) || memchr(name, '\\', len))
        return false;
    for (size_t i = 0; i <= len; i++) {
        if (i < len && name[i] != '/')
            continue;
        if (!part_is_safe(name + start, i - start))
            return false;
        start = i + 1;
    }
    return true;
}
