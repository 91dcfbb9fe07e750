/* SPDX-License-Identifier: MIT */
/* remote/local.c - a directory or a file on a mounted file system as a store. */
#include "remote/store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "base/dir.h"
#include "base/err.h"
#include "base/interrupt.h"
#include "remote/access.h"
#include "remote/archives.h"
#include "remote/mounted_on.h"
#include "remote/resolve.h"

struct local_store {
    struct store base;
    struct anchor anchor;
    struct mounted_on on;
    char *prefix; /* of the root below the anchor: "" but in a Hugging Face cache */
    bool follow;  /* links may lead anywhere */
};

static struct local_store *local_of(struct store *s)
{
    return container_of(s, struct local_store, base);
}

/* Is the file system of the anchor unmounted? */
static bool is_lost(const struct local_store *ls)
{
    return atomic_load(&ls->base.moves) % 2;
}

/* How messages name a path. */
static const char *shown(const struct local_store *ls, const char *path)
{
    return path[0] ? path : ls->base.url;
}

static int local_fail(const struct local_store *ls, const char *path, int code,
                      struct err *e)
{
    if (is_lost(ls)) {
        err_set(e, EIO, "%s: the file system of the source was unmounted",
                shown(ls, path));
        return err_hint(e, "mount it again");
    }
    err_set(e, -code, "%s: %s", shown(ls, path),
            code == -EXDEV ? "leads out of the source" : strerror(-code));
    return code == -EXDEV ? err_hint(e, "if that is meant, use -o follow_symlinks")
                          : code;
}

/* Callers' paths never climb, whatever links may do. */
static bool path_climbs(const char *path)
{
    if (path[0] == '/')
        return true;
    while (*path) {
        size_t len = strcspn(path, "/");

        if (len == 2 && memcmp(path, "..", 2) == 0)
            return true;
        path += len + strspn(path + len, "/");
    }
    return false;
}

/* The path as the anchor sees it, "." for the anchor itself. */
static int below_anchor(const struct local_store *ls, const char *path,
                        char dst[PATH_MAX])
{
    if (path_climbs(path))
        return -EXDEV;
    if (is_lost(ls))
        return -EIO;
    if (store_join(ls->prefix, path, dst, PATH_MAX) < 0)
        return -ENAMETOOLONG;
    if (dst[0] == '\0')
        memcpy(dst, ".", sizeof ".");
    return 0;
}

/*
 * What the kernel refused because of an absolute link, tried again with links resolved
 * by ourselves: those that name the source's own directory are within it.
 */
static int open_resolved(const struct local_store *ls, const char *path, int flags)
{
    const struct open_rule rule = {.beneath = true, .no_links = true, .flags = flags};
    char plain[PATH_MAX];

    TRY(resolve_below(&ls->anchor, path, flags & O_NOFOLLOW, plain, sizeof plain));
    return open_below(ls->anchor.fd, plain[0] ? plain : ".", &rule);
}

/* A descriptor or -errno. */
static int local_fd(const struct local_store *ls, const char *path, int flags)
{
    const struct open_rule rule = {.beneath = !ls->follow, .flags = flags};
    char full[PATH_MAX];
    int rc = below_anchor(ls, path, full);

    if (rc < 0)
        return rc;
    rc = open_below(ls->anchor.fd, full, &rule);
    return rc == -EXDEV ? open_resolved(ls, full, flags) : rc;
}

/* Where a path leads, without opening it: fifos and devices notice nothing. */
static int stat_target(const struct local_store *ls, const char *path, int flags,
                       struct stat *st)
{
    CLEANUP_FD int fd = local_fd(ls, path, O_PATH | flags);

    if (fd < 0)
        return fd;
    return fstat(fd, st) < 0 ? -errno : 0;
}

static void entry_from(const struct stat *st, struct entry_stat *out)
{
    out->kind = S_ISREG(st->st_mode)   ? ENTRY_FILE
                : S_ISDIR(st->st_mode) ? ENTRY_DIR
                                       : ENTRY_OTHER;
    out->mode = st->st_mode & 07777;
    out->uid = st->st_uid;
    out->gid = st->st_gid;
    out->id = file_id_of(st);
    out->atime_ns = st->st_atim.tv_sec * INT64_C(1000000000) + st->st_atim.tv_nsec;
}

