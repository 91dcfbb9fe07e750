/* SPDX-License-Identifier: MIT */
/* remote/tar_header.h - one header block of a tar archive, and the records of pax. */
#ifndef UFS_REMOTE_TAR_HEADER_H
#define UFS_REMOTE_TAR_HEADER_H

#include "base/base.h"

struct buf;
struct err;

enum { TAR_BLOCK = 512, TAR_NAME = 100 + 1 + 155 };

struct tar_header {
    char type; /* '0' for old archives too */
    char name[TAR_NAME + 1];
    uint64_t size;
};

/* 1 and the header, 0: an empty block, -EBADMSG: its checksum or size is wrong. */
int tar_header_parse(const unsigned char block[TAR_BLOCK], struct tar_header *out,
                     struct err *e);

/* What pax says of the next member. */
struct tar_pax {
    bool has_path, has_size, is_sparse;
    uint64_t size;
};

/*
 * Records "LENGTH KEY=VALUE\n" into what is there already; `path` gets the value of
 * that key. -EBADMSG when they are none.
 */
int tar_pax_parse(const char *data, size_t len, struct tar_pax *pax, struct buf *path,
                  struct err *e);

#endif
