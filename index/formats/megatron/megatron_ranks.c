/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_ranks.c - the file of one rank of Megatron-LM: its tensors. */
#include "index/formats/megatron/megatron_ranks.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "index/formats/format.h"
#include "index/formats/ranks/rank_files.h"
#include "index/formats/torch/torch_walk.h"
#include "index/formats/torch/torch_zip.h"
#include "index/sink.h"

enum { MAX_MEMORY = 512 << 20 }; /* names and shapes of one rank */

static int compare_ranks(const void *a, const void *b)
{
    const struct rank *x = a, *y = b;

    if (x->p != y->p)
        return x->p < y->p ? -1 : 1;
    if (x->e != y->e)
        return x->e < y->e ? -1 : 1;
    return x->t < y->t ? -1 : x->t > y->t;
}

int legacy_sort(struct legacy *l, struct err *e)
{
    qsort(l->rank, l->nranks, sizeof *l->rank, compare_ranks);
    for (size_t i = 1; i < l->nranks; i++)
        if (compare_ranks(&l->rank[i - 1], &l->rank[i]) == 0)
            return err_set(e, EBADMSG, "%s and %s are of one rank", l->rank[i - 1].dir,
                           l->rank[i].dir);
    return 0;
}

struct rank *legacy_rank(const struct legacy *l, uint32_t t, uint32_t p, uint32_t e)
{
    const struct rank key = {.p = p, .e = e, .t = t};

    return l->nranks ? bsearch(&key, l->rank, l->nranks, sizeof key, compare_ranks)
                     : NULL;
}

struct rank *legacy_rank_any(const struct legacy *l, uint32_t p, uint32_t e)
{
    struct rank *r = NULL;

    for (uint32_t t = 0; !r && t < l->tensor; t++)
        r = legacy_rank(l, t, p, e);
    return r;
}

/* ---- loading ---- */

void legacy_entry(const struct legacy *l, uint32_t v, char name[LEGACY_ENTRY])
{
    if (l->several)
        snprintf(name, LEGACY_ENTRY, "model%" PRIu32, v);
    else
        snprintf(name, LEGACY_ENTRY, "%s", l->entry);
}

void legacy_place(const struct legacy *l, const struct rank *r, uint32_t v,
                  struct buf *out)
{
    char entry[LEGACY_ENTRY];

    legacy_entry(l, v, entry);
    buf_addf(out, "%s:%s%s", r->path, entry, entry[0] ? "." : "");
}

bool legacy_model(const struct legacy *l, const struct rank *r, uint32_t v,
                  struct pv *out)
{
    struct pv root = torch_zip_root(r->file.zip), items;
    char name[LEGACY_ENTRY];

    legacy_entry(l, v, name);
    if (!torch_mapping(&root, &items) || items.kind != PV_DICT)
        return false;
    if (name[0])
        return pv_dict_get(&items, name, out);
    *out = root;
    return true;
}

const char *legacy_no_key(void *user UNUSED, const char *path UNUSED,
                          size_t path_len UNUSED,
                          const struct torch_tensor *tensor UNUSED)
{
    return NULL;
}

static int collect_models(const struct legacy *l, struct rank *r, struct err *e)
{
    char name[LEGACY_ENTRY];
    struct pv model;

    for (uint32_t v = 0; v < l->models; v++) {
        legacy_entry(l, v, name);
        if (!legacy_model(l, r, v, &model))
            return err_set(e, EBADMSG, "it holds no %s", name[0] ? name : "dict");
        if (rank_tensors_collect(r->file.zip, &model, r->arena, &r->model[v], e) < 0)
            return err_wrap(e, "its model");
    }
    return 0;
}

int legacy_load(struct legacy *l, struct rank *r, struct err *e)
{
    r->err = (struct err){0};
    r->file.path = r->path;
    r->arena = arena_new(MAX_MEMORY);
    if (!r->arena)
        return err_nomem(e);
    if (torch_file_register(l->sink, &r->file, &r->err) == 0 &&
        torch_file_load(l->c, &r->file, &r->err) == 0)
        collect_models(l, r, &r->err);
    if (r->err.code && !torch_file_is_damaged(r->err.code)) {
        *e = r->err;
        legacy_unload(r);
        return -e->code;
    }
    return 0;
}

void legacy_unload(struct rank *r)
{
    for (size_t v = 0; v < MEGATRON_MAX_VIRTUAL; v++)
        rank_tensors_release(&r->model[v]);
    arena_free(r->arena);
    r->arena = NULL;
    torch_file_close(&r->file);
}
