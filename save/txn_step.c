/* SPDX-License-Identifier: MIT */
/* save/txn_step.c - publishes some of a transaction; the rest stays staged. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>

#include "base/err.h"
#include "save/lines.h"
#include "save/publish_priv.h"
#include "save/staged.h"
#include "save/txn_priv.h"

/*
 * The step's journal has a note: a line for each file and each removal that ends with it. When
 * the step has ended, it stays as "ended" until the transaction's journal has these changes.
 * So a crash between the two journals publishes nothing twice, and forgets nothing.
 */

/* ---- the note ---- */

static int write_note(struct txn *t, struct txn_file *const *done, size_t dones,
                      bool removals, struct buf *out, struct err *e)
{
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < dones; i++)
        if (done[i]->listed && done[i]->txn == t)
            txn_line_numbers("file", done[i]->id, NULL, 0, out);
    for (size_t i = 0; removals && i < t->j.gone.count; i++)
        txn_line_path("gone", t->j.gone.item[i]->name, out);
    pthread_mutex_unlock(&t->lock);
    return buf_failed(out) ? err_nomem(e) : 0;
}

static void remove_spool(const struct txn *t, const struct txn_file *f)
{
    char name[32];

    txn_spool_name(f, name);
    if (!f->elsewhere)
        unlinkat(t->spool_fd, name, 0);
}

/* Under the lock: the file leaves, if it is still there. */
static bool end_file(struct txn *t, struct txn_file *f)
{
    if (!f)
        return false;
    txn_file_unlist(&t->j, f);
    f->ended = true;
    t->open -= f->fd >= 0;
    return true;
}

/*
 * One line. The files' bytes go when the journal is durable, so that they are collected in `ended`,
 * which has room for all. True: something was still there.
 */
static bool end_line(struct txn *t, char *line, struct txn_file **ended, size_t *count)
{
    const char *word = lines_word(&line);
    bool nomem = false, was = false;
    struct txn_file *f;
    uint64_t id;

    if (word && strcmp(word, "file") == 0 && lines_number(&line, &id)) {
        f = txn_journal_file(&t->j, id);
        was = end_file(t, f);
        if (was)
            ended[(*count)++] = f;
    } else if (word && strcmp(word, "gone") == 0) {
        CLEANUP_FREE char *path = lines_path(&line, &nomem);

        was = path && txn_unset_gone(&t->j, path);
    }
    return was;
}

/* ---- the base ---- */

int txn_renew_base(struct txn *t, const struct publish_place *at, struct err *e)
{
    CLEANUP_FD int dir = openat(at->dir, at->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int ret = 0;

    if (dir < 0)
        return staged_fail(e, "open", at->path);
    for (size_t i = 0; ret == 0 && i < t->j.base.count; i++) {
        struct txn_base_item *b =
            container_of(t->j.base.item[i], struct txn_base_item, key);
        struct file_id now;

        ret = publish_identity(dir, b->key.name, &now, e);
        if (ret == 0 && now.ino == b->id.ino && now.size == b->id.size &&
            now.mtime_ns == b->id.mtime_ns)
            b->id.ctime_ns = now.ctime_ns;
    }
    return ret;
}

/*
 * What the step has brought, if it is still that; its time of change goes on with each of our own
 * links to it that is removed, so that it does not count. What somebody has put there since is
 * not taken for it: the base is something that nothing can be then.
 */
static struct file_id brought(const struct step_entry *n, const struct file_id *now)
{
    bool same = n->kind == PUBLISH_REMOVE ? now->ino == 0
                : n->kind == PUBLISH_PUT
                    ? now->ino == n->ino && now->size == n->size
                    : now->ino == n->old.ino && now->size == n->old.size &&
                          now->mtime_ns == n->old.mtime_ns;
    struct file_id id = {.ino = n->kind == PUBLISH_PUT ? n->ino : n->old.ino};

    if (same) {
        id = *now;
        id.ctime_ns = 0;
    }
    return id;
}

/* Under the lock. */
static int take_base(struct txn *t, const struct step *s, int target, struct err *e)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < s->entries; i++) {
        struct file_id now;

        ret = publish_identity(target, s->entry[i].path, &now, e);
        if (ret == 0) {
            const struct file_id id = brought(&s->entry[i], &now);

            if (txn_set_base(&t->j, s->entry[i].path, &id) < 0)
                ret = err_nomem(e);
        }
    }
    return ret;
}

