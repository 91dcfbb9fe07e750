/* SPDX-License-Identifier: MIT */
/* fs/bucket_name.c - names of an object store made, removed and changed. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "fs/bucket.h"
#include "remote/bucket.h"

struct interrupt *bucket_begin_change(struct fs *fs)
{
    pthread_mutex_lock(&fs->bucket->names);
    return interrupt_set(NULL);
}

void bucket_end_change(struct fs *fs, struct interrupt *before)
{
    interrupt_set(before);
    pthread_mutex_unlock(&fs->bucket->names);
}

static void parent_of(const char *path, char dir[PATH_MAX])
{
    const char *slash = strrchr(path, '/');

    snprintf(dir, PATH_MAX, "%.*s", slash ? (int)(slash - path) : 0, path);
}

static int see_any(void *user, const char *name, mode_t type)
{
    (void)user;
    (void)name;
    (void)type;
    return 1;
}

/* The directory stays when the last object in it goes, as programs then remove it. */
static int keep_parent(struct fs *fs, const char *path, struct err *e)
{
    char dir[PATH_MAX];

    parent_of(path, dir);
    return bucket_make_dir(fs, dir, e);
}

static int delete_object(struct fs *fs, const char *path, const char *end,
                         struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    int rc = bucket_key(fs, path, &key, e);

    if (rc == 0 && buf_adds(&key, end) < 0)
        rc = err_nomem(e);
    if (rc == 0)
        rc = bucket_delete(fs->bucket->bucket, key.data, e);
    bucket_changed(fs, path);
    return rc;
}

/*
 * The node of a path that something else, or nothing, is about to have: locked, so that
 * nobody uploads it any more. Who has it open goes on with its bytes, which are fetched
 * before the object goes. NULL: nobody knows it. With the lock of names.
 */
static int hold(struct fs *fs, const char *path, struct bucket_node **out,
                struct err *e)
{
    struct bucket_node *n = bucket_at(fs, path);
    int rc = 0;

    *out = NULL;
    if (!n)
        return 0;
    pthread_mutex_lock(&n->lock);
    if (n->opens > 0)
        rc = bucket_fetch(fs, n, e);
    if (rc == 0) {
        *out = n;
        return 0;
    }
    pthread_mutex_unlock(&n->lock);
    bucket_unpin(fs, n);
    return rc;
}

static void drop_held(struct fs *fs, struct bucket_node *n)
{
    if (!n)
        return;
    pthread_mutex_unlock(&n->lock);
    bucket_unpin(fs, n);
}

int bucket_mkdir(struct fs *fs, const char *path, struct err *e)
{
    struct stat st;
    int rc = bucket_stat(fs, path, &st, e);

    if (rc == 0)
        return -EEXIST;
    if (rc != -ENOENT)
        return rc;
    *e = (struct err){0};
    return bucket_make_dir(fs, path, e);
}

static int remove_file(struct fs *fs, const char *path, struct err *e)
{
    struct bucket_node *n;
    int rc = hold(fs, path, &n, e);

    if (rc == 0)
        rc = keep_parent(fs, path, e);
    if (rc == 0)
        rc = delete_object(fs, path, "", e);
    if (rc == 0 && n)
        bucket_drop(fs, n);
    drop_held(fs, n);
    return rc;
}

int bucket_unlink(struct fs *fs, const char *path, struct err *e)
{
    struct stat st;
    int rc = bucket_stat(fs, path, &st, e);

    if (rc == 0 && S_ISDIR(st.st_mode))
        return -EISDIR;
    return rc == 0 ? remove_file(fs, path, e) : rc;
}

