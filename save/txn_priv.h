/* SPDX-License-Identifier: MIT */
/* save/txn_priv.h - what the files of transactions share. */
#ifndef UFS_SAVE_TXN_PRIV_H
#define UFS_SAVE_TXN_PRIV_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "base/err.h"
#include "save/ranges.h"
#include "save/txn.h"

/* ---- small sorted sets of names ---- */

/* Items that begin with their name, sorted by it. The set frees neither items nor names. */
struct named {
    char *name;
};
struct names {
    struct named **item;
    size_t count, cap;
};

struct named *names_find(const struct names *s, const char *name);
int names_add(struct names *s, struct named *item); /* -ENOMEM, -EEXIST */
struct named *names_take(struct names *s, const char *name);

/* ---- what a journal says ---- */

struct txn_note_item {
    struct named key; /* the word */
    char *text;
};

struct txn_base_item {
    struct named key; /* a path of the target */
    struct file_id id;
};

struct txn_file {
    struct named key; /* the view path */
    struct txn *txn;  /* a reference; NULL: of a journal that is only read */
    bool listed;      /* it is in the transaction; guarded by the transaction's lock */
    bool ended;       /* it was published; guarded by the same */
    atomic_uint refs; /* one is the list's */
    uint64_t id;      /* its bytes are in in/ID: */
    int fd;           /* or -1: it is opened when it is needed; guarded by lock */
    uid_t uid;
    gid_t gid;
    mode_t mode;
    bool elsewhere;
    uint64_t expected; /* 0: unknown */
    struct names notes;

    /* Guarded by the transaction's lock. */
    struct ranges arrived,
        synced;         /* synced: of these the disk has what was written last */
    struct ranges told; /* what the journal says has arrived */
    bool dirty;         /* arrived is not told */
    /* Bytes that had arrived and are written again while they are synced, or around that. */
    struct ranges rewritten;
    unsigned writing; /* writes between txn_writes() and txn_wrote() */
    bool syncing;
    struct ranges before; /* what had arrived when the sync began */
    pthread_mutex_t sync; /* one sync at a time */
};

/* Who has it, and since when. */
struct txn_owner {
    char host[256], boot[64];
    uint64_t pid;
};

struct txn_journal {
    struct txn_owner owner;
    uint64_t target_ino;
    char *target;                          /* its name */
    struct names notes, base, gone, files; /* gone: removals, items are struct named */
    struct txn_file **by_id;               /* in order of ids; each file once */
    size_t ids, id_cap;
    uint64_t next_id;
};

void txn_journal_release(struct txn_journal *j);

/*
 * Adds what the text says to an empty *j; `text` is changed. Reading ends at the first line
 * that is not whole: *whole are the bytes before it. -EBADMSG: it is no journal, or says
 * what no journal can.
 */
int txn_journal_read(struct txn_journal *j, char *text, size_t len, size_t *whole,
                     struct err *e);

/* All of it, as short as it can be said. 0 or -ENOMEM. */
int txn_journal_text(const struct txn_journal *j, struct buf *out);

struct txn_file *txn_journal_file(const struct txn_journal *j,
                                  uint64_t id); /* or NULL */

/* Is the path one that a view can have? As publish_path_is_safe(). */
bool txn_path_is_safe(const char *path);

int txn_word_check(const char *word, struct err *e);

/* Lines of it. */
void txn_line_target(const struct txn_journal *j, struct buf *out);
void txn_line_note(const char *word, const char *text, struct buf *out);
void txn_line_base(const char *path, const struct file_id *id, struct buf *out);
void txn_line_path(const char *word, const char *path, struct buf *out);
void txn_line_file(const struct txn_file *f, struct buf *out);
void txn_line_file_note(const struct txn_file *f, const char *word, const char *text,
                        struct buf *out);
void txn_line_file_path(const struct txn_file *f, struct buf *out);
void txn_line_numbers(const char *word, uint64_t id, const uint64_t *number,
                      size_t count, struct buf *out);

/* What of `arrived` is not told yet; then it is. 0 or -ENOMEM. */
int txn_line_got(struct txn_file *f, struct buf *out);

