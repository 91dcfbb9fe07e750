/* SPDX-License-Identifier: MIT */
/* save/txn_open.c - transactions: begun, or taken up from the process that had them. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/dir.h"
#include "base/err.h"
#include "save/staged.h"
#include "save/txn_priv.h"

enum {
    MAX_TRIES = 100, /* others that publish and remove under us */
};

/* ---- this process ---- */

void txn_owner_self(struct txn_owner *out)
{
    *out = (struct txn_owner){.pid = (uint64_t)getpid()};
    gethostname(out->host, sizeof out->host - 1);
    staged_boot(out->boot);
    if (!out->boot[0]) /* another one each time: only synced bytes count then */
        snprintf(out->boot, sizeof out->boot, "unknown-%ld-%lld", (long)getpid(),
                 (long long)time(NULL));
}

/* A container has another name, but the boot of its machine. */
bool txn_owner_is_local(const struct txn_owner *o)
{
    struct txn_owner self;

    txn_owner_self(&self);
    return strcmp(o->host, self.host) == 0 || strcmp(o->boot, self.boot) == 0;
}

/* ---- the lock ---- */

/*
 * Locks of an open file description (fcntl(2)): they can be looked at without taking them, so
 * that a report never keeps a writer out.
 */
static struct flock whole_file(short type)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET};
}

