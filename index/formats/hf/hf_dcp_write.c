/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_dcp_write.c - the writer of DCP in torch's Hugging Face layout. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/formats/dcp/dcp_cut.h"
#include "index/formats/hf/hf_dcp.h"
#include "index/formats/hf/safetensors_write.h"
#include "index/formats/torch/torch_zip_write.h"

/*
 * Tensors are spread over model files, and each rank has a file with its share of each of
 * them: docs/formats/hf_dcp.md. Names and metadata are those of torch 2.8 to 2.15
 * (torch/distributed/checkpoint/_hf_utils.py).
 */
struct hf_sharding {
    const struct layout_input *in;
    struct layout *out;
    size_t *chosen; /* of the input */
    size_t count;
    uint32_t *model_file; /* of each chosen tensor, from 0 */
    uint32_t model_files;
    struct dcp_cut cut;
    struct share {
        size_t tensor;
        uint32_t rank, model_file;
        const uint64_t *start, *size;
    } * share;
    size_t shares, cap;
};

/*
 * torch's reader takes every tensor's type by the list of safetensors' module for torch
 * (0.8, torch.py, _TYPES): one that is not in it fails the whole checkpoint.
 */
static bool is_read(enum dtype type)
{
    return type != DTYPE_F4 && type != DTYPE_F8_E8M0;
}

static bool fits(const struct layout_tensor *t)
{
    struct shape units;

    return safetensors_takes(t, t->wrapper) && is_read(t->dtype) &&
           torch_shape(t->dtype, &t->shape, &units);
}

/* A model and nothing else, as in Hugging Face's own directories. */
static int choose(struct hf_sharding *s, struct err *e)
{
    size_t left[3] = {0};
    char what[80];

    s->chosen =
        arena_array(layout_arena(s->out), s->in->tensors + 1, sizeof *s->chosen);
    if (!s->chosen)
        return err_nomem(e);
    for (size_t i = 0; i < s->in->tensors; i++) {
        const struct layout_tensor *t = &s->in->tensor[i];

        if (t->role != ROLE_MODEL)
            left[t->role]++;
        else if (fits(t))
            s->chosen[s->count++] = i;
        else
            TRY(layout_loss(s->out, LOSS_TENSOR, t->key, t->key_len, e));
    }
    for (enum role r = ROLE_OPTIMIZER; r <= ROLE_OTHER; r++) {
        int n = snprintf(what, sizeof what, "%s (%zu tensors)",
                         r == ROLE_OTHER ? "other" : "optimizer", left[r]);

        if (left[r])
            TRY(layout_loss(s->out, LOSS_ROLE, what, (size_t)n, e));
    }
    for (size_t i = 0; i < s->in->objects; i++)
        TRY(layout_loss(s->out, LOSS_OBJECT, s->in->object[i].key,
                        s->in->object[i].key_len, e));
    return 0;
}

/*
 * In order of the names; a model file ends with a batch, or where the next tensor would make
 * it too large.
 */
static int spread(struct hf_sharding *s, uint64_t max, struct err *e)
{
    uint64_t filled = 0, bytes;

    s->model_file =
        arena_array(layout_arena(s->out), s->count + 1, sizeof *s->model_file);
    if (!s->model_file)
        return err_nomem(e);
    s->model_files = 1;
    for (size_t i = 0; i < s->count; i++) {
        const struct layout_tensor *t = &s->in->tensor[s->chosen[i]];

        TRY(shape_bytes(&t->shape, t->dtype, &bytes, e));
        if (i > 0 && t->batch != s->in->tensor[s->chosen[i - 1]].batch) {
            s->model_files++;
            filled = 0;
        }
        if (max && filled > 0 && (bytes > max || filled > max - bytes)) {
            s->model_files++;
            filled = 0;
        }
        filled += bytes;
        s->model_file[i] = s->model_files - 1;
    }
    if (s->model_files > 99999) /* the numbers of names have five digits */
        return err_set(e, EINVAL, "%u model files: more than 99999 are not written",
                       s->model_files);
    return 0;
}

/* ---- shares ---- */

static int add_share(struct hf_sharding *s, size_t i, const struct dcp_share *box,
                     uint32_t nd, struct err *e)
{
    uint64_t *numbers =
        arena_array(layout_arena(s->out), 2 * (size_t)nd + 1, sizeof *numbers);

    if (!VEC_ROOM(s->share, s->shares, s->cap))
        return err_nomem(e);
    if (!numbers)
        return err_nomem(e);
    memcpy(numbers, box->start, nd * sizeof *numbers);
    memcpy(numbers + nd, box->size, nd * sizeof *numbers);
    s->share[s->shares++] = (struct share){.tensor = s->chosen[i],
                                           .rank = box->rank,
                                           .model_file = s->model_file[i],
                                           .start = numbers,
                                           .size = numbers + nd};
    return 0;
}

/*
 * The first rank behind the last row has the tensor with no rows, as torch stores it: that
 * alone proves, to one who lost other files, where the tensor ends.
 */
