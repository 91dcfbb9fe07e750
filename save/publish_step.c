/* SPDX-License-Identifier: MIT */
/* save/publish_step.c - runs a step, from its durable journal to its end or back. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/err.h"
#include "save/publish_priv.h"
#include "save/staged.h"

/*
 * What of a step is done is seen from names alone: each rename is one change of the disk, so
 * that a file that left is in old/, and one that arrived is not in data/ any more. (The
 * file that is exchanged has two names of ours: data/PATH, and old/N until it is there.)
 * A power loss may keep some renames and lose others; running it again does the rest.
 */

const struct step_entry *step_exchanged(const struct step *s)
{
    const struct step_entry *only = NULL;
    size_t leaving = 0, arriving = 0, held = 0;

    for (size_t i = 0; i < s->entries; i++) {
        const struct step_entry *n = &s->entry[i];

        held += n->kind == PUBLISH_HOLD;
        arriving += n->kind == PUBLISH_PUT;
        if (n->kind != PUBLISH_HOLD && n->had) {
            leaving++;
            only = n;
        }
    }
    if (leaving != 1 || only->kind != PUBLISH_PUT || (held && arriving > 1))
        return NULL;
    /* What arrives before it means nothing to readers until it is there. */
    for (size_t i = 0; i < s->entries; i++)
        if (&s->entry[i] != only && s->entry[i].kind == PUBLISH_PUT &&
            s->entry[i].stage >= only->stage)
            return NULL;
    return only;
}

bool step_holds(const struct step *s)
{
    size_t renames = 0;

    for (size_t i = 0; i < s->entries; i++)
        if (s->entry[i].kind != PUBLISH_HOLD)
            renames += s->entry[i].kind == PUBLISH_PUT && s->entry[i].had ? 2 : 1;
    return renames > 1 && !step_exchanged(s);
}

void step_old_name(const struct step *s, const struct step_entry *entry, char dst[24])
{
    snprintf(dst, 24, "%zu", (size_t)(entry - s->entry));
}

int step_parent(int top, const char *path, const char **name, struct err *e)
{
    static const struct open_rule rule = {
        .beneath = true, .no_links = true, .flags = O_DIRECTORY};
    const char *slash = strrchr(path, '/');
    char parent[PATH_MAX] = ".";
    int fd;

    *name = slash ? slash + 1 : path;
    if (slash) {
        if ((size_t)(slash - path) >= sizeof parent)
            return err_set(e, ENAMETOOLONG, "%s: %s", path, strerror(ENAMETOOLONG));
        memcpy(parent, path, (size_t)(slash - path));
        parent[slash - path] = '\0';
    }
    fd = open_below(top, parent, &rule);
    return fd < 0 ? err_set(e, -fd, "%s: %s", parent, strerror(-fd)) : fd;
}

/* Where a file is, or is to be. */
struct spot {
    int fd;
    const char *name;
};

static void spot_release(struct spot *p)
{
    if (p->fd >= 0)
        close(p->fd);
}

static int find_spot(int top, const char *path, struct spot *out, struct err *e)
{
    out->fd = step_parent(top, path, &out->name, e);
    return MIN(out->fd, 0);
}

/* 1: there is something; 0: nothing; or an error. */
static int look(int dir, const char *name, struct stat *st, struct err *e)
{
    if (fstatat(dir, name, st, AT_SYMLINK_NOFOLLOW) == 0)
        return 1;
    return errno == ENOENT ? 0 : staged_fail(e, "look at", name);
}

/* The same of a path; a parent that is missing is nothing, too. */
static int look_below(int top, const char *path, struct stat *st, struct err *e)
{
    CLEANUP(spot_release) struct spot p = {.fd = -1};
    struct err none = {0};
    int ret = find_spot(top, path, &p, &none);

    if (ret == -ENOENT)
        return 0;
    if (ret < 0) {
        *e = none;
        return ret;
    }
    return look(p.fd, p.name, st, e);
}

