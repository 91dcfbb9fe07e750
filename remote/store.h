/* SPDX-License-Identifier: MIT */
/* remote/store.h - the place that holds a source's files: a local directory, a bucket. */
#ifndef UFS_REMOTE_STORE_H
#define UFS_REMOTE_STORE_H

#include <stdatomic.h>

#include "base/base.h"
#include "remote/listing.h"
#include "remote/source.h"

struct access_by;
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
     * Optional: looks whether the file system of the root was unmounted. Then everything
     * fails (-EIO), until one is mounted there again: that is the root from then on. For
     * one thread, now and then.
     */
    void (*follow)(struct store *s);
    /* Optional: whatever waits for a server ends now, and so does all that comes later. */
    void (*stop)(struct store *s);
    /* Optional: how often its server had to be asked once more. */
    uint64_t (*retries)(struct store *s);
    /*
     * Optional: may the regular file be read, or the directory listed, by the calling thread
     * (for which the kernel judges) or, not NULL, by somebody who is judged by modes? All
     * directories on the way from the root on, and links, count. -EACCES. *id: who the file
     * is that was judged.
     */
    int (*readable)(struct store *s, const char *path, const struct access_by *by,
                    struct file_id *id, struct err *e);
    /* Optional: this directory, and those above it, are other ones now: list them anew. */
    void (*forget)(struct store *s, const char *path);
    void (*close)(struct store *s);
};

struct store {
    const struct store_ops *ops;
    char *url;  /* how a person names it: the absolute path, or a URL without secrets */
    char *file; /* NULL, or the one file that was opened (its directory is the root) */
    char *dir;  /* NULL, or the name of the root's directory, where url has another */
    char *identity; /* stable text that names this source in the cache of indexes */
    bool remote;    /* its bytes come from a server */
    /* Of its root, from one file system to another, by follow(); odd: there is none. */
    atomic_uint moves;
};

/* What a remote source's bytes are known by. Borrowed during the call. */
struct object_id {
    const char *store; /* the store's identity */
    const char *path;
    const char *version; /* ETag or version, "" where the server has none */
    uint64_t size;
    int64_t mtime_ns;
};

/*
 * Puts a cache over a source that reads from a server: takes over the reference to
 * `inner`, also on failure. Size, name and id of *out are those of `inner`.
 */
typedef int store_cache_fn(void *user, struct source *inner, const struct object_id *id,
                           struct source **out, struct err *e);

/*
 * A few KiB that may help when the same is opened again: hints, each known by its store's
 * identity and a name. Any of them may be gone at any time, and be of another moment. Of
 * recall: how many bytes of `dst` were filled; 0: there is none.
 */
typedef size_t store_recall_fn(void *user, const char *store, const char *name,
                               void *dst, size_t size);
typedef void store_note_fn(void *user, const char *store, const char *name,
                           const void *data, size_t len);

/* Zero is the default of every field. */
struct store_options {
    bool follow_symlinks;  /* links may leave the source */
    unsigned refresh;      /* remote: seconds until a directory is listed anew; 0: 60 */
    store_cache_fn *cache; /* remote: over every source that is opened; or NULL */
    store_recall_fn *recall; /* remote: hints, or NULL */
    store_note_fn *note;     /* with recall */
    void *cache_user;        /* of these; outlives the store */
};

enum { STORE_REFRESH = 60 };

/* Is this a URL (SCHEME://...), and not a path? */
bool store_is_url(const char *name);

/*
 * What `name` says: a local path, or https://, http:// (of this machine, unless
 * UNSHARD_ALLOW_HTTP=1 is set), s3://, gs://, hf://. -ENOTSUP: another scheme.
 */
int store_open(const char *name, const struct store_options *options,
               struct store **out, struct err *e);

/* Ends all waits for its server: remote/http.h, http_stop(). Any thread; local: nothing. */
void store_stop(struct store *s);

/* Looks where its root is (see the operation); what cannot be unmounted stays. */
void store_follow(struct store *s);

/* Requests that were tried again since it was opened; local: 0. */
uint64_t store_retries(struct store *s);

/* This directory and those above it were written to: what is remembered counts no more. */
void store_forget(struct store *s, const char *path);

bool store_is_remote(const struct store *s);

/*
 * A URL as it may be shown and logged: without password and query. A path as it is.
 * Malloc'd; NULL: out of memory.
 */
char *store_name_shown(const char *name);

/*
 * A local directory or a single file. For the snapshots of a Hugging Face cache
 * (models--ORG--NAME/snapshots, also below) links may lead anywhere below the
 * models--… (datasets--…) directory, for all others below the directory that was opened.
 * It can look into tar archives (remote/archives.h). A file NAME.ckpt that is not there, but
 * in a subdirectory of its directory, is taken for a set of files (index/formats/format.h).
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
