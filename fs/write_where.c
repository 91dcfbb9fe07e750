/* SPDX-License-Identifier: MIT */
/* fs/write_where.c - which directory a request changes: of a stage, or of the source itself. */
#include "fs/write.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/fsutil.h"
#include "fs/alias.h"
#include "fs/dir.h"
#include "fs/node.h"
#include "fs/over.h"
#include "fs/save.h"
#include "fs/save_files.h"
#include "fs/save_upload.h"
#include "fs/slot.h"
#include "fs/staged.h"
#include "fs/tree.h"
#include "index/formats/format.h"
#include "index/formats/step.h"

int where_refused(struct err *e, const char *what)
{
    err_set(e, EROFS, "%s: nothing can be written here", what);
    return err_hint(e, "make a directory for a new checkpoint: mkdir DIR");
}

enum { FILES_SEEN = 16 };

struct archive_look {
    const struct fs *fs;
    const char *place;
    unsigned seen;
    bool found;
};

/* A file below a file: it lies in an archive, and so do all, but for the archive itself. */
static int see_file(void *user, const struct catalog_file *f)
{
    struct archive_look *look = user;
    char path[PATH_MAX];

    if (!f->storage || snprintf(path, sizeof path, "%s/%s", look->fs->store->url,
                                f->path) >= (int)sizeof path)
        return 0;
    look->found = faccessat(AT_FDCWD, path, F_OK, 0) < 0 && errno == ENOTDIR;
    return look->found || ++look->seen == FILES_SEEN;
}

static bool is_archive(const struct fs *fs, const struct slot *slot)
{
    struct archive_look look = {.fs = fs};
    struct err ignored = {0};

    catalog_files(fs->catalog, slot->info.id, see_file, &look, &ignored);
    return look.found;
}

/* Does a file of it lie elsewhere than in its own? */
static int see_other(void *user, const struct catalog_file *f)
{
    struct archive_look *look = user;

    look->found = f->storage && !path_is_within(f->path, look->place);
    return look->found;
}

/*
 * Also one that nobody can read or write is removed in one step: a directory of the source, or
 * a file that is all of it.
 */
static bool can_go(const struct fs *fs, const struct slot *slot)
{
    struct archive_look look = {.fs = fs, .place = slot->place};
    struct err ignored = {0};

    if (fs->store->remote || slot->dir_ino == FUSE_ROOT_ID)
        return false;
    return !slot->file ||
           (!slot->info.error &&
            catalog_files(fs->catalog, slot->info.id, see_other, &look, &ignored) == 0);
}

static int check_writable(const struct fs *fs, const struct slot *slot, struct err *e)
{
    CLEANUP(buf_release) struct buf names = {0};
    const struct format_writer *w;

    if (slot->info.error)
        return err_set(e, EROFS, "%s: %s", slot->path, slot->info.error);
    if (fs->store->remote)
        return save_upload_refuse(fs, slot->path, e);
    if (fs->reading.mapping || fs->options.prefix == PREFIX_DROP) {
        err_set(e, EROFS,
                "%s: what map=, dtype=, weights= or prefix=drop show is not "
                "written back",
                slot->path);
        return err_hint(e, "save to a new directory, or mount without these options");
    }
    if (slot->file || !save_format_changes(slot->info.format)) {
        for (size_t i = 0; (w = format_writer_at(i)); i++)
            buf_addf(&names, "%s%s", i ? ", " : "", w->name);
        err_set(e, EROFS, "%s: checkpoints of format %s are not written%s", slot->path,
                slot->info.format ? slot->info.format : "(none)",
                slot->file ? " in place" : "");
        return err_hint(e, "save to a new directory; formats that are written: %s",
                        names.data ? names.data : "none");
    }
    if (is_archive(fs, slot)) {
        err_set(e, EROFS, "%s: what lies in an archive is not changed", slot->path);
        return err_hint(e, "unpack it, or save to a new directory");
    }
    return 0;
}

