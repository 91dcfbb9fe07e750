/* SPDX-License-Identifier: MIT */
/* save/staging.c - staging directories: made, taken up from who died, and closed. */
#include "save/staging.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/dir.h"
#include "base/err.h"
#include "save/publish.h"
#include "save/staging_priv.h"

enum {
    OLD_SECONDS = 60,
    MAX_TRIES = 100, /* others that publish and remove under us */
    /* Of more than so many saves beside it one does not look through all at once again, but
     * after so many times what that took. */
    SWEEP_MANY = 64,
    SWEEP_SHARE = 20,
};

static int no_parent(const struct staging *s, struct err *e)
{
    staged_fail(e, "open", s->parent);
    return e->code == ENOENT ? err_hint(e, "mkdir -p %s", s->parent) : -e->code;
}

/* ---- names ---- */

/* "a/b/" is "b" in "a"; a target without a name ("/") has no place to stage. */
static int split_target(struct staging *s, const char *target, struct err *e)
{
    size_t len = strlen(target);
    const char *slash;

    while (len > 1 && target[len - 1] == '/')
        len--;
    s->target = strndup(target, len);
    if (!s->target)
        return err_nomem(e);
    slash = strrchr(s->target, '/');
    s->name = strdup(slash ? slash + 1 : s->target);
    s->parent = slash == s->target ? strdup("/")
                : slash            ? strndup(s->target, (size_t)(slash - s->target))
                                   : strdup(".");
    if (!s->name || !s->parent)
        return err_nomem(e);
    if (!s->name[0] || !strcmp(s->name, ".") || !strcmp(s->name, ".."))
        return err_set(e, EINVAL, "%s is no name for a new checkpoint", target);
    return 0;
}

/* Nobody reads the target's name out of ours: a long one is cut, with its hash behind. */
static int name_staging(struct staging *s, struct err *e)
{
    char name[NAME_MAX + 1];
    int ret = publish_staging_name(s->name, name, e);

    if (ret < 0)
        return err_wrap(e, "%s", s->target);
    s->path = strdup(name);
    return s->path ? 0 : err_nomem(e);
}

/* ---- opening ---- */

/* The target must not be there; an empty directory is as good. */
static int check_target(const struct staging *s, struct err *e)
{
    int fd = openat(s->parent_fd, s->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const char *name;
    DIR *dir;
    int more;

    if (fd < 0)
        return errno == ENOENT ? 0
               : errno == ENOTDIR
                   ? err_set(e, EEXIST, "%s is there, as a file", s->target)
                   : staged_fail(e, "look at", s->target);
    dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return staged_fail(e, "look at", s->target);
    }
    more = dir_next(dir, &name);
    closedir(dir);
    if (more < 0)
        return err_set(e, -more, "look at %s: %s", s->target, strerror(-more));
    if (more == 0)
        return 0;
    err_set(e, EEXIST, "%s is there already", s->target);
    return err_hint(e, "name another place, or remove it first");
}

/* Every part must have the same first line and have done its first stage. */
static int check_part(struct staging *s, unsigned part, struct err *e)
{
    struct staging seen = *s;
    char name[64];
    uint64_t whole = 0;
    int fd, ret;

    staging_journal_name(part, s->parts, name);
    memset(seen.stage, 0, sizeof seen.stage);
    fd = openat(s->fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        err_set(e, EINVAL, "part %u of %u has not begun", part, s->parts);
        return err_hint(e, "run it: --part %u/%u", part, s->parts);
    }
    ret = staging_journal_read(&seen, fd, &whole, e);
    close(fd);
    if (ret == 0 && (whole == 0 || !seen.stage[0].done)) {
        err_set(e, EINVAL, "part %u of %u is not done", part, s->parts);
        err_hint(e, "run it again: --part %u/%u", part, s->parts);
        ret = -EINVAL;
    }
    return ret;
}

