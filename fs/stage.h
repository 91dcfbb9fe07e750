/* SPDX-License-Identifier: MIT */
/* fs/stage.h - what was written into the mount and is not published yet. */
#ifndef UFS_FS_STAGE_H
#define UFS_FS_STAGE_H

#include "base/fsutil.h"
#include "fs/around.h"
#include "fs/came.h"
#include "fs/fs.h"

struct node;
struct slot;
struct staging;

/*
 * A stage is one checkpoint in the making: a new directory, or changes of one that is
 * there. Its files lie in a spool on the source's disk under numbers, in the order in which
 * they came; what they are called stands in memory only, for a stage that nobody published
 * is worth nothing to another process. fs/save.c publishes it.
 */
struct stage;

enum staged_kind { STAGED_DIR, STAGED_FILE, STAGED_GONE /* hides a name */ };

/* `since` of a file of which nothing is older than its first write: it undoes nothing. */
#define STAGED_ALL_NEW UINT64_MAX

/* A node of a stage. Fields other than the constant ones: under the lock of stages. */
struct staged {
    /* constant */
    fuse_ino_t ino;
    uint64_t generation;
    enum staged_kind kind;
    uint64_t spool;    /* STAGED_FILE: its name in the spool */
    fuse_ino_t became; /* a published directory: its node (fs/alias.h), or 0 */
    fuse_ino_t covers; /* the node of a checkpoint in whose place it is, or 0 */

    struct stage *stage; /* NULL: published, or removed */
    struct staged *parent;
    char *name;
    void *children;       /* of a directory: a tree of them by name (search.h) */
    size_t count;         /* of them */
    uint64_t refs;        /* lookups of the kernel, handles, its place in the tree */
    unsigned writers;     /* handles that may write, */
    unsigned changing;    /* of those, written to since a close */
    unsigned handles;     /* all */
    struct paging paging; /* fs/around.h */
    uint64_t room;        /* bytes that count as staged (fs/stage_room.h) */
    uint64_t order; /* when it was closed last, or hidden, among all of its stage */
    uint64_t since; /* its bytes know nothing of what was closed later (fs/views.h) */
    char *dtype;    /* user.unshard.dtype, or NULL */
    mode_t mode;    /* permission bits */
    uid_t uid;
    gid_t gid;
    struct timespec mtime; /* of a directory */
    struct timespec ctime; /* of name and rights; a file's bytes have their own */
    struct came *came;     /* which of its bytes have come; of all names of the file */
    uint64_t to_disk;    /* bytes from the start that the disk was told to begin with */
    struct file_id over; /* over a directory: what its name has there; ino 0: nothing */
    struct file_id base; /* of the source: what its bytes began with; or ino 0 */
    bool marked;         /* it got other rights or times */
    bool removed;        /* unlinked; or a fixed directory of which nothing is left */
    bool checked;        /* its header was seen whole, and is sound: */
    bool stands;         /* by it, the file may be linked as it is */
    bool filling;  /* what it covers is copied into it: neither shown nor opened yet */
    uint64_t size; /* at the time it left its stage */
    uint64_t owes; /* it was unlinked, and has other names: the stage that waits */
    int unlinked_fd; /* of a file that was unlinked while it was written, or -1 */
};

struct stage {
    struct stage *next;
    uint64_t number;         /* constant; no other of this mount has it or had it */
    char *path;              /* of the directory in the store */
    struct staging *staging; /* beside it */
    struct staged *root;
    struct slot *slot; /* the checkpoint that is changed; NULL: a new directory */
    bool over; /* constant: a directory that is there, no checkpoint (fs/over.h) */
    uint64_t over_ino; /* its inode */
    char *format;      /* user.unshard.save, or NULL: the mount's */
    unsigned writers;
    uint64_t spools, closes;
    int64_t touched_ns; /* the last change */
    int64_t comes_ns;   /* until then, who opened a file by its old number comes back */
    bool publishing;    /* no change now */
    bool failed;        /* nothing changed since it could not be published */
    bool only_removed;  /* nothing but the removal of all of it can be done here */
    bool goes_along;    /* hidden as a whole: it goes with the checkpoint around it */
    bool whole;         /* published: what came stands as it came, views and all */
};

struct stages;

/*
 * Files below a checkpoint that are the source's own (fs/plain.h) are changed while no
 * checkpoint is replaced: what came to the one that goes away would go with it. Nothing
 * waits for the lock of stages in between.
 */
void stages_plain_begin(struct fs *fs);
void stages_plain_end(struct fs *fs); /* errno stays what it was */
void stages_place_begin(struct fs *fs);
void stages_place_end(struct fs *fs);

int stages_new(struct stages **out, struct err *e);
void stages_free(struct fs *fs);

void stages_lock(struct fs *fs);
void stages_unlock(struct fs *fs);

