/* SPDX-License-Identifier: MIT */
/* index/formats/zstd_fail.h - what zstd has returned, as an error of ours; frames of a blob. */
#ifndef UFS_INDEX_FORMATS_ZSTD_FAIL_H
#define UFS_INDEX_FORMATS_ZSTD_FAIL_H

#include <errno.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "base/endian.h"
#include "base/err.h"

/*
 * `rc` is one that ZSTD_isError() tells. -ENOMEM: it had no memory, which says nothing of the
 * data (zstd makes its window when it knows the frame's); else -EBADMSG.
 */
static inline int zstd_fail(size_t rc, struct err *e)
{
    if (ZSTD_getErrorCode(rc) == ZSTD_error_memory_allocation)
        return err_nomem(e);
    return err_set(e, EBADMSG, "zstd: %s", ZSTD_getErrorName(rc));
}

/*
 * With pyzstd torch ends a blob's frame twice, and the second one is empty: frames may follow
 * each other, but not so many that a blob is nothing but them.
 */
enum { ZSTD_MAX_FRAMES = 16, ZSTD_MAGIC_BYTES = 4 };

/* `rest` bytes are left behind the n-th frame, the first of them here: is that one more? */
static inline bool zstd_goes_on(const void *head, uint64_t rest, unsigned n)
{
    return rest >= ZSTD_MAGIC_BYTES && n < ZSTD_MAX_FRAMES &&
           get_le32(head) == ZSTD_MAGICNUMBER;
}

#endif
