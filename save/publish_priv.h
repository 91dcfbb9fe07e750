/* SPDX-License-Identifier: MIT */
/* save/publish_priv.h - what the files of a step share. */
#ifndef UFS_SAVE_PUBLISH_PRIV_H
#define UFS_SAVE_PUBLISH_PRIV_H

#include "save/publish.h"

struct buf;

enum { STEP_TEXT_MAX = 256 << 20 }; /* a line per file: about a million */

/* A file of the step. Entry number N of the journal has its old file in old/N. */
struct step_entry {
    enum publish_kind kind;
    unsigned stage;
    char *path;
    bool had;           /* the target has a file of this name before the step: */
    struct file_id old; /* ino, size, mtime */
    uint64_t ino, size; /* of the new file of a PUT */
};

/* A directory that the step makes; or that was `there`, and stays even if it is empty. */
struct step_dir {
    char *path;
    bool there;
    uint32_t mode, uid, gid;
};

/* Sorted by stage, then path; `dir` by path. */
struct step {
    uint64_t target_ino;
    struct step_entry *entry;
    size_t entries, entry_cap;
    struct step_dir *dir;
    size_t dirs, dir_cap;
    char *note; /* or NULL */

    /* Of a step that runs, not of its journal. */
    const struct publish_place *at;
    char staging_name[NAME_MAX + 1];
    int target, staging, data, old; /* descriptors, or -1 */
    bool unsynced; /* the disk could not say that it has what was renamed */
};

/* An empty one without descriptors. */
void step_init(struct step *s);
void step_release(struct step *s);

/* Copies of what they get; `path` becomes the step's, or is freed. */
int step_add(struct step *s, const struct step_entry *entry, struct err *e);
int step_add_dir(struct step *s, const struct step_dir *dir, struct err *e);

/* Sorts, and refuses a path that is there twice. -EINVAL. */
int step_sort(struct step *s, struct err *e);

/* ---- its journal ---- */

int step_text(const struct step *s, struct buf *out, struct err *e);

/* `text` is changed. -EBADMSG: no journal of a step, or paths that must not be followed. */
int step_read(struct step *s, char *text, size_t len, struct err *e);

/* The journal of this name in the staging directory. -ENOENT, -EBADMSG. */
int step_load(struct step *s, int staging, const char *name, struct err *e);

/* ---- running it ---- */

/*
 * The entry that is exchanged in the end, so that every moment shows the old or the new
 * checkpoint; NULL: all old files leave first.
 */
const struct step_entry *step_exchanged(const struct step *s);

/* Is there more than one rename, so that files that are held must leave? */
bool step_holds(const struct step *s);

/* The name of an entry's old file in old/. */
void step_old_name(const struct step *s, const struct step_entry *entry, char dst[24]);

/* The directory in which the entry's file is, below the target or data/; and its name there. */
int step_parent(int top, const char *path, const char **name, struct err *e);

/* From the durable journal to the end, from wherever it was interrupted; -ESTALE, others. */
int step_forward(struct step *s, struct err *e);

/* Back to what was before it, files that others changed excepted; removes the journal. */
int step_undo(struct step *s, struct err *e);

#endif
