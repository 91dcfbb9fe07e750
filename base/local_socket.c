/* SPDX-License-Identifier: MIT */
/* base/local_socket.c - who may call, how names are found, how descriptors travel. */
#include "base/local_socket.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include "base/err.h"

enum { BACKLOG = 64, FDS_MAX = 4 };

/* ---- names ---- */

static bool is_ours_alone(const char *path)
{
    struct stat st;

    return lstat(path, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == geteuid() &&
           !(st.st_mode & 077);
}

int local_socket_dir(const char *fallback, struct buf *out, struct err *e)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    size_t before = out->len;

    if (runtime && runtime[0] == '/' && is_ours_alone(runtime)) {
        buf_addf(out, "%s/unshardfs", runtime);
        if (buf_failed(out) < 0)
            return err_nomem(e);
        if ((mkdir(out->data, 0700) == 0 || errno == EEXIST) &&
            is_ours_alone(out->data))
            return 0;
        out->len = before;
    }
    if (!fallback)
        return err_set(e, ENOENT, "no directory for a socket");
    return buf_adds(out, fallback) < 0 ? err_nomem(e) : 0;
}

/*
 * The address of a path. Names that do not fit are found through the open directory,
 * which *dir keeps.
 */
static int address_of(const char *path, struct sockaddr_un *out, int *dir)
{
    const char *slash = strrchr(path, '/');
    char folder[PATH_MAX];
    int n;

    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    *dir = -1;
    if (strlen(path) < sizeof out->sun_path) {
        memcpy(out->sun_path, path, strlen(path) + 1);
        return 0;
    }
    if (!slash || slash == path || (size_t)(slash - path) >= sizeof folder)
        return -ENAMETOOLONG;
    memcpy(folder, path, (size_t)(slash - path));
    folder[slash - path] = '\0';
    *dir = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (*dir < 0)
        return -errno;
    n = snprintf(out->sun_path, sizeof out->sun_path, "/proc/self/fd/%d%s", *dir,
                 slash);
    return n < (int)sizeof out->sun_path ? 0 : -ENAMETOOLONG;
}

static int connect_to(int fd, const char *path)
{
    struct sockaddr_un to;
    CLEANUP_FD int dir = -1;
    int rc = address_of(path, &to, &dir);

    if (rc == 0 && connect(fd, (const struct sockaddr *)&to, sizeof to) < 0)
        rc = -errno;
    return rc;
}

/* Is it a socket that nobody listens at any more? */
static bool is_left_over(const char *path)
{
    CLEANUP_FD int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct stat st;

    return lstat(path, &st) == 0 && S_ISSOCK(st.st_mode) && st.st_uid == geteuid() &&
           fd >= 0 && connect_to(fd, path) == -ECONNREFUSED;
}

void local_sweep(const char *dir, const char *prefix)
{
    DIR *d = opendir(dir);
    const struct dirent *entry;

    while (d && (entry = readdir(d))) { /* NOLINT(concurrency-mt-unsafe): own stream */
        char path[PATH_MAX];
        size_t len = strlen(entry->d_name);

        if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0 || len < 5 ||
            strcmp(entry->d_name + len - 5, ".sock") != 0 ||
            snprintf(path, sizeof path, "%s/%s", dir, entry->d_name) >= PATH_MAX)
            continue;
        if (is_left_over(path))
            unlink(path);
    }
    if (d)
        closedir(d);
}

/* ---- both ends ---- */

int local_listen(const char *path, int *out, struct err *e)
{
    CLEANUP_FD int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CLEANUP_FD int dir = -1;
    struct sockaddr_un at;
    int rc = address_of(path, &at, &dir);

    if (is_left_over(path))
        unlink(path);
    if (rc == 0 && (fd < 0 || bind(fd, (const struct sockaddr *)&at, sizeof at) < 0 ||
                    chmod(path, 0600) < 0 || listen(fd, BACKLOG) < 0))
        rc = -errno;
    if (rc < 0)
        return err_set(e, -rc, "%s: %s", path, strerror(-rc));
    *out = steal_fd(&fd);
    return 0;
}

static bool is_friend(int fd)
{
    struct ucred peer;
    socklen_t len = sizeof peer;

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 &&
           (peer.uid == geteuid() || peer.uid == 0);
}

static bool set_patience(int fd, unsigned seconds)
{
    const struct timeval t = {.tv_sec = seconds};

    return setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t) == 0 &&
           setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t) == 0;
}

int local_accept(int listener, unsigned seconds, int *out)
{
    CLEANUP_FD int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

    if (fd < 0)
        return errno == EINVAL || errno == EBADF ? -EINVAL : -EAGAIN;
    if (!is_friend(fd) || !set_patience(fd, seconds))
        return -EAGAIN;
    *out = steal_fd(&fd);
    return 0;
}

int local_connect(const char *path, unsigned seconds, int *out, struct err *e)
{
    CLEANUP_FD int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int rc = fd < 0 ? -errno : 0;

    if (rc == 0 && !set_patience(fd, seconds))
        rc = -errno;
    if (rc == 0)
        rc = connect_to(fd, path);
    if (rc == 0 && !is_friend(fd))
        rc = -EPERM;
    if (rc < 0)
        return err_set(e, -rc, "%s: %s", path, strerror(-rc));
    *out = steal_fd(&fd);
    return 0;
}

/* ---- bytes and descriptors ---- */

int local_send(int fd, const void *data, size_t len, int passed)
{
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    size_t sent = 0;

    while (sent < len) {
        struct iovec iov = {(char *)(uintptr_t)data + sent, len - sent};
        struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
        ssize_t n;

        if (passed >= 0 && sent == 0) {
            struct cmsghdr *c = &control.align;

            m.msg_control = control.room;
            m.msg_controllen = sizeof control.room;
            *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof passed),
                                  .cmsg_level = SOL_SOCKET,
                                  .cmsg_type = SCM_RIGHTS};
            memcpy(CMSG_DATA(c), &passed, sizeof passed);
        }
        n = sendmsg(fd, &m, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR)
            return errno == EAGAIN ? -ETIMEDOUT : -errno;
        sent += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

/* Keeps the first descriptor if one is wanted, and none is there yet; closes the others. */
static void take_passed(struct msghdr *m, int *passed)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
        size_t n = 0;

        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
            n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (passed && *passed < 0)
                *passed = fd;
            else
                close(fd);
        }
    }
}

int local_receive(int fd, void *dst, size_t len, int *passed)
{
    union {
        char room[CMSG_SPACE(FDS_MAX * sizeof(int))];
        struct cmsghdr align;
    } control;
    size_t got = 0;

    if (passed)
        *passed = -1;
    while (got < len) {
        struct iovec iov = {(char *)dst + got, len - got};
        struct msghdr m = {.msg_iov = &iov,
                           .msg_iovlen = 1,
                           .msg_control = control.room,
                           .msg_controllen = sizeof control.room};
        ssize_t n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n == 0 ? -ECONNRESET : errno == EAGAIN ? -ETIMEDOUT : -errno;
        take_passed(&m, passed);
        got += (size_t)n;
    }
    return 0;
}
