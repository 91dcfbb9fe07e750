/* SPDX-License-Identifier: MIT */
/* save/staged.c - removes a staging directory, in an order in which any rest is recognised. */
#include "save/staged.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/dir.h"
#include "base/err.h"
#include "base/fsutil.h"

static const char part_prefix[] = "journal.";

bool staged_is_part(const char *name)
{
    return strncmp(name, part_prefix, sizeof part_prefix - 1) == 0;
}

int staged_fail(struct err *e, const char *what, const char *path)
{
    return err_set(e, errno, "%s %s: %s", what, path, strerror(errno));
}

int staged_make_dir(int at, const char *name, int *fd, struct err *e)
{
    if (mkdirat(at, name, 0777) < 0 && errno != EEXIST) {
        staged_fail(e, "make", name);
        return err_hint(e, "it is made beside what is saved: rights on that directory "
                           "are needed");
    }
    *fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return *fd < 0 ? staged_fail(e, "open", name) : 0;
}

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
        return staged_fail(e, "remove", "a directory");
    }
    while (ret == 0 && (more = dir_next(dir, &name)) > 0)
        ret = staged_remove_tree(dirfd(dir), name, depth + 1, e);
    closedir(dir);
    return ret == 0 && more < 0 ? unlisted(more, e) : ret;
}

/* Our own files only: not deeper than a layout makes directories. */
int staged_remove_tree(int at, const char *name, unsigned depth, struct err *e)
{
    int fd;

    if (unlinkat(at, name, 0) == 0)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return errno == ENOENT ? 0 : staged_fail(e, "remove", name);
    if (depth > 64)
        return err_set(e, ELOOP, "%s: too deep to remove", name);
    if (is_mount_root(at, name)) /* nothing of ours: it came with a directory */
        return err_set(e, EBUSY, "%s: a file system is mounted there", name);
    fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return staged_fail(e, "remove", name);
    TRY(remove_entries(fd, depth, e));
    return unlinkat(at, name, AT_REMOVEDIR) < 0 ? staged_fail(e, "remove", name) : 0;
}

int staged_empty(int at, const char *name, struct err *e)
{
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    if (fd < 0)
        return errno == ENOENT ? 0 : staged_fail(e, "empty", name);
    return remove_entries(fd, 1, e);
}

/*
 * Journals and the lock go when nothing is left of which they speak: until then the lock
 * keeps others out. Marks go when no journal is left that would be believed.
 */
static int pass_of(const char *name)
{
    if (strcmp(name, STAGED_PUBLISHED) == 0 || strcmp(name, STAGED_DONE) == 0)
        return 2;
    return staged_is_part(name) || strcmp(name, STAGED_JOURNAL) == 0 ||
                   strcmp(name, STAGED_LOCK) == 0
               ? 1
               : 0;
}

static int remove_some(int fd, int pass, struct err *e)
{
    int own = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ret = 0;
    DIR *dir = own < 0 ? NULL : fdopendir(own);
    const char *name;
    int more = 0;

    if (!dir)
        return staged_fail(e, "remove", "a directory");
    while (ret == 0 && (more = dir_next(dir, &name)) > 0) {
        if (pass_of(name) == pass)
            ret = staged_remove_tree(fd, name, 1, e);
    }
    closedir(dir);
    return ret == 0 && more < 0 ? unlisted(more, e) : ret;
}

int staged_remove_dir(int parent, const char *path, struct err *e)
{
    CLEANUP_FD int fd =
        openat(parent, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    int ret = 0;

    if (fd < 0)
        return errno == ENOENT ? 0 : staged_fail(e, "remove", path);
    for (int pass = 0; ret == 0 && pass < 3; pass++)
        ret = remove_some(fd, pass, e);
    if (ret < 0)
        return ret;
    if (unlinkat(parent, path, AT_REMOVEDIR) == 0 || errno == ENOENT ||
        errno == ENOTEMPTY || errno == EEXIST) /* another's by now */
        return 0;
    return staged_fail(e, "remove", path);
}

void staged_boot(char boot[64])
{
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");

    boot[0] = '\0';
    if (f) {
        if (!fgets(boot, 64, f))
            boot[0] = '\0';
        fclose(f);
    }
    boot[strcspn(boot, "\n")] = '\0';
}
