/* SPDX-License-Identifier: MIT */
/* fs/alias.c - a new directory keeps its number in the kernel when it is published. */
#include "fs/alias.h"

#include "fs/node.h"
#include "fs/stage.h"

void alias_make(struct staged *n, struct node *node)
{
    n->became = node->ino;
    node->alias = n->ino;
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
