/* SPDX-License-Identifier: MIT */
/* index/catalog_open.c - opens the file of an index or makes it anew; its connections. */
#include "index/catalog_open.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"
#include "index/catalog.h"
#include "index/catalog_conn.h"

#include <sqlite3.h>
#include <xxhash.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/vfs.h>

enum {
    MAX_IDLE = 8,             /* connections kept: more threads than that are rare */
    COMMIT_CACHE_KIB = 16384, /* of one that writes a scan, and then is closed */
    WAL_LARGE = 4 << 20,      /* bytes of journal that are cut after a commit */
};

const char *catalog_path(const struct catalog *c)
{
    return c->path;
}

const char *catalog_sqlite_version(void)
{
    return sqlite3_libversion();
}

bool catalog_in_memory(const struct catalog *c)
{
    return c->memory;
}

void catalog_mark_damaged(struct catalog *c)
{
    atomic_store(&c->damaged, true);
}

/*
 * Makes the file when it is not there: 0600, and not by sqlite, which takes the umask.
 * What is there is not opened: closing that would drop this process's locks on it.
 */
static int make_file(const char *path, struct stat *st, struct err *e)
{
    CLEANUP_FD int fd = -1;

    if (lstat(path, st) < 0 && errno == ENOENT) {
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0 || fstat(fd, st) < 0)
            return err_set(e, errno, "make index %s: %s", path, strerror(errno));
        return 0;
    }
    if (lstat(path, st) < 0)
        return err_set(e, errno, "index %s: %s", path, strerror(errno));
    if (!S_ISREG(st->st_mode) || (st->st_uid != geteuid() && geteuid() != 0))
        return err_set(e, EBADMSG, "index %s is no file of this user", path);
    return 0;
}

/* The journals last: sqlite ignores those of an empty file, but not of a damaged one. */
static int delete_files(const struct catalog *c, struct err *e)
{
    static const char *const suffixes[] = {"", "-journal", "-wal", "-shm"};
    char path[PATH_MAX];

    for (size_t i = 0; i < ARRAY_SIZE(suffixes); i++) {
        snprintf(path, sizeof path, "%s%s", c->path, suffixes[i]);
        if (remove(path) < 0 && errno != ENOENT)
            return err_set(e, errno, "delete %s: %s", path, strerror(errno));
    }
    return 0;
}

/* Connections to what is no longer the index go; those in use when they come back. */
static void forget_file(struct catalog *c)
{
    struct conn *next;

    for (struct conn *n = c->idle; n; n = next) {
        next = n->next;
        conn_close(n);
    }
    c->idle = NULL;
    c->nidle = 0;
    c->generation++;
    c->dev = 0;
    c->ino = 0;
}

static bool is_known(const struct catalog *c, const struct stat *st)
{
    return c->ino != 0 && st->st_dev == c->dev && st->st_ino == c->ino;
}

static int open_file(struct catalog *c, struct conn **out, struct err *e)
{
    struct conn *n = NULL;
    struct stat st;
    int rc = make_file(c->path, &st, e);

    if (rc == 0)
        rc = conn_open(c, c->path, &n, e);
    if (rc == 0)
        rc = is_known(c, &st) ? conn_configure(n, e) : conn_ready(n, &st, e);
    if (rc < 0) {
        conn_close(n);
        return rc;
    }
    if (!is_known(c, &st)) {
        forget_file(c);
        c->dev = st.st_dev;
        c->ino = st.st_ino;
    }
    n->generation = c->generation;
    *out = n;
    return 0;
}

/*
 * A damaged length in its schema makes sqlite ask for more memory than any machine has, each
 * time; where memory was only short, the second try has it. A file that others of us have
 * open has no such length: making it anew would take from them what they read.
 */
static int open_twice(struct catalog *c, struct conn **out, struct err *e)
{
    int rc = open_file(c, out, e);
    struct stat st;

    if (rc != -ENOMEM)
        return rc;
    *e = (struct err){0};
    rc = open_file(c, out, e);
    if (rc != -ENOMEM || (lstat(c->path, &st) == 0 && is_known(c, &st)))
        return rc;
    err_set(e, EBADMSG, "index %s cannot be used: there is not the memory for it",
            c->path);
    return err_hint(e, "it is made anew by itself");
}

static void log_anew(const struct err *why)
{
    char line[1400];

    log_msg(LOG_INDEX, LOG_WARN, "%s; making it anew",
            err_line(why, line, sizeof line));
}