static bool is_staged(struct fs *fs, const char *path)
{
    bool staged;

    stages_lock(fs);
    staged = stage_at(fs, path) != NULL;
    stages_unlock(fs);
    return staged;
}

/* Before the first change: is it what we know, or has another writer been there? */
int where_check_current(struct fs *fs, struct slot *slot, struct err *e)
{
    if (is_staged(fs, slot->place))
        return 0;
    scanner_suspect(fs->scanner, slot->path, slot->file);
    return slot_refresh(fs, slot, e);
}

/* With the lock: the stage of a checkpoint that is there, made if need be. */
int where_stage(struct fs *fs, struct slot *slot, enum where_why why,
                struct stage **out, struct err *e)
{
    bool only_removed;
    int rc;

    *out = stage_settled(fs, slot->place);
    if (*out && (*out)->over) {
        err_set(e, EBUSY, "%s: tensors that were saved there are not published yet",
                slot->path);
        return err_hint(e, "fsync the directory, or wait for some seconds");
    }
    if (*out)
        return why == WHERE_WRITE && (*out)->only_removed ? check_writable(fs, slot, e)
                                                          : 0;
    rc = check_writable(fs, slot, e);
    only_removed = rc < 0 && why == WHERE_REMOVE_ALL && can_go(fs, slot);
    if (only_removed)
        *e = (struct err){0};
    else if (rc < 0)
        return rc;
    rc = stage_new(fs, slot->place, slot, out, e);
    if (rc == 0)
        (*out)->only_removed = only_removed;
    return rc;
}

/* The fixed directory (tensors/, raw/, ...) of a stage that changes a checkpoint. */
int where_fixed(struct fs *fs, struct stage *s, enum inside kind, struct staged **out,
                struct err *e)
{
    const char *name = staged_fixed_name(kind);
    int rc;

    *out = staged_find(s->root, name);
    if (*out) {
        if ((*out)->removed)
            slot_renew(fs, s->slot, kind);
        (*out)->removed = false;
        return 0;
    }
    rc = staged_add(fs, s->root, name, STAGED_DIR, 0777, out, e);
    if (rc == 0)
        staged_cover(fs, *out, slot_ino(s->slot, kind, 0));
    return rc;
}

static int where_staged(struct fs *fs, fuse_ino_t ino, struct where *out)
{
    stages_lock(fs);
    out->dir = staged_of_ino(fs, ino);
    if (out->dir && out->dir->stage && stage_wait(fs, out->dir->stage)) {
        out->dir = staged_of_ino(fs, ino);
        if (out->dir && out->dir->stage && out->dir->kind == STAGED_DIR)
            return 0;
    }
    out->dir = NULL; /* of no stage: the caller looks in the source */
    stages_unlock(fs);
    return -ESTALE;
}

/*
 * With the lock. An rm -r has the checkpoint's directory open while it removes what is in it.
 * Most take the reports first, which are the first name; Python's from 3.13 on all files that
 * stand beside them, and then the directories from the last one on. Once something has been
 * removed nobody asks any more how it began.
 */
static enum where_why why_of(struct fs *fs, const struct slot *slot,
                             const struct where *w)
{
    if (!w->remove)
        return WHERE_WRITE;
    if (stage_at(fs, slot->place) || !dir_is_open(fs, slot->dir_ino, w->pid))
        return WHERE_REMOVE;
    return WHERE_REMOVE_ALL;
}

