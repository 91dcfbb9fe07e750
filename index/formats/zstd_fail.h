/* SPDX-License-Identifier: MIT */
/* index/formats/zstd_fail.h - what zstd has returned, as an error of ours. */
#ifndef UFS_INDEX_FORMATS_ZSTD_FAIL_H
#define UFS_INDEX_FORMATS_ZSTD_FAIL_H

#include <errno.h>
#include <zstd.h>
#include <zstd_errors.h>

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

#endif
