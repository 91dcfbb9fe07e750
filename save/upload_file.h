/* SPDX-License-Identifier: MIT */
/* save/upload_file.h - one local file becomes one object. */
#ifndef UFS_SAVE_UPLOAD_FILE_H
#define UFS_SAVE_UPLOAD_FILE_H

#include "base/base.h"

struct bucket;
struct err;
struct pool;

/*
 * The first `size` bytes of a file, by one PUT or, if it is large, in parts, `pool` at a
 * time. The object is the old one (or there is none) until all of it is there. What was
 * sent of an upload that failed is removed where the store answers.
 */
int upload_file(struct bucket *b, const char *key, int fd, uint64_t size,
                struct pool *pool, struct err *e);

#endif
