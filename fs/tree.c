/* SPDX-License-Identifier: MIT */
/* fs/tree.c - what a directory of the source shows in the mount. */
#include "fs/tree.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "base/log.h"
#include "base/vec.h"
#include "fs/overlay.h"
#include "index/formats/hf/hf_loader_name.h"
#include "index/view.h"
#include "remote/archives.h"
#include "save/publish.h"

enum {
    VIEW_MEMORY = 1 << 20,
    MAX_LOOK_NS =
        2000000000, /* a directory that takes long to list is listed less often */
    COST_SHARE = 10,
};

const char *const tree_own_names[] = {"model.safetensors",
                                      "adapter_model.safetensors",
                                      "tensors",
                                      "tree",
                                      "raw",
                                      "optimizer",
                                      ".unshard",
                                      NULL};

int snapshot_path(const struct node *dir, const struct snapshot_entry *entry, char *dst,
                  size_t size, struct err *e)
{
    char below[PATH_MAX];

    if (store_join(entry->part ? entry->part : "", entry->name, below, sizeof below) <
            0 ||
        store_join(dir->path, below, dst, size) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir->path,
                       entry->name);
    return 0;
}

/* ---- building a snapshot ---- */

struct builder {
    struct fs *fs;
    struct node *dir;
    struct snapshot *snapshot;
    struct place place;
    bool alone; /* a file that is the checkpoint: what is beside it is not shown */
    struct err *e;
};

static int add(struct builder *b, const struct snapshot_entry *entry)
{
    struct snapshot *s = b->snapshot;

    if (!VEC_ROOM(s->entry, s->count, s->cap))
        return err_nomem(b->e);
    s->entry[s->count++] = *entry;
    return 0;
}

static int add_inside(struct builder *b, const char *name, enum inside inside)
{
    return add(b, &(struct snapshot_entry){
                      .kind = SNAPSHOT_INSIDE, .inside = inside, .name = name});
}

/* A role may have tensors only that safetensors cannot hold: then it has no such file. */
static bool has_view(const struct builder *b, enum view_kind kind)
{
    const struct checkpoint_info *info = &b->snapshot->gen->info;
    CLEANUP(arena_freep) struct arena *a = arena_new(VIEW_MEMORY);
    struct view_info view;
    struct err ignored = {0};

    return view_is_possible(info, kind) &&
           (!a || view_get(b->fs->catalog, info->id, kind, b->fs->options.prefix, a,
                           &view, &ignored) != -ENOENT);
}

/* Is the name taken by what was added so far (a handful, not sorted yet)? */
static bool taken(const struct snapshot *s, size_t first, size_t count,
                  const char *name)
{
    for (size_t i = first; i < count; i++)
        if (strcmp(s->entry[i].name, name) == 0)
            return true;
    return false;
}

/* hf=DIR: before the source's own side files, which the user wants covered. */
static int add_overlay(struct builder *b)
{
    const struct overlay *o = b->fs->overlay;
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < overlay_count(o); i++) {
        const struct snapshot_entry entry = {.kind = SNAPSHOT_INSIDE,
                                             .inside = INSIDE_OVERLAY,
                                             .index = (uint32_t)i,
                                             .name = overlay_at(o, i)->name};

        if (!taken(b->snapshot, 0, b->snapshot->count, entry.name))
            rc = add(b, &entry);
    }
    return rc;
}

/* What a checkpoint has of ours. */
static int add_own(struct builder *b)
{
    const struct checkpoint_info *info = &b->snapshot->gen->info;
    unsigned views = fs_views(b->fs);
    int rc = add_inside(b, ".unshard", INSIDE_META);

    if (info->error)
        return rc;
    if (rc == 0 && (views & SHOW_MODEL) && has_view(b, VIEW_MODEL))
        rc = add_inside(
            b, info->adapter ? "adapter_model.safetensors" : "model.safetensors",
            INSIDE_MODEL);
    if (rc == 0 && (views & SHOW_OPTIMIZER) && has_view(b, VIEW_OPTIMIZER))
        rc = add_inside(b, "optimizer", INSIDE_OPTIMIZER);
    if (rc == 0 && (views & SHOW_TENSORS))
        rc = add_inside(b, "tensors", INSIDE_TENSORS);
    if (rc == 0 && (views & SHOW_TREE))
        rc = add_inside(b, "tree", INSIDE_TREE);
    if (rc == 0 && (views & SHOW_RAW))
        rc = add_inside(b, "raw", INSIDE_RAW);
    return rc == 0 ? add_overlay(b) : rc;
}

