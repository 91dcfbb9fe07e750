/* SPDX-License-Identifier: MIT */
/* fs/attr.c - attributes of nodes as stat(2) shows them. */
#include "fs/attr.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/arena.h"
#include "fs/overlay.h"
#include "fs/report.h"
#include "index/npy.h"

enum {
    /* cat, cp and Python's buffers follow it. A larger one spares them wake-ups of the
     * server, and costs who reads a header of a few bytes as much as it is larger: it is
     * for files of which that is no part worth naming (decision 026). */
    BLOCK_SIZE = 256 << 10,
    LARGE_BLOCK_SIZE = 1 << 20,
    LARGE_FILE = 64 << 20,
    TENSOR_MEMORY = 16 << 20,
    PERMISSIONS = 07777,
};

static mode_t plain_mode(const struct fs *fs, const struct attr *a)
{
    mode_t mode = a->mode & (fs_writable(fs) ? 0777 : 0555);

    if (S_ISLNK(a->type))
        return 0777;
    if (fs->bucket) /* that a view cannot be changed is said in words, at open */
        mode |= 0200;
    return mode & ~fs->options.umask;
}

static struct timespec time_of(int64_t ns)
{
    struct timespec t = {ns / 1000000000, ns % 1000000000};

    if (t.tv_nsec < 0) { /* before 1970 */
        t.tv_nsec += 1000000000;
        t.tv_sec--;
    }
    return t;
}

void attr_fill(const struct fs *fs, const struct attr *a, struct stat *st)
{
    bool large = a->tensors && a->size >= LARGE_FILE;

    *st = (struct stat){
        .st_ino = a->ino,
        .st_mode = a->type | plain_mode(fs, a),
        .st_nlink = a->links,
        .st_uid = fs->options.has_uid ? fs->options.uid : a->uid,
        .st_gid = fs->options.has_gid ? fs->options.gid : a->gid,
        .st_size = (off_t)a->size,
        .st_blksize = large && !fs->store->remote ? LARGE_BLOCK_SIZE : BLOCK_SIZE,
        .st_blocks = (blkcnt_t)(a->size / 512 + (a->size % 512 > 0)),
        .st_atim = time_of(a->atime_ns ? a->atime_ns : a->mtime_ns),
        .st_mtim = time_of(a->mtime_ns),
        .st_ctim = time_of(a->ctime_ns ? a->ctime_ns : a->mtime_ns),
    };
}

uint64_t attr_path_ino(const char *path, const char *name, uint64_t dev, uint64_t inode)
{
    uint64_t identity[] = {dev, inode, XXH3_64bits(name, strlen(name))};
    uint64_t seed = XXH3_64bits(identity, sizeof identity);
    uint64_t ino = XXH3_64bits_withSeed(path, strlen(path), seed) & ~(1ull << 63);

    return MAX(ino, 2ull); /* 0 and 1 mean something else to many programs */
}

/* ---- inside a checkpoint ---- */

/* Names of what every checkpoint has, for inode numbers. */
static const char *const inside_names[] = {
    [INSIDE_TENSORS] = "tensors",
    [INSIDE_TREE] = "tree",
    [INSIDE_RAW] = "raw",
    [INSIDE_OPTIMIZER] = "optimizer",
    [INSIDE_META] = ".unshard",
    [INSIDE_MODEL] = "model.safetensors",
    [INSIDE_OPTIMIZER_FILE] = "optimizer/optimizer.safetensors",
    [INSIDE_CHECKPOINT_JSON] = ".unshard/checkpoint.json",
    [INSIDE_OBJECTS_JSON] = ".unshard/objects.json",
    [INSIDE_COUNTERS_JSON] = ".unshard/counters.json",
    [INSIDE_LAST_ERROR] = ".unshard/last-error",
    [INSIDE_LATEST] = ".unshard/latest",
    [INSIDE_OVERLAY] = "hf",
    [INSIDE_INDEX] = "model.safetensors.index.json",
};

/* What all of a checkpoint's own directories and generated files have in common. */
static struct attr generation_attr(const struct generation *gen, enum inside kind,
                                   uint32_t index)
{
    bool dir = inside_is_dir(kind);
    char path[PATH_MAX + NAME_MAX + 2];

    snprintf(path, sizeof path, "%s/%s", gen->path, gen->file ? gen->file : "");
    return (struct attr){
        .ino = attr_path_ino(path, inside_names[kind], 0, index),
        .type = dir ? S_IFDIR : S_IFREG,
        .mode =
            dir ? gen->dir.mode | (gen->dir.mode & 0444) >> 2 : gen->dir.mode & 0444,
        .links = dir ? 2 : 1,
        .uid = gen->dir.uid,
        .gid = gen->dir.gid,
        .mtime_ns = gen->info.mtime_ns,
    };
}

/*
 * Who may not read the source's files must not read them in our reports of them. Of a
 * scan that failed there is only the reason.
 */
