/* SPDX-License-Identifier: MIT */
/* save/txn_file.c - files of a transaction, and which of their bytes have arrived. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "save/staged.h"
#include "save/txn_priv.h"

enum {
    FLUSH_BYTES = 8 << 20,    /* that may arrive before the journal says so */
    REWRITE_BLOCK = 64 << 20, /* synced bytes that one sync of the journal gives up */
};

/* The lock of a file's transaction, and what was pending when it was taken. */
struct hold {
    struct txn *t;
    size_t pending;
};

/* -ESTALE: the file is published, and bytes that are written now would reach nobody. */
static int hold(const struct txn_file *f, struct hold *h, struct err *e)
{
    struct txn *t = f->txn;

    pthread_mutex_lock(&t->lock);
    *h = (struct hold){t, t->pending.len};
    if (!t->ended && !f->ended)
        return 0;
    err_set(e, ESTALE, "%s: its transaction has ended", f->key.name);
    pthread_mutex_unlock(&t->lock);
    return -ESTALE;
}

/* A file that was dropped is one that was unlinked: the journal hears no more of it. */
static void let_go(const struct txn_file *f, const struct hold *h)
{
    struct buf *pending = &h->t->pending;

    if (!f->listed && pending->len > h->pending) {
        pending->len = h->pending;
        pending->data[pending->len] = '\0';
    }
    pthread_mutex_unlock(&h->t->lock);
}

/* After changes, where `ret` is what they gave: a kill does not lose them. */
static int settle(const struct txn_file *f, const struct hold *h, int ret,
                  struct err *e)
{
    bool listed = f->listed;

    if (ret == -ENOMEM || buf_failed(&h->t->pending) < 0)
        ret = err_nomem(e);
    let_go(f, h);
    return ret < 0 || !listed ? ret : txn_flush(h->t, e);
}

/* The same for changes of the list of files. */
static int finish(struct txn *t, int ret, struct err *e)
{
    if (ret == -ENOMEM || buf_failed(&t->pending) < 0)
        ret = err_nomem(e);
    pthread_mutex_unlock(&t->lock);
    return ret < 0 ? ret : txn_flush(t, e);
}

/* ---- making, finding, moving ---- */

void txn_spool_name(const struct txn_file *f, char dst[32])
{
    snprintf(dst, 32, "%" PRIu64, f->id);
}

int txn_spool_open(struct txn *t, struct txn_file *f, bool make, struct err *e)
{
    int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    CLEANUP_FD int fd = -1;
    char name[32];
    struct stat st;

    txn_spool_name(f, name);
    fd = openat(t->spool_fd, name, flags | O_CREAT | (make ? O_TRUNC : 0), 0600);
    if (fd < 0 || fstat(fd, &st) < 0)
        return staged_fail(e, "stage", f->key.name);
    if (!S_ISREG(st.st_mode) || st.st_nlink != 1)
        return err_set(e, EBADMSG, "%s: what is staged of it is not a file of ours",
                       f->key.name);
    /* Its room is the caller's, where room is counted by owner. */
    if ((st.st_uid != f->uid || st.st_gid != f->gid))
        (void)!fchown(fd, f->uid, f->gid);
    f->fd = steal_fd(&fd);
    t->open++;
    return 0;
}

static void spool_remove(struct txn *t, const struct txn_file *f)
{
    char name[32];

    txn_spool_name(f, name);
    if (!f->elsewhere)
        unlinkat(t->spool_fd, name, 0);
}

/* Takes it out of the transaction, under the lock; the list's reference is the caller's. */
static void drop_locked(struct txn *t, struct txn_file *f)
{
    txn_file_unlist(&t->j, f);
    t->open -= f->fd >= 0;
    txn_line_numbers("drop", f->id, NULL, 0, &t->pending);
}

static struct txn_file *make_locked(struct txn *t, const struct txn_new *what)
{
    struct txn_file *f = txn_file_make(&t->j, what->path, t->j.next_id);

    if (!f)
        return NULL;
    atomic_fetch_add(&t->refs, 1);
    f->txn = t;
    f->uid = what->uid;
    f->gid = what->gid;
    f->mode = what->mode & 07777;
    f->elsewhere = what->elsewhere;
    t->names_unsynced |= !what->elsewhere;
    txn_line_file(f, &t->pending);
    return txn_file_get(f);
}

