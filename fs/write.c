/* SPDX-License-Identifier: MIT */
/* fs/write.c - requests that change something: they change a stage, never the source. */
#include "fs/write.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "base/arena.h"
#include "base/fsutil.h"
#include "base/log.h"
#include "fs/handle.h"
#include "fs/lookup.h"
#include "fs/node.h"
#include "fs/plain.h"
#include "fs/save.h"
#include "fs/slot.h"
#include "fs/staged.h"
#include "index/formats/format.h"
#include "save/incoming.h"

enum { TENSOR_MEMORY = 16 << 20, COPY_BLOCK = 1 << 20, XATTR_MAX = 256 };

/* ---- where ---- */

int where_refused(struct err *e, const char *what)
{
    err_set(e, EROFS, "%s: nothing can be written here", what);
    return err_hint(e, "make a directory for a new checkpoint: mkdir DIR");
}

static int check_writable(const struct fs *fs, const struct slot *slot, struct err *e)
{
    CLEANUP(buf_release) struct buf names = {0};
    const struct format_writer *w;

    if (slot->info.error)
        return err_set(e, EROFS, "%s: %s", slot->path, slot->info.error);
    if (fs->mapping || fs->options.prefix == PREFIX_DROP) {
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
static int check_current(struct fs *fs, struct slot *slot, struct err *e)
{
    if (is_staged(fs, slot->path))
        return 0;
    scanner_suspect(fs->scanner, slot->path, slot->file);
    return slot_refresh(fs, slot, e);
}

/* With the lock: the stage of a checkpoint that is there, made if need be. */
static int stage_of_slot(struct fs *fs, struct slot *slot, struct stage **out,
                         struct err *e)
{
    int rc;

    do {
        *out = stage_at(fs, slot->path);
    } while (*out && !stage_wait(fs, *out));
    if (*out)
        return 0;
    rc = check_writable(fs, slot, e);
    return rc < 0 ? rc : stage_new(fs, slot->path, slot, out, e);
}

/* The fixed directory (tensors/, raw/, ...) of a stage that changes a checkpoint. */
static int fixed_dir(struct fs *fs, struct stage *s, enum inside kind,
                     struct staged **out, struct err *e)
{
    const char *name = staged_fixed_name(kind);
    int rc;

    *out = staged_find(s->root, name);
    if (*out) {
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
    stages_unlock(fs);
    return -ESTALE;
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
        rc = check_current(fs, slot, e);
    if (rc == 0) {
        stages_lock(fs);
        rc = stage_of_slot(fs, slot, &s, e);
        if (rc == 0)
            rc = fixed_dir(fs, s, ino_kind(ino), &out->dir, e);
        if (rc < 0)
            stages_unlock(fs);
    }
    slot_unref(fs, slot, 1);
    return rc;
}

/* What the directory shows, with a checkpoint that is as the source has it now. */
static int shown_current(struct fs *fs, struct node *n, struct shown **out,
                         struct err *e)
{
    int rc = tree_shown(fs, n, true, out, e);

    if (rc != 0 || !(*out)->slot || check_current(fs, (*out)->slot, e) == 0)
        return rc;
    shown_put(fs, *out);
    *e = (struct err){0};
    nodes_look_again(fs, n->path);
    return tree_shown(fs, n, true, out, e);
}

/* With the lock held when it returns 0. */
int where_find(struct fs *fs, fuse_ino_t ino, struct where *out, struct err *e)
{
    struct shown *shown;
    struct stage *s;
    int rc;

    *out = (struct where){.remove = out->remove};
    if (ino_is_staged(ino))
        return where_staged(fs, ino, out);
    if (ino_is_inside(ino))
        return where_inside(fs, ino, out, e);
    out->node = node_of_ino(fs, ino);
    if (!out->node)
        return -ESTALE;
    if (out->node->kind != NODE_DIR)
        return where_refused(e, out->node->path);
    rc = shown_current(fs, out->node, &shown, e);
    if (rc != 0)
        return rc;
    stages_lock(fs);
    if (shown->slot) {
        rc = stage_of_slot(fs, shown->slot, &s, e);
        if (rc == 0)
            out->dir = s->root;
        else
            stages_unlock(fs);
    }
    shown_put(fs, shown);
    return rc;
}

static int reply_entry(const struct request *r, const struct fuse_entry_param *entry)
{
    if (fuse_reply_entry(r->req, entry) < 0)
        entry_forget(r->fs, entry->ino, 1);
    return 0;
}

static void own(const struct request *r, struct staged *n)
{
    const struct fuse_ctx *c = fuse_req_ctx(r->req);

    n->uid = c->uid;
    n->gid = c->gid;
}

/* ---- making ---- */

static bool source_has(struct fs *fs, struct node *dir, const char *name)
{
    struct shown *shown;
    struct err e = {0};
    bool has = false;

    if (tree_shown(fs, dir, true, &shown, &e) == 0) {
        has = shown_find(shown, name) != NULL;
        shown_put(fs, shown);
    }
    return has;
}

/* A new directory of the source: a checkpoint in the making. With the lock. */
static int new_stage(struct request *r, struct node *dir, struct staged **out,
                     struct err *e)
{
    struct stage *s;
    char path[PATH_MAX];
    int rc = store_join(dir->path, r->name, path, sizeof path) < 0 ? -ENAMETOOLONG : 0;

    if (rc == 0 && stage_at(r->fs, path))
        rc = -EEXIST;
    if (rc == 0)
        rc = stage_new(r->fs, path, NULL, &s, e);
    if (rc == 0) {
        s->root->mode = r->mode & 07777;
        *out = s->root;
    }
    return rc;
}

/* With the lock: something of this name that was hidden makes room. */
static int make_room(struct fs *fs, struct staged *dir, const char *name)
{
    struct staged *n = staged_find(dir, name);

    if (n && n->kind != STAGED_GONE)
        return -EEXIST;
    if (n)
        staged_remove(fs, n);
    return 0;
}

int write_mkdir(struct request *r, struct err *e)
{
    struct fuse_entry_param entry;
    struct staged *n = NULL;
    struct where w = {0};
    int rc = where_find(r->fs, r->ino, &w, e);

    if (rc < 0)
        return rc;
    if (w.dir)
        rc = make_room(r->fs, w.dir, r->name);
    if (rc == 0)
        rc = w.dir ? staged_add(r->fs, w.dir, r->name, STAGED_DIR, r->mode, &n, e)
                   : new_stage(r, w.node, &n, e);
    if (rc == 0) {
        own(r, n);
        staged_entry(n, &entry);
    }
    stages_unlock(r->fs);
    return rc < 0 ? rc : reply_entry(r, &entry);
}

static int reply_created(struct request *r, struct staged_handle *h,
                         const struct fuse_entry_param *entry)
{
    opened_add(&r->fs->opened, &h->opened);
    counter_add(&r->fs->counters, COUNT_OPENS, 1);
    r->fi.fh = (uintptr_t)h;
    r->fi.direct_io = 1;
    r->fi.noflush = 1; /* judged at the last release: a flush of a part is no error */
    if (entry ? fuse_reply_create(r->req, entry, &r->fi) < 0
              : fuse_reply_open(r->req, &r->fi) < 0) {
        if (entry)
            entry_forget(r->fs, entry->ino, 1);
        opened_end(r->fs, &h->opened);
    }
    return 0;
}

int write_reply_plain(struct request *r, int fd, const struct fuse_entry_param *entry)
{
    struct staged_handle *h = staged_plain(fd);

    if (h)
        return reply_created(r, h, entry);
    close(fd);
    if (entry)
        entry_forget(r->fs, entry->ino, 1);
    return -ENOMEM;
}

/* With the lock. */
static int new_file(struct request *r, struct staged *dir, const char *name,
                    struct staged **out, struct err *e)
{
    int rc = make_room(r->fs, dir, name);

    if (rc == 0)
        rc = staged_add(r->fs, dir, name, STAGED_FILE, r->mode, out, e);
    if (rc == 0)
        own(r, *out);
    return rc;
}

int write_create(struct request *r, struct err *e)
{
    struct staged_handle *h = NULL;
    struct fuse_entry_param entry;
    struct staged *n;
    struct where w = {0};
    int rc = where_find(r->fs, r->ino, &w, e);

    if (rc < 0)
        return rc;
    if (!w.dir) {
        stages_unlock(r->fs);
        return plain_create(r, w.node, e);
    }
    rc = new_file(r, w.dir, r->name, &n, e);
    if (rc == 0) {
        rc = staged_open_handle(r->fs, n, r->fi.flags | O_CREAT | O_TRUNC, &h, e);
        if (rc < 0)
            staged_remove(r->fs, n);
        else
            staged_entry(n, &entry);
    }
    stages_unlock(r->fs);
    return rc < 0 ? rc : reply_created(r, h, &entry);
}

/* ---- opening ---- */

/* The name in the checkpoint's directory that a node has; -EROFS: it is none to write. */
static int name_of(struct fs *fs, struct slot *slot, fuse_ino_t ino, enum inside *dir,
                   char name[NAME_MAX + 1], struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    enum inside kind = ino_kind(ino);
    struct tensor_info t;
    int rc;

    *dir = 0;
    if (kind == INSIDE_MODEL) {
        snprintf(name, NAME_MAX + 1, "%s",
                 slot->info.adapter ? "adapter_model.safetensors"
                                    : "model.safetensors");
        return 0;
    }
    if (kind == INSIDE_OPTIMIZER_FILE) {
        *dir = INSIDE_OPTIMIZER;
        snprintf(name, NAME_MAX + 1, "optimizer.safetensors");
        return 0;
    }
    if (kind != INSIDE_NPY && kind != INSIDE_BARE)
        return where_refused(e, slot->path);
    rc = a ? catalog_tensor(fs->catalog, slot->info.id, ino_index(ino), a, &t, e)
           : err_nomem(e);
    *dir = kind == INSIDE_NPY ? INSIDE_TENSORS : INSIDE_RAW;
    if (rc == 0)
        snprintf(name, NAME_MAX + 1, "%s", kind == INSIDE_NPY ? t.name_npy : t.name);
    return rc;
}

/* What is read until now goes into the spool: some of it will be written over. */
static int copy_up(struct fs *fs, fuse_ino_t ino, int fd, struct err *e)
{
    CLEANUP_FREE char *block = malloc(COPY_BLOCK);
    struct handle *h = NULL;
    int rc = block ? handle_open(fs, ino, &h, e) : err_nomem(e);
    uint64_t at = 0;
    size_t got = 1;

    while (rc == 0 && got > 0) {
        rc = handle_read(h, at, COPY_BLOCK, block, &got, e);
        if (rc == 0 && got > 0 && write_all(fd, block, got, e) < 0)
            rc = -e->code;
        at += got;
    }
    handle_close(fs, h);
    return rc;
}

/* With the lock: the staged file for a node of the source or of a checkpoint. */
static int cover(struct request *r, struct stage *s, enum inside dir, const char *name,
                 struct staged **out, struct err *e)
{
    struct staged *parent = s->root;
    int rc = dir ? fixed_dir(r->fs, s, dir, &parent, e) : 0;

    if (rc == 0) {
        *out = staged_find(parent, name);
        if (*out && (*out)->kind == STAGED_FILE)
            return 0;
        r->mode = 0644;
        rc = new_file(r, parent, name, out, e);
    }
    return rc;
}

static int open_over(struct request *r, struct slot *slot, enum inside dir,
                     const char *name, struct err *e)
{
    bool whole = (r->fi.flags & O_TRUNC) != 0;
    struct staged_handle *h = NULL;
    struct staged *n = NULL;
    struct stage *s;
    int rc;

    stages_lock(r->fs);
    rc = stage_of_slot(r->fs, slot, &s, e);
    if (rc == 0)
        rc = cover(r, s, dir, name, &n, e);
    if (rc == 0)
        rc = staged_open_handle(r->fs, n, r->fi.flags | O_CREAT, &h, e);
    stages_unlock(r->fs);
    if (rc == 0 && !whole)
        rc = copy_up(r->fs, r->ino, h->fd, e);
    if (rc < 0 && h)
        staged_drop(r->fs, h);
    if (rc < 0)
        return rc;
    stages_lock(r->fs);
    if (n->stage && !n->covers)
        staged_cover(r->fs, n, r->ino);
    stages_unlock(r->fs);
    return reply_created(r, h, NULL);
}

/* A side file of a checkpoint, or a file elsewhere in the source. */
static int open_side(struct request *r, struct err *e)
{
    const struct node *n = node_of_ino(r->fs, r->ino);
    struct slot *slot = n && n->parent ? node_slot(r->fs, n->parent) : NULL;
    int rc;

    if (!n)
        return -ESTALE;
    if (n->kind != NODE_FILE)
        return -EISDIR;
    if (slot && check_current(r->fs, slot, e) < 0) {
        slot_unref(r->fs, slot, 1);
        return -e->code;
    }
    rc = slot ? open_over(r, slot, 0, n->name, e) : plain_open(r, n, e);
    slot_unref(r->fs, slot, 1);
    return rc;
}

static int open_inside(struct request *r, struct err *e)
{
    struct slot *slot = slot_of_ino(r->fs, r->ino);
    char name[NAME_MAX + 1];
    enum inside dir;
    int rc = slot ? 0 : -ESTALE;

    if (rc == 0)
        rc = slot_ready(r, slot, e);
    if (rc == 0)
        rc = check_current(r->fs, slot, e);
    if (rc == 0)
        rc = name_of(r->fs, slot, r->ino, &dir, name, e);
    if (rc == 0)
        rc = open_over(r, slot, dir, name, e);
    slot_unref(r->fs, slot, 1);
    return rc;
}

int write_open(struct request *r, struct err *e)
{
    bool writes = (r->fi.flags & O_ACCMODE) != O_RDONLY || (r->fi.flags & O_TRUNC);
    struct staged_handle *h = NULL;
    struct staged *n;
    int rc;

    stages_lock(r->fs);
    n = staged_of_ino(r->fs, r->ino);
    if (n && n->stage && writes && !stage_wait(r->fs, n->stage))
        n = NULL;
    else if (n)
        n = staged_of_ino(r->fs, r->ino);
    rc = !n || !n->stage          ? -ESTALE
         : n->kind != STAGED_FILE ? -EISDIR
                                  : staged_open_handle(r->fs, n, r->fi.flags, &h, e);
    stages_unlock(r->fs);
    if (rc == 0)
        return reply_created(r, h, NULL);
    if (n || ino_is_staged(r->ino))
        return rc;
    if (!writes)
        return STAGED_NONE;
    r->may_block = true;
    return ino_is_inside(r->ino) ? open_inside(r, e) : open_side(r, e);
}

/* ---- bytes ---- */

/* Is the header whole by now? Then it is judged, and room is reserved for all of it. */
static int judge(struct request *r, struct staged_handle *h, struct err *e)
{
    uint64_t size;
    int rc = incoming_judge(h->fd, h->node->prefix, &size, e);

    if (rc <= 0)
        return rc;
    h->node->checked = true;
    if (fallocate(h->fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)size) < 0 &&
        (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
        return err_set(e, errno, "%s: %" PRIu64 " bytes: %s", h->node->name, size,
                       strerror(errno));
    (void)r;
    return 0;
}

static bool is_judged(const struct staged *n)
{
    char path[PATH_MAX];

    return n->stage && !n->checked && staged_path(n, path, sizeof path) == 0 &&
           incoming_kind(path) == INCOMING_SAFETENSORS;
}

static const char *name_shown(const struct staged_handle *h)
{
    return h->node ? h->node->name : "a file of the source";
}

int write_bytes(struct request *r, const char *data, struct err *e)
{
    struct staged_handle *h = staged_handle_of(&r->fi);
    size_t done = 0;
    bool look;

    if (!h || h->fd < 0)
        return -EROFS;
    while (done < r->size) {
        ssize_t n = pwrite(h->fd, data + done, r->size - done, r->off + (off_t)done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_set(e, errno, "%s: %s", name_shown(h), strerror(errno));
        done += (size_t)n;
    }
    if (!h->node) {
        fuse_reply_write(r->req, done);
        return 0;
    }
    stages_lock(r->fs);
    if ((uint64_t)r->off <= h->node->prefix)
        h->node->prefix = MAX(h->node->prefix, (uint64_t)r->off + done);
    if (h->node->stage)
        stage_touch(h->node->stage);
    look = is_judged(h->node);
    stages_unlock(r->fs);
    if (look && judge(r, h, e) < 0)
        return err_wrap(e, "%s", h->node->name);
    fuse_reply_write(r->req, done);
    return 0;
}

int write_fallocate(struct request *r, off_t len, struct err *e)
{
    struct staged_handle *h = staged_handle_of(&r->fi);

    if (!h || h->fd < 0)
        return -EROFS;
    if (r->flags & ~(unsigned)FALLOC_FL_KEEP_SIZE)
        return -EOPNOTSUPP;
    if (fallocate(h->fd, (int)r->flags, r->off, len) < 0)
        return err_set(e, errno, "%s: %s", name_shown(h), strerror(errno));
    fuse_reply_err(r->req, 0);
    return 0;
}

int write_fsync(struct request *r, struct err *e)
{
    struct staged_handle *h = staged_handle_of(&r->fi);

    if (h && h->fd >= 0 && fsync(h->fd) < 0)
        return err_set(e, errno, "%s: %s", name_shown(h), strerror(errno));
    fuse_reply_err(r->req, 0);
    return 0;
}

int write_fsyncdir(struct request *r, struct err *e)
{
    struct slot *slot = NULL;
    struct staged *dir;
    struct stage *s;
    int rc = 0;

    if (!ino_is_staged(r->ino)) {
        struct node *n = ino_is_inside(r->ino) ? NULL : node_of_ino(r->fs, r->ino);

        slot = n ? node_slot(r->fs, n) : slot_of_ino(r->fs, r->ino);
    }
    stages_lock(r->fs);
    dir = staged_dir_of(r->fs, r->ino, slot);
    s = dir ? dir->stage : NULL;
    if (s && stage_wait(r->fs, s))
        rc = save_publish(r->fs, s, e);
    stages_unlock(r->fs);
    slot_unref(r->fs, slot, 1);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

/* ---- attributes ---- */

static int set_size(struct staged *n, int fd, uint64_t size, struct err *e)
{
    CLEANUP_FD int own_fd = fd < 0 ? staged_open_spool(n, O_RDWR) : -1;
    struct stat st;

    if (fd < 0)
        fd = own_fd;
    if (fd < 0 || fstat(fd, &st) < 0)
        return err_set(e, EIO, "%s: cannot be opened", n->name);
    if (ftruncate(fd, (off_t)size) < 0)
        return err_set(e, errno, "%s: %s", n->name, strerror(errno));
    /* Told now rather than in the middle of writing it. */
    if (size > (uint64_t)st.st_size &&
        fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)size) < 0 &&
        (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
        err_set(e, errno, "%s: %" PRIu64 " bytes: %s", n->name, size, strerror(errno));
        if (ftruncate(fd, st.st_size) < 0)
            return -e->code;
        return -e->code;
    }
    n->prefix = MIN(n->prefix, size);
    if (size == 0)
        n->checked = false;
    return 0;
}

static void set_times(struct staged *n, const struct stat *attr, int to_set)
{
    struct timespec t[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_OMIT}};
    CLEANUP_FD int fd = n->kind == STAGED_FILE ? staged_open_spool(n, O_RDONLY) : -1;

    if (to_set & FUSE_SET_ATTR_ATIME)
        t[0] = attr->st_atim;
    if (to_set & FUSE_SET_ATTR_MTIME)
        t[1] = attr->st_mtim;
    if (to_set & FUSE_SET_ATTR_ATIME_NOW)
        t[0].tv_nsec = UTIME_NOW;
    if (to_set & FUSE_SET_ATTR_MTIME_NOW)
        t[1].tv_nsec = UTIME_NOW;
    if (fd >= 0)
        futimens(fd, t);
    else if (to_set & FUSE_SET_ATTR_MTIME)
        n->mtime = attr->st_mtim;
}

static int set_attr(struct staged *n, int fd, const struct stat *attr, int to_set,
                    struct err *e)
{
    if (to_set & FUSE_SET_ATTR_SIZE) {
        if (n->kind != STAGED_FILE)
            return -EISDIR;
        if (set_size(n, fd, (uint64_t)attr->st_size, e) < 0)
            return -e->code;
    }
    if (to_set & FUSE_SET_ATTR_MODE)
        n->mode = attr->st_mode & 07777;
    if (to_set & FUSE_SET_ATTR_UID)
        n->uid = attr->st_uid;
    if (to_set & FUSE_SET_ATTR_GID)
        n->gid = attr->st_gid;
    set_times(n, attr, to_set);
    if (n->stage)
        stage_touch(n->stage);
    return 0;
}

/* Directories of a checkpoint are as the source's: programs that copy times go on. */
static bool is_harmless(const struct request *r, int to_set)
{
    const struct node *n;

    if (to_set & FUSE_SET_ATTR_SIZE)
        return false;
    if (ino_is_inside(r->ino))
        return inside_is_dir(ino_kind(r->ino));
    n = node_of_ino(r->fs, r->ino);
    return n && node_is_dir(n);
}

/* A file or directory of the source that is no checkpoint's, or NULL. */
static const struct node *plain_node(const struct request *r)
{
    struct node *n = ino_is_inside(r->ino) ? NULL : node_of_ino(r->fs, r->ino);
    struct slot *slot = n ? node_slot(r->fs, n) : NULL;

    if (n && !slot && n->parent)
        slot = node_slot(r->fs, n->parent);
    slot_unref(r->fs, slot, 1);
    return !slot && n && (n->kind == NODE_FILE || n->kind == NODE_DIR) ? n : NULL;
}

/* Of what is not staged; the caller answers with the attributes as they are then. */
static int set_other(struct request *r, int fd, const struct stat *attr, int to_set,
                     struct err *e)
{
    const struct node *n = plain_node(r);
    int rc;

    if (n || fd >= 0) {
        rc = plain_setattr(r, n, fd, attr, to_set, e);
        return rc < 0 ? rc : STAGED_NONE;
    }
    if (is_harmless(r, to_set))
        return STAGED_NONE;
    return err_set(e, EROFS, "what is published changes by writing it anew only");
}

int write_setattr(struct request *r, const struct stat *attr, int to_set, struct err *e)
{
    struct staged_handle *h = staged_handle_of(&r->fi);
    struct staged *n;
    struct stat st;
    int rc;

    stages_lock(r->fs);
    n = h ? h->node : staged_of_ino(r->fs, r->ino);
    if (!n) {
        stages_unlock(r->fs);
        return set_other(r, h ? h->fd : -1, attr, to_set, e);
    }
    rc = set_attr(n, h ? h->fd : -1, attr, to_set, e);
    staged_attr(n, &st);
    stages_unlock(r->fs);
    if (rc == 0)
        fuse_reply_attr(r->req, &st, 0);
    return rc;
}

static int set_dtype(struct staged *n, const char *value, struct err *e)
{
    char *copy;

    if (dtype_from_name(value) == DTYPE_NONE) {
        err_set(e, EINVAL, "user.unshard.dtype: %s is no dtype", value);
        return err_hint(e, "names are those of safetensors: F8_E4M3, BF16, ...");
    }
    copy = strdup(value);
    if (!copy)
        return err_nomem(e);
    free(n->dtype);
    n->dtype = copy;
    stage_touch(n->stage);
    return 0;
}

static int set_save(struct stage *s, const char *value, struct err *e)
{
    struct save_format f;
    char *copy;

    if (save_format_parse(value, &f, e) < 0)
        return -e->code;
    if (s->slot) {
        err_set(e, EINVAL, "%s: a checkpoint that is there keeps its format", s->path);
        return err_hint(e, "save to a new directory");
    }
    copy = strdup(value);
    if (!copy)
        return err_nomem(e);
    free(s->format);
    s->format = copy;
    return 0;
}

/* Attributes of ours that cp -a brings along say what the bytes say already. */
static bool is_ours(const char *name)
{
    return strncmp(name, "user.unshard.", 13) == 0;
}

static int set_staged(struct staged *n, const char *name, const char *value,
                      struct err *e)
{
    if (strcmp(name, "user.unshard.dtype") == 0 && n->kind == STAGED_FILE)
        return set_dtype(n, value, e);
    if (strcmp(name, "user.unshard.save") == 0 && n->kind == STAGED_DIR)
        return set_save(n->stage, value, e);
    return is_ours(name) ? 0 : -EOPNOTSUPP;
}

int write_setxattr(struct request *r, const char *value, struct err *e)
{
    char text[XATTR_MAX];
    struct staged *n;
    int rc;

    if (r->size >= sizeof text)
        return -E2BIG;
    memcpy(text, value, r->size);
    text[r->size] = '\0';
    if (strcmp(r->name, SAVE_ATTRIBUTE) == 0 && r->ino == FUSE_ROOT_ID) {
        rc = save_all(r->fs, e);
    } else {
        stages_lock(r->fs);
        n = staged_of_ino(r->fs, r->ino);
        if (!n)
            rc = is_ours(r->name) ? -EROFS : -EOPNOTSUPP;
        else
            rc = n->stage ? set_staged(n, r->name, text, e) : -ESTALE;
        stages_unlock(r->fs);
    }
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

/* ---- links and new names ---- */

/* cp -a makes one of two names of a tensor a link to the other. */
int write_link(struct request *r, struct err *e)
{
    struct fuse_entry_param entry;
    struct staged *from, *n;
    struct where w = {0};
    int rc = where_find(r->fs, r->to, &w, e);

    if (rc < 0)
        return rc;
    from = staged_of_ino(r->fs, r->ino);
    if (!w.dir || !from || from->kind != STAGED_FILE || from->stage != w.dir->stage)
        rc = -EPERM;
    if (rc == 0) {
        r->mode = from->mode;
        rc = new_file(r, w.dir, r->as, &n, e);
    }
    if (rc == 0) {
        rc = staged_link(from, n, e);
        if (rc < 0)
            staged_remove(r->fs, n);
        else
            staged_entry(n, &entry);
    }
    stages_unlock(r->fs);
    return rc < 0 ? rc : reply_entry(r, &entry);
}

/* With the lock: the root of the new checkpoint of this name in a plain directory. */
struct staged *where_new_root(struct fs *fs, const struct node *dir, const char *name)
{
    char path[PATH_MAX];
    struct stage *s;

    if (store_join(dir->path, name, path, sizeof path) < 0)
        return NULL;
    do {
        s = stage_at(fs, path);
    } while (s && !stage_wait(fs, s));
    return s && !s->slot ? s->root : NULL;
}

/* May n take the place of what has this name there? */
static int check_target(const struct staged *n, const struct staged *there,
                        unsigned flags)
{
    if (flags & ~(unsigned)RENAME_NOREPLACE)
        return -EINVAL;
    if (!there || there == n || there->kind == STAGED_GONE)
        return 0;
    if (flags & RENAME_NOREPLACE)
        return -EEXIST;
    if (there->kind == STAGED_DIR)
        return n->kind != STAGED_DIR ? -EISDIR : there->count > 0 ? -ENOTEMPTY : 0;
    return n->kind == STAGED_DIR ? -ENOTDIR : 0;
}

/* "step5.tmp" becomes "step5": that is what it is published as, now. */
static int rename_root(struct request *r, struct staged *n, const struct node *to,
                       struct err *e)
{
    struct stage *s = n->stage;
    char path[PATH_MAX], *copy, *old;
    int rc;

    if (store_join(to->path, r->as, path, sizeof path) < 0)
        return -ENAMETOOLONG;
    if (stage_at(r->fs, path))
        return -EEXIST;
    copy = strdup(path);
    if (!copy)
        return err_nomem(e);
    old = s->path;
    s->path = copy;
    stage_touch(s);
    rc = save_publish(r->fs, s, e);
    if (rc == -EBUSY)
        rc = 0;                    /* when it is closed */
    if (rc < 0 && n->stage == s) { /* it stays what it was */
        s->path = old;
        old = copy;
    }
    free(old);
    return rc;
}

static int rename_within(struct request *r, struct staged *n, struct staged *to,
                         struct err *e)
{
    int rc = check_target(n, staged_find(to, r->as), r->flags);

    if (n->stage != to->stage)
        return -EXDEV;
    for (const struct staged *d = to; d; d = d->parent)
        if (d == n)
            return -EINVAL;
    return rc < 0 ? rc : staged_rename(r->fs, n, to, r->as, e);
}

/* Finds both directories; the lock is held once when it returns 0. */
static int find_both(struct request *r, struct where *from, struct where *to,
                     struct err *e)
{
    int rc = where_find(r->fs, r->to, to, e);

    if (rc < 0)
        return rc;
    stages_unlock(r->fs); /* what the second look finds may end the first: look again */
    rc = where_find(r->fs, r->ino, from, e);
    if (rc < 0 || !to->dir)
        return rc;
    if (ino_is_staged(r->to)) {
        to->dir = staged_of_ino(r->fs, r->to);
    } else if (r->to == r->ino) {
        to->dir = from->dir;
    } else {
        struct slot *slot = NULL;

        if (!ino_is_inside(r->to)) {
            struct node *n = node_of_ino(r->fs, r->to);

            slot = n ? node_slot(r->fs, n) : NULL;
        } else {
            slot = slot_of_ino(r->fs, r->to);
        }
        to->dir = staged_dir_of(r->fs, r->to, slot);
        slot_unref(r->fs, slot, 1);
    }
    if (to->dir && to->dir->stage)
        return 0;
    stages_unlock(r->fs);
    return -ESTALE;
}

/* With the lock: a checkpoint that is renamed is published under its old name before. */
static int settle_first(struct fs *fs, const struct node *dir, const char *name,
                        struct err *e)
{
    char path[PATH_MAX];
    struct stage *s;

    if (store_join(dir->path, name, path, sizeof path) < 0)
        return -ENAMETOOLONG;
    s = stage_at(fs, path);
    return s && stage_wait(fs, s) ? save_publish(fs, s, e) : 0;
}

int write_rename(struct request *r, struct err *e)
{
    struct where from = {0}, to = {0};
    struct staged *n;
    int rc = find_both(r, &from, &to, e);

    if (rc < 0)
        return rc;
    n = from.dir ? staged_find(from.dir, r->name)
                 : where_new_root(r->fs, from.node, r->name);
    if (!n && !from.dir && !to.dir) {
        rc = settle_first(r->fs, from.node, r->name, e);
        stages_unlock(r->fs);
        return rc < 0 ? rc : plain_rename(r, from.node, to.node, e);
    }
    if (!n || n->kind == STAGED_GONE)
        rc = -EXDEV; /* what is published is copied, then removed */
    else if (from.dir && to.dir)
        rc = rename_within(r, n, to.dir, e);
    else if (!from.dir && !to.dir)
        rc =
            source_has(r->fs, to.node, r->as) ? -EEXIST : rename_root(r, n, to.node, e);
    else
        rc = -EXDEV;
    stages_unlock(r->fs);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}