/* With the lock: the stage of this directory, or NULL. */
struct stage *stage_at(struct fs *fs, const char *path);
/* The same, or one of a directory below it: the one with the longest path. */
struct stage *stage_below(struct fs *fs, const char *path);
/* The next one (NULL: the first) of a directory below this one's, or NULL. */
struct stage *stage_inside(struct fs *fs, const struct stage *s,
                           const struct stage *after);
/* The first one, with the lock. */
struct stage *stage_first(struct fs *fs);

/* The one with this number, or NULL. */
struct stage *stage_numbered(struct fs *fs, uint64_t number);

/* Waits until it is not being published; with the lock. False: it is gone since. */
bool stage_wait(struct fs *fs, struct stage *s);
/* stage_at(), once nobody publishes that one. */
struct stage *stage_settled(struct fs *fs, const char *path);
/* With the lock, which it lets go: for so long, or until something ends. */
void stage_sleep(struct fs *fs, long ns);
/* The same, then waits as stage_wait() does. */
bool stage_sleep_wait(struct fs *fs, struct stage *s, long ns);
/* With the lock: publication has ended, who waits may go on. */
void stage_wake(struct fs *fs);

/*
 * Makes a stage for `path`: a new directory (slot NULL) or the checkpoint that is there.
 * With the lock. -EBUSY: another process writes it.
 */
int stage_new(struct fs *fs, const char *path, struct slot *slot, struct stage **out,
              struct err *e);

/*
 * A descriptor of the directory that holds `path`, beneath the source's root, and the
 * name in it.
 */
int stage_parent(const struct fs *fs, const char *path, const char **name,
                 struct err *e);

/* A descriptor of that directory itself. */
int stage_directory(const struct fs *fs, const char *path, struct err *e);

/* With the lock: takes all of its nodes out of it and frees it with what is on disk. */
void stage_end(struct fs *fs, struct stage *s, bool published);

static inline bool ino_is_staged(fuse_ino_t ino)
{
    return ino >> 62 == 1;
}

/* With the lock: the node of an id, or of what it covers; NULL: none. */
struct staged *staged_of_ino(struct fs *fs, fuse_ino_t ino);

/* With the lock. */
struct staged *staged_find(const struct staged *dir, const char *name);
int staged_add(struct fs *fs, struct staged *dir, const char *name,
               enum staged_kind kind, mode_t mode, struct staged **out, struct err *e);
void staged_remove(struct fs *fs, struct staged *n);
int staged_rename(struct fs *fs, struct staged *n, struct staged *dir, const char *name,
                  struct err *e);
void staged_ref(struct staged *n);
void staged_unref(struct fs *fs, struct staged *n, uint64_t refs);
void staged_cover(struct fs *fs, struct staged *n, fuse_ino_t ino);

/*
 * With the lock: a process (a thread's number) opens n by the number of what it covers. True:
 * it is told ESTALE, and the kernel looks the name up again for it, once; publication waits for
 * that. False: it has been told so just now, for whatever reason, or knows no name
 * (/proc/self/fd).
 */
bool staged_turn_away(struct fs *fs, struct staged *n, pid_t pid);
/* Without the lock: it is told ESTALE of something. */
void staged_told_stale(struct fs *fs, pid_t pid);
/* With the lock: it came back. */
void staged_came_back(struct fs *fs, struct staged *n, pid_t pid);

/*
 * With the lock: the disk did not take bytes [from, to) of it (0, UINT64_MAX: who knows
 * which). It is not published until they are written anew, or it is cut before them.
 */
void staged_lose(struct staged *n, int code, uint64_t from, uint64_t to);
void staged_cut(struct staged *n, uint64_t size);

/*
 * With the lock: has it a length that its bytes did not come to one after the other? If its
 * writer was killed, what lacks is zeros where a tensor is thought to be.
 */
bool staged_may_lack(const struct staged *n);

/* The file in the spool: its size and times; -errno. A descriptor of it. */
int staged_stat(const struct staged *n, struct stat *st);
int staged_open_spool(const struct staged *n, int flags);
/* A new file of the same stage has the bytes of another from now on: a hard link. */
int staged_link(const struct staged *from, const struct staged *to, struct err *e);

/* Calls fn for each child in order of names. */
void staged_each(const struct staged *dir, void (*fn)(void *user, struct staged *n),
                 void *user);

/*
 * Has somebody begun to remove all of the checkpoint (rm -r takes the reports in .unshard/
 * like all else, and takes them first; of one that cannot be changed anything)? And: shows
 * again all that was hidden, where that was not brought to its end; false: nothing else is
 * in the stage. With the lock.
 */
bool stage_is_removal(const struct stage *s);
bool stage_unhide(struct fs *fs, struct stage *s);

/* Something changed: publication is not due for a while. */
void stage_touch(struct stage *s);

/* Its path from the stage's root, "a/b"; -ENAMETOOLONG. */
int staged_path(const struct staged *n, char *dst, size_t size);

#endif