int txn_new(struct txn *t, const struct txn_new *what, struct txn_file **out,
            struct err *e)
{
    struct txn_file *f = NULL;
    struct err none = {0};
    int ret = 0;

    if (!txn_path_is_safe(what->path))
        return err_set(e, EINVAL, "%s: not a path of a view", what->path);
    pthread_mutex_lock(&t->lock);
    if (names_find(&t->j.files, what->path))
        ret = err_set(e, EEXIST, "%s is being written already", what->path);
    else if (!(f = make_locked(t, what)))
        ret = -ENOMEM;
    else if (!what->elsewhere)
        ret = txn_spool_open(t, f, true, e);
    ret = finish(t, ret, e);
    if (ret == 0) {
        *out = f;
    } else if (f) {
        txn_drop(t, f, &none);
        txn_file_put(f);
    }
    return ret;
}

struct txn_file *txn_find(struct txn *t, const char *path)
{
    struct named *found;
    struct txn_file *f = NULL;

    pthread_mutex_lock(&t->lock);
    found = names_find(&t->j.files, path);
    if (found)
        f = txn_file_get(container_of(found, struct txn_file, key));
    pthread_mutex_unlock(&t->lock);
    return f;
}

/* References to all files, sorted by path. */
static int snapshot(struct txn *t, struct txn_file ***out, size_t *count)
{
    struct txn_file **all;

    pthread_mutex_lock(&t->lock);
    *count = t->j.files.count;
    all = calloc(*count + 1, sizeof *all);
    for (size_t i = 0; all && i < *count; i++)
        all[i] = txn_file_get(container_of(t->j.files.item[i], struct txn_file, key));
    pthread_mutex_unlock(&t->lock);
    *out = all;
    return all ? 0 : -ENOMEM;
}

int txn_each(struct txn *t, int (*each)(void *user, struct txn_file *f), void *user,
             struct err *e)
{
    struct txn_file **all;
    size_t count;
    int ret = 0;

    if (snapshot(t, &all, &count) < 0)
        return err_nomem(e);
    for (size_t i = 0; i < count; i++) {
        if (ret == 0)
            ret = each(user, all[i]);
        txn_file_put(all[i]);
    }
    free(all);
    return ret;
}

int txn_rename(struct txn *t, struct txn_file *f, const char *path, struct err *e)
{
    struct txn_file *old = NULL;
    struct named *found;
    int ret = 0;

    if (!txn_path_is_safe(path))
        return err_set(e, EINVAL, "%s: not a path of a view", path);
    pthread_mutex_lock(&t->lock);
    found = names_find(&t->j.files, path);
    if (!f->listed) {
        ret = err_set(e, ENOENT, "%s: it is removed", f->key.name);
    } else if (found != &f->key) {
        if (found) {
            old = container_of(found, struct txn_file, key);
            drop_locked(t, old);
        }
        ret = txn_file_relist(&t->j, f, path);
        if (ret == 0)
            txn_line_file_path(f, &t->pending);
    }
    ret = finish(t, ret, e);
    if (old) {
        spool_remove(t, old);
        txn_file_put(old);
    }
    return ret;
}

int txn_drop(struct txn *t, struct txn_file *f, struct err *e)
{
    int ret = 0;
    bool had;

    pthread_mutex_lock(&t->lock);
    had = f->listed;
    if (had)
        drop_locked(t, f);
    else
        ret = err_set(e, ENOENT, "%s: it is removed", f->key.name);
    ret = finish(t, ret, e);
    if (had) {
        spool_remove(t, f);
        txn_file_put(f);
    }
    return ret;
}

/* ---- references ---- */

struct txn_file *txn_file_get(struct txn_file *f)
{
    atomic_fetch_add(&f->refs, 1);
    return f;
}