/* How many parts there are, by the names of the journals. */
static int count_parts(struct staging *s, struct err *e)
{
    int fd = openat(s->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    const char *name;
    unsigned part, parts;
    int more;

    if (!dir)
        return staged_fail(e, "look at", s->path);
    s->parts = 0;
    while ((more = dir_next(dir, &name)) > 0)
        if (sscanf(name, "journal.%u-of-%u", &part, &parts) == 2 && part > 0)
            s->parts = parts;
    closedir(dir);
    if (more < 0)
        return err_set(e, -more, "look at %s: %s", s->path, strerror(-more));
    if (!s->parts)
        return err_set(e, EINVAL, "%s: nothing to finish", s->target);
    for (unsigned i = 1; i <= s->parts; i++)
        TRY(check_part(s, i, e));
    s->part = 0; /* a journal of its own */
    return 0;
}

/*
 * See STAGED_PUBLISHED. With data/ the mark says nothing: whoever made it was cut off before
 * the rename, or is about to do it.
 */
static int clear_leftovers(const struct staging *s, struct err *e)
{
    CLEANUP_FD int fd =
        openat(s->parent_fd, s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    if (fd < 0)
        return errno == ENOENT ? 0 : staged_fail(e, "open", s->path);
    if (faccessat(fd, STAGED_PUBLISHED, F_OK, AT_SYMLINK_NOFOLLOW) < 0 ||
        faccessat(fd, STAGED_DATA, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return 0;
    return staged_remove_dir(s->parent_fd, s->path, e);
}

static void close_dirs(struct staging *s)
{
    int *fds[] = {&s->journal_fd, &s->data_fd, &s->fd};

    for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
}

/*
 * Another process may have published while we opened, and have taken the directory away
 * under us: it did so before it let go of its journal, so that it shows now. What we made
 * anew is of no use then.
 */
static int check_published(struct staging *s, const struct staging_claim *claim,
                           int ret, struct err *e)
{
    struct err now = {0}, ignored = {0};

    if ((ret < 0 && ret != -ENOENT) || check_target(s, &now) != -EEXIST)
        return ret;
    if (ret == 0 && claim->parts == 1 && !claim->finish)
        staged_remove_dir(s->parent_fd, s->path, &ignored);
    *e = now;
    return -EEXIST;
}

/* What was written to views of a directory of this name waits there for its rest. */
static int check_transaction(const struct staging *s, struct err *e)
{
    if (faccessat(s->fd, STAGED_JOURNAL, F_OK, AT_SYMLINK_NOFOLLOW) < 0)
        return 0;
    err_set(e, EBUSY, "%s: a mount has staged files for it in %s/%s", s->target,
            s->parent, s->path);
    return err_hint(e, "finish that, or: unshard doctor --discard %s", s->parent);
}

static int open_claimed(struct staging *s, const struct staging_claim *claim,
                        struct err *e)
{
    int ret = staged_make_dir(s->parent_fd, s->path, &s->fd, e);

    if (ret == 0)
        ret = check_transaction(s, e);
    if (ret == 0)
        ret = staged_make_dir(s->fd, STAGED_DATA, &s->data_fd, e);
    if (ret < 0)
        return ret;
    s->what = strdup(claim->what);
    s->part = claim->part;
    s->parts = claim->parts;
    if (!s->what)
        return err_nomem(e);
    if (claim->finish)
        TRY(count_parts(s, e));
    return staging_journal_open(s, e);
}

/* An empty directory may be taken away by whoever tidies up, before the journal is in it. */
static int claim_again(struct staging *s, const struct staging_claim *claim,
                       struct err *e)
{
    int ret = open_claimed(s, claim, e);

    for (int i = 0; ret == -ENOENT && i < MAX_TRIES; i++) {
        close_dirs(s);
        free(s->what);
        s->what = NULL;
        *e = (struct err){0};
        ret = open_claimed(s, claim, e);
    }
    return ret;
}

static int open_all(struct staging *s, const struct staging_claim *claim, struct err *e)
{
    int ret = split_target(s, claim->target, e);

    if (ret == 0)
        ret = name_staging(s, e);
    if (ret < 0)
        return ret;
    s->parent_fd = open(s->parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->parent_fd < 0)
        return no_parent(s, e);
    ret = clear_leftovers(s, e);
    if (ret == 0)
        ret = check_target(s, e);
    if (ret == -EEXIST) /* an empty one is the last of a save that was killed */
        unlinkat(s->parent_fd, s->path, AT_REMOVEDIR);
    if (ret < 0)
        return ret;
    return check_published(s, claim, claim_again(s, claim, e), e);
}

int staging_open(const struct staging_claim *claim, struct staging **out, struct err *e)
{
    struct staging *s = calloc(1, sizeof *s);
    int ret;

    if (!s)
        return err_nomem(e);
    s->parent_fd = s->fd = s->data_fd = s->journal_fd = -1;
    s->unsure_fd = -1;
    ret = open_all(s, claim, e);
    if (ret < 0) {
        staging_close(s);
        return ret;
    }
    if (claim->finish)
        s->stage[0].done = true; /* by its parts */
    *out = s;
    return 0;
}

void staging_close(struct staging *s)
{
    if (!s)
        return;
    close_dirs(s);
    if (s->unsure_fd >= 0)
        close(s->unsure_fd);
    if (s->parent_fd >= 0)
        close(s->parent_fd);
    free(s->target);
    free(s->parent);
    free(s->name);
    free(s->path);
    free(s->what);
    free(s);
}

int staging_dir(const struct staging *s)
{
    return s->data_fd;
}
