/* SPDX-License-Identifier: MIT */
/* save/txn_list.c - what is staged in a directory, in words; and its end. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>

#include "base/dir.h"
#include "base/err.h"
#include "save/staged.h"
#include "save/txn_priv.h"

enum {
    RANGES_SHOWN = 3,
    LINE_BYTES = 200, /* of a conversion's first line */
};

/* A staging directory that is looked at. */
struct look {
    int parent, dir;
    struct txn_journal j;
    bool read, damaged; /* j */
    char line[LINE_BYTES + 1];
    struct txn_listed out;
    struct txn_listed_file *file;
    char writer[400];
};

static bool has(int dir, const char *name)
{
    return faccessat(dir, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

static bool is_rest(int dir)
{
    return has(dir, STAGED_DONE) ||
           (has(dir, STAGED_PUBLISHED) && !has(dir, STAGED_DATA));
}

/* Is a journal of a conversion there that a process has locked? */
static bool is_converting(int dir)
{
    int own = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *names = own < 0 ? NULL : fdopendir(own);
    const char *name;
    bool busy = false;

    if (!names && own >= 0)
        close(own);
    while (names && !busy && dir_next(names, &name) > 0)
        if (staged_is_part(name)) {
            CLEANUP_FD int fd =
                openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);

            busy = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK;
        }
    if (names)
        closedir(names);
    return busy;
}

/* ---- looking ---- */

static void read_journal(struct look *l)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct txn_owner self;
    struct err none = {0};
    size_t whole;

    l->damaged = txn_journal_load(l->dir, &text, &none) < 0;
    if (l->damaged || text.len == 0)
        return;
    l->damaged = txn_journal_read(&l->j, text.data, text.len, &whole, &none) < 0;
    l->read = !l->damaged;
    txn_owner_self(&self);
    for (size_t i = 0; strcmp(self.boot, l->j.owner.boot) != 0 && i < l->j.ids; i++)
        l->damaged |= ranges_copy(&l->j.by_id[i]->arrived, &l->j.by_id[i]->synced) < 0;
}

static enum txn_state state_of(const struct look *l)
{
    if (l->line[0])
        return is_converting(l->dir) ? TXN_LIVE
               : is_rest(l->dir)     ? TXN_REST
                                     : TXN_CONVERSION;
    if (txn_lock_is_held(l->dir))
        return TXN_LIVE;
    if (has(l->dir, STAGED_DONE))
        return TXN_REST;
    if (l->damaged)
        return TXN_DAMAGED;
    if (!l->read)
        return TXN_REST;
    if (!txn_owner_is_local(&l->j.owner))
        return TXN_FOREIGN;
    return has(l->dir, STAGED_REDO) || has(l->dir, STAGED_ENDED) ? TXN_STEP
                                                                 : TXN_STAGED;
}

