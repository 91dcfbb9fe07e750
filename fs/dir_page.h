/* SPDX-License-Identifier: MIT */
/* fs/dir_page.h - what a readdir or readdirplus request is answered with. */
#ifndef UFS_FS_DIR_PAGE_H
#define UFS_FS_DIR_PAGE_H

#include "fs/fs.h"

struct dir_page {
    char *data; /* NULL: there is none */
    size_t used, size;
    off_t from, next; /* positions: of its first entry, and behind its last one */
    bool plus;        /* with attributes and nodes: a lookup each */
};

/* An empty one of `size` bytes, as the kernel asked for it. */
int dir_page_init(struct dir_page *p, size_t size, off_t from, bool plus,
                  struct err *e);

bool dir_page_has_room(const struct dir_page *p, const char *name);

/* Adds what fits, as dir_page_has_room() said. `entry->ino` 0: the kernel learns no node. */
void dir_page_put(struct dir_page *p, const char *name,
                  const struct fuse_entry_param *entry, off_t next);

/* It was not taken: the lookups in it are forgotten. The page is to be freed yet. */
void dir_page_forget(const struct dir_page *p, struct fs *fs);

static inline void dir_page_free(struct dir_page *p)
{
    free(p->data);
    p->data = NULL;
}

#endif