static struct attr report_attr(const struct generation *gen, enum inside kind)
{
    struct attr a = generation_attr(gen, kind, 0);

    if (gen->info.error || !inside_is_report(kind))
        return a;
    a.mode = gen->info.mode & 0444;
    a.uid = gen->info.uid;
    a.gid = gen->info.gid;
    return a;
}

int attr_tensor(struct fs *fs, enum inside kind, const struct tensor_info *t,
                struct stat *st, struct err *e)
{
    struct attr a = {.ino = t->ino + (kind == INSIDE_NPY),
                     .size = t->bytes,
                     .type = S_IFREG,
                     .mode = t->mode,
                     .tensors = true,
                     .links = kind == INSIDE_NPY ? 2 : 1, /* tensors/ and tree/ */
                     .uid = t->uid,
                     .gid = t->gid,
                     .mtime_ns = t->mtime_ns};

    if (kind == INSIDE_NPY) {
        CLEANUP(buf_release) struct buf header = {0};

        TRY(npy_header(t->dtype, &t->shape, &header, e));
        a.size += header.len;
    }
    attr_fill(fs, &a, st);
    return 0;
}

static int attr_tensor_at(struct fs *fs, const struct generation *gen, enum inside kind,
                          uint32_t ord, struct stat *st, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    struct tensor_info t;
    int rc =
        a ? catalog_tensor(fs->catalog, gen->info.id, ord, a, &t, e) : err_nomem(e);

    return rc < 0 ? rc : attr_tensor(fs, kind, &t, st, e);
}

static int attr_view(struct fs *fs, const struct generation *gen, enum view_kind kind,
                     struct stat *st, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    struct view_info v;
    int rc = a ? view_get(fs->catalog, gen->info.id, kind, fs->options.prefix, a, &v, e)
               : err_nomem(e);

    if (rc < 0)
        return rc;
    attr_fill(fs,
              &(struct attr){.ino = v.ino,
                             .size = v.size,
                             .type = S_IFREG,
                             .mode = v.mode,
                             .tensors = true,
                             .links = 1,
                             .uid = v.uid,
                             .gid = v.gid,
                             .mtime_ns = v.mtime_ns},
              st);
    return 0;
}

static uint64_t latest_size(struct fs *fs, const struct generation *gen)
{
    CLEANUP_FREE char *target = tracker_of_generation(fs, gen);

    return target ? strlen("../") + strlen(target) : 0;
}

/* A file that was laid over: its own rights, one inode a checkpoint. */
static struct attr overlay_attr(const struct fs *fs, const struct generation *gen,
                                uint32_t index)
{
    const struct entry_stat *st = &overlay_at(fs->overlay, index)->st;
    struct attr a = generation_attr(gen, INSIDE_OVERLAY, index);

    a.size = st->id.size;
    a.mode = st->mode & PERMISSIONS & 0555;
    a.uid = st->uid;
    a.gid = st->gid;
    a.mtime_ns = st->id.mtime_ns;
    return a;
}

void attr_inside_brief(const struct fs *fs, const struct generation *gen,
                       enum inside kind, struct stat *st)
{
    struct attr a = report_attr(gen, kind);

    if (kind == INSIDE_LATEST)
        a.type = S_IFLNK;
    attr_fill(fs, &a, st);
}

int attr_inside(struct fs *fs, struct generation *gen, enum inside kind, uint32_t index,
                struct stat *st, struct err *e)
{
    struct attr a;
    int rc = 0;

    switch (kind) {
    case INSIDE_NPY:
    case INSIDE_BARE:
        return attr_tensor_at(fs, gen, kind, index, st, e);
    case INSIDE_MODEL:
        return attr_view(fs, gen, VIEW_MODEL, st, e);
    case INSIDE_OPTIMIZER_FILE:
        return attr_view(fs, gen, VIEW_OPTIMIZER, st, e);
    case INSIDE_TENSORS:
    case INSIDE_TREE:
    case INSIDE_RAW:
    case INSIDE_OPTIMIZER:
    case INSIDE_META:
        a = generation_attr(gen, kind, index);
        break;
    case INSIDE_OVERLAY:
        a = overlay_attr(fs, gen, index);
        break;
    case INSIDE_LATEST:
        a = generation_attr(gen, kind, 0);
        a.type = S_IFLNK;
        a.size = latest_size(fs, gen);
        break;
    case INSIDE_CHECKPOINT_JSON:
    case INSIDE_OBJECTS_JSON:
    case INSIDE_COUNTERS_JSON:
    case INSIDE_LAST_ERROR:
    case INSIDE_INDEX:
    default:
        a = report_attr(gen, kind);
        rc = report_size(fs, gen, kind, &a.size, e);
        break;
    }
    if (rc == 0)
        attr_fill(fs, &a, st);
    return rc;
}

/* ---- outside ---- */

