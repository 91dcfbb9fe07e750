/* SPDX-License-Identifier: MIT */
/* save/txn.c - transactions: their journal is written, what is known is noted, and they end. */
#include "save/txn.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "base/err.h"
#include "base/fsutil.h"
#include "save/staged.h"
#include "save/txn_priv.h"

enum {
    MIN_OPEN =
        64, /* files that stay open though nobody uses them, at least and at most */
    MAX_OPEN = 16384,
    GROWTH = 4 << 20, /* of a journal before it is written as a whole again */
};

static const char journal_new[] = "new-" STAGED_JOURNAL;

/* ---- in memory ---- */

void txn_unref(struct txn *t)
{
    if (!t || atomic_fetch_sub(&t->refs, 1) != 1)
        return;
    buf_release(&t->pending);
    pthread_mutex_destroy(&t->lock);
    pthread_mutex_destroy(&t->journal_lock);
    free(t->path);
    free(t);
}

/* Ends it in this process; files that somebody has a reference of are left to him. */
void txn_release(struct txn *t)
{
    const int fd[] = {t->journal_fd, t->data_fd, t->spool_fd,
                      t->lock_fd,    t->dir,     t->parent};

    pthread_mutex_lock(&t->lock);
    t->ended = true;
    for (size_t i = 0; i < t->j.ids; i++)
        t->j.by_id[i]->listed = false;
    pthread_mutex_unlock(&t->lock);
    for (size_t i = 0; i < ARRAY_SIZE(fd); i++)
        if (fd[i] >= 0)
            close(fd[i]);
    txn_journal_release(&t->j);
    txn_unref(t);
}

/* Of the process's descriptors one transaction takes an eighth for files that nobody uses. */
static unsigned may_open(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return MIN_OPEN;
    return (unsigned)MIN(MAX(limit.rlim_cur / 8, (rlim_t)MIN_OPEN), (rlim_t)MAX_OPEN);
}

struct txn *txn_make(void)
{
    struct txn *t = calloc(1, sizeof *t);

    if (!t)
        return NULL;
    t->parent = t->dir = t->lock_fd = t->journal_fd = t->data_fd = t->spool_fd = -1;
    t->pending.max = TXN_JOURNAL_MAX;
    t->refs = 1;
    t->max_open = may_open();
    t->j.next_id = 1;
    pthread_mutex_init(&t->lock, NULL);
    pthread_mutex_init(&t->journal_lock, NULL);
    return t;
}

