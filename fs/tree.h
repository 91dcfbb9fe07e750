/* SPDX-License-Identifier: MIT */
/* fs/tree.h - what a directory of the source shows in the mount. */
#ifndef UFS_FS_TREE_H
#define UFS_FS_TREE_H

#include "fs/fs.h"
#include "fs/node.h"
#include "fs/slot.h"

/* A handler that must wait for a scan says so; it is run again where it may. */
enum { FS_LATER = 1, FS_FILL = 3 }; /* fs/request.h; fs/staged.h has the 2 */

enum shown_kind {
    SHOWN_DIR,
    SHOWN_FILE,
    SHOWN_LINK,
    SHOWN_FILE_DIR, /* a file that is a checkpoint by itself */
    SHOWN_META,     /* .unshard beside trackers */
    SHOWN_LATEST,
    SHOWN_INSIDE, /* what a checkpoint has of ours */
};

struct shown_entry {
    enum shown_kind kind;
    enum inside inside; /* SHOWN_INSIDE */
    uint32_t index;     /* of it, as slot_ino() takes it */
    const char *name;
    const char *part;     /* the part it was lifted from, or NULL */
    bool whole;           /* SHOWN_FILE: a checkpoint by itself (fs/written.h) */
    struct entry_stat st; /* what stands in the source */
};

/*
 * A snapshot of what a directory shows, shared by all who list it or look up names.
 * Entries are sorted by name.
 */
struct shown {
    atomic_uint refs;
    _Atomic int64_t until_ns; /* when to look again; put to 0 by who changed it */
    uint64_t turn;            /* nodes_turn() before it was looked at */
    struct slot *slot;        /* the checkpoint, or NULL */
    char *latest;             /* the step that a tracker names, or NULL */
    struct listing *listing;  /* holds the names */
    struct shown_entry *entry;
    size_t count, cap;
};

struct shown *shown_get(struct shown *s);
void shown_put(struct fs *fs, struct shown *s); /* NULL is fine */

/* What the directory shows now. FS_LATER: it takes a scan and `may_block` is false. */
int tree_shown(struct fs *fs, struct node *dir, bool may_block, struct shown **out,
               struct err *e);

const struct shown_entry *shown_find(const struct shown *s, const char *name);

/* The path of an entry in the store. */
int shown_path(const struct node *dir, const struct shown_entry *entry, char *dst,
               size_t size, struct err *e);

/*
 * The slot of a directory that is a checkpoint, looked at within a second. -ENOENT: the
 * scanner sees no checkpoint there. FS_LATER as above.
 */
int tree_slot(struct fs *fs, struct node *dir, const char *path, const char *file,
              bool may_block, struct slot **out, struct err *e);

/* The names of ours in a checkpoint's directory, for telling the kernel. */
extern const char *const tree_own_names[];

/*
 * The step that the trackers in the store's directory `path` name, when that is a
 * directory there; malloc'd, or NULL.
 */
char *tracker_target(struct fs *fs, const char *path);

/*
 * The same of a checkpoint's own directory: the tag of a part of it (DeepSpeed's, in a
 * Trainer's checkpoint) is no step.
 */
char *tracker_of_slot(struct fs *fs, const struct slot *slot);

#endif
