/* SPDX-License-Identifier: MIT */
/* fs/lookup.c - names to nodes, and the entries that the kernel gets for them. */
#include "fs/lookup.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "fs/report.h"

enum { TENSOR_MEMORY = 16 << 20 };

/* ---- entries ---- */

void entry_inside(struct fs *fs, struct generation *gen, enum inside kind,
                  uint32_t index, struct fuse_entry_param *out)
{
    bool live = inside_is_of_mount(kind) || kind == INSIDE_LATEST;

    out->ino = generation_ino(gen, kind, index);
    out->generation = gen->generation;
    out->attr_timeout = live ? 0 : FROZEN_SECONDS;
    out->entry_timeout = kind == INSIDE_LATEST ? MIRROR_SECONDS : FROZEN_SECONDS;
    if (fs_writable(fs)) /* what is written may take its name at any time */
        out->entry_timeout = 0;
    generation_ref(fs, gen, 1);
}

static struct node_spec spec_of(const struct node *dir,
                                const struct snapshot_entry *entry, const char *path)
{
    struct node_spec spec = {.name = entry->name, .path = path};

    switch (entry->kind) {
    case SNAPSHOT_FILE:
        spec.kind = NODE_FILE;
        break;
    case SNAPSHOT_LINK:
        spec.kind = NODE_LINK;
        return spec;
    case SNAPSHOT_FILE_DIR:
        spec.kind = NODE_FILE_DIR;
        spec.dir = dir->path;
        spec.file = entry->name;
        break;
    case SNAPSHOT_META:
    case SNAPSHOT_LATEST:
        spec.kind = entry->kind == SNAPSHOT_META ? NODE_META : NODE_LATEST;
        spec.path = dir->path;
        return spec;
    case SNAPSHOT_DIR:
    case SNAPSHOT_INSIDE:
    default:
        spec.kind = NODE_DIR;
        break;
    }
    spec.dev = entry->st.id.dev;
    spec.inode = entry->st.id.ino;
    return spec;
}

/* Attributes from the listing where it has them. */
static int outside_attr(struct fs *fs, const struct node *n,
                        const struct snapshot_entry *entry, struct stat *st,
                        struct err *e)
{
    if (n->kind == NODE_LINK || n->kind == NODE_LATEST || n->kind == NODE_META)
        return attr_node(fs, n, st, e);
    attr_entry(fs, n->path, entry->kind, &entry->st, st);
    return 0;
}

static int entry_outside(struct fs *fs, struct node *dir,
                         const struct snapshot_entry *entry,
                         struct fuse_entry_param *out, struct err *e)
{
    char path[PATH_MAX];
    struct node_spec spec;
    struct node *n;
    int rc = snapshot_path(dir, entry, path, sizeof path, e);

    if (rc < 0)
        return rc;
    spec = spec_of(dir, entry, path);
    TRY(node_intern(fs, dir, &spec, &n, e));
    rc = outside_attr(fs, n, entry, &out->attr, e);
    if (rc < 0) {
        node_forget(fs, n->ino, 1);
        return rc;
    }
    out->ino = n->ino;
    out->generation = n->generation;
    out->attr_timeout = out->entry_timeout = MIRROR_SECONDS;
    return 0;
}

int entry_of_snapshot(struct fs *fs, struct node *dir, const struct snapshot *snapshot,
                      const struct snapshot_entry *entry, struct fuse_entry_param *out,
                      struct err *e)
{
    int rc;

    memset(out, 0, sizeof *out);
    if (entry->kind != SNAPSHOT_INSIDE)
        return entry_outside(fs, dir, entry, out, e);
    rc = attr_inside(fs, snapshot->gen, entry->inside, entry->index, &out->attr, e);
    if (rc == 0)
        entry_inside(fs, snapshot->gen, entry->inside, entry->index, out);
    return rc;
}

void entry_brief(struct fs *fs, const struct node *dir, const struct snapshot *snapshot,
                 const struct snapshot_entry *entry, struct stat *st)
{
    char path[PATH_MAX];
    struct err e = {0};

    memset(st, 0, sizeof *st);
    if (entry->kind == SNAPSHOT_INSIDE) {
        if (attr_inside(fs, snapshot->gen, entry->inside, entry->index, st, &e) < 0)
            *st = (struct stat){
                .st_ino = generation_ino(snapshot->gen, entry->inside, entry->index),
                .st_mode = S_IFREG};
    } else if (entry->kind == SNAPSHOT_META || entry->kind == SNAPSHOT_LATEST) {
        attr_entry(fs, dir->path, entry->kind, &entry->st, st);
    } else if (snapshot_path(dir, entry, path, sizeof path, &e) == 0) {
        attr_entry(fs, path, entry->kind, &entry->st, st);
    }
}

void entry_forget(struct fs *fs, fuse_ino_t ino, uint64_t n)
{
    if (ino_is_inside(ino))
        generation_forget(fs, ino, n);
    else
        node_forget(fs, ino, n);
}

