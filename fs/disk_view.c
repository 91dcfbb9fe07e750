/* SPDX-License-Identifier: MIT */
/* fs/disk_view.c - views of a checkpoint in a mount for writing. */
#include "fs/disk_view.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "base/fsutil.h"
#include "fs/tree.h"
#include "index/view.h"

enum { VIEW_MEMORY = 1 << 20 };

/* ---- which checkpoint a directory is ---- */

/* What was found lately, with a reference: 1, and NULL for a plain directory; 0: look. */
static int known(struct fs *fs, struct disk_node *dir, struct generation **out)
{
    struct generation *gen = NULL;
    struct err ignored = {0};
    char path[PATH_MAX];
    bool current;

    disk_lock(fs);
    current = dir->looked_ns && now_ns() - dir->looked_ns < FRESH_NS &&
              dir->gen_changes == dir->changes;
    if (current && dir->gen)
        gen = generation_get(fs, dir->gen);
    disk_unlock(fs);
    /* It, or a directory above it, may have been renamed. */
    if (gen &&
        (gen->stale || !generation_fresh(gen, now_ns()) ||
         disk_path(fs, dir, path, &ignored) < 0 || strcmp(path, gen->path) != 0)) {
        generation_unref(fs, gen, 1);
        return 0;
    }
    *out = gen;
    return current;
}

/* The last generation of the directory, with a reference, or NULL. */
static struct generation *last_generation(struct fs *fs, struct disk_node *dir)
{
    struct generation *gen;

    disk_lock(fs);
    gen = dir->gen ? generation_get(fs, dir->gen) : NULL;
    disk_unlock(fs);
    return gen;
}

static void note(struct fs *fs, struct disk_node *dir, struct generation *gen,
                 uint64_t changes)
{
    struct generation *old;

    disk_lock(fs);
    old = dir->gen;
    dir->gen = gen ? generation_get(fs, gen) : NULL;
    dir->gen_changes = changes;
    dir->looked_ns = now_ns();
    disk_unlock(fs);
    generation_unref(fs, old, 1);
}

/* Is it a directory of storage files of a checkpoint above? 1, 0 or -errno. */
static int is_part(struct fs *fs, struct disk_node *dir, const char *path,
                   struct err *e)
{
    struct disk_node *above = disk_parent(fs, dir);
    int rc = 0;

    while (above && rc == 0) {
        struct disk_node *next = disk_parent(fs, above);
        char place[PATH_MAX];
        struct generation *gen = NULL;

        rc = disk_path(fs, above, place, e);
        if (rc == 0)
            rc = disk_generation(fs, above, true, &gen, e);
        if (rc == 0)
            rc = generation_hides_in(gen, path + strlen(place) + (place[0] != '\0'));
        else if (rc == -ENOENT)
            rc = 0;
        generation_unref(fs, gen, 1);
        disk_unpin(fs, above);
        above = next;
    }
    disk_unpin(fs, above);
    return rc;
}

int view_is_checkpoint(struct fs *fs, const char *path, struct err *e)
{
    struct listing *l = NULL;
    struct place place = {0};
    int rc = fs->store->ops->list(fs->store, path, &l, e);

    if (rc == 0)
        rc = place_of(l, NULL, &place, e);
    if (rc == 0)
        rc = place.kind == PLACE_CHECKPOINT;
    place_release(&place);
    listing_free(l);
    return rc;
}

/* Do the names in it make it a checkpoint? 1, 0 or -errno. */
static int is_checkpoint(struct fs *fs, const struct disk_node *dir, const char *path,
                         struct entry_stat *st, struct err *e)
{
    int rc = fs->store->ops->stat(fs->store, path, st, e);

    if (rc == 0 && (st->id.dev != dir->dev || st->id.ino != dir->inode))
        rc = err_set(e, ESTALE, "%s is another directory by now", path);
    return rc == 0 ? view_is_checkpoint(fs, path, e) : rc;
}

static int scan(struct fs *fs, const struct generation_place *place,
                struct generation **out, struct err *e)
{
    struct arena *a = arena_new(INFO_MEMORY);
    struct checkpoint_info info;
    int rc =
        a ? scanner_get(fs->scanner, place->path, NULL, a, &info, e) : err_nomem(e);

    if (rc < 0) {
        arena_free(a);
        return rc;
    }
    return generation_new(fs, place, a, &info, out, e);
}

int view_look(struct fs *fs, const struct generation_place *place,
              struct generation *last, struct generation **out, struct err *e)
{
    int rc = -ESTALE;

    scanner_suspect(fs->scanner, place->path, NULL);
    if (last && !last->stale && strcmp(last->path, place->path) == 0)
        rc = generation_refresh(fs, last, e);
    if (rc == 0) {
        *out = last;
        return 0;
    }
    generation_unref(fs, last, 1);
    *e = (struct err){0};
    return rc == -ESTALE ? scan(fs, place, out, e) : rc;
}