bool txn_has_name(const struct txn *t, const char *name)
{
    return faccessat(t->dir, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

int txn_sync_parent(const struct txn *t, struct err *e)
{
    CLEANUP_FD int fd = openat(t->parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    return fd < 0 || fsync(fd) < 0 ? staged_fail(e, "fsync the directory of", t->path)
                                   : 0;
}

/* ---- the journal ---- */

/* Opens the new journal and makes it the journal, under journal_lock. */
static int replace_journal(struct txn *t, const struct buf *text, struct err *e)
{
    CLEANUP_FD int fd =
        openat(t->dir, journal_new,
               O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    int ret;

    if (fd < 0)
        return staged_fail(e, "make the journal of", t->path);
    ret = write_all(fd, text->data, text->len, e);
    if (ret < 0)
        return err_wrap(e, "journal of %s", t->path);
    if (fsync(fd) < 0 || renameat(t->dir, journal_new, t->dir, STAGED_JOURNAL) < 0)
        return staged_fail(e, "write the journal of", t->path);
    if (t->journal_fd >= 0)
        close(t->journal_fd);
    t->journal_fd = steal_fd(&fd);
    t->journal_size = t->journal_short = text->len;
    t->rewrite = false;
    return fsync(t->dir) < 0 ? staged_fail(e, "fsync the journal of", t->path) : 0;
}

/* All of it as text; then nothing is pending. Under journal_lock. */
static int whole_text(struct txn *t, struct buf *out)
{
    int ret;

    pthread_mutex_lock(&t->lock);
    ret = txn_journal_text(&t->j, out);
    for (size_t i = 0; ret == 0 && i < t->j.ids; i++) {
        struct txn_file *f = t->j.by_id[i];

        ret = ranges_copy(&f->told, &f->arrived);
        f->dirty &= ret < 0;
    }
    if (ret == 0) {
        buf_release(&t->pending);
        t->pending = (struct buf){.max = TXN_JOURNAL_MAX};
        t->unjournaled = 0;
    }
    pthread_mutex_unlock(&t->lock);
    return ret;
}

static int write_whole(struct txn *t, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {.max = TXN_JOURNAL_MAX};
    int ret = whole_text(t, &text);

    t->rewrite = true;
    return ret < 0 ? err_nomem(e) : replace_journal(t, &text, e);
}

/* What is pending, and what has arrived since; under journal_lock. */
static int take_pending(struct txn *t, struct buf *out)
{
    int ret = 0;

    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; ret == 0 && i < t->j.ids; i++)
        if (t->j.by_id[i]->dirty)
            ret = txn_line_got(t->j.by_id[i], &t->pending);
    *out = t->pending;
    t->pending = (struct buf){.max = TXN_JOURNAL_MAX};
    t->unjournaled = 0;
    pthread_mutex_unlock(&t->lock);
    return ret < 0 ? ret : buf_failed(out);
}

/* A line that is cut would end the journal: then what follows it is of no use. */
static int append(struct txn *t, const struct buf *text, struct err *e)
{
    int ret = text->len ? write_all(t->journal_fd, text->data, text->len, e) : 0;

    if (ret == 0) {
        t->journal_size += text->len;
        return 0;
    }
    t->rewrite = true;
    (void)!ftruncate(t->journal_fd, (off_t)t->journal_size);
    return err_wrap(e, "journal of %s", t->path);
}

static int flush_locked(struct txn *t, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {0};
    int ret;

    if (t->rewrite || t->journal_size > 2 * t->journal_short + GROWTH)
        return write_whole(t, e);
    ret = take_pending(t, &text);
    if (ret == 0)
        return append(t, &text, e);
    t->rewrite = true;
    return err_nomem(e);
}

int txn_write_whole(struct txn *t, struct err *e)
{
    int ret;

    pthread_mutex_lock(&t->journal_lock);
    ret = write_whole(t, e);
    pthread_mutex_unlock(&t->journal_lock);
    return ret;
}

int txn_flush(struct txn *t, struct err *e)
{
    int ret;

    pthread_mutex_lock(&t->journal_lock);
    ret = flush_locked(t, e);
    pthread_mutex_unlock(&t->journal_lock);
    return ret;
}

int txn_flush_durably(struct txn *t, struct err *e)
{
    int ret;

    pthread_mutex_lock(&t->journal_lock);
    ret = flush_locked(t, e);
    if (ret == 0 && fdatasync(t->journal_fd) < 0) {
        ret = staged_fail(e, "fsync the journal of", t->path);
        t->rewrite = true;
    }
    pthread_mutex_unlock(&t->journal_lock);
    return ret;
}

/* ---- keeping ---- */

static int sync_one(void *user, struct txn_file *f)
{
    struct err *first = user, e = {0};
    bool dirty;

    if (f->elsewhere) /* the caller's */
        return 0;
    pthread_mutex_lock(&f->txn->lock);
    dirty = f->listed && (f->arrived.count != f->synced.count ||
                          ranges_bytes(&f->arrived) != ranges_bytes(&f->synced));
    pthread_mutex_unlock(&f->txn->lock);
    if (dirty && txn_file_sync(f, &e) < 0 && !first->code)
        *first = e;
    return 0; /* the others are synced all the same */
}

static int sync_names(struct txn *t, struct err *e)
{
    bool unsynced;

    pthread_mutex_lock(&t->lock);
    unsynced = t->names_unsynced;
    t->names_unsynced = false;
    pthread_mutex_unlock(&t->lock);
    if (!unsynced || fsync(t->spool_fd) == 0)
        return 0;
    pthread_mutex_lock(&t->lock);
    t->names_unsynced = true;
    pthread_mutex_unlock(&t->lock);
    return staged_fail(e, "fsync what is staged for", t->path);
}

int txn_sync(struct txn *t, struct err *e)
{
    struct err first = {0}, journal = {0};
    int ret = sync_names(t, e);

    if (ret == 0)
        ret = txn_each(t, sync_one, &first, e);
    if (txn_flush_durably(t, &journal) < 0 && ret == 0 && !first.code)
        first = journal;
    if (ret == 0 && first.code) {
        *e = first;
        return -first.code;
    }
    return ret;
}

bool txn_is_empty(struct txn *t)
{
    bool empty;

    pthread_mutex_lock(&t->lock);
    empty = t->j.files.count == 0 && t->j.gone.count == 0;
    pthread_mutex_unlock(&t->lock);
    return empty;
}

int txn_close(struct txn *t, struct err *e)
{
    bool begun;
    int ret = 0;

    if (!t)
        return 0;
    begun = txn_has_name(t, STAGED_REDO);
    if (t->unsettled)
        ret = txn_settle(t, e);
    if (ret == 0)
        ret = begun || !txn_is_empty(t) ? txn_sync(t, e)
                                        : staged_remove_dir(t->parent, t->staging, e);
    txn_release(t);
    return ret;
}

int txn_dir(const struct txn *t)
{
    return t->dir;
}

int txn_data_dir(const struct txn *t)
{
    return t->data_fd;
}

bool txn_was_taken_up(const struct txn *t)
{
    return t->taken_up;
}

/* After changes under the lock. */
static int changed(struct txn *t, int ret, struct err *e)
{
    if (ret == -ENOMEM || buf_failed(&t->pending) < 0)
        ret = err_nomem(e);
    pthread_mutex_unlock(&t->lock);
    return ret < 0 ? ret : txn_flush(t, e);
}

static int rename_staging(struct txn *t, const struct publish_place *to,
                          const char *name, struct err *e)
{
    int parent = fcntl(to->dir, F_DUPFD_CLOEXEC, 0);
    int ret;

    if (parent < 0)
        return staged_fail(e, "open the directory of", to->path);
    if (renameat(t->parent, t->staging, parent, name) <
        0) { /* over nothing or an empty one */
        ret = staged_fail(e, "rename what is staged for", to->path);
        close(parent);
        return ret;
    }
    ret = txn_sync_parent(t, e);
    close(t->parent);
    t->parent = parent;
    memcpy(t->staging, name, sizeof t->staging);
    return ret == 0 ? txn_sync_parent(t, e) : ret;
}

int txn_moved(struct txn *t, const struct publish_place *to, struct err *e)
{
    CLEANUP_FREE char *path = strdup(to->path);
    char *name = strdup(to->name), *old;
    char staging[NAME_MAX + 1];
    int ret = path && name ? publish_staging_name(to->name, staging, e) : err_nomem(e);

    if (ret == 0)
        ret = rename_staging(t, to, staging, e);
    if (ret < 0) {
        free(name);
        return ret;
    }
    pthread_mutex_lock(&t->lock);
    old = t->path;
    t->path = path;
    path = old;
    free(t->j.target);
    t->j.target = name;
    txn_line_target(&t->j, &t->pending);
    ret = changed(t, 0, e);
    return ret == 0 ? txn_flush_durably(t, e) : ret;
}

/* ---- notes, base, removals ---- */

int txn_note(struct txn *t, const char *word, const char *text, struct err *e)
{
    int ret = txn_word_check(word, e);

    if (ret < 0)
        return ret;
    pthread_mutex_lock(&t->lock);
    ret = txn_set_note(&t->j.notes, word, text);
    if (ret == 0)
        txn_line_note(word, text, &t->pending);
    return changed(t, ret, e);
}

char *txn_noted(struct txn *t, const char *word)
{
    struct named *found;
    char *copy = NULL;

    pthread_mutex_lock(&t->lock);
    found = names_find(&t->j.notes, word);
    if (found)
        copy = strdup(container_of(found, struct txn_note_item, key)->text);
    pthread_mutex_unlock(&t->lock);
    return copy;
}

int txn_base_add(struct txn *t, const char *path, const struct file_id *id,
                 struct err *e)
{
    int ret = 0;

    if (!publish_path_is_safe(path))
        return err_set(e, EINVAL, "%s: not a path of a checkpoint", path);
    pthread_mutex_lock(&t->lock);
    if (!names_find(&t->j.base, path)) {
        ret = txn_set_base(&t->j, path, id);
        if (ret == 0)
            txn_line_base(path, id, &t->pending);
    }
    return changed(t, ret, e);
}

struct file_id txn_base(struct txn *t, const char *path)
{
    struct file_id id = {0};
    struct named *found;

    pthread_mutex_lock(&t->lock);
    found = names_find(&t->j.base, path);
    if (found)
        id = container_of(found, struct txn_base_item, key)->id;
    pthread_mutex_unlock(&t->lock);
    return id;
}

int txn_remove(struct txn *t, const char *path, struct err *e)
{
    int ret = 0;

    if (!txn_path_is_safe(path))
        return err_set(e, EINVAL, "%s: not a path of a view", path);
    pthread_mutex_lock(&t->lock);
    if (!names_find(&t->j.gone, path)) {
        ret = txn_set_gone(&t->j, path);
        if (ret == 0)
            txn_line_path("remove", path, &t->pending);
    }
    return changed(t, ret, e);
}

int txn_unremove(struct txn *t, const char *path, struct err *e)
{
    int ret = 0;

    pthread_mutex_lock(&t->lock);
    if (txn_unset_gone(&t->j, path))
        txn_line_path("unremove", path, &t->pending);
    else
        ret = err_set(e, ENOENT, "%s: it is not removed", path);
    return changed(t, ret, e);
}

bool txn_is_removed(struct txn *t, const char *path)
{
    bool is;

    pthread_mutex_lock(&t->lock);
    is = names_find(&t->j.gone, path) != NULL;
    pthread_mutex_unlock(&t->lock);
    return is;
}

int txn_each_removal(struct txn *t, int (*each)(void *user, const char *path),
                     void *user, struct err *e)
{
    CLEANUP(buf_release) struct buf all = {.max = TXN_JOURNAL_MAX};
    int ret = 0;

    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < t->j.gone.count; i++)
        buf_add(&all, t->j.gone.item[i]->name, strlen(t->j.gone.item[i]->name) + 1);
    pthread_mutex_unlock(&t->lock);
    if (buf_failed(&all))
        return err_nomem(e);
    for (size_t at = 0; ret == 0 && at < all.len; at += strlen(all.data + at) + 1)
        ret = each(user, all.data + at);
    return ret;
}