static bool is_same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* A rename over nothing: -EEXIST where there is something. errno is set. */
static int rename_new(const struct spot *from, const struct spot *to)
{
    struct stat st;

    if (renameat2(from->fd, from->name, to->fd, to->name, RENAME_NOREPLACE) == 0)
        return 0;
    if (errno != EINVAL && errno != ENOSYS)
        return -errno;
    if (fstatat(to->fd, to->name, &st, AT_SYMLINK_NOFOLLOW) == 0)
        errno = EEXIST;
    else if (errno == ENOENT && renameat(from->fd, from->name, to->fd, to->name) == 0)
        return 0;
    return -errno;
}

/* ---- what others did meanwhile ---- */

static int changed(const struct step *s, const struct step_entry *n, struct err *e)
{
    err_set(e, ESTALE, "%s/%s was changed by another writer", s->at->path, n->path);
    return err_hint(e,
                    "both are kept: theirs in its place, this one staged; remove one");
}

/* A rename moves the time of change of an inode, so that it does not count here. */
static int check_seen(const struct step *s, const struct step_entry *n,
                      const struct spot *p, struct err *e)
{
    struct stat st;
    struct file_id id;
    int ret = look(p->fd, p->name, &st, e);

    if (ret < 0)
        return ret;
    id = file_id_of(&st);
    return ret == 1 && id.ino == n->old.ino && id.size == n->old.size &&
                   id.mtime_ns == n->old.mtime_ns
               ? 0
               : changed(s, n, e);
}

/* ---- one file ---- */

/* Has all of it been done? Of a file that is held: no. */
static int is_done(const struct step *s, const struct step_entry *n, struct err *e)
{
    struct stat st;
    int there = n->kind == PUBLISH_PUT ? look_below(s->data, n->path, &st, e)
                                       : look_below(s->target, n->path, &st, e);

    return there < 0 ? there : !there && n->kind != PUBLISH_HOLD;
}

static int leave(struct step *s, const struct step_entry *n, struct err *e)
{
    CLEANUP(spot_release) struct spot from = {.fd = -1};
    char name[24];
    const struct spot to = {s->old, name};
    struct stat st;
    int ret = is_done(s, n, e);

    if (ret != 0)
        return MIN(ret, 0);
    step_old_name(s, n, name);
    ret = look(s->old, name, &st, e);
    if (ret != 0)
        return MIN(ret, 0);
    ret = find_spot(s->target, n->path, &from, e);
    if (ret == 0)
        ret = check_seen(s, n, &from, e);
    if (ret < 0)
        return ret;
    if (rename_new(&from, &to) < 0)
        return errno == ENOENT ? changed(s, n, e) : staged_fail(e, "replace", n->path);
    return check_seen(s, n, &to, e);
}

/* From data/, or what is held from old/. */
static int arrive(struct step *s, const struct step_entry *n, struct err *e)
{
    CLEANUP(spot_release) struct spot to = {.fd = -1};
    CLEANUP(spot_release) struct spot data = {.fd = -1};
    char name[24];
    struct spot from = {s->old, name};
    struct stat st;
    int ret;

    step_old_name(s, n, name);
    if (n->kind == PUBLISH_PUT) {
        ret = is_done(s, n, e);
        if (ret != 0)
            return MIN(ret, 0);
        TRY(find_spot(s->data, n->path, &data, e));
        from = data;
    }
    ret = look(from.fd, from.name, &st, e);
    if (ret <= 0)
        return ret;
    TRY(find_spot(s->target, n->path, &to, e));
    ret = rename_new(&from, &to);
    if (ret == -EEXIST)
        return changed(s, n, e);
    return ret < 0 ? staged_fail(e, "publish", n->path) : 0;
}

/* Is the new file under its name already? 1, 0, or an error. */
static int is_exchanged(const struct step *s, const struct step_entry *n, struct err *e)
{
    struct stat new, there;
    int ret = look_below(s->data, n->path, &new, e);

    if (ret <= 0)
        return ret < 0 ? ret : 1; /* it was renamed over the old one */
    ret = look_below(s->target, n->path, &there, e);
    return ret <= 0 ? ret : is_same(&new, &there);
}

