/* SPDX-License-Identifier: MIT */
/* base/inflate.h - deflate data without a header (RFC 1951), unpacked piece by piece. */
#ifndef UFS_BASE_INFLATE_H
#define UFS_BASE_INFLATE_H

#include "base/base.h"

struct err;
struct inflate;

/* Which library does it: igzip of ISA-L where the build has it, else zlib. */
enum inflate_by { INFLATE_BEST, INFLATE_ZLIB };

/* A stream at its beginning. It takes some 100 KiB, however long the data are. */
int inflate_new(enum inflate_by by, struct inflate **out, struct err *e);
void inflate_free(struct inflate *s); /* NULL is fine */
void inflate_freep(struct inflate **s);

/*
 * Goes on: takes bytes from in[0..*in_len) and puts bytes into dst[0..*dst_len); both
 * lengths become what was taken and put. It stops when either is used up, or at the end of
 * the last block: *ended. -EBADMSG: no deflate data; what was put is worth nothing then.
 */
int inflate_some(struct inflate *s, const void *in, size_t *in_len, void *dst,
                 size_t *dst_len, bool *ended, struct err *e);

/*
 * Once it has ended: the length of the deflate data, in bytes from its beginning. The last
 * call may have taken a few bytes behind it.
 */
uint64_t inflate_length(const struct inflate *s);

#endif
