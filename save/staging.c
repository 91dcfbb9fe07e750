/* SPDX-License-Identifier: MIT */
/* save/staging.c - staging directories and their journals. */
#include "save/staging.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "save/witness.h"

enum {
    STAGES = 8,
    OLD_SECONDS = 60,
    MAX_TRIES = 100,        /* others that publish and remove under us */
    JOURNAL_MAX = 64 << 20, /* a line every few seconds of a save */
};

static const char data_name[] = "data";
static const char spool_name[] = "in";
static const char removed_name[] = "removed";
static const char journal_prefix[] = "journal.";
static const char path_prefix[] = ".unshard-staging-";

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
    int parent_fd, fd, data_fd, journal_fd, spool_fd;
    int unsure_fd; /* a directory that may not have what was renamed in it, or -1 */
    struct stage_progress stage[STAGES];
    bool kept; /* data/ is others' work */
    struct witness
        stored;   /* the target's storage when this was opened; ino 0: unknown */
    bool watched; /* `witness` is set: */
    struct witness witness; /* of all that it holds when it is published */
};

static int fail(struct err *e, const char *what, const char *path)
{
    return err_set(e, errno, "%s %s: %s", what, path, strerror(errno));
}

static int no_parent(const struct staging *s, struct err *e)
{
    fail(e, "open", s->parent);
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

static int name_staging(struct staging *s, struct err *e)
{
    if (asprintf(&s->path, "%s%s", path_prefix, s->name) < 0) {
        s->path = NULL;
        return err_nomem(e);
    }
    return strlen(s->path) > NAME_MAX
               ? err_set(e, ENAMETOOLONG, "%s: the name is too long", s->target)
               : 0;
}

bool staging_is_named(const char *name)
{
    return strncmp(name, path_prefix, sizeof path_prefix - 1) == 0;
}

static void journal_name(unsigned part, unsigned parts, char dst[64])
{
    snprintf(dst, 64, "%s%u-of-%u", journal_prefix, part, parts);
}

static bool is_journal(const char *name)
{
    return strncmp(name, journal_prefix, sizeof journal_prefix - 1) == 0;
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
    if (mkdirat(at, name, 0777) < 0 && errno != EEXIST) {
        fail(e, "make", name);
        return err_hint(e, "it is made beside what is saved: rights on that directory "
                           "are needed");
    }
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
static int remove_staging(int parent, const char *path, struct err *e);

/*
 * See published_name. With data/ the mark says nothing: whoever made it was cut off before
 * the rename, or is about to do it.
 */
static int clear_leftovers(const struct staging *s, struct err *e)
{
    CLEANUP_FD int fd =
        openat(s->parent_fd, s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    if (fd < 0)
        return errno == ENOENT ? 0 : fail(e, "open", s->path);
    if (faccessat(fd, published_name, F_OK, AT_SYMLINK_NOFOLLOW) < 0 ||
        faccessat(fd, data_name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return 0;
    return remove_staging(s->parent_fd, s->path, e);
}

/* ---- of a mount ---- */

/*
 * "unshardfs mount-save HOST BOOT PID": who writes. Another host's lock may not be seen
 * from here (a network disk), so its directory is left alone.
 */
static void read_boot(char boot[64])
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

int staging_writer(struct buf *out, struct err *e)
{
    char host[HOST_NAME_MAX + 1] = "", boot[64];

    read_boot(boot);
    gethostname(host, sizeof host - 1);
    buf_addf(out, "unshardfs mount-save host %s boot %s pid %d", host, boot,
             (int)getpid());
    return buf_failed(out) ? err_nomem(e) : 0;
}

bool staging_writer_is_dead(const char *line)
{
    char host[HOST_NAME_MAX + 1] = "", boot[64], theirs[256], their_boot[64];
    int pid;

    if (sscanf(line, "unshardfs mount-save host %255s boot %63s pid %d", theirs,
               their_boot, &pid) != 3)
        return false;
    read_boot(boot);
    gethostname(host, sizeof host - 1);
    if (strcmp(host, theirs) != 0)
        return false;
    return strcmp(boot, their_boot) != 0 || (kill(pid, 0) < 0 && errno == ESRCH);
}

/*
 * A lock on a journal that its last owner has taken away, directory and all, keeps nobody
 * out: then all is made anew. That owner let go of it only after it had removed it.
 */
static int check_here(const struct staging *s, struct err *e)
{
    struct stat st;

    if (fstat(s->journal_fd, &st) < 0)
        return fail(e, "journal of", s->target);
    return st.st_nlink > 0 ? 0 : err_set(e, ENOENT, "%s: removed meanwhile", s->path);
}

/* Is this the first line of a journal of a mount of this host? */
static bool is_local_mount(const char *line)
{
    char host[HOST_NAME_MAX + 1] = "", want[HOST_NAME_MAX + 64];

    gethostname(host, sizeof host - 1);
    snprintf(want, sizeof want, "unshardfs mount-save host %s ", host);
    return strncmp(line, want, strlen(want)) == 0;
}

/* The lock is ours: is what the journal speaks of a mount's of this host, and dead? */
static int check_dead(const struct staging *s, struct err *e)
{
    char line[512] = "";
    ssize_t n = pread(s->journal_fd, line, sizeof line - 1, 0);

    if (n < 0)
        return fail(e, "journal of", s->target);
    line[strcspn(line, "\n")] = '\0';
    if (n == 0 || is_local_mount(line))
        return 0;
    err_set(e, EBUSY, "%s: %s/%s is another save's (%s)", s->target, s->parent, s->path,
            line);
    return err_hint(e, "let it finish, or remove that directory");
}

static int lock_journal(struct staging *s, struct err *e)
{
    char name[64];

    journal_name(1, 1, name);
    s->journal_fd =
        openat(s->fd, name, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (s->journal_fd < 0)
        return fail(e, "journal of", s->target);
    if (flock(s->journal_fd, LOCK_EX | LOCK_NB) == 0)
        return 0;
    if (errno != EWOULDBLOCK)
        return fail(e, "lock the journal of", s->target);
    return err_set(e, EBUSY, "%s: another process is writing it", s->target);
}

/* Parts of a conversion have other journals: nothing of theirs may be touched. */
static int check_foreign(const struct staging *s, struct err *e)
{
    int fd = openat(s->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    bool foreign = false;
    struct dirent *d;
    char name[64];

    if (!dir)
        return fail(e, "look at", s->path);
    journal_name(1, 1, name);
    while ((d = readdir(dir)))
        foreign |= is_journal(d->d_name) && strcmp(d->d_name, name) != 0;
    closedir(dir);
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

    journal_name(1, 1, name);
    *lock = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    n = *lock < 0 ? -1 : pread(*lock, line, sizeof line - 1, 0);
    return n >= 0 && fstat(*lock, &st) == 0 && st.st_nlink > 0 &&
           (n > 0 ? is_local_mount(line) : st.st_mtime + OLD_SECONDS < time(NULL)) &&
           flock(*lock, LOCK_EX | LOCK_NB) == 0 && fstat(*lock, &st) == 0 &&
           st.st_nlink > 0;
}

bool staging_in_use(int parent, const char *name)
{
    CLEANUP_FD int at =
        openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    CLEANUP_FD int lock = -1;

    return at >= 0 && !is_dead(at, &lock) && faccessat(at, data_name, F_OK, 0) == 0;
}

/*
 * What mounts that died have left beside the target, of other checkpoints: room on the
 * disk, as much as a checkpoint takes, that nobody else would ever give back.
 */
static void sweep(const struct staging *s)
{
    int fd = openat(s->parent_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    struct err ignored = {0};
    struct dirent *d;

    while (dir && (d = readdir(dir))) {
        CLEANUP_FD int lock = -1;
        CLEANUP_FD int at = -1;

        if (!staging_is_named(d->d_name) || strcmp(d->d_name, s->path) == 0 ||
            unlinkat(s->parent_fd, d->d_name, AT_REMOVEDIR) == 0) /* an empty one */
            continue;
        at = openat(s->parent_fd, d->d_name,
                    O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        /* What its last rename did is durable before anything of it is deleted. */
        if (at >= 0 && is_dead(at, &lock) && fsync(s->parent_fd) == 0)
            remove_staging(s->parent_fd, d->d_name, &ignored);
    }
    if (dir)
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

    if (clear_leftovers(s, e) < 0 || make_dir(s->parent_fd, s->path, &s->fd, e) < 0 ||
        check_foreign(s, e) < 0 || lock_journal(s, e) < 0 || check_here(s, e) < 0 ||
        check_dead(s, e) < 0)
        return -e->code;
    /* Before links to its files go. */
    if (!storage ||
        witness_take(s->parent_fd, s->name, storage, &s->stored, &ignored) < 0)
        s->stored.ino = 0;
    if (fsync(s->parent_fd) < 0) /* what a dead one renamed, before it is deleted */
        return fail(e, "fsync", s->parent);
    if (remove_tree(s->fd, data_name, 0, e) < 0 ||
        remove_tree(s->fd, spool_name, 0, e) < 0 ||
        remove_tree(s->fd, removed_name, 0, e) < 0 ||
        make_dir(s->fd, data_name, &s->data_fd, e) < 0 ||
        make_dir(s->fd, spool_name, &s->spool_fd, e) < 0)
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
    sweep(s);
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
    return s->what ? begin_journal(s, e) : err_nomem(e);
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
        remove_staging(s->parent_fd, s->path, &ignored);
    *e = now;
    return -EEXIST;
}

static int open_claimed(struct staging *s, const struct staging_claim *claim,
                        struct err *e)
{
    if (make_dir(s->parent_fd, s->path, &s->fd, e) < 0 ||
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

static int remove_some(int fd, int pass, struct err *e)
{
    int own = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ret = 0;
    DIR *dir = own < 0 ? NULL : fdopendir(own);
    struct dirent *d;

    if (!dir)
        return fail(e, "remove", "a directory");
    while (ret == 0 && (d = readdir(dir))) {
        const char *name = d->d_name;
        int when = is_journal(name) ? 1 : strcmp(name, published_name) == 0 ? 2 : 0;

        if (when == pass && strcmp(name, ".") != 0 && strcmp(name, "..") != 0)
            ret = remove_tree(fd, name, 1, e);
    }
    closedir(dir);
    return ret;
}

/*
 * In an order in which every rest of it can be told: the journal goes when nothing is left
 * of which it speaks (until then its lock keeps others out), and the mark of a publication
 * goes when no journal is left that would be believed.
 */
static int remove_staging(int parent, const char *path, struct err *e)
{
    CLEANUP_FD int fd =
        openat(parent, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    if (fd < 0)
        return errno == ENOENT ? 0 : fail(e, "remove", path);
    for (int pass = 0; pass < 3; pass++)
        if (remove_some(fd, pass, e) < 0)
            return -e->code;
    if (unlinkat(parent, path, AT_REMOVEDIR) == 0 || errno == ENOENT ||
        errno == ENOTEMPTY || errno == EEXIST) /* another's by now */
        return 0;
    return fail(e, "remove", path);
}

/*
 * Nothing may be deleted while the disk can have what we deleted under the target's name:
 * a rename whose directory could not be made durable is durable, or is not.
 */
static int make_sure(struct staging *s, struct err *e)
{
    if (s->kept)
        return err_set(e, EBUSY, "%s/%s has what others changed", s->parent, s->path);
    if (s->unsure_fd < 0)
        return 0;
    if (fsync(s->unsure_fd) < 0)
        return fail(e, "fsync the directory of", s->target);
    close(s->unsure_fd);
    s->unsure_fd = -1;
    return 0;
}

int staging_discard(struct staging *s, struct err *e)
{
    return make_sure(s, e) < 0 ? -e->code : remove_staging(s->parent_fd, s->path, e);
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

/* One rename of a directory, with what takes it back. */
struct step {
    int from, to;
    const char *old, *new;
    unsigned flags;
};

/*
 * The step is done and must be durable. If the disk will not say so it is taken back, so
 * that what was told to have failed has; what lies on the disk then is one or the other,
 * and neither is deleted before an fsync says which.
 */
static int settle(struct staging *s, const struct step *p, int dir, struct err *e)
{
    if (fsync(dir) == 0)
        return 0;
    fail(e, "fsync the directory of", s->target);
    if (renameat2(p->to, p->new, p->from, p->old, p->flags) < 0)
        err_hint(e, "it is there, but the disk may not have it; all else is in %s/%s",
                 s->parent, s->path);
    if (s->unsure_fd < 0)
        s->unsure_fd = fcntl(dir, F_DUPFD_CLOEXEC, 0);
    return -e->code;
}

int staging_publish(struct staging *s, struct err *e)
{
    const struct step step = {.from = s->fd,
                              .old = data_name,
                              .to = s->parent_fd,
                              .new = s->name,
                              .flags = 0};
    struct err ignored = {0};

    if (fsync(s->data_fd) < 0)
        return fail(e, "fsync", s->target);
    if (mark_published(s, e) < 0)
        return -e->code;
    /* Over nothing, or over the empty directory that we saw: never over another's files. */
    if (renameat(s->fd, data_name, s->parent_fd, s->name) < 0)
        return fail(e, "publish", s->target);
    if (settle(s, &step, s->parent_fd, e) < 0)
        return -e->code;
    staging_discard(s, &ignored); /* journals; what is left of them harms nobody */
    return 0;
}

int staging_restart(struct staging *s, struct err *e)
{
    if (make_sure(s, e) < 0)
        return -e->code;
    if (s->data_fd >= 0)
        close(s->data_fd);
    s->data_fd = -1;
    memset(s->stage, 0, sizeof s->stage);
    if (remove_tree(s->fd, data_name, 0, e) < 0 ||
        make_dir(s->fd, data_name, &s->data_fd, e) < 0)
        return -e->code;
    return begin_journal(s, e);
}

/* What stands there is what was seen when the save began, or nothing of worth. */
static int check_replaced(const struct staging *s, int parent, const char *name,
                          const struct stat *replaces, bool *exchange, struct err *e)
{
    struct stat now;

    *exchange = replaces != NULL;
    if (fstatat(parent, name, &now, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno == ENOENT && !replaces)
            return 0;
        return errno == ENOENT ? err_set(e, ESTALE, "%s is gone meanwhile", s->target)
                               : fail(e, "look at", s->target);
    }
    if (!replaces || (replaces->st_dev == now.st_dev && replaces->st_ino == now.st_ino))
        return 0; /* where only an empty one may be, rename(2) sees to it */
    return err_set(e, ESTALE, "%s is another directory by now", s->target);
}

int staging_watch(struct staging *s, int parent, const char *name,
                  const struct witness_filter *storage, struct err *e)
{
    struct witness now;

    if (witness_take(parent, name, NULL, &s->witness, e) < 0 ||
        witness_take(parent, name, storage, &now, e) < 0)
        return err_wrap(e, "%s", s->target);
    s->watched = true;
    if (s->stored.ino && !witness_equal(&now, &s->stored))
        return err_set(e, ESTALE, "%s was changed by others meanwhile", s->target);
    s->stored = now;
    return 0;
}

/* From now on nobody takes the directory for one that may be removed. */
static void keep(struct staging *s)
{
    struct err ignored = {0};

    s->kept = true;
    if (ftruncate(s->journal_fd, 0) == 0)
        append(s, "kept: what others changed while it was saved\n", &ignored);
}

/*
 * What others wrote there while we did is in data/ now, and would be deleted with it: it
 * is better looked at after the exchange than before, since nobody finds it there.
 */
static int check_watched(struct staging *s, const struct step *p, struct err *e)
{
    struct witness now;

    if (!s->watched || !(p->flags & RENAME_EXCHANGE))
        return 0;
    if (witness_take(p->from, p->old, NULL, &now, e) == 0 &&
        witness_equal(&now, &s->witness))
        return 0;
    if (e->code == 0)
        err_set(e, ESTALE, "%s was changed by others meanwhile", s->target);
    if (renameat2(p->to, p->new, p->from, p->old, p->flags) < 0 || fsync(p->to) < 0) {
        err_hint(e, "it is the new one; what they have is in %s/%s", s->parent,
                 s->path);
        keep(s);
    }
    return -e->code;
}

static int rename_error(const struct staging *s, bool exchange, struct err *e)
{
    if (errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR)
        return err_set(e, EEXIST, "publish %s: there is something of that name by now",
                       s->target);
    if (exchange && (errno == EINVAL || errno == ENOSYS || errno == EBUSY)) {
        err_set(e, EROFS, "publish %s: directories cannot be exchanged there: %s",
                s->target, strerror(errno));
        return err_hint(e, "save under a new name");
    }
    return fail(e, "publish", s->target);
}

int staging_replace(struct staging *s, int parent, const char *name,
                    const struct stat *replaces, struct err *e)
{
    struct step step = {.from = s->fd, .old = data_name, .to = parent, .new = name};
    struct err ignored = {0};
    bool exchange;

    if (fsync(s->data_fd) < 0)
        return fail(e, "fsync", s->target);
    if (check_replaced(s, parent, name, replaces, &exchange, e) < 0)
        return -e->code;
    step.flags = exchange ? RENAME_EXCHANGE : 0;
    if (renameat2(s->fd, data_name, parent, name, step.flags) < 0)
        return rename_error(s, exchange, e);
    if (settle(s, &step, parent, e) < 0 || check_watched(s, &step, e) < 0)
        return -e->code;
    staging_discard(s, &ignored); /* the old one; what is left of it harms nobody */
    return 0;
}

int staging_take_away(struct staging *s, int parent, const char *name, struct err *e)
{
    const struct step step = {.from = parent,
                              .old = name,
                              .to = s->fd,
                              .new = removed_name,
                              .flags = RENAME_NOREPLACE};
    struct err ignored = {0};

    if (renameat2(parent, name, s->fd, removed_name, RENAME_NOREPLACE) < 0)
        return fail(e, "remove", s->target);
    if (settle(s, &step, parent, e) < 0)
        return -e->code;
    staging_discard(s, &ignored);
    return 0;
}
