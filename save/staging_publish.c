/* SPDX-License-Identifier: MIT */
/* save/staging_publish.c - one rename, and what is done when the disk will not say it has it. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "save/staging_priv.h"

/*
 * Nothing may be deleted while the disk can have what we deleted under the target's name:
 * a rename whose directory could not be made durable is durable, or is not.
 */
static int make_sure(struct staging *s, struct err *e)
{
    if (s->kept)
        return err_set(e, EBUSY, "%s/%s has what others changed", s->parent, s->path);
    if (s->unsure_fd < 0)
        return 0;
    if (fsync(s->unsure_fd) < 0)
        return staging_fail(e, "fsync the directory of", s->target);
    close(s->unsure_fd);
    s->unsure_fd = -1;
    return 0;
}

int staging_discard(struct staging *s, struct err *e)
{
    return make_sure(s, e) < 0 ? -e->code : staging_remove(s->parent_fd, s->path, e);
}

static int mark_published(struct staging *s, struct err *e)
{
    int fd = openat(s->fd, STAGING_PUBLISHED,
                    O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

    if (fd < 0)
        return staging_fail(e, "make", STAGING_PUBLISHED);
    close(fd);
    return fsync(s->fd) < 0 ? staging_fail(e, "fsync", s->path) : 0;
}

/* One rename of a directory, with what takes it back. */
struct step {
    int from, to;
    const char *old, *new;
    unsigned flags;
};

/*
 * The step is done and must be durable. If the disk will not say so it is taken back, so
 * that what was told to have failed has; what lies on the disk then is one or the other,
 * and neither is deleted before an fsync says which.
 */
static int settle(struct staging *s, const struct step *p, int dir, struct err *e)
{
    if (fsync(dir) == 0)
        return 0;
    staging_fail(e, "fsync the directory of", s->target);
    if (renameat2(p->to, p->new, p->from, p->old, p->flags) < 0)
        err_hint(e, "it is there, but the disk may not have it; all else is in %s/%s",
                 s->parent, s->path);
    if (s->unsure_fd < 0)
        s->unsure_fd = fcntl(dir, F_DUPFD_CLOEXEC, 0);
    return -e->code;
}

int staging_publish(struct staging *s, struct err *e)
{
    const struct step step = {.from = s->fd,
                              .old = STAGING_DATA,
                              .to = s->parent_fd,
                              .new = s->name,
                              .flags = 0};
    struct err ignored = {0};

    if (fsync(s->data_fd) < 0)
        return staging_fail(e, "fsync", s->target);
    if (mark_published(s, e) < 0)
        return -e->code;
    /* Over nothing, or over the empty directory that we saw: never over another's files. */
    if (renameat(s->fd, STAGING_DATA, s->parent_fd, s->name) < 0)
        return staging_fail(e, "publish", s->target);
    if (settle(s, &step, s->parent_fd, e) < 0)
        return -e->code;
    staging_discard(s, &ignored); /* journals; what is left of them harms nobody */
    return 0;
}

int staging_restart(struct staging *s, struct err *e)
{
    if (make_sure(s, e) < 0)
        return -e->code;
    if (s->data_fd >= 0)
        close(s->data_fd);
    s->data_fd = -1;
    memset(s->stage, 0, sizeof s->stage);
    if (staging_remove_tree(s->fd, STAGING_DATA, 0, e) < 0 ||
        staging_make_dir(s->fd, STAGING_DATA, &s->data_fd, e) < 0)
        return -e->code;
    return staging_journal_begin(s, e);
}

/* What stands there is what was seen when the save began, or nothing of worth. */
static int check_replaced(const struct staging *s, int parent, const char *name,
                          const struct stat *replaces, bool *exchange, struct err *e)
{
    struct stat now;

    *exchange = replaces != NULL;
    if (fstatat(parent, name, &now, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno == ENOENT && !replaces)
            return 0;
        return errno == ENOENT ? err_set(e, ESTALE, "%s is gone meanwhile", s->target)
                               : staging_fail(e, "look at", s->target);
    }
    if (!replaces || (replaces->st_dev == now.st_dev && replaces->st_ino == now.st_ino))
        return 0; /* where only an empty one may be, rename(2) sees to it */
    return err_set(e, ESTALE, "%s is another directory by now", s->target);
}

int staging_watch(struct staging *s, int parent, const char *name,
                  const struct witness_filter *storage, struct err *e)
{
    struct witness now;

    if (witness_take(parent, name, NULL, &s->witness, e) < 0 ||
        witness_take(parent, name, storage, &now, e) < 0)
        return err_wrap(e, "%s", s->target);
    s->watched = true;
    if (s->stored.ino && !witness_equal(&now, &s->stored))
        return err_set(e, ESTALE, "%s was changed by others meanwhile", s->target);
    s->stored = now;
    return 0;
}

/* From now on nobody takes the directory for one that may be removed. */
static void keep(struct staging *s)
{
    struct err ignored = {0};

    s->kept = true;
    if (ftruncate(s->journal_fd, 0) == 0)
        staging_journal_append(s, "kept: what others changed while it was saved\n",
                               &ignored);
}

/*
 * What others wrote there while we did is in data/ now, and would be deleted with it: it
 * is better looked at after the exchange than before, since nobody finds it there.
 */
static int check_watched(struct staging *s, const struct step *p, struct err *e)
{
    struct witness now;

    if (!s->watched || !(p->flags & RENAME_EXCHANGE))
        return 0;
    if (witness_take(p->from, p->old, NULL, &now, e) == 0 &&
        witness_equal(&now, &s->witness))
        return 0;
    if (e->code == 0)
        err_set(e, ESTALE, "%s was changed by others meanwhile", s->target);
    if (renameat2(p->to, p->new, p->from, p->old, p->flags) < 0 || fsync(p->to) < 0) {
        err_hint(e, "it is the new one; what they have is in %s/%s", s->parent,
                 s->path);
        keep(s);
    }
    return -e->code;
}

static int rename_error(const struct staging *s, bool exchange, struct err *e)
{
    if (errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR)
        return err_set(e, EEXIST, "publish %s: there is something of that name by now",
                       s->target);
    /* EXDEV: a directory of a lower layer of overlayfs, as in images of containers. */
    if (exchange &&
        (errno == EINVAL || errno == ENOSYS || errno == EBUSY || errno == EXDEV)) {
        err_set(e, EROFS, "publish %s: directories cannot be exchanged there: %s",
                s->target, strerror(errno));
        return err_hint(e, "save under a new name");
    }
    return staging_fail(e, "publish", s->target);
}

/* Who is not root moves a directory to another place only if he may write in it. */
struct loan {
    int fd;
    mode_t mode;
    bool lent;
};

static void lend(struct loan *l)
{
    struct stat st;

    if (l->fd < 0 || fstat(l->fd, &st) < 0 || (st.st_mode & S_IWUSR))
        return;
    l->mode = st.st_mode & 07777;
    l->lent = fchmod(l->fd, l->mode | S_IWUSR) == 0;
}

/* What cannot be set back is a bit more open than it was, and no reason to fail. */
static void give_back(const struct loan *l)
{
    if (l->lent && fchmod(l->fd, l->mode) == 0)
        fsync(l->fd);
}

static int replace(struct staging *s, int parent, const char *name,
                   const struct stat *replaces, struct err *e)
{
    struct step step = {.from = s->fd, .old = STAGING_DATA, .to = parent, .new = name};
    struct err ignored = {0};
    bool exchange;

    if (fsync(s->data_fd) < 0)
        return staging_fail(e, "fsync", s->target);
    if (check_replaced(s, parent, name, replaces, &exchange, e) < 0)
        return -e->code;
    step.flags = exchange ? RENAME_EXCHANGE : 0;
    if (renameat2(s->fd, STAGING_DATA, parent, name, step.flags) < 0)
        return rename_error(s, exchange, e);
    if (settle(s, &step, parent, e) < 0 || check_watched(s, &step, e) < 0)
        return -e->code;
    staging_discard(s, &ignored); /* the old one; what is left of it harms nobody */
    return 0;
}

int staging_replace(struct staging *s, int parent, const char *name,
                    const struct stat *replaces, struct err *e)
{
    CLEANUP_FD int old =
        replaces ? openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW)
                 : -1;
    struct loan loans[] = {{.fd = s->data_fd}, {.fd = old}};
    int ret;

    lend(&loans[0]);
    lend(&loans[1]);
    ret = replace(s, parent, name, replaces, e);
    give_back(&loans[0]);
    give_back(&loans[1]);
    return ret;
}

