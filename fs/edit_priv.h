/* SPDX-License-Identifier: MIT */
/* fs/edit_priv.h - what the files of transactions share. */
#ifndef UFS_FS_EDIT_PRIV_H
#define UFS_FS_EDIT_PRIV_H

#include "base/buf.h"
#include "fs/disk_ops.h"
#include "fs/edit.h"
#include "fs/ops.h"
#include "save/intake.h"
#include "save/save_format.h"
#include "save/txn.h"

/*
 * A target is a directory D of the source to whose view names something was written. Lock
 * order: `busy` of a target, then the lock of edits, then those of other tables.
 */
/*
 * A checkpoint that came of view names in this mount. What comes until fsync of its directory
 * belongs to it, and it becomes what it would be if all had come together.
 */
struct made {
    char *save;   /* the value of save=; NULL: the checkpoint was there */
    char *format; /* what it is since; NULL: nobody has looked yet */
    bool sets[3]; /* roles that came in sets */
};

struct target {
    struct target *next;
    struct disk_node *dir; /* pinned */

    /* guarded by the lock of edits */
    unsigned users;
    char *save;                   /* user.unshard.save, or NULL */
    struct edit_node *nodes;      /* those with a name */
    int64_t complete_ns, last_ns; /* files wait for publication since; 0: none */
    int64_t closed_ns; /* a file was closed last, or the directory was made */
    bool failed;       /* it could not be published, and nothing has changed since */
    /*
     * The process that made the directory under save=, and copies a tree into it: names that it
     * did not write there are absent for it, as on a disk, while it goes on. 0: nobody.
     */
    pid_t maker;
    char **written; /* what was written, as paths */
    size_t nwritten, written_cap;

    /*
     * For reading while bytes are received; for writing while it is published, and while
     * what follows changes.
     */
    pthread_rwlock_t busy;
    /* Held while a file is made and filled with its old bytes; taken before `busy`. */
    pthread_mutex_t begin;
    struct txn *txn;       /* NULL: nothing is staged */
    bool begun;            /* a step into it has begun and could not be ended */
    struct intake *intake; /* NULL: no safetensors file is being received */
    struct made
        made; /* changed with the lock of edits too, which is enough to read it */
};

/* A file or directory of a transaction. */
struct edit_node {
    fuse_ino_t ino; /* constant */
    uint64_t generation;
    struct target *target; /* constant; one user of it */
    bool is_dir;           /* constant */

    /* guarded by the lock of edits */
    struct edit_node *next; /* of the target's */
    uint64_t refs;          /* lookups of the kernel, handles, its name */
    char *path;             /* relative to D; NULL: it has no name any more */
    unsigned handles, writers;
    unsigned flushed; /* handles that close(2) has ended, and the kernel has not yet */
    uint64_t closed;  /* when it was closed last, among all of the mount */
    bool closing;     /* the last handle is gone; is it complete? */
    int64_t fresh_ns; /* made then, for an open that has not come yet; 0: it came */
    bool complete;    /* as of its last close */
    uint64_t charged; /* bytes that count for stage_size= */
    mode_t mode;
    uid_t uid;
    gid_t gid;
    struct timespec mtime;

    /* guarded by `busy` of the target */
    struct txn_file *file; /* of a file; a reference */
    int fd; /* of its bytes in in/, which is the file's; -1: they are received */
    struct intake_file *in; /* where its bytes are put into shards as they arrive */
    /* The file of the disk that it was renamed from, while somebody still writes that. */
    struct disk_node *follows;
};

/* What the next lookups of a thread find, after an open was answered with ESTALE. */
enum verdict { VERDICT_NONE, VERDICT_ABSENT, VERDICT_EDIT };

struct turned {
    pid_t tid;
    fuse_ino_t dir;
    enum verdict verdict;
    unsigned lookups; /* so many more */
    bool comes;       /* its open has not come yet */
    int64_t until_ns;
    char path[PATH_MAX];
};
enum { TURNED = 64 };

/* The view name that a thread looked up last: an open of it may meet a newer checkpoint. */
struct looked_up {
    pid_t tid;
    fuse_ino_t dir;
    char path[PATH_MAX];
};

struct edits {
    struct fs *fs;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* for the publisher, and for who waits for a close */
    /* guarded by lock */
    struct target *targets;
    struct edit_node **table; /* by number; 0 is never used */
    size_t cap, free;
    uint64_t generation, closes, charged;
    struct turned turned[TURNED];
    unsigned next_turned;
    struct looked_up looked_up[TURNED];
    unsigned next_looked_up;
    bool stop;
    pthread_t publisher;
    bool running;
};

