/* SPDX-License-Identifier: MIT */
/* fs/save_files.c - side files of a checkpoint that is published. */
#include "fs/save_files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "base/dir.h"
#include "base/fsutil.h"
#include "fs/slot.h"
#include "fs/tree.h"
#include "save/incoming.h"
#include "save/staging.h"

enum { LIST_MEMORY = 512 << 20, COPY_BLOCK = 1 << 20, MAX_DEPTH = 32 };

/* ---- the list ---- */

struct lister {
    struct save_files *out;
    int failed;
    char lost[PATH_MAX]; /* a file of which the disk has refused bytes */
};

static void *grow(void *list, size_t count, size_t *cap, size_t item)
{
    size_t more = *cap ? 2 * *cap : 64;
    void *grown = list;

    if (count < *cap)
        return list;
    grown = reallocarray(list, more, item);
    if (grown)
        *cap = more;
    return grown;
}

static bool add_text(struct save_files *f, const char ***list, size_t *count,
                     size_t *cap, const char *text)
{
    const char **grown = grow(*list, *count, cap, sizeof *grown);

    if (!grown)
        return false;
    *list = grown;
    grown[*count] = arena_memdup(f->arena, text, strlen(text));
    return grown[*count] && ++*count;
}

static struct save_rights rights_of(const struct staged *n)
{
    return (struct save_rights){
        .mode = n->mode, .uid = n->uid, .gid = n->gid, .mtime = n->mtime};
}

static bool add_file(struct save_files *f, const struct staged *n, const char *path)
{
    size_t cap = f->cap;
    struct merge_file *file = grow(f->file, f->count, &cap, sizeof *file), *x;
    struct save_rights *rights;
    char spool[24];

    if (!file)
        return false;
    f->file = file;
    rights = grow(f->rights, f->count, &f->cap, sizeof *rights);
    if (!rights)
        return false;
    f->rights = rights;
    snprintf(spool, sizeof spool, "%" PRIu64, n->spool);
    x = &file[f->count];
    *x = (struct merge_file){.path = arena_memdup(f->arena, path, strlen(path)),
                             .spool = arena_memdup(f->arena, spool, strlen(spool)),
                             .order = n->order};
    if (n->dtype)
        x->dtype = arena_memdup(f->arena, n->dtype, strlen(n->dtype));
    rights[f->count] = rights_of(n);
    return x->path && x->spool && (!n->dtype || x->dtype) && ++f->count;
}

static bool add_dir(struct save_files *f, const struct staged *n, const char *path)
{
    size_t cap = f->dirs_cap;
    struct save_rights *rights = grow(f->dir_rights, f->dirs, &cap, sizeof *rights);

    if (!rights)
        return false;
    f->dir_rights = rights;
    rights[f->dirs] = rights_of(n);
    return add_text(f, &f->dir, &f->dirs, &f->dirs_cap, path);
}

/* Views, and storage: to unlink those hides the name, and removes nothing. */
static bool is_shown_by_us(const struct stage *s, const char *name)
{
    for (const char *const *own = tree_own_names; *own; own++)
        if (strcmp(*own, name) == 0)
            return true;
    return s->slot && slot_hides(s->slot, name);
}

static bool add_removal(struct save_files *f, const struct staged *n, const char *name)
{
    struct merge_removal *x =
        grow(f->removed, f->removals, &f->removals_cap, sizeof *x);

    if (!x)
        return false;
    f->removed = x;
    x += f->removals;
    *x = (struct merge_removal){.name = arena_memdup(f->arena, name, strlen(name)),
                                .order = n->order};
    return x->name && ++f->removals;
}

static bool add_gone(const struct staged *n, struct save_files *f, const char *path)
{
    const struct stage *s = n->stage;

    if (strncmp(path, "tensors/", 8) == 0)
        return add_removal(f, n, path + 8);
    return strchr(path, '/') || is_shown_by_us(s, path) ||
           add_text(f, &f->gone, &f->gones, &f->gones_cap, path);
}

static void list_node(void *user, struct staged *n)
{
    struct lister *l = user;
    char path[PATH_MAX];
    struct stat st;
    bool fine = staged_path(n, path, sizeof path) == 0;

    if (!fine && !l->failed)
        l->failed = -ENAMETOOLONG;
    if (l->failed)
        return;
    if (n->kind == STAGED_FILE && n->lost) {
        l->failed = -n->lost;
        snprintf(l->lost, sizeof l->lost, "%s", path);
        return;
    }
    if (n->kind == STAGED_FILE && staged_stat(n, &st) == 0)
        n->size = (uint64_t)st.st_size; /* publication takes the spool away */
    if (n->kind == STAGED_FILE)
        fine = add_file(l->out, n, path);
    else if (n->kind == STAGED_GONE)
        fine = add_gone(n, l->out, path);
    else
        fine = add_dir(l->out, n, path);
    if (!fine)
        l->failed = -ENOMEM;
    else if (n->kind == STAGED_DIR)
        staged_each(n, list_node, l);
}

