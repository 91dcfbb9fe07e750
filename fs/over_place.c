/* SPDX-License-Identifier: MIT */
/* fs/over_place.c - what was staged over a directory of the source comes to it. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/dir.h"
#include "fs/over.h"
#include "fs/save.h"
#include "fs/save_files.h"
#include "fs/staged.h"
#include "save/staging.h"
#include "save/witness.h"

/* What the stage knows of the source: under which of its names there was which file. */
struct name {
    char *name;
    struct file_id id; /* ino 0: nothing */
    bool gone;
};

struct placing {
    struct fs *fs;
    struct stage *stage;
    const struct save_files *files;
    int dir; /* of the source */
    struct name *name;
    size_t names;
    bool failed; /* no memory */
};

static void take_name(void *user, struct staged *n)
{
    struct placing *p = user;
    char *name = strdup(n->name);

    p->failed |= !name;
    if (name)
        p->name[p->names++] = (struct name){name, n->over, n->kind == STAGED_GONE};
}

/*
 * Before the directories are locked: who makes a stage has the lock of stages by then, and waits
 * for these. Nobody changes the stage while it is published.
 */
static int take_names(struct placing *p, struct err *e)
{
    const struct staged *root = p->stage->root;

    stages_lock(p->fs);
    p->name = calloc(root->count + 1, sizeof *p->name);
    if (p->name)
        staged_each(root, take_name, p);
    stages_unlock(p->fs);
    return p->name && !p->failed ? 0 : err_nomem(e);
}

static void free_names(struct placing *p)
{
    for (size_t i = 0; i < p->names; i++)
        free(p->name[i].name);
    free(p->name);
}

static int changed(const struct stage *s, const char *name, struct err *e)
{
    err_set(e, EINVAL, "%s%s%s: another writer was there meanwhile", s->path,
            name[0] ? "/" : "", name);
    return err_hint(e, "what was written here is kept: copy it, then remove it");
}

static const struct name *find_name(const struct placing *p, const char *name)
{
    for (size_t i = 0; i < p->names; i++)
        if (strcmp(p->name[i].name, name) == 0)
            return &p->name[i];
    return NULL;
}

/* A name under which a file came is its own: whoever has that open writes on. */
static bool is_same(const struct name *n, const struct stat *st)
{
    return n->gone ? n->id.ino == st->st_ino : save_is_same(&n->id, st);
}

/* Nothing is written over but what was there when its name was given here. */
static int check_name(const struct placing *p, const char *name, uint64_t *there,
                      struct err *e)
{
    const struct name *n = find_name(p, name);
    struct stat st;

    *there = 0;
    if (fstatat(p->dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : err_set(e, errno, "%s: %s", name, strerror(errno));
    *there = st.st_ino;
    return n && is_same(n, &st) ? 0 : changed(p->stage, name, e);
}

/* What is to come: the only file of it, or "" where there are more. */
struct coming {
    char only[NAME_MAX + 1];
    size_t count;
    uint64_t there; /* what the target has of this name */
};

static int look_at_coming(const struct placing *p, struct coming *out, struct err *e)
{
    const struct stage *s = p->stage;
    int fd = openat(staging_dir(s->staging), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *data = fd < 0 ? NULL : fdopendir(fd);
    const char *name;
    int more = 0, rc = 0;

    *out = (struct coming){0};
    if (!data)
        return err_set(e, errno, "%s: %s", s->path, strerror(errno));
    while (rc == 0 && (more = dir_next(data, &name)) > 0) {
        rc = check_name(p, name, &out->there, e);
        snprintf(out->only, sizeof out->only, "%s", out->count++ ? "" : name);
    }
    closedir(data);
    return rc == 0 && more < 0 ? err_set(e, -more, "%s: %s", s->path, strerror(-more))
                               : rc;
}

static int check_gone(const struct placing *p, struct err *e)
{
    uint64_t there;
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < p->files->gones; i++)
        rc = check_name(p, p->files->gone[i], &there, e);
    return rc;
}

static bool counts_nothing(const void *user, const char *path)
{
    (void)user;
    (void)path;
    return false;
}

/*
 * Several files at once: a directory with these and links to all others takes its place. It is
 * watched before it is looked at: what comes in between is told by the one or the other.
 */
static int exchange(const struct placing *p, struct err *e)
{
    const struct witness_filter none = {.counts = counts_nothing};
    struct stage *s = p->stage;
    struct coming coming;
    const char *name;
    CLEANUP_FD int parent = stage_parent(p->fs, s->path, &name, e);
    int rc = parent;

    if (rc >= 0)
        rc = staging_watch(s->staging, parent, name, &none, e);
    if (rc == 0)
        rc = look_at_coming(p, &coming, e);
    if (rc == 0)
        rc = check_gone(p, e);
    if (rc == 0)
        rc = save_files_carry(p->fs, s, p->files, false, e);
    return rc == 0 ? save_put_in_place(p->fs, s, e) : rc;
}

/* The names under which files came: of an exchanged directory they are not carried. */
static void remove_gone(const struct placing *p)
{
    struct stat st;

    for (size_t i = 0; i < p->files->gones; i++) {
        const struct name *n = find_name(p, p->files->gone[i]);

        if (n && n->gone && fstatat(p->dir, n->name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
            st.st_ino == n->id.ino)
            unlinkat(p->dir, n->name, 0);
    }
}

static int place(const struct placing *p, struct err *e)
{
    struct coming coming;
    int rc = look_at_coming(p, &coming, e);

    if (rc == 0)
        rc = check_gone(p, e);
    if (rc < 0 || coming.count == 0)
        return rc;
    if (!coming.only[0])
        return exchange(p, e);
    rc = staging_add(p->stage->staging, p->dir, coming.only, coming.there, e);
    if (rc == 0)
        remove_gone(p);
    return rc;
}

static int place_in(struct placing *p, struct err *e)
{
    CLEANUP_FD int dir = stage_directory(p->fs, p->stage->path, e);
    struct stat st;

    p->dir = dir;
    if (dir >= 0 && fstat(dir, &st) == 0 && st.st_ino == p->stage->over_ino)
        return place(p, e);
    return dir < 0 ? dir : changed(p->stage, "", e);
}

int over_put_in_place(struct fs *fs, struct stage *s, const struct save_files *f,
                      struct err *e)
{
    struct placing p = {.fs = fs, .stage = s, .files = f};
    int rc = take_names(&p, e);

    if (rc == 0) {
        stages_place_begin(fs);
        rc = place_in(&p, e);
        stages_place_end(fs);
    }
    free_names(&p);
    return rc;
}
