/* SPDX-License-Identifier: MIT */
/* index/formats/npz/npz_write.c - the writer of NumPy archives: one .npz of all tensors. */
#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/npz/npz_member.h"
#include "index/formats/object_value.h"
#include "index/formats/torch/zip_write.h"
#include "index/layout.h"
#include "index/names.h"
#include "remote/store.h"

/* Of members' data, as numpy.lib.format aligns its own headers: mapped arrays are aligned. */
enum { ALIGNMENT = 64 };

static const char suffix[] = ".npy";

/*
 * NumPy's headers say less than our types: 8-bit floats are all |V1, packed ones |u1. And
 * a zip's names are text that no unpacker stumbles over (no "..", no backslash), and alone
 * tell the role when it is read again.
 */
static bool fits(const struct layout_tensor *t)
{
    CLEANUP(buf_release) struct buf header = {0}, name = {0};
    struct npy_layout back;
    struct err ignored = {0};

    buf_add(&name, t->key, t->key_len);
    return buf_adds(&name, suffix) == 0 && store_name_is_safe(name.data, name.len) &&
           object_text_is_utf8(t->key, t->key_len) &&
           role_of(NULL, t->key, t->key_len) == t->role &&
           npy_header(t->dtype, &t->shape, &header, &ignored) == 0 &&
           npy_parse(header.data, header.len, &back, &ignored) == 0 &&
           back.dtype == t->dtype && shape_equal(&back.shape, &t->shape);
}

static int put_tensor(struct zip_write *z, const struct layout_input *in, size_t i,
                      struct err *e)
{
    const struct layout_tensor *t = &in->tensor[i];
    CLEANUP(buf_release) struct buf header = {0}, name = {0};
    uint64_t bytes;
    int ret;

    buf_add(&name, t->key, t->key_len);
    if (buf_adds(&name, suffix) < 0)
        return err_nomem(e);
    ret = npy_header(t->dtype, &t->shape, &header, e);
    if (ret == 0)
        ret = shape_bytes(&t->shape, t->dtype, &bytes, e);
    if (ret == 0)
        ret = zip_write_open(z, name.data, name.len, header.len + bytes, e);
    if (ret == 0)
        ret = layout_bytes(z->file, header.data, header.len, e);
    return ret == 0 ? layout_box(z->file, in, i, NULL, NULL, e) : ret;
}

static int put_all(const struct layout_input *in, struct layout *out,
                   struct zip_write *z, struct err *e)
{
    uint64_t len;
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < in->tensors; i++) {
        const struct layout_tensor *t = &in->tensor[i];

        ret = fits(t) ? put_tensor(z, in, i, e)
                      : layout_loss(out, LOSS_TENSOR, t->key, t->key_len, e);
    }
    for (size_t i = 0; ret == 0 && i < in->objects; i++)
        ret =
            layout_loss(out, LOSS_OBJECT, in->object[i].key, in->object[i].key_len, e);
    return ret == 0 ? zip_write_end(z, &len, e) : ret;
}

static int layout_npz(const struct layout_input *in, const struct layout_options *o,
                      struct layout *out, struct err *e)
{
    struct zip_write z = {0};
    struct layout_file *f;
    int ret;

    if (o->ranks > 1 || o->mesh[0] || o->max_shard_size || o->codec) {
        err_set(
            e, EINVAL,
            "npz: one file of whole tensors is written, without ranks, sizes or codec");
        return err_hint(e, "leave --ranks, --mesh, --max-shard-size and --codec out");
    }
    TRY(layout_file_new(out, "tensors.npz", 0, &f, e));
    zip_write_begin(&z, f, ALIGNMENT);
    ret = put_all(in, out, &z, e);
    zip_write_release(&z);
    return ret;
}

const struct format_writer writer_npz = {
    .name = "npz",
    .title = "NumPy: one .npz archive",
    .layout = layout_npz,
};