static bool is_target(const struct look *l)
{
    struct stat st;

    return fstatat(l->parent, l->j.target, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
           S_ISDIR(st.st_mode) && st.st_ino == l->j.target_ino;
}

static uint64_t staged_size(const struct look *l, const struct txn_file *f)
{
    char path[64], name[32];
    struct stat st;

    txn_spool_name(f, name);
    snprintf(path, sizeof path, STAGED_SPOOL "/%s", name);
    return !f->elsewhere && fstatat(l->dir, path, &st, AT_SYMLINK_NOFOLLOW) == 0
               ? (uint64_t)st.st_size
               : 0;
}

static int list_files(struct look *l)
{
    l->file = calloc(l->j.files.count + 1, sizeof *l->file);
    if (!l->file)
        return -ENOMEM;
    for (size_t i = 0; i < l->j.files.count; i++) {
        const struct txn_file *f =
            container_of(l->j.files.item[i], struct txn_file, key);

        l->file[i] = (struct txn_listed_file){.path = f->key.name,
                                              .size = staged_size(l, f),
                                              .expected = f->expected,
                                              .arrived = &f->arrived};
    }
    l->out.file = l->file;
    l->out.files = l->j.files.count;
    return 0;
}

static void look_when(struct look *l)
{
    struct stat st;

    if (fstatat(l->dir, STAGED_JOURNAL, &st, AT_SYMLINK_NOFOLLOW) == 0 ||
        fstat(l->dir, &st) == 0)
        l->out.when = st.st_mtim.tv_sec;
}

static int look_inside(struct look *l)
{
    if (!txn_is_conversion(l->dir, l->line, sizeof l->line))
        read_journal(l);
    else if (!l->line[0]) /* one that has just begun */
        snprintf(l->line, sizeof l->line, "a conversion");
    look_when(l);
    l->out.state = state_of(l);
    if (l->line[0])
        l->out.writer = l->line;
    if (!l->read)
        return 0;
    l->out.target = l->j.target;
    l->out.target_gone = !is_target(l);
    snprintf(l->writer, sizeof l->writer, "host %s, process %" PRIu64, l->j.owner.host,
             l->j.owner.pid);
    l->out.writer = l->writer;
    return list_files(l);
}

/* The names of removals, as the report has them. */
static int list_removed(struct look *l, const char ***out)
{
    const char **removed = calloc(l->j.gone.count + 1, sizeof *removed);

    if (!removed)
        return -ENOMEM;
    for (size_t i = 0; i < l->j.gone.count; i++)
        removed[i] = l->j.gone.item[i]->name;
    l->out.removed = removed;
    l->out.removals = l->j.gone.count;
    *out = removed;
    return 0;
}

static int list_one(int parent, const char *name,
                    int (*each)(void *user, const struct txn_listed *l), void *user,
                    struct err *e)
{
    CLEANUP_FD int dir =
        openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    struct look l = {.parent = parent, .dir = dir, .j.next_id = 1, .out.staging = name};
    const char **removed = NULL;
    int ret = 0;

    if (dir < 0) { /* gone since, or another user's */
        if (errno == ENOENT)
            return 0;
        l.out.state = TXN_FOREIGN;
        l.out.writer = "another user";
    } else if (look_inside(&l) < 0 || list_removed(&l, &removed) < 0) {
        ret = err_nomem(e);
    }
    if (ret == 0)
        ret = each(user, &l.out);
    free(removed);
    free(l.file);
    txn_journal_release(&l.j);
    return ret;
}

int txn_list(int dir, int (*each)(void *user, const struct txn_listed *l), void *user,
             struct err *e)
{
    int own = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ret = 0, more = 0;
    DIR *names = own < 0 ? NULL : fdopendir(own);
    const char *name;

    if (!names)
        ret = staged_fail(e, "list", "what is staged");
    if (!names && own >= 0)
        close(own);
    while (ret == 0 && (more = dir_next(names, &name)) > 0)
        if (publish_is_staging(name))
            ret = list_one(dir, name, each, user, e);
    if (names)
        closedir(names);
    return ret == 0 && more < 0
               ? err_set(e, -more, "list what is staged: %s", strerror(-more))
               : ret;
}

/* ---- in words ---- */

static void describe_missing(const struct txn_listed_file *f, struct buf *out)
{
    uint64_t bytes = 0;
    size_t count = 0;
    struct range gap;

    for (uint64_t at = 0; ranges_next_gap(f->arrived, &at, f->expected, &gap);
         count++) {
        bytes += gap.to - gap.from;
        if (count < RANGES_SHOWN)
            buf_addf(out, "%s%" PRIu64 " to %" PRIu64, count ? ", " : "bytes ",
                     gap.from, gap.to - 1);
    }
    if (count > RANGES_SHOWN)
        buf_addf(out, " and %zu more ranges, %" PRIu64 " bytes in all,",
                 count - RANGES_SHOWN, bytes);
    if (count)
        buf_addf(out, " of %" PRIu64 " are missing\n", f->expected);
    else
        buf_addf(out, "all %" PRIu64 " bytes have arrived, it is not published yet\n",
                 f->expected);
}

int txn_describe_file(const struct txn_listed_file *f, struct buf *out)
{
    buf_addf(out, "%s: ", f->path);
    if (f->expected)
        describe_missing(f, out);
    else
        buf_addf(out, "its header has not arrived (%" PRIu64 " bytes have)\n",
                 ranges_bytes(f->arrived));
    return buf_failed(out);
}

int txn_describe(struct txn *t, struct buf *out)
{
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < t->j.files.count; i++) {
        const struct txn_file *f =
            container_of(t->j.files.item[i], struct txn_file, key);
        const struct txn_listed_file l = {
            .path = f->key.name, .expected = f->expected, .arrived = &f->arrived};

        txn_describe_file(&l, out);
    }
    for (size_t i = 0; i < t->j.gone.count; i++)
        buf_addf(out, "%s: removed, which is not published yet\n",
                 t->j.gone.item[i]->name);
    pthread_mutex_unlock(&t->lock);
    return buf_failed(out);
}

/* ---- the end of what a dead process has staged ---- */

/* A staging directory of this machine, locked, with its journal read. */
struct grip {
    struct look look;
    int lock;
};

static void grip_release(struct grip *g)
{
    if (g->lock >= 0)
        close(g->lock);
    if (g->look.dir >= 0)
        close(g->look.dir);
    txn_journal_release(&g->look.j);
}

static int is_busy(const char *staging, struct err *e)
{
    return err_set(e, EBUSY, "%s: a process is writing it", staging);
}

