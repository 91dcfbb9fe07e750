/* SPDX-License-Identifier: MIT */
/* save/txn.h - a transaction: what was written to view names of one directory and is not published. */
#ifndef UFS_SAVE_TXN_H
#define UFS_SAVE_TXN_H

#include <sys/types.h>
#include <time.h>

#include "base/base.h"
#include "save/publish.h"
#include "save/ranges.h"

struct buf;
struct err;

/*
 * A transaction is kept in the staging directory of its target (save/publish.h) and
 * survives its process:
 *
 *   lock       locked (flock) by the process that has the transaction
 *   journal    host, boot, process, the target's inode; files, ranges, removals, notes
 *   in/        bytes of files that are written to view names, as they arrive
 *   data/      files of the target that are ready, or are being made
 *   old/, redo a step that has begun (save/publish.h)
 *   ended      a step that is done, of which the journal does not know yet
 *   others     whatever the caller keeps there (txn_dir())
 *
 * All functions may be called from any thread; a struct txn has its own lock, which is never
 * held while data is synced. txn_close() ends the transaction: the caller sees to it that no
 * other call with it runs then. Files outlive it until their last txn_file_put(): what is
 * written to them returns -ESTALE then.
 */
struct txn;
struct txn_file;

/* ---- the transaction ---- */

enum txn_how {
    TXN_ANY,      /* take up what is staged, or begin */
    TXN_EXISTING, /* only take up: -ENOENT where nothing is staged */
};

/*
 * Takes up the transaction of this target, or begins one. A step that a crash interrupted is
 * ended first (then TXN_EXISTING gives -ENOENT: it is published). What a dead process of
 * this machine has staged is taken up with all its files: if the machine was not booted since,
 * with all bytes that the journal speaks of, else with those that were synced.
 *   -EBUSY  another process has it; or it is another machine's, a conversion's, or of
 *           a directory that had this name before (the message says which);
 *   -ENOENT the target is not there, or see above;
 *   -EBADMSG the journal is damaged.
 */
int txn_open(const struct publish_place *at, enum txn_how how, struct txn **out,
             struct err *e);

/*
 * Lets go of it, for another process or mount to go on: bytes are synced and the journal
 * says what has arrived. A transaction with nothing to keep (no files, no removals) is
 * removed. An error says what could not be made durable; t is freed in any case. NULL is fine.
 */
int txn_close(struct txn *t, struct err *e);

/* No files and no removals. */
bool txn_is_empty(struct txn *t);

/* Syncs the bytes of all files, and what the journal says of them. For SIGTERM, fsync. */
int txn_sync(struct txn *t, struct err *e);

/* Descriptors of the staging directory and of its data/, until t ends. */
int txn_dir(const struct txn *t);
int txn_data_dir(const struct txn *t);

/* Was anything taken up, or was it begun now? */
bool txn_was_taken_up(const struct txn *t);

/*
 * The caller has renamed the target: the staging directory goes along. A crash in between is no
 * loss where the parent is the same: txn_open() finds a transaction there by the target's
 * inode, too.
 */
int txn_moved(struct txn *t, const struct publish_place *to, struct err *e);

/* ---- notes ---- */

/*
 * A word (a-z, 0-9, '-', '.') and a text of the caller, kept in the journal: the format of the
 * save. NULL takes it back. As all that is changed below, it survives a kill when this returns,
 * and a power loss after the next txn_sync().
 */
int txn_note(struct txn *t, const char *word, const char *text, struct err *e);

/* A copy, which the caller frees; NULL: none. */
char *txn_noted(struct txn *t, const char *word);

/* ---- the base ---- */

/*
 * What the target has under this path, remembered once: if it is remembered already
 * nothing changes. To be called for each file that the step may replace or remove, before
 * anything is made of its bytes.
 */
int txn_base_add(struct txn *t, const char *path, const struct file_id *id,
                 struct err *e);