/* Where files cannot be exchanged, one takes the other's name. */
static int rename_over(const struct step *s, const struct step_entry *n,
                       const struct spot *to, struct err *e)
{
    CLEANUP(spot_release) struct spot from = {.fd = -1};

    TRY(find_spot(s->data, n->path, &from, e));
    if (renameat(from.fd, from.name, to->fd, to->name) < 0)
        return staged_fail(e, "publish", n->path);
    return 0;
}

/* See publish.c: old/N is a second name of the new file, where the disk has such. */
static int exchange(struct step *s, const struct step_entry *n, struct err *e)
{
    CLEANUP(spot_release) struct spot to = {.fd = -1};
    char name[24];
    const struct spot old = {s->old, name};
    struct stat st;
    int ret = is_exchanged(s, n, e);

    if (ret != 0)
        return MIN(ret, 0);
    step_old_name(s, n, name);
    ret = find_spot(s->target, n->path, &to, e);
    if (ret == 0)
        ret = check_seen(s, n, &to, e);
    if (ret == 0)
        ret = look(s->old, name, &st, e);
    if (ret <= 0)
        return ret < 0 ? ret : rename_over(s, n, &to, e);
    if (renameat2(old.fd, old.name, to.fd, to.name, RENAME_EXCHANGE) == 0)
        return check_seen(s, n, &old, e);
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP)
        return rename_over(s, n, &to, e);
    return errno == ENOENT ? changed(s, n, e) : staged_fail(e, "publish", n->path);
}

/* ---- durable ---- */

static int sync_fd(struct step *s, int fd, const char *name, struct err *e)
{
    if (fsync(fd) == 0)
        return 0;
    s->unsynced = true;
    return staged_fail(e, "fsync", name);
}

/* The directory of a file; one that is gone needs no more. */
static int sync_parent(struct step *s, const char *path, struct err *e)
{
    struct err none = {0};
    const char *name;
    CLEANUP_FD int fd = step_parent(s->target, path, &name, &none);

    if (fd == -ENOENT)
        return 0;
    if (fd < 0) {
        *e = none;
        s->unsynced = true;
        return fd;
    }
    return sync_fd(s, fd, path, e);
}

static bool same_parent(const char *a, const char *b)
{
    const char *x = strrchr(a, '/'), *y = strrchr(b, '/');

    return (!x && !y) ||
           (x && y && x - a == y - b && strncmp(a, b, (size_t)(x - a)) == 0);
}

/* Directories of entries [from, to), which are sorted by stage and path. */
static int sync_parents(struct step *s, size_t from, size_t to, struct err *e)
{
    int ret = 0;

    for (size_t i = from; ret == 0 && i < to; i++)
        if (i == from || !same_parent(s->entry[i - 1].path, s->entry[i].path))
            ret = sync_parent(s, s->entry[i].path, e);
    return ret;
}

/* ---- directories ---- */

static int make_dir(struct step *s, const struct step_dir *d, struct err *e)
{
    CLEANUP(spot_release) struct spot p = {.fd = -1};
    CLEANUP_FD int made = -1;
    struct stat st;

    TRY(find_spot(s->target, d->path, &p, e));
    if (mkdirat(p.fd, p.name, 0700) < 0 && errno != EEXIST)
        return staged_fail(e, "make", d->path);
    made = openat(p.fd, p.name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (made < 0 || fstat(made, &st) < 0)
        return staged_fail(e, "make", d->path);
    /* Who may not give it away keeps it, as with mkdir(1). */
    if ((st.st_uid != d->uid || st.st_gid != d->gid) &&
        fchown(made, d->uid, d->gid) < 0 && errno != EPERM)
        return staged_fail(e, "chown", d->path);
    if (fchmod(made, d->mode) < 0)
        return staged_fail(e, "chmod", d->path);
    return sync_fd(s, p.fd, d->path, e);
}

static int make_dirs_of(struct step *s, struct err *e)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < s->dirs; i++)
        if (!s->dir[i].there)
            ret = make_dir(s, &s->dir[i], e);
    return ret;
}

