/* SPDX-License-Identifier: MIT */
/* fs/staged.h - reading side of what was written and is not published: names, attributes, bytes. */
#ifndef UFS_FS_STAGED_H
#define UFS_FS_STAGED_H

#include "fs/request.h"
#include "fs/slot.h"
#include "fs/stage.h"

/* What a handler says when nothing that is staged has to do with the request. */
enum { STAGED_NONE = 2 };

/* A name in a listing. */
struct staged_name {
    char *name;
    mode_t type; /* S_IFDIR or S_IFREG; 0: not told */
    uint64_t ino;
};

/* An open file of a spool, or an open directory. */
struct staged_handle {
    struct opened opened;
    struct staged *node; /* a reference; NULL: a file of the source itself */
    int fd;              /* of a file */
    fuse_ino_t ino;      /* of a file of the source, */
    struct came *came;   /* and what has come of it */
    bool writes;
    bool changed;             /* guarded by the lock of stages: since a close */
    bool killed;              /* the same: who closed it last was ended by a signal */
    struct paging *paging;    /* of a file: of its node, or of the source's */
    struct staged_name *name; /* of a directory: what it held, one moment's listing */
    size_t names;
    bool cut; /* a name found no memory */
};

static inline struct staged_handle *staged_handle_of(const struct fuse_file_info *fi)
{
    struct opened *o = (struct opened *)(uintptr_t)fi->fh;

    return o && o->staged ? container_of(o, struct staged_handle, opened) : NULL;
}

int staged_lookup(struct request *r, struct err *e);
int staged_getattr(struct request *r, struct err *e);
int staged_opendir(struct request *r, struct err *e);
int staged_readdir(struct request *r, struct err *e);
int staged_read(struct request *r, struct err *e);

/* With the lock: attributes; an entry that counts as a lookup. */
void staged_attr(const struct staged *n, struct stat *st);
void staged_entry(struct staged *n, struct fuse_entry_param *out);

/* With the lock: opens a file of the spool; the handle is on no list yet. */
int staged_open_handle(struct fs *fs, struct staged *n, int flags,
                       struct staged_handle **out, struct err *e);

/* With the lock: a handle on it, of no file yet; NULL: no memory. */
struct staged_handle *staged_handle_new(struct staged *n);

/* A handle on a file of the source itself, which takes the descriptor over; or NULL. */
struct staged_handle *staged_plain(int fd);

/* A descriptor of a file of the source that is open for writing as `ino`, or -ENOENT. */
int staged_plain_open(struct fs *fs, fuse_ino_t ino);

/* Is there one? */
bool staged_plain_is_open(struct fs *fs, fuse_ino_t ino);

/* With the lock: has it a length that its bytes did not come to one after the other? */
bool staged_lacks(const struct staged_handle *h);

/* With the lock: there was a close(2) of it; and a write. */
void staged_closed(struct staged_handle *h);
void staged_changed(struct staged_handle *h);

/*
 * The file system was unmounted, no request will come: the kernel has thrown away the releases
 * that were on their way. What was closed, and not written since, counts as released.
 */
void staged_end_closed(struct fs *fs);

/* A handle that nobody was given. Without the lock. */
void staged_drop(struct fs *fs, struct staged_handle *h);

/* With the lock: the directory of a stage that stands for this node, or NULL. */
struct staged *staged_dir_of(struct fs *fs, fuse_ino_t ino, const struct slot *slot);

/* Is a new directory of this name in one of the source, and its publication not ended? */
bool staged_comes(struct fs *fs, const char *dir, const char *name);

/*
 * Under which name changes of `name` in the directory stand there: those of all
 * directories of tree/ stand in one.
 */
const char *staged_key(fuse_ino_t dir, const char *name, char *scratch, size_t size);
enum { STAGED_KEY_MAX = 255 + 16 };

/* Is it a directory below tree/ of a checkpoint? */
bool staged_is_below_tree(fuse_ino_t ino);

/*
 * Is it to be shown for itself, or hides it a name? A directory that is shown anyway keeps its
 * own node: here are only changes of it. NULL is not.
 */
bool staged_is_own(const struct staged *n);

/* The name that a fixed directory of a checkpoint has; NULL: it is none of these. */
const char *staged_fixed_name(enum inside kind);

/*
 * Names that come to the listing of a directory of the source (or of a checkpoint) from
 * stages, one without a name behind the last; and: is this one hidden? `shown` is what is
 * listed beside them, or NULL: a stage that is just being published is in both, and left out
 * here.
 */
struct staged_name *staged_names(struct fs *fs, fuse_ino_t ino, const char *path,
                                 struct slot *slot, struct shown *shown);
void staged_names_free(struct staged_name *names); /* NULL is fine */
bool staged_hides(struct fs *fs, fuse_ino_t ino, const struct slot *slot,
                  const char *name);

#endif
