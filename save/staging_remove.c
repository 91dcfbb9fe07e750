/* SPDX-License-Identifier: MIT */
/* save/staging_remove.c - takes a staging directory away, so that every rest of it can be told. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/dir.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "save/staging_priv.h"

/* What is left cannot be seen, so that the next pass must not begin. */
static int unlisted(int code, struct err *e)
{
    return err_set(e, -code, "remove a directory: %s", strerror(-code));
}

static int remove_entries(int fd, unsigned depth, struct err *e)
{
    const char *name;
    struct stat st;
    DIR *dir;
    int ret = 0, more = 0;

    /* Its owner may have made it read-only. What refuses this is told of below. */
    if (fstat(fd, &st) == 0 && (st.st_mode & S_IRWXU) != S_IRWXU)
        (void)!fchmod(fd, st.st_mode | S_IRWXU);
    dir = fdopendir(fd);

    if (!dir) {
        close(fd);
        return staging_fail(e, "remove", "a directory");
    }
    while (ret == 0 && (more = dir_next(dir, &name)) > 0)
        ret = staging_remove_tree(dirfd(dir), name, depth + 1, e);
    closedir(dir);
    return ret == 0 && more < 0 ? unlisted(more, e) : ret;
}

/* Our own files only: not deeper than a layout makes directories. */
int staging_remove_tree(int at, const char *name, unsigned depth, struct err *e)
{
    int fd;

    if (unlinkat(at, name, 0) == 0)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return errno == ENOENT ? 0 : staging_fail(e, "remove", name);
    if (depth > 64)
        return err_set(e, ELOOP, "%s: too deep to remove", name);
    if (is_mount_root(at, name)) /* nothing of ours: it came with a directory */
        return err_set(e, EBUSY, "%s: a file system is mounted there", name);
    fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return staging_fail(e, "remove", name);
    if (remove_entries(fd, depth, e) < 0)
        return -e->code;
    return unlinkat(at, name, AT_REMOVEDIR) < 0 ? staging_fail(e, "remove", name) : 0;
}

static int remove_some(int fd, int pass, struct err *e)
{
    int own = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ret = 0;
    DIR *dir = own < 0 ? NULL : fdopendir(own);
    const char *name;
    int more = 0;

    if (!dir)
        return staging_fail(e, "remove", "a directory");
    while (ret == 0 && (more = dir_next(dir, &name)) > 0) {
        int when = staging_is_journal(name)               ? 1
                   : strcmp(name, STAGING_PUBLISHED) == 0 ? 2
                                                          : 0;

        if (when == pass)
            ret = staging_remove_tree(fd, name, 1, e);
    }
    closedir(dir);
    return ret == 0 && more < 0 ? unlisted(more, e) : ret;
}

/*
 * In an order in which every rest of it can be told: the journal goes when nothing is left
 * of which it speaks (until then its lock keeps others out), and the mark of a publication
 * goes when no journal is left that would be believed.
 */
int staging_remove(int parent, const char *path, struct err *e)
{
    CLEANUP_FD int fd =
        openat(parent, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    if (fd < 0)
        return errno == ENOENT ? 0 : staging_fail(e, "remove", path);
    for (int pass = 0; pass < 3; pass++)
        if (remove_some(fd, pass, e) < 0)
            return -e->code;
    if (unlinkat(parent, path, AT_REMOVEDIR) == 0 || errno == ENOENT ||
        errno == ENOTEMPTY || errno == EEXIST) /* another's by now */
        return 0;
    return staging_fail(e, "remove", path);
}
