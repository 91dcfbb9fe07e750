/* SPDX-License-Identifier: MIT */
/* fs/mounts.c - what is mounted where, and unmounting it. */
#include "fs/mounts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"
#include "fs/edit.h"
#include "fs/inuse.h"
#include "fs/mount.h"
#include "save/save_format.h"

enum {
    LINE_BYTES = 16 * PATH_MAX, /* of the table: two paths, escaped, and options */
    GONE_TRIES = 200,           /* 10 s for a mount to leave the table */
    GONE_WAIT_NS = 50000000,
    BUSY_TRIES = 8, /* two seconds */
    BUSY_WAIT_NS = 250000000,
    BELOW_TRIES = 250, /* five seconds */
    BELOW_WAIT_NS = 20000000,
    BELOW_ROUNDS = 64,    /* mounts at one point, over each other */
    WHY_BYTES = 1024,     /* of what fusermount3 says, the first line */
    READ_AHEAD_KB = 1024, /* the largest request that the kernel makes (decision 020) */
};

#define FUSERMOUNT "fusermount3"

static const char table_path[] = "/proc/self/mountinfo";

/* ---- the kernel's table ---- */

/* Undoes the octal escapes of a field. */
static void unescape(char *text)
{
    char *to = text;

    for (const char *from = text; *from; to++) {
        unsigned value;

        if (from[0] == '\\' && sscanf(from + 1, "%3o", &value) == 1) {
            *to = (char)value;
            from += 4;
        } else {
            *to = *from++;
        }
    }
    *to = '\0';
}

struct mount_line {
    const char *point, *type;
    uint64_t device;
    int id, parent;
};

/* Takes one line apart (man 5 proc_pid_mountinfo). */
static bool parse_line(char *line, struct mount_line *out)
{
    char *dash = strstr(line, " - "), *save = NULL, *field = NULL;
    unsigned major, minor;

    if (!dash)
        return false;
    out->type = dash + 3;
    dash[3 + strcspn(dash + 3, " ")] = '\0';
    *dash = '\0';
    for (int i = 0; i < 5; i++) { /* id, parent, major:minor, root, mount point */
        field = strtok_r(i ? NULL : line, " ", &save);
        if (!field || (i == 2 && sscanf(field, "%u:%u", &major, &minor) != 2))
            return false;
        if (i < 2)
            *(i == 0 ? &out->id : &out->parent) = atoi(field);
        if (i == 2)
            out->device = makedev(major, minor);
    }
    unescape(field);
    out->point = field;
    return true;
}

/* What was read of it. No memory is taken: a mount ends where none is left as well. */
struct table {
    int fd;
    size_t at, len;
    char text[LINE_BYTES];
};

/* The next line, without its end, until the next call; NULL: none, or it is no table. */
static char *next_line(struct table *t)
{
    char *line, *end;
    ssize_t n;

    while (!(end = memchr(t->text + t->at, '\n', t->len - t->at))) {
        memmove(t->text, t->text + t->at, t->len - t->at);
        t->len -= t->at;
        t->at = 0;
        n = read(t->fd, t->text + t->len, sizeof t->text - t->len);
        if (n <= 0)
            return NULL;
        t->len += (size_t)n;
    }
    *end = '\0';
    line = t->text + t->at;
    t->at = (size_t)(end + 1 - t->text);
    return line;
}

uint64_t mounts_ours(const char *path)
{
    CLEANUP_FD int fd = open(table_path, O_RDONLY | O_CLOEXEC);
    struct table t = {.fd = fd};
    struct mount_line m;
    uint64_t ours = 0;
    char *line;

    if (fd < 0)
        return 0;
    while ((line = next_line(&t))) /* later lines lie on top of earlier ones */
        if (parse_line(line, &m) && strcmp(m.point, path) == 0)
            ours = strcmp(m.type, MOUNT_TYPE) == 0 ? m.device : 0;
    return ours;
}

/*
 * Only the directory above is resolved: looking at the mount point itself would wait
 * for a server that hangs, and fail where it died.
 */
