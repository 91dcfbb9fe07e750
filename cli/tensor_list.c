/* SPDX-License-Identifier: MIT */
/* cli/tensor_list.c - copies what commands need of each tensor out of the index. */
#include "cli/tensor_list.h"

#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "index/names.h"

/* A million tensors with names of 1 KiB: nobody has as many. */
static const size_t texts_max = (size_t)1 << 30;

struct loading {
    struct cli *c;
    struct tensor_list *list;
    bool (*keep)(void *user, const struct tensor_info *t);
    void *user;
};

static int make_room(struct tensor_list *l, struct err *e)
{
    size_t cap = l->cap ? 2 * l->cap : 256;
    struct listed_tensor *row;

    if (l->n < l->cap)
        return 0;
    row = reallocarray(l->row, cap, sizeof *row);
    if (!row)
        return err_nomem(e);
    l->row = row;
    l->cap = cap;
    return 0;
}

static int add_tensor(void *user, const struct tensor_info *t)
{
    struct loading *load = user;
    struct tensor_list *l = load->list;
    struct err *e = &load->c->err;
    CLEANUP(buf_release) struct buf shape = {0}, own = {0};
    struct listed_tensor row = {.key_len = t->key_len,
                                .wrapper = t->wrapper,
                                .ord = t->ord,
                                .dtype = t->dtype,
                                .role = t->role,
                                .bytes = t->bytes};

    if (load->keep && !load->keep(load->user, t))
        return 0;
    if (make_room(l, e) < 0 || shape_format(&t->shape, &shape) < 0)
        return err_nomem(e);
    row.key = arena_memdup(l->texts, t->key, t->key_len);
    row.shape = arena_memdup(l->texts, shape.data, shape.len);
    if (t->fault)
        row.fault = arena_memdup(l->texts, t->fault, strlen(t->fault));
    if (t->modules &&
        name_without_modules(t->key + t->wrapper, t->key_len - t->wrapper, &own) == 0) {
        row.own = arena_memdup(l->texts, own.data, own.len);
        row.own_len = own.len;
    }
    if (!row.key || (t->modules && !row.own) || !row.shape || (t->fault && !row.fault))
        return err_nomem(e);
    l->row[l->n++] = row;
    l->bytes += t->bytes;
    return 0;
}

int tensor_list_load(struct cli *c, struct catalog *catalog, int64_t checkpoint,
                     bool (*keep)(void *user, const struct tensor_info *t), void *user,
                     struct tensor_list *out)
{
    struct loading load = {.c = c, .list = out, .keep = keep, .user = user};

    out->texts = arena_new(texts_max);
    if (!out->texts)
        return err_nomem(&c->err);
    return catalog_tensors(catalog, checkpoint, 0, add_tensor, &load, &c->err);
}

void tensor_list_release(struct tensor_list *l)
{
    arena_free(l->texts);
    free(l->row);
    *l = (struct tensor_list){0};
}
