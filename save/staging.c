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
#include <xxhash.h>

#include "base/buf.h"
#include "base/dir.h"
#include "base/err.h"
#include "save/staging_priv.h"

enum {
    OLD_SECONDS = 60,
    MAX_TRIES = 100,     /* others that publish and remove under us */
    HASH_BYTES = 1 + 16, /* '~' and the digits behind a name that was cut */
    /* Of more than so many saves beside it one does not look through all at once again, but
     * after so many times what that took. */
    SWEEP_MANY = 64,
    SWEEP_SHARE = 20,
};

static const char path_prefix[] = ".unshard-staging-";

int staging_fail(struct err *e, const char *what, const char *path)
{
    return err_set(e, errno, "%s %s: %s", what, path, strerror(errno));
}

static int no_parent(const struct staging *s, struct err *e)
{
    staging_fail(e, "open", s->parent);
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
    size_t len = strlen(s->name), room = NAME_MAX - (sizeof path_prefix - 1);
    int ret;

    if (len > NAME_MAX)
        return err_set(e, ENAMETOOLONG, "%s: the name is too long", s->target);
    ret = len <= room ? asprintf(&s->path, "%s%s", path_prefix, s->name)
                      : asprintf(&s->path, "%s%.*s~%016" PRIx64, path_prefix,
                                 (int)(room - HASH_BYTES), s->name,
                                 (uint64_t)XXH3_64bits(s->name, len));
    if (ret >= 0)
        return 0;
    s->path = NULL;
    return err_nomem(e);
}