/* The last user of a file leaves it: where many are open, it is synced and closed. */
static void close_idle(struct txn_file *f)
{
    struct txn *t = f->txn;
    struct err refused = {0}; /* then its bytes are missing again */
    bool idle;

    pthread_mutex_lock(&t->lock);
    idle = f->listed && f->fd >= 0 && f->refs == 2 && t->open > t->max_open;
    pthread_mutex_unlock(&t->lock);
    if (!idle)
        return;
    txn_file_sync(f, &refused);
    pthread_mutex_lock(&t->lock);
    if (f->listed && f->fd >= 0 && f->refs == 2) { /* the list's and this one */
        close(steal_fd(&f->fd));
        t->open--;
    }
    pthread_mutex_unlock(&t->lock);
}

void txn_file_put(struct txn_file *f)
{
    if (!f)
        return;
    close_idle(f);
    txn_file_unref(f);
}

int txn_file_fd(struct txn_file *f, struct err *e)
{
    struct hold h;
    int fd = hold(f, &h, e);

    if (fd < 0)
        return fd;
    if (f->fd < 0 && !f->elsewhere && f->listed)
        fd = txn_spool_open(h.t, f, false, e);
    if (fd == 0)
        fd = f->fd >= 0
                 ? f->fd
                 : err_set(e, ENOENT, "%s: no bytes are kept of it", f->key.name);
    let_go(f, &h);
    return fd;
}

/* ---- what is known of one ---- */

static void lock_file(const struct txn_file *f)
{
    pthread_mutex_lock(&f->txn->lock);
}

static void unlock_file(const struct txn_file *f)
{
    pthread_mutex_unlock(&f->txn->lock);
}

char *txn_file_path(struct txn_file *f)
{
    char *copy;

    lock_file(f);
    copy = strdup(f->key.name);
    unlock_file(f);
    return copy;
}

void txn_file_owner(struct txn_file *f, uid_t *uid, gid_t *gid, mode_t *mode)
{
    lock_file(f);
    *uid = f->uid;
    *gid = f->gid;
    *mode = f->mode;
    unlock_file(f);
}

int txn_file_own(struct txn_file *f, uid_t uid, gid_t gid, mode_t mode, struct err *e)
{
    struct hold h;

    TRY(hold(f, &h, e));
    f->uid = uid;
    f->gid = gid;
    f->mode = mode & 07777;
    txn_line_numbers("own", f->id, (uint64_t[]){f->uid, f->gid, f->mode}, 3,
                     &h.t->pending);
    return settle(f, &h, 0, e);
}

int txn_file_note(struct txn_file *f, const char *word, const char *text, struct err *e)
{
    struct hold h;
    int ret = txn_word_check(word, e);

    if (ret == 0)
        ret = hold(f, &h, e);
    if (ret < 0)
        return ret;
    ret = txn_set_note(&f->notes, word, text);
    if (ret == 0)
        txn_line_file_note(f, word, text, &h.t->pending);
    return settle(f, &h, ret, e);
}

char *txn_file_noted(struct txn_file *f, const char *word)
{
    struct named *found;
    char *copy = NULL;

    lock_file(f);
    found = names_find(&f->notes, word);
    if (found)
        copy = strdup(container_of(found, struct txn_note_item, key)->text);
    unlock_file(f);
    return copy;
}

int txn_expect(struct txn_file *f, uint64_t size, struct err *e)
{
    struct hold h = {0};

    if (size > INT64_MAX)
        return err_set(e, EFBIG, "%s: too long", f->key.name);
    TRY(hold(f, &h, e));
    if (f->expected == size) {
        let_go(f, &h);
        return 0;
    }
    f->expected = size;
    txn_line_numbers("expect", f->id, &size, 1, &h.t->pending);
    return settle(f, &h, 0, e);
}

uint64_t txn_expected(struct txn_file *f)
{
    uint64_t size;

    lock_file(f);
    size = f->expected;
    unlock_file(f);
    return size;
}

/* ---- arrival ---- */

/* [off, off + len) within what a file can have. */
static struct range clip(uint64_t off, uint64_t len)
{
    uint64_t from = MIN(off, (uint64_t)INT64_MAX);

    return (struct range){from, from + MIN(len, (uint64_t)INT64_MAX - from)};
}

