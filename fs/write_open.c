/* SPDX-License-Identifier: MIT */
/* fs/write_open.c - open(2) for writing: what is there is covered by a file of the stage. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "base/fsutil.h"
#include "fs/amend.h"
#include "fs/attr.h"
#include "fs/handle.h"
#include "fs/lookup.h"
#include "fs/node.h"
#include "fs/over.h"
#include "fs/plain.h"
#include "fs/slot.h"
#include "fs/stage_room.h"
#include "fs/staged.h"
#include "fs/tree.h"
#include "fs/views.h"
#include "fs/write.h"
#include "fs/written.h"

enum {
    TENSOR_MEMORY = 16 << 20,
    COPY_BLOCK = 1 << 20,
    FILL_NS = 100000000, /* between two looks at whether another has filled it */
    PLAIN_NS = 20000000, /* between two looks at whether another has closed it, */
    PLAIN_LOOKS = 100,   /* so many */
};

/* ---- handles ---- */

int write_reply_opened(struct request *r, struct staged_handle *h,
                       const struct fuse_entry_param *entry)
{
    counter_add(&r->fs->counters, COUNT_OPENS, 1);
    h->ino = entry ? entry->ino : r->ino;
    r->fi.fh = (uintptr_t)h;
    r->fi.direct_io = 1;
    opened_add(&r->fs->opened, &h->opened);
    r->fi.noflush = !h->writes;
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
    struct stat st;

    if (h) {
        if (fstat(fd, &st) == 0)
            h->paging =
                paging_join(r->fs, st.st_dev, st.st_ino, entry ? entry->ino : r->ino);
        if (h->paging)
            h->came = paging_writes(r->fs, h->paging, (uint64_t)st.st_size,
                                    r->fi.flags & O_TRUNC);
        if (h->came)
            return write_reply_opened(r, h, entry);
        staged_drop(r->fs, h);
    } else {
        close(fd);
    }
    if (entry)
        entry_forget(r->fs, entry->ino, 1);
    return -ENOMEM;
}

/* ---- opening ---- */

/*
 * The name in the checkpoint's directory that a node has, and its rights; -EROFS: it is none
 * to write.
 */
static int name_of(struct fs *fs, struct slot *slot, fuse_ino_t ino, enum inside *dir,
                   char name[NAME_MAX + 1], struct entry_stat *as, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    enum inside kind = ino_kind(ino);
    struct tensor_info t;
    int rc;

    *dir = 0;
    *as = (struct entry_stat){
        .mode = slot->info.mode, .uid = slot->info.uid, .gid = slot->info.gid};
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
    if (rc == 0) {
        as->mode = t.mode;
        snprintf(name, NAME_MAX + 1, "%s", kind == INSIDE_NPY ? t.name_npy : t.name);
    }
    return rc;
}

/* What is read until now goes into the spool: some of it will be written over. */
static int copy_up(struct fs *fs, fuse_ino_t ino, const struct staged_handle *to,
                   struct err *e)
{
    CLEANUP_FREE char *block = malloc(COPY_BLOCK);
    struct handle *h = NULL;
    int rc = block ? handle_open(fs, ino, &h, e) : err_nomem(e);
    uint64_t at = 0;
    size_t got = 1;

    while (rc == 0 && got > 0) {
        rc = handle_read(h, at, COPY_BLOCK, block, &got, e);
        at += got;
        stages_lock(fs);
        if (rc == 0)
            rc = stage_room_take(fs, to->node, at, e);
        stages_unlock(fs);
        if (rc == 0 && got > 0 && write_all(to->fd, block, got, e) < 0)
            rc = -e->code;
    }
    handle_close(fs, h);
    return rc;
}

/* What is written over. */
struct over {
    enum inside dir; /* 0: the checkpoint's own */
    const char *name;
    const struct entry_stat *as; /* it keeps its rights and owner */
    struct node *files; /* of one that is a checkpoint by itself: its directory */
};

/* With the lock: the directory of the stage that has the name. */
static int directory_of(struct request *r, struct slot *slot, const struct over *over,
                        struct staged **out, struct err *e)
{
    struct stage *s;
    int rc = over->files ? over_begin_file(r->fs, over->files, &s, e)
                         : where_stage(r->fs, slot, WHERE_WRITE, &s, e);

    if (rc < 0)
        return rc;
    *out = s->root;
    return over->dir ? where_fixed(r->fs, s, over->dir, out, e) : 0;
}

/*
 * With the lock: the staged file for a node of the source or of a checkpoint. 1: it is a new
 * one, to be filled; 0: it was there, and is whole: whoever else opened it first has copied
 * what it covers, and may have written to it since.
 */