int save_files_list(const struct stage *s, struct save_files *out, struct err *e)
{
    struct lister l = {.out = out};

    *out = (struct save_files){.root = rights_of(s->root)};
    if (s->slot) {
        out->root.uid = s->slot->info.uid;
        out->root.gid = s->slot->info.gid;
    }
    out->arena = arena_new(LIST_MEMORY);
    if (!out->arena)
        return err_nomem(e);
    staged_each(s->root, list_node, &l);
    if (l.failed && l.lost[0]) {
        err_set(e, -l.failed, "%s: the disk did not take all of it: %s", l.lost,
                strerror(-l.failed));
        return err_hint(e, "write it anew");
    }
    return l.failed ? err_set(e, -l.failed, "%s", strerror(-l.failed)) : 0;
}

/* Directories of views are none of the checkpoint's. */
bool save_files_is_view(const char *path)
{
    static const char *const views[] = {"tensors", "tree", "raw", "optimizer",
                                        ".unshard"};

    for (size_t i = 0; i < ARRAY_SIZE(views); i++) {
        size_t n = strlen(views[i]);

        if (strncmp(path, views[i], n) == 0 && (path[n] == '\0' || path[n] == '/'))
            return true;
    }
    return false;
}

bool save_files_none(const struct save_files *f)
{
    size_t dirs = 0;

    for (size_t i = 0; i < f->dirs; i++)
        dirs += !save_files_is_view(f->dir[i]);
    return f->count == 0 && f->removals == 0 && f->gones == 0 && dirs == 0;
}

bool save_files_bring_objects(const struct stage *s, const struct save_files *f)
{
    struct stat st;

    for (size_t i = 0; i < f->count; i++)
        if (strcmp(f->file[i].path, ".unshard/objects.json") == 0)
            return fstatat(staging_spool(s->staging), f->file[i].spool, &st,
                           AT_SYMLINK_NOFOLLOW) == 0 &&
                   st.st_size > (off_t)strlen("{}\n");
    return false;
}

void save_files_again(const struct stage *s, const struct save_files *f)
{
    if (geteuid() == 0)
        return;
    for (size_t i = 0; i < f->count; i++)
        (void)!fchmodat(staging_spool(s->staging), f->file[i].spool, 0600,
                        AT_SYMLINK_NOFOLLOW);
}

void save_files_release(struct save_files *f)
{
    free(f->file);
    free(f->rights);
    free(f->dir);
    free(f->dir_rights);
    free(f->removed);
    free(f->gone);
    arena_free(f->arena);
}

/* ---- files that came ---- */

static int fail(const char *path, struct err *e)
{
    return err_set(e, errno, "%s: %s", path, strerror(errno));
}

/* Another owner takes the bits that give his rights away: they are set last. */
static int set_rights(int fd, const struct save_rights *r)
{
    if (geteuid() == 0 && fchown(fd, r->uid, r->gid) < 0)
        return -1;
    return fchmod(fd, r->mode);
}

/* Of what stays as it came all is placed but what stands in .unshard/. */
static bool is_kept(const struct stage *s, const char *path)
{
    return s->whole ? incoming_kind(path) != INCOMING_IGNORED &&
                          strcmp(path, ".unshard") != 0
                    : !save_files_is_view(path);
}

static int make_dirs_of(int dir, const struct stage *s, const struct save_files *f,
                        struct err *e)
{
    for (size_t i = 0; i < f->dirs; i++) {
        if (!is_kept(s, f->dir[i]))
            continue;
        if (mkdirat(dir, f->dir[i], 0700) < 0 && errno != EEXIST)
            return fail(f->dir[i], e);
    }
    return 0;
}

/*
 * A directory is as old as it was when it was written: trainers remove the oldest of their
 * checkpoints, by these times. A disk that cannot keep them has others.
 */
static void set_time(int fd, const struct timespec *mtime)
{
    const struct timespec times[2] = {*mtime, *mtime};

    futimens(fd, times);
}

void save_files_date(const struct stage *s)
{
    set_time(staging_dir(s->staging), &s->root->mtime);
}

