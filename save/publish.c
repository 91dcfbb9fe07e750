/* SPDX-License-Identifier: MIT */
/* save/publish.c - checks what is staged against the target, makes it durable, and begins the step. */
#include "save/publish.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "base/buf.h"
#include "base/err.h"
#include "save/publish_priv.h"
#include "save/staged.h"

enum {
    HASH_BYTES = 1 + 16, /* '~' and the digits behind a name that was cut */
    MAX_STAGE = 255,     /* of a file */
    MANY_FILES = 4096,   /* from here on one syncfs costs less than an fsync per file */
};

static const char staging_prefix[] = ".unshard-staging-";
static const char redo_new[] = "new-" STAGED_REDO;

/* ---- names ---- */

int publish_staging_name(const char *name, char dst[NAME_MAX + 1], struct err *e)
{
    size_t len = strlen(name), room = NAME_MAX - (sizeof staging_prefix - 1);

    if (len > NAME_MAX)
        return err_set(e, ENAMETOOLONG, "%s: the name is too long", name);
    if (!len || strchr(name, '/') || strcmp(name, "..") == 0)
        return err_set(e, EINVAL, "\"%s\" is not the name of a directory", name);
    if (len <= room)
        snprintf(dst, NAME_MAX + 1, "%s%s", staging_prefix, name);
    else
        snprintf(dst, NAME_MAX + 1, "%s%.*s~%016" PRIx64, staging_prefix,
                 (int)(room - HASH_BYTES), name, (uint64_t)XXH3_64bits(name, len));
    return 0;
}

bool publish_is_staging(const char *name)
{
    return strncmp(name, staging_prefix, sizeof staging_prefix - 1) == 0;
}

bool publish_path_is_safe(const char *path)
{
    if (strlen(path) >= PATH_MAX)
        return false;
    for (const char *part = path;; part++) {
        size_t len = strcspn(part, "/");

        if (len == 0 || len > NAME_MAX || publish_is_staging(part) ||
            (part[0] == '.' && (len == 1 || (len == 2 && part[1] == '.'))))
            return false;
        part += len;
        if (!*part)
            return true;
    }
}

/* ---- what is there ---- */

static int stat_below(int dir, const char *path, struct stat *out, struct err *e)
{
    struct err none = {0};
    const char *name;
    CLEANUP_FD int parent = step_parent(dir, path, &name, &none);

    *out = (struct stat){0};
    if (parent == -ENOENT || parent == -ENOTDIR)
        return 0;
    if (parent < 0) {
        *e = none;
        return parent;
    }
    if (fstatat(parent, name, out, AT_SYMLINK_NOFOLLOW) == 0)
        return 0;
    *out = (struct stat){0};
    return errno == ENOENT ? 0 : staged_fail(e, "look at", path);
}

int publish_identity(int dir, const char *path, struct file_id *out, struct err *e)
{
    struct stat st;
    int ret = stat_below(dir, path, &st, e);

    *out = ret == 0 && st.st_ino ? file_id_of(&st) : (struct file_id){0};
    return ret;
}

static int changed(const struct publish_spec *spec, const char *path, struct err *e)
{
    err_set(e, ESTALE, "%s/%s was changed by another writer", spec->at.path, path);
    return err_hint(e,
                    "both are kept: theirs in its place, this one staged; remove one");
}

/* Numbers of devices may be others after a boot; the file has to be on the target's anyway. */
bool publish_is_seen(const struct file_id *seen, const struct file_id *now)
{
    return now->ino == seen->ino &&
           (!now->ino || (now->size == seen->size && now->mtime_ns == seen->mtime_ns &&
                          (!seen->ctime_ns || now->ctime_ns == seen->ctime_ns)));
}

