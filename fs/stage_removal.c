/* SPDX-License-Identifier: MIT */
/* fs/stage_removal.c - an rm -r that has begun to remove a checkpoint, and what was hidden. */
#include <limits.h>

#include "fs/node.h"
#include "fs/slot.h"
#include "fs/stage.h"

bool stage_is_removal(const struct stage *s)
{
    const struct staged *reports = s->slot ? staged_find(s->root, ".unshard") : NULL;

    return s->only_removed || (reports && (reports->count > 0 || reports->removed));
}

/* All nodes of a kind below a directory. */
struct found {
    enum staged_kind kind;
    struct staged **node;
    size_t count, cap;
};

static void find_kind(void *user, struct staged *n)
{
    struct found *f = user;

    if (n->kind == STAGED_DIR) {
        n->removed = false;
        staged_each(n, find_kind, f); /* not deep: these are directories of programs */
    }
    if (n->kind != f->kind)
        return;
    if (f->count == f->cap) {
        size_t cap = f->cap ? 2 * f->cap : 256;
        struct staged **grown = reallocarray(f->node, cap, sizeof *grown);

        if (!grown)
            return; /* it stays hidden in this mount */
        f->node = grown;
        f->cap = cap;
    }
    f->node[f->count++] = n;
}

struct renewal {
    struct fs *fs;
    const struct stage *stage;
};

/* Directories that the kernel saw removed are others when they show again. */
static void renew(void *user, struct staged *n)
{
    const struct renewal *w = user;
    enum inside dir = n->kind == STAGED_DIR && n->covers ? ino_kind(n->covers) : 0;
    char path[PATH_MAX];

    if (n->kind == STAGED_GONE) {
        if (store_join(w->stage->path, n->name, path, sizeof path) == 0)
            nodes_renew(w->fs, path);
    } else if (dir && (n->removed || (dir == INSIDE_TREE && n->count > 0))) {
        slot_renew(w->fs, w->stage->slot, dir);
    }
}

bool stage_unhide(struct fs *fs, struct stage *s)
{
    struct found gone = {.kind = STAGED_GONE}, files = {.kind = STAGED_FILE};
    bool any;

    staged_each(s->root, renew, &(struct renewal){fs, s});
    staged_each(s->root, find_kind, &gone);
    for (size_t i = 0; i < gone.count; i++)
        staged_remove(fs, gone.node[i]);
    free(gone.node);
    staged_each(s->root, find_kind, &files);
    any = files.count > 0;
    free(files.node);
    return any;
}