/* ---- settling ---- */

static int apply(struct txn *t, const struct step *s, struct txn_file **ended,
                 size_t *count, struct err *e)
{
    CLEANUP_FD int target =
        openat(t->parent, t->j.target, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    struct lines l = {.text = s->note, .len = s->note ? strlen(s->note) : 0};
    bool any = false;
    char *line;
    int ret = 0;

    while ((line = lines_next(&l)))
        any |= end_line(t, line, ended, count);
    /* If the journal knew already, the base is what it was then, or newer. */
    if (any && target < 0)
        ret = staged_fail(e, "open", t->path);
    else if (any)
        ret = take_base(t, s, target, e);
    return ret;
}

static int settle_step(struct txn *t, const struct step *s, struct err *e)
{
    struct txn_file **ended;
    size_t count = 0;
    int ret;

    pthread_mutex_lock(&t->lock);
    ended = calloc(t->j.ids + 1, sizeof *ended);
    ret = ended ? apply(t, s, ended, &count, e) : err_nomem(e);
    pthread_mutex_unlock(&t->lock);
    if (ret == 0)
        ret = txn_write_whole(t, e);
    for (size_t i = 0; i < count; i++) {
        remove_spool(t, ended[i]);
        txn_file_put(ended[i]);
    }
    free(ended);
    return ret;
}

int txn_settle(struct txn *t, struct err *e)
{
    CLEANUP(step_release) struct step s;
    int ret;

    step_init(&s);
    t->unsettled = true;
    ret = step_load(&s, t->dir, STAGED_ENDED, e);
    if (ret == 0)
        ret = settle_step(t, &s, e);
    if (ret < 0)
        return ret;
    if (unlinkat(t->dir, STAGED_ENDED, 0) < 0)
        return staged_fail(e, "settle the step into", t->path);
    (void)!fsync(t->dir); /* one that comes back says nothing new */
    t->unsettled = false;
    return 0;
}

int txn_clear_data(struct txn *t, struct err *e)
{
    int ret = staged_empty(t->dir, STAGED_DATA, e);

    return ret == 0 ? staged_empty(t->dir, STAGED_OLD, e) : ret;
}

/* ---- the step ---- */

/* Where the target is, as txn_open() was told or txn_moved(). */
static struct publish_place place_of(const struct txn *t)
{
    return (struct publish_place){
        .dir = t->parent, .name = t->j.target, .path = t->path};
}

static bool is_unset(const struct file_id *id)
{
    return id->ino == 0 && id->size == 0 && id->mtime_ns == 0;
}

/* The step was undone, and files of the base have other times of change now. */
static void renew(struct txn *t, const struct publish_place *at)
{
    struct err ignored = {0};

    pthread_mutex_lock(&t->lock);
    txn_renew_base(t, at, &ignored);
    pthread_mutex_unlock(&t->lock);
    txn_write_whole(t, &ignored);
}

int txn_publish(struct txn *t, struct publish_file *file, size_t files,
                struct publish_spec *spec, struct txn_file *const *done, size_t dones,
                bool removals, struct err *e)
{
    CLEANUP(buf_release) struct buf note = {.max = STEP_TEXT_MAX / 4};
    struct err later = {0};
    int ret = t->unsettled ? txn_settle(t, e) : 0;

    if (ret == 0)
        ret = write_note(t, done, dones, removals, &note, e);
    if (ret < 0)
        return ret;
    for (size_t i = 0; i < files; i++)
        if (is_unset(&file[i].seen))
            file[i].seen = txn_base(t, file[i].path);
    spec->at = place_of(t);
    spec->file = file;
    spec->files = files;
    spec->note = note.data ? note.data : "";
    ret = publish(spec, e);
    if (ret < 0) {
        if (spec->undone)
            renew(t, &spec->at);
        return ret;
    }
    /* It is published. What cannot be written down of that now is when it can. */
    if (txn_settle(t, &later) == 0)
        txn_clear_data(t, &later);
    return 0;
}