int mounts_path(const char *mountpoint, char out[PATH_MAX], struct err *e)
{
    char above[PATH_MAX], real[PATH_MAX];
    size_t len = strlen(mountpoint);
    const char *name;
    char *slash;

    while (len > 1 && mountpoint[len - 1] == '/')
        len--;
    if (len == 0 || len >= sizeof above)
        return err_set(e, len ? ENAMETOOLONG : ENOENT, "%s: no such directory",
                       mountpoint);
    memcpy(above, mountpoint, len);
    above[len] = '\0';
    slash = strrchr(above, '/');
    name = slash ? slash + 1 : above;
    if (*name == '\0' || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        if (realpath(mountpoint, out))
            return 0;
        return err_set(e, errno, "%s: %s", mountpoint, strerror(errno));
    }
    if (slash)
        *slash = '\0';
    if (!realpath(!slash ? "." : slash == above ? "/" : above, real))
        return err_set(e, errno, "%s: %s", mountpoint, strerror(errno));
    if (snprintf(out, PATH_MAX, "%s/%s", strcmp(real, "/") == 0 ? "" : real, name) >=
        PATH_MAX)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", mountpoint);
    return 0;
}

/* ---- before mounting ---- */

/* Does /etc/fuse.conf let users share their mounts? */
static bool users_may_share(void)
{
    char *line = NULL;
    size_t cap = 0;
    bool may = false;
    FILE *f = fopen("/etc/fuse.conf", "re");

    if (!f)
        return false;
    while (!may && getline(&line, &cap, f) > 0) {
        char *word = line + strspn(line, " \t");

        word[strcspn(word, " \t\r\n")] = '\0';
        may = strcmp(word, "user_allow_other") == 0;
    }
    free(line);
    fclose(f);
    return may;
}

static bool lies_within(const char *path, const char *dir)
{
    size_t len = strlen(dir);

    if (strcmp(dir, "/") == 0)
        return path[1] != '\0';
    return strncmp(path, dir, len) == 0 && path[len] == '/';
}

static int check_directory(const char *path, struct err *e)
{
    struct stat st;

    if (mounts_ours(path)) {
        err_set(e, EBUSY, "%s: unshardfs is mounted there already", path);
        return err_hint(e, "unshard umount %s", path);
    }
    if (stat(path, &st) < 0) {
        err_set(e, errno, "%s: %s", path, strerror(errno));
        return errno == ENOENT ? err_hint(e, "mkdir %s", path) : -e->code;
    }
    if (!S_ISDIR(st.st_mode)) {
        err_set(e, ENOTDIR, "%s: a mount point must be a directory, this is a file",
                path);
        return err_hint(e, "mkdir another");
    }
    return 0;
}

/* As libfuse looks for it: where Debian has it, then in PATH. */
static bool has_fusermount(void)
{
    CLEANUP_FREE char *path = strdup(getenv("PATH") ? getenv("PATH") : "");
    char *rest = path, *dir, name[PATH_MAX];

    if (access("/usr/bin/" FUSERMOUNT, X_OK) == 0)
        return true;
    while (rest && (dir = strsep(&rest, ":")))
        if (snprintf(name, sizeof name, "%s/" FUSERMOUNT, dir) < PATH_MAX &&
            access(name, X_OK) == 0)
            return true;
    return false;
}

static int no_fusermount(struct err *e)
{
    err_set(e, ENOENT, FUSERMOUNT ": not in PATH, and only root can do without");
    return err_hint(e, "install fuse3");
}

static int check_fuse(struct err *e)
{
    CLEANUP_FD int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

    if (fd < 0) {
        err_set(e, errno, "/dev/fuse: %s", strerror(errno));
        return err_hint(e, e->code == EACCES || e->code == EPERM
                               ? "chmod 0666 /dev/fuse, as root; all but mount works "
                                 "without it"
                               : "modprobe fuse; in a container: --device /dev/fuse "
                                 "--cap-add SYS_ADMIN; all but mount works without it");
    }
    return geteuid() == 0 || has_fusermount() ? 0 : no_fusermount(e);
}