static mode_t type_of(enum snapshot_kind kind)
{
    switch (kind) {
    case SNAPSHOT_DIR:
    case SNAPSHOT_FILE_DIR:
    case SNAPSHOT_META:
        return S_IFDIR;
    case SNAPSHOT_LINK:
    case SNAPSHOT_LATEST:
        return S_IFLNK;
    case SNAPSHOT_FILE:
    case SNAPSHOT_INSIDE:
    default:
        return S_IFREG;
    }
}

/*
 * Directories have the number of their path. Files also of what they are, so that a
 * file put in the place of another is another file to who watches inode numbers.
 */
void attr_entry(struct fs *fs, const char *path, enum snapshot_kind kind,
                const struct entry_stat *entry, struct stat *st)
{
    static const char *const names[] = {
        [SNAPSHOT_DIR] = "",          [SNAPSHOT_FILE] = "",
        [SNAPSHOT_LINK] = "->",       [SNAPSHOT_FILE_DIR] = "/",
        [SNAPSHOT_META] = ".unshard", [SNAPSHOT_LATEST] = "latest",
        [SNAPSHOT_INSIDE] = ""};
    bool file = kind == SNAPSHOT_FILE;
    mode_t type = type_of(kind);
    mode_t mode = entry->mode & PERMISSIONS;

    if (kind == SNAPSHOT_FILE_DIR)
        mode |= (mode & 0444) >> 2; /* who may read it may look inside */
    attr_fill(
        fs,
        &(struct attr){.ino = attr_path_ino(path, names[kind], file ? entry->id.dev : 0,
                                            file ? entry->id.ino : 0),
                       .size = file ? entry->id.size : 0,
                       .type = type,
                       .mode = mode,
                       .links = S_ISDIR(type) ? 2 : 1,
                       .uid = entry->uid,
                       .gid = entry->gid,
                       .mtime_ns = fs->store->remote && entry->kind == ENTRY_DIR
                                       ? fs->begun_ns
                                       : entry->id.mtime_ns,
                       /* Of an object it is a mark of its version, and no time. */
                       .ctime_ns = fs->store->remote ? 0 : entry->id.ctime_ns,
                       .atime_ns = entry->atime_ns},
        st);
}

static enum snapshot_kind snapshot_kind_of(const struct node *n)
{
    switch (n->kind) {
    case NODE_FILE_DIR:
        return SNAPSHOT_FILE_DIR;
    case NODE_FILE:
        return SNAPSHOT_FILE;
    case NODE_LINK:
        return SNAPSHOT_LINK;
    case NODE_META:
        return SNAPSHOT_META;
    case NODE_LATEST:
        return SNAPSHOT_LATEST;
    case NODE_DIR:
    default:
        return SNAPSHOT_DIR;
    }
}

/* Prefixes have no attributes: asking for some would list each of them. */
static void remote_dir(const struct fs *fs, const struct node *n,
                       struct entry_stat *out)
{
    *out = (struct entry_stat){
        .kind = ENTRY_DIR,
        .mode = 0755,
        .uid = geteuid(),
        .gid = getegid(),
        .id = {.dev = n->dev, .ino = n->inode, .mtime_ns = fs->begun_ns}};
}

int attr_node(struct fs *fs, const struct node *n, struct stat *st, struct err *e)
{
    struct entry_stat entry;
    int rc = 0;

    if (fs->store->remote && n->kind == NODE_DIR)
        remote_dir(fs, n, &entry);
    else
        rc = fs->store->ops->stat(fs->store, n->path, &entry, e);
    if (rc < 0)
        return rc;
    if ((n->kind == NODE_FILE || n->kind == NODE_FILE_DIR) !=
            (entry.kind == ENTRY_FILE) ||
        (n->inode && !node_stands_for(n, entry.id.dev, entry.id.ino)))
        return err_set(e, ESTALE, "%s: is another file by now", n->path);
    attr_entry(fs, n->path, snapshot_kind_of(n), &entry, st);
    if (n->kind == NODE_LINK || n->kind == NODE_LATEST) {
        char text[PATH_MAX];

        rc = attr_link_text(fs, n, text, sizeof text, e);
        st->st_size = rc < 0 ? 0 : (off_t)strlen(text);
    }
    return rc;
}

int attr_link_text(struct fs *fs, const struct node *n, char *dst, size_t size,
                   struct err *e)
{
    CLEANUP_FREE char *target = NULL;
    bool below;
    int len;

    if (n->kind == NODE_LINK)
        return fs->store->ops->readlink(fs->store, n->path, dst, size, e);
    target = tracker_target(fs, n->path);
    if (!target)
        return err_set(e, ENOENT, "%s: no tracker names a step any more", n->path);
    below = n->parent && n->parent->kind == NODE_META; /* in .unshard */
    len = snprintf(dst, size, "%s%s", below ? "../" : "", target);
    return len < 0 || (size_t)len >= size ? err_set(e, ENAMETOOLONG, "%s", n->path) : 0;
}
