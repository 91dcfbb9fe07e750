/* SPDX-License-Identifier: MIT */
/* remote/resolve.c - where a path with links in it leads below a directory. */
#include "remote/resolve.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/fsutil.h"
#include "remote/store.h"

enum { MAX_LINKS = 40 }; /* as the kernel's own limit */

struct resolver {
    const struct anchor *anchor;
    char done[PATH_MAX]; /* free of links */
    char rest[PATH_MAX]; /* still to go */
    unsigned links;
};

/* Drops the last part of `done`; there must be one. */
static int go_up(struct resolver *r)
{
    char *slash = strrchr(r->done, '/');

    if (r->done[0] == '\0')
        return -EXDEV;
    *(slash ? slash : r->done) = '\0';
    return 0;
}

/* What stands behind the directory `dir` in the absolute path `text`, or NULL. */
static const char *behind(const char *dir, const char *text)
{
    size_t len = dir ? strlen(dir) : 0;

    if (len == 1) /* "/" itself */
        return text + 1;
    if (len == 0 || strncmp(text, dir, len) != 0)
        return NULL;
    return text[len] == '/' || text[len] == '\0' ? text + len : NULL;
}

const char *anchor_tail(const struct anchor *a, const char *text)
{
    const char *tail = behind(a->path, text);

    return tail ? tail : behind(a->alias, text);
}

/* Puts a link's text in front of what is still to go. */
static int follow(struct resolver *r, const char *text)
{
    char rest[PATH_MAX];

    if (++r->links > MAX_LINKS)
        return -ELOOP;
    if (text[0] == '/') {
        const char *tail = anchor_tail(r->anchor, text);

        if (!tail)
            return -EXDEV;
        r->done[0] = '\0';
        text = tail;
    }
    if (store_join(text, r->rest, rest, sizeof rest) < 0)
        return -ENAMETOOLONG;
    memcpy(r->rest, rest, sizeof rest);
    return 0;
}

/* Goes into `name` in the directory `done`, or follows it when it is a link. */
static int go_into(struct resolver *r, const char *name, bool keep_link)
{
    const struct open_rule rule = {
        .beneath = true, .no_links = true, .flags = O_PATH | O_NOFOLLOW};
    char path[PATH_MAX], text[PATH_MAX];
    CLEANUP_FD int fd = -1;
    ssize_t len;

    if (store_join(r->done, name, path, sizeof path) < 0)
        return -ENAMETOOLONG;
    fd = open_below(r->anchor->fd, path, &rule);
    if (fd < 0)
        return fd;
    len = keep_link ? -1 : readlinkat(fd, "", text, sizeof text - 1);
    if (len < 0) { /* ENOENT is what an empty path gives when it is no link */
        memcpy(r->done, path, sizeof path);
        return 0;
    }
    text[len] = '\0';
    return follow(r, text);
}

/* Cuts the first part off `rest`. */
static int take_part(struct resolver *r, char part[NAME_MAX + 1])
{
    char *start = r->rest + strspn(r->rest, "/");
    size_t len = strcspn(start, "/");
    char *next = start + len + strspn(start + len, "/");

    if (len > NAME_MAX)
        return -ENAMETOOLONG;
    memcpy(part, start, len);
    part[len] = '\0';
    memmove(r->rest, next, strlen(next) + 1);
    return 0;
}

int resolve_below(const struct anchor *a, const char *path, bool keep_last, char *dst,
                  size_t size)
{
    struct resolver r = {.anchor = a};
    char part[NAME_MAX + 1];
    int rc = store_join("", path, r.rest, sizeof r.rest);

    while (rc == 0 && r.rest[0] != '\0') {
        rc = take_part(&r, part);
        if (rc < 0 || part[0] == '\0' || strcmp(part, ".") == 0)
            continue;
        if (strcmp(part, "..") == 0)
            rc = go_up(&r);
        else
            rc = go_into(&r, part, keep_last && r.rest[0] == '\0');
    }
    return rc < 0 ? rc : store_join("", r.done, dst, size);
}

/* How many leading bytes are whole parts that both paths have. */
static size_t common_parts(const char *a, const char *b)
{
    size_t common = 0;

    for (size_t i = 0;; i++) {
        bool a_ends = a[i] == '\0' || a[i] == '/', b_ends = b[i] == '\0' || b[i] == '/';

        if (a_ends && b_ends)
            common = i;
        if (a[i] != b[i] || a[i] == '\0')
            return common;
    }
}

int relative_path(const char *from, const char *to, char *dst, size_t size)
{
    size_t common = common_parts(from, to), len = 0;

    from += common;
    to += common + strspn(to + common, "/");
    for (const char *p = from + strspn(from, "/"); *p; p += strspn(p, "/")) {
        if (len + sizeof "../" > size)
            return -ENAMETOOLONG;
        memcpy(dst + len, "../", sizeof "../");
        len += sizeof "../" - 1;
        p += strcspn(p, "/");
    }
    if (len + strlen(to) + 2 > size)
        return -ENAMETOOLONG;
    snprintf(dst + len, size - len, "%s", len == 0 && *to == '\0' ? "." : to);
    len = strlen(dst);
    if (len > 1 && dst[len - 1] == '/') /* "../" with nothing behind */
        dst[len - 1] = '\0';
    return 0;
}