/*
 * What is written goes to the source by its path. Where that leads to the mount, each change
 * would wait for itself.
 */
static int check_source(const char *source, const char *mountpoint, bool rw,
                        struct err *e)
{
    char real[PATH_MAX];

    if (!realpath(source, real))
        return 0;
    if (lies_within(mountpoint, real)) {
        err_set(e, EINVAL, "%s: lies within the source %s, which would show itself",
                mountpoint, real);
        return err_hint(e, "mount it outside of the source");
    }
    if (rw && (strcmp(real, mountpoint) == 0 || lies_within(real, mountpoint))) {
        err_set(e, EINVAL, "%s: -o rw: a mount over its own source cannot save to it",
                mountpoint);
        return err_hint(e, "mount it elsewhere");
    }
    return 0;
}

int mounts_check(const char *source, const char *mountpoint, bool rw, bool allow_other,
                 char out[PATH_MAX], struct err *e)
{
    char real[PATH_MAX];
    int rc = mounts_path(mountpoint, out, e);

    if (rc == 0)
        rc = check_directory(out, e);
    if (rc < 0)
        return rc;
    /* The mount point itself may be a link: what is mounted on is its target. */
    if (realpath(out, real))
        memcpy(out, real, strlen(real) + 1);
    rc = check_directory(out, e);
    if (rc == 0)
        rc = check_source(source, out, rw, e);
    if (rc < 0)
        return rc;
    if (allow_other && geteuid() != 0 && !users_may_share()) {
        err_set(e, EPERM, "-o allow_other: only root may share a mount with others");
        return err_hint(e, "add the line user_allow_other to /etc/fuse.conf");
    }
    return check_fuse(e);
}

/* ---- unmounting ---- */

/*
 * fusermount3 is setuid and lets users unmount what is theirs. No shell. What it complains of
 * goes to the file `said` (-1: nowhere).
 */
static int run_fusermount(const char *path, bool lazy, int said)
{
    int status;
    pid_t pid = fork();

    if (pid < 0)
        return -errno;
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        char program[] = FUSERMOUNT, unmount[] = "-u", detach[] = "-uz";
        char end[] = "--";
        char *args[] = {program, lazy ? detach : unmount, end, (char *)(uintptr_t)path,
                        NULL};

        if (null >= 0) {
            dup2(null, 0);
            dup2(null, 1);
            dup2(said >= 0 ? said : null, 2);
        }
        execvp(program, args);
        _exit(127);
    }
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -errno;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        return -ENOENT;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -EBUSY;
}

void mounts_read_ahead(uint64_t device)
{
    char path[64];
    FILE *f;

    snprintf(path, sizeof path, "/sys/class/bdi/%u:%u/read_ahead_kb",
             major((dev_t)device), minor((dev_t)device));
    f = fopen(path, "we");
    if (!f)
        return;
    fprintf(f, "%d\n", READ_AHEAD_KB);
    fclose(f);
}

void mounts_detach(const char *path, uint64_t device)
{
    if (!device || mounts_ours(path) != device)
        return; /* unmounted already; what is there now is not this one */
    if (umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW) < 0)
        run_fusermount(path, true, -1);
}

/* ---- what is mounted within ours ---- */

/* The next that is mounted within the topmost mount at `path`; *ours is 0 at first. */
static bool next_below(struct table *t, const char *path, int *ours,
                       struct mount_line *out)
{
    char *line;

    while (t->fd >= 0 && (line = next_line(t))) {
        if (!parse_line(line, out))
            continue;
        if (*ours && out->parent == *ours && strcmp(out->point, path) != 0)
            return true;
        if (strcmp(out->point, path) == 0)
            *ours = out->id;
    }
    return false;
}

bool mounts_are_below(const char *path, bool told)
{
    CLEANUP_FD int fd = open(table_path, O_RDONLY | O_CLOEXEC);
    struct table t = {.fd = fd};
    struct mount_line m;
    bool any = false;
    int ours = 0;

    while (next_below(&t, path, &ours, &m)) {
        if (told)
            log_msg(LOG_FS, LOG_WARN, "%s: the %s that is mounted there goes along",
                    m.point, m.type);
        any = true;
    }
    return any;
}