/* Completes an entry from its lstat: a link counts as what it leads to, if it does. */
static void entry_of(const struct local_store *ls, const char *path,
                     const struct stat *lst, struct entry_stat *out)
{
    struct stat st;

    entry_from(lst, out);
    out->is_link = S_ISLNK(lst->st_mode);
    if (out->is_link && stat_target(ls, path, 0, &st) == 0)
        entry_from(&st, out);
}

static int local_stat(struct store *s, const char *path, struct entry_stat *out,
                      struct err *e)
{
    struct local_store *ls = local_of(s);
    struct stat st;
    int rc = stat_target(ls, path, O_NOFOLLOW, &st);

    source_note_trouble(rc);
    if (rc < 0)
        return local_fail(ls, path, rc, e);
    entry_of(ls, path, &st, out);
    return 0;
}

static int add_entry(struct local_store *ls, int dir, const char *name,
                     struct listing *l, struct err *e)
{
    struct entry_stat entry = {.kind = ENTRY_OTHER};
    char path[PATH_MAX] = "";
    struct stat st;

    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0) {
        entry_from(&st, &entry);
        if (S_ISLNK(st.st_mode)) {
            entry.is_link = true;
            if (store_join(listing_path(l), name, path, sizeof path) == 0)
                entry_of(ls, path, &st, &entry);
        }
    } else if (errno == ENOENT) {
        return 0; /* gone since readdir */
    } else if (errno == EACCES) {
        return err_set(e, EACCES, "%s: its entries cannot be looked at: %s", name,
                       strerror(EACCES));
    } /* else one broken entry, which must not hide the others */
    return listing_add(l, name, &entry, NULL, 0, e);
}

static int add_entries(struct local_store *ls, DIR *dir, struct listing *l,
                       struct err *e)
{
    const char *name;
    int rc = 0, more = 0;

    while (rc == 0 && (more = dir_next(dir, &name)) > 0)
        rc = add_entry(ls, dirfd(dir), name, l, e);
    return rc == 0 && more < 0
               ? err_set(e, -more, "read directory: %s", strerror(-more))
               : rc;
}

static void closedirp(DIR **dir)
{
    if (*dir)
        closedir(*dir);
}

static int local_list(struct store *s, const char *path, struct listing **out,
                      struct err *e)
{
    struct local_store *ls = local_of(s);
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP(closedirp) DIR *dir = NULL;
    CLEANUP_FD int fd = -1;

    TRY(interrupt_check_late(e));
    fd = local_fd(ls, path, O_RDONLY | O_DIRECTORY);
    if (fd < 0)
        return local_fail(ls, path, fd, e);
    dir = fdopendir(fd);
    if (!dir)
        return local_fail(ls, path, -errno, e);
    steal_fd(&fd);
    if (listing_new(s, path, &l, e) < 0 || add_entries(ls, dir, l, e) < 0)
        return err_wrap(e, "%s", shown(ls, path));
    listing_sort(l);
    *out = steal(&l);
    return 0;
}

static const char *kind_word(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFDIR:
        return "a directory";
    case S_IFIFO:
        return "a fifo";
    case S_IFSOCK:
        return "a socket";
    case S_IFCHR:
    case S_IFBLK:
        return "a device";
    default:
        return "something else";
    }
}

static int refuse_kind(const char *name, mode_t mode, struct err *e)
{
    return err_set(e, EINVAL, "%s: is %s, not a regular file", name, kind_word(mode));
}

/*
 * Looked at before it is opened: opening a fifo wakes its writers and opening a device
 * may do anything. What took its name in between is refused by source_from_fd().
 */
static int open_regular(struct store *s, const char *path, struct source **out,
                        struct err *e)
{
    struct local_store *ls = local_of(s);
    CLEANUP_FD int fd = -1;
    struct stat st;
    int rc = stat_target(ls, path, 0, &st);

    if (rc < 0)
        return local_fail(ls, path, rc, e);
    if (!S_ISREG(st.st_mode))
        return refuse_kind(shown(ls, path), st.st_mode, e);
    fd = local_fd(ls, path, O_RDONLY);
    if (fd < 0)
        return local_fail(ls, path, fd, e);
    if (fcntl(fd, F_SETFL, 0) < 0) /* open_below() set O_NONBLOCK */
        return local_fail(ls, path, -errno, e);
    return source_from_fd(steal_fd(&fd), shown(ls, path), out, e);
}