static int check_target(const struct step *s, const struct publish_spec *spec,
                        const struct publish_file *f, struct err *e)
{
    struct file_id id = {0};
    struct stat now;

    TRY(stat_below(s->target, f->path, &now, e));
    if (now.st_ino)
        id = file_id_of(&now);
    if (!publish_is_seen(&f->seen, &id))
        return changed(spec, f->path, e);
    if (f->seen.ino && !S_ISREG(now.st_mode) && !S_ISLNK(now.st_mode))
        return err_set(e, EISDIR, "%s/%s is not a file", spec->at.path, f->path);
    if (f->kind != PUBLISH_PUT && !f->seen.ino)
        return err_set(e, EINVAL, "%s: a file that is not there cannot be removed",
                       f->path);
    return 0;
}

/* ---- new files ---- */

/* Its owner and mode, ACL and other attributes are those of the file that it replaces. */
static int become(int fd, const struct stat *st, int old, const char *path,
                  struct err *e)
{
    struct stat was;
    int ret;

    if (fstat(old, &was) < 0)
        return staged_fail(e, "look at", path);
    if ((st->st_uid != was.st_uid || st->st_gid != was.st_gid) &&
        fchown(fd, was.st_uid, was.st_gid) < 0) {
        staged_fail(e, "keep the owner of", path);
        return err_hint(e, "only its owner or root can replace it");
    }
    if (fchmod(fd, was.st_mode & 07777) < 0)
        return staged_fail(e, "keep the mode of", path);
    ret = copy_xattrs(old, fd, e);
    return ret < 0 ? err_wrap(e, "%s", path) : 0;
}

static int become_old(const struct step *s, const struct publish_file *f, int fd,
                      const struct stat *st, struct err *e)
{
    const char *name;
    CLEANUP_FD int dir = step_parent(s->target, f->path, &name, e);
    CLEANUP_FD int old = -1;

    if (dir < 0)
        return dir;
    old = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (old < 0 && errno == ELOOP) /* a link: its attributes are no one's */
        return 1;
    return old < 0 ? staged_fail(e, "read the attributes of", f->path)
                   : become(fd, st, old, f->path, e);
}

/* In a directory that hands its group down the file gets that. */
static gid_t group_for(const struct step *s, const struct publish_file *f)
{
    struct err none = {0};
    const char *name;
    CLEANUP_FD int dir = step_parent(s->target, f->path, &name, &none);
    struct stat st;

    if (dir < 0 && fstat(s->target, &st) == 0 && (st.st_mode & S_ISGID))
        return st.st_gid; /* its directory is made with the target's mode */
    if (dir >= 0 && fstat(dir, &st) == 0 && (st.st_mode & S_ISGID))
        return st.st_gid;
    return f->gid;
}

/* Who may not give a file away keeps it. */
static int become_new(const struct step *s, const struct publish_file *f, int fd,
                      const struct stat *st, struct err *e)
{
    gid_t gid = group_for(s, f);

    if ((st->st_uid != f->uid || st->st_gid != gid) && fchown(fd, f->uid, gid) < 0 &&
        errno != EPERM)
        return staged_fail(e, "chown", f->path);
    return fchmod(fd, f->mode & 07777) < 0 ? staged_fail(e, "chmod", f->path) : 0;
}

static int dress(const struct step *s, const struct publish_file *f, int fd,
                 const struct stat *st, struct err *e)
{
    int ret = f->seen.ino ? become_old(s, f, fd, st, e) : 1;

    return ret == 1 ? become_new(s, f, fd, st, e) : ret;
}

static int check_device(const struct step *s, const char *path, struct err *e)
{
    struct err none = {0};
    const char *name;
    CLEANUP_FD int dir = step_parent(s->target, path, &name, &none);
    struct stat a, b;

    if (dir < 0 || fstat(dir, &a) < 0 || fstat(s->staging, &b) < 0 ||
        a.st_dev == b.st_dev)
        return 0;
    err_set(e, EXDEV, "%s/%s is on another file system", s->at->path, path);
    return err_hint(e, "nothing can be moved there in one step");
}

/* A staged file gets its attributes and is durable; *n learns who it is. */
static int prepare(const struct step *s, const struct publish_file *f, bool sync,
                   struct step_entry *n, struct err *e)
{
    const char *name;
    CLEANUP_FD int dir = step_parent(s->data, f->path, &name, e);
    CLEANUP_FD int fd = -1;
    struct stat st;

