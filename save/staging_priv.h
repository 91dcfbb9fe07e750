/* SPDX-License-Identifier: MIT */
/* save/staging_priv.h - what the files of a staging directory's life share. */
#ifndef UFS_SAVE_STAGING_PRIV_H
#define UFS_SAVE_STAGING_PRIV_H

#include "save/staging.h"
#include "save/witness.h"

enum { STAGING_STAGES = 8 };

/* What lies in a staging directory, beside journals. */
#define STAGING_DATA "data"
#define STAGING_SPOOL "in"
#define STAGING_REMOVED "removed"
/*
 * Made when all is durable, just before data/ is renamed. Where it is without data/, the
 * rest is what a published save left when it was killed: its journals speak of files that
 * are no longer here, and must not be believed by the next save of this name.
 */
#define STAGING_PUBLISHED "published"

struct stage_progress {
    uint64_t units;
    bool done;
};

struct staging {
    char *target, *parent, *name, *path; /* of the target, of its directory; of ours */
    char *what;
    unsigned part, parts;
    int parent_fd, fd, data_fd, journal_fd, spool_fd;
    int unsure_fd; /* a directory that may not have what was renamed in it, or -1 */
    struct stage_progress stage[STAGING_STAGES];
    bool kept; /* data/ is others' work */
    struct witness
        stored;   /* the target's storage when this was opened; ino 0: unknown */
    bool watched; /* `witness` is set: */
    struct witness witness; /* of all that it holds when it is published */
};

/* Sets errno's words: "WHAT PATH: why". Returns -errno. */
int staging_fail(struct err *e, const char *what, const char *path);

/* mkdir that is content with what is there, and a descriptor of it. */
int staging_make_dir(int at, const char *name, int *fd, struct err *e);

/* ---- the journal of a part ---- */

void staging_journal_name(unsigned part, unsigned parts, char dst[64]);
bool staging_is_journal(const char *name);

/* This part's journal, locked, with its progress read, or begun. */
int staging_journal_open(struct staging *s, struct err *e);

/* A mount's, locked: what it says counts no more. -EBUSY: somebody writes it. */
int staging_journal_lock(struct staging *s, struct err *e);

/* -ENOENT: it was taken away, directory and all, while we waited for its lock. */
int staging_journal_is_here(const struct staging *s, struct err *e);

/* Empties it, and says durably what is saved. */
int staging_journal_begin(struct staging *s, struct err *e);

/* Adds a line, durably. */
int staging_journal_append(struct staging *s, const char *text, struct err *e);

/*
 * The journal's first line says what is being saved; -EINVAL when that is another save. A
 * last line that was cut is none: *whole are the bytes before it, 0 where not even the first
 * line is there.
 */
int staging_journal_read(struct staging *s, int fd, uint64_t *whole, struct err *e);

/* Is this the first line of a journal of a mount of this host? */
bool staging_journal_is_local(const char *line);

/* ---- taking away ---- */

/* Our own files only: not deeper than a layout makes directories. */
int staging_remove_tree(int at, const char *name, unsigned depth, struct err *e);

/* The staging directory `path` of `parent`. */
int staging_remove(int parent, const char *path, struct err *e);

#endif
