/* SPDX-License-Identifier: MIT */
/* fs/handle.h - open files. */
#ifndef UFS_FS_HANDLE_H
#define UFS_FS_HANDLE_H

#include "base/buf.h"
#include "fs/ahead.h"
#include "fs/early.h"
#include "fs/habit.h"
#include "fs/request.h"
#include "fs/side.h"

/* One of reader, side and text is what it reads from. */
struct handle {
    struct opened opened;
    struct reader *reader;  /* a tensor or a view */
    struct generation *gen; /* its generation; NULL for side files */
    struct side *side;      /* a file of the source, or a report */
    bool is_text;           /* text made at open */
    struct buf text;
    char *name;                     /* for messages: the key, or the name of the view */
    struct materialized_file *copy; /* what the kernel reads instead, or NULL */
    struct way *way; /* how its inode is read; NULL: by the server, always */
    struct ahead ahead;
    struct habit habit;
    atomic_uint reads;   /* that are being answered */
    struct early *early; /* NULL: nothing is gathered before it is asked for */
};

static inline struct handle *handle_of(const struct fuse_file_info *fi)
{
    return (struct handle *)(uintptr_t)fi->fh;
}

/* For ourselves: what a program would read. Any thread that may wait. */
int handle_open(struct fs *fs, fuse_ino_t ino, struct handle **out, struct err *e);
int handle_read(struct handle *h, uint64_t off, size_t len, void *dst, size_t *got,
                struct err *e);
void handle_close(struct fs *fs, struct handle *h); /* NULL is fine */

int open_run(struct request *r, struct err *e);

#endif
