/* SPDX-License-Identifier: MIT */
/* fs/save_files.c - the files of a stage that is published: their list, and those that are placed. */
#include "fs/save_files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "fs/save.h"
#include "fs/slot.h"
#include "fs/tree.h"
#include "fs/written.h"
#include "save/incoming.h"
#include "save/staging.h"

enum { LIST_MEMORY = 512 << 20 };

/* ---- the list ---- */

struct lister {
    struct save_files *out;
    int failed;
    char lost[PATH_MAX]; /* a file of which bytes were refused, or did not come */
    uint64_t lost_from;
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
    return (struct save_rights){.mode = n->mode,
                                .uid = n->uid,
                                .gid = n->gid,
                                .mtime = n->mtime,
                                .base = n->base,
                                .same = n->base.ino && n->came->copied && !n->marked,
                                .came = n->came};
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
                             .order = n->came->copied ? 0 : n->order,
                             .since = n->since};
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
    if (n->kind == STAGED_FILE && n->came->lost &&
        (n->came->lost != CAME_WRITER_KILLED || incoming_kind(path) != INCOMING_SIDE)) {
        l->failed = -n->came->lost;
        l->lost_from = n->came->lost_from;
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
    if (l.failed == -CAME_WRITER_KILLED && l.lost[0]) {
        err_set(e, EIO,
                "%s: a signal ended the program that wrote it, and from byte %" PRIu64
                " on some may lack",
                l.lost, l.lost_from);
        return err_hint(e, "write it anew, or remove it");
    }
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

/*
 * The kernel tells it once, and then holds the bytes for written: the file is not published
 * before they come anew.
 */
static int refused(struct fs *fs, const struct merge_file *file,
                   const struct save_rights *rights, int fd, struct err *e)
{
    struct stat st;

    fail(file->path, e);
    stages_lock(fs);
    came_lose(rights->came, e->code, 0, UINT64_MAX,
              fstat(fd, &st) == 0 ? (uint64_t)st.st_size : UINT64_MAX);
    stages_unlock(fs);
    return -e->code;
}

int save_files_check_read(struct fs *fs, const struct stage *s,
                          const struct save_files *f, struct err *e)
{
    for (size_t i = 0; i < f->count; i++) {
        CLEANUP_FD int fd = openat(staging_spool(s->staging), f->file[i].spool,
                                   O_RDONLY | O_CLOEXEC | O_NOFOLLOW);

        if (fd < 0)
            return fail(f->file[i].path, e);
        /* Waits for one page, and tells of all. Not every file system knows it. */
        if (sync_file_range(fd, 0, 1, SYNC_FILE_RANGE_WAIT_BEFORE) < 0 &&
            (errno == EIO || errno == ENOSPC || errno == EDQUOT))
            return refused(fs, &f->file[i], &f->rights[i], fd, e);
    }
    return 0;
}

static int place_file(struct fs *fs, int spool, int dir, const struct merge_file *file,
                      const struct save_rights *rights, struct err *e)
{
    CLEANUP_FD int fd = openat(spool, file->spool, O_RDWR | O_CLOEXEC | O_NOFOLLOW);

    if (fd < 0 || set_rights(fd, rights) < 0)
        return fail(file->path, e);
    if (fsync(fd) < 0)
        return refused(fs, file, rights, fd, e);
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

    /* The source's own stays: others may have it open, or write it. */
    if (f->rights[i].same)
        return false;
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

int save_files_check_bases(struct fs *fs, const struct stage *s,
                           const struct save_files *f, struct err *e)
{
    CLEANUP_FD int dir = stage_directory(fs, s->path, e);
    struct stat st;

    if (dir < 0)
        return dir;
    for (size_t i = 0; i < f->count; i++)
        if (f->rights[i].base.ino && !f->rights[i].same &&
            (fstatat(dir, f->file[i].path, &st, 0) < 0 ||
             !save_is_same(&f->rights[i].base, &st))) {
            err_set(e, EINVAL, "%s/%s: it was changed by another writer meanwhile",
                    s->path, f->file[i].path);
            return err_hint(e,
                            "what was written here is kept: copy it, then remove it");
        }
    return 0;
}

int save_files_link(const struct stage *s, const struct save_files *f, size_t first,
                    struct err *e)
{
    int dir = staging_dir(s->staging), spool = staging_spool(s->staging);

    for (size_t i = 0; i < f->dirs; i++)
        if (mkdirat(dir, f->dir[i], 0700) < 0 && errno != EEXIST)
            return fail(f->dir[i], e);
    for (size_t i = first; i < f->count; i++)
        if (linkat(spool, f->file[i].spool, dir, f->file[i].path, 0) < 0)
            return fail(f->file[i].path, e);
    return 0;
}

/* It stays what its program wrote, also where it is a checkpoint by itself. */
static void note_written(struct fs *fs, int spool, const struct merge_file *file)
{
    struct stat st;

    if (fstatat(spool, file->spool, &st, AT_SYMLINK_NOFOLLOW) == 0)
        written_add(fs->written, &st);
}

static int place_incoming(struct fs *fs, const struct stage *s,
                          const struct save_files *f, const struct merge *m,
                          struct err *e)
{
    int dir = staging_dir(s->staging), spool = staging_spool(s->staging);
    int ret = make_dirs_of(dir, s, f, e);

    for (size_t i = 0; ret == 0 && i < f->count; i++) {
        if (!save_files_is_placed(s, f, m, i))
            continue;
        ret = place_file(fs, spool, dir, &f->file[i], &f->rights[i], e);
        note_written(fs, spool, &f->file[i]);
    }
    return ret == 0 ? finish_dirs(dir, s, f, e) : ret;
}

/* ---- all of them ---- */

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

int save_files_place(struct fs *fs, const struct stage *s, const struct save_files *f,
                     const struct merge *m, struct err *e)
{
    int ret = place_incoming(fs, s, f, m, e);

    if (ret < 0 || s->slot)
        return ret;
    return set_rights(staging_dir(s->staging), &f->root) < 0 ? fail(s->path, e) : 0;
}
