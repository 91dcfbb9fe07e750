/* SPDX-License-Identifier: MIT */
/* fs/staged.c - names and attributes of what was written and is not published. */
#include "fs/staged.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/lookup.h"
#include "fs/node.h"
#include "fs/slot.h"

enum { BLOCK_SIZE = 256 << 10 };

/* ---- attributes ---- */

static bool later(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec > b->tv_sec || (a->tv_sec == b->tv_sec && a->tv_nsec > b->tv_nsec);
}

void staged_attr(const struct staged *n, struct stat *st)
{
    struct stat file = {.st_size = (off_t)n->size, .st_mtim = n->mtime};
    bool dir = n->kind == STAGED_DIR;

    staged_stat(n, &file);
    *st = (struct stat){
        .st_ino = n->ino, /* no number of the source's files */
        .st_mode = n->mode | (dir ? S_IFDIR : S_IFREG),
        .st_nlink = n->removed && !n->stage ? 0
                    : dir                   ? 2
                                            : 1,
        .st_uid = n->uid,
        .st_gid = n->gid,
        .st_size = dir ? 0 : file.st_size,
        .st_blksize = BLOCK_SIZE,
        .st_blocks = file.st_blocks,
        .st_atim = dir ? n->mtime : file.st_atim,
        .st_mtim = dir ? n->mtime : file.st_mtim,
        .st_ctim = dir || later(&n->ctime, &file.st_ctim) ? n->ctime : file.st_ctim,
    };
}

void staged_entry(struct staged *n, struct fuse_entry_param *out)
{
    *out = (struct fuse_entry_param){.ino = n->ino, .generation = n->generation};
    staged_attr(n, &out->attr); /* time-outs 0: publication puts another in its place */
    staged_ref(n);
}

/* ---- which directory ---- */

const char *staged_fixed_name(enum inside kind)
{
    static const char *const names[] = {[INSIDE_TENSORS] = "tensors",
                                        [INSIDE_TREE] = "tree",
                                        [INSIDE_RAW] = "raw",
                                        [INSIDE_OPTIMIZER] = "optimizer",
                                        [INSIDE_META] = ".unshard"};

    return kind <= INSIDE_LAST_DIR ? names[kind] : NULL;
}

/* The stage over a directory of the source that is no checkpoint, or NULL. */
static struct stage *over_of(struct fs *fs, fuse_ino_t ino)
{
    const struct node *n =
        stage_first(fs) && !ino_is_inside(ino) ? node_of_ino(fs, ino) : NULL;
    struct stage *s = n && n->kind == NODE_DIR ? stage_at(fs, n->path) : NULL;

    return s && s->over ? s : NULL;
}

struct staged *staged_dir_of(struct fs *fs, fuse_ino_t ino, const struct slot *slot)
{
    struct stage *s;
    const char *name;

    if (ino_is_staged(ino))
        return staged_of_ino(fs, ino);
    s = slot ? stage_at(fs, slot->place) : over_of(fs, ino);
    if (!s || (s->over ? ino_is_inside(ino) : !s->slot))
        return NULL;
    if (!ino_is_inside(ino))
        return s->root;
    name = staged_fixed_name(ino_kind(ino));
    return name ? staged_find(s->root, name) : NULL;
}

bool staged_is_below_tree(fuse_ino_t ino)
{
    return ino_is_inside(ino) && ino_kind(ino) == INSIDE_TREE && ino_index(ino) > 0;
}

const char *staged_key(fuse_ino_t dir, const char *name, char *scratch, size_t size)
{
    if (!staged_is_below_tree(dir))
        return name;
    snprintf(scratch, size, "%" PRIu32 "/%s", ino_index(dir), name);
    return scratch;
}

/* The new directory `name` that is staged in this directory of the source, or NULL. */
static struct staged *new_in(struct fs *fs, const char *dir, const char *name)
{
    char path[PATH_MAX];
    struct stage *s;

    if (store_join(dir, name, path, sizeof path) < 0)
        return NULL;
    s = stage_at(fs, path);
    return s && !s->slot && !s->over ? s->root : NULL;
}

bool staged_comes(struct fs *fs, const char *dir, const char *name)
{
    bool comes;

    stages_lock(fs);
    comes = new_in(fs, dir, name) != NULL;
    stages_unlock(fs);
    return comes;
}

static int reply(const struct request *r, struct staged *n)
{
    struct fuse_entry_param entry = {0};

    if (n->kind != STAGED_GONE && !n->removed)
        staged_entry(n, &entry);
    stages_unlock(r->fs);
    if (fuse_reply_entry(r->req, &entry) < 0 && entry.ino)
        entry_forget(r->fs, entry.ino, 1);
    return 0;
}

bool staged_is_own(const struct staged *n)
{
    return n && !n->filling && (n->removed || !(n->kind == STAGED_DIR && n->covers));
}

static int lookup_staged(struct request *r)
{
    struct staged *dir = staged_of_ino(r->fs, r->ino), *n;
    struct fuse_entry_param none = {0};

    if (!dir || !dir->stage) {
        stages_unlock(r->fs);
        return -ESTALE;
    }
    n = staged_find(dir, r->name);
    if (n)
        return reply(r, n);
    stages_unlock(r->fs);
    fuse_reply_entry(r->req, &none);
    return 0;
}

int staged_lookup(struct request *r, struct err *e)
{
    struct fs *fs = r->fs;
    struct slot *slot = NULL;
    const struct node *node = NULL;
    char scratch[STAGED_KEY_MAX];
    struct staged *dir, *n = NULL;

    (void)e;
    if (strlen(r->name) > NAME_MAX)
        return -ENAMETOOLONG;
    if (!ino_is_staged(r->ino)) {
        node = ino_is_inside(r->ino) ? NULL : node_of_ino(fs, r->ino);
        slot = node ? node_slot(fs, (struct node *)(uintptr_t)node)
                    : slot_of_ino(fs, r->ino);
    }
    stages_lock(fs);
    if (ino_is_staged(r->ino))
        return lookup_staged(r);
    if (stage_first(fs)) {
        dir = staged_dir_of(fs, r->ino, slot);
        n = dir ? staged_find(dir, staged_key(r->ino, r->name, scratch, sizeof scratch))
                : NULL;
        if (!n && node && node->kind == NODE_DIR)
            n = new_in(fs, node->path, r->name);
    }
    slot_unref(fs, slot, 1);
    if (staged_is_own(n))
        return reply(r, n);
    stages_unlock(fs);
    return STAGED_NONE;
}

int staged_getattr(struct request *r, struct err *e)
{
    struct staged *n;
    struct stat st;

    (void)e;
    stages_lock(r->fs);
    n = staged_of_ino(r->fs, r->ino);
    if (!n || (n->covers && n->kind == STAGED_DIR && !ino_is_staged(r->ino))) {
        stages_unlock(r->fs);
        return ino_is_staged(r->ino) ? -ESTALE : STAGED_NONE;
    }
    staged_attr(n, &st);
    stages_unlock(r->fs);
    fuse_reply_attr(r->req, &st, 0);
    return 0;
}
