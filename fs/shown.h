/* SPDX-License-Identifier: MIT */
/* fs/shown.h - a snapshot of what a directory shows, and what changed in it since. */
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
    bool whole;           /* SHOWN_FILE: a checkpoint by itself (fs/written.h) */
    struct entry_stat st; /* what stands in the source */
};

struct shown_name;
struct shown_change;

/*
 * A snapshot of what a directory shows, shared by all who list it or look up names. In a
 * large directory single names that are changed through the mount are changed in it too
 * (fs/amend.h): listing all of it again for each would make rm -r of n names a work of n
 * times n.
 */
struct shown {
    atomic_uint refs;
    _Atomic int64_t until_ns;  /* when to look again; put to 0 by who changed it */
    uint64_t turn;             /* of its node, before it was looked at */
    struct shown *next;        /* among those that are being made (fs/node.h) */
    struct slot *slot;         /* the checkpoint, or NULL */
    char *latest;              /* the step that a tracker names, or NULL */
    struct listing *listing;   /* holds the names */
    bool amends;               /* names may be changed one by one */
    struct shown_entry *entry; /* of that look, sorted by name; seen by shown_at() */
    size_t count, cap;

    pthread_mutex_t lock;
    /* guarded by lock */
    bool made;                   /* the look has ended */
    bool lost;                   /* a change found no memory */
    struct shown_name **changed; /* names that changed since it began, as they came */
    atomic_size_t nchanged;
    size_t changed_cap;
    void *by_name;               /* a tree of the same (search.h) */
    struct shown_change *states; /* of them, all that were ever seen */
};

struct shown *shown_make(void); /* NULL: no memory */
struct shown *shown_get(struct shown *s);
void shown_put(struct fs *fs, struct shown *s); /* NULL is fine */

/* As of now; valid as long as the snapshot. */
const struct shown_entry *shown_find(struct shown *s, const char *name);

/*
 * Places of a listing, of which each keeps its name for as long as the snapshot lives: what
 * stands at i, or NULL: nothing any more. There may come more at the end.
 */
size_t shown_places(struct shown *s);
const struct shown_entry *shown_at(struct shown *s, size_t i);
bool shown_is_empty(struct shown *s);

/*
 * Name by name, what stands in the source by now (NULL: nothing), as it was looked at in this
 * turn; an earlier turn's look changes nothing any more. Where that is not all that changes
 * by this name, or memory lacks, the snapshot counts no more.
 */
void shown_change(struct shown *s, const char *name, const struct shown_entry *now,
                  uint64_t turn);

/* The look is made: `until` then, if no more has changed meanwhile than what can be amended. */
void shown_made(struct shown *s, int64_t until_ns);

#endif
