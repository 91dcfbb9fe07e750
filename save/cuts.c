/* SPDX-License-Identifier: MIT */
/* save/cuts.c - boxes of tensors, and the rank that has written each, from the index. */
#include "save/cuts.h"

#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/catalog.h"

enum { MAX_RANK = 99999, CHUNK_MEMORY = 1 << 30 };

struct cuts {
    const struct reader_env *env;
    int64_t checkpoint;
    struct arena *arena;
    uint32_t *rank, *number; /* of each file, by number */
    uint32_t files, order;
};

/* Files of DCP tell it: "__3_0.distcp", and of Megatron Core "decoder__3_1.distcp". */
static bool told_rank(const char *path, uint32_t *rank, uint32_t *number)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path,
               *at = NULL;
    unsigned r, k;

    for (const char *p = name; (p = strstr(p, "__")); p++)
        at = p;
    if (!at || sscanf(at, "__%6u_%6u.distcp", &r, &k) != 2 || r > MAX_RANK)
        return false;
    *rank = r;
    *number = k;
    return true;
}

static int count_file(void *user, const struct catalog_file *f)
{
    struct cuts *c = user;

    c->files = MAX(c->files, f->number + 1);
    return 0;
}

static int take_file(void *user, const struct catalog_file *f)
{
    struct cuts *c = user;

    if (f->number < c->files && f->storage &&
        !told_rank(f->path, &c->rank[f->number], &c->number[f->number]))
        c->rank[f->number] = MIN(c->order++, (uint32_t)MAX_RANK);
    return 0;
}

int cuts_new(const struct reader_env *env, int64_t checkpoint, struct arena *a,
             struct cuts **out, struct err *e)
{
    struct cuts *c = arena_alloc(a, sizeof *c);

    if (!c)
        return err_nomem(e);
    *c = (struct cuts){.env = env, .checkpoint = checkpoint, .arena = a};
    TRY(catalog_files(env->catalog, checkpoint, count_file, c, e));
    c->rank = arena_array(a, (size_t)c->files + 1, sizeof *c->rank);
    c->number = arena_array(a, (size_t)c->files + 1, sizeof *c->number);
    if (!c->rank || !c->number)
        return err_nomem(e);
    *out = c;
    return catalog_files(env->catalog, checkpoint, take_file, c, e);
}

static bool is_empty(const struct chunk *c, uint32_t nd)
{
    for (uint32_t k = 0; k < nd; k++)
        if (c->size[k] == 0)
            return true;
    return false;
}

static int take_chunks(const struct cuts *c, const struct chunk *chunk, size_t n,
                       uint32_t nd, const struct layout_cuts **out, struct err *e)
{
    struct layout_cuts *all = arena_alloc(c->arena, sizeof *all);
    struct layout_cut *cut = arena_array(c->arena, n + 1, sizeof *cut);
    uint64_t *box = arena_array(c->arena, n * 2 * nd + 1, sizeof *box);

    if (!all || !cut || !box)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++) {
        if (is_empty(&chunk[i], nd))
            continue;
        memcpy(box, chunk[i].start, nd * sizeof *box);
        memcpy(box + nd, chunk[i].size, nd * sizeof *box);
        cut[all->count++] = (struct layout_cut){
            .rank = chunk[i].file < c->files ? c->rank[chunk[i].file] : 0,
            .number = chunk[i].file < c->files ? c->number[chunk[i].file] : 0,
            .start = box,
            .size = box + nd};
        box += 2 * (size_t)nd;
    }
    all->cut = cut;
    *out = all->count ? all : NULL;
    return 0;
}

int cuts_of(const struct cuts *c, uint32_t ord, const struct layout_cuts **out,
            struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(CHUNK_MEMORY);
    const struct chunk *chunk;
    struct tensor_info t;
    struct shape units;
    size_t n;

    *out = NULL;
    if (!a)
        return err_nomem(e);
    TRY(catalog_tensor(c->env->catalog, c->checkpoint, ord, a, &t, e));
    if (t.fault)
        return 0;
    TRY(shape_units(&t.shape, t.dtype, &units, e));
    TRY(catalog_chunks(c->env->catalog, c->checkpoint, &t, a, &chunk, &n, e));
    return take_chunks(c, chunk, n, units.nd, out, e);
}