/* An open file of a transaction. */
struct edit_handle {
    struct opened opened;
    struct edit_node *node;  /* a reference; NULL: what is written is dropped */
    int fd;                  /* of a spooled file, or -1 */
    struct buf text;         /* of a report of the mount */
    struct edit_names names; /* of a directory */
    bool writes;
    bool
        flushed; /* nothing was written since a close(2); guarded by the lock of edits */
};

/* ---- fs/edit.c ---- */

void edits_lock(struct fs *fs);
void edits_unlock(struct fs *fs);

/* The target of this directory, with one user more; NULL: none (and none is made). */
struct target *target_get(struct fs *fs, struct disk_node *dir, bool make);
void target_put(struct fs *fs, struct target *t); /* NULL is fine */

/*
 * Its transaction is there, and not published until target_leave(). Without `make` -ENOENT
 * where nothing is staged. What a dead mount has staged is taken up.
 */
int target_enter(struct fs *fs, struct target *t, bool make, struct err *e);

/*
 * With `busy` for writing. Where nothing is left the staging directory goes, and t->txn is NULL;
 * what is left begins anew from what is there.
 */
int target_settle(struct fs *fs, struct target *t, struct err *e);

/* With `busy` for writing: goes on with a step that has begun; its files are published then. */
int target_end_step(struct fs *fs, struct target *t, struct err *e);
void target_leave(struct target *t);

/* It was entered by edit_begin_at(). */
void target_begun(struct target *t);

/* Where it is, for save/; to be released. */
struct target_place {
    struct publish_place at;
    int fd;
    char name[NAME_MAX + 1], path[PATH_MAX];
};
int target_place(struct fs *fs, struct target *t, struct target_place *out,
                 struct err *e);
void target_place_release(struct target_place *p);

/* How it is saved: as the checkpoint that is there, or by save=. -ENOTSUP: not at all. */
/* Remembers the files of the checkpoint as they are. `busy` is held for writing. */
int edit_base(struct fs *fs, struct target *t, struct err *e);

/* The text of save= that holds for the directory, copied; NULL: none. */
char *target_save(struct fs *fs, struct target *t);

/* These files were published, as a `new` checkpoint or into one. With `busy`, for writing. */
void target_note_made(struct fs *fs, struct target *t, bool new,
                      struct edit_node *const *node, size_t nodes);
/* What comes later is an edit of the checkpoint. */
void target_end_made(struct fs *fs, struct target *t);
void made_release(struct made *m);

int target_format(struct fs *fs, struct target *t, const struct generation *gen,
                  struct save_format *out, struct err *e);

/* With the lock. A reference goes with each that is returned. */
struct edit_node *edit_node_find(struct target *t, const char *path);
int edit_node_new(struct fs *fs, struct target *t, const char *path, bool is_dir,
                  struct edit_node **out, struct err *e);
void edit_node_ref(struct edit_node *n);
/* It has no name any more. With the lock; `busy` is held for writing, or it is no file. */
void edit_node_unlink(struct fs *fs, struct edit_node *n);

/* Without the lock. */
struct edit_node *edit_node_of(struct fs *fs, fuse_ino_t ino);
void edit_node_put(struct fs *fs, struct edit_node *n, uint64_t refs);

/* A new file of the transaction, which was entered. */
int edit_file_new(struct request *r, struct target *t, const char *path, mode_t mode,
                  struct edit_node **out, struct err *e);

/* Is it a name by which a set of safetensors files is received? */
bool edit_is_received(const char *path);

/* ---- fs/edit_maker.c ---- */

/* Is it the process that made this directory, and copies into it? */
bool edit_is_maker(struct request *r, struct disk_node *dir);

/* A view name was written. */
void edit_wrote(struct fs *fs, struct target *t, const char *path);
/* Is the view name absent for who asks? */
bool edit_is_absent(struct request *r, struct disk_node *dir, const char *path);
/* The directory is published, or read: everybody sees everything. */
void edit_settle_maker(struct fs *fs, struct target *t);
void edit_maker_read(struct request *r, struct disk_node *dir);
void edit_maker_release(struct target *t);

/* ---- verdicts ---- */
void edit_turn_away(struct fs *fs, const struct request *r, fuse_ino_t dir,
                    const char *path, enum verdict verdict);
