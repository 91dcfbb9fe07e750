/* SPDX-License-Identifier: MIT */
/* index/catalog_open.c - opens the file of an index, or makes it anew; the connections. */
#include "index/catalog_open.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"
#include "index/catalog.h"
#include "index/catalog_conn.h"
#include "index/schema.h"

#include <sqlite3.h>
#include <xxhash.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/vfs.h>

enum {
    MAX_IDLE = 8,    /* connections kept: more threads than that are rare */
    BUSY_MS = 30000, /* the longest commit of another process */
    QUICK_CHECK_MAX =
        2 << 20,      /* bytes: checked in full in a few ms, as mounting has 50 */
    CACHE_KIB = 2048, /* of a pooled connection */
    COMMIT_CACHE_KIB = 16384, /* of one that writes a scan, and then is closed */
    WAL_KEPT = 4 << 20,       /* bytes of journal left after a large commit */
};

struct catalog {
    char *path; /* of the sqlite file, or ":memory:" */
    char *lock; /* held while the file is made or checked */
    char *identity;
    bool memory, wal;
    atomic_bool damaged;
    pthread_mutex_t mutex;
    struct conn *idle;   /* guarded by mutex */
    unsigned nidle;      /* guarded by mutex */
    uint64_t generation; /* of the file; guarded by mutex */
    dev_t dev;           /* of the file; guarded by mutex */
    ino_t ino;
    pthread_mutex_t memory_mutex; /* recursive: who holds it uses `only` */
    struct conn *only;            /* index=memory */
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

/* What a statement on a hostile file can cost at most, and what it cannot do. */
static void set_limits(struct sqlite3 *db, bool hostile)
{
    static const struct {
        int id, value;
    } limits[] = {
        {SQLITE_LIMIT_LENGTH, 768 << 20}, /* 10 M chunks in one blob */
        {SQLITE_LIMIT_SQL_LENGTH, 1 << 16},      {SQLITE_LIMIT_COLUMN, 100},
        {SQLITE_LIMIT_EXPR_DEPTH, 50},           {SQLITE_LIMIT_COMPOUND_SELECT, 4},
        {SQLITE_LIMIT_FUNCTION_ARG, 8},          {SQLITE_LIMIT_ATTACHED, 0},
        {SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100}, {SQLITE_LIMIT_VARIABLE_NUMBER, 100},
        {SQLITE_LIMIT_TRIGGER_DEPTH, 1},         {SQLITE_LIMIT_WORKER_THREADS, 0},
    };

    for (size_t i = 0; i < ARRAY_SIZE(limits); i++)
        sqlite3_limit(db, limits[i].id, limits[i].value);
    /* A scan's own file has no journal, which this would forbid. */
    sqlite3_db_config(db, SQLITE_DBCONFIG_DEFENSIVE, hostile, (int *)NULL);
    sqlite3_db_config(db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, (int *)NULL);
    sqlite3_db_config(db, SQLITE_DBCONFIG_ENABLE_TRIGGER, 0, (int *)NULL);
    sqlite3_db_config(db, SQLITE_DBCONFIG_ENABLE_VIEW, 0, (int *)NULL);
    sqlite3_db_config(db, SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0, (int *)NULL);
    sqlite3_extended_result_codes(db, 1);
    sqlite3_busy_timeout(db, BUSY_MS);
}

static int conn_open(struct catalog *c, const char *path, struct conn **out,
                     struct err *e)
{
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, keep = 1;
    struct conn *n = calloc(1, sizeof *n);
    int rc = 0;

