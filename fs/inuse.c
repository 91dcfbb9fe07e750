/* SPDX-License-Identifier: MIT */
/* fs/inuse.c - which processes keep a mount busy. */
#include "fs/inuse.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fsutil.h"

enum { COMM_MAX = 32 };

static bool leads_below(int dir, const char *name, const char *top)
{
    char text[PATH_MAX];
    ssize_t n = readlinkat(dir, name, text, sizeof text - 1);

    text[MAX(n, (ssize_t)0)] = '\0';
    return n > 0 && path_is_within(text, top);
}

static DIR *open_dir(int at, const char *name)
{
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;

    if (fd >= 0 && !d)
        close(fd);
    return d;
}

static bool has_open(int process, const char *top)
{
    DIR *d = open_dir(process, "fd");
    const struct dirent *x;
    bool found = false;

    while (d && !found && (x = readdir(d)))
        found = leads_below(dirfd(d), x->d_name, top);
    if (d)
        closedir(d);
    return found;
}

static bool has_mapped(int process, const char *top)
{
    int fd = openat(process, "maps", O_RDONLY | O_CLOEXEC);
    FILE *f = fd >= 0 ? fdopen(fd, "re") : NULL;
    char *line = NULL;
    size_t size = 0;
    bool found = false;

    while (f && !found && getline(&line, &size, f) > 0) {
        const char *path = strchr(line, '/');

        line[strcspn(line, "\n")] = '\0';
        found = path && path_is_within(path, top);
    }
    free(line);
    if (f)
        fclose(f);
    else if (fd >= 0)
        close(fd);
    return found;
}

static void add_name(int process, const char *pid, struct buf *out)
{
    char name[COMM_MAX] = "?";
    int fd = openat(process, "comm", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, name, sizeof name - 1) : -1;

    if (fd >= 0)
        close(fd);
    if (n > 0)
        name[n] = '\0';
    name[strcspn(name, "\n")] = '\0';
    buf_addf(out, "%s%s (pid %s)", out->len ? ", " : "", name, pid);
}

size_t inuse_list(const char *path, struct buf *out)
{
    DIR *all = opendir("/proc");
    const struct dirent *x;
    size_t count = 0;

    while (all && (x = readdir(all))) {
        CLEANUP_FD int process = -1;

        if (x->d_name[0] < '1' || x->d_name[0] > '9' || atoi(x->d_name) == getpid())
            continue;
        process = openat(dirfd(all), x->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (process < 0 ||
            !(leads_below(process, "cwd", path) || leads_below(process, "root", path) ||
              has_open(process, path) || has_mapped(process, path)))
            continue;
        if (count++ < INUSE_NAMED)
            add_name(process, x->d_name, out);
    }
    if (all)
        closedir(all);
    return count;
}

/* The file of a block device that is a loop device's, without its end of line; false: none. */
static bool loop_file(int all, const char *name, char text[PATH_MAX])
{
    char path[NAME_MAX + 32];
    CLEANUP_FD int fd = -1;
    ssize_t n;

    snprintf(path, sizeof path, "%s/loop/backing_file", name);
    fd = openat(all, path, O_RDONLY | O_CLOEXEC);
    n = fd >= 0 ? read(fd, text, PATH_MAX - 1) : -1;
    if (n <= 0)
        return false;
    text[n] = '\0';
    text[strcspn(text, "\n")] = '\0';
    return true;
}

size_t inuse_loops(const char *path, struct buf *out)
{
    DIR *all = opendir("/sys/block");
    const struct dirent *x;
    char file[PATH_MAX];
    size_t count = 0;

    while (all && (x = readdir(all)))
        if (loop_file(dirfd(all), x->d_name, file) && path_is_within(file, path) &&
            count++ < INUSE_NAMED)
            buf_addf(out, "%s/dev/%s (an image at %s)", out->len ? ", " : "", x->d_name,
                     file);
    if (all)
        closedir(all);
    return count;
}