    if (dir < 0)
        return err_wrap(e, "staged");
    fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0)
        return staged_fail(e, "open staged", f->path);
    if (!S_ISREG(st.st_mode))
        return err_set(e, EINVAL, "staged %s is not a file", f->path);
    n->ino = st.st_ino;
    n->size = (uint64_t)st.st_size;
    TRY(dress(s, f, fd, &st, e));
    return sync && fsync(fd) < 0 ? staged_fail(e, "fsync staged", f->path) : 0;
}

static int prepare_all(struct step *s, const struct publish_spec *spec, struct err *e)
{
    bool many = spec->files >= MANY_FILES;
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < spec->files; i++) {
        const struct publish_file *f = &spec->file[i];
        struct step_entry n = {.kind = f->kind,
                               .stage = f->stage,
                               .had = f->seen.ino != 0,
                               .old = f->seen};

        if (f->stage > MAX_STAGE || !publish_path_is_safe(f->path))
            return err_set(e, EINVAL, "%s: not a path of a checkpoint", f->path);
        ret = check_target(s, spec, f, e);
        if (ret == 0)
            ret = check_device(s, f->path, e);
        if (ret == 0 && f->kind == PUBLISH_PUT)
            ret = prepare(s, f, !many, &n, e);
        if (ret == 0) {
            n.path = strdup(f->path);
            ret = step_add(s, &n, e);
        }
    }
    if (ret == 0 && many && syncfs(s->staging) < 0)
        ret = staged_fail(e, "syncfs", s->staging_name);
    return ret;
}

/* Files that are held in a step that needs it not stay out of it. */
static void drop_held(struct step *s)
{
    bool holds = step_holds(s);
    size_t kept = 0;

    for (size_t i = 0; i < s->entries; i++)
        if (s->entry[i].kind == PUBLISH_HOLD && !holds)
            free(s->entry[i].path);
        else
            s->entry[kept++] = s->entry[i];
    s->entries = kept;
}

/* ---- directories ---- */

static int add_dir(struct step *s, const struct publish_spec *spec, const char *path,
                   size_t len, bool needed, struct err *e)
{
    struct step_dir d = {
        .path = strndup(path, len), .uid = spec->uid, .gid = spec->gid};
    struct stat st, top;
    int ret;

    if (!d.path)
        return err_nomem(e);
    ret = stat_below(s->target, d.path, &st, e);
    if (ret == 0 && fstat(s->target, &top) < 0)
        ret = staged_fail(e, "look at", s->at->path);
    if (ret == 0 && st.st_ino && !S_ISDIR(st.st_mode))
        ret = err_set(e, ENOTDIR, "%s/%s is not a directory", s->at->path, d.path);
    d.there = st.st_ino != 0;
    if (ret < 0 || (d.there && !needed)) {
        free(d.path);
        return ret;
    }
    d.mode = top.st_mode & 07777;
    if (top.st_mode & S_ISGID)
        d.gid = top.st_gid;
    return step_add_dir(s, &d, e);
}

/* Those above `path` that are missing, and where `whole` that itself. */
static int add_dirs(struct step *s, const struct publish_spec *spec, const char *path,
                    bool whole, struct err *e)
{
    int ret = 0;

    for (const char *slash = strchr(path, '/'); ret == 0 && slash;
         slash = strchr(slash + 1, '/'))
        ret = add_dir(s, spec, path, (size_t)(slash - path), false, e);
    return ret == 0 && whole ? add_dir(s, spec, path, strlen(path), true, e) : ret;
}

static bool in_same_directory(const char *a, const char *b)
{
    const char *slash = strrchr(a, '/');
    size_t len = slash ? (size_t)(slash - a) + 1 : 0;

    return strncmp(a, b, len) == 0 && !strchr(b + len, '/');
}

