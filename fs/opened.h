/* SPDX-License-Identifier: MIT */
/* fs/opened.h - all that is open: freed at the end, when the kernel sends no release. */
#ifndef UFS_FS_OPENED_H
#define UFS_FS_OPENED_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"
#include "remote/ring.h"

struct fs;
struct opened;

enum opened_kind {
    OPENED_VIEW, /* a file inside a checkpoint, or of a mount for reading (fs/handle.h) */
    OPENED_DIR,  /* a directory of these */
    OPENED_FILE, /* of the source, in a mount for writing (fs/disk_file.c) */
    OPENED_LIST, /* a directory of the source there */
    OPENED_EDIT, /* of a transaction (fs/edit.h), a file or a directory */
};

/*
 * Handles embed this as their first member. The moment a read is answered its process
 * may go on, close the file, and the release may come on another thread: who still needs
 * the handle then holds a reference.
 */
struct opened {
    struct ring ring;
    atomic_uint refs; /* one is the kernel's */
    enum opened_kind kind;
    void (*free)(struct fs *fs, struct opened *o);
};

struct opened_list {
    pthread_mutex_t lock;
    struct ring ring; /* guarded by lock */
};

void opened_init(struct opened_list *l);

/* Once the handle may be given to the kernel. */
void opened_add(struct opened_list *l, struct opened *o);

void opened_get(struct opened *o);
void opened_put(struct fs *fs, struct opened *o);

/* It was released, or the kernel did not take it: off the list, and one put. */
void opened_end(struct fs *fs, struct opened *o);

/* Nobody reads any more: frees all that is left. */
void opened_end_all(struct fs *fs);

#endif