/* Their own rights come last: a directory may be read-only. */
static int finish_dirs(int dir, const struct stage *s, const struct save_files *f,
                       struct err *e)
{
    for (size_t i = f->dirs; i-- > 0;) {
        CLEANUP_FD int fd = -1;

        if (!is_kept(s, f->dir[i]))
            continue;
        fd = openat(dir, f->dir[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0 || set_rights(fd, &f->dir_rights[i]) < 0)
            return fail(f->dir[i], e);
        set_time(fd, &f->dir_rights[i].mtime);
        if (fsync(fd) < 0)
            return fail(f->dir[i], e);
    }
    return 0;
}

static int place_file(int spool, int dir, const struct merge_file *file,
                      const struct save_rights *rights, struct err *e)
{
    CLEANUP_FD int fd = openat(spool, file->spool, O_RDWR | O_CLOEXEC | O_NOFOLLOW);

    if (fd < 0 || set_rights(fd, rights) < 0 || fsync(fd) < 0)
        return fail(file->path, e);
    /* A file that the format's writer has made goes first. */
    if (linkat(spool, file->spool, dir, file->path, 0) < 0 && errno != EEXIST)
        return fail(file->path, e);
    return 0;
}

/* Side files; and storage that came as it is to be. */
bool save_files_is_placed(const struct stage *s, const struct save_files *f,
                          const struct merge *m, size_t i)
{
    const char *path = f->file[i].path;

    return (is_kept(s, path) &&
            (s->whole ||
             incoming_kind_beside(path, merge_has_base(m)) == INCOMING_SIDE)) ||
           merge_is_verbatim(m, i);
}

int save_files_check(const struct save_files *f, struct err *e)
{
    for (size_t i = 0; i < f->count; i++) {
        const char *path = f->file[i].path;

        if (!save_files_is_view(path) || incoming_kind(path) != INCOMING_SIDE)
            continue;
        err_set(e, EINVAL,
                "%s: no tensor, and %.*s/ of a checkpoint has nothing but tensors",
                path, (int)strcspn(path, "/"), path);
        return err_hint(e, "move or remove it");
    }
    return 0;
}

int save_files_link(const struct stage *s, const struct save_files *f, struct err *e)
{
    int dir = staging_dir(s->staging), spool = staging_spool(s->staging);

    for (size_t i = 0; i < f->dirs; i++)
        if (mkdirat(dir, f->dir[i], 0700) < 0 && errno != EEXIST)
            return fail(f->dir[i], e);
    for (size_t i = 0; i < f->count; i++)
        if (linkat(spool, f->file[i].spool, dir, f->file[i].path, 0) < 0)
            return fail(f->file[i].path, e);
    return 0;
}

static int place_incoming(const struct stage *s, const struct save_files *f,
                          const struct merge *m, struct err *e)
{
    int dir = staging_dir(s->staging), spool = staging_spool(s->staging);
    int ret = make_dirs_of(dir, s, f, e);

    for (size_t i = 0; ret == 0 && i < f->count; i++)
        if (save_files_is_placed(s, f, m, i))
            ret = place_file(spool, dir, &f->file[i], &f->rights[i], e);
    return ret == 0 ? finish_dirs(dir, s, f, e) : ret;
}

/* ---- files that stay ---- */

struct carry {
    const struct slot *slot;
    const struct save_files *files;
    bool rewritten; /* storage does not stay */
};

/*
 * Owner, group, attributes and mode of a directory, of which the new one is made. Who is not root
 * cannot give it to another: then nothing takes its place, but for a checkpoint that is changed.
 */
static int keep_rights(const struct carry *c, int from, int to, const char *path,
                       struct err *e)
{
    struct stat st, now;

