/* SPDX-License-Identifier: MIT */
/* fs/dir_page.c - what a readdir or readdirplus request is answered with. */
#include "fs/dir_page.h"

#include <string.h>

#include "fs/lookup.h"

/* The kernel's struct fuse_entry_out and fuse_dirent, as libfuse writes them. */
enum { PLUS_HEAD = 128, DIRENT_HEAD = 24, DIRENT_LEN = 16 };

int dir_page_init(struct dir_page *p, size_t size, off_t from, bool plus, struct err *e)
{
    *p = (struct dir_page){
        .data = malloc(size), .size = size, .from = from, .next = from, .plus = plus};
    return p->data ? 0 : err_nomem(e);
}

/* What an entry takes; it is written where it fits. libfuse looks at no request here. */
static size_t add(const struct dir_page *p, char *at, size_t room, const char *name,
                  const struct fuse_entry_param *entry, off_t next)
{
    return p->plus ? fuse_add_direntry_plus(NULL, at, room, name, entry, next)
                   : fuse_add_direntry(NULL, at, room, name, &entry->attr, next);
}

bool dir_page_has_room(const struct dir_page *p, const char *name)
{
    static const struct fuse_entry_param none;

    return add(p, NULL, 0, name, &none, 0) <= p->size - p->used;
}

void dir_page_put(struct dir_page *p, const char *name,
                  const struct fuse_entry_param *entry, off_t next)
{
    p->used += add(p, p->data + p->used, p->size - p->used, name, entry, next);
    p->next = next;
}

void dir_page_forget(const struct dir_page *p, struct fs *fs)
{
    size_t at = 0;

    while (p->plus && at + PLUS_HEAD + DIRENT_HEAD <= p->used) {
        uint64_t ino;
        uint32_t len;

        memcpy(&ino, p->data + at, sizeof ino);
        memcpy(&len, p->data + at + PLUS_HEAD + DIRENT_LEN, sizeof len);
        if (ino)
            entry_forget(fs, ino, 1);
        at += (PLUS_HEAD + DIRENT_HEAD + len + 7) & ~(size_t)7;
    }
}
