/* SPDX-License-Identifier: MIT */
/* save/staging_priv.h - what the files of a staging directory's life share. */
#ifndef UFS_SAVE_STAGING_PRIV_H
#define UFS_SAVE_STAGING_PRIV_H

#include "save/staged.h"
#include "save/staging.h"

enum { STAGING_STAGES = 8 };

struct stage_progress {
    uint64_t units;
    bool done;
};

struct staging {
    char *target, *parent, *name, *path; /* of the target, of its directory; of ours */
    char *what;
    unsigned part, parts;
    int parent_fd, fd, data_fd, journal_fd;
    int unsure_fd; /* a directory that may not have what was renamed in it, or -1 */
    struct stage_progress stage[STAGING_STAGES];
};

/* ---- the journal of a part ---- */

void staging_journal_name(unsigned part, unsigned parts, char dst[64]);

/* This part's journal, locked, with its progress read, or begun. */
int staging_journal_open(struct staging *s, struct err *e);

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

#endif
