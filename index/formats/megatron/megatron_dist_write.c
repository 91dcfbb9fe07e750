/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_dist_write.c - the writer of Megatron Core's torch_dist. */
#include <errno.h>

#include "base/err.h"
#include "index/formats/dcp/dcp_write.h"
#include "index/formats/megatron/megatron.h"
#include "index/formats/megatron/megatron_write.h"

static int layout_torch_dist(const struct layout_input *in,
                             const struct layout_options *o, struct layout *out,
                             struct err *e)
{
    struct mega_writing w;
    struct dcp_write_how how = {.role_of = megatron_role, .no_paths = true};
    int ret;

    if (o->max_shard_size || o->codec)
        return err_set(
            e, EINVAL,
            "torch_dist: a file a rank is written, plain: no shard size, no codec");
    ret = mega_write_begin(in, out, &w, e);
    how.known = in->tensor;
    how.skip = w.objects.taken;
    how.objects = &w.objects;
    if (ret == 0)
        ret = dcp_write(&w.in, o, &how, out, e);
    return ret == 0 ? mega_write_end(&w, "torch_dist", e) : ret;
}

const struct format_writer writer_torch_dist = {
    .name = "torch_dist",
    .title = "Megatron Core, backend torch_dist",
    .layout = layout_torch_dist,
};