static int list_dirs(struct step *s, const struct publish_spec *spec, struct err *e)
{
    const char *before = NULL;
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < s->entries; i++)
        if (s->entry[i].kind == PUBLISH_PUT) {
            if (!before || !in_same_directory(before, s->entry[i].path))
                ret = add_dirs(s, spec, s->entry[i].path, false, e);
            before = s->entry[i].path;
        }
    for (size_t i = 0; ret == 0 && i < spec->directories; i++)
        ret = publish_path_is_safe(spec->directory[i])
                  ? add_dirs(s, spec, spec->directory[i], true, e)
                  : err_set(e, EINVAL, "%s: not a path of a checkpoint",
                            spec->directory[i]);
    return ret;
}

/* ---- durable before it begins ---- */

static int sync_dir(int at, const char *path, struct err *e)
{
    CLEANUP_FD int fd =
        openat(at, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    return fd < 0 || fsync(fd) < 0 ? staged_fail(e, "fsync", path) : 0;
}

/* Directories of data/ above a file. */
static int sync_above(const struct step *s, const char *path, struct err *e)
{
    char above[PATH_MAX];
    char *slash;
    int ret = 0;

    snprintf(above, sizeof above, "%s", path);
    while (ret == 0 && (slash = strrchr(above, '/'))) {
        *slash = '\0';
        ret = sync_dir(s->data, above, e);
    }
    return ret;
}

static int sync_staged(const struct step *s, struct err *e)
{
    const char *before = NULL;
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < s->entries; i++)
        if (s->entry[i].kind == PUBLISH_PUT) {
            if (!before || !in_same_directory(before, s->entry[i].path))
                ret = sync_above(s, s->entry[i].path, e);
            before = s->entry[i].path;
        }
    if (ret == 0 && (fsync(s->data) < 0 || fsync(s->old) < 0))
        ret = staged_fail(e, "fsync", s->staging_name);
    return ret == 0 ? sync_dir(s->at->dir, ".", e) : ret;
}

/*
 * Before it is exchanged, a new file has a second name in old/: what is under its path is then
 * seen to be it or not, whatever the disk does. A disk without links renames it over the old
 * one, which cannot be told apart from a change by others in that moment.
 */
static int link_exchanged(const struct step *s, struct err *e)
{
    const struct step_entry *n = step_exchanged(s);
    const char *name;
    char old[24];

    if (n) {
        CLEANUP_FD int dir = step_parent(s->data, n->path, &name, e);

        if (dir < 0)
            return dir;
        step_old_name(s, n, old);
        (void)!linkat(dir, name, s->old, old, 0);
    }
    return 0;
}