static bool is_needed(const struct step *s, const char *path)
{
    for (size_t i = 0; i < s->dirs; i++)
        if (strcmp(s->dir[i].path, path) == 0)
            return true;
    return false;
}

/* Directories above a file that went, as far as they are empty. */
static void remove_empty(const struct step *s, const char *path)
{
    char above[PATH_MAX];
    struct err none = {0};
    char *slash;

    snprintf(above, sizeof above, "%s", path);
    while ((slash = strrchr(above, '/'))) {
        CLEANUP(spot_release) struct spot p = {.fd = -1};

        *slash = '\0';
        if (is_needed(s, above) || find_spot(s->target, above, &p, &none) < 0 ||
            unlinkat(p.fd, p.name, AT_REMOVEDIR) < 0)
            return;
        (void)!fsync(p.fd); /* an empty one that comes back is no harm */
    }
}

/* ---- all of them ---- */

/* Is there anything but files that are held? 1, 0, or an error. */
static int is_left(const struct step *s, struct err *e)
{
    for (size_t i = 0; i < s->entries; i++) {
        int done = s->entry[i].kind == PUBLISH_HOLD ? 1 : is_done(s, &s->entry[i], e);

        if (done <= 0)
            return done < 0 ? done : 1;
    }
    return 0;
}

static int all_leave(struct step *s, struct err *e)
{
    const struct step_entry *exchanged = step_exchanged(s);
    bool holds = step_holds(s);
    int ret = is_left(s, e);

    if (ret <= 0)
        return ret;
    ret = 0;
    for (size_t i = s->entries; ret == 0 && i-- > 0;) {
        const struct step_entry *n = &s->entry[i];

        if (n->had && n != exchanged && (n->kind != PUBLISH_HOLD || holds))
            ret = leave(s, n, e);
    }
    if (ret == 0)
        ret = sync_fd(s, s->old, STAGED_OLD, e);
    return ret == 0 ? sync_parents(s, 0, s->entries, e) : ret;
}

static int stage_arrives(struct step *s, size_t from, size_t to, struct err *e)
{
    const struct step_entry *exchanged = step_exchanged(s);
    int ret = 0;

    for (size_t i = from; ret == 0 && i < to; i++)
        if (s->entry[i].kind != PUBLISH_REMOVE)
            ret = &s->entry[i] == exchanged ? exchange(s, &s->entry[i], e)
                                            : arrive(s, &s->entry[i], e);
    return ret == 0 ? sync_parents(s, from, to, e) : ret;
}

static int all_arrive(struct step *s, struct err *e)
{
    int ret = 0;

    for (size_t i = 0, end; ret == 0 && i < s->entries; i = end) {
        for (end = i; end < s->entries && s->entry[end].stage == s->entry[i].stage;)
            end++;
        ret = stage_arrives(s, i, end, e);
    }
    return ret;
}

int step_forward(struct step *s, struct err *e)
{
    int ret = make_dirs_of(s, e);

    if (ret == 0)
        ret = all_leave(s, e);
    if (ret == 0)
        ret = all_arrive(s, e);
    if (ret < 0)
        return ret;
    for (size_t i = 0; i < s->entries; i++)
        if (s->entry[i].kind == PUBLISH_REMOVE &&
            (i + 1 == s->entries || s->entry[i + 1].kind != PUBLISH_REMOVE ||
             !same_parent(s->entry[i].path, s->entry[i + 1].path)))
            remove_empty(s, s->entry[i].path);
    /* Without its journal what is left is a rest: nothing of it may go before. */
    if (renameat(s->staging, STAGED_REDO, s->staging,
                 s->note ? STAGED_ENDED : STAGED_DONE) < 0)
        return staged_fail(e, "end the step into", s->at->path);
    return sync_fd(s, s->staging, s->staging_name, e);
}

/* ---- back ---- */

