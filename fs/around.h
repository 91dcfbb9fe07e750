/* SPDX-License-Identifier: MIT */
/* fs/around.h - writes that go around the kernel's pages, beside mappings of the same file. */
#ifndef UFS_FS_AROUND_H
#define UFS_FS_AROUND_H

#include <stdatomic.h>

#include "fs/came.h"
#include "fs/fs.h"

struct request;
struct staged_handle;

/*
 * A file that is written is opened for direct I/O. The kernel drops the pages that a write is
 * about, and then sends the bytes (decision 041). A mapping that takes a page up in between has
 * the old bytes in it, and brings them back later with its own. So for as long as a write is
 * under way, what comes from mappings leaves its bytes alone; and where the file has pages, the
 * kernel drops these once more when the bytes are there, before the writer is told.
 */
struct around;
struct pages_put;

/* Of a file that is open. Zeros at first. */
struct paging {
    atomic_bool fills; /* the kernel has taken up pages of it */
    /* by the lock of stages */
    struct came *came;       /* of a file of the source: since somebody writes it */
    uint64_t turn;           /* writes, so many; */
    struct around *around;   /* those under way, */
    struct pages_put *pages; /* and pages of mappings on their way */
    /* What is appended, as the kernel counts, which does not hear of others who write: */
    fuse_ino_t ino; /* by which number it came last, */
    uint64_t end;   /* and how far; */
    bool apart;     /* the file ends elsewhere; */
    bool appends;   /* bytes are on their way to its end, wherever that is, */
    unsigned waits; /* and so many threads wait for that */
};

/*
 * A read(2) of a file that is open for direct I/O has an owner, what fills a page has none. To
 * be called before the bytes are looked at.
 */
static inline void paging_note(struct paging *p, const struct fuse_file_info *fi)
{
    if (p && fi->lock_owner == 0)
        atomic_store(&p->fills, true);
}

/*
 * That of a file of the source itself, which the kernel has opened by this number; after a
 * rename it may have another one. As long as the file has such handles. NULL: no memory.
 */
struct paging *paging_join(struct fs *fs, uint64_t dev, uint64_t inode, fuse_ino_t ino);
void paging_leave(struct fs *fs, struct paging *p); /* NULL is fine */

/*
 * A handle that may write the file, which has so many bytes by now (`cut`: and no others): what
 * has come of it, with a reference and one writer more. NULL: no memory.
 */
struct came *paging_writes(struct fs *fs, struct paging *p, uint64_t size, bool cut);
/* With the lock of stages: what has come of a file, if somebody has it open; or NULL. */
struct came *paging_came(struct fs *fs, uint64_t dev, uint64_t inode);
/* The file has so many bytes now. */
void paging_cut(struct fs *fs, uint64_t dev, uint64_t inode, uint64_t size);

/*
 * Before the bytes are put. What is appended gets its place, and r->flags, as pwritev2(2) has
 * them, where that is the end of the file.
 */
int around_begin(struct request *r, struct staged_handle *h, struct around **out,
                 struct err *e);
/* They are there: answers the request. */
void around_end(struct around *a, const struct request *r, size_t done);
/* They are not, or not all; the caller answers. */
void around_fail(struct around *a); /* NULL is fine */

/* Pages of a mapping: -1 and errno, or all of them. */
ssize_t around_put_pages(struct fs *fs, const struct staged_handle *h, const char *data,
                         size_t size, off_t off);

/* Ends the thread, once the kernel asks nothing any more. */
void around_stop(struct fs *fs);

#endif
