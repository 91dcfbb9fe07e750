/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_dist_tensor.c - any bytes as a rank's file of DTensors and ShardedTensors. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/rankfiles/dist_tensor.h"
#include "index/formats/torch/torch_walk.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_TENSORS = 1000 };

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

struct run {
    struct torch_zip *zip;
    struct dist_tensor whole;
    uint64_t tensors;
};

/* dist_piece_fn: the box is within the whole, and of its type. */
static int on_piece(void *user, const struct torch_tensor *x, const uint64_t *start,
                    struct err *e)
{
    const struct run *r = user;
    struct shape box, whole;

    require(x->dtype == r->whole.dtype, "dtype", e);
    require(shape_units(&x->shape, x->dtype, &box, e) == 0, "units", e);
    require(shape_units(&r->whole.shape, x->dtype, &whole, e) == 0, "units", e);
    require(box.nd == whole.nd, "rank", e);
    for (uint32_t k = 0; k < box.nd; k++)
        require(!range_outside(start[k], box.dim[k], whole.dim[k]), "box", e);
    return 0;
}

/* torch_item_fn */
static int on_item(void *user, const struct torch_item *item, struct err *e)
{
    struct run *r = user;
    struct err why = {0};
    int rc;

    if (++r->tensors > MAX_TENSORS)
        return err_set(e, E2BIG, "enough");
    require(item->value != NULL, "a value", e);
    rc = dist_tensor_read(r->zip, item->value, &r->whole, on_piece, r, &why);
    require(rc == (dist_tensor_is(item->value) ? 1 : 0) || rc == -why.code, "code",
            &why);
    require(rc >= 0 || rc == -EBADMSG || rc == -ENOTSUP || rc == -ENOMEM,
            "a known code", &why);
    require(rc >= 0 || why.text[0], "a reason", &why);
    require(r->whole.mesh.naxes <= MESH_MAX_AXES, "axes", &why);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct source *src = NULL;
    struct run r = {0};
    struct err e = {0};

    if (source_from_memory(data, size, false, "fuzz", &src, &e) < 0)
        abort();
    if (torch_open(src, &r.zip, &e) == 0) {
        struct torch_walk w = {.zip = r.zip,
                               .fn = on_item,
                               .claims = dist_tensor_is,
                               .user = &r,
                               .key = {.max = TORCH_MAX_PATH},
                               .path = {.max = TORCH_MAX_PATH}};
        int rc = torch_walk_value(&w, torch_zip_root(r.zip), &e);

        require(rc == 0 || rc == -EFBIG || rc == -E2BIG, "walk", &e);
        torch_walk_release(&w);
    }
    torch_zip_free(r.zip);
    source_put(src);
    return 0;
}
