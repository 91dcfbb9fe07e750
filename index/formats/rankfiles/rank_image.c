/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/rank_image.c - safetensors files of ranks; boxes that somebody else tells. */
#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/checked.h"
#include "index/formats/format.h"
#include "index/formats/rankfiles/rank_set_priv.h"
#include "index/formats/ranks/rank_boxes.h"
#include "index/formats/torch/torch_walk.h"
#include "remote/source.h"

/* ---- files ---- */

int rank_image_load(const struct scan_context *c, struct rank_file *f, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    char path[PATH_MAX];

    if (store_join(c->dir, f->path, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", f->path);
    if (c->store->ops->open(c->store, path, &src, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    if (!file_id_equal(&src->id, &f->file.id))
        return err_set(e, ESTALE, "%s was changed during the scan", path);
    TRY(safetensors_read(src, 0, src->size, &f->header, e));
    return source_check(src, e);
}

/* Its elements stand one behind the other, from byte `data` of the file on. */
static int open_tensor(const struct safetensors_header *h,
                       const struct safetensors_tensor *t, struct torch_tensor *out,
                       struct err *e)
{
    struct shape units;
    int64_t step = 1;

    *out = (struct torch_tensor){
        .dtype = t->dtype, .data = h->data + t->begin, .data_len = t->end - t->begin};
    safetensors_shape(t, &out->shape);
    TRY(shape_units(&out->shape, t->dtype, &units, e));
    for (uint32_t k = units.nd; k-- > 0;) {
        out->stride[k] = step;
        /* Of no elements, where steps do not matter, sizes may multiply to anything. */
        if (__builtin_mul_overflow(step, (int64_t)units.dim[k], &step))
            step = 0;
    }
    return 0;
}

static int collect_tensor(struct rank_set *s, uint32_t file,
                          const struct safetensors_tensor *t, struct err *e)
{
    const struct rank_set_how *how = s->how;
    struct torch_tensor x;
    struct torch_item item = {.key = t->name,
                              .key_len = t->name_len,
                              .path = t->name,
                              .path_len = t->name_len,
                              .tensor = &x};

    TRY(open_tensor(&s->file[file].header, t, &x, e));
    return how->on_tensor ? how->on_tensor(how->user, file, &item, e)
                          : rank_set_plain(s, file, item.key, item.key_len, &item, e);
}

int rank_image_collect(struct rank_set *s, uint32_t file, struct err *e)
{
    const struct safetensors_header *h = &s->file[file].header;

    s->cursor = s->entry;
    s->budget += RANK_MEMORY_A_BYTE * h->data;
    for (size_t i = 0; i < h->count; i++)
        TRY(collect_tensor(s, file, &h->tensor[i], e));
    return 0;
}

/* ---- boxes ---- */

/* NULL, or why x has not all of these boxes. */
static const char *misfit(const struct rank_set_boxes *b)
{
    const struct shape *has = &b->x->shape;

    if (b->x->dtype != b->dtype)
        return "its part is of another type than the metadata tell";
    if (dtype_bits(b->dtype) % 8 != 0)
        return "its elements share bytes";
    if (has->nd != b->boxes->nd)
        return "its part has another number of dimensions than the metadata tell";
    for (size_t i = 0; i < b->boxes->count; i++) {
        const struct rank_box *box = &b->boxes->box[i];

        for (uint32_t k = 0; k < has->nd; k++)
            if (range_outside(box->from[k], box->size[k], has->dim[k]) ||
                (b->exact && box->size[k] != has->dim[k]))
                return "its part has another size than the metadata tell";
    }
    return NULL;
}

/* Where a box that holds something begins in x. */
static int add_box(struct rank_set *s, struct rank_entry *t, uint32_t file,
                   const struct rank_set_boxes *b, const struct rank_box *box,
                   struct err *e)
{
    struct torch_tensor x = *b->x;

    for (uint32_t k = 0; k < x.shape.nd; k++) {
        if (box->size[k] == 0)
            return 0;
        x.shape.dim[k] = box->size[k];
        x.storage_offset += box->from[k] * (uint64_t)x.stride[k];
    }
    return rank_entry_piece(s, t, file, &x, box->to, e);
}

int rank_set_boxes(struct rank_set *s, uint32_t file, const struct rank_set_boxes *b,
                   struct err *e)
{
    const char *why = misfit(b);
    struct rank_entry *t;

    if (rank_entry_meet(s, file, b->path, b->len, true, &t, e) < 0 || !t)
        return -e->code;
    /* Their number is for the caller to bound: the file of the rank has no word of them. */
    s->budget += b->boxes->count * (sizeof(struct rank_piece) +
                                    3 * (size_t)b->boxes->nd * sizeof(uint64_t));
    s->distributed = t->distributed = t->plain = true;
    if (why)
        return rank_entry_fault(s, t, file, why, e);
    TRY(rank_entry_shape(s, t, file, b->dtype, b->shape, e));
    for (size_t i = 0; i < b->boxes->count; i++)
        TRY(add_box(s, t, file, b, &b->boxes->box[i], e));
    return 0;
}