static bool is_file_checkpoint(const struct builder *b, const char *name)
{
    for (size_t i = 0; i < b->place.nfiles; i++)
        if (strcmp(b->place.files[i].name, name) == 0)
            return true;
    return false;
}

/* A link to a directory stays a link while it can be told where it leads. */
static enum snapshot_kind kind_of_dir(const struct builder *b,
                                      const struct snapshot_entry *s)
{
    char path[PATH_MAX], text[PATH_MAX];
    struct err e = {0};
    struct store *store = b->fs->store;

    if (!s->st.is_link || snapshot_path(b->dir, s, path, sizeof path, &e) < 0 ||
        store->ops->readlink(store, path, text, sizeof text, &e) < 0)
        return SNAPSHOT_DIR;
    return SNAPSHOT_LINK;
}

static int add_entry(struct builder *b, const struct listing_entry *entry,
                     const char *part)
{
    struct snapshot_entry s = {
        .kind = SNAPSHOT_FILE, .name = entry->name, .part = part, .st = entry->st};

    if (publish_is_staging(entry->name))
        return 0; /* a save in the making */
    if (entry->st.kind == ENTRY_OTHER) {
        bool weights = entry->st.is_link && hf_is_weights(entry->name) &&
                       !atomic_exchange(&b->fs->warned_link, true);

        log_msg(
            LOG_FS, weights ? LOG_WARN : LOG_DEBUG,
            "%s/%s is not shown: no file, no directory, or a link that leads out of the source, which -o follow_symlinks follows",
            b->dir->path, entry->name);
        return 0;
    }
    if (entry->st.kind == ENTRY_DIR)
        s.kind = kind_of_dir(b, &s);
    else if (!part && is_file_checkpoint(b, entry->name))
        s.kind = SNAPSHOT_FILE_DIR;
    return add(b, &s);
}

/* The nearest checkpoint that the directory lies in, with a reference, or NULL. */
static struct generation *generation_above(struct fs *fs, const struct node *dir)
{
    struct generation *gen = NULL;

    for (struct node *n = dir->parent; n && !gen; n = n->parent)
        gen = node_generation(fs, n);
    return gen;
}

/* Is this a shard of the checkpoint above, which lies in a directory of its own? */
static bool hidden_above(const struct generation *above, const struct node *dir,
                         const char *name)
{
    size_t len = above ? strlen(above->path) : 0;
    char path[PATH_MAX];

    return above && !above->file && strncmp(dir->path, above->path, len) == 0 &&
           store_join(dir->path + len + (len > 0), name, path, sizeof path) == 0 &&
           generation_hides(above, path);
}

/* Checkpoints that are sets of files in subdirectories, which are not shown then. */
static int add_sets(struct builder *b)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < b->place.nfiles; i++) {
        const struct place_file *f = &b->place.files[i];

        if (f->set_dir)
            rc = add(b, &(struct snapshot_entry){.kind = SNAPSHOT_FILE_DIR,
                                                 .name = f->name,
                                                 .part = f->set_dir,
                                                 .st = f->st});
    }
    return rc;
}

static int add_mirrored(struct builder *b)
{
    const struct listing *l = b->snapshot->listing;
    struct generation *above = generation_above(b->fs, b->dir);
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < listing_count(l); i++)
        if (!hidden_above(above, b->dir, listing_at(l, i)->name) &&
            !(listing_at(l, i)->st.kind == ENTRY_DIR &&
              place_hides(&b->place, listing_at(l, i)->name)))
            rc = add_entry(b, listing_at(l, i), NULL);
    generation_unref(b->fs, above, 1);
    return rc == 0 ? add_sets(b) : rc;
}

static bool is_part(const struct generation *gen, const char *name)
{
    for (size_t i = 0; i < gen->hidden.nparts; i++)
        if (strcmp(gen->hidden.part[i], name) == 0)
            return true;
    return false;
}

static bool is_laid_over(const struct fs *fs, const char *name)
{
    for (size_t i = 0; i < overlay_count(fs->overlay); i++)
        if (strcmp(overlay_at(fs->overlay, i)->name, name) == 0)
            return true;
    return false;
}

/*
 * The model's file under the name that its loader asks for too, as a second link; only where
 * all that is hidden says the same of it.
 */