/* Synced bytes that are written again do not count until they are synced again. */
static int give_up_synced(struct txn *t, struct txn_file *f, const struct range *r)
{
    const uint64_t block[] = {r->from - r->from % REWRITE_BLOCK,
                              r->to +
                                  (REWRITE_BLOCK - 1 - (r->to - 1) % REWRITE_BLOCK)};
    const uint64_t line[] = {block[0], MIN(block[1], (uint64_t)INT64_MAX)};
    int ret = ranges_remove(&f->synced, line[0], line[1]);

    if (ret == 0)
        txn_line_numbers("unsynced", f->id, line, 2, &t->pending);
    return ret;
}

int txn_writes(struct txn_file *f, uint64_t off, uint64_t len, struct err *e)
{
    const struct range r = clip(off, len);
    bool again = false;
    struct hold h;
    int ret = hold(f, &h, e);

    if (ret < 0)
        return ret;
    if (ranges_meet(&f->arrived, r.from, r.to))
        ret = ranges_add(&f->rewritten, r.from, r.to);
    if (ret == 0 && ranges_meet(&f->synced, r.from, r.to)) {
        again = f->listed;
        ret = give_up_synced(h.t, f, &r);
    }
    f->writing += ret == 0;
    let_go(f, &h);
    if (ret < 0)
        return err_nomem(e);
    ret = again ? txn_flush_durably(h.t, e) : 0;
    if (ret < 0) {
        lock_file(f);
        f->writing--;
        unlock_file(f);
    }
    return ret;
}

int txn_wrote(struct txn_file *f, uint64_t off, uint64_t len, struct err *e)
{
    const struct range r = clip(off, len);
    struct err later = {0};
    struct hold h;
    bool due;
    int ret = hold(f, &h, e);

    if (ret < 0)
        return ret;
    f->writing -= f->writing > 0;
    if (!ranges_hold(&f->arrived, r.from, r.to)) {
        ret = ranges_add(&f->arrived, r.from, r.to);
        f->dirty |= ret == 0;
        h.t->unjournaled += r.to - r.from;
    }
    due = f->listed && h.t->unjournaled >= FLUSH_BYTES;
    let_go(f, &h);
    if (ret < 0)
        return err_nomem(e);
    if (due) /* the bytes are written all the same: the next sync reports it */
        txn_flush(h.t, &later);
    return 0;
}

/* Under the lock. */
static int arrive(struct txn_file *f, const struct range *r)
{
    int ret;

    if (ranges_hold(&f->arrived, r->from, r->to))
        return 0;
    ret = ranges_add(&f->arrived, r->from, r->to);
    f->dirty |= ret == 0;
    return ret;
}

int txn_confirm(struct txn_file *f, uint64_t size, struct err *e)
{
    const struct range r = clip(0, size);
    struct hold h;
    int ret = hold(f, &h, e);

    return ret < 0 ? ret : settle(f, &h, arrive(f, &r), e);
}

/* Under the lock: these are missing. */
static int lose(struct txn *t, struct txn_file *f, const struct range *r)
{
    int ret = 0;

    if (!ranges_meet(&f->arrived, r->from, r->to))
        return 0;
    if (f->syncing) /* the sync that runs does not speak of them */
        ret = ranges_add(&f->rewritten, r->from, r->to);
    if (ret == 0)
        ret = ranges_remove(&f->arrived, r->from, r->to);
    if (ret == 0)
        ret = ranges_remove(&f->synced, r->from, r->to);
    if (ret == 0)
        ret = ranges_remove(&f->told, r->from, r->to);
    if (ret == 0)
        txn_line_numbers("lost", f->id, (uint64_t[]){r->from, r->to}, 2, &t->pending);
    return ret;
}

/* Bytes that were synced must not count by any chance after a power loss. */
static int lose_durably(struct txn_file *f, const struct range *zeros,
                        const struct range *lost, struct err *e)
{
    bool synced;
    struct hold h;
    int ret = hold(f, &h, e);

    if (ret < 0)
        return ret;
    synced = f->listed && ranges_meet(&f->synced, lost->from, lost->to);
    ret = arrive(f, zeros);
    if (ret == 0)
        ret = lose(h.t, f, lost);
    ret = settle(f, &h, ret, e);
    return ret == 0 && synced ? txn_flush_durably(h.t, e) : ret;
}