    if (!n)
        return err_nomem(e);
    n->catalog = c;
    if (path[0] == '\0' || path[0] == ':')
        flags |= SQLITE_OPEN_CREATE;
    if (sqlite3_open_v2(path, &n->db, flags, NULL) != SQLITE_OK) {
        rc = n->db ? conn_err(n, "open", e) : err_nomem(e);
        conn_close(n);
        return rc;
    }
    set_limits(n->db, c != NULL);
    /*
     * sqlite deletes its journal by name when the last connection goes: by then another
     * process may have made the index anew, and the name is that of a journal in use.
     */
    sqlite3_file_control(n->db, "main", SQLITE_FCNTL_PERSIST_WAL, &keep);
    *out = n;
    return 0;
}

static int set_int(struct conn *n, const char *pragma, int64_t value, struct err *e)
{
    char sql[100];

    snprintf(sql, sizeof sql, "PRAGMA %s=%" PRId64, pragma, value);
    return conn_exec(n, sql, e);
}

int conn_open_private(bool memory, struct conn **out, struct err *e)
{
    struct conn *n;
    int rc = conn_open(NULL, memory ? ":memory:" : "", &n, e);

    if (rc < 0)
        return rc;
    rc = conn_exec(n, "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF", e);
    if (rc == 0)
        rc = set_int(n, "cache_size", -COMMIT_CACHE_KIB, e);
    if (rc == 0 && memory)
        rc = set_int(n, "temp_store", 2, e);
    if (rc < 0)
        conn_close(n);
    else
        *out = n;
    return rc;
}

/* A result of one integer. */
static int get_int(struct conn *n, const char *sql, int64_t *out, struct err *e)
{
    CLEANUP(query_end) struct query q = {0};
    struct cell cell;
    int rc = query_begin(n, sql, &q, e);

    if (rc == 0)
        rc = query_step(&q, e);
    if (rc == 1)
        rc = query_row(&q, &cell, 1, e);
    else if (rc == 0)
        rc = conn_damaged(n, e, "no answer to %s", sql);
    if (rc == 0)
        *out = (int64_t)cell.num;
    return rc;
}

/* Names and definitions of all that is in a database, and who it belongs to. */
static int describe(struct conn *n, struct buf *out, struct err *e)
{
    static const char sql[] =
        "SELECT CAST(type || ' ' || name || ' ' || tbl_name || ' '"
        " || ifnull(sql, '') AS BLOB)"
        " FROM sqlite_schema ORDER BY type, name";
    CLEANUP(query_end) struct query q = {0};
    int64_t application, version;
    struct cell cell;
    int rc = get_int(n, "PRAGMA application_id", &application, e);

    if (rc == 0)
        rc = get_int(n, "PRAGMA user_version", &version, e);
    if (rc == 0)
        rc = query_begin(n, sql, &q, e);
    if (rc < 0)
        return rc;
    buf_addf(out, "%" PRIx64 " %" PRId64 "\n", application, version);
    while ((rc = query_step(&q, e)) == 1 && (rc = query_row(&q, &cell, 1, e)) == 0) {
        buf_add(out, cell.data, cell.len);
        buf_addc(out, '\n');
    }
    if (rc == 0 && buf_failed(out))
        rc = err_nomem(e);
    return rc;
}

static int put_schema(struct conn *n, struct err *e)
{
    static const char sql[] = "INSERT INTO source (identity) VALUES (?1)";
    CLEANUP(query_end) struct query q = {0};
    struct cell identity = cell_text(n->catalog->identity);
    int rc = conn_begin(n, true, e);

    if (rc == 0)
        rc = conn_exec(n, schema_sql, e);
    if (rc == 0)
        rc = query_begin(n, sql, &q, e);
    if (rc == 0)
        rc = query_write(&q, &identity, 1, e);
    return rc == 0 ? conn_commit(n, e) : rc;
}

/* A trigger or a column more could make our statements do what we do not mean. */
static int check_schema(struct conn *n, struct err *e)
{
    struct buf is = {.max = 1 << 20}, wanted = {.max = 1 << 20};
    struct conn *model = NULL;
    int rc = describe(n, &is, e);

    if (rc == 0)
        rc = conn_open(n->catalog, ":memory:", &model, e);
    if (rc == 0)
        rc = conn_exec(model, schema_sql, e);
    if (rc == 0)
        rc = describe(model, &wanted, e);
    if (rc == 0 && (is.len != wanted.len || memcmp(is.data, wanted.data, is.len) != 0))
        rc = conn_damaged(n, e, "it is of another version or another program");
    conn_close(model);
    buf_release(&is);
    buf_release(&wanted);
    return rc;
}

static int check_identity(struct conn *n, struct err *e)
{
    static const char sql[] = "SELECT identity FROM source";
    CLEANUP(query_end) struct query q = {0};
    const char *want = n->catalog->identity;
    struct cell cell;
    int rc = conn_find(n, sql, NULL, 0, &q, e);

    if (rc == 1)
        rc = query_row(&q, &cell, 1, e);
    else if (rc == 0)
        return conn_damaged(n, e, "it does not name its source");
    if (rc == 0 && (cell.kind != CELL_BLOB || cell.len != strlen(want) ||
                    memcmp(cell.data, want, cell.len) != 0))
        rc = conn_damaged(n, e, "it is the index of another source");
    return rc;
}

/*
 * A full check of half a gigabyte takes seconds. Large files have their rows' sums, and
 * sqlite's checks of each page as it is read (cell_size_check).
 */
static int check_pages(struct conn *n, const struct stat *st, struct err *e)
{
    static const char ok[] = "SELECT quick_check = 'ok' FROM pragma_quick_check(1)";
    int64_t good = 0;
    int rc;

    if (st->st_size > QUICK_CHECK_MAX)
        return 0;
    rc = get_int(n, ok, &good, e);
    if (rc == 0 && good != 1)
        rc = conn_damaged(n, e, "sqlite's check finds faults");
    return rc;
}

static int configure(struct conn *n, struct err *e)
{
    int rc = conn_exec(n,
                       "PRAGMA cell_size_check=ON; PRAGMA mmap_size=0;"
                       "PRAGMA synchronous=NORMAL",
                       e);

    if (rc == 0)
        rc = set_int(n, "cache_size", -CACHE_KIB, e);
    if (rc == 0 && n->catalog->memory)
        rc = set_int(n, "temp_store", 2, e);
    if (rc == 0 && !n->catalog->memory)
        rc = conn_exec(n,
                       n->catalog->wal ? "PRAGMA journal_mode=WAL"
                                       : "PRAGMA journal_mode=TRUNCATE",
                       e);
    if (rc == 0)
        rc = set_int(n, "journal_size_limit", WAL_KEPT, e);
    return rc;
}

/* Makes the tables in an empty file, checks what is there in others. */
static int conn_ready(struct conn *n, const struct stat *st, struct err *e)
{
    int64_t tables;
    int rc = configure(n, e);

    if (rc == 0)
        rc = get_int(n, "SELECT count(*) FROM sqlite_schema", &tables, e);
    if (rc == 0 && tables == 0 && (!st || st->st_size <= 1 << 16)) {
        int64_t application;

        rc = get_int(n, "PRAGMA application_id", &application, e);
        if (rc == 0 && application == 0)
            return put_schema(n, e);
    }
    if (rc == 0)
        rc = check_schema(n, e);
    if (rc == 0)
        rc = check_identity(n, e);
    if (rc == 0 && st)
        rc = check_pages(n, st, e);
    return rc;
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
        rc = is_known(c, &st) ? configure(n, e) : conn_ready(n, &st, e);
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
        rc = open_file(c, out, e);
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
    int rc = conn_open(c, ":memory:", &c->only, e);

    return rc == 0 ? conn_ready(c->only, NULL, e) : rc;
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
        rc = set_int(*out, "cache_size", -COMMIT_CACHE_KIB, e);
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
    if (rc < 0) {
        conn_close(*out);
        *out = NULL;
    }
    return rc;
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
    if (!n->catalog->wal || lstat(path, &st) < 0 || st.st_size <= WAL_KEPT)
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
    if (c->memory) {
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