static int add_second_name(struct builder *b)
{
    struct generation *gen = b->snapshot->gen;
    const struct listing *l = b->snapshot->listing;
    const char *found = NULL;

    if (gen->info.adapter || gen->file ||
        !taken(b->snapshot, 0, b->snapshot->count, "model.safetensors"))
        return 0;
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        const char *name;

        if (entry->st.kind != ENTRY_FILE || !hf_is_weights(entry->name) ||
            !generation_hides(gen, entry->name))
            continue;
        name = hf_loader_name(entry->name);
        if (!name ||
            (*name && (found || taken(b->snapshot, 0, b->snapshot->count, name))))
            return 0;
        if (*name)
            found = name;
    }
    return found ? add_inside(b, found, INSIDE_MODEL) : 0;
}

static bool is_safetensors(const char *name)
{
    static const char end[] = ".safetensors";
    size_t len = strlen(name), n = sizeof end - 1;

    return len > n && strcmp(name + len - n, end) == 0;
}

/*
 * Loaders that take all *.safetensors (vLLM's and SGLang's weight utilities) drop those that
 * the index does not name. Where others stand beside the model's file, an index names it alone.
 * An rw mount lists nothing that the source does not have.
 */
static int add_index(struct builder *b)
{
    static const char name[] = "model.safetensors.index.json";
    const struct snapshot *s = b->snapshot;
    bool model = false, others = false;

    if (b->fs->disk)
        return 0;
    for (size_t i = 0; i < s->count; i++) {
        if (strcmp(s->entry[i].name, name) == 0)
            return 0;
        if (!is_safetensors(s->entry[i].name))
            continue;
        if (strcmp(s->entry[i].name, "model.safetensors") == 0)
            model = s->entry[i].kind == SNAPSHOT_INSIDE;
        else
            others = true;
    }
    return model && others ? add_inside(b, name, INSIDE_INDEX) : 0;
}

/* The source's own files and directories beside the tensors. */
static int add_beside(struct builder *b)
{
    struct generation *gen = b->snapshot->gen;
    const struct listing *l = b->snapshot->listing;
    const char *covered = NULL;
    size_t own = b->snapshot->count;
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (taken(b->snapshot, 0, own, entry->name)) {
            if (!generation_hides(gen, entry->name) &&
                !is_laid_over(b->fs, entry->name))
                covered = entry->name;
        } else if (!generation_hides(gen, entry->name)) {
            rc = add_entry(b, entry, NULL);
        }
    }
    if (covered && !atomic_exchange(&gen->warned, true))
        log_msg(LOG_FS, LOG_WARN,
                "%s/%s of the source is not shown: unshardfs has this name",
                b->dir->path, covered);
    return rc == 0 ? add_second_name(b) : rc;
}

/* Is a file of a part hidden, or below another part? */
static bool hidden_in_part(const struct generation *gen, const char *part,
                           const char *name)
{
    char path[PATH_MAX];

    return store_join(part, name, path, sizeof path) < 0 ||
           generation_hides(gen, path) || is_part(gen, path);
}

/* A file's own directory has its name in its path: what follows of a part's path. */
static const char *below_file(const struct node *dir, const char *part)
{
    if (dir->kind != NODE_FILE_DIR)
        return part;
    part += MIN(strlen(part), strlen(dir->file));
    return part + (*part == '/');
}

/* Folders too where the part is an archive, which nothing else shows. */
static bool is_lifted(const struct listing_entry *entry, const char *part)
{
    return entry->st.kind == ENTRY_FILE ||
           (entry->st.kind == ENTRY_DIR &&
            (archive_is_named(part) || place_is_apart(entry->name)));
}

/* Side files of a part come to the top, where no name is in their way. */
static int add_lifted(struct builder *b, const char *part)
{
    const struct listing *l = listing_below(b->snapshot->listing, part);
    size_t before = b->snapshot->count;
    int rc = 0;

    for (size_t i = 0; rc == 0 && l && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (is_lifted(entry, part) &&
            !hidden_in_part(b->snapshot->gen, part, entry->name) &&
            !taken(b->snapshot, 0, before, entry->name))
            rc = add_entry(b, entry, below_file(b->dir, part));
    }
    return rc;
}

static int add_checkpoint(struct builder *b)
{
    const struct hidden *hidden = &b->snapshot->gen->hidden;
    int rc = add_own(b);

    if (rc < 0 || !b->snapshot->listing)
        return rc;
    if (!b->alone)
        rc = add_beside(b);
    for (size_t i = 0; rc == 0 && i < hidden->nparts; i++)
        rc = add_lifted(b, hidden->part[i]);
    return rc == 0 ? add_index(b) : rc;
}

