/* SPDX-License-Identifier: MIT */
/* index/catalog_open.h - an open catalog, as the files of the index see it. */
#ifndef UFS_INDEX_CATALOG_OPEN_H
#define UFS_INDEX_CATALOG_OPEN_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

#include "base/base.h"

struct conn;
struct err;

struct catalog {
    char *path; /* of the sqlite file, or ":memory:" */
    char *lock; /* held while the file is made or checked */
    char *identity;
    bool wal;
    atomic_bool memory; /* from the beginning, or since the disk was full */
    atomic_bool damaged;
    pthread_mutex_t mutex;
    struct conn *idle;   /* guarded by mutex */
    unsigned nidle;      /* guarded by mutex */
    uint64_t generation; /* of the file; guarded by mutex */
    dev_t dev;           /* of the file; guarded by mutex */
    ino_t ino;
    pthread_mutex_t memory_mutex; /* recursive: who holds it uses `only` */
    struct conn *only;            /* the index in memory; constant once there is one */
};

const char *catalog_path(const struct catalog *c); /* for messages */
bool catalog_in_memory(const struct catalog *c);

/*
 * After an error `rc` of the file: where that was the disk's, which is full or cannot be
 * written, the index goes on in memory, from nothing: what was in the file is scanned anew.
 * False: it was another error, or there is no memory either.
 */
bool catalog_leave_disk(struct catalog *c, int rc, const struct err *why);

/* The file is to be made anew at the next conn_take. */
void catalog_mark_damaged(struct catalog *c);

/* A connection to a file, or to ":memory:", with limits set; nothing is checked yet. */
int conn_open(struct catalog *c, const char *path, struct conn **out, struct err *e);

/* Sets what a connection of this catalog needs; the file was checked before. */
int conn_configure(struct conn *n, struct err *e);

/*
 * The same, and makes the tables when the file is empty or checks all that is there:
 * -EBADMSG when it is not this index. `st` is NULL for one in memory.
 */
int conn_ready(struct conn *n, const struct stat *st, struct err *e);

/* A pragma with a number. */
int conn_set_int(struct conn *n, const char *pragma, int64_t value, struct err *e);

/* Somebody deleted or replaced the file: connections made from now on see the new one. */
void catalog_check_moved(struct catalog *c);

#endif
