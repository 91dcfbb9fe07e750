/* SPDX-License-Identifier: MIT */
/* save/staging.c - staging directories and their journals. */
#include "save/staging.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/fsutil.h"

enum {
    STAGES = 8,
    JOURNAL_MAX = 64 << 20, /* a line every few seconds of a save */
};

static const char data_name[] = "data";

/*
 * Made when all is durable, just before data/ is renamed. Where it is without data/, the
 * rest is what a published save left when it was killed: its journals speak of files that
 * are no longer here, and must not be believed by the next save of this name.
 */
static const char published_name[] = "published";

struct stage_progress {
    uint64_t units;
    bool done;
};

struct staging {
    char *target, *parent, *name, *path; /* of the target, of its directory; of ours */
    char *what;
    unsigned part, parts;
    int parent_fd, fd, data_fd, journal_fd;
    struct stage_progress stage[STAGES];
};

static int fail(struct err *e, const char *what, const char *path)
{
    return err_set(e, errno, "%s %s: %s", what, path, strerror(errno));
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
    if (asprintf(&s->path, ".unshard-staging-%s", s->name) < 0) {
        s->path = NULL;
        return err_nomem(e);
    }
    return strlen(s->path) > NAME_MAX
               ? err_set(e, ENAMETOOLONG, "%s: the name is too long", target)
               : 0;
}

static void journal_name(unsigned part, unsigned parts, char dst[64])
{
    snprintf(dst, 64, "journal.%u-of-%u", part, parts);
}

/* ---- the journal ---- */

/* "stage S units N [done]"; other lines are of no use to us. */
static void take_line(struct staging *s, const char *line)
{
    unsigned stage;
    uint64_t units;
    char word[8] = "";
    int n = sscanf(line, "stage %u units %" SCNu64 " %7s", &stage, &units, word);

    if (n < 2 || stage >= STAGES)
        return;
    s->stage[stage].units = units;
    s->stage[stage].done = n == 3 && strcmp(word, "done") == 0;
}

/*
 * The journal's first line says what is being saved. A last line that was cut is none:
 * *whole are the bytes before it, 0 where not even the first line is there.
 */
static int read_journal(struct staging *s, int fd, uint64_t *whole, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {.max = JOURNAL_MAX};
    struct stat st;
    char *line, *end;
    void *dst;

    if (fstat(fd, &st) < 0)
        return fail(e, "journal of", s->target);
    *whole = 0;
    if (st.st_size == 0)
        return 0;
    dst = st.st_size < JOURNAL_MAX ? buf_grow(&text, (size_t)st.st_size) : NULL;
    if (!dst)
        return err_set(e, EBADMSG, "%s/journal is no journal", s->path);
    if (read_exact(fd, dst, (size_t)st.st_size, 0, e) < 0)
        return err_wrap(e, "%s", s->path);
    buf_addc(&text, '\0');
    end = text.data ? strchr(text.data, '\n') : NULL;
    if (!end)
        return 0; /* it was cut before it said anything */
    *end = '\0';
    if (strcmp(text.data, s->what) != 0) {
        err_set(e, EINVAL, "%s/%s holds another save", s->parent, s->path);
        return err_hint(e, "finish that with its own command, or remove the directory");
    }
    for (line = end + 1; (end = strchr(line, '\n')); line = end + 1) {
        *end = '\0';
        take_line(s, line);
    }
    *whole = (uint64_t)(line - text.data);
    return 0;
}

static int append(struct staging *s, const char *text, struct err *e)
{
    if (write_all(s->journal_fd, text, strlen(text), e) < 0)
        return err_wrap(e, "journal of %s", s->target);
    return fdatasync(s->journal_fd) < 0 ? fail(e, "journal of", s->target) : 0;
}

static int begin_journal(struct staging *s, struct err *e)
{
    CLEANUP(buf_release) struct buf line = {0};

    if (ftruncate(s->journal_fd, 0) < 0)
        return fail(e, "journal of", s->target);
    buf_adds(&line, s->what);
    buf_addc(&line, '\n');
    if (buf_failed(&line))
        return err_nomem(e);
    if (append(s, line.data, e) < 0)
        return -e->code;
    return fsync(s->fd) < 0 ? fail(e, "fsync", s->path) : 0;
}

