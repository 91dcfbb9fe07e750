/* SPDX-License-Identifier: MIT */
/* remote/gunzip.h - a gzip file read at any place, through points where inflating can start. */
#ifndef UFS_REMOTE_GUNZIP_H
#define UFS_REMOTE_GUNZIP_H

#include "base/base.h"

struct err;
struct source;
struct gunzip_scan;

/*
 * The one pass over the whole file that finds those points: every MiB at first and, when
 * there would be more than 1024, twice as far apart. Each holds the 32 KiB before it, so
 * they take at most 32 MiB.
 */
int gunzip_scan_begin(struct source *in, struct gunzip_scan **out, struct err *e);

/*
 * Plain bytes from `off` on, which never decreases: *got is less than `len` only at the
 * end. -EBADMSG when it is no gzip, damaged (also by its CRC) or cut off.
 */
int gunzip_scan_read(struct gunzip_scan *s, uint64_t off, size_t len, void *dst,
                     size_t *got, struct err *e);

/*
 * Goes on to the end, where CRC and length are checked, and gives the plain bytes as a
 * source that holds a reference to `in`. A read inflates from the point before it on, or
 * from where one of the last reads ended. Reads from several threads do not wait for each
 * other. It cannot be mapped.
 */
int gunzip_scan_finish(struct gunzip_scan *s, struct source **out, struct err *e);

void gunzip_scan_free(struct gunzip_scan *s); /* NULL is fine */
void gunzip_scan_freep(struct gunzip_scan **s);

/* Do these first bytes say gzip? */
bool gunzip_sniff(const void *head, size_t len);

#endif