static int cover(struct request *r, struct slot *slot, const struct over *over,
                 struct staged **out, struct err *e)
{
    struct staged *parent;
    int rc;

    for (;;) {
        rc = directory_of(r, slot, over, &parent, e);
        if (rc < 0)
            return rc;
        *out = staged_find(parent, over->name);
        if (!*out || (*out)->kind != STAGED_FILE || !(*out)->filling)
            break;
        stage_sleep(r->fs, FILL_NS);
    }
    rc = slot && !(r->fi.flags & O_TRUNC)
             ? views_check(r->fs, parent, over->name, *out, e)
             : 0;
    if (rc < 0 || (*out && (*out)->kind == STAGED_FILE))
        return rc;
    r->mode = over->as->mode;
    rc = write_new_file(r, parent, over->name, out, e);
    if (rc < 0)
        return rc;
    (*out)->uid = over->as->uid;
    (*out)->gid = over->as->gid;
    if (over->files)
        (*out)->over = over->as->id;
    return 1;
}

static int open_over(struct request *r, struct slot *slot, const struct over *over,
                     struct staged_handle **out, struct err *e)
{
    struct fs *fs = r->fs;
    struct staged_handle *h = NULL;
    struct staged *n;
    bool made;
    int rc;

    stages_lock(fs);
    rc = cover(r, slot, over, &n, e);
    if (rc < 0) {
        stages_unlock(fs);
        return rc;
    }
    made = rc > 0;
    rc = staged_open_handle(fs, n, r->fi.flags | O_CREAT, &h, e);
    if (rc == 0 && made && !(r->fi.flags & O_TRUNC)) {
        n->filling = true;
        n->base = over->as->id;
        stages_unlock(fs);
        rc = copy_up(fs, r->ino, h, e);
        stages_lock(fs);
        n->came->copied = rc == 0;
        n->filling = false;
        stage_wake(fs);
    }
    if (rc < 0 && made && (!h || n->stage)) /* half of it is worse than none */
        staged_remove(fs, n);
    else if (rc == 0 && n->stage && !n->covers)
        staged_cover(fs, n, r->ino);
    stages_unlock(fs);
    if (rc < 0 && h)
        staged_drop(fs, h);
    *out = h;
    return rc;
}

/* Is it a checkpoint by itself, which is shown as the file that it is? */
static int look_whole(struct request *r, const struct node *n, bool *out, struct err *e)
{
    const struct shown_entry *entry;
    struct shown *shown;
    int rc = tree_shown(r->fs, n->parent, true, &shown, e);

    if (rc != 0)
        return rc;
    entry = shown_find(shown, n->name);
    *out = entry && entry->kind == SHOWN_FILE && entry->whole;
    shown_put(r->fs, shown);
    return 0;
}

/* What a directory showed lately may be older than the file that is written over. */
static int is_whole(struct request *r, const struct node *n,
                    const struct entry_stat *st, bool *out, struct err *e)
{
    int rc = look_whole(r, n, out, e);

    if (rc != 0 || *out || !(r->fi.flags & O_TRUNC) || st->id.size == 0 ||
        !written_has(r->fs->written, st->id.dev, st->id.ino))
        return rc;
    amend_name(r->fs, n->parent->path, n->name);
    return look_whole(r, n, out, e);
}

/* Who has it open to write it in place goes on so; of a close we are told late. */
static bool is_written(struct fs *fs, fuse_ino_t ino)
{
    const struct timespec pause = {.tv_nsec = PLAIN_NS};

    for (unsigned i = 0; i < PLAIN_LOOKS && staged_plain_is_open(fs, ino); i++)
        nanosleep(&pause, NULL);
    return staged_plain_is_open(fs, ino);
}

/* A file beside checkpoints; STAGED_NONE: it is changed in place. */
static int open_beside(struct request *r, const struct node *n,
                       struct staged_handle **out, struct err *e)
{
    struct entry_stat as;
    struct over over = {.name = n->name, .as = &as, .files = n->parent};
    bool whole = false;
    int rc;

    if (!n->parent || !r->fs->written)
        return STAGED_NONE;
    rc = r->fs->store->ops->stat(r->fs->store, n->path, &as, e);
    if (rc == 0)
        rc = is_whole(r, n, &as, &whole, e);
    if (rc != 0)
        return rc;
    return whole && !is_written(r->fs, n->ino) ? open_over(r, NULL, &over, out, e)
                                               : STAGED_NONE;
}