/* The first one, in a process that has nothing but this to do. False: there is none. */
static bool detach_one_below(const char *path)
{
    CLEANUP_FD int fd = open(table_path, O_RDONLY | O_CLOEXEC);
    struct table t = {.fd = fd};
    struct mount_line m;
    int ours = 0;

    return next_below(&t, path, &ours, &m) &&
           umount2(m.point, MNT_DETACH | UMOUNT_NOFOLLOW) == 0;
}

bool mounts_detach_below(const char *path)
{
    const struct timespec wait = {.tv_nsec = BELOW_WAIT_NS};
    pid_t pid = fork(), ended = 0;

    if (pid == 0) {
        /* The connection above all: it ends with the last who has it. */
        if (close_range(0, ~0u, 0) < 0)
            _exit(1);
        for (int i = 0; i < BELOW_ROUNDS && detach_one_below(path); i++)
            ;
        _exit(0);
    }
    for (int i = 0; pid > 0 && i < BELOW_TRIES; i++) {
        ended = waitpid(pid, NULL, WNOHANG);
        if (ended == pid || (ended < 0 && errno != EINTR))
            break;
        nanosleep(&wait, NULL);
    }
    return pid > 0 && ended == pid;
}

/* ---- unmounting, for the command ---- */

static int unmount_once(const char *path, char why[WHY_BYTES])
{
    CLEANUP_FD int said = -1;
    ssize_t n;
    int rc;

    why[0] = '\0';
    if (umount2(path, UMOUNT_NOFOLLOW) == 0)
        return 0;
    if (errno != EPERM)
        return -errno;
    said = memfd_create("said", MFD_CLOEXEC);
    rc = run_fusermount(path, false, said);
    n = pread(said, why, WHY_BYTES - 1, 0);
    why[MAX(n, (ssize_t)0)] = '\0';
    why[strcspn(why, "\n")] = '\0';
    return rc;
}

/*
 * It may be busy for a moment only: a program that has ended, and of which the kernel has not
 * put away all yet, or that makes a mount namespace. `why`: what fusermount3 says of it, or "".
 */
static int unmount(const char *path, char why[WHY_BYTES])
{
    const struct timespec wait = {.tv_nsec = BUSY_WAIT_NS};
    int rc = unmount_once(path, why);

    for (int i = 0; rc == -EBUSY && i < BUSY_TRIES; i++) {
        nanosleep(&wait, NULL);
        rc = unmount_once(path, why);
    }
    return rc;
}

/* Is it in use by what is mounted in it? */
static int name_below(const char *path, struct err *e)
{
    CLEANUP_FD int fd = open(table_path, O_RDONLY | O_CLOEXEC);
    struct table t = {.fd = fd};
    struct mount_line m;
    int ours = 0;

    if (!next_below(&t, path, &ours, &m))
        return 0;
    err_set(e, EBUSY, "%s: a file system is mounted in it, at %s", path, m.point);
    return err_hint(e, "umount %s", m.point);
}

static int unmount_failed(const char *path, int rc, const char *why, struct err *e)
{
    CLEANUP(buf_release) struct buf names = {0};
    size_t users;

    if (rc == -ENOENT)
        return no_fusermount(e);
    if (rc != -EBUSY)
        return err_set(e, -rc, "unmount %s: %s", path, strerror(-rc));
    if (name_below(path, e) < 0)
        return -e->code;
    users = inuse_list(path, &names);
    if (users > 0 && !buf_failed(&names)) {
        err_set(e, EBUSY, "%s: in use by %s%s", path, names.data,
                users > INUSE_NAMED ? ", and others" : "");
        return err_hint(e,
                        "fuser -vm %s shows what; fusermount3 -uz %s ends the mount "
                        "as soon as nobody uses it",
                        path, path);
    }
    names.len = 0;
    if (inuse_loops(path, &names) > 0 && !buf_failed(&names)) {
        err_set(e, EBUSY, "%s: in use by %s", path, names.data);
        return err_hint(e, "umount what is mounted of it, then losetup -d");
    }
    if (why[0])
        err_set(e, EBUSY, "unmount %s: %s", path, why);
    else
        err_set(e, EBUSY, "%s: a process has files open there", path);
    return err_hint(e, "try fuser -vm %s", path);
}

