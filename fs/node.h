/* SPDX-License-Identifier: MIT */
/* fs/node.h - the nodes outside of checkpoints: directories, side files, links. */
#ifndef UFS_FS_NODE_H
#define UFS_FS_NODE_H

#include "fs/fs.h"

struct snapshot;
struct generation;

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
    uint64_t inode;

    /* guarded by the lock of nodes */
    uint64_t refs; /* lookups of the kernel, children, pins */
    struct node *next, *next_at;
    atomic_bool orphan;        /* its name went to another node */
    struct snapshot *snapshot; /* what a directory showed lately */
    struct generation *gen;    /* the checkpoint it is, as of the last look */
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
struct snapshot *node_snapshot(struct fs *fs, struct node *n);
/* A new look at it, which is remembered (takes a reference of its own). */
void node_set_snapshot(struct fs *fs, struct node *n, struct snapshot *snapshot);

struct generation *node_generation(struct fs *fs,
                                   struct node *n); /* a reference, or NULL */
/* Takes up a checkpoint, which is watched from now on (NULL: none any more); takes one
 * reference of its own. */
void node_set_generation(struct fs *fs, struct node *n, struct generation *gen);

/* Is it this file or directory still? */
static inline bool node_stands_for(const struct node *n, uint64_t dev, uint64_t inode)
{
    return n->dev == dev && n->inode == inode;
}

/* What directories of this path showed lately counts no more. */
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