bool txn_lock_is_held(int dir)
{
    CLEANUP_FD int fd =
        openat(dir, STAGED_LOCK, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct flock l = whole_file(F_WRLCK);

    return fd >= 0 && fcntl(fd, F_OFD_GETLK, &l) == 0 && l.l_type != F_UNLCK;
}

int txn_lock_take(int dir, const char *path, struct err *e)
{
    CLEANUP_FD int fd = openat(
        dir, STAGED_LOCK, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    struct flock l = whole_file(F_WRLCK);
    struct stat st;

    if (fd < 0)
        return errno == ENOENT ? -EAGAIN : staged_fail(e, "open the lock of", path);
    if (fcntl(fd, F_OFD_SETLK, &l) < 0) {
        if (errno != EAGAIN && errno != EACCES)
            return staged_fail(e, "lock what is staged for", path);
        err_set(e, EBUSY, "%s: another mount is writing it", path);
        return err_hint(e, "let it finish, or unmount it");
    }
    /* Who removed the directory let go of its lock afterwards. */
    if (fstat(fd, &st) < 0)
        return staged_fail(e, "look at the lock of", path);
    return st.st_nlink == 0 ? -EAGAIN : steal_fd(&fd);
}

/* ---- taking up ---- */

int txn_journal_load(int dir, struct buf *text, struct err *e)
{
    CLEANUP_FD int fd =
        openat(dir, STAGED_JOURNAL, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat st;
    void *dst;

    text->max = TXN_JOURNAL_MAX;
    if (fd < 0)
        return errno == ENOENT ? 0 : staged_fail(e, "open", STAGED_JOURNAL);
    if (fstat(fd, &st) < 0)
        return staged_fail(e, "look at", STAGED_JOURNAL);
    if (!S_ISREG(st.st_mode) || st.st_size >= TXN_JOURNAL_MAX)
        return err_set(e, EBADMSG,
                       "the journal of the transaction is damaged: its size");
    if (st.st_size == 0)
        return 0;
    dst = buf_grow(text, (size_t)st.st_size);
    return dst ? read_exact(fd, dst, (size_t)st.st_size, 0, e) : err_nomem(e);
}

static int look_at_target(const struct publish_place *at, struct stat *st,
                          struct err *e)
{
    CLEANUP_FD int fd =
        openat(at->dir, at->name, O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    return fd < 0 || fstat(fd, st) < 0 ? staged_fail(e, "open", at->path) : 0;
}

static void leave(struct txn *t)
{
    int *fd[] = {&t->lock_fd, &t->dir};

    for (size_t i = 0; i < ARRAY_SIZE(fd); i++)
        if (*fd[i] >= 0)
            close(steal_fd(fd[i]));
    txn_journal_release(&t->j);
    t->j.next_id = 1;
}

static int check_mine(const struct txn *t, struct err *e)
{
    struct stat st;

    if (fstat(t->dir, &st) < 0)
        return staged_fail(e, "look at", t->staging);
    if (st.st_uid == geteuid() && !(st.st_mode & (S_IWGRP | S_IWOTH)))
        return 0;
    err_set(e, EBUSY, "%s: %s beside it is another user's", t->path, t->staging);
    return err_hint(e, "let that user finish or discard it");
}

bool txn_is_conversion(int dir, char *line, size_t size)
{
    int own = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *names = own < 0 ? NULL : fdopendir(own);
    const char *name;
    bool found = false;

    if (!names && own >= 0)
        close(own);
    while (names && !found && dir_next(names, &name) > 0)
        if (staged_is_part(name)) {
            CLEANUP_FD int fd =
                openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
            ssize_t n = fd < 0 ? -1 : pread(fd, line, size - 1, 0);

            line[n > 0 ? n : 0] = '\0';
            line[strcspn(line, "\n")] = '\0';
            found = true;
        }
    if (names)
        closedir(names);
    return found;
}

static int check_conversion(const struct txn *t, const struct publish_place *at,
                            struct err *e)
{
    char line[200];
    int ret;

    if (!txn_is_conversion(t->dir, line, sizeof line))
        return 0;
    if (txn_has_name(t, STAGED_PUBLISHED) &&
        !txn_has_name(t, STAGED_DATA)) { /* which is done */
        ret = publish_recover(at, e);
        return ret < 0 ? ret : -EAGAIN;
    }
    err_set(e, EBUSY, "%s: %s beside it is another save's: %s", t->path, t->staging,
            line);
    return err_hint(e, "finish it, or remove that directory");
}

/* Into the staging directory, with its lock. -EAGAIN: it was removed meanwhile. */
static int enter(struct txn *t, const struct publish_place *at, bool new, struct err *e)
{
    int ret;

    if (new &&mkdirat(t->parent, t->staging, 0711) < 0 && errno != EEXIST)
        return staged_fail(e, "stage beside", t->path);
    t->dir =
        openat(t->parent, t->staging, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (t->dir < 0)
        return errno == ENOENT && new ? -EAGAIN : staged_fail(e, "open", t->staging);
    ret = check_mine(t, e);
    if (ret == 0)
        ret = check_conversion(t, at, e);
    if (ret < 0)
        return ret;
    t->lock_fd = txn_lock_take(t->dir, t->path, e);
    return MIN(t->lock_fd, 0);
}

static int open_dirs(struct txn *t, struct err *e)
{
    if ((mkdirat(t->dir, STAGED_DATA, 0700) < 0 && errno != EEXIST) ||
        (mkdirat(t->dir, STAGED_SPOOL, 0700) < 0 && errno != EEXIST))
        return staged_fail(e, "stage beside", t->path);
    t->data_fd =
        openat(t->dir, STAGED_DATA, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    t->spool_fd =
        openat(t->dir, STAGED_SPOOL, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return t->data_fd < 0 || t->spool_fd < 0 ? staged_fail(e, "stage beside", t->path)
                                             : 0;
}

/* Nothing that is there without a journal is of any worth. */
static int clear(struct txn *t, struct err *e)
{
    int own = openat(t->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ret = 0,
        more = 0;
    DIR *names = own < 0 ? NULL : fdopendir(own);
    const char *name;

    if (!names)
        return staged_fail(e, "look at", t->staging);
    while (ret == 0 && (more = dir_next(names, &name)) > 0)
        if (strcmp(name, STAGED_LOCK) != 0)
            ret = staged_remove_tree(t->dir, name, 1, e);
    closedir(names);
    return ret == 0 && more < 0 ? err_set(e, -more, "look at %s", t->staging) : ret;
}

static int begin(struct txn *t, const struct publish_place *at, uint64_t ino,
                 struct err *e)
{
    int ret = clear(t, e);

    if (ret == 0)
        ret = open_dirs(t, e);
    if (ret < 0)
        return ret;
    t->j.target = strdup(at->name);
    t->j.target_ino = ino;
    txn_owner_self(&t->j.owner);
    if (!t->j.target)
        return err_nomem(e);
    ret = txn_write_whole(t, e);
    return ret == 0 ? txn_sync_parent(t, e) : ret;
}

/* A file whose bytes are not there any more has none; what is behind its end has not arrived. */
static int take_up_file(struct txn *t, struct txn_file *f, struct err *e)
{
    char name[32];
    uint64_t end = 0;
    struct stat st;

    atomic_fetch_add(&t->refs, 1);
    f->txn = t;
    if (f->elsewhere)
        return 0;
    txn_spool_name(f, name);
    if (fstatat(t->spool_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0)
        end = S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0;
    else if (errno != ENOENT)
        return staged_fail(e, "look at what is staged of", f->key.name);
    return ranges_remove(&f->arrived, end, INT64_MAX) < 0 ||
                   ranges_remove(&f->synced, end, INT64_MAX) < 0
               ? err_nomem(e)
               : 0;
}

static int check_owner(const struct txn *t, uint64_t ino, struct err *e)
{
    if (!txn_owner_is_local(&t->j.owner)) {
        err_set(e, EBUSY, "%s: host %s has staged a transaction for it", t->path,
                t->j.owner.host);
        return err_hint(e, "go on with it there, or remove %s", t->staging);
    }
    if (t->j.target_ino == ino)
        return 0;
    err_set(e, EBUSY,
            "%s: a transaction is staged for another directory that had this name",
            t->path);
    return err_hint(e, "rename that one back, or: unshard doctor --discard");
}

/* Bytes that this boot has not brought count only if they were synced. */
static int take_over(struct txn *t, struct err *e)
{
    struct txn_owner self;

    txn_owner_self(&self);
    for (size_t i = 0; strcmp(self.boot, t->j.owner.boot) != 0 && i < t->j.ids; i++)
        if (ranges_copy(&t->j.by_id[i]->arrived, &t->j.by_id[i]->synced) < 0)
            return err_nomem(e);
    t->j.owner = self;
    return 0;
}

static int take_up(struct txn *t, struct err *e)
{
    int ret = take_over(t, e);

    if (ret == 0)
        ret = open_dirs(t, e);
    for (size_t i = 0; ret == 0 && i < t->j.ids; i++)
        ret = take_up_file(t, t->j.by_id[i], e);
    t->taken_up = true;
    return ret;
}

/* What its journal says, where it has one, and whether that is ours to go on with. */
static int load(struct txn *t, uint64_t ino, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {0};
    size_t whole;
    int ret = txn_journal_load(t->dir, &text, e);

    if (ret == 0 && text.len > 0) {
        ret = txn_journal_read(&t->j, text.data, text.len, &whole, e);
        if (ret == 0)
            ret = check_owner(t, ino, e);
    }
    return ret < 0 ? err_wrap(e, "%s", t->path) : 0;
}

/* -EAGAIN: once more. */
static int try_open(struct txn *t, const struct publish_place *at, enum txn_how how,
                    uint64_t ino, struct err *e)
{
    int ret = enter(t, at, how == TXN_ANY, e), step;

    if (ret == 0 && !txn_has_name(t, STAGED_DONE))
        ret = load(t, ino, e);
    if (ret < 0)
        return ret;
    step = publish_recover(at, e);
    if (step == 1 || (step < 0 && step != -ESTALE))
        return step == 1 ? -EAGAIN : step;
    t->undone = *e; /* what is staged is still there */
    *e = (struct err){0};
    if (!t->j.target)
        return how == TXN_ANY ? begin(t, at, ino, e)
                              : err_set(e, ENOENT, "%s: nothing is staged", t->path);
    ret = take_up(t, e);
    if (ret == 0 && step == -ESTALE)
        ret = txn_renew_base(t, at, e);
    if (ret == 0)
        ret = txn_write_whole(t, e);
    if (ret == 0 && txn_has_name(t, STAGED_ENDED)) {
        ret = txn_settle(t, e);
        if (ret == 0)
            ret = txn_clear_data(t, e);
    }
    return ret < 0 ? err_wrap(e, "%s", t->path) : 0;
}

/* ---- of a directory that was renamed ---- */

/* Is what is staged there for this inode, and can it be taken up here? */
static bool is_for(int parent, const char *staging, uint64_t ino)
{
    CLEANUP_FD int dir =
        openat(parent, staging, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    CLEANUP(buf_release) struct buf text = {0};
    struct txn_journal j = {.next_id = 1};
    struct err none = {0};
    size_t whole;
    bool is = dir >= 0 && !txn_lock_is_held(dir) &&
              txn_journal_load(dir, &text, &none) == 0 && text.len > 0 &&
              txn_journal_read(&j, text.data, text.len, &whole, &none) == 0 &&
              j.target_ino == ino && txn_owner_is_local(&j.owner);

    txn_journal_release(&j);
    return is;
}

/* Renames what was staged under an older name of the target. */
static void adopt(const struct txn *t, uint64_t ino)
{
    int own = openat(t->parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *names = own < 0 ? NULL : fdopendir(own);
    const char *name;

    if (!names && own >= 0)
        close(own);
    while (names && dir_next(names, &name) > 0)
        if (publish_is_staging(name) && is_for(t->parent, name, ino)) {
            (void)!renameat(t->parent, name, t->parent, t->staging);
            break;
        }
    if (names)
        closedir(names);
}

static int open_any(struct txn *t, const struct publish_place *at, enum txn_how how,
                    struct err *e)
{
    struct stat st;
    int ret = publish_staging_name(at->name, t->staging, e);

    if (ret == 0)
        ret = look_at_target(at, &st, e);
    if (ret < 0)
        return ret;
    t->path = strdup(at->path);
    if (!t->path)
        return err_nomem(e);
    t->parent = fcntl(at->dir, F_DUPFD_CLOEXEC, 0);
    if (t->parent < 0)
        return staged_fail(e, "open the directory of", at->path);
    if (strcmp(at->name, ".") != 0 &&
        faccessat(t->parent, t->staging, F_OK, AT_SYMLINK_NOFOLLOW) < 0)
        adopt(t, st.st_ino);
    ret = -EAGAIN;
    for (int i = 0; ret == -EAGAIN && i < MAX_TRIES; i++) {
        leave(t);
        *e = (struct err){0};
        ret = try_open(t, at, how, st.st_ino, e);
    }
    return ret == -EAGAIN
               ? err_set(e, EBUSY, "%s: others save there all the time", at->path)
               : ret;
}

int txn_open(const struct publish_place *at, enum txn_how how, struct txn **out,
             struct err *e)
{
    struct txn *t = txn_make();
    int ret;

    if (!t)
        return err_nomem(e);
    ret = open_any(t, at, how, e);
    if (ret < 0)
        txn_release(t);
    else
        *out = t;
    return ret;
}