/* An object "a/" is how some tools make a directory. */
int bucket_rmdir(struct fs *fs, const char *path, struct err *e)
{
    struct bucket_node *n;
    struct entry_stat found;
    struct stat st;
    int rc = bucket_stat(fs, path, &st, e);

    if (rc == 0 && !S_ISDIR(st.st_mode))
        return -ENOTDIR;
    if (rc == 0)
        rc = bucket_each_name(fs, path, see_any, NULL, e);
    if (rc != 0)
        return rc > 0 ? -ENOTEMPTY : rc;
    rc = keep_parent(fs, path, e);
    if (rc == 0 && fs->store->ops->stat(fs->store, path, &found, e) == 0)
        rc = delete_object(fs, path, "/", e);
    if (rc < 0)
        return rc;
    *e = (struct err){0};
    bucket_unmake_dir(fs, path);
    n = bucket_at(fs, path);
    if (n)
        bucket_drop(fs, n);
    bucket_unpin(fs, n);
    return 0;
}

/* By the store, of an object that has the bytes of the file. 0: it could not. */
static int copy_there(struct fs *fs, const char *from, const char *to)
{
    CLEANUP(buf_release) struct buf source = {0}, target = {0};
    struct err e = {0};
    int rc = bucket_key(fs, from, &source, &e);

    if (rc == 0)
        rc = bucket_key(fs, to, &target, &e);
    if (rc == 0)
        rc = bucket_copy(fs->bucket->bucket, source.data, target.data, &e);
    if (rc < 0)
        log_msg(LOG_FS, LOG_DEBUG, "%s; its bytes go through this machine", e.text);
    else
        bucket_changed(fs, to);
    return rc == 0;
}

/* An object of the new name, with the bytes that the file has now. With its lock. */
static int copy_to(struct fs *fs, struct bucket_node *n, const char *from,
                   const char *to, struct err *e)
{
    int rc;

    if (!n->dirty && copy_there(fs, from, to))
        return 0;
    n->opens++;
    rc = bucket_fetch(fs, n, e);
    if (rc == 0)
        rc = bucket_send(fs, n, to, e);
    bucket_let_go(fs, n);
    return rc;
}

/* Both are locked all the time: what is uploaded later goes to the new name, or nowhere. */
static int move(struct fs *fs, struct bucket_node *n, const char *from, const char *to,
                struct err *e)
{
    struct bucket_node *replaced;
    int rc = hold(fs, to, &replaced, e);
    bool dirty;

    if (rc < 0)
        return rc;
    pthread_mutex_lock(&n->lock);
    dirty = n->dirty;
    rc = copy_to(fs, n, from, to, e);
    if (rc == 0 && replaced)
        bucket_drop(fs, replaced);
    if (rc == 0)
        rc = keep_parent(fs, from, e);
    if (rc == 0)
        rc = delete_object(fs, from, "", e);
    if (rc == 0)
        rc = bucket_move(fs, n, to, e);
    else if (dirty) { /* its old name has not got these bytes */
        n->dirty = true;
        n->failed = false;
    }
    pthread_mutex_unlock(&n->lock);
    drop_held(fs, replaced);
    return rc;
}

static int move_file(struct fs *fs, const char *from, const char *to, struct err *e)
{
    struct bucket_node *n;
    int rc = bucket_intern(fs, from, S_IFREG, &n, e);

    if (rc < 0)
        return rc;
    rc = move(fs, n, from, to, e);
    bucket_unpin(fs, n);
    return rc;
}

int bucket_rename(struct fs *fs, const char *from, const char *to, unsigned flags,
                  struct err *e)
{
    struct stat st;
    int rc = bucket_stat(fs, from, &st, e);

    if (rc < 0)
        return rc;
    if (S_ISDIR(st.st_mode))
        return -EXDEV; /* programs copy it then */
    rc = bucket_stat(fs, to, &st, e);
    if (rc == 0 && S_ISDIR(st.st_mode))
        return -EISDIR;
    if (rc == 0 && (flags & RENAME_NOREPLACE))
        return -EEXIST;
    if (rc < 0 && rc != -ENOENT)
        return rc;
    *e = (struct err){0};
    return strcmp(from, to) == 0 ? 0 : move_file(fs, from, to, e);
}