static int open_journal(struct staging *s, struct err *e)
{
    char name[64];
    uint64_t whole;

    journal_name(s->part, s->parts, name);
    s->journal_fd =
        openat(s->fd, name, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (s->journal_fd < 0)
        return fail(e, "journal of", s->target);
    if (flock(s->journal_fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK)
            return fail(e, "lock the journal of", s->target);
        return err_set(e, EBUSY, "%s: another process is writing it", s->target);
    }
    if (read_journal(s, s->journal_fd, &whole, e) < 0)
        return -e->code;
    if (whole == 0)
        return begin_journal(s, e);
    /* What is noted next must not become the rest of a line that was cut. */
    return ftruncate(s->journal_fd, (off_t)whole) < 0 ? fail(e, "journal of", s->target)
                                                      : 0;
}

/* ---- opening ---- */

/* The target must not be there; an empty directory is as good. */
static int check_target(const struct staging *s, struct err *e)
{
    int fd = openat(s->parent_fd, s->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct dirent *d;
    bool empty = true;
    DIR *dir;

    if (fd < 0)
        return errno == ENOENT ? 0
               : errno == ENOTDIR
                   ? err_set(e, EEXIST, "%s is there, as a file", s->target)
                   : fail(e, "look at", s->target);
    dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return fail(e, "look at", s->target);
    }
    while ((d = readdir(dir)))
        empty &= !strcmp(d->d_name, ".") || !strcmp(d->d_name, "..");
    closedir(dir);
    if (empty)
        return 0;
    err_set(e, EEXIST, "%s is there already", s->target);
    return err_hint(e, "name another place, or remove it first");
}

static int make_dir(int at, const char *name, int *fd, struct err *e)
{
    if (mkdirat(at, name, 0777) < 0 && errno != EEXIST)
        return fail(e, "make", name);
    *fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return *fd < 0 ? fail(e, "open", name) : 0;
}

/* Every part must have the same first line and have done its first stage. */
static int check_part(struct staging *s, unsigned part, struct err *e)
{
    struct staging seen = *s;
    char name[64];
    uint64_t whole = 0;
    int fd, ret;

    journal_name(part, s->parts, name);
    memset(seen.stage, 0, sizeof seen.stage);
    fd = openat(s->fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        err_set(e, EINVAL, "part %u of %u has not begun", part, s->parts);
        return err_hint(e, "run it: --part %u/%u", part, s->parts);
    }
    ret = read_journal(&seen, fd, &whole, e);
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
    struct dirent *d;
    unsigned part, parts;

    if (!dir)
        return fail(e, "look at", s->path);
    s->parts = 0;
    while ((d = readdir(dir)))
        if (sscanf(d->d_name, "journal.%u-of-%u", &part, &parts) == 2 && part > 0)
            s->parts = parts;
    closedir(dir);
    if (!s->parts)
        return err_set(e, EINVAL, "%s: nothing to finish", s->target);
    for (unsigned i = 1; i <= s->parts; i++)
        if (check_part(s, i, e) < 0)
            return -e->code;
    s->part = 0; /* a journal of its own */
    return 0;
}

static int remove_tree(int at, const char *name, unsigned depth, struct err *e);

/* See published_name. */
static int clear_leftovers(struct staging *s, struct err *e)
{
    int fd =
        openat(s->parent_fd, s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    int ret = 0;

    if (fd < 0)
        return errno == ENOENT ? 0 : fail(e, "open", s->path);
    if (faccessat(fd, published_name, F_OK, AT_SYMLINK_NOFOLLOW) == 0) {
        if (faccessat(fd, data_name, F_OK, AT_SYMLINK_NOFOLLOW) < 0 && errno == ENOENT)
            ret = remove_tree(s->parent_fd, s->path, 0, e);
        else if (unlinkat(fd, published_name, 0) < 0 && errno != ENOENT)
            ret = fail(e, "remove", published_name);
    }
    close(fd);
    return ret;
}

static int open_all(struct staging *s, const struct staging_claim *claim, struct err *e)
{
    int ret = split_target(s, claim->target, e);

    if (ret < 0)
        return ret;
    s->parent_fd = open(s->parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->parent_fd < 0)
        return fail(e, "open", s->parent);
    if (check_target(s, e) < 0 || clear_leftovers(s, e) < 0 ||
        make_dir(s->parent_fd, s->path, &s->fd, e) < 0 ||
        make_dir(s->fd, data_name, &s->data_fd, e) < 0)
        return -e->code;
    s->what = strdup(claim->what);
    s->part = claim->part;
    s->parts = claim->parts;
    if (!s->what)
        return err_nomem(e);
    if (claim->finish && count_parts(s, e) < 0)
        return -e->code;
    return open_journal(s, e);
}

int staging_open(const struct staging_claim *claim, struct staging **out, struct err *e)
{
    struct staging *s = calloc(1, sizeof *s);
    int ret;

    if (!s)
        return err_nomem(e);
    s->parent_fd = s->fd = s->data_fd = s->journal_fd = -1;
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
    int fds[] = {s->journal_fd, s->data_fd, s->fd, s->parent_fd};

    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        if (fds[i] >= 0)
            close(fds[i]);
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

uint64_t staging_progress(const struct staging *s, unsigned stage, bool *done)
{
    *done = stage < STAGES && s->stage[stage].done;
    return stage < STAGES ? s->stage[stage].units : 0;
}

int staging_note(struct staging *s, unsigned stage, uint64_t units, bool done,
                 struct err *e)
{
    char line[80];

    snprintf(line, sizeof line, "stage %u units %" PRIu64 "%s\n", stage, units,
             done ? " done" : "");
    return append(s, line, e);
}

/* ---- the end ---- */

static int remove_entries(int fd, unsigned depth, struct err *e)
{
    DIR *dir = fdopendir(fd);
    struct dirent *d;
    int ret = 0;

    if (!dir) {
        close(fd);
        return fail(e, "remove", "a directory");
    }
    while (ret == 0 && (d = readdir(dir)))
        if (strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0)
            ret = remove_tree(dirfd(dir), d->d_name, depth + 1, e);
    closedir(dir);
    return ret;
}

/* Our own files only: not deeper than a layout makes directories. */
static int remove_tree(int at, const char *name, unsigned depth, struct err *e)
{
    int fd;

    if (unlinkat(at, name, 0) == 0)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return errno == ENOENT ? 0 : fail(e, "remove", name);
    if (depth > 64)
        return err_set(e, ELOOP, "%s: too deep to remove", name);
    fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return fail(e, "remove", name);
    if (remove_entries(fd, depth, e) < 0)
        return -e->code;
    return unlinkat(at, name, AT_REMOVEDIR) < 0 ? fail(e, "remove", name) : 0;
}

int staging_discard(struct staging *s, struct err *e)
{
    return remove_tree(s->parent_fd, s->path, 0, e);
}

static int mark_published(struct staging *s, struct err *e)
{
    int fd = openat(s->fd, published_name, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW,
                    0600);

    if (fd < 0)
        return fail(e, "make", published_name);
    close(fd);
    return fsync(s->fd) < 0 ? fail(e, "fsync", s->path) : 0;
}

int staging_publish(struct staging *s, struct err *e)
{
    struct err ignored = {0};

    if (fsync(s->data_fd) < 0)
        return fail(e, "fsync", s->target);
    if (mark_published(s, e) < 0)
        return -e->code;
    /* Over nothing, or over the empty directory that we saw: never over another's files. */
    if (renameat(s->fd, data_name, s->parent_fd, s->name) < 0)
        return fail(e, "publish", s->target);
    if (fsync(s->parent_fd) < 0)
        return fail(e, "fsync", s->parent);
    staging_discard(s, &ignored); /* journals; what is left of them harms nobody */
    return 0;
}