static int is_foreign(const char *staging, const char *host, struct err *e)
{
    err_set(e, EBUSY, "%s: host %s has staged it", staging, host);
    return err_hint(e, "do it there, or remove that directory yourself");
}

static int grip_conversion(const struct grip *g, const char *staging, struct err *e)
{
    char host[256] = "", mine[256] = "";

    gethostname(mine, sizeof mine - 1);
    if (is_converting(g->look.dir))
        return is_busy(staging, e);
    /* As older versions staged what was saved in a mount. */
    if (sscanf(g->look.line, "unshardfs mount-save host %255s", host) == 1 &&
        strcmp(host, mine) != 0)
        return is_foreign(staging, host, e);
    return 0;
}

static int grip(int dir, const char *staging, struct grip *g, struct err *e)
{
    struct look *l = &g->look;

    *g = (struct grip){.look = {.parent = dir, .j.next_id = 1}, .lock = -1};
    l->dir = openat(dir, staging, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (l->dir < 0)
        return staged_fail(e, "open", staging);
    if (txn_is_conversion(l->dir, l->line, sizeof l->line))
        return grip_conversion(g, staging, e);
    if (txn_lock_is_held(l->dir))
        return is_busy(staging, e);
    read_journal(l);
    if (l->read && !txn_owner_is_local(&l->j.owner))
        return is_foreign(staging, l->j.owner.host, e);
    g->lock = txn_lock_take(l->dir, staging, e);
    return g->lock == -EAGAIN ? is_busy(staging, e) : MIN(g->lock, 0);
}

static int sync_at(int dir, const char *name, struct err *e)
{
    CLEANUP_FD int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    return fd < 0 || fsync(fd) < 0 ? staged_fail(e, "fsync", name) : 0;
}

/* What a finished save left may go once the disk has that save. */
static int remove_rest(int dir, const char *staging, struct err *e)
{
    int ret = sync_at(dir, staging, e);

    if (ret == 0)
        ret = sync_at(dir, ".", e);
    return ret == 0 ? staged_remove_dir(dir, staging, e) : ret;
}

/* As the next writer there does it. */
static int go_on(int dir, const char *target, struct err *e)
{
    const struct publish_place at = {.dir = dir, .name = target, .path = target};
    struct err undone;
    struct txn *t;
    int ret = txn_open(&at, TXN_EXISTING, &t, e);

    if (ret == -ENOENT) { /* there was nothing but the step */
        *e = (struct err){0};
        return 1;
    }
    if (ret < 0)
        return ret;
    undone = t->undone;
    ret = txn_close(t, e);
    if (ret == 0 && undone.code) {
        *e = undone;
        return -ESTALE;
    }
    return ret < 0 ? ret : 1;
}

int txn_recover(int dir, const char *staging, struct err *e)
{
    CLEANUP(grip_release) struct grip g;
    char name[NAME_MAX + 1];
    int ret = grip(dir, staging, &g, e);

    if (ret < 0)
        return ret;
    if (is_rest(g.look.dir)) {
        ret = remove_rest(dir, staging, e);
        return ret < 0 ? ret : 1;
    }
    if (!g.look.read ||
        (!has(g.look.dir, STAGED_REDO) && !has(g.look.dir, STAGED_ENDED)))
        return 0;
    TRY(publish_staging_name(g.look.j.target, name, e));
    if (strcmp(name, staging) != 0)
        return err_set(e, EBUSY, "%s: it is not named for %s", staging,
                       g.look.j.target);
    close(steal_fd(&g.lock));
    return go_on(dir, g.look.j.target, e);
}

/* From here on what is in it is a rest, even if it is not removed to the end. */
static int mark_done(int dir, const char *path, struct err *e)
{
    CLEANUP_FD int fd =
        openat(dir, STAGED_DONE, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

    return fd < 0 || fsync(dir) < 0 ? staged_fail(e, "discard what is staged for", path)
                                    : 0;
}

int txn_discard_staged(int dir, const char *staging, struct err *e)
{
    CLEANUP(grip_release) struct grip g;
    int ret = grip(dir, staging, &g, e);

    if (ret < 0)
        return ret;
    if (is_rest(g.look.dir))
        return remove_rest(dir, staging, e);
    if (has(g.look.dir, STAGED_REDO) && (!g.look.read || is_target(&g.look))) {
        err_set(e, EINPROGRESS,
                "%s: a step has begun: files that it replaces are in there", staging);
        return err_hint(e, "end the step first: mount -o rw");
    }
    ret = mark_done(g.look.dir, staging, e);
    return ret == 0 ? staged_remove_dir(dir, staging, e) : ret;
}