int txn_truncates(struct txn_file *f, uint64_t old_size, uint64_t size, struct err *e)
{
    const struct range zeros = clip(0, MIN(old_size, size)),
                       lost = clip(size, INT64_MAX);

    return lose_durably(f, &zeros, &lost, e);
}

int txn_missing(struct txn_file *f, uint64_t size, struct ranges *out)
{
    struct range gap;
    int ret = 0;

    lock_file(f);
    for (uint64_t at = 0; ret == 0 && ranges_next_gap(&f->arrived, &at, size, &gap);)
        ret = ranges_add(out, gap.from, gap.to);
    unlock_file(f);
    return ret;
}

bool txn_has(struct txn_file *f, uint64_t off, uint64_t len)
{
    const struct range r = clip(off, len);
    bool has;

    lock_file(f);
    has = r.to - r.from == len && ranges_hold(&f->arrived, r.from, r.to);
    unlock_file(f);
    return has;
}

/* ---- on the disk ---- */

int txn_sync_begin(struct txn_file *f, struct err *e)
{
    struct hold h;
    int ret;

    pthread_mutex_lock(&f->sync);
    ret = hold(f, &h, e);
    if (ret == 0) {
        ret = ranges_copy(&f->before, &f->arrived);
        f->syncing = ret == 0;
        if (!f->writing) /* else one may be under way that began before */
            ranges_clear(&f->rewritten);
        let_go(f, &h);
        if (ret < 0)
            err_nomem(e);
    }
    if (ret < 0)
        pthread_mutex_unlock(&f->sync);
    return ret;
}

/* Under the lock: what had arrived before, and was not written again meanwhile. */
static int count_as_synced(struct txn *t, struct txn_file *f)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < f->rewritten.count; i++)
        ret = ranges_remove(&f->before, f->rewritten.range[i].from,
                            f->rewritten.range[i].to);
    for (size_t i = 0; ret == 0 && i < f->before.count; i++) {
        const struct range *r = &f->before.range[i];
        struct range gap;

        for (uint64_t at = r->from; ranges_next_gap(&f->synced, &at, r->to, &gap);)
            txn_line_numbers("synced", f->id, (uint64_t[]){gap.from, gap.to}, 2,
                             &t->pending);
        ret = ranges_add(&f->synced, r->from, r->to);
        if (ret == 0)
            ret = ranges_add(&f->told, r->from, r->to);
    }
    return ret;
}

/* Under the lock: the kernel drops what the disk refused, so that only what was synced counts. */
static int count_as_refused(struct txn *t, struct txn_file *f)
{
    int ret = ranges_copy(&f->arrived, &f->synced);

    if (ret == 0)
        ret = ranges_copy(&f->told, &f->synced);
    if (ret == 0)
        txn_line_numbers("refused", f->id, NULL, 0, &t->pending);
    f->dirty = false;
    return ret;
}

int txn_sync_end(struct txn_file *f, bool synced, struct err *e)
{
    struct hold h;
    bool listed = false;
    int ret = hold(f, &h, e);

    if (ret == 0) {
        listed = f->listed;
        ret = synced ? count_as_synced(h.t, f) : count_as_refused(h.t, f);
        ret = settle(f, &h, ret, e);
    }
    lock_file(f);
    f->syncing = false;
    unlock_file(f);
    pthread_mutex_unlock(&f->sync);
    return ret == 0 && listed ? txn_flush_durably(h.t, e) : ret;
}

int txn_file_sync(struct txn_file *f, struct err *e)
{
    struct err more = {0};
    int fd = f->elsewhere ? -ENOENT : txn_file_fd(f, e);
    int ret = fd < 0 ? (f->elsewhere ? err_set(e, EINVAL, "%s: its bytes are elsewhere",
                                               f->key.name)
                                     : fd)
                     : txn_sync_begin(f, e);
    int code;

    if (ret < 0)
        return ret;
    code = fdatasync(fd) < 0 ? errno : 0;
    if (code == 0)
        return txn_sync_end(f, true, e);
    txn_sync_end(f, false, &more);
    err_set(e, code, "%s: the disk refused bytes of it: %s", f->key.name,
            strerror(code));
    return err_hint(e, "what was not synced before is missing: write it again");
}
