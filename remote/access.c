/* SPDX-License-Identifier: MIT */
/* remote/access.c - the kernel's walk along a path, for somebody that we cannot be. */
#include "remote/access.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/xattr.h>

#include "remote/resolve.h"
#include "remote/store.h"

enum { MAX_LINKS = 40 /* as the kernel's own limit */ };

/* A descriptor of O_PATH has no attributes itself. */
static bool has_acl(int fd)
{
    char path[64];

    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return getxattr(path, "system.posix_acl_access", NULL, 0) >= 0 ||
           (errno != ENODATA && errno != EOPNOTSUPP);
}

static bool in_group(const struct access_by *by, gid_t gid)
{
    bool in = by->gid == gid;

    for (size_t i = 0; !in && i < by->ngroups; i++)
        in = by->groups[i] == gid;
    return in;
}

bool access_granted(int fd, const struct stat *st, const struct access_by *by,
                    unsigned bit)
{
    unsigned shift = in_group(by, st->st_gid) ? 3 : 0;

    if (by->uid == st->st_uid)
        return st->st_mode >> 6 & bit;
    return (st->st_mode >> shift & bit) && !has_acl(fd);
}

struct walk {
    const struct anchor *anchor;
    const struct access_by *by;
    bool leave;
    int at; /* owned */
    char rest[PATH_MAX];
    unsigned links;
};

static int go_to(struct walk *w, int fd)
{
    if (fd < 0)
        return -errno;
    close(w->at);
    w->at = fd;
    return 0;
}

static int go_to_start(struct walk *w)
{
    return go_to(w, fcntl(w->anchor->fd, F_DUPFD_CLOEXEC, 0));
}

static int follow(struct walk *w, const char *text)
{
    const char *tail = text[0] == '/' ? anchor_tail(w->anchor, text) : text;
    char rest[PATH_MAX];
    int rc = 0;

    if (++w->links > MAX_LINKS)
        return -ELOOP;
    if (w->leave && text[0] == '/') {
        tail = text;
        rc = go_to(w, open("/", O_PATH | O_DIRECTORY | O_CLOEXEC));
    } else if (!tail) {
        rc = -EXDEV;
    } else if (text[0] == '/') {
        rc = go_to_start(w);
    }
    if (rc < 0)
        return rc;
    if (store_join(tail, w->rest, rest, sizeof rest) < 0)
        return -ENAMETOOLONG;
    memcpy(w->rest, rest, sizeof rest);
    return 0;
}

static bool is_same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* From the directory it is in into `name`. */
static int go_into(struct walk *w, const char *name)
{
    char text[PATH_MAX];
    struct stat st, top;
    ssize_t len;
    int fd;

    if (fstat(w->at, &st) < 0 || fstat(w->anchor->fd, &top) < 0)
        return -errno;
    if (!S_ISDIR(st.st_mode))
        return -ENOTDIR;
    if (!access_granted(w->at, &st, w->by, 1))
        return -EACCES;
    if (!w->leave && strcmp(name, "..") == 0 && is_same(&st, &top))
        return -EXDEV;
    fd = openat(w->at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    len = fd < 0 ? -1 : readlinkat(fd, "", text, sizeof text - 1);
    if (len < 0) /* no link, or not there */
        return go_to(w, fd);
    close(fd);
    text[len] = '\0';
    return follow(w, text);
}

static int walk_on(struct walk *w)
{
    int rc = 0;

    while (rc == 0 && w->rest[strspn(w->rest, "/")]) {
        char part[NAME_MAX + 1];
        const char *start = w->rest + strspn(w->rest, "/");
        size_t len = strcspn(start, "/");

        if (len > NAME_MAX)
            return -ENAMETOOLONG;
        memcpy(part, start, len);
        part[len] = '\0';
        memmove(w->rest, start + len, strlen(start + len) + 1);
        if (strcmp(part, ".") != 0)
            rc = go_into(w, part);
    }
    return rc;
}

int access_walk(const struct anchor *a, const char *path, bool leave,
                const struct access_by *by)
{
    struct walk w = {
        .anchor = a, .by = by, .leave = leave, .at = fcntl(a->fd, F_DUPFD_CLOEXEC, 0)};
    int rc = w.at < 0 ? -errno : 0;

    if (rc == 0 && store_join("", path, w.rest, sizeof w.rest) < 0)
        rc = -ENAMETOOLONG;
    if (rc == 0)
        rc = walk_on(&w);
    if (rc == 0)
        return w.at;
    if (w.at >= 0)
        close(w.at);
    return rc;
}