bool staging_is_named(const char *name)
{
    return strncmp(name, path_prefix, sizeof path_prefix - 1) == 0;
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
                   : staging_fail(e, "look at", s->target);
    dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return staging_fail(e, "look at", s->target);
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

int staging_make_dir(int at, const char *name, int *fd, struct err *e)
{
    if (mkdirat(at, name, 0777) < 0 && errno != EEXIST) {
        staging_fail(e, "make", name);
        return err_hint(e, "it is made beside what is saved: rights on that directory "
                           "are needed");
    }
    *fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return *fd < 0 ? staging_fail(e, "open", name) : 0;
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
        return staging_fail(e, "look at", s->path);
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
        if (check_part(s, i, e) < 0)
            return -e->code;
    s->part = 0; /* a journal of its own */
    return 0;
}

/*
 * See STAGING_PUBLISHED. With data/ the mark says nothing: whoever made it was cut off before
 * the rename, or is about to do it.
 */
static int clear_leftovers(const struct staging *s, struct err *e)
{
    CLEANUP_FD int fd =
        openat(s->parent_fd, s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    if (fd < 0)
        return errno == ENOENT ? 0 : staging_fail(e, "open", s->path);
    if (faccessat(fd, STAGING_PUBLISHED, F_OK, AT_SYMLINK_NOFOLLOW) < 0 ||
        faccessat(fd, STAGING_DATA, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return 0;
    return staging_remove(s->parent_fd, s->path, e);
}

/* ---- of a mount ---- */

/* The lock is ours: is what the journal speaks of a mount's of this host, and dead? */
static int check_dead(const struct staging *s, struct err *e)
{
    char line[512] = "";
    ssize_t n = pread(s->journal_fd, line, sizeof line - 1, 0);

    if (n < 0)
        return staging_fail(e, "journal of", s->target);
    line[strcspn(line, "\n")] = '\0';
    if (n == 0 || staging_journal_is_local(line))
        return 0;
    err_set(e, EBUSY, "%s: %s/%s is another save's (%s)", s->target, s->parent, s->path,
            line);
    return err_hint(e, "let it finish, or remove that directory");
}

/* Parts of a conversion have other journals: nothing of theirs may be touched. */
static int check_foreign(const struct staging *s, struct err *e)
{
    int fd = openat(s->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    bool foreign = false;
    const char *there;
    char name[64];
    int more;

    if (!dir)
        return staging_fail(e, "look at", s->path);
    staging_journal_name(1, 1, name);
    while ((more = dir_next(dir, &there)) > 0)
        foreign |= staging_is_journal(there) && strcmp(there, name) != 0;
    closedir(dir);
    if (more < 0)
        return err_set(e, -more, "look at %s: %s", s->path, strerror(-more));
    if (!foreign)
        return 0;
    err_set(e, EBUSY, "%s: %s/%s is a conversion's", s->target, s->parent, s->path);
    return err_hint(e, "finish it, or remove that directory");
}

/*
 * Is it what a mount of this host has left that lives no more? *lock is held then. A
 * journal that says nothing is the beginning of one: of a while ago, for a power loss.
 */
static bool is_dead(int dir, int *lock)
{
    char name[64], line[512] = "";
    struct stat st;
    ssize_t n;

    staging_journal_name(1, 1, name);
    *lock = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    n = *lock < 0 ? -1 : pread(*lock, line, sizeof line - 1, 0);
    return n >= 0 && fstat(*lock, &st) == 0 && st.st_nlink > 0 &&
           (n > 0 ? staging_journal_is_local(line)
                  : st.st_mtime + OLD_SECONDS < time(NULL)) &&
           flock(*lock, LOCK_EX | LOCK_NB) == 0 && fstat(*lock, &st) == 0 &&
           st.st_nlink > 0;
}

bool staging_in_use(int parent, const char *name)
{
    CLEANUP_FD int at =
        openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    CLEANUP_FD int lock = -1;

    return at >= 0 && !is_dead(at, &lock) && faccessat(at, STAGING_DATA, F_OK, 0) == 0;
}

static int64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Is it too early to look through it again? */
static bool is_swept(const struct staging_swept *swept, const struct stat *dir)
{
    for (size_t i = 0; swept && i < STAGING_SWEPT; i++)
        if (swept->dir[i].dev == dir->st_dev && swept->dir[i].ino == dir->st_ino)
            return now_ns() < swept->dir[i].next_ns;
    return false;
}

static void note_swept(struct staging_swept *swept, const struct stat *dir,
                       int64_t next_ns)
{
    size_t i = 0;

    while (i < STAGING_SWEPT &&
           (swept->dir[i].dev != dir->st_dev || swept->dir[i].ino != dir->st_ino))
        i++;
    if (i == STAGING_SWEPT)
        i = swept->next++ % STAGING_SWEPT;
    swept->dir[i].dev = dir->st_dev;
    swept->dir[i].ino = dir->st_ino;
    swept->dir[i].next_ns = next_ns;
}

/* How many others are staged there. */
static size_t sweep_dir(const struct staging *s, DIR *dir)
{
    struct err ignored = {0};
    const char *name;
    size_t others = 0;

    while (dir_next(dir, &name) > 0) {
        CLEANUP_FD int lock = -1;
        CLEANUP_FD int at = -1;

        if (!staging_is_named(name) || strcmp(name, s->path) == 0 ||
            unlinkat(s->parent_fd, name, AT_REMOVEDIR) == 0) /* an empty one */
            continue;
        others++;
        at =
            openat(s->parent_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        /* What its last rename did is durable before anything of it is deleted. */
        if (at >= 0 && is_dead(at, &lock) && fsync(s->parent_fd) == 0)
            staging_remove(s->parent_fd, name, &ignored);
    }
    return others;
}

/*
 * What mounts that died have left beside the target, of other checkpoints: room on the
 * disk, as much as a checkpoint takes, that nobody else would ever give back.
 */
static void sweep(const struct staging *s, struct staging_swept *swept)
{
    int64_t start = now_ns(), end;
    struct stat st;
    DIR *dir;
    int fd;

    if (fstat(s->parent_fd, &st) < 0 || is_swept(swept, &st))
        return;
    fd = openat(s->parent_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) {
        if (fd >= 0)
            close(fd);
        return;
    }
    if (sweep_dir(s, dir) > SWEEP_MANY && swept) {
        end = now_ns();
        note_swept(swept, &st, end + SWEEP_SHARE * (end - start));
    }
    closedir(dir);
}

static void close_dirs(struct staging *s)
{
    int *fds[] = {&s->journal_fd, &s->data_fd, &s->spool_fd, &s->fd};

    for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
}

/* -ENOENT: the directory went away while we took it up. */
static int take_up(struct staging *s, const struct witness_filter *storage,
                   struct err *e)
{
    struct err ignored = {0};

    if (clear_leftovers(s, e) < 0 ||
        staging_make_dir(s->parent_fd, s->path, &s->fd, e) < 0 ||
        check_foreign(s, e) < 0 || staging_journal_lock(s, e) < 0 ||
        staging_journal_is_here(s, e) < 0 || check_dead(s, e) < 0)
        return -e->code;
    /* Before links to its files go. */
    if (!storage ||
        witness_take(s->parent_fd, s->name, storage, &s->stored, &ignored) < 0)
        s->stored.ino = 0;
    if (fsync(s->parent_fd) < 0) /* what a dead one renamed, before it is deleted */
        return staging_fail(e, "fsync", s->parent);
    if (staging_remove_tree(s->fd, STAGING_DATA, 0, e) < 0 ||
        staging_remove_tree(s->fd, STAGING_SPOOL, 0, e) < 0 ||
        staging_remove_tree(s->fd, STAGING_REMOVED, 0, e) < 0 ||
        staging_make_dir(s->fd, STAGING_DATA, &s->data_fd, e) < 0 ||
        staging_make_dir(s->fd, STAGING_SPOOL, &s->spool_fd, e) < 0)
        return -e->code;
    return 0;
}

static int open_mount(struct staging *s, const struct staging_claim *claim,
                      struct err *e)
{
    CLEANUP(buf_release) struct buf line = {0};
    int ret = -ENOENT;

    s->target = strdup(claim->target);
    s->parent = strdup(claim->target);
    s->name = strdup(claim->name);
    s->part = s->parts = 1;
    if (!s->target || !s->parent || !s->name)
        return err_nomem(e);
    if (name_staging(s, e) < 0)
        return -e->code;
    if (strrchr(s->parent, '/'))
        *strrchr(s->parent, '/') = '\0';
    s->parent_fd = fcntl(claim->parent, F_DUPFD_CLOEXEC, 0);
    if (s->parent_fd < 0)
        return no_parent(s, e);
    sweep(s, claim->swept);
    for (int i = 0; ret == -ENOENT && i < MAX_TRIES; i++) {
        close_dirs(s);
        *e = (struct err){0};
        ret = take_up(s, claim->storage, e);
    }
    if (ret < 0)
        return ret;
    if (staging_writer(&line, e) < 0)
        return -e->code;
    s->what = buf_steal(&line, NULL);
    return s->what ? staging_journal_begin(s, e) : err_nomem(e);
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
        staging_remove(s->parent_fd, s->path, &ignored);
    *e = now;
    return -EEXIST;
}

static int open_claimed(struct staging *s, const struct staging_claim *claim,
                        struct err *e)
{
    if (staging_make_dir(s->parent_fd, s->path, &s->fd, e) < 0 ||
        staging_make_dir(s->fd, STAGING_DATA, &s->data_fd, e) < 0)
        return -e->code;
    s->what = strdup(claim->what);
    s->part = claim->part;
    s->parts = claim->parts;
    if (!s->what)
        return err_nomem(e);
    if (claim->finish && count_parts(s, e) < 0)
        return -e->code;
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
    int ret =
        claim->mount ? open_mount(s, claim, e) : split_target(s, claim->target, e);

    if (ret == 0 && !claim->mount)
        ret = name_staging(s, e);
    if (ret < 0 || claim->mount)
        return ret;
    s->parent_fd = open(s->parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->parent_fd < 0)
        return no_parent(s, e);
    ret = clear_leftovers(s, e) < 0 ? -e->code : check_target(s, e);
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
    s->parent_fd = s->fd = s->data_fd = s->journal_fd = s->spool_fd = -1;
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

int staging_spool(const struct staging *s)
{
    return s->spool_fd;
}