static int local_open(struct store *s, const char *path, struct source **out,
                      struct err *e)
{
    int rc = interrupt_check_late(e);

    if (rc == 0)
        rc = open_regular(s, path, out, e);

    source_note_trouble(rc);
    return rc;
}

/* As open(2) would decide, for the user that this thread is in files (fsuid). */
static int thread_may_read(const struct local_store *ls, const char *path, int fd)
{
    CLEANUP_FD int opened = -1;

    if (syscall(SYS_faccessat2, fd, "", R_OK, AT_EACCESS | AT_EMPTY_PATH) == 0)
        return 0;
    if (errno != ENOSYS) /* before Linux 5.8 */
        return -errno;
    opened = local_fd(ls, path, O_RDONLY);
    return MIN(opened, 0);
}

static int access_fd(const struct local_store *ls, const char *path,
                     const struct access_by *by)
{
    char full[PATH_MAX];
    int rc;

    if (!by)
        return local_fd(ls, path, O_PATH);
    rc = below_anchor(ls, path, full);
    return rc < 0 ? rc : access_walk(&ls->anchor, full, ls->follow, by);
}

static int local_readable(struct store *s, const char *path, const struct access_by *by,
                          struct file_id *id, struct err *e)
{
    const struct local_store *ls = local_of(s);
    CLEANUP_FD int fd = access_fd(ls, path, by);
    struct stat st;
    int rc = fd < 0 ? fd : fstat(fd, &st) < 0 ? -errno : 0;

    if (rc == 0 && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
        return refuse_kind(shown(ls, path), st.st_mode, e);
    if (rc == 0 && by)
        rc = access_granted(fd, &st, by, 4) ? 0 : -EACCES;
    else if (rc == 0)
        rc = thread_may_read(ls, path, fd);
    if (rc < 0)
        return local_fail(ls, path, rc, e);
    *id = file_id_of(&st);
    return 0;
}

/* Is this link's own text fit to be shown: relative and never upwards? */
static bool text_is_plain(const char *text)
{
    return text[0] != '\0' && !path_climbs(text);
}

/* What stands of an anchor's path below the root, or NULL when it is not there. */
static const char *below_root(const struct local_store *ls, const char *path)
{
    size_t len = strlen(ls->prefix);

    if (len == 0)
        return path;
    if (strncmp(path, ls->prefix, len) != 0 || (path[len] && path[len] != '/'))
        return NULL;
    return path + len + (path[len] == '/');
}

/* The text that leads from the link's real directory to its real target. */
static int resolved_text(const struct local_store *ls, const char *path, char *dst,
                         size_t size)
{
    char full[PATH_MAX], link[PATH_MAX], target[PATH_MAX];
    const char *from, *to;
    char *slash;
    int rc = below_anchor(ls, path, full);

    if (rc == 0)
        rc = resolve_below(&ls->anchor, full, true, link, sizeof link);
    if (rc == 0)
        rc = resolve_below(&ls->anchor, full, false, target, sizeof target);
    if (rc < 0)
        return rc;
    slash = strrchr(link, '/');
    *(slash ? slash : link) = '\0';
    from = below_root(ls, link);
    to = below_root(ls, target);
    return from && to ? relative_path(from, to, dst, size) : -EXDEV;
}

static int raw_text(const struct local_store *ls, const char *path, char text[PATH_MAX])
{
    CLEANUP_FD int fd = local_fd(ls, path, O_PATH | O_NOFOLLOW);
    ssize_t len;

    if (fd < 0)
        return fd;
    len = readlinkat(fd, "", text, PATH_MAX - 1);
    if (len < 0)
        return errno == ENOENT ? -EINVAL : -errno; /* not a link */
    text[len] = '\0';
    return 0;
}

static int local_readlink(struct store *s, const char *path, char *dst, size_t size,
                          struct err *e)
{
    struct local_store *ls = local_of(s);
    char raw[PATH_MAX], text[PATH_MAX];
    struct stat st;
    int rc = raw_text(ls, path, raw);