static int where_inside(struct fs *fs, fuse_ino_t ino, struct where *out, struct err *e)
{
    struct slot *slot = slot_of_ino(fs, ino);
    struct stage *s;
    int rc = slot ? 0 : -ESTALE;

    if (rc == 0 &&
        (!staged_fixed_name(ino_kind(ino)) ||
         (ino_kind(ino) == INSIDE_TREE && ino_index(ino) > 0 && !out->remove)))
        rc = where_refused(e, "tree/");
    if (rc == 0)
        rc = where_check_current(fs, slot, e);
    if (rc == 0) {
        stages_lock(fs);
        rc = where_stage(fs, slot,
                         ino_kind(ino) == INSIDE_META && out->remove
                             ? WHERE_REMOVE_ALL
                             : why_of(fs, slot, out),
                         &s, e);
        if (rc == 0)
            rc = where_fixed(fs, s, ino_kind(ino), &out->dir, e);
        if (rc < 0)
            stages_unlock(fs);
    }
    slot_unref(fs, slot, 1);
    return rc;
}

int where_shown(struct fs *fs, struct node *n, struct shown **out, struct err *e)
{
    int rc = tree_shown(fs, n, true, out, e);

    if (rc != 0 || !(*out)->slot || where_check_current(fs, (*out)->slot, e) == 0)
        return rc;
    shown_put(fs, *out);
    *e = (struct err){0};
    nodes_look_again(fs, n->path);
    return tree_shown(fs, n, true, out, e);
}

bool where_is_plain(struct fs *fs, const struct slot *slot)
{
    const struct stage *s = stage_settled(fs, slot->place);

    return s ? s->over : slot->plain; /* a removal of all of it may have begun */
}

bool where_is_free(struct fs *fs, struct shown *shown, const char *name)
{
    const struct slot *slot = shown->slot;
    const struct stage *s = slot ? stage_settled(fs, slot->place) : NULL;

    return !shown_find(shown, name) &&
           !(slot && (save_files_is_view(name) || slot_hides_in(slot, name))) &&
           !(s && (stage_is_removal(s) || staged_find(s->root, name)));
}

/*
 * A step of a run beside its model (a trainer's output_dir): a checkpoint by itself, with which
 * nothing of the one around it changes. Of other names nobody knows: they may be parts of it,
 * and come with it.
 */
static bool is_own_step(struct fs *fs, struct shown *shown, const char *mkdir)
{
    return mkdir && step_is_of_run(mkdir) && where_is_free(fs, shown, mkdir);
}

/* With the lock held when it returns 0. */
int where_find(struct fs *fs, fuse_ino_t ino, struct where *out, struct err *e)
{
    struct shown *shown;
    struct stage *s;
    int rc;

    *out = (struct where){.remove = out->remove, .pid = out->pid, .mkdir = out->mkdir};
    if (ino_is_staged(ino)) {
        rc = where_staged(fs, ino, out);
        if (rc != -ESTALE)
            return rc;
        ino = alias_resolve(fs, ino); /* published while we waited */
        if (ino_is_staged(ino))
            return rc;
    }
    if (ino_is_inside(ino))
        return where_inside(fs, ino, out, e);
    out->node = node_of_ino(fs, ino);
    if (!out->node)
        return -ESTALE;
    if (out->node->kind != NODE_DIR &&
        !(out->node->kind == NODE_FILE_DIR && out->remove))
        return where_refused(e, out->node->path);
    rc = where_shown(fs, out->node, &shown, e);
    if (rc != 0)
        return rc;
    stages_lock(fs);
    if (shown->slot && !where_is_plain(fs, shown->slot) &&
        !is_own_step(fs, shown, out->mkdir)) {
        rc = where_stage(fs, shown->slot, why_of(fs, shown->slot, out), &s, e);
        if (rc == 0)
            out->dir = s->root;
        else
            stages_unlock(fs);
    }
    shown_put(fs, shown);
    return rc;
}

struct staged *where_new_root(struct fs *fs, const struct node *dir, const char *name)
{
    char path[PATH_MAX];
    struct stage *s;

    if (store_join(dir->path, name, path, sizeof path) < 0)
        return NULL;
    s = stage_settled(fs, path);
    return s && !s->slot && !s->over ? s->root : NULL;
}