/* All zero: not remembered. */
struct file_id txn_base(struct txn *t, const char *path);

/* ---- removals ---- */

/* View paths ("tensors/KEY.npy") that are to go. */
int txn_remove(struct txn *t, const char *path, struct err *e);
int txn_unremove(struct txn *t, const char *path, struct err *e); /* -ENOENT */
bool txn_is_removed(struct txn *t, const char *path);

/* Calls each for a snapshot of all, sorted. The first non-zero result ends it. */
int txn_each_removal(struct txn *t, int (*each)(void *user, const char *path),
                     void *user, struct err *e);

/* ---- files ---- */

struct txn_new {
    const char
        *path; /* a view path: "tensors/KEY.npy", "model-00001-of-00004.safetensors" */
    uid_t uid; /* the caller's, for what is published of it */
    gid_t gid;
    mode_t mode;
    bool
        elsewhere; /* its bytes are not kept in in/ (save/intake.h): it has no descriptor */
};

/* A new, empty file. -EEXIST. All that return a file return a reference. */
int txn_new(struct txn *t, const struct txn_new *what, struct txn_file **out,
            struct err *e);

/* NULL: there is none of this view path. */
struct txn_file *txn_find(struct txn *t, const char *path);

/* Calls each for a snapshot of all, sorted by path. The first non-zero result ends it. */
int txn_each(struct txn *t, int (*each)(void *user, struct txn_file *f), void *user,
             struct err *e);

/* It goes on under another view path, replacing a file that has it. */
int txn_rename(struct txn *t, struct txn_file *f, const char *path, struct err *e);

/* It is no more in the transaction; open descriptors go on as of an unlinked file. */
int txn_drop(struct txn *t, struct txn_file *f, struct err *e);

struct txn_file *txn_file_get(struct txn_file *f);
void txn_file_put(struct txn_file *f); /* NULL is fine */

char *
txn_file_path(struct txn_file *f); /* a copy, which the caller frees; NULL: no memory */

/*
 * Of its bytes, read and write; valid while the reference is held. -ENOENT: they are kept
 * elsewhere. A file that was dropped or replaced goes on like an unlinked one.
 */
int txn_file_fd(struct txn_file *f, struct err *e);
void txn_file_owner(struct txn_file *f, uid_t *uid, gid_t *gid, mode_t *mode);
int txn_file_own(struct txn_file *f, uid_t uid, gid_t gid, mode_t mode, struct err *e);

/* "dtype" (user.unshard.dtype) and others: as txn_note(), of a file. */
int txn_file_note(struct txn_file *f, const char *word, const char *text,
                  struct err *e);
char *txn_file_noted(struct txn_file *f, const char *word);

/* ---- which bytes have arrived ---- */

/*
 * Before bytes are written: where bytes were synced that are now overwritten, they do not
 * count after a power loss, since they may be the old ones (then, once per 64 MiB, the
 * journal is synced). Each successful call is followed by one txn_wrote().
 */
int txn_writes(struct txn_file *f, uint64_t off, uint64_t len, struct err *e);

/*
 * They are written; len 0: they could not be. The journal says so within a few MiB, which is
 * enough for a kill.
 */
int txn_wrote(struct txn_file *f, uint64_t off, uint64_t len, struct err *e);

/*
 * fsync or msync of the file: what did not arrive below its size was a hole, and is zeros.
 * `size` is what the writer knows as the file's.
 */
int txn_confirm(struct txn_file *f, uint64_t size, struct err *e);

/*
 * Before the caller's ftruncate (also O_TRUNC): holes below both sizes are confirmed, what
 * is cut off is forgotten.
 */
int txn_truncates(struct txn_file *f, uint64_t old_size, uint64_t size, struct err *e);

/*
 * fdatasync, then the journal. Where the disk refuses, all that was not synced before is
 * missing again, and the error says so.
 */
int txn_file_sync(struct txn_file *f, struct err *e);

