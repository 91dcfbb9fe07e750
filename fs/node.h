/* SPDX-License-Identifier: MIT */
/* fs/node.h - the nodes outside of checkpoints: directories, side files, links. */
#ifndef UFS_FS_NODE_H
#define UFS_FS_NODE_H

#include "fs/fs.h"

struct shown;
struct slot;

enum node_kind {
    NODE_DIR,      /* a directory of the source; may be a checkpoint */
    NODE_FILE_DIR, /* a file that is a checkpoint by itself, shown as a directory */
    NODE_FILE,     /* a side file, byte for byte */
    NODE_LINK,     /* a link to a directory within the source */
    NODE_META,     /* .unshard beside a run's trackers */
    NODE_LATEST    /* the link `latest` there, or beside it */
};

/*
 * The kernel knows a node by its number in the table (1: the root) until it has
 * forgotten every lookup. A name whose file or directory became another one is another
 * node; the old one is an orphan that old handles still use.
 */
struct node {
    uint64_t ino, generation;
    enum node_kind kind;
    struct node *parent; /* NULL: the root. A reference. */
    char *name;
    char *path; /* in the store: of itself, for META and LATEST of the directory */
    char *dir, *file; /* NODE_FILE_DIR: as scanner_get takes them */
    uint64_t dev;     /* of the file or directory it stands for, */
    atomic_uint_fast64_t inode;
    atomic_uint_fast64_t coming; /* and what publication puts in its place, or 0 */
    atomic_uint_fast64_t
        alias; /* the number the kernel has for it (fs/alias.h), or 0 */

    /* guarded by the lock of nodes */
    uint64_t refs; /* lookups of the kernel, children, pins */
    struct node *next, *next_at;
    atomic_bool orphan;  /* its name went to another node */
    struct shown *shown; /* what a directory showed lately */
    struct shown *made;  /* a list: what those who look at it just now are to find */
    uint64_t turn;       /* how often all of it was to be looked at again */
    struct slot *slot;   /* the checkpoint it is, as of the last look */
    struct node *next_watched;
    bool watched;    /* it is among those that node_take_watched takes */
    int64_t look_ns; /* the watcher's: not before then */
};

static inline bool node_is_dir(const struct node *n)
{
    return n->kind == NODE_DIR || n->kind == NODE_FILE_DIR || n->kind == NODE_META;
}

int nodes_new(struct nodes **out, struct err *e);
void nodes_free(struct fs *fs);

/* The node of an id that the kernel knows, valid until it forgets it. */
struct node *node_of_ino(struct fs *fs, fuse_ino_t ino);

struct node_spec {
    enum node_kind kind;
    const char *name, *path;
    const char *dir, *file;
    uint64_t dev, inode;
};

/* Finds or makes a child. The reference belongs to the kernel (or the caller). */
int node_intern(struct fs *fs, struct node *parent, const struct node_spec *spec,
                struct node **out, struct err *e);

void node_forget(struct fs *fs, fuse_ino_t ino, uint64_t n);

/* A reference to a node that the kernel may forget meanwhile; NULL: it did. */
struct node *node_pin(struct fs *fs, fuse_ino_t ino);
void node_unpin(struct fs *fs, struct node *n);

/* What was remembered of a directory, with a reference; NULL: nothing. */
struct shown *node_shown(struct fs *fs, struct node *n);
/*
 * Around a look: what is changed from the beginning on comes to what is found too. Then it is
 * remembered (takes one reference of its own), unless all was to be looked at again meanwhile,
 * or nothing was found.
 */
void node_look_begin(struct fs *fs, struct node *n, struct shown *shown);
void node_look_end(struct fs *fs, struct node *n, struct shown *shown, bool found);

/* Snapshots of one directory, remembered or being made, in which a name is to be changed. */
enum { NODE_SNAPSHOTS = 8 };
struct node_snapshots {
    struct node *dir; /* pinned; NULL: nobody knows it, and there are none */
    struct shown *shown[NODE_SNAPSHOTS];
    size_t count;
    uint64_t turn; /* later than that of each who asked before */
};
void nodes_snapshots(struct fs *fs, const char *path, struct node_snapshots *out);
void nodes_snapshots_put(struct fs *fs, struct node_snapshots *s);

/* The number that the kernel has of the file of the source at this path; 0: none. */
fuse_ino_t node_file_at(struct fs *fs, const char *path);

struct slot *node_slot(struct fs *fs, struct node *n); /* a reference, or NULL */
/* Takes up a checkpoint, which is watched from now on (NULL: none any more); takes one
 * reference of its own. */
void node_set_slot(struct fs *fs, struct node *n, struct slot *slot);

/* Pins the directory of the source that has this path; NULL: the kernel knows none. */
struct node *node_at(struct fs *fs, const char *path);

/*
 * The directory `path` stays the node it is while publication puts another in its place:
 * nodes_expect() before that step, nodes_replaced() after it.
 */
void nodes_expect(struct fs *fs, const char *path, uint64_t inode);
void nodes_replaced(struct fs *fs, const char *path, bool done);

/* Is it this file or directory still? */
static inline bool node_stands_for(const struct node *n, uint64_t dev, uint64_t inode)
{
    return n->dev == dev && (n->inode == inode || (n->coming && n->coming == inode));
}

/* This directory was removed, and is shown again: it is another node from now on. */
void nodes_renew(struct fs *fs, const char *path);

/*
 * What directories of this path showed lately counts no more; nor does what somebody began
 * to look at earlier, whenever that is remembered.
 */
void nodes_look_again(struct fs *fs, const char *path);

/* Forgets snapshots that nobody looked at for a while; long ones are megabytes. */
void nodes_tidy(struct fs *fs);

/*
 * Directories that are watched: those that became a checkpoint, woke up or lost their name
 * since they were taken last. Each is pinned; *out is malloc'd. -ENOMEM takes none.
 */
int node_take_watched(struct fs *fs, struct node ***out, size_t *count);

/* It is to be taken again. Without _again: another pin is made for that. */
void node_watch(struct fs *fs, struct node *n);
/* In place of node_unpin; nothing, where nobody else knows the node. */
void node_watch_again(struct fs *fs, struct node *n);

#endif