/* ---- answers ---- */

static int reply_entry(const struct request *r, const struct fuse_entry_param *entry)
{
    if (fuse_reply_entry(r->req, entry) < 0 && entry->ino) /* it was interrupted */
        entry_forget(r->fs, entry->ino, 1);
    return 0;
}

/* There is no such name, and for so long the kernel need not ask again. */
static int reply_absent(const struct request *r, double seconds)
{
    struct fuse_entry_param none = {.entry_timeout = fs_writable(r->fs) ? 0 : seconds};

    return reply_entry(r, &none);
}

static int reply_inside(const struct request *r, struct generation *gen,
                        enum inside kind, uint32_t index, struct err *e)
{
    struct fuse_entry_param entry = {0};

    TRY(attr_inside(r->fs, gen, kind, index, &entry.attr, e));
    entry_inside(r->fs, gen, kind, index, &entry);
    return reply_entry(r, &entry);
}

static int reply_tensor(const struct request *r, struct generation *gen,
                        enum inside kind, const struct tensor_info *t, struct err *e)
{
    struct fuse_entry_param entry = {0};

    TRY(attr_tensor(r->fs, kind, t, &entry.attr, e));
    entry_inside(r->fs, gen, kind, t->ord, &entry);
    return reply_entry(r, &entry);
}

/* ---- inside a checkpoint ---- */

int generation_ready(const struct request *r, struct generation *gen, struct err *e)
{
    int64_t now = now_ns();

    generation_used(r->fs, gen);
    if (gen->stale)
        return err_set(e, ESTALE, "%s: the checkpoint changed", gen->path);
    if (generation_fresh(gen, now))
        return 0;
    return r->may_block ? generation_refresh(r->fs, gen, e) : FS_LATER;
}

static int find_tensor(const struct request *r, struct generation *gen, bool npy,
                       struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    struct tensor_info t;
    int rc =
        a ? catalog_tensor_by_name(r->fs->catalog, gen->info.id, r->name, npy, a, &t, e)
          : err_nomem(e);

    if (rc < 0)
        return rc;
    return reply_tensor(r, gen, npy ? INSIDE_NPY : INSIDE_BARE, &t, e);
}

static int find_in_tree(const struct request *r, struct generation *gen, uint32_t dir,
                        struct err *e)
{
    struct tree_entry entry;

    TRY(catalog_tree_find(r->fs->catalog, gen->info.id, dir, r->name, &entry, e));
    return entry.dir ? reply_inside(r, gen, INSIDE_TREE, entry.dir, e)
                     : reply_inside(r, gen, INSIDE_NPY, entry.tensor, e);
}

const struct fixed_file *fixed_file(const struct generation *gen, enum inside dir,
                                    size_t i)
{
    static const struct fixed_file meta[] = {
        {"checkpoint.json", INSIDE_CHECKPOINT_JSON},
        {"counters.json", INSIDE_COUNTERS_JSON},
        {"last-error", INSIDE_LAST_ERROR},
        {"objects.json", INSIDE_OBJECTS_JSON},
    };
    static const struct fixed_file optimizer[] = {
        {"optimizer.safetensors", INSIDE_OPTIMIZER_FILE},
    };

    (void)gen;
    if (dir == INSIDE_OPTIMIZER)
        return i < ARRAY_SIZE(optimizer) ? &optimizer[i] : NULL;
    return i < ARRAY_SIZE(meta) ? &meta[i] : NULL;
}

/* A report that has to be made first: not on a thread that others need. */
static bool takes_time(const struct request *r, struct generation *gen,
                       enum inside kind)
{
    return !r->may_block && !report_made(gen, kind);
}

static const struct fixed_file *fixed_named(const struct generation *gen,
                                            enum inside dir, const char *name)
{
    const struct fixed_file *f;
    size_t i = 0;

    while ((f = fixed_file(gen, dir, i)) && strcmp(f->name, name) != 0)
        i++;
    return f;
}

static int find_fixed(const struct request *r, struct generation *gen, enum inside dir,
                      struct err *e)
{
    const struct fixed_file *f = fixed_named(gen, dir, r->name);

    if (!f)
        return err_set(e, ENOENT, "%s", r->name);
    return takes_time(r, gen, f->kind) ? FS_LATER : reply_inside(r, gen, f->kind, 0, e);
}

/* .unshard/latest of a checkpoint that has trackers beside it. */
static int find_latest(const struct request *r, struct generation *gen, struct err *e)
{
    CLEANUP_FREE char *target = tracker_of_generation(r->fs, gen);

    if (!target || gen->file)
        return reply_absent(r, MIRROR_SECONDS);
    return reply_inside(r, gen, INSIDE_LATEST, 0, e);
}

/* What the mount says is there in every generation, also in one that is no longer shown. */
static bool names_file_of_mount(const struct generation *gen, enum inside dir,
                                const char *name)
{
    const struct fixed_file *f =
        dir == INSIDE_META ? fixed_named(gen, dir, name) : NULL;

    return f && inside_is_of_mount(f->kind);
}

