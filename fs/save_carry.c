/* SPDX-License-Identifier: MIT */
/* fs/save_carry.c - what stays of a directory that is exchanged: links to all that was there. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "base/dir.h"
#include "base/fsutil.h"
#include "fs/save_files.h"
#include "fs/slot.h"
#include "save/staging.h"

enum { COPY_BLOCK = 1 << 20, MAX_DEPTH = 32 };

static int fail(const char *path, struct err *e)
{
    return err_set(e, errno, "%s: %s", path, strerror(errno));
}

struct carry {
    const struct slot *slot;
    const struct save_files *files;
    bool rewritten; /* storage does not stay */
};

/*
 * Owner, group, attributes and mode of a directory, of which the new one is made. Who is not root
 * cannot give it to another: then nothing takes its place, but for a checkpoint that is changed.
 */
static int keep_rights(const struct carry *c, int from, int to, const char *path,
                       struct err *e)
{
    struct stat st, now;

    if (fstat(from, &st) < 0 || fstat(to, &now) < 0)
        return fail(path, e);
    if ((now.st_uid != st.st_uid || now.st_gid != st.st_gid) &&
        fchown(to, now.st_uid == st.st_uid ? (uid_t)-1 : st.st_uid, st.st_gid) < 0 &&
        (geteuid() == 0 || !c->slot)) {
        fail(path, e);
        return err_hint(e,
                        "its owner or group cannot be kept: save to a new directory");
    }
    if (copy_xattrs(from, to, e) < 0) {
        err_wrap(e, "%s", path);
        return err_hint(e, "save to a new directory");
    }
    return fchmod(to, st.st_mode & 07777) < 0 ? fail(path, e) : 0;
}

static int copy_file(int from, const char *name, int to, const struct stat *st,
                     struct err *e)
{
    CLEANUP_FREE char *block = malloc(COPY_BLOCK);
    CLEANUP_FD int in = openat(from, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    CLEANUP_FD int out =
        openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    struct timespec times[2] = {st->st_atim, st->st_mtim};
    ssize_t n = 1;

    if (!block)
        return err_nomem(e);
    if (in < 0 || out < 0)
        return fail(name, e);
    while ((n = read(in, block, COPY_BLOCK)) > 0)
        if (write_all(out, block, (size_t)n, e) < 0)
            return err_wrap(e, "%s", name);
    if (n < 0 || fchmod(out, st->st_mode & 07777) < 0 || futimens(out, times) < 0 ||
        fsync(out) < 0)
        return fail(name, e);
    return 0;
}

/* A copy of a file of others is theirs no more, and who has it open writes to the old one. */
static int carry_file(const struct carry *c, int from, const char *name, int to,
                      const struct stat *st, struct err *e)
{
    if (linkat(from, name, to, name, 0) == 0 || errno == EEXIST)
        return 0;
    /* Links to files of others may be forbidden (protected_hardlinks), or not be had. */
    if (c->slot && S_ISREG(st->st_mode) &&
        (errno == EPERM || errno == EMLINK || errno == EXDEV))
        return copy_file(from, name, to, st, e);
    fail(name, e);
    return c->slot ? -e->code : err_hint(e, "save to a new directory");
}

static bool is_gone(const struct save_files *f, const char *path)
{
    for (size_t i = 0; i < f->gones; i++)
        if (strcmp(f->gone[i], path) == 0)
            return true;
    return false;
}

static bool stays(const struct carry *c, const char *path)
{
    return !staging_is_named(path) && !is_gone(c->files, path) &&
           !(c->rewritten && slot_hides(c->slot, path));
}

static int carry_dir(const struct carry *c, int from, int to, const char *path,
                     unsigned depth, struct err *e);

static int carry_sub(const struct carry *c, int from, const char *name, int to,
                     const char *path, unsigned depth, const struct stat *st,
                     struct err *e)
{
    CLEANUP_FD int in =
        openat(from, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    CLEANUP_FD int out = -1;
    struct timespec times[2] = {st->st_atim, st->st_mtim};
    int ret;

    if (in < 0 || (mkdirat(to, name, 0700) < 0 && errno != EEXIST))
        return fail(path, e);
    out = openat(to, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (out < 0)
        return fail(path, e);
    ret = carry_dir(c, in, out, path, depth + 1, e);
    if (ret == 0)
        ret = keep_rights(c, in, out, path, e);
    if (ret == 0 && fsync(out) < 0)
        return fail(path, e);
    futimens(out, times);
    return ret;
}

static int carry_entry(const struct carry *c, int from, const char *name, int to,
                       const char *path, unsigned depth, struct err *e)
{
    struct stat st;

    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return fail(path, e);
    if (is_mount_root(from, name)) { /* with the old directory it would be emptied */
        err_set(e, EROFS, "%s: a file system is mounted there", path);
        return err_hint(e, "save in another directory, or unmount it first");
    }
    if (S_ISDIR(st.st_mode))
        return carry_sub(c, from, name, to, path, depth, &st, e);
    return carry_file(c, from, name, to, &st, e);
}

static int carry_dir(const struct carry *c, int from, int to, const char *path,
                     unsigned depth, struct err *e)
{
    int fd = openat(from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ret = 0;
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    const char *name;
    char below[PATH_MAX];
    int more = 0;

    if (!dir)
        return fail(path, e);
    if (depth > MAX_DEPTH)
        ret = err_set(e, ELOOP, "%s: more than %d directories deep", path, MAX_DEPTH);
    while (ret == 0 && (more = dir_next(dir, &name)) > 0) {
        if (store_join(path, name, below, sizeof below) < 0)
            ret = err_set(e, ENAMETOOLONG, "%s/%s", path, name);
        else if (stays(c, below))
            ret = carry_entry(c, from, name, to, below, depth, e);
    }
    closedir(dir);
    if (ret == 0 && more < 0) /* what was not listed would be lost with the old one */
        return err_set(e, -more, "list %s: %s", path, strerror(-more));
    return ret;
}

int save_files_carry(struct fs *fs, const struct stage *s, const struct save_files *f,
                     bool rewritten, struct err *e)
{
    const struct carry c = {.slot = s->slot, .files = f, .rewritten = rewritten};
    CLEANUP_FD int old = stage_directory(fs, s->path, e);
    int dir = staging_dir(s->staging), ret;

    if (old < 0)
        return old;
    ret = carry_dir(&c, old, dir, "", 0, e);
    return ret == 0 ? keep_rights(&c, old, dir, s->path, e) : ret;
}
