/* SPDX-License-Identifier: MIT */
/* fs/read.h - answers read(2). */
#ifndef UFS_FS_READ_H
#define UFS_FS_READ_H

#include "fs/request.h"

int read_run(struct request *r, struct err *e);

/* At least `size` bytes of this thread, until it asks again; NULL: out of memory. */
void *read_buffer(struct fs *fs, size_t size);

/* For pthread_key_create: frees a thread's reply buffer. */
void read_buffer_free(void *buffer);

#endif
