/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_npy.c - any bytes as an .npy header: what is read is written the same. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/npy.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

/* A header of ours of the same type and shape is read as the same. */
static void check_written(const struct npy_layout *x)
{
    CLEANUP(buf_release) struct buf again = {0};
    struct npy_layout y;
    struct err e = {0};

    if (x->dtype == DTYPE_F8_E5M2)
        return; /* |V1, which is not read */
    require(npy_header(x->dtype, &x->shape, &again, &e) == 0, "npy_header", &e);
    require(npy_parse(again.data, again.len, &y, &e) == 0, "npy_parse", &e);
    require(y.header == again.len && y.dtype == x->dtype && y.bytes == x->bytes &&
                shape_equal(&x->shape, &y.shape) && !y.fortran && !y.swap,
            "read another way", &e);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int64_t step[SHAPE_MAX_DIMS];
    struct npy_layout x;
    struct err e = {0};
    uint64_t header;
    int rc = npy_header_size(data, size, &header, &e);

    require(rc == 0 || rc == -EBADMSG || rc == -ENOTSUP || rc == -EFBIG, "size", &e);
    rc = npy_parse(data, size, &x, &e);
    require(rc == 0 || rc == -EBADMSG || rc == -ENOTSUP || rc == -EFBIG, "parse", &e);
    if (rc < 0)
        return 0;
    require(x.header <= size && x.header == header, "header", &e);
    require(x.shape.nd <= SHAPE_MAX_DIMS && x.dtype != DTYPE_NONE, "layout", &e);
    npy_steps(&x, step);
    check_written(&x);
    return 0;
}
