/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/rank_tensors.c - the tensors that the file of one rank holds, by name. */
#include "index/formats/ranks/rank_tensors.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/formats/torch/torch_walk.h"

struct collect {
    struct arena *arena;
    struct rank_tensors *to;
    size_t cap;
};

static struct rank_tensor *add_tensor(struct collect *k, struct err *e)
{
    struct rank_tensors *t = k->to;

    if (!VEC_ROOM(t->tensor, t->count, k->cap)) {
        err_nomem(e);
        return NULL;
    }
    t->tensor[t->count] = (struct rank_tensor){0};
    return &t->tensor[t->count++];
}

/* "BYTES CRC": torch_file.h, codec_zip_deflate. */
static int keep_param(struct arena *a, const struct torch_tensor *x,
                      struct rank_tensor *out, struct err *e)
{
    char text[64];
    int n = snprintf(text, sizeof text, "%" PRIu64 " %08" PRIx32, x->data_len, x->crc);

    out->param = arena_memdup(a, text, (size_t)n);
    return out->param ? 0 : err_nomem(e);
}

static int keep(struct arena *a, const struct torch_tensor *x, struct rank_tensor *out,
                struct err *e)
{
    out->dtype = x->dtype;
    out->flags = x->flags;
    out->nd = x->shape.nd;
    out->crc = x->crc;
    out->data = x->data;
    out->data_len = x->data_len;
    out->first = x->storage_offset;
    out->packed = x->packed;
    out->dim = arena_array(a, (size_t)out->nd + 1, sizeof *out->dim);
    out->stride = arena_array(a, (size_t)out->nd + 1, sizeof *out->stride);
    if (!out->dim || !out->stride)
        return err_nomem(e);
    memcpy(out->dim, x->shape.dim, out->nd * sizeof *out->dim);
    memcpy(out->stride, x->stride, out->nd * sizeof *out->stride);
    return x->packed ? keep_param(a, x, out, e) : 0;
}

/* torch_item_fn */
static int collect_item(void *user, const struct torch_item *item, struct err *e)
{
    struct collect *k = user;
    struct rank_tensor *t = add_tensor(k, e);

    if (!t)
        return -e->code;
    t->name = arena_memdup(k->arena, item->key, item->key_len);
    t->len = item->key_len;
    if (!item->tensor)
        t->why = arena_memdup(k->arena, item->why, strlen(item->why));
    if (!t->name || (!item->tensor && !t->why))
        return err_nomem(e);
    return item->tensor ? keep(k->arena, item->tensor, t, e) : 0;
}

static int compare_names(const void *a, const void *b)
{
    const struct rank_tensor *x = a, *y = b;
    int r = memcmp(x->name, y->name, MIN(x->len, y->len));

    return r ? r : (x->len > y->len) - (x->len < y->len);
}

/* Two tensors of one name: a reader could not tell which. */
static int check_names(const struct rank_tensors *t, struct err *e)
{
    for (size_t i = 1; i < t->count; i++)
        if (compare_names(&t->tensor[i - 1], &t->tensor[i]) == 0)
            return err_set(e, EBADMSG, "it has two tensors %.*s",
                           (int)MIN(t->tensor[i].len, (size_t)256), t->tensor[i].name);
    return 0;
}

int rank_tensors_collect(struct torch_zip *zip, const struct pv *v, struct arena *a,
                         struct rank_tensors *out, struct err *e)
{
    struct collect k = {.arena = a, .to = out};
    CLEANUP(torch_walk_release)
    struct torch_walk w = {.zip = zip,
                           .fn = collect_item,
                           .user = &k,
                           .key = {.max = TORCH_MAX_PATH},
                           .path = {.max = TORCH_MAX_PATH}};

    *out = (struct rank_tensors){0};
    TRY(torch_walk_value(&w, *v, e));
    if (w.too_deep > 0 || w.unnamed > 0)
        return err_set(e, EBADMSG, "its tensors are nested too deep");
    if (out->count > 0)
        qsort(out->tensor, out->count, sizeof *out->tensor, compare_names);
    return check_names(out, e);
}

void rank_tensors_release(struct rank_tensors *t)
{
    free(t->tensor);
    *t = (struct rank_tensors){0};
}

const struct rank_tensor *rank_tensors_find(const struct rank_tensors *t,
                                            const char *name, size_t len)
{
    const struct rank_tensor key = {.name = name, .len = len};

    return t->count ? bsearch(&key, t->tensor, t->count, sizeof key, compare_names)
                    : NULL;
}

void rank_tensor_open(const struct rank_tensor *x, struct torch_tensor *out)
{
    *out = (struct torch_tensor){
        .dtype = x->dtype,
        .shape = {.nd = x->nd},
        .storage_offset = x->first,
        .data = x->data,
        .data_len = x->data_len,
        .packed = x->packed,
        .crc = x->crc,
        .flags = x->flags,
    };
    memcpy(out->shape.dim, x->dim, x->nd * sizeof *x->dim);
    memcpy(out->stride, x->stride, x->nd * sizeof *x->stride);
}

void rank_tensor_chunk(const struct rank_tensor *x, uint32_t number, struct chunk *out)
{
    *out = (struct chunk){
        .file = number,
        .encoding = x->packed ? CHUNK_ZIP_DEFLATE : CHUNK_PLAIN,
        .flags = x->flags,
        .offset = x->data,
        .length = x->packed ? x->packed : x->data_len,
        .first = x->first,
        .step = x->stride,
        .param = x->param,
        .param_len = x->param ? (uint32_t)strlen(x->param) : 0,
    };
}
