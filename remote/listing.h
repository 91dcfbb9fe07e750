/* SPDX-License-Identifier: MIT */
/* remote/listing.h - the names, sizes and first bytes of one directory of a source. */
#ifndef UFS_REMOTE_LISTING_H
#define UFS_REMOTE_LISTING_H

#include <limits.h>
#include <sys/types.h>

#include "base/err.h"
#include "base/fsutil.h"

struct store;
struct listing;

enum entry_kind {
    ENTRY_FILE, /* a regular file, also through a link that stays within the source */
    ENTRY_DIR,  /* a directory, also through such a link (then is_link is set) */
    ENTRY_OTHER /* fifo, socket, device, dangling or escaping link: never opened */
};

struct entry_stat {
    enum entry_kind kind;
    bool is_link;
    bool is_junk; /* a file named ._*, which macOS leaves beside others */
    mode_t mode;  /* permission bits */
    uid_t uid;
    gid_t gid;
    struct file_id id; /* of the target when it is a link */
    int64_t atime_ns;  /* 0: the store keeps none */
};

struct listing_entry {
    const char *name;
    struct entry_stat st;
};

/* Entries sorted by bytes of the name, without "." and "..". */
size_t listing_count(const struct listing *l);
const struct listing_entry *listing_at(const struct listing *l, size_t i);

/* By name, or NULL. */
const struct listing_entry *listing_find(const struct listing *l, const char *name);

/* The directory's path in the source ("" is its root) and the last part of its name. */
const char *listing_path(const struct listing *l);
const char *listing_name(const struct listing *l);

/*
 * Up to `len` first bytes of a regular file into dst; *got says how many. Negative errno
 * when it cannot be read, -ESTALE when it is not the file that was listed any more. Kept
 * by the listing, so that several bids cost one read; so one thread at a time.
 */
int listing_peek(struct listing *l, const char *name, void *dst, size_t len,
                 size_t *got);

/*
 * The whole of a small file (at most `max` bytes, else -EFBIG) and a NUL behind; caller
 * frees *data.
 */
int listing_read(struct listing *l, const char *name, size_t max, char **data,
                 size_t *len, struct err *e);

/* Opens a regular file of it; -ESTALE when it is not the file that was listed any more. */
struct source;
int listing_open(struct listing *l, const char *name, struct source **out,
                 struct err *e);

/* The same of a link that leads to no file: -ENOENT, or -EXDEV and what to do. */
int listing_open_link(struct listing *l, const char *name, struct source **out,
                      struct err *e);

/*
 * Until it is called with false: files that are junk are ENTRY_OTHER, here and below. For
 * those who judge what a directory is; one thread at a time.
 */
void listing_skip_junk(struct listing *l, bool skip);

/*
 * What was concluded from its names and files, so that it is concluded once: freed with free()
 * when the listing is. One thread at a time.
 */
void *listing_kept(const struct listing *l);
void listing_keep(struct listing *l, void *conclusion);

/*
 * The first file or directory, here or below, that was asked for and could not be read: what
 * it is was never seen, and "not of this format" is no answer. NULL: none.
 */
struct listing_trouble {
    struct err err;
    char path[PATH_MAX]; /* in the store */
    bool is_dir;
};
const struct listing_trouble *listing_trouble(const struct listing *l);

/* Only rights lack: a file of somebody else's, perhaps. */
bool listing_denied(const struct listing_trouble *t);

/*
 * The listing of a subdirectory, owned by this listing; NULL when there is none. Also of
 * a file that its store can list (remote/archives.h).
 */
struct listing *listing_sub(struct listing *l, const char *name);

/* The same by a path below it, as "model/consolidated"; "": itself. */
struct listing *listing_below(struct listing *l, const char *path);

void listing_free(struct listing *l);
void listing_freep(struct listing **l);

/*
 * Does the directory, or one of the `levels` directories above it in the source, hold
 * this name? Of a made-up listing only itself is looked at.
 */
bool listing_marked(const struct listing *l, const char *name, unsigned levels);

/* What is at this path of the source; false when nothing is, and for a made-up listing. */
bool listing_look(const struct listing *l, const char *path, struct entry_stat *out);

/* The store that a listing asks from now on: one that lies over that which made it. */
void listing_adopt(struct listing *l, struct store *store);

/*
 * Building one: by stores, and by tests that make one up (store NULL: `head` are then
 * the bytes that peek and read give; size is st.id.size).
 */
int listing_new(struct store *store, const char *path, struct listing **out,
                struct err *e);
int listing_add(struct listing *l, const char *name, const struct entry_stat *st,
                const void *head, size_t head_len, struct err *e);
void listing_sort(struct listing *l);
/* For tests: hangs a made-up subdirectory below. Takes ownership of `sub`. */
int listing_add_sub(struct listing *l, const char *name, struct listing *sub,
                    struct err *e);

#endif