/* A new file goes back, if it is the one that has its name. */
static int take_back(struct step *s, const struct step_entry *n, struct err *e)
{
    CLEANUP(spot_release) struct spot from = {.fd = -1};
    CLEANUP(spot_release) struct spot to = {.fd = -1};
    struct stat st;
    int ret = look_below(s->data, n->path, &st, e);

    if (ret != 0)
        return MIN(ret, 0);
    ret = look_below(s->target, n->path, &st, e);
    if (ret <= 0 || st.st_ino != n->ino)
        return MIN(ret, 0);
    ret = find_spot(s->target, n->path, &from, e);
    if (ret == 0)
        ret = find_spot(s->data, n->path, &to, e);
    if (ret == 0 && rename_new(&from, &to) < 0)
        ret = staged_fail(e, "take back", n->path);
    return ret;
}

/* What others have put in its place meanwhile stays: they would have replaced it. */
static int give_back(struct step *s, const struct step_entry *n, struct err *e)
{
    CLEANUP(spot_release) struct spot to = {.fd = -1};
    char name[24];
    const struct spot from = {s->old, name};
    struct stat st;
    int ret;

    step_old_name(s, n, name);
    ret = look(s->old, name, &st, e);
    if (ret <= 0)
        return ret;
    ret = find_spot(s->target, n->path, &to, e);
    if (ret == 0 && rename_new(&from, &to) < 0 && errno != EEXIST)
        ret = staged_fail(e, "give back", n->path);
    return ret;
}

/* One that is back already leaves once more; not if it is another one by now. */
static int hold_again(struct step *s, const struct step_entry *n, struct err *e)
{
    int ret = leave(s, n, e);

    return ret == -ESTALE ? 0 : ret;
}

static int exchange_back(struct step *s, const struct step_entry *n, struct err *e)
{
    CLEANUP(spot_release) struct spot to = {.fd = -1};
    char name[24];
    struct stat st;
    int ret = look_below(s->data, n->path, &st, e);

    if (ret <= 0) /* it was renamed over the old one: nothing can fail after that */
        return ret;
    ret = is_exchanged(s, n, e);
    if (ret <= 0)
        return ret;
    step_old_name(s, n, name);
    ret = find_spot(s->target, n->path, &to, e);
    if (ret == 0 && renameat2(s->old, name, to.fd, to.name, RENAME_EXCHANGE) < 0)
        ret = staged_fail(e, "take back", n->path);
    return ret;
}

/* New files leave, highest stage first; old ones come back, lowest first. */
static int all_back(struct step *s, struct err *e)
{
    const struct step_entry *exchanged = step_exchanged(s);
    bool holds = step_holds(s);
    int ret = 0;

    for (size_t i = 0; ret == 0 && holds && i < s->entries; i++)
        if (s->entry[i].kind == PUBLISH_HOLD)
            ret = hold_again(s, &s->entry[i], e);
    for (size_t i = s->entries; ret == 0 && i-- > 0;)
        if (s->entry[i].kind == PUBLISH_PUT)
            ret = &s->entry[i] == exchanged ? exchange_back(s, exchanged, e)
                                            : take_back(s, &s->entry[i], e);
    for (size_t i = 0; ret == 0 && i < s->entries; i++)
        if (s->entry[i].had && &s->entry[i] != exchanged)
            ret = give_back(s, &s->entry[i], e);
    return ret;
}

int step_undo(struct step *s, struct err *e)
{
    CLEANUP(spot_release) struct spot p = {.fd = -1};
    struct err none = {0};
    int ret = all_back(s, e);

    for (size_t i = s->dirs; ret == 0 && i-- > 0;)
        if (!s->dir[i].there && find_spot(s->target, s->dir[i].path, &p, &none) == 0) {
            unlinkat(p.fd, p.name, AT_REMOVEDIR);
            close(steal_fd(&p.fd));
        }
    if (ret == 0)
        ret = sync_parents(s, 0, s->entries, e);
    if (ret == 0)
        ret = sync_fd(s, s->old, STAGED_OLD, e);
    if (ret == 0 && unlinkat(s->staging, STAGED_REDO, 0) < 0)
        ret = staged_fail(e, "undo the step into", s->at->path);
    return ret == 0 ? sync_fd(s, s->staging, s->staging_name, e) : ret;
}