static int write_redo(const struct step *s, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {.max = STEP_TEXT_MAX};
    CLEANUP_FD int fd = -1;
    int ret = step_text(s, &text, e);

    if (ret < 0)
        return ret;
    fd = openat(s->staging, redo_new,
                O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return staged_fail(e, "make the journal of the step into", s->at->path);
    ret = write_all(fd, text.data, text.len, e);
    if (ret < 0)
        return err_wrap(e, "the journal of the step into %s", s->at->path);
    if (fsync(fd) < 0 || fsync(s->staging) < 0 ||
        renameat(s->staging, redo_new, s->staging, STAGED_REDO) < 0)
        return staged_fail(e, "write the journal of the step into", s->at->path);
    if (fsync(s->staging) == 0)
        return 0;
    /* If the disk has it all the same, it speaks of files that are all there. */
    ret = staged_fail(e, "write the journal of the step into", s->at->path);
    if (unlinkat(s->staging, STAGED_REDO, 0) == 0)
        (void)!fsync(s->staging);
    return ret;
}

/* ---- the step ---- */

static int open_step(struct step *s, const struct publish_place *at, struct err *e)
{
    struct stat st;

    s->at = at;
    s->target =
        openat(at->dir, at->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (s->target < 0 || fstat(s->target, &st) < 0)
        return staged_fail(e, "open", at->path);
    if (s->target_ino && s->target_ino != st.st_ino) {
        err_set(e, EBUSY,
                "%s is another directory than the one that the step into it "
                "has begun to change",
                at->path);
        return err_hint(e, "give that one its name back");
    }
    s->target_ino = st.st_ino;
    s->data = openat(s->staging, STAGED_DATA,
                     O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (s->data < 0)
        return staged_fail(e, "open staged", STAGED_DATA);
    if (mkdirat(s->staging, STAGED_OLD, 0700) < 0 && errno != EEXIST)
        return staged_fail(e, "make", STAGED_OLD);
    return staged_make_dir(s->staging, STAGED_OLD, &s->old, e);
}

static int open_staging(struct step *s, const struct publish_place *at, struct err *e)
{
    TRY(publish_staging_name(at->name, s->staging_name, e));
    s->staging = openat(at->dir, s->staging_name,
                        O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return s->staging < 0 ? staged_fail(e, "open", s->staging_name) : 0;
}

static int build(struct step *s, const struct publish_spec *spec, struct err *e)
{
    int ret = open_staging(s, &spec->at, e);

    if (ret == 0) /* an attempt that failed before it began */
        ret = staged_remove_tree(s->staging, STAGED_OLD, 0, e);
    if (ret == 0)
        ret = open_step(s, &spec->at, e);
    if (ret == 0)
        ret = prepare_all(s, spec, e);
    if (ret == 0)
        ret = step_sort(s, e);
    if (ret < 0)
        return ret;
    drop_held(s);
    s->note = spec->note ? strdup(spec->note) : NULL;
    if (spec->note && !s->note)
        return err_nomem(e);
    ret = list_dirs(s, spec, e);
    if (ret == 0)
        ret = step_sort(s, e);
    if (ret == 0)
        ret = link_exchanged(s, e);
    if (ret == 0)
        ret = sync_staged(s, e);
    return ret == 0 ? write_redo(s, e) : ret;
}

static int in_progress(const struct step *s, struct err *e)
{
    struct err why = *e;

    err_set(e, EINPROGRESS, "the step into %s has begun and could not be ended: %s",
            s->at->path, why.text);
    return err_hint(e, "nothing of it is deleted: the next write there, mount -o rw or "
                       "`unshard doctor --discard` goes on with it");
}

/* A rest of it harms nobody. */
static void finish(const struct step *s)
{
    struct err ignored = {0};

    if (!s->note)
        staged_remove_dir(s->at->dir, s->staging_name, &ignored);
}

static int run(struct step *s, bool *undone, struct err *e)
{
    struct err undo = {0};
    int ret = step_forward(s, e);

    if (ret == 0) {
        finish(s);
        return 0;
    }
    if (s->unsynced || step_undo(s, &undo) < 0)
        return in_progress(s, e);
    *undone = true;
    return ret;
}

/* ---- a whole new directory ---- */

static int mark_published(const struct step *s, struct err *e)
{
    CLEANUP_FD int fd = openat(s->staging, STAGED_PUBLISHED,
                               O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

    if (fd < 0)
        return staged_fail(e, "make", STAGED_PUBLISHED);
    return fsync(s->staging) < 0 ? staged_fail(e, "fsync", s->staging_name) : 0;
}

/*
 * If the disk will not say that it has the new name it is taken back, so that what was
 * reported to have failed has.
 */
static int settle(const struct step *s, struct err *e)
{
    const struct publish_place *at = s->at;

    int ret = sync_dir(at->dir, ".", e);

    if (ret == 0)
        return 0;
    err_wrap(e, "publish %s", at->path);
    if (renameat2(at->dir, at->name, s->staging, STAGED_DATA, RENAME_NOREPLACE) < 0)
        err_hint(e, "it is there, but the disk may not have it");
    return ret;
}

static int rename_whole(const struct step *s, struct err *e)
{
    const struct publish_place *at = s->at;

    /* Over nothing, or over an empty directory: rename(2) sees to it. */
    if (renameat(s->staging, STAGED_DATA, at->dir, at->name) == 0)
        return settle(s, e);
    if (errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR)
        return err_set(e, EEXIST, "publish %s: there is something of that name by now",
                       at->path);
    return staged_fail(e, "publish", at->path);
}

int publish_new(const struct publish_place *at, struct err *e)
{
    CLEANUP(step_release) struct step s;
    int ret;

    step_init(&s);
    s.at = at;
    ret = open_staging(&s, at, e);
    if (ret == 0)
        ret = sync_dir(s.staging, STAGED_DATA, e);
    if (ret == 0)
        ret = mark_published(&s, e);
    if (ret == 0)
        ret = rename_whole(&s, e);
    if (ret == 0)
        finish(&s);
    return ret;
}

/* ---- after a crash ---- */

static bool has(const struct step *s, const char *name)
{
    return faccessat(s->staging, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

/*
 * A journal that could not be made durable nor removed may speak of files that were
 * written again since: then it is not followed.
 */
static int check_staged(const struct step *s, struct err *e)
{
    for (size_t i = 0; i < s->entries; i++) {
        const struct step_entry *n = &s->entry[i];
        struct stat st = {0}, there = {0};
        int ret = n->kind == PUBLISH_PUT ? stat_below(s->data, n->path, &st, e) : 0;

        if (ret == 0 && st.st_ino)
            ret = stat_below(s->target, n->path, &there, e);
        if (ret < 0)
            return ret;
        if (st.st_ino && st.st_ino != there.st_ino &&
            (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != n->size))
            return err_set(e, EBADMSG, "staged %s is not what the step speaks of",
                           n->path);
    }
    return 0;
}

static int roll_forward(struct step *s, struct err *e)
{
    struct err undo = {0};
    int ret = step_load(s, s->staging, STAGED_REDO, e);

    if (ret == 0)
        ret = open_step(s, s->at, e);
    if (ret == 0)
        ret = check_staged(s, e);
    if (ret < 0)
        return err_wrap(e, "go on with the step into %s", s->at->path);
    ret = step_forward(s, e);
    if (ret == 0) {
        finish(s);
        return 1;
    }
    if (ret == -ESTALE && !s->unsynced && step_undo(s, &undo) == 0)
        return -ESTALE;
    return in_progress(s, e);
}

/* What is left when all was done goes, once the disk has what was done. */
static int clear_rest(struct step *s, struct err *e)
{
    int ret = sync_dir(s->at->dir, s->staging_name, e);

    if (ret == 0)
        ret = sync_dir(s->at->dir, ".", e);
    if (ret == 0)
        ret = staged_remove_dir(s->at->dir, s->staging_name, e);
    return ret == 0 ? 1 : ret;
}

int publish_recover(const struct publish_place *at, struct err *e)
{
    CLEANUP(step_release) struct step s;
    struct err none = {0};
    int ret;

    step_init(&s);
    s.at = at;
    ret = open_staging(&s, at, &none);
    if (ret == -ENOENT)
        return 0;
    if (ret < 0) {
        *e = none;
        return ret;
    }
    if (has(&s, STAGED_DONE) || (has(&s, STAGED_PUBLISHED) && !has(&s, STAGED_DATA)))
        return clear_rest(&s, e);
    return has(&s, STAGED_REDO) ? roll_forward(&s, e) : 0;
}

bool publish_in_progress(int dir, const char *name)
{
    char path[NAME_MAX + sizeof "/" STAGED_REDO];
    char staging[NAME_MAX + 1];
    struct err none = {0};

    if (publish_staging_name(name, staging, &none) < 0)
        return false;
    snprintf(path, sizeof path, "%s/" STAGED_REDO, staging);
    return faccessat(dir, path, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

int publish(struct publish_spec *spec, struct err *e)
{
    CLEANUP(step_release) struct step s;
    int ret = publish_recover(&spec->at, e);

    step_init(&s);
    spec->undone = ret == -ESTALE;
    if (ret != 0)
        return MIN(ret, 0);
    ret = build(&s, spec, e);
    return ret == 0 ? run(&s, &spec->undone, e) : ret;
}
