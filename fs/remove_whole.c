/* SPDX-License-Identifier: MIT */
/* fs/remove_whole.c - rmdir(2) of a checkpoint: it goes in one step, as a whole or not at all. */
#include "fs/remove_whole.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "base/fsutil.h"
#include "fs/node.h"
#include "fs/save.h"
#include "fs/slot.h"
#include "fs/stage.h"
#include "fs/tree.h"
#include "save/staging.h"

/* ---- is nothing left of it? ---- */

/* Something that came, and is not gone. */
static void see_new(void *user, struct staged *n)
{
    bool *any = user;

    *any |= n->kind != STAGED_GONE && !n->removed && !n->covers;
}

/* A directory that was removed empty is in the source until now: others may have filled it. */
static bool is_filled(struct fs *fs, const struct stage *s, const char *name)
{
    char path[PATH_MAX];
    struct err ignored = {0};
    struct listing *found;
    bool filled;

    if (store_join(s->path, name, path, sizeof path) < 0)
        return true;
    if (stage_at(fs, path)) /* a checkpoint that goes along */
        return false;
    store_forget(fs->store, path);
    if (fs->store->ops->list(fs->store, path, &found, &ignored) < 0)
        return false;
    filled = listing_count(found) > 0;
    listing_free(found);
    return filled;
}

/* Has anything come? */
static bool has_new(const struct stage *s)
{
    bool any = false;

    staged_each(s->root, see_new, &any);
    return any;
}

static bool is_bare(struct fs *fs, const struct stage *s, struct shown *shown)
{

    for (size_t i = 0; i < shown_places(shown); i++) {
        const struct shown_entry *entry = shown_at(shown, i);
        const struct staged *n = entry ? staged_find(s->root, entry->name) : NULL;

        if (!entry)
            continue;
        if (strcmp(entry->name, ".unshard") != 0 &&
            (!n || (n->kind != STAGED_GONE && !n->removed)))
            return false;
        if (n && n->kind == STAGED_GONE && entry->kind == SHOWN_DIR &&
            is_filled(fs, s, entry->name))
            return false;
    }
    return !has_new(s) && s->writers == 0;
}

typedef bool check_shown(struct fs *fs, const struct stage *s, struct shown *shown);

/* 0, or -ENOTEMPTY where the check of what the source shows now does not hold. */
static int check_dir(struct fs *fs, const struct stage *s, check_shown *check,
                     struct err *e)
{
    struct node *n = node_pin(fs, s->slot->dir_ino);
    struct shown *shown;
    int rc = n && strcmp(n->path, s->path) == 0 ? 0 : -ESTALE;

    if (rc == 0) {
        nodes_look_again(fs, s->path); /* what others made since would go with it */
        rc = tree_shown(fs, n, true, &shown, e);
    }
    if (rc == 0) {
        rc = check(fs, s, shown) ? 0 : -ENOTEMPTY;
        shown_put(fs, shown);
    }
    if (n)
        node_unpin(fs, n);
    return rc;
}

/* ---- has it begun, with the files first? ---- */

/* Something is gone from a directory of the checkpoint, and nothing has come to any. */
struct changes {
    bool gone, come;
};

static void see_inside(void *user, struct staged *n)
{
    struct changes *in = user;

    in->gone |= n->kind == STAGED_GONE || n->removed;
    in->come |= n->kind == STAGED_FILE && !n->removed;
    if (n->kind == STAGED_DIR) /* not deep: these are directories of programs */
        staged_each(n, see_inside, in);
}

static void see_directories(void *user, struct staged *n)
{
    if (n->kind == STAGED_DIR)
        see_inside(user, n);
}

static bool is_dir(const struct shown_entry *entry)
{
    switch (entry->kind) {
    case SHOWN_DIR:
    case SHOWN_FILE_DIR:
    case SHOWN_META:
        return true;
    case SHOWN_INSIDE:
        return inside_is_dir(entry->inside);
    case SHOWN_FILE:
    case SHOWN_LINK:
    case SHOWN_LATEST:
    default:
        return false;
    }
}

/* All files of the directory are gone, and there were some. */
static bool is_without_files(struct fs *fs, const struct stage *s, struct shown *shown)
{
    size_t files = 0;

    (void)fs;
    for (size_t i = 0; i < shown_places(shown); i++) {
        const struct shown_entry *entry = shown_at(shown, i);
        const struct staged *n;

        if (!entry || is_dir(entry))
            continue;
        n = staged_find(s->root, entry->name);
        if (!n || n->kind != STAGED_GONE)
            return false;
        files++;
    }
    return files > 0;
}

