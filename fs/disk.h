/* SPDX-License-Identifier: MIT */
/* fs/disk.h - inodes of the source in a mount for writing. */
#ifndef UFS_FS_DISK_H
#define UFS_FS_DISK_H

#include <sys/stat.h>

#include "fs/fs.h"
#include "remote/ring.h"

struct generation;

/*
 * A mount for writing passes names of the source straight through. The kernel knows a file
 * or directory by the number of its node; a node is what has one device, inode number and
 * time of birth, whatever its names are. It is reached by a descriptor that stands for it
 * (O_PATH). Where there are too many of these, the ones unused for longest are closed and
 * opened again from the directory and name where the node was seen last.
 */
struct disk_node {
    /* constant */
    fuse_ino_t ino;
    uint64_t generation;
    uint64_t dev, inode;
    int64_t born_ns;
    mode_t type; /* S_IFMT bits */

    /* guarded by the lock of the table */
    uint64_t refs;            /* lookups of the kernel, children, pins */
    int fd;                   /* O_PATH, or -1 */
    unsigned users;           /* of fd */
    unsigned moves;           /* of the store, when it was seen last */
    bool keeps_fd;            /* it may have no name any more */
    struct disk_node *parent; /* where it was seen last; a reference. NULL: the root */
    char *name;
    uint64_t changes; /* below it, through this mount */
    unsigned writers; /* open files that may write it */
    struct generation
        *gen; /* the checkpoint that the directory is, as of the last look */
    uint64_t gen_changes;   /* `changes` at that time, */
    int64_t looked_ns;      /* which is this; 0: never */
    bool looked_for_staged; /* by fs/edit_name.c, once in a mount */
    struct ring unused;     /* when users is 0 and fd is open */
    struct disk_node *next;
};

int disk_new(struct fs *fs, struct disk **out, struct err *e);
void disk_free(struct fs *fs);

/* The store's root may be on another file system than before: then so is the root here. */
void disk_follow(struct fs *fs);

/* The node with this number, with a reference; NULL: none. */
struct disk_node *disk_pin(struct fs *fs, fuse_ino_t ino);
void disk_unpin(struct fs *fs, struct disk_node *n); /* NULL is fine */
void disk_forget(struct fs *fs, fuse_ino_t ino, uint64_t lookups);

/*
 * The descriptor of a pinned node, until disk_put(). Returns -ESTALE where it cannot be
 * found again, -EIO while the file system of the source is unmounted.
 */
int disk_get(struct fs *fs, struct disk_node *n, struct err *e);
void disk_put(struct fs *fs, struct disk_node *n);

/*
 * openat(2) that goes on where no descriptor is left: nodes have some that nobody uses, and
 * find their files again.
 */
int disk_openat(struct fs *fs, int at, const char *name, int flags, mode_t mode);

/*
 * What `name` of the directory is now; the reference is the kernel's or the caller's. The
 * kernel judges by the rights that this thread has. Returns -ENOENT, -EACCES, ...
 */
int disk_find(struct fs *fs, struct disk_node *dir, const char *name,
              struct disk_node **out, struct stat *st, struct err *e);

/* The node of that name if the kernel knows it, with a reference; else NULL. */
struct disk_node *disk_known(struct fs *fs, struct disk_node *dir, const char *name);

/* It has this name from now on. */
void disk_moved(struct fs *fs, struct disk_node *n, struct disk_node *dir,
                const char *name);

/* It may lose its last name now: its descriptor stays open. */
void disk_keep(struct fs *fs, struct disk_node *n);

/* Its path below the source, "" for the root. Returns -ESTALE, -ENAMETOOLONG. */
int disk_path(struct fs *fs, struct disk_node *n, char dst[PATH_MAX], struct err *e);

/* The directory where it was seen last, with a reference, and its name there; or NULL. */
struct disk_node *disk_place(struct fs *fs, struct disk_node *n,
                             char name[NAME_MAX + 1]);

/* The directory where it was seen last, with a reference; NULL: it is the root. */
struct disk_node *disk_parent(struct fs *fs, struct disk_node *n);

/* For what is guarded by the lock of the table, and little else. */
void disk_lock(struct fs *fs);
void disk_unlock(struct fs *fs);

/* How often something below this directory changed through the mount. */
uint64_t disk_changes(struct fs *fs, const struct disk_node *n);
/* Something below this directory (or this file) changed through the mount. */
void disk_changed(struct fs *fs, struct disk_node *n);

/* A file that may write it was opened, or closed (by: 1, -1). How many are there now? */
unsigned disk_writers(struct fs *fs, struct disk_node *n, int by);

/* A path that leads to the descriptor itself, for calls that take no descriptor. */
struct disk_proc {
    char path[32];
};
struct disk_proc disk_proc(int fd);

#endif
