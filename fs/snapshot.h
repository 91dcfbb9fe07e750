/* SPDX-License-Identifier: MIT */
/* fs/snapshot.h - a snapshot of what a directory shows. */
#ifndef UFS_FS_SNAPSHOT_H
#define UFS_FS_SNAPSHOT_H

#include "fs/fs.h"
#include "fs/generation.h"

enum snapshot_kind {
    SNAPSHOT_DIR,
    SNAPSHOT_FILE,
    SNAPSHOT_LINK,
    SNAPSHOT_FILE_DIR, /* a file that is a checkpoint by itself */
    SNAPSHOT_META,     /* .unshard beside trackers */
    SNAPSHOT_LATEST,
    SNAPSHOT_INSIDE, /* what a checkpoint has of ours */
};

struct snapshot_entry {
    enum snapshot_kind kind;
    enum inside inside; /* SNAPSHOT_INSIDE */
    uint32_t index;     /* of it, as generation_ino() takes it */
    const char *name;
    const char *part;     /* the part it was lifted from, or NULL */
    struct entry_stat st; /* what stands in the source */
};

/* A snapshot of what a directory shows, shared by all who list it or look up names. */
struct snapshot {
    atomic_uint refs;
    _Atomic int64_t until_ns;     /* when to look again */
    struct generation *gen;       /* the checkpoint, or NULL */
    char *latest;                 /* the step that a tracker names, or NULL */
    struct listing *listing;      /* holds the names */
    struct snapshot_entry *entry; /* sorted by name */
    size_t count, cap;
};

struct snapshot *snapshot_make(void); /* NULL: out of memory */
struct snapshot *snapshot_get(struct snapshot *s);
void snapshot_put(struct fs *fs, struct snapshot *s); /* NULL is fine */

void snapshot_sort(struct snapshot *s);

/* Valid as long as the snapshot. */
const struct snapshot_entry *snapshot_find(const struct snapshot *s, const char *name);

#endif