/*
 * Complete transactions are published before the mount goes, as long as there is somebody
 * to tell when that fails. A mount for reading only has the kernel say EROFS at once.
 */
static int publish_first(const char *path, struct err *e)
{
    char why[1200];
    ssize_t n;
    int code;

    if (setxattr(path, PUBLISH_ATTRIBUTE, "", 0, 0) == 0)
        return 0;
    code = errno;
    if (code == EROFS || code == ENOTSUP || code == ENOENT || code == ENOTCONN ||
        code == EACCES || code == EPERM)
        return 0; /* nothing is published there, or nobody can be asked */
    n = getxattr(path, PUBLISH_ATTRIBUTE, why, sizeof why - 1);
    why[MAX(n, (ssize_t)0)] = '\0';
    why[strcspn(why, "\n")] = '\0';
    err_set(e, code, "%s: not all that was written is published: %s", path,
            n > 0 ? why : strerror(code));
    return err_hint(e, "it is kept beside its checkpoint: see unshard doctor");
}

bool fs_publishing(const char *mountpoint, uint64_t *done, uint64_t *total)
{
    char text[64];
    ssize_t n = getxattr(mountpoint, PUBLISHING_ATTRIBUTE, text, sizeof text - 1);

    text[MAX(n, (ssize_t)0)] = '\0';
    return sscanf(text, "%" SCNu64 " %" SCNu64, done, total) == 2 && *total > 0;
}

/* Where ours are, to who looks for one. */
static int hint_mounts(struct err *e)
{
    CLEANUP(buf_release) struct buf list = {.max = 200};
    CLEANUP_FD int fd = open(table_path, O_RDONLY | O_CLOEXEC);
    struct table t = {.fd = fd};
    struct mount_line m;
    char *line;

    while (fd >= 0 && (line = next_line(&t)))
        if (parse_line(line, &m) && strcmp(m.type, MOUNT_TYPE) == 0)
            buf_addf(&list, "%s%s", list.len ? ", " : "", m.point);
    if (!list.len)
        return err_hint(e, "nothing of ours is mounted at all");
    return err_hint(e, "there are %s", list.data);
}

/* The path of a mount of ours, as the kernel has it. */
static int find_ours(const char *mountpoint, char path[PATH_MAX], struct err *e)
{
    char real[PATH_MAX];

    TRY(mounts_path(mountpoint, path, e));
    if (!mounts_ours(path) && realpath(path, real) && mounts_ours(real))
        memcpy(path, real, strlen(real) + 1); /* a link to the mount point */
    if (mounts_ours(path))
        return 0;
    err_set(e, EINVAL, "%s: no unshardfs is mounted there", path);
    return hint_mounts(e);
}

int mount_save_check(const char *text, struct err *e)
{
    struct save_format ignored;

    return save_format_parse(text, &ignored, e);
}

int fs_publish(const char *mountpoint, struct err *e)
{
    char path[PATH_MAX];
    int rc = find_ours(mountpoint, path, e);

    return rc < 0 ? rc : publish_first(path, e);
}

int fs_umount(const char *mountpoint, struct err *e)
{
    const struct timespec wait = {.tv_nsec = GONE_WAIT_NS};
    char path[PATH_MAX], why[WHY_BYTES];
    int rc = find_ours(mountpoint, path, e);

    if (rc < 0)
        return rc;
    rc = unmount(path, why);
    if (rc < 0)
        return unmount_failed(path, rc, why, e);
    for (int i = 0; i < GONE_TRIES; i++) {
        if (!mounts_ours(path))
            return 0;
        nanosleep(&wait, NULL);
    }
    return err_set(e, EBUSY, "%s: is still mounted", path);
}