/* With the lock file locked, and the mutex. */
static int open_or_make(struct catalog *c, struct conn **out, struct err *e)
{
    int rc = 0;

    if (atomic_load(&c->damaged)) {
        struct stat st;

        /* Another process may have replaced it already. */
        if (lstat(c->path, &st) == 0 && is_known(c, &st))
            rc = delete_files(c, e);
        forget_file(c);
        atomic_store(&c->damaged, false);
    }
    if (rc == 0)
        rc = open_twice(c, out, e);
    if (rc != -EBADMSG)
        return rc;
    log_anew(e);
    rc = delete_files(c, e);
    forget_file(c);
    atomic_store(&c->damaged, false);
    if (rc < 0)
        return rc;
    *e = (struct err){0};
    return open_file(c, out, e);
}

/* One process at a time looks at the file and may delete it. */
static int open_locked(struct catalog *c, struct conn **out, struct err *e)
{
    CLEANUP_FD int fd = open(c->lock, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    int rc;

    if (fd < 0) {
        err_set(e, errno, "make %s: %s", c->lock, strerror(errno));
        return err_hint(e, "choose another cache_dir=, or use index=memory");
    }
    do
        rc = flock(fd, LOCK_EX);
    while (rc < 0 && errno == EINTR);
    /* File systems without locks: then sqlite's own have to do. */
    return open_or_make(c, out, e);
}

static int open_memory(struct catalog *c, struct err *e)
{
    TRY(conn_open(c, ":memory:", &c->only, e));
    c->only->memory = true;
    return conn_ready(c->only, NULL, e);
}

static bool is_full(int rc)
{
    return rc == -ENOSPC || rc == -EDQUOT || rc == -EROFS || rc == -EFBIG;
}

/* Ids begin at random: those of the file mean nothing in memory (-ESTALE). */
bool catalog_leave_disk(struct catalog *c, int rc, const struct err *why)
{
    struct err e = {0};
    char line[1400];

    if (!is_full(rc))
        return false;
    pthread_mutex_lock(&c->mutex);
    if (!c->memory && open_memory(c, &e) == 0) {
        forget_file(c);
        c->memory = true;
        log_msg(LOG_INDEX, LOG_WARN, "the index goes on in memory: %s",
                err_line(why, line, sizeof line));
    } else if (!c->memory) {
        conn_close(steal(&c->only));
    }
    pthread_mutex_unlock(&c->mutex);
    return c->memory;
}

/* Who has it may take it again in a callback. */
static int take_memory(struct catalog *c, struct conn **out)
{
    pthread_mutex_lock(&c->memory_mutex);
    *out = c->only;
    c->only->depth++;
    return 0;
}

static void put_memory(struct conn *n)
{
    if (--n->depth == 0)
        conn_rollback(n);
    pthread_mutex_unlock(&n->catalog->memory_mutex);
}

static int take_file(struct catalog *c, bool dedicated, struct conn **out,
                     struct err *e)
{
    int rc;

    if (!atomic_load(&c->damaged) && !dedicated && c->idle) {
        *out = c->idle;
        c->idle = (*out)->next;
        c->nidle--;
        return 0;
    }
    rc = open_locked(c, out, e);
    if (rc == 0 && dedicated) {
        (*out)->generation = 0; /* the file's is never 0: not kept */
        rc = conn_set_int(*out, "cache_size", -COMMIT_CACHE_KIB, e);
    }
    return rc;
}

int conn_take(struct catalog *c, bool dedicated, struct conn **out, struct err *e)
{
    int rc;

    *out = NULL;
    if (c->memory)
        return take_memory(c, out);
    pthread_mutex_lock(&c->mutex);
    rc = take_file(c, dedicated, out, e);
    pthread_mutex_unlock(&c->mutex);
    if (rc == 0)
        return 0;
    conn_close(steal(out));
    if (!catalog_leave_disk(c, rc, e))
        return rc;
    *e = (struct err){0};
    return take_memory(c, out);
}

/*
 * A commit of a million tensors leaves a journal as large as they are. Readers that are
 * still using it are not waited for: the next commit then finds it.
 */
static void trim_journal(struct conn *n)
{
    char path[PATH_MAX];
    struct stat st;

    snprintf(path, sizeof path, "%s-wal", n->catalog->path);
    if (!n->catalog->wal || lstat(path, &st) < 0 || st.st_size <= WAL_LARGE)
        return;
    sqlite3_busy_timeout(n->db, 0);
    sqlite3_wal_checkpoint_v2(n->db, NULL, SQLITE_CHECKPOINT_TRUNCATE, NULL, NULL);
}

void conn_put(struct conn *n)
{
    struct catalog *c = n ? n->catalog : NULL;
    bool keep;

    if (!n)
        return;
    if (n->memory) {
        put_memory(n);
        return;
    }
    conn_rollback(n);
    if (n->generation == 0)
        trim_journal(n);
    pthread_mutex_lock(&c->mutex);
    keep = n->generation == c->generation && c->nidle < MAX_IDLE &&
           !atomic_load(&c->damaged);
    if (keep) {
        n->next = c->idle;
        c->idle = n;
        c->nidle++;
    }
    pthread_mutex_unlock(&c->mutex);
    if (!keep)
        conn_close(n);
}

void conn_putp(struct conn **n)
{
    conn_put(*n);
}

void catalog_check_moved(struct catalog *c)
{
    struct stat st;

    if (c->memory)
        return;
    pthread_mutex_lock(&c->mutex);
    if (c->ino != 0 && (lstat(c->path, &st) < 0 || !is_known(c, &st)))
        forget_file(c);
    pthread_mutex_unlock(&c->mutex);
}

/*
 * A write-ahead log needs memory that all its users share: not to be had between machines,
 * nor on what a FUSE server keeps. Only what is known to be local gets one.
 */
static bool is_local(const char *dir)
{
    static const uint32_t local[] = {
        0xEF53,     /* ext2, 3, 4 */
        0x58465342, /* XFS */
        0x9123683E, /* btrfs */
        0x01021994, /* tmpfs */
        0x858458F6, /* ramfs */
        0x794C7630, /* overlayfs */
        0x2FC12FC1, /* ZFS */
        0xF2F52010, /* F2FS */
        0xCA451A4E, /* bcachefs */
        0x3153464A, /* JFS */
    };
    struct statfs fs;

    if (statfs(dir, &fs) < 0)
        return false;
    for (size_t i = 0; i < ARRAY_SIZE(local); i++)
        if ((uint32_t)fs.f_type == local[i])
            return true;
    return false;
}

/* DIR/index/HASH.sqlite and its lock; the directory is made. */
static int set_paths(struct catalog *c, const char *dir, struct err *e)
{
    XXH128_hash_t h = XXH3_128bits(c->identity, strlen(c->identity));
    struct buf path = {.max = PATH_MAX - sizeof "-journal"};
    int rc;

    buf_addf(&path, "%s/index", dir);
    if (buf_failed(&path))
        return err_set(e, ENAMETOOLONG, "cache directory %.100s...: too long", dir);
    rc = make_dirs(path.data, 0700, e);
    if (rc == 0)
        c->wal = is_local(path.data);
    buf_addf(&path, "/%016" PRIx64 "%016" PRIx64 ".", h.high64, h.low64);
    buf_adds(&path, "sqlite");
    if (rc == 0 && buf_failed(&path))
        rc = err_set(e, ENAMETOOLONG, "cache directory %.100s...: too long", dir);
    if (rc == 0 && (!(c->path = strdup(path.data)) || !(c->lock = strdup(path.data))))
        rc = err_nomem(e);
    if (rc == 0)
        memcpy(c->lock + strlen(c->lock) - strlen("sqlite"), "lock", sizeof "lock");
    buf_release(&path);
    return rc;
}

static int init_mutexes(struct catalog *c)
{
    pthread_mutexattr_t recursive;

    if (pthread_mutexattr_init(&recursive) != 0)
        return -ENOMEM;
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&c->mutex, NULL);
    pthread_mutex_init(&c->memory_mutex, &recursive);
    pthread_mutexattr_destroy(&recursive);
    return 0;
}

int catalog_open(const struct catalog_options *options, const char *identity,
                 struct catalog **out, struct err *e)
{
    CLEANUP(catalog_closep) struct catalog *c = calloc(1, sizeof *c);
    struct conn *n = NULL;
    int rc;

    if (!c)
        return err_nomem(e);
    c->memory = options->memory;
    if (init_mutexes(c) < 0 || !(c->identity = strdup(identity)))
        return err_nomem(e);
    if (c->memory) {
        c->path = strdup(":memory:");
        rc = c->path ? open_memory(c, e) : err_nomem(e);
    } else {
        rc = set_paths(c, options->dir, e);
        if (rc == 0)
            rc = conn_take(c, false, &n, e);
        conn_put(n);
    }
    if (rc == 0)
        *out = steal(&c);
    return rc;
}

void catalog_close(struct catalog *c)
{
    if (!c)
        return;
    forget_file(c);
    conn_close(c->only);
    pthread_mutex_destroy(&c->mutex);
    pthread_mutex_destroy(&c->memory_mutex);
    free(c->path);
    free(c->lock);
    free(c->identity);
    free(c);
}

void catalog_closep(struct catalog **c)
{
    catalog_close(*c);
}
