/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_tracker.c - which step Megatron Bridge notes as its latest. */
#include "index/formats/megatron/megatron_tracker.h"

#include <limits.h>

#include "base/endian.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"
#include "index/formats/torch/torch_zip.h"
#include "remote/source.h"
#include "remote/store.h"

enum { MAX_TRACKER = 1 << 20 }; /* real ones have 5 KiB */

/* A 0-d int64 tensor of the state, as it is stored: plain. */
static bool read_step(struct source *src, struct torch_zip *zip, const struct pv *v,
                      uint64_t *step)
{
    struct torch_tensor t;
    struct err ignored = {0};
    unsigned char bytes[8];

    if (torch_zip_tensor(zip, v, &t, &ignored) != 1 || t.dtype != DTYPE_I64 ||
        t.shape.nd != 0 || t.packed || t.flags ||
        source_read(src, t.data + t.storage_offset * sizeof bytes, sizeof bytes, bytes,
                    &ignored) < 0)
        return false;
    *step = get_le64(bytes);
    return *step <= INT64_MAX;
}

static bool find_step(struct source *src, struct torch_zip *zip, uint64_t *step)
{
    struct pv root = torch_zip_root(zip), items, v;

    return torch_mapping(&root, &items) && items.kind == PV_DICT &&
           pv_dict_get(&items, "step", &v) && read_step(src, zip, &v, step);
}

bool megatron_tracked_step(struct store *store, const char *dir, uint64_t *step)
{
    CLEANUP(torch_zip_freep) struct torch_zip *zip = NULL;
    CLEANUP(source_putp) struct source *src = NULL;
    char path[PATH_MAX];
    struct err ignored = {0};

    return store_join(dir, "latest_train_state.pt", path, sizeof path) == 0 &&
           store->ops->open(store, path, &src, &ignored) == 0 &&
           src->size <= MAX_TRACKER && torch_open(src, &zip, &ignored) == 0 &&
           find_step(src, zip, step);
}