static int add_empty(struct hf_sharding *s, size_t i, const struct shape *units,
                     uint64_t rows, struct err *e)
{
    struct dcp_share box = {.rank = (uint32_t)rows};

    if (s->cut.along[1] > 1 || units->nd == 0 || rows >= s->cut.along[0])
        return 0;
    for (uint32_t k = 0; k < units->nd; k++) {
        if (units->dim[k] == 0)
            return 0;
        box.size[k] = units->dim[k];
    }
    box.start[0] = units->dim[0];
    box.size[0] = 0;
    return add_share(s, i, &box, units->nd, e);
}

static int cut_tensor(struct hf_sharding *s, size_t i, struct err *e)
{
    const struct layout_tensor *t = &s->in->tensor[s->chosen[i]];
    struct shape units;
    struct dcp_share box;
    uint64_t n;

    TRY(shape_units(&t->shape, t->dtype, &units, e));
    for (n = 0; n < dcp_shares(&s->cut, i, &units); n++) {
        dcp_share(&s->cut, i, &units, n, &box);
        TRY(add_share(s, i, &box, units.nd, e));
    }
    return add_empty(s, i, &units, n, e);
}

static int by_file(const void *a, const void *b)
{
    const struct share *x = a, *y = b;

    if (x->model_file != y->model_file)
        return x->model_file < y->model_file ? -1 : 1;
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return (x->tensor > y->tensor) - (x->tensor < y->tensor);
}

/* ---- files ---- */

static void add_offsets(struct buf *out, const uint64_t *start, uint32_t nd)
{
    buf_adds(out, ": {\"saved_offsets\": [");
    for (uint32_t k = 0; k < nd; k++)
        buf_addf(out, "%s%" PRIu64, k ? ", " : "", start[k]);
    buf_adds(out, "]}");
}

/* __metadata__, whose values are text: the offsets are JSON in JSON. */
static int metadata_of(const struct hf_sharding *s, const struct safetensors_entry *x,
                       size_t n, struct buf *out)
{
    CLEANUP(buf_release) struct buf info = {0};

    buf_addc(&info, '{');
    for (size_t i = 0; i < n; i++) {
        buf_adds(&info, i ? ", " : "");
        buf_add_json(&info, x[i].name, x[i].name_len);
        add_offsets(&info, x[i].start, s->in->tensor[x[i].tensor].shape.nd);
    }
    buf_addc(&info, '}');
    buf_adds(out, "{\"DCP_SHARDING_INFO\":");
    buf_add_json(out, info.data, info.len);
    buf_adds(out, ",\"DCP_VERSION\":\"1.0\",\"format\":\"pt\"}");
    return buf_failed(&info) ? buf_failed(&info) : buf_failed(out);
}

static int put_file(struct hf_sharding *s, const struct share *share, size_t n,
                    struct err *e)
{
    CLEANUP_FREE struct safetensors_entry *entry = calloc(n, sizeof *entry);
    CLEANUP(buf_release) struct buf metadata = {0};
    struct layout_file *f;
    char name[80];

    if (!entry)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++) {
        const struct layout_tensor *t = &s->in->tensor[share[i].tensor];

        entry[i] = (struct safetensors_entry){
            .tensor = share[i].tensor, .start = share[i].start, .size = share[i].size};
        entry[i].name = layout_own_name(t, &entry[i].name_len);
    }
    if (metadata_of(s, entry, n, &metadata) < 0)
        return err_nomem(e);
    snprintf(name, sizeof name, "shard-%05u-model-%05u-of-%05u.safetensors",
             share->rank + 1, share->model_file + 1, s->model_files);
    TRY(layout_file_new(s->out, name, 0, &f, e));
    return safetensors_write(f, s->in, entry, n, metadata.data, e);
}

static int put_files(struct hf_sharding *s, struct err *e)
{
    int ret = 0;

    if (s->shares > 1)
        qsort(s->share, s->shares, sizeof *s->share, by_file);
    for (size_t i = 0, n; ret == 0 && i < s->shares; i += n) {
        for (n = 1; i + n < s->shares && s->share[i + n].rank == s->share[i].rank &&
                    s->share[i + n].model_file == s->share[i].model_file;)
            n++;
        ret = put_file(s, s->share + i, n, e);
    }
    return ret;
}

static int layout_hf_dcp(const struct layout_input *in, const struct layout_options *o,
                         struct layout *out, struct err *e)
{
    struct hf_sharding s = {.in = in, .out = out};
    int ret;

    if (o->codec)
        return err_set(e, EINVAL, "dcp-hf: safetensors are written, without a codec");
    ret = choose(&s, e);
    if (ret == 0)
        ret = spread(&s, o->max_shard_size, e);
    if (ret == 0)
        ret =
            dcp_cut_new(in, o, false, s.chosen, s.count, layout_arena(out), &s.cut, e);
    for (size_t i = 0; ret == 0 && i < s.count; i++)
        ret = cut_tensor(&s, i, e);
    if (ret == 0)
        ret = put_files(&s, e);
    free(s.share);
    return ret;
}

const struct format_writer writer_dcp_hf = {
    .name = "dcp-hf",
    .title = "PyTorch DCP as sharded safetensors (HuggingFaceStorageWriter)",
    .layout = layout_hf_dcp,
};
