/* SPDX-License-Identifier: MIT */
/* fs/write.h - requests that change something, of a mount with -o rw. */
#ifndef UFS_FS_WRITE_H
#define UFS_FS_WRITE_H

#include "fs/node.h"
#include "fs/request.h"

struct shown;
struct slot;
struct stage;
struct staged;
struct staged_handle;

/* A directory that a request names, with the lock of stages held once it was found. */
struct where {
    bool remove;        /* asked for: also where nothing can be written */
    pid_t pid;          /* the thread that removes */
    const char *mkdir;  /* asked for: a directory of this name is to be made */
    struct staged *dir; /* of a stage; or */
    struct node
        *node; /* a directory of the source: no checkpoint, or untouched by it */
};

/* With the lock held when it returns 0. */
int where_find(struct fs *fs, fuse_ino_t ino, struct where *out, struct err *e);
/* What the directory shows, with a checkpoint that is as the source has it now. */
int where_shown(struct fs *fs, struct node *n, struct shown **out, struct err *e);
int where_refused(struct err *e, const char *what);

/* Before its first change: is the checkpoint what we know? -ESTALE: it is another one. */
int where_check_current(struct fs *fs, struct slot *slot, struct err *e);
enum where_why {
    WHERE_WRITE,
    WHERE_REMOVE,
    WHERE_REMOVE_ALL, /* as the removal of a whole checkpoint begins */
};

/*
 * With the lock: the stage of a checkpoint that is there, made if need be. -EROFS: it cannot
 * be changed; removed as a whole it can be, whatever its format.
 */
int where_stage(struct fs *fs, struct slot *slot, enum where_why why,
                struct stage **out, struct err *e);
/* With the lock: the directory of a view (tensors/, raw/, ...) in such a stage. */
int where_fixed(struct fs *fs, struct stage *s, enum inside kind, struct staged **out,
                struct err *e);

/*
 * With the lock: are names of this checkpoint's directory changed as those of any other? So they
 * are while something is staged over it, and where it is a file that is shown as such.
 */
bool where_is_plain(struct fs *fs, const struct slot *slot);

/* With the lock: the root of the new checkpoint of this name in a directory of the source. */
struct staged *where_new_root(struct fs *fs, const struct node *dir, const char *name);

/*
 * With the lock: may a new directory of this name come to what is shown by a rename, with no
 * change of the checkpoint that this may be?
 */
bool where_is_free(struct fs *fs, struct shown *shown, const char *name);

/* With the lock: a new file of the name, where something hidden makes room. */
int write_new_file(struct request *r, struct staged *dir, const char *name,
                   struct staged **out, struct err *e);

/*
 * Names of staging directories are ours: what had one would be taken for a save's rest.
 * -EACCES: it is one.
 */
int write_check_name(const char *name, struct err *e);

/* Answers create (entry) or open (NULL) with this handle, which it takes over. */
int write_reply_opened(struct request *r, struct staged_handle *h,
                       const struct fuse_entry_param *entry);
/* Answers create (entry) or open with a handle on a file of the source itself. */
int write_reply_plain(struct request *r, int fd, const struct fuse_entry_param *entry);

/* All answer the request, or return a negative errno. */
int write_mkdir(struct request *r, struct err *e);
int write_create(struct request *r, struct err *e);
int write_unlink(struct request *r, struct err *e);
int write_link(struct request *r, struct err *e);
int write_symlink(struct request *r, struct err *e);
int write_rmdir(struct request *r, struct err *e);
int write_rename(struct request *r, struct err *e);
int write_setattr(struct request *r, const struct stat *attr, int to_set,
                  struct err *e);
int write_setxattr(struct request *r, const char *value, struct err *e);
int write_bytes(struct request *r, const char *data, struct err *e);
int write_fallocate(struct request *r, off_t len, struct err *e);
int write_fsync(struct request *r, struct err *e);
int write_fsyncdir(struct request *r, struct err *e);

/*
 * Opens what a checkpoint has by r->fi.flags for writing: a file of its stage covers it
 * from now on. STAGED_NONE: a file of the source that is no checkpoint's.
 */
int write_over(struct request *r, struct staged_handle **out, struct err *e);

/* open(2) of what is staged, or for writing; STAGED_NONE: neither. */
int write_open(struct request *r, struct err *e);

#endif
