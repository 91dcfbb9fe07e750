/* SPDX-License-Identifier: MIT */
/* fs/alias.c - a new directory keeps its number in the kernel when it is published. */
#include "fs/alias.h"

#include <limits.h>
#include <string.h>

#include "fs/node.h"
#include "fs/save_files.h"
#include "fs/stage.h"

static struct node *intern(struct fs *fs, struct node *dir, const char *name,
                           const char *path)
{
    struct node_spec spec = {.kind = NODE_DIR, .name = name, .path = path};
    struct node *n = NULL;
    struct entry_stat st;
    struct err ignored = {0};

    if (fs->store->ops->stat(fs->store, path, &st, &ignored) < 0)
        return NULL;
    spec.dev = st.id.dev;
    spec.inode = st.id.ino;
    return node_intern(fs, dir, &spec, &n, &ignored) == 0 ? n : NULL;
}

struct node *alias_node(struct fs *fs, const char *path)
{
    const char *slash = strrchr(path, '/');
    CLEANUP_FREE char *above = strndup(path, slash ? (size_t)(slash - path) : 0);
    struct node *dir = above ? node_at(fs, above) : NULL, *n;

    if (!dir)
        return NULL;
    n = intern(fs, dir, slash ? slash + 1 : path, path);
    node_unpin(fs, dir);
    return n;
}

struct below {
    struct fs *fs;
    struct node *dir;
    bool top; /* where views are */
};

static void see_child(void *user, struct staged *n)
{
    const struct below *b = user;
    char path[PATH_MAX];
    struct node *node;

    if (n->kind != STAGED_DIR || n->refs == 1 || /* the kernel does not know it */
        (b->top && save_files_is_view(n->name)) ||
        store_join(b->dir->path, n->name, path, sizeof path) < 0)
        return;
    node = intern(b->fs, b->dir, n->name, path);
    if (node)
        alias_make(b->fs, n, node);
}

void alias_make(struct fs *fs, struct staged *n, struct node *node)
{
    struct below b = {.fs = fs, .dir = node, .top = !n->parent && !n->stage->whole};

    n->became = node->ino;
    node->alias = n->ino;
    if (!fs->store->remote)            /* asking for them takes time there */
        staged_each(n, see_child, &b); /* not deep: these are directories of programs */
}

void alias_end(struct fs *fs, const struct staged *n)
{
    struct node *node = n->became ? node_of_ino(fs, n->became) : NULL;

    if (!node)
        return;
    if (node->alias == n->ino) /* else the directory was made anew since */
        node->alias = 0;
    node_unpin(fs, node);
}

fuse_ino_t alias_resolve(struct fs *fs, fuse_ino_t ino)
{
    const struct staged *n;

    if (!fs->stages || !ino_is_staged(ino))
        return ino;
    stages_lock(fs);
    n = staged_of_ino(fs, ino);
    if (n && n->became)
        ino = n->became;
    stages_unlock(fs);
    return ino;
}

fuse_ino_t alias_of(struct fs *fs, fuse_ino_t node)
{
    struct node *n = fs->stages ? node_pin(fs, node) : NULL;
    fuse_ino_t alias = n ? n->alias : 0;

    if (n)
        node_unpin(fs, n);
    return alias ? alias : node;
}

void alias_entry(struct fs *fs, struct node *node, struct fuse_entry_param *out)
{
    struct staged *n;

    if (!node->alias)
        return;
    stages_lock(fs);
    n = node->alias ? staged_of_ino(fs, node->alias) : NULL;
    if (n && n->became == node->ino) {
        staged_ref(n);
        out->ino = n->ino;
        out->generation = n->generation;
        node_unpin(fs, node);
    }
    stages_unlock(fs);
}