/* A side file of a checkpoint, or another one of the source: STAGED_NONE. */
static int open_side(struct request *r, struct staged_handle **out, struct err *e)
{
    const struct node *n = node_of_ino(r->fs, r->ino);
    struct entry_stat as;
    struct slot *slot;
    bool plain;
    int rc;

    if (!n)
        return -ESTALE;
    if (n->kind != NODE_FILE)
        return -EISDIR;
    slot = n->parent ? node_slot(r->fs, n->parent) : NULL;
    stages_lock(r->fs);
    plain = !slot || where_is_plain(r->fs, slot);
    stages_unlock(r->fs);
    if (plain) {
        slot_unref(r->fs, slot, 1);
        return open_beside(r, n, out, e);
    }
    rc = where_check_current(r->fs, slot, e);
    if (rc == 0)
        rc = r->fs->store->ops->stat(r->fs->store, n->path, &as, e);
    if (rc == 0) {
        const struct over over = {.name = n->name, .as = &as};

        rc = open_over(r, slot, &over, out, e);
    }
    slot_unref(r->fs, slot, 1);
    return rc;
}

static int open_inside(struct request *r, struct staged_handle **out, struct err *e)
{
    struct slot *slot = slot_of_ino(r->fs, r->ino);
    char name[NAME_MAX + 1];
    struct entry_stat as;
    struct over over = {.name = name, .as = &as};
    int rc = slot ? 0 : -ESTALE;

    if (rc == 0)
        rc = slot_ready(r, slot, e);
    if (rc == 0)
        rc = where_check_current(r->fs, slot, e);
    if (rc == 0)
        rc = name_of(r->fs, slot, r->ino, &over.dir, name, &as, e);
    if (rc == 0)
        rc = open_over(r, slot, &over, out, e);
    slot_unref(r->fs, slot, 1);
    return rc;
}

int write_over(struct request *r, struct staged_handle **out, struct err *e)
{
    return ino_is_inside(r->ino) ? open_inside(r, out, e) : open_side(r, out, e);
}

/* With the lock: open(2) of a file of a stage. */
static int open_staged(const struct request *r, struct staged *n, bool writes,
                       struct staged_handle **out, struct err *e)
{
    if (n->kind != STAGED_FILE)
        return -EISDIR;
    if (writes && !(r->fi.flags & O_TRUNC) && n->parent &&
        views_check(r->fs, n->parent, n->name, n, e) < 0)
        return -e->code;
    return staged_open_handle(r->fs, n, r->fi.flags, out, e);
}

/*
 * Opened by the number of what it covers: readers from before have the old bytes in the
 * pages of that, so what is written is to be opened by its own.
 */
static bool turn_away(struct request *r, struct staged *n)
{
    return n->ino != r->ino && staged_turn_away(r->fs, n, fuse_req_ctx(r->req)->pid);
}

/* The same of what was covered just now. Takes the handle, when true. */
static bool turn_away_new(struct request *r, struct staged_handle *h)
{
    bool away;

    stages_lock(r->fs);
    away = h->node->stage && turn_away(r, h->node);
    stages_unlock(r->fs);
    if (away)
        staged_drop(r->fs, h);
    return away;
}

/* The kernel comes back by the path; not a fault that is worth a look at the source. */
static int reply_stale(struct request *r)
{
    fuse_reply_err(r->req, ESTALE);
    return 0;
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
    if (n && n->stage && n->kind == STAGED_FILE) {
        if (turn_away(r, n)) {
            stages_unlock(r->fs);
            return reply_stale(r);
        }
        staged_came_back(r->fs, n, fuse_req_ctx(r->req)->pid);
    }
    rc = n && n->stage ? open_staged(r, n, writes, &h, e) : -ESTALE;
    if (rc == -ENOENT) { /* it was published just now: its name is the source's file */
        stage_wait(r->fs, n->stage);
        *e = (struct err){0};
        rc = -ESTALE;
    }
    if (rc == 0 && (r->fi.flags & O_TRUNC) && fuse_req_ctx(r->req)->uid != 0)
        n->mode = attr_written_mode(n->mode);
    stages_unlock(r->fs);
    if (rc == 0)
        return write_reply_opened(r, h, NULL);
    if (n || ino_is_staged(r->ino))
        return rc;
    if (!writes)
        return STAGED_NONE;
    r->may_block = true;
    rc = write_over(r, &h, e);
    if (rc == STAGED_NONE)
        return plain_open(r, node_of_ino(r->fs, r->ino), e);
    if (rc < 0)
        return rc;
    return turn_away_new(r, h) ? reply_stale(r) : write_reply_opened(r, h, NULL);
}