static int find_inside(struct request *r, struct generation *gen, struct err *e)
{
    enum inside dir = ino_kind(r->ino);
    int rc = names_file_of_mount(gen, dir, r->name) ? 0 : generation_ready(r, gen, e);

    if (rc != 0)
        return rc;
    switch (dir) {
    case INSIDE_TENSORS:
    case INSIDE_RAW:
        rc = find_tensor(r, gen, dir == INSIDE_TENSORS, e);
        break;
    case INSIDE_TREE:
        rc = find_in_tree(r, gen, ino_index(r->ino), e);
        break;
    case INSIDE_META:
        if (strcmp(r->name, "latest") == 0)
            return find_latest(r, gen, e);
        rc = find_fixed(r, gen, dir, e);
        break;
    case INSIDE_OPTIMIZER:
        rc = find_fixed(r, gen, dir, e);
        break;
    case INSIDE_NPY:
    case INSIDE_BARE:
    case INSIDE_MODEL:
    case INSIDE_OPTIMIZER_FILE:
    case INSIDE_CHECKPOINT_JSON:
    case INSIDE_OBJECTS_JSON:
    case INSIDE_COUNTERS_JSON:
    case INSIDE_LAST_ERROR:
    case INSIDE_LATEST:
    case INSIDE_OVERLAY:
    case INSIDE_INDEX:
    default:
        rc = -ENOTDIR;
        break;
    }
    return rc == -ENOENT ? reply_absent(r, FROZEN_SECONDS) : rc;
}

static int lookup_inside(struct request *r, struct err *e)
{
    struct generation *gen = generation_of_ino(r->fs, r->ino);
    int rc;

    if (!gen)
        return -ESTALE;
    rc = find_inside(r, gen, e);
    generation_unref(r->fs, gen, 1);
    return rc;
}

/* ---- outside ---- */

/*
 * In a checkpoint the kernel may believe for long that a name is absent, as long as it
 * can be told when that changes.
 */
static int reply_not_shown(const struct request *r, const struct snapshot *snapshot)
{
    struct generation *gen = snapshot->gen;
    bool told = gen && generation_note_absent(gen, r->name) && !gen->stale;

    return reply_absent(r, told ? FROZEN_SECONDS : MIRROR_SECONDS);
}

/*
 * What could not be read may have it: a program that asks whether a model is there is not
 * told that there is none.
 */
static int lookup_unknown(const struct request *r, const struct snapshot *snapshot,
                          struct err *e)
{
    const struct generation *gen = snapshot->gen;

    if (!gen || !gen->info.error)
        return reply_not_shown(r, snapshot);
    for (const char *const *own = tree_own_names; *own; own++)
        if (strcmp(*own, r->name) == 0)
            return err_set(e, EIO, "%s/%s: %s", gen->path, r->name, gen->info.error);
    return reply_not_shown(r, snapshot);
}

static int lookup_meta(struct request *r, struct node *meta, struct err *e)
{
    const struct snapshot_entry entry = {.kind = SNAPSHOT_LATEST, .name = "latest"};
    struct fuse_entry_param out = {0};
    int rc;

    if (strcmp(r->name, "latest") != 0)
        return reply_absent(r, MIRROR_SECONDS);
    rc = entry_outside(r->fs, meta, &entry, &out, e);
    if (rc == -ENOENT)
        return reply_absent(r, MIRROR_SECONDS);
    return rc < 0 ? rc : reply_entry(r, &out);
}

static int lookup_outside(struct request *r, struct err *e)
{
    struct node *dir = node_of_ino(r->fs, r->ino);
    const struct snapshot_entry *entry;
    struct fuse_entry_param out;
    struct snapshot *snapshot;
    int rc;

    if (!dir)
        return -ESTALE;
    if (dir->kind == NODE_META)
        return lookup_meta(r, dir, e);
    rc = tree_snapshot(r->fs, dir, r->may_block, &snapshot, e);
    if (rc != 0)
        return rc;
    entry = snapshot_find(snapshot, r->name);
    if (entry && entry->kind == SNAPSHOT_INSIDE &&
        takes_time(r, snapshot->gen, entry->inside)) {
        snapshot_put(r->fs, snapshot);
        return FS_LATER;
    }
    if (entry) {
        rc = entry_of_snapshot(r->fs, dir, snapshot, entry, &out, e);
        if (rc == 0)
            reply_entry(r, &out);
    } else {
        rc = lookup_unknown(r, snapshot, e);
    }
    snapshot_put(r->fs, snapshot);
    return rc;
}

int lookup_run(struct request *r, struct err *e)
{
    if (strlen(r->name) > NAME_MAX)
        return -ENAMETOOLONG;
    return ino_is_inside(r->ino) ? lookup_inside(r, e) : lookup_outside(r, e);
}