/* This process. */
void txn_owner_self(struct txn_owner *out);
bool txn_owner_is_local(const struct txn_owner *o);

/* Changes of what is in memory, by calls and by lines alike. -ENOMEM, -EEXIST. */
int txn_set_note(struct names *notes, const char *word, const char *text);
int txn_set_base(struct txn_journal *j, const char *path, const struct file_id *id);
int txn_set_gone(struct txn_journal *j, const char *path);
bool txn_unset_gone(struct txn_journal *j, const char *path);
void txn_file_unref(struct txn_file *f); /* drops one, and no more */
struct txn_file *txn_file_make(struct txn_journal *j, const char *path, uint64_t id);
void txn_file_unlist(struct txn_journal *j,
                     struct txn_file *f); /* the list's reference is the caller's */
int txn_file_relist(struct txn_journal *j, struct txn_file *f, const char *path);

/* ---- a transaction that is open ---- */

struct txn {
    char *path; /* of the target, for messages */
    char staging[NAME_MAX + 1];
    int parent, dir, lock_fd, journal_fd, data_fd, spool_fd;
    bool taken_up;
    struct err undone; /* why a step that had begun was undone when this was opened */
    atomic_uint refs;  /* the caller's, and one for each file */

    pthread_mutex_t lock;
    bool ended;           /* guarded by lock */
    unsigned open;        /* files with a descriptor; guarded by lock */
    unsigned max_open;    /* before those that nobody uses are synced and closed */
    struct txn_journal j; /* guarded by lock */
    struct buf pending; /* lines that the journal does not have yet; guarded by lock */
    uint64_t unjournaled; /* bytes that arrived since; guarded by lock */
    bool names_unsynced;  /* in/ has a new file; guarded by lock */

    pthread_mutex_t journal_lock; /* of what follows, over lock */
    uint64_t journal_size,
        journal_short; /* now, and when it was last written as a whole */
    bool unsettled;    /* "ended" speaks of files that the journal still has */
    bool rewrite; /* the journal could not be written to: as a whole the next time */
};

enum { TXN_JOURNAL_MAX = 256 << 20 }; /* as long as a journal may be */

struct txn *txn_make(void); /* NULL: no memory */

/* Ends it in this process; files that somebody has a reference of are left to him. */
void txn_release(struct txn *t);

/* Is there something of this name in the staging directory? */
bool txn_has_name(const struct txn *t, const char *name);

/* Names in the target's directory are durable. */
int txn_sync_parent(const struct txn *t, struct err *e);

/* Writes what is pending: a kill does not lose it. */
int txn_flush(struct txn *t, struct err *e);

/* And the disk has it: a power loss does not. */
int txn_flush_durably(struct txn *t, struct err *e);

/* Writes the journal again, as short as it can be; durably. */
int txn_write_whole(struct txn *t, struct err *e);

/* Times of change of files that a step took and gave back. */
int txn_renew_base(struct txn *t, const struct publish_place *at, struct err *e);

/*
 * What the step that "ended" speaks of means for the transaction: done files and removals
 * leave it, the base is what the target has now. Then "ended" goes.
 */
int txn_settle(struct txn *t, struct err *e);

void txn_unref(struct txn *t); /* NULL is fine */

void txn_spool_name(const struct txn_file *f, char dst[32]);

/* Under the lock. */
int txn_spool_open(struct txn *t, struct txn_file *f, bool make, struct err *e);

/* ---- for txn_list.c and txn.c ---- */

/* Does a process hold the lock of the staging directory `dir`? */
bool txn_lock_is_held(int dir);

/* The lock of a staging directory, or -EBUSY, -EAGAIN: it was removed meanwhile. */
int txn_lock_take(int dir, const char *path, struct err *e);

/* Its journal as text; an empty one where there is none. */
int txn_journal_load(int dir, struct buf *text, struct err *e);

/* Has it a journal of a conversion (or of an older version's save)? */
bool txn_is_conversion(int dir, char *line, size_t size);

#endif
