/* SPDX-License-Identifier: MIT */
/* index/catalog_list.c - the indexes in a cache directory: whose they are, how large. */
#include "index/catalog_list.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <sqlite3.h>

#include "base/err.h"

enum {
    PATIENCE_MS = 200, /* for who writes it just now */
    /* Each connection holds this byte of NAME-shm (sqlite 3.40, os_unix.c: UNIX_SHM_DMS). */
    SHM_CONNECTED = 128,
};

static const char *const suffixes[] = {"", "-journal", "-wal", "-shm"};

/* The name of an index: 32 hex digits and .sqlite. */
static bool is_index(const char *name)
{
    static const char hex[] = "0123456789abcdef";

    return strspn(name, hex) == 32 && strcmp(name + 32, ".sqlite") == 0;
}

static bool in_use(const char *path)
{
    struct flock l = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = SHM_CONNECTED, .l_len = 1};
    char shm[PATH_MAX];
    CLEANUP_FD int fd = -1;

    snprintf(shm, sizeof shm, "%s-shm", path);
    fd = open(shm, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    return fd >= 0 && fcntl(fd, F_GETLK, &l) == 0 && l.l_type != F_UNLCK;
}

/* "local:DEV:INO:PATH" or the identity of a remote store; what follows a newline is ours. */
static void cut_identity(const char *text, size_t len, char *dst, size_t size)
{
    const char *end = memchr(text, '\n', len), *colon = text;

    end = end ? end : text + len;
    if (len > 6 && memcmp(text, "local:", 6) == 0)
        for (int i = 0; i < 3 && colon; i++) {
            colon = memchr(text, ':', (size_t)(end - text));
            text = colon ? colon + 1 : text;
        }
    len = MIN((size_t)(end - text), size - 1);
    memcpy(dst, text, len);
    dst[len] = '\0';
}

/* False: it is damaged, or locked for long. */
static bool read_source(const char *path, char *dst, size_t size)
{
    sqlite3_stmt *q = NULL;
    sqlite3 *db = NULL;
    bool found = false;

    if (sqlite3_open_v2(path, &db, SQLITE_OPEN_READONLY | SQLITE_OPEN_NOFOLLOW, NULL) ==
            SQLITE_OK &&
        sqlite3_busy_timeout(db, PATIENCE_MS) == SQLITE_OK &&
        sqlite3_prepare_v2(db, "SELECT identity FROM source", -1, &q, NULL) ==
            SQLITE_OK &&
        sqlite3_step(q) == SQLITE_ROW && sqlite3_column_blob(q, 0)) {
        cut_identity(sqlite3_column_blob(q, 0), (size_t)sqlite3_column_bytes(q, 0), dst,
                     size);
        found = true;
    }
    sqlite3_finalize(q);
    sqlite3_close(db);
    return found;
}

static int tell_one(const char *dir, const char *name, catalog_list_fn *fn, void *user)
{
    struct catalog_listed l = {.name = name};
    char path[PATH_MAX], part[PATH_MAX + 16], source[PATH_MAX];
    struct stat st;

    if (snprintf(path, sizeof path, "%s/index/%s", dir, name) >= (int)sizeof path ||
        lstat(path, &st) < 0 || !S_ISREG(st.st_mode))
        return 0;
    l.in_use = in_use(path); /* before we open it ourselves */
    l.used = st.st_mtime;
    for (size_t i = 0; i < ARRAY_SIZE(suffixes); i++) {
        snprintf(part, sizeof part, "%s%s", path, suffixes[i]);
        if (lstat(part, &st) < 0)
            continue;
        l.bytes += (uint64_t)st.st_blocks * 512;
        l.used = MAX(l.used, st.st_mtime);
    }
    if (read_source(path, source, sizeof source))
        l.source = source;
    return fn(user, &l);
}

int catalog_list(const char *dir, catalog_list_fn *fn, void *user, struct err *e)
{
    char path[PATH_MAX];
    DIR *d;
    int rc = 0;

    snprintf(path, sizeof path, "%s/index", dir);
    d = opendir(path);
    if (!d && errno == ENOENT)
        return 0;
    if (!d)
        return err_set(e, errno, "%s: %s", path, strerror(errno));
    for (struct dirent *f; rc == 0 && (f = readdir(d));)
        if (is_index(f->d_name))
            rc = tell_one(dir, f->d_name, fn, user);
    closedir(d);
    return rc;
}

/* Who opens an index holds its lock file meanwhile: nobody begins to use it now. */
static int lock_index(const char *path, int *fd, struct err *e)
{
    char lock[PATH_MAX];
    size_t stem = strlen(path) - strlen("sqlite");

    snprintf(lock, sizeof lock, "%.*slock", (int)stem, path);
    *fd = open(lock, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (*fd < 0)
        return err_set(e, errno, "%s: %s", lock, strerror(errno));
    if (flock(*fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK)
        return err_set(e, EBUSY, "%s: a process is opening it", path);
    return 0;
}

int catalog_remove(const char *dir, const char *name, struct err *e)
{
    char path[PATH_MAX], part[PATH_MAX + 16];
    CLEANUP_FD int lock = -1;

    if (!is_index(name) ||
        snprintf(path, sizeof path, "%s/index/%s", dir, name) >= (int)sizeof path)
        return err_set(e, EINVAL, "%s: not the name of an index", name);
    TRY(lock_index(path, &lock, e));
    if (in_use(path))
        return err_set(e, EBUSY, "%s: a process has it open", path);
    /* The journals last: sqlite ignores those of a file that is not there. */
    for (size_t i = 0; i < ARRAY_SIZE(suffixes); i++) {
        snprintf(part, sizeof part, "%s%s", path, suffixes[i]);
        if (unlink(part) < 0 && errno != ENOENT)
            return err_set(e, errno, "delete %s: %s", part, strerror(errno));
    }
    return 0;
}