/* `latest`, and .unshard where the directory has none by being a checkpoint. */
static int add_latest(struct builder *b)
{
    struct snapshot *s = b->snapshot;
    int rc = 0;

    if (!taken(s, 0, s->count, "latest"))
        rc =
            add(b, &(struct snapshot_entry){.kind = SNAPSHOT_LATEST, .name = "latest"});
    if (rc == 0 && !s->gen) {
        /* Ours even where the source has such a name. */
        for (size_t i = 0; i < s->count; i++)
            if (strcmp(s->entry[i].name, ".unshard") == 0)
                s->entry[i--] = s->entry[--s->count];
        rc =
            add(b, &(struct snapshot_entry){.kind = SNAPSHOT_META, .name = ".unshard"});
    }
    return rc;
}

static int build_entries(struct builder *b)
{
    struct snapshot *s = b->snapshot;
    bool tracked =
        s->listing && !b->alone &&
        (listing_find(s->listing, "latest") ||
         listing_find(s->listing, "latest_universal") ||
         listing_find(s->listing, "latest_checkpointed_iteration.txt") ||
         listing_find(s->listing, "latest.txt") ||
         listing_find(s->listing, "latest_train_state.pt") ||
         listing_find(s->listing, "LATEST") || listing_find(s->listing, "LATEST.txt"));
    int rc = s->gen ? add_checkpoint(b) : add_mirrored(b);

    if (rc == 0 && tracked) {
        s->latest = s->gen ? tracker_of_generation(b->fs, s->gen)
                           : tracker_target(b->fs, b->dir->path);
        if (s->latest)
            rc = add_latest(b);
    }
    snapshot_sort(s);
    return rc;
}

/* ---- which checkpoint it is ---- */

static int generation_from_scan(struct fs *fs, struct node *dir, const char *path,
                                const char *file, struct generation **out,
                                struct err *e)
{
    struct arena *a = arena_new(INFO_MEMORY);
    struct checkpoint_info info;
    struct entry_stat st;
    int rc = a ? scanner_get(fs->scanner, path, file, a, &info, e) : err_nomem(e);

    if (rc == 0)
        rc = fs->store->ops->stat(fs->store, dir->path, &st, e);
    if (rc < 0) {
        arena_free(a);
        return rc;
    }
    return generation_new(
        fs,
        &(struct generation_place){
            .path = path, .file = file, .dir_ino = dir->ino, .dir = &st},
        a, &info, out, e);
}

/* Looks again at what it was, and makes a new generation when it is another by now. */
static int generation_again(struct fs *fs, struct node *dir, const char *path,
                            const char *file, struct generation **out, struct err *e)
{
    struct generation *gen = node_generation(fs, dir);
    int rc = gen && !gen->stale ? generation_refresh(fs, gen, e) : -ESTALE;

    if (rc == -ESTALE) {
        *e = (struct err){0};
        generation_unref(fs, gen, 1);
        gen = NULL;
        rc = generation_from_scan(fs, dir, path, file, &gen, e);
        if (rc == 0)
            node_set_generation(fs, dir, gen);
        else if (rc == -ENOENT)
            node_set_generation(fs, dir, NULL);
    }
    if (rc < 0) {
        generation_unref(fs, gen, 1);
        return rc;
    }
    *out = gen;
    return 0;
}

int tree_generation(struct fs *fs, struct node *dir, const char *path, const char *file,
                    bool may_block, struct generation **out, struct err *e)
{
    struct generation *gen = node_generation(fs, dir);
    int rc;

    if (gen && !gen->stale && generation_fresh(gen, now_ns())) {
        *out = gen;
        return 0;
    }
    generation_unref(fs, gen, 1);
    if (!may_block)
        return FS_LATER;
    rc = generation_again(fs, dir, path, file, out, e);
    /* Replaced between the scan and our look at its rows: once more. */
    return rc == -ESTALE ? generation_again(fs, dir, path, file, out, e) : rc;
}

/* ---- a new look ---- */

/*
 * What the directory is. First bytes of a server's files are not asked for again where the
 * index knows it, which is a round trip less before the first byte of a tensor.
 */
static int judge_dir(struct builder *b, const char *only)
{
    const struct fs *fs = b->fs;
    int rc = 0;

    if (fs->store->remote && !only)
        rc = scanner_knows(fs->scanner, b->dir->path, b->snapshot->listing, b->e);
    if (rc > 0)
        b->place.kind = PLACE_CHECKPOINT;
    return rc == 0 ? place_of(b->snapshot->listing, only, &b->place, b->e) : MIN(rc, 0);
}

/*
 * A file could not be read that may make the directory a checkpoint. It is shown as what it
 * is without that, but not who was one before as the files that it lies in, and not because
 * of what we lack.
 */