    if (rc == 0)
        rc = resolved_text(ls, path, text, sizeof text);
    if (rc == 0)
        rc = stat_target(ls, path, 0, &st);
    if (rc == 0 && !S_ISDIR(st.st_mode))
        rc = -ENOTDIR;
    if (rc == 0) {
        const char *best = text_is_plain(raw) ? raw : text;

        if (strlen(best) < size)
            memcpy(dst, best, strlen(best) + 1);
        else
            rc = -ENAMETOOLONG;
    }
    return rc < 0 ? local_fail(ls, path, rc, e) : 0;
}

static void local_follow(struct store *s)
{
    struct local_store *ls = local_of(s);
    CLEANUP_FD int fd = -1;

    if (!ls->on.id)
        mounted_on_init(&ls->on, ls->anchor.fd);
    if (!mounted_on_changed(&ls->on) || (!is_lost(ls) && mounted_on_lasts(&ls->on)))
        return;
    if (!is_lost(ls))
        atomic_fetch_add(&s->moves, 1);
    fd = open(ls->anchor.path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || !mounted_on_move(&ls->on, fd) ||
        dup3(fd, ls->anchor.fd, O_CLOEXEC) < 0)
        return;
    atomic_fetch_add(&s->moves, 1);
}

static void local_close(struct store *s)
{
    struct local_store *ls = local_of(s);

    mounted_on_release(&ls->on);
    if (ls->anchor.fd >= 0)
        close(ls->anchor.fd);
    free(ls->anchor.path);
    free(ls->anchor.alias);
    free(ls->prefix);
    free(ls);
}

static const struct store_ops local_ops = {
    .name = "local",
    .stat = local_stat,
    .list = local_list,
    .open = local_open,
    .readlink = local_readlink,
    .follow = local_follow,
    .readable = local_readable,
    .close = local_close,
};

static bool has_prefix(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/*
 * How long the part of an absolute path is that links must not leave. A snapshot of a
 * Hugging Face cache is all links to ../../blobs/HASH, so there it ends behind the
 * models--ORG--NAME above it; else it is the whole path.
 */
static size_t anchor_len(const char *path)
{
    static const char snapshots[] = "/snapshots"; /* itself, or below */
    size_t found = strlen(path), len;

    for (const char *p = path; *p; p += len) {
        p += strspn(p, "/");
        len = strcspn(p, "/");
        if ((has_prefix(p, "models--") || has_prefix(p, "datasets--") ||
             has_prefix(p, "spaces--")) &&
            has_prefix(p + len, snapshots) && strchr("/", p[len + strlen(snapshots)]))
            found = (size_t)(p + len - path);
    }
    return found;
}

/* The user's own spelling of the root, where absolute links may use it. */
static char *alias_of(const char *given, const char *real)
{
    size_t len = strlen(given);

    while (len > 1 && given[len - 1] == '/')
        len--;
    if (given[0] != '/' || (strlen(real) == len && memcmp(given, real, len) == 0))
        return NULL;
    return strndup(given, len);
}

/* Opens the anchor of the directory `dir` (absolute, without links). */
static int anchor_open(struct local_store *ls, const char *dir, const char *given,
                       struct err *e)
{
    size_t len = anchor_len(dir);
    const char *prefix = dir + len + (dir[len] == '/');

    ls->anchor.path = strndup(dir, len);
    ls->prefix = strdup(prefix);
    if (!ls->anchor.path || !ls->prefix)
        return err_nomem(e);
    if (prefix[0] == '\0')
        ls->anchor.alias = alias_of(given, dir);
    ls->anchor.fd = open(ls->anchor.path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (ls->anchor.fd < 0)
        return err_set(e, errno, "%s: %s", ls->anchor.path, strerror(errno));
    return 0;
}

static int name_store(struct local_store *ls, const char *dir, struct err *e)
{
    const char *file = ls->base.file;
    const char *slash = file && strcmp(dir, "/") != 0 ? "/" : "";
    struct stat st;
    int rc = stat_target(ls, "", O_DIRECTORY, &st);

    if (rc < 0)
        return err_set(e, -rc, "%s: %s", dir, strerror(-rc));
    if (asprintf(&ls->base.url, "%s%s%s", dir, slash, file ? file : "") < 0) {
        ls->base.url = NULL;
        return err_nomem(e);
    }
    if (asprintf(&ls->base.identity, "local:%ju:%ju:%s", (uintmax_t)st.st_dev,
                 (uintmax_t)st.st_ino, ls->base.url) < 0) {
        ls->base.identity = NULL;
        return err_nomem(e);
    }
    return 0;
}

static int open_dir(struct local_store *ls, const char *path, struct err *e)
{
    CLEANUP_FREE char *real = realpath(path, NULL);

    if (!real)
        return err_set(e, errno, "%s: %s", path, strerror(errno));
    TRY(anchor_open(ls, real, path, e));
    return name_store(ls, real, e);
}

/* Splits "/a/b/c" in "/a/b" and "c"; what has no slash lies in ".". */
static int split_path(const char *path, char **dir, char **file)
{
    const char *slash = strrchr(path, '/');

    if (!slash)
        *dir = strdup(".");
    else
        *dir = slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
    *file = strdup(slash ? slash + 1 : path);
    return *dir && *file ? 0 : -ENOMEM;
}

/* A file's source is the file's directory, so that its name stays as it was given. */
static int open_in_dir(struct local_store *ls, const char *path, struct err *e)
{
    CLEANUP_FREE char *dir = NULL;
    CLEANUP_FREE char *real = NULL;

    if (split_path(path, &dir, &ls->base.file) < 0)
        return err_nomem(e);
    real = realpath(dir, NULL);
    if (!real)
        return err_set(e, errno, "%s: %s", dir, strerror(errno));
    TRY(anchor_open(ls, real, dir, e));
    return name_store(ls, real, e);
}

static void local_reset(struct local_store *ls)
{
    bool follow = ls->follow;

    free(ls->base.url);
    free(ls->base.file);
    free(ls->base.identity);
    free(ls->anchor.path);
    free(ls->anchor.alias);
    free(ls->prefix);
    if (ls->anchor.fd >= 0)
        close(ls->anchor.fd);
    *ls = (struct local_store){.base.ops = &local_ops, .anchor.fd = -1, .on.table = -1};
    ls->follow = follow;
}

/* A link that was named outright is meant: when it leaves its directory, so do we. */
static int open_file(struct local_store *ls, const char *path, struct err *e)
{
    CLEANUP_FREE char *real = NULL;
    struct stat st;
    int rc = open_in_dir(ls, path, e);

    if (rc < 0 || stat_target(ls, ls->base.file, 0, &st) == 0)
        return rc;
    real = realpath(path, NULL);
    if (!real)
        return err_set(e, errno, "%s: %s", path, strerror(errno));
    local_reset(ls);
    return open_in_dir(ls, real, e);
}

static void local_closep(struct local_store **ls)
{
    if (*ls)
        store_close(&(*ls)->base);
}

/*
 * A checkpoint of a file in each of several subdirectories (format_set of
 * index/formats/format.h) is called as if that file lay in their directory: is there one
 * that has it? All that are known end in .ckpt.
 */
static bool is_set(const char *path)
{
    CLEANUP_FREE char *dir = NULL;
    CLEANUP_FREE char *file = NULL;
    size_t len = strlen(path);
    char below[PATH_MAX];
    struct stat st;
    bool found = false, named = len > 5 && strcmp(path + len - 5, ".ckpt") == 0;
    DIR *d = named && split_path(path, &dir, &file) == 0 ? opendir(dir) : NULL;

    for (struct dirent *x; d && !found && (x = readdir(d)) != NULL;)
        found = x->d_name[0] != '.' &&
                (size_t)snprintf(below, sizeof below, "%s/%s", x->d_name, file) <
                    sizeof below &&
                fstatat(dirfd(d), below, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
                S_ISREG(st.st_mode);
    if (d)
        closedir(d);
    return found;
}

int store_open_local(const char *path, const struct store_options *options,
                     struct store **out, struct err *e)
{
    CLEANUP(local_closep) struct local_store *ls = calloc(1, sizeof *ls);
    struct stat st;
    int rc;

    if (!ls)
        return err_nomem(e);
    ls->base.ops = &local_ops;
    ls->anchor.fd = -1;
    ls->on.table = -1;
    ls->follow = options && options->follow_symlinks;
    rc = stat(path, &st) < 0 ? errno : 0;
    if (rc != 0)
        rc = rc == ENOENT && is_set(path)
                 ? open_in_dir(ls, path, e)
                 : err_set(e, rc, "%s: %s", path, strerror(rc));
    else if (S_ISDIR(st.st_mode))
        rc = open_dir(ls, path, e);
    else if (S_ISREG(st.st_mode))
        rc = open_file(ls, path, e);
    else
        rc = err_set(e, EINVAL, "%s: is %s, not a directory or regular file", path,
                     kind_word(st.st_mode));
    if (rc < 0)
        return rc;
    return archives_over(&steal(&ls)->base, out, e);
}
