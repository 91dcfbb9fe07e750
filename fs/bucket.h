/* SPDX-License-Identifier: MIT */
/* fs/bucket.h - a mount for writing whose source is an object store. */
#ifndef UFS_FS_BUCKET_H
#define UFS_FS_BUCKET_H

#include <sys/stat.h>

#include "fs/request.h"

struct bucket;
struct pool;
struct generation;

/*
 * Names are those of the objects: a prefix is a directory. What is written lies in a local
 * file without a name, which the last writer's close uploads as one object. Owner, mode and
 * times that programs set are not kept, as an object has none; links there are none.
 *
 * A node is a path: of a file that is renamed it changes, and one that is removed or replaced
 * is `gone` for good, though handles go on with it.
 */
struct bucket_node {
    fuse_ino_t ino; /* constant */
    mode_t type;    /* constant: S_IFREG or S_IFDIR */

    /* guarded by the lock of the mount */
    uint64_t refs; /* lookups of the kernel, handles, pins */
    char *path;    /* in the store; "" is the root */
    bool gone;
    struct bucket_node *next_ino, *next_path;
    struct generation
        *gen;         /* the checkpoint that the directory is, as of the last look, */
    uint64_t changes; /* below it, through this mount */
    uint64_t gen_changes; /* as of then */
    int64_t looked_ns;    /* 0: never */

    pthread_mutex_t lock; /* of its bytes; taken before the lock of the mount */
    /* Its bytes in a local file, or -1; stays while it is open, and is closed with both locks. */
    atomic_int spool;
    /* guarded by lock */
    unsigned opens;   /* handles, and who changes it */
    bool dirty;       /* the object has other bytes, or there is none */
    bool failed;      /* to upload it, and nothing was written since */
    unsigned writing; /* handles for writing that close(2) was not called of */
};

enum { BUCKET_NODES = 1 << 14 };

struct bucket_mount {
    struct bucket *bucket;
    char *prefix;
    struct pool *pool; /* sends parts */
    /* One change of names at a time. Taken before all other locks. */
    pthread_mutex_t names;
    pthread_mutex_t lock;
    /* guarded by lock */
    struct bucket_node *by_ino[BUCKET_NODES], *by_path[BUCKET_NODES];
    fuse_ino_t last_ino;
    char **made; /* directories that nothing may be in, by mkdir here */
    size_t nmade, cap;
};

int bucket_mount_new(struct fs *fs, struct bucket_mount **out, struct err *e);
/* Uploads what was written and not closed, as its program will not any more. */
void bucket_mount_end(struct fs *fs);
void bucket_mount_free(struct fs *fs);

/* ---- fs/bucket_node.c ---- */

/* The node of this number, with a reference, or NULL. */
struct bucket_node *bucket_pin(struct fs *fs, fuse_ino_t ino);
void bucket_unpin(struct fs *fs, struct bucket_node *n); /* NULL is fine */
void bucket_unref(struct fs *fs, struct bucket_node *n, uint64_t count);
void bucket_node_forget(struct fs *fs, fuse_ino_t ino, uint64_t lookups);

/* The node of a path, as it is known or a new one; a reference. */
int bucket_intern(struct fs *fs, const char *path, mode_t type,
                  struct bucket_node **out, struct err *e);
/* The node that has this path now, with a reference, or NULL. */
struct bucket_node *bucket_at(struct fs *fs, const char *path);

/* The path of a directory's entry. -ENOENT: the directory is gone; -EINVAL, -ENAMETOOLONG. */
int bucket_path(struct fs *fs, fuse_ino_t dir, const char *name, char path[PATH_MAX],
                struct err *e);
void bucket_node_path(struct fs *fs, const struct bucket_node *n, char path[PATH_MAX],
                      bool *gone);

/* The node has another path from now on, in whose place nothing is. */
int bucket_move(struct fs *fs, struct bucket_node *n, const char *path, struct err *e);
void bucket_drop(struct fs *fs, struct bucket_node *n); /* it is gone */

/* What is at this path now? -ENOENT. */
int bucket_stat(struct fs *fs, const char *path, struct stat *st, struct err *e);
int bucket_node_stat(struct fs *fs, struct bucket_node *n, struct stat *st,
                     struct err *e);

/* Something is another at this path, by us. */
void bucket_changed(struct fs *fs, const char *path);

/* Directories of mkdir. */
int bucket_make_dir(struct fs *fs, const char *path, struct err *e);
void bucket_unmake_dir(struct fs *fs, const char *path);
bool bucket_is_made(struct fs *fs, const char *path);

/* Calls fn for every name in a directory that is not (only) an object: each may come twice. */
typedef int bucket_name_fn(void *user, const char *name, mode_t type);
int bucket_each_local(struct fs *fs, const char *path, bucket_name_fn *fn, void *user);
/* All names in it. */
int bucket_each_name(struct fs *fs, const char *path, bucket_name_fn *fn, void *user,
                     struct err *e);

/* As disk_generation(). */
int bucket_generation(struct fs *fs, struct bucket_node *dir, bool may_block,
                      struct generation **out, struct err *e);

/* ---- fs/bucket_name.c ---- */

/* One change of names at a time, which a signal to its program does not leave half done. */
struct interrupt *bucket_begin_change(struct fs *fs);
void bucket_end_change(struct fs *fs, struct interrupt *before);

/* Between these two. */
int bucket_mkdir(struct fs *fs, const char *path, struct err *e);
int bucket_unlink(struct fs *fs, const char *path, struct err *e);
int bucket_rmdir(struct fs *fs, const char *path, struct err *e);
int bucket_rename(struct fs *fs, const char *from, const char *to, unsigned flags,
                  struct err *e);

/* ---- fs/bucket_dir.c ---- */

int bucket_opendir_run(struct request *r, struct err *e);
int bucket_readdir_run(struct request *r, struct err *e);

/* ---- fs/bucket_file.c ---- */

/* "PREFIX/PATH", appended. */
int bucket_key(struct fs *fs, const char *path, struct buf *out, struct err *e);

/* With the node's lock: its bytes are in its spool from now on. */
int bucket_fetch(struct fs *fs, struct bucket_node *n, struct err *e);
/* With the node's lock: sends them to this path. */
int bucket_send(struct fs *fs, struct bucket_node *n, const char *path, struct err *e);

/*
 * With the node's lock: one of `opens` less. After the last the spool goes: what could not be
 * uploaded was reported, and the object is as it was.
 */
void bucket_let_go(struct fs *fs, struct bucket_node *n);

int bucket_open_run(struct request *r, struct err *e);
int bucket_create_file(struct request *r, const char *path, struct err *e);
/* An open handle on the file of a path that is not there yet, for a view's node. */
int bucket_open_new(struct request *r, const char *path, struct err *e);
int bucket_read_run(struct request *r, struct err *e);
int bucket_write(struct request *r, const char *data, struct err *e);
int bucket_flush_run(struct request *r, struct err *e);
int bucket_fsync_run(struct request *r, struct err *e);
int bucket_fallocate(struct request *r, off_t len, struct err *e);
int bucket_truncate(struct request *r, off_t size, struct err *e);

#endif