static int judge_unread(struct builder *b)
{
    const struct err *why = b->place.trouble;
    struct generation *before = why ? node_generation(b->fs, b->dir) : NULL;
    bool passes = !why || (!before && (why->code == EIO || why->code == EREMOTEIO ||
                                       why->code == ETIMEDOUT || why->code == EPROTO));

    generation_unref(b->fs, before, 1);
    if (why && passes)
        last_error_report(&b->fs->last_error, why);
    else if (why)
        *b->e = *why;
    return passes ? 0 : -b->e->code;
}

static int look_dir(struct builder *b, bool may_block)
{
    struct fs *fs = b->fs;
    struct snapshot *s = b->snapshot;
    const char *only = b->dir->ino == FUSE_ROOT_ID ? fs->store->file : NULL;
    int rc = fs->store->ops->list(fs->store, b->dir->path, &s->listing, b->e);

    if (rc == 0)
        rc = judge_dir(b, only);
    if (rc == 0)
        rc = judge_unread(b);
    if (rc == 0 && b->place.kind != PLACE_CHECKPOINT && !b->place.trouble)
        node_set_generation(fs, b->dir,
                            NULL); /* what it was refuses nothing any more */
    if (rc < 0 || b->place.kind != PLACE_CHECKPOINT)
        return rc;
    rc = tree_generation(fs, b->dir, b->dir->path, NULL, may_block, &s->gen, b->e);
    if (rc == -ENOENT) { /* it ceased to be one meanwhile */
        *b->e = (struct err){0};
        rc = 0;
    }
    b->alone = only; /* of a source that is a file only that is shown */
    return rc;
}

/* A file that is a checkpoint; archives have side files, which its own folder shows. */
static int look_file(struct builder *b, bool may_block)
{
    const struct node *dir = b->dir;
    struct snapshot *s = b->snapshot;
    int rc =
        tree_generation(b->fs, b->dir, dir->dir, dir->file, may_block, &s->gen, b->e);

    b->alone = true;
    if (rc != 0 || s->gen->hidden.nparts == 0)
        return rc;
    return b->fs->store->ops->list(b->fs->store, dir->dir, &s->listing, b->e);
}

static int look(struct builder *b, bool may_block)
{
    int rc = b->dir->kind == NODE_FILE_DIR ? look_file(b, may_block)
                                           : look_dir(b, may_block);

    return rc == 0 ? build_entries(b) : rc;
}

/*
 * Half of refresh= is the store's, whose listings are no fresher than that.
 */
static int64_t look_pause(const struct fs *fs, int64_t cost)
{
    unsigned refresh = fs->options.refresh ? fs->options.refresh : STORE_REFRESH;
    int64_t pause = MAX(MIRROR_NS, MIN(COST_SHARE * cost, (int64_t)MAX_LOOK_NS));

    return fs->store->remote ? (int64_t)refresh * 500000000 - MIRROR_NS : pause;
}

static int snapshot_new(struct fs *fs, struct node *dir, bool may_block,
                        struct snapshot **out, struct err *e)
{
    struct builder b = {.fs = fs, .dir = dir, .e = e};
    int64_t start = now_ns();
    int rc;

    b.snapshot = snapshot_make();
    if (!b.snapshot)
        return err_nomem(e);
    rc = look(&b, may_block);
    place_release(&b.place);
    if (b.snapshot->listing)
        counter_add(&fs->counters, COUNT_LISTED, listing_count(b.snapshot->listing));
    if (rc != 0) {
        snapshot_put(fs, b.snapshot);
        return rc;
    }
    b.snapshot->until_ns = start + look_pause(fs, now_ns() - start);
    node_set_snapshot(fs, dir, b.snapshot);
    *out = b.snapshot;
    return 0;
}

/* Is what the directory showed lately still to be shown? */
static bool is_current(const struct snapshot *s, int64_t now)
{
    return s && now < s->until_ns &&
           (!s->gen || (!s->gen->stale && generation_fresh(s->gen, now)));
}

int tree_snapshot(struct fs *fs, struct node *dir, bool may_block,
                  struct snapshot **out, struct err *e)
{
    struct snapshot *s = node_snapshot(fs, dir);
    int64_t now = now_ns();
    int rc = 0;

    if (!is_current(s, now)) {
        snapshot_put(fs, s);
        rc = snapshot_new(fs, dir, may_block, &s, e);
        if (rc != 0)
            return rc;
    }
    if (s->gen)
        generation_used(fs, s->gen);
    *out = s;
    return 0;
}