bool remove_whole_begun(struct fs *fs, const struct stage *s)
{
    struct changes in = {0};
    struct err ignored = {0};

    if (stage_is_removal(s))
        return true;
    staged_each(s->root, see_directories, &in);
    return s->slot && in.gone && !in.come && !has_new(s) &&
           check_dir(fs, s, is_without_files, &ignored) == 0;
}

/* What is staged below goes along: removals that wait for this one. */
static bool is_bare_inside(struct fs *fs, const struct stage *s)
{
    const struct stage *x = NULL;

    while ((x = stage_inside(fs, s, x)))
        if (!x->goes_along || x->publishing)
            return false;
    return true;
}

/* ---- is it one by itself? ---- */

struct look {
    const char *dir;
    bool found;
};

static int see_file(void *user, const struct catalog_file *f)
{
    struct look *look = user;

    look->found = path_is_within(f->path, look->dir);
    return look->found;
}

/*
 * Has the checkpoint `above` anything in the directory at `path`? Then that is a part of it,
 * whatever it looks like by itself: removed alone, it would be missing in one that goes on.
 * What cannot be told is taken for one.
 */
static bool has_part(struct fs *fs, const struct slot *above, const char *path)
{
    size_t len = strlen(above->path);
    const char *below = path + len + (len > 0);
    struct look look = {.dir = path};
    struct err ignored = {0};

    if (above->info.error || above->file || slot_hides_in(above, below))
        return true;
    return catalog_files(fs->catalog, above->info.id, see_file, &look, &ignored) < 0 ||
           look.found;
}

/* Beside the tensors of another one: with a model, or with nothing at all. */
static bool stands_alone(const struct checkpoint_info *info)
{
    return !info->error && (info->by_role[ROLE_MODEL] > 0 ||
                            (info->tensors == 0 && info->objects == 0));
}

/* One by itself, of which no checkpoint around it has a part. */
static int check_own(struct fs *fs, struct node *dir, const struct stage *s,
                     struct err *e)
{
    for (struct node *n = dir; n; n = n->parent) {
        struct slot *around = node_slot(fs, n);
        bool part = around && (has_part(fs, around, s->path) ||
                               (n == dir && !stands_alone(&s->slot->info)));

        slot_unref(fs, around, 1);
        if (part) {
            err_set(e, ENOTEMPTY, "%s may be a part of the checkpoint %s", s->path,
                    n->path);
            return err_hint(e, "that one is removed as a whole: rm -r");
        }
    }
    return 0;
}

/* ---- the step ---- */

/* With the lock: nobody changes it, nor what is staged below. */
static void settle(struct fs *fs, struct stage *s, bool going)
{
    s->publishing = going;
    for (struct stage *x = NULL; (x = stage_inside(fs, s, x));)
        x->publishing = going;
}

/* Lets the lock go: to delete it may take as long as to write it. */
static int take_away(struct fs *fs, struct stage *s, struct err *e)
{
    struct stage *x;
    const char *name;
    int parent, rc;

    settle(fs, s, true);
    stages_unlock(fs);
    stages_plain_begin(fs); /* not while a directory that it lies in is exchanged */
    parent = stage_parent(fs, s->path, &name, e);
    rc = parent < 0 ? parent : staging_take_away(s->staging, parent, name, e);
    stages_plain_end(fs);
    if (parent >= 0)
        close(parent);
    stages_lock(fs);
    settle(fs, s, false);
    if (rc < 0) {
        stage_wake(fs);
        return rc;
    }
    while ((x = stage_inside(fs, s, NULL))) {
        save_tell(fs, x->path, x->slot);
        stage_end(fs, x, true);
    }
    save_tell(fs, s->path, s->slot);
    stage_end(fs, s, true);
    return 0;
}

/* The stage that removes the checkpoint whose directory this is, or NULL. */
static struct stage *removal_of(struct fs *fs, const struct node *dir)
{
    struct stage *s = stage_settled(fs, dir->path);

    return s && stage_is_removal(s) ? s : NULL;
}

int remove_whole(struct fs *fs, struct node *dir, const char *name, const char *path,
                 struct err *e)
{
    struct stage *s = stage_settled(fs, path), *around;
    struct staged *gone;
    int rc;

    if (!s || !s->slot)
        return -ENOTEMPTY;
    rc = check_dir(fs, s, is_bare, e);
    if (rc == 0 && !is_bare_inside(fs, s))
        rc = -ENOTEMPTY;
    if (rc < 0)
        return rc;
    around = removal_of(fs, dir);
    if (!around) {
        rc = check_own(fs, dir, s, e);
        return rc == 0 ? take_away(fs, s, e) : rc;
    }
    if (!staged_find(around->root, name))
        rc = staged_add(fs, around->root, name, STAGED_GONE, 0, &gone, e);
    s->goes_along = rc == 0; /* with that one, whose rm -r has come here */
    return rc;
}
