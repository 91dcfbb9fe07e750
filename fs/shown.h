/* SPDX-License-Identifier: MIT */
/* fs/shown.h - a snapshot of what a directory shows. */
#ifndef UFS_FS_SHOWN_H
#define UFS_FS_SHOWN_H

#include "fs/fs.h"
#include "fs/slot.h"

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
    struct entry_stat st; /* what stands in the source */
};

/* A snapshot of what a directory shows, shared by all who list it or look up names. */
struct shown {
    atomic_uint refs;
    _Atomic int64_t until_ns;  /* when to look again */
    struct slot *slot;         /* the checkpoint, or NULL */
    char *latest;              /* the step that a tracker names, or NULL */
    struct listing *listing;   /* holds the names */
    struct shown_entry *entry; /* sorted by name */
    size_t count, cap;
};

struct shown *shown_make(void); /* NULL: out of memory */
struct shown *shown_get(struct shown *s);
void shown_put(struct fs *fs, struct shown *s); /* NULL is fine */

void shown_sort(struct shown *s);

/* Valid as long as the snapshot. */
const struct shown_entry *shown_find(const struct shown *s, const char *name);

#endif
