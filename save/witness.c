/* SPDX-License-Identifier: MIT */
/* save/witness.c - what a directory holds, so that it can be told later whether it still does. */
#include "save/witness.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/dir.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "save/staging.h"

enum { MAX_DEPTH = 64 };

static int fail(const char *path, struct err *e)
{
    return err_set(e, errno, "%s: %s", path, strerror(errno));
}

/* Sums do not depend on the order in which a directory lists its names. */
static void add(struct witness *w, const char *path, const struct stat *st)
{
    struct file_id id = file_id_of(st);
    const uint64_t who[] = {st->st_mode & S_IFMT, id.ino,
                            S_ISDIR(st->st_mode) ? 0 : id.size,
                            S_ISDIR(st->st_mode) ? 0 : (uint64_t)id.mtime_ns};
    XXH128_hash_t h =
        XXH3_128bits_withSeed(who, sizeof who, XXH3_64bits(path, strlen(path)));

    w->entries++;
    w->sum[0] += h.low64;
    w->sum[1] += h.high64;
}

struct looking {
    const struct witness_filter *filter;
    struct witness *out;
};

struct place {
    const char *path; /* below the directory that is looked at; "": itself */
    unsigned depth;
    bool counts;
};

static int look(const struct looking *l, int at, const struct place *p, struct err *e);

static int look_at_entry(const struct looking *l, int dir, const char *name,
                         const struct place *above, struct err *e)
{
    char path[PATH_MAX];
    struct place p = {.path = path, .depth = above->depth + 1, .counts = above->counts};
    struct stat st;
    CLEANUP_FD int fd = -1;

    if (snprintf(path, sizeof path, "%s%s%s", above->path, above->path[0] ? "/" : "",
                 name) >= (int)sizeof path)
        return err_set(e, ENAMETOOLONG, "%s/%s", above->path, name);
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0) /* it may be gone since */
        return errno == ENOENT ? 0 : fail(path, e);
    if (staging_is_named(name))
        return staging_in_use(dir, name)
                   ? err_set(e, EBUSY, "%s: is being saved itself", path)
                   : 0;
    p.counts |= l->filter && l->filter->counts(l->filter->user, path);
    if (p.counts)
        add(l->out, path, &st);
    if (!S_ISDIR(st.st_mode))
        return 0;
    fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return errno == ENOENT ? 0 : fail(path, e);
    return look(l, steal_fd(&fd), &p, e);
}

/* Takes `at` over. */
static int look(const struct looking *l, int at, const struct place *p, struct err *e)
{
    DIR *dir = fdopendir(at);
    const char *name;
    int ret = 0, more = 0;

    if (!dir) {
        ret = fail(p->path, e);
        close(at);
        return ret;
    }
    if (p->depth > MAX_DEPTH)
        ret =
            err_set(e, ELOOP, "%s: more than %d directories deep", p->path, MAX_DEPTH);
    while (ret == 0 && (more = dir_next(dir, &name)) > 0)
        ret = look_at_entry(l, dirfd(dir), name, p, e);
    closedir(dir);
    return ret == 0 && more < 0 ? err_set(e, -more, "%s: %s", p->path, strerror(-more))
                                : ret;
}

int witness_take(int parent, const char *name, const struct witness_filter *filter,
                 struct witness *out, struct err *e)
{
    CLEANUP_FD int fd =
        openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    const struct looking l = {.filter = filter, .out = out};
    const struct place top = {.path = "", .counts = filter == NULL};
    struct stat st;

    *out = (struct witness){0};
    if (fd < 0 || fstat(fd, &st) < 0)
        return fail(name, e);
    out->dev = st.st_dev;
    out->ino = st.st_ino;
    return look(&l, steal_fd(&fd), &top, e);
}