    if (fstat(from, &st) < 0 || fstat(to, &now) < 0)
        return fail(path, e);
    if ((now.st_uid != st.st_uid || now.st_gid != st.st_gid) &&
        fchown(to, now.st_uid == st.st_uid ? (uid_t)-1 : st.st_uid, st.st_gid) < 0 &&
        (geteuid() == 0 || !c->slot)) {
        fail(path, e);
        return err_hint(e,
                        "its owner or group cannot be kept: save to a new directory");
    }
    if (copy_xattrs(from, to, e) < 0) {
        err_wrap(e, "%s", path);
        return err_hint(e, "save to a new directory");
    }
    return fchmod(to, st.st_mode & 07777) < 0 ? fail(path, e) : 0;
}

static int copy_file(int from, const char *name, int to, const struct stat *st,
                     struct err *e)
{
    CLEANUP_FREE char *block = malloc(COPY_BLOCK);
    CLEANUP_FD int in = openat(from, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    CLEANUP_FD int out =
        openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    struct timespec times[2] = {st->st_atim, st->st_mtim};
    ssize_t n = 1;

    if (!block)
        return err_nomem(e);
    if (in < 0 || out < 0)
        return fail(name, e);
    while ((n = read(in, block, COPY_BLOCK)) > 0)
        if (write_all(out, block, (size_t)n, e) < 0)
            return err_wrap(e, "%s", name);
    if (n < 0 || fchmod(out, st->st_mode & 07777) < 0 || futimens(out, times) < 0 ||
        fsync(out) < 0)
        return fail(name, e);
    return 0;
}

/* A copy of a file of others is theirs no more, and who has it open writes to the old one. */
static int carry_file(const struct carry *c, int from, const char *name, int to,
                      const struct stat *st, struct err *e)
{
    if (linkat(from, name, to, name, 0) == 0 || errno == EEXIST)
        return 0;
    /* Links to files of others may be forbidden (protected_hardlinks), or not be had. */
    if (c->slot && S_ISREG(st->st_mode) &&
        (errno == EPERM || errno == EMLINK || errno == EXDEV))
        return copy_file(from, name, to, st, e);
    fail(name, e);
    return c->slot ? -e->code : err_hint(e, "save to a new directory");
}

static bool is_gone(const struct save_files *f, const char *path)
{
    for (size_t i = 0; i < f->gones; i++)
        if (strcmp(f->gone[i], path) == 0)
            return true;
    return false;
}

static bool stays(const struct carry *c, const char *path)
{
    return !staging_is_named(path) && !is_gone(c->files, path) &&
           !(c->rewritten && slot_hides(c->slot, path));
}

static int carry_dir(const struct carry *c, int from, int to, const char *path,
                     unsigned depth, struct err *e);

static int carry_sub(const struct carry *c, int from, const char *name, int to,
                     const char *path, unsigned depth, const struct stat *st,
                     struct err *e)
{
    CLEANUP_FD int in =
        openat(from, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    CLEANUP_FD int out = -1;
    struct timespec times[2] = {st->st_atim, st->st_mtim};
    int ret;

    if (in < 0 || (mkdirat(to, name, 0700) < 0 && errno != EEXIST))
        return fail(path, e);
    out = openat(to, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (out < 0)
        return fail(path, e);
    ret = carry_dir(c, in, out, path, depth + 1, e);
    if (ret == 0)
        ret = keep_rights(c, in, out, path, e);
    if (ret == 0 && fsync(out) < 0)
        return fail(path, e);
    futimens(out, times);
    return ret;
}

static int carry_entry(const struct carry *c, int from, const char *name, int to,
                       const char *path, unsigned depth, struct err *e)
{
    struct stat st;

    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return fail(path, e);
    if (is_mount_root(from, name)) { /* with the old directory it would be emptied */
        err_set(e, EROFS, "%s: a file system is mounted there", path);
        return err_hint(e, "save in another directory, or unmount it first");
    }
    if (S_ISDIR(st.st_mode))
        return carry_sub(c, from, name, to, path, depth, &st, e);
    return carry_file(c, from, name, to, &st, e);
}

static int carry_dir(const struct carry *c, int from, int to, const char *path,
                     unsigned depth, struct err *e)
{
    int fd = openat(from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ret = 0;
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    const char *name;
    char below[PATH_MAX];
    int more = 0;

    if (!dir)
        return fail(path, e);
    if (depth > MAX_DEPTH)
        ret = err_set(e, ELOOP, "%s: more than %d directories deep", path, MAX_DEPTH);
    while (ret == 0 && (more = dir_next(dir, &name)) > 0) {
        if (store_join(path, name, below, sizeof below) < 0)
            ret = err_set(e, ENAMETOOLONG, "%s/%s", path, name);
        else if (stays(c, below))
            ret = carry_entry(c, from, name, to, below, depth, e);
    }
    closedir(dir);
    if (ret == 0 && more < 0) /* what was not listed would be lost with the old one */
        return err_set(e, -more, "list %s: %s", path, strerror(-more));
    return ret;
}

int save_files_carry(struct fs *fs, const struct stage *s, const struct save_files *f,
                     bool rewritten, struct err *e)
{
    const struct carry c = {.slot = s->slot, .files = f, .rewritten = rewritten};
    CLEANUP_FD int old = stage_directory(fs, s->path, e);
    int dir = staging_dir(s->staging), ret;

    if (old < 0)
        return old;
    ret = carry_dir(&c, old, dir, "", 0, e);
    return ret == 0 ? keep_rights(&c, old, dir, s->path, e) : ret;
}

mode_t save_files_mode(const struct stage *s, const struct save_files *f)
{
    mode_t mode = (s->slot ? s->slot->info.mode : f->root.mode) & 0666;

    for (size_t i = 0; i < f->count; i++) {
        enum incoming_kind kind = incoming_kind(f->file[i].path);

        if (kind == INCOMING_SAFETENSORS || kind == INCOMING_NPY ||
            kind == INCOMING_RAW)
            mode &= f->rights[i].mode;
    }
    return mode | 0600; /* the owner's: who saved it can read it */
}

int save_files_place(const struct stage *s, const struct save_files *f,
                     const struct merge *m, struct err *e)
{
    int ret = place_incoming(s, f, m, e);

    if (ret < 0 || s->slot)
        return ret;
    return set_rights(staging_dir(s->staging), &f->root) < 0 ? fail(s->path, e) : 0;
}