static int look(struct fs *fs, struct disk_node *dir, struct generation **out,
                struct err *e)
{
    char path[PATH_MAX];
    struct entry_stat st;
    const struct generation_place place = {
        .path = path, .dir_ino = dir->ino, .dir = &st};
    int rc = disk_path(fs, dir, path, e);

    *out = NULL;
    if (rc == 0)
        rc = is_checkpoint(fs, dir, path, &st, e);
    if (rc == 1)
        rc = is_part(fs, dir, path, e) == 0;
    if (rc == 1)
        rc = view_look(fs, &place, last_generation(fs, dir), out, e);
    if (rc == -ENOENT) {
        *e = (struct err){0};
        rc = 0;
    }
    return MIN(rc, 0);
}

int disk_generation(struct fs *fs, struct disk_node *dir, bool may_block,
                    struct generation **out, struct err *e)
{
    uint64_t changes = disk_changes(fs, dir);
    int rc = known(fs, dir, out);

    if (rc == 0 && !may_block)
        return FS_LATER;
    if (rc == 0) {
        TRY(look(fs, dir, out, e));
        note(fs, dir, *out, changes);
    }
    return *out ? 0 : -ENOENT;
}

/* ---- which views it has ---- */

static const struct disk_view views[] = {
    {"adapter_model.safetensors", INSIDE_MODEL, false},
    {"model.safetensors", INSIDE_MODEL, false},
    {"optimizer", INSIDE_OPTIMIZER, true},
    {"raw", INSIDE_RAW, true},
    {"tensors", INSIDE_TENSORS, true},
    {"tree", INSIDE_TREE, true},
};

const struct disk_view *disk_view_at(size_t i)
{
    return i < ARRAY_SIZE(views) ? &views[i] : NULL;
}

const struct disk_view *disk_view_named(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(views); i++)
        if (strcmp(views[i].name, name) == 0)
            return &views[i];
    return NULL;
}

/* A name by which transformers finds weights, whose place a made-up file must not take. */
static bool is_weights(const char *name)
{
    size_t len = strlen(name);

    return (len > 12 && strcmp(name + len - 12, ".safetensors") == 0) ||
           (len > 23 && strcmp(name + len - 23, ".safetensors.index.json") == 0) ||
           (strncmp(name, "pytorch_model", 13) == 0 &&
            ((len > 4 && strcmp(name + len - 4, ".bin") == 0) ||
             (len > 15 && strcmp(name + len - 15, ".bin.index.json") == 0)));
}

static int stores_weights(struct fs *fs, const char *path, struct err *e)
{
    struct listing *l = NULL;
    int rc = fs->store->ops->list(fs->store, path, &l, e);

    for (size_t i = 0; rc == 0 && i < listing_count(l); i++)
        rc = is_weights(listing_at(l, i)->name);
    listing_free(l);
    return rc;
}

/* A role may have tensors only that safetensors cannot hold: then it has no such file. */
static int has_file(struct fs *fs, const struct generation *gen, enum view_kind kind,
                    enum role role, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(VIEW_MEMORY);
    struct err ignored = {0};
    struct view_info view;

    if (!a)
        return err_nomem(e);
    return gen->info.by_role[role] &&
           view_get(fs->catalog, gen->info.id, kind, fs->options.prefix, a, &view,
                    &ignored) != -ENOENT;
}

bool disk_view_listed(const struct fs *fs, const struct disk_view *view)
{
    static const unsigned bits[] = {[INSIDE_TENSORS] = SHOW_TENSORS,
                                    [INSIDE_TREE] = SHOW_TREE,
                                    [INSIDE_RAW] = SHOW_RAW,
                                    [INSIDE_OPTIMIZER] = SHOW_OPTIMIZER,
                                    [INSIDE_MODEL] = SHOW_MODEL};

    return fs->options.views & bits[view->kind];
}

int disk_has_view(struct fs *fs, const struct generation *gen,
                  const struct disk_view *view, struct err *e)
{
    const char *model =
        gen->info.adapter ? "adapter_model.safetensors" : "model.safetensors";
    int rc;

    if (gen->info.error)
        return 0;
    if (view->kind == INSIDE_OPTIMIZER)
        return has_file(fs, gen, VIEW_OPTIMIZER, ROLE_OPTIMIZER, e);
    if (view->kind != INSIDE_MODEL)
        return 1;
    if (strcmp(view->name, model) != 0)
        return 0;
    rc = stores_weights(fs, gen->path, e);
    return rc != 0 ? MIN(rc, 0) : has_file(fs, gen, VIEW_MODEL, ROLE_MODEL, e);
}
