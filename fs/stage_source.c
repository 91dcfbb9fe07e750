/* SPDX-License-Identifier: MIT */
/* fs/stage_source.c - the directories of the source that stages are made for. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fsutil.h"
#include "fs/save_upload.h"
#include "fs/stage.h"

/* The source itself is the checkpoint: its directory lies outside of what is mounted. */
static int root_parent(const struct fs *fs, const char **name, struct err *e)
{
    const char *url = fs->store->url, *slash = strrchr(url, '/');
    char dir[PATH_MAX];
    struct err ignored = {0};
    int fd;

    if (!slash || !slash[1] || !fs->store->ops->reopen ||
        fs->store->ops->reopen(fs->store, &ignored) < 0) {
        err_set(e, EROFS, "%s: the source itself cannot be replaced", url);
        return err_hint(e, "mount the directory above it");
    }
    *name = slash + 1;
    snprintf(dir, sizeof dir, "%.*s", slash == url ? 1 : (int)(slash - url), url);
    fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? err_set(e, errno, "%s: %s", dir, strerror(errno)) : fd;
}

/* What is written goes where it was read: the path may lead elsewhere (umount -l). */
static int open_root(const struct fs *fs, struct err *e)
{
    CLEANUP_FD int fd = open(fs->store->url, O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct entry_stat root;
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        return err_set(e, errno, "%s: %s", fs->store->url, strerror(errno));
    if (fs->store->ops->stat(fs->store, "", &root, e) < 0)
        return -e->code;
    if (root.id.dev != st.st_dev || root.id.ino != st.st_ino) {
        err_set(e, EIO, "%s: another directory than the one that is mounted",
                fs->store->url);
        return err_hint(e, "nothing is written there: mount it anew");
    }
    return steal_fd(&fd);
}

/* The directory that holds `path`, beneath the source's root; "" has none in it. */
int stage_parent(const struct fs *fs, const char *path, const char **name,
                 struct err *e)
{
    const struct open_rule rule = {.beneath = true,
                                   .flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC};
    const char *slash = strrchr(path, '/');
    char dir[PATH_MAX];
    CLEANUP_FD int root = -1;
    int fd;

    if (fs->store->remote)
        return save_upload_refuse(fs, path, e);
    if (path[0] == '\0')
        return root_parent(fs, name, e);
    *name = slash ? slash + 1 : path;
    if (snprintf(dir, sizeof dir, "%.*s", slash ? (int)(slash - path) : 1,
                 slash ? path : ".") >= (int)sizeof dir)
        return err_set(e, ENAMETOOLONG, "%s", path);
    root = open_root(fs, e);
    if (root < 0)
        return root;
    fd = open_below(root, dir, &rule);
    return fd < 0 ? err_set(e, -fd, "%s: %s", dir, strerror(-fd)) : fd;
}

int stage_directory(const struct fs *fs, const char *path, struct err *e)
{
    const char *name;
    CLEANUP_FD int parent = stage_parent(fs, path, &name, e);
    int fd;

    if (parent < 0)
        return parent;
    fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return fd < 0 ? err_set(e, errno, "%s: %s", path, strerror(errno)) : fd;
}