/* Is this what the thread's next lookups of the name find? Such an answer uses one up. */
bool edit_verdict_is(struct fs *fs, const struct request *r, fuse_ino_t dir,
                     const char *path, enum verdict verdict);
/* With the lock: was an open of it announced that has not come? */
bool edit_is_coming(const struct edits *x, const struct edit_node *n);
void edit_came_back(struct fs *fs, const struct request *r);
void edit_note_lookup(struct request *r, fuse_ino_t dir, const char *path);
/* False: none is noted. */
bool edit_noted_lookup(struct request *r, fuse_ino_t *dir, char path[PATH_MAX]);

/* ---- fs/edit_name.c ---- */

/* A view name: the directory whose view it is, and its path there. */
struct edit_place {
    struct fs *fs;
    struct disk_node *dir;  /* pinned */
    struct generation *gen; /* a reference; NULL: no checkpoint */
    bool drops;             /* below .unshard: it stores nothing */
    char path[PATH_MAX];
};
/* What an earlier mount has staged for the directory is taken up, once in a mount. */
int edit_take_up(struct fs *fs, struct disk_node *dir, struct err *e);
int edit_place(struct request *r, fuse_ino_t parent, const char *name,
               struct edit_place *out, struct err *e);
void edit_place_release(struct edit_place *p);
/* "tensors/NAME.npy" of the tensor that has this view name. -ENOENT: there is none. */
int edit_npy_path(struct fs *fs, const struct edit_place *p, char dst[PATH_MAX],
                  struct err *e);

/*
 * May the caller change views of this directory? Every file that the step may replace has to
 * be writable, and the directory. -EROFS: nobody can.
 */
int edit_may_write(struct request *r, const struct edit_place *p, struct err *e);

/*
 * To write this file: its target, entered, with one user more, and the file with a reference, or
 * NULL: the caller makes it, and no other request does meanwhile. Until target_begun().
 */
int edit_begin_at(struct request *r, const struct edit_place *p, struct target **t,
                  struct edit_node **n, struct err *e);

/* ---- fs/edit_file.c ---- */

void edit_stat(struct fs *fs, struct edit_node *n, struct stat *st);
int edit_entry(struct fs *fs, struct edit_node *n, struct fuse_entry_param *out);
int edit_reply_opened(struct request *r, struct edit_node *n, struct err *e);
/*
 * Begins a change of what a view, or a stored file, has. Without O_TRUNC it starts with these
 * bytes. Then the request is to be answered with -ESTALE: the kernel looks the name up again,
 * and this thread finds the transaction's file.
 */
int edit_begin(struct request *r, const struct edit_place *p, fuse_ino_t view, int fd,
               struct err *e);
int edit_open_view(struct request *r, struct err *e);
/* Of a file that was published since its name was looked up: its successor begins. */
int edit_open_published(struct request *r, struct err *e);
int edit_setattr_view(struct request *r, const struct stat *attr, int to_set,
                      struct err *e);
/* The file gets this length. The transaction was entered. */
int edit_cut(struct edit_node *n, uint64_t size, struct err *e);
/* All bytes of a file of the disk become those of the transaction's file. */
int edit_receive_copy(struct request *r, const struct edit_place *p, int fd,
                      struct disk_node *stored, struct err *e);
int edit_reply_created(struct request *r, struct edit_node *n, struct err *e);
/* Answers open, opendir (entry NULL) or create with this handle, which it takes over. */
int edit_reply_handle(struct request *r, struct edit_handle *h,
                      const struct fuse_entry_param *entry);
int edit_names_add(struct edit_names *l, const char *name, uint64_t ino, mode_t type,
                   struct err *e);
/*
 * 1: all of it is there; 0: not yet; -EINVAL: it can never be published as it is; -ENOTSUP:
 * its elements have no type that is known.
 */
int edit_judge(struct fs *fs, struct edit_node *n, const struct generation *gen,
               struct err *e);

/* ---- fs/edit_publish.c ---- */

/*
 * Publishes what is complete, with removals if `all`. -EAGAIN: something is incomplete, and
 * stays staged. The target is not entered.
 */
int edit_publish(struct fs *fs, struct target *t, bool all, struct err *e);
int edit_move_target(struct request *r, struct disk_node *moved, struct disk_node *to,
                     struct err *e);
/* A file was closed for the last time: is it complete? Without the lock. */
void edit_closed(struct fs *fs, struct edit_node *n);
/* Does a file that is complete wait for publication? */
bool edit_waits(struct fs *fs, struct target *t);

#endif
