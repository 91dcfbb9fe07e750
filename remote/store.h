/* SPDX-License-Identifier: MIT */
/* remote/store.h - the place that holds a source's files: a local directory, a bucket. */
#ifndef UFS_REMOTE_STORE_H
#define UFS_REMOTE_STORE_H

#include "base/base.h"
#include "remote/listing.h"
#include "remote/source.h"

struct err;
struct store;

/*
 * Paths are relative to what was opened, without a leading '/', "" is its root. Every
 * call may come from any thread. Nothing outside the root is ever opened: links are
 * followed while they stay within the anchor (below), names that climb give -EXDEV.
 */
struct store_ops {
    const char *name;
    int (*stat)(struct store *s, const char *path, struct entry_stat *out,
                struct err *e);
    int (*list)(struct store *s, const char *path, struct listing **out, struct err *e);

    /* Regular files only (-EINVAL otherwise); never blocks on a fifo. */
    int (*open)(struct store *s, const char *path, struct source **out, struct err *e);

    /*
     * For a link to a directory within the root: the text of an equivalent relative link
     * (NUL-terminated, cut at size: -ENAMETOOLONG). -EXDEV when it leads out of the root.
     */
    int (*readlink)(struct store *s, const char *path, char *dst, size_t size,
                    struct err *e);
    /*
     * Optional: the root's directory was put in the place of another under its own name,
     * and is the root from now on. -EROFS: its name says not which.
     */
    int (*reopen)(struct store *s, struct err *e);
    void (*close)(struct store *s);
};

struct store {
    const struct store_ops *ops;
    char *url;  /* how a person names it: the absolute path */
    char *file; /* NULL, or the one file that was opened (its directory is the root) */
    char *identity; /* stable text that names this source in the cache of indexes */
};

struct store_options {
    bool follow_symlinks; /* links may leave the source */
};

/*
 * A local directory or a single file. For the snapshots of a Hugging Face cache
 * (models--ORG--NAME/snapshots, also below) links may lead anywhere below the
 * models--… (datasets--…) directory, for all others below the directory that was opened.
 * It can look into tar archives (remote/archives.h).
 */
int store_open_local(const char *path, const struct store_options *options,
                     struct store **out, struct err *e);

void store_close(struct store *s); /* NULL is fine */
void store_closep(struct store **s);

/* Joins two relative paths ("" on either side is fine) and refuses what is longer than
 * PATH_MAX. */
int store_join(const char *dir, const char *name, char *dst, size_t size);

/*
 * Is this name, found inside a checkpoint's metadata, safe to open relative to the
 * checkpoint's directory? No empty part, no "." or "..", no leading '/', no NUL (len
 * counts), no backslash, at most PATH_MAX.
 */
bool store_name_is_safe(const char *name, size_t len);

#endif