/* Did it take the place of another file than it was to? Then that one goes back. */
static int check_added(struct staging *s, const struct step *p, uint64_t replaces,
                       struct err *e)
{
    struct stat st;

    if (!replaces || (fstatat(p->from, p->old, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
                      st.st_ino == replaces))
        return 0;
    err_set(e, ESTALE, "%s/%s was changed by others meanwhile", s->target, p->new);
    if (renameat2(p->to, p->new, p->from, p->old, p->flags) < 0) {
        err_hint(e, "it is the new one; theirs is in %s/%s", s->parent, s->path);
        keep(s);
    }
    return -e->code;
}

int staging_add(struct staging *s, int dir, const char *name, uint64_t replaces,
                struct err *e)
{
    const struct step step = {.from = s->data_fd,
                              .old = name,
                              .to = dir,
                              .new = name,
                              .flags = replaces ? RENAME_EXCHANGE : RENAME_NOREPLACE};
    struct err ignored = {0};

    if (fsync(s->data_fd) < 0)
        return staging_fail(e, "fsync", s->target);
    if (renameat2(s->data_fd, name, dir, name, step.flags) < 0)
        return rename_error(s, replaces, e);
    if (check_added(s, &step, replaces, e) < 0 || settle(s, &step, dir, e) < 0)
        return -e->code;
    staging_discard(s, &ignored);
    return 0;
}

int staging_take_away(struct staging *s, int parent, const char *name, struct err *e)
{
    const struct step step = {.from = parent,
                              .old = name,
                              .to = s->fd,
                              .new = STAGING_REMOVED,
                              .flags = RENAME_NOREPLACE};
    struct err ignored = {0};

    if (renameat2(parent, name, s->fd, STAGING_REMOVED, RENAME_NOREPLACE) < 0) {
        if (errno != EXDEV)
            return staging_fail(e, "remove", s->target);
        err_set(e, EROFS, "remove %s: it cannot be moved there: %s", s->target,
                strerror(errno));
        return err_hint(e, "remove it in the source: in a layer of an overlay a "
                           "directory does not go in one step");
    }
    if (settle(s, &step, parent, e) < 0)
        return -e->code;
    staging_discard(s, &ignored);
    return 0;
}
