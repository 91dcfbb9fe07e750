/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_object_write.c - torch.save of objects that hold tensors. */
#include "index/formats/torch/torch_object_write.h"

#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/object_pickle.h"
#include "index/formats/torch/torch_zip_write.h"
#include "index/layout.h"

/* ---- tensors by key ---- */

static int compare(const char *a, size_t a_len, const char *b, size_t b_len)
{
    int c = memcmp(a, b, MIN(a_len, b_len));

    return c ? c : (a_len > b_len) - (a_len < b_len);
}

static int by_key(const void *a, const void *b, void *user)
{
    const struct layout_tensor *t = user, *x = &t[*(const size_t *)a],
                               *y = &t[*(const size_t *)b];

    return compare(x->key, x->key_len, y->key, y->key_len);
}

int torch_objects_new(const struct layout_input *in, struct arena *a,
                      struct torch_objects *out, struct err *e)
{
    *out = (struct torch_objects){
        .in = in,
        .by_key = arena_array(a, in->tensors + 1, sizeof *out->by_key),
        .taken = arena_array(a, in->tensors + 1, sizeof *out->taken)};
    if (!out->by_key || !out->taken)
        return err_nomem(e);
    for (size_t i = 0; i < in->tensors; i++)
        out->by_key[i] = i;
    if (in->tensors > 1)
        qsort_r(out->by_key, in->tensors, sizeof *out->by_key, by_key,
                (void *)(uintptr_t)in->tensor);
    return 0;
}

/* in->tensors: there is none. */
static size_t find(const struct torch_objects *all, const char *key)
{
    size_t low = 0, high = all->in->tensors, len = strlen(key);

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const struct layout_tensor *t = &all->in->tensor[all->by_key[middle]];
        int c = compare(t->key, t->key_len, key, len);

        if (c == 0)
            return all->by_key[middle];
        if (c < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return all->in->tensors;
}

/* ---- the pickle ---- */

/* The member that a tensor has, or gets: what is there twice is one storage. */
static bool member_of(struct torch_object *x, size_t tensor, size_t *out)
{
    for (*out = 0; *out < x->tensors; ++*out)
        if (x->tensor[*out] == tensor)
            return true;
    if (x->tensors == x->cap) {
        size_t cap = x->cap ? x->cap * 2 : 8;
        size_t *grown = reallocarray(x->tensor, cap, sizeof *grown);

        x->nomem |= !grown;
        if (!grown)
            return false;
        x->tensor = grown;
        x->cap = cap;
    }
    x->tensor[x->tensors++] = tensor;
    return true;
}

/* object_pickle_how.tensor */
static bool put_tensor(void *user, const char *key, struct pickler *p)
{
    struct torch_object *x = user;
    const struct layout_input *in = x->all->in;
    size_t i = find(x->all, key), member;
    struct shape units;
    char name[24];

    if (i == in->tensors ||
        !torch_shape(in->tensor[i].dtype, &in->tensor[i].shape, &units) ||
        !member_of(x, i, &member))
        return false;
    snprintf(name, sizeof name, "%zu", member);
    torch_pickle_tensor(p, in->tensor[i].dtype, &units, name);
    return true;
}

int torch_object_make(const struct torch_objects *all, const struct layout_object *o,
                      bool alone, struct torch_object *out, struct err *e)
{
    const struct object_pickle_how how = {.tensor = put_tensor, .user = out};
    int rc;

    *out = (struct torch_object){.all = all};
    pickle_begin(&out->pickle);
    if (alone) {
        pickle_list(&out->pickle);
        pickle_mark(&out->pickle);
    }
    rc = object_pickle_with(o->json, o->json_len, &how, &out->pickle, e);
    if (alone)
        pickle_append(&out->pickle);
    pickle_end(&out->pickle);
    return out->nomem ? err_nomem(e) : rc;
}

void torch_object_release(struct torch_object *x)
{
    pickle_release(&x->pickle);
    free(x->tensor);
    x->tensor = NULL;
}

void torch_object_take(const struct torch_object *x)
{
    for (size_t i = 0; i < x->tensors; i++)
        x->all->taken[x->tensor[i]] = true;
}

/* ---- the archive ---- */

static int put_member(const struct torch_object *x, struct zip_write *z, size_t i,
                      struct err *e)
{
    const struct layout_tensor *t = &x->all->in->tensor[x->tensor[i]];
    uint64_t bytes;
    char name[48];
    int n = snprintf(name, sizeof name, "archive/data/%zu", i);

    TRY(shape_bytes(&t->shape, t->dtype, &bytes, e));
    TRY(zip_write_open(z, name, (size_t)n, bytes, e));
    return layout_box(z->file, x->all->in, x->tensor[i], NULL, NULL, e);
}

int torch_object_put(const struct torch_object *x, struct zip_write *z,
                     struct layout_file *f, uint64_t *len, struct err *e)
{
    static const char name[] = "archive/data.pkl";
    const struct buf *text = &x->pickle.out;
    int ret;

    if (buf_failed(text))
        return err_nomem(e);
    zip_write_begin(z, f, TORCH_ALIGN);
    ret = zip_write_literal(z, name, strlen(name), text->data, text->len, e);
    if (ret == 0)
        ret = torch_zip_marks(z, false, e);
    for (size_t i = 0; ret == 0 && i < x->tensors; i++)
        ret = put_member(x, z, i, e);
    if (ret == 0)
        ret = torch_zip_version(z, e);
    return ret == 0 ? zip_write_end(z, len, e) : ret;
}

int torch_object_file(const struct torch_object *x, struct layout *l, const char *path,
                      struct err *e)
{
    struct zip_write z = {0};
    struct layout_file *f;
    uint64_t len;
    int ret = layout_file_new(l, path, 0, &f, e);

    if (ret == 0)
        ret = torch_object_put(x, &z, f, &len, e);
    zip_write_release(&z);
    return ret;
}
