/* SPDX-License-Identifier: MIT */
/* fs/save_files.h - the files of a stage when it is published: those that came, those that stay. */
#ifndef UFS_FS_SAVE_FILES_H
#define UFS_FS_SAVE_FILES_H

#include "fs/stage.h"
#include "save/merge.h"

struct arena;

struct save_rights {
    mode_t mode;
    uid_t uid;
    gid_t gid;
    struct timespec mtime; /* of a directory: when names in it came and went */
    struct file_id base;   /* what the file began with, or ino 0; */
    bool same;             /* and is, as nothing was done to it */
    struct came *came;     /* of the file; by the lock of stages */
};

struct save_files {
    struct arena *arena; /* holds all texts */
    struct merge_file *file;
    struct save_rights *rights; /* of each */
    size_t count, cap;
    const char **dir; /* directories, those above first */
    struct save_rights *dir_rights;
    size_t dirs, dirs_cap;
    struct merge_removal *removed; /* names in tensors/ */
    size_t removals, removals_cap;
    const char **gone; /* side files */
    size_t gones, gones_cap;
    bool lost_objects; /* objects came, and no file that has them (fs/save_beside.h) */
    struct save_rights root; /* of its directory, and the owner of its storage */
};

/* With the lock of stages. */
int save_files_list(const struct stage *s, struct save_files *out, struct err *e);
/* Does it change nothing? */
bool save_files_none(const struct save_files *f);
/* Is this a name of a view (tensors/, tree/, raw/ and what is in them)? */
bool save_files_is_view(const char *path);
/* Did a copy of objects (.unshard/objects.json) come along that has any in it? */
bool save_files_bring_objects(const struct stage *s, const struct save_files *f);
/* It was not published: who is not root can open again what got other rights for that. */
void save_files_again(const struct stage *s, const struct save_files *f);
void save_files_release(struct save_files *f);

/* The rights of storage files: those that all files had from which they were made. */
mode_t save_files_mode(const struct stage *s, const struct save_files *f);

/* Is this file one of the new checkpoint's, under its own name? */
bool save_files_is_placed(const struct stage *s, const struct save_files *f,
                          const struct merge *m, size_t i);

/* -EINVAL: one came into the directory of a view and is no tensor: it would be lost. */
int save_files_check(const struct save_files *f, struct err *e);

/*
 * Files that began with the bytes of one in the source and have others now: -EINVAL where that
 * one has, too. Whoever appends to a log there would lose it.
 */
int save_files_check_bases(struct fs *fs, const struct stage *s,
                           const struct save_files *f, struct err *e);

/* The new directory gets the time that it had while it was written. */
void save_files_date(const struct stage *s);

/* All that came as it came, from the `first` file on, in the new directory, for a look at it. */
int save_files_link(const struct stage *s, const struct save_files *f, size_t first,
                    struct err *e);

/*
 * Has the disk failed to take any bytes of what came and was read for tensors? What was read may
 * be what stood there before.
 */
int save_files_check_read(struct fs *fs, const struct stage *s,
                          const struct save_files *f, struct err *e);

/* Puts into the new checkpoint what came and is no tensor. All of it is durable then. */
int save_files_place(struct fs *fs, const struct stage *s, const struct save_files *f,
                     const struct merge *m, struct err *e);

/*
 * The same of what the checkpoint that was there has beside its storage, or with that, where
 * it was not rewritten: what has changed of it stands in the new one by then. Files are
 * linked, not copied.
 */
int save_files_carry(struct fs *fs, const struct stage *s, const struct save_files *f,
                     bool rewritten, struct err *e);

#endif