/*
 * The same for a file whose bytes are elsewhere: the caller syncs them in between, and says
 * whether the disk took them. One at a time per file: txn_sync_begin() waits for another.
 */
int txn_sync_begin(struct txn_file *f, struct err *e);
int txn_sync_end(struct txn_file *f, bool synced, struct err *e);

/* How long the file will be, once its header says so; for txn_missing() and reports. */
int txn_expect(struct txn_file *f, uint64_t size, struct err *e);

/* 0 where it is not known. */
uint64_t txn_expected(struct txn_file *f);

/* Adds what is missing of [0, size) to *out. 0 or -ENOMEM. */
int txn_missing(struct txn_file *f, uint64_t size, struct ranges *out);

/* Are these bytes there? */
bool txn_has(struct txn_file *f, uint64_t off, uint64_t len);

/* ---- the step ---- */

/*
 * publish() with these files of the target. `at` of the spec, and `seen` of each file where it is
 * not set, are filled in here, the latter from the base. Files of the transaction that are
 * `done`, and all removals where `removals`, leave it with the step; all else stays
 * staged, and the base becomes what the step has brought. Nobody has a done file open for
 * writing. data/ is empty afterwards.
 *
 * 0, or as publish(); t stays valid. Where nothing is left staged, txn_close() removes the staging
 * directory. After -EINPROGRESS txn_publish() goes on with that step, whatever it is called with.
 */
int txn_publish(struct txn *t, struct publish_file *file, size_t files,
                struct publish_spec *spec, struct txn_file *const *done, size_t dones,
                bool removals, struct err *e);

/* Empties data/ of what an attempt that failed has left. */
int txn_clear_data(struct txn *t, struct err *e);

/* ---- reports ---- */

enum txn_state {
    TXN_LIVE,       /* a process has it */
    TXN_STAGED,     /* nobody of this machine has it: the next writer goes on with it */
    TXN_STEP,       /* as TXN_STAGED, and a step has begun */
    TXN_FOREIGN,    /* another machine's */
    TXN_CONVERSION, /* of `unshard convert` */
    TXN_REST,       /* of a save that is published, or that never began */
    TXN_DAMAGED,    /* the journal cannot be read */
};

struct txn_listed_file {
    const char *path;
    uint64_t size, expected; /* expected 0: its header has not arrived */
    const struct ranges *arrived;
};

struct txn_listed {
    const char *staging; /* the staging directory's name */
    const char *target;  /* the directory's name, or NULL where it is not known */
    enum txn_state state;
    bool target_gone; /* no directory of that name and inode is there */
    const char
        *writer; /* "host H, process P" or the conversion's first line; or NULL */
    time_t when; /* the journal's last change */
    const struct txn_listed_file *file;
    size_t files;
    const char *const *removed;
    size_t removals;
};

/*
 * Reads what is staged in a directory. It changes nothing and locks nothing for longer than
 * a look. The first non-zero result of each() ends it.
 */
int txn_list(int dir, int (*each)(void *user, const struct txn_listed *l), void *user,
             struct err *e);

/*
 * "tensors/a.npy: bytes 1048576 to 2097151 of 4194304 are missing", one line per file,
 * then how to go on. For `unshard doctor`, .unshard/last-error, and messages.
 */
int txn_describe_file(const struct txn_listed_file *f, struct buf *out);
int txn_describe(struct txn *t, struct buf *out);

/*
 * Ends a step that a dead process of this machine began, and removes the rest of one that was
 * done; takes up nothing. `staging` is a name in `dir`. As publish_recover().
 */
int txn_recover(int dir, const char *staging, struct err *e);

/*
 * Removes what is staged there. -EBUSY: a process has it, or it is another machine's;
 * -EINPROGRESS: a step has begun, which has to be ended first (its old files are in there).
 */
int txn_discard_staged(int dir, const char *staging, struct err *e);

#endif
