/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_local.c - ranks of OLMo's type local: the model's ranges, the optimizer's. */
#include "index/formats/olmo/olmo_local.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/formats/olmo/olmo_flat.h"
#include "index/formats/rankfiles/rank_set.h"
#include "index/formats/torch/torch_walk.h"

enum {
    MAX_MEMORY = 1 << 30, /* ranges and names of all ranks: a million has 120 MB */
    MAX_NUMBER = 1 << 24, /* parameters of an optimizer */
    MEMORY_A_BYTE = 16,   /* of a pickle: a name can stand there often, and be long */
    FREE_MEMORY = 4 << 20,
};

static const char STATE[] = "state.";

/* What a rank has of a parameter. */
struct range {
    const char *name;
    size_t len;
    uint64_t begin, count;
    uint32_t nd;
    const uint64_t *dim;
};

struct ranges {
    struct range *range; /* malloc; by name, once the file is read */
    size_t count, cap;
};

/* The optimizer's number of a parameter. */
struct number {
    uint64_t number;
    const char *name; /* without FSDP's parts */
    size_t len;
};

struct olmo_local {
    struct arena *arena;
    uint64_t budget;     /* bytes of the arena, by what was read */
    struct ranges *rank; /* by rank */
    uint32_t world;
    struct rank_set **set;
    const uint32_t *of; /* the rank of each file */
    uint32_t files, file;
    struct number *number; /* malloc; of the optimizer's file that is read, by number */
    size_t numbers;
    struct buf key;
};

int olmo_local_new(uint32_t world, struct olmo_local **out, struct err *e)
{
    struct olmo_local *l = calloc(1, sizeof *l);

    *out = l;
    if (!l)
        return err_nomem(e);
    l->world = world;
    l->budget = FREE_MEMORY;
    l->arena = arena_new(MAX_MEMORY);
    l->rank = calloc((size_t)world + 1, sizeof *l->rank);
    l->key.max = TORCH_MAX_PATH;
    return l->arena && l->rank ? 0 : err_nomem(e);
}

void olmo_local_free(struct olmo_local *l)
{
    if (!l)
        return;
    for (uint32_t r = 0; l->rank && r < l->world; r++)
        free(l->rank[r].range);
    free(l->rank);
    free(l->number);
    buf_release(&l->key);
    arena_free(l->arena);
    free(l);
}

void olmo_local_freep(struct olmo_local **l)
{
    olmo_local_free(*l);
    *l = NULL;
}

void olmo_local_files(struct olmo_local *l, struct rank_set **set, const uint32_t *rank,
                      uint32_t n)
{
    l->set = set;
    l->of = rank;
    l->files = n;
    l->numbers = 0;
}

static struct ranges *ranges_of(struct olmo_local *l, uint32_t file)
{
    return &l->rank[l->of[file]]; /* below the world: the caller has looked */
}

/* A file begins, and allows for so much more memory. */
static void begin_file(struct olmo_local *l, uint32_t file, const struct torch_zip *zip)
{
    l->file = file;
    l->budget += MEMORY_A_BYTE * torch_zip_pickle_len(zip);
}

static int check_budget(const struct olmo_local *l, struct err *e)
{
    return arena_used(l->arena) <= l->budget
               ? 0
               : err_set(e, EFBIG,
                         "too many names for its size: references multiply them");
}

/* ---- the model ---- */

static int keep(struct olmo_local *l, const struct olmo_flat *f, struct err *e)
{
    struct ranges *r = ranges_of(l, l->file);
    uint64_t *dim = arena_array(l->arena, (size_t)f->shape.nd + 1, sizeof *dim);
    struct range *x;

    if (!dim)
        return err_nomem(e);
    memcpy(dim, f->shape.dim, f->shape.nd * sizeof *dim);

    if (!VEC_ROOM(r->range, r->count, r->cap))
        return err_nomem(e);
    x = &r->range[r->count];
    *x = (struct range){.name = arena_memdup(l->arena, f->name, f->len),
                        .len = f->len,
                        .begin = f->begin,
                        .count = f->count,
                        .nd = f->shape.nd,
                        .dim = dim};
    if (!x->name)
        return err_nomem(e);
    r->count++;
    return check_budget(l, e);
}

/* olmo_flat_fn */
static int take_parameter(void *user, const struct olmo_flat *f, struct err *e)
{
    struct olmo_local *l = user;
    const struct rank_flat flat = {.path = f->name,
                                   .len = f->len,
                                   .shape = &f->shape,
                                   .x = &f->x,
                                   .offset = f->offset,
                                   .begin = f->begin,
                                   .count = f->count};

    TRY(rank_set_flat(*l->set, l->file, &flat, e));
    return keep(l, f, e);
}

static int compare_ranges(const void *a, const void *b)
{
    const struct range *x = a, *y = b;
    int r = memcmp(x->name, y->name, MIN(x->len, y->len));

    return r ? r : (x->len > y->len) - (x->len < y->len);
}

int olmo_local_model(void *user, uint32_t file, struct torch_zip *zip, struct err *e)
{
    struct olmo_local *l = user;
    struct ranges *r = ranges_of(l, file);

    begin_file(l, file, zip);
    TRY(olmo_flat_read(zip, take_parameter, l, e));
    if (r->count > 0)
        qsort(r->range, r->count, sizeof *r->range, compare_ranges);
    return 1;
}

/* ---- the optimizer's names ---- */

static int compare_numbers(const void *a, const void *b)
{
    const struct number *x = a, *y = b;

    return (x->number > y->number) - (x->number < y->number);
}

static int keep_name(struct olmo_local *l, const struct pv *name, struct number *out,
                     struct err *e)
{
    buf_clear(&l->key);
    if (olmo_flat_name(name, &l->key) < 0)
        return err_nomem(e);
    out->len = l->key.len;
    out->name = arena_memdup(l->arena, l->key.data ? l->key.data : "", l->key.len);
    return out->name ? check_budget(l, e) : err_nomem(e);
}

/* `most`: so many parameters the pickle can hold honestly. */
static int add_group(struct olmo_local *l, const struct pv *group, uint64_t most,
                     struct err *e)
{
    struct number *grown;
    struct pv params, names;
    size_t n;

    if (group->kind != PV_DICT || !pv_dict_get(group, "params", &params) ||
        params.kind != PV_LIST || !pv_dict_get(group, "param_names", &names) ||
        names.kind != PV_LIST || pv_count(&names) != pv_count(&params))
        return 0; /* without names: the states keep their numbers */
    n = pv_count(&params);
    if (n > MIN(most, (uint64_t)MAX_NUMBER) - l->numbers)
        return err_set(e, EFBIG, "too many parameters for its size");
    grown = reallocarray(l->number, l->numbers + n + 1, sizeof *grown);
    if (!grown)
        return err_nomem(e);
    l->number = grown;
    for (size_t i = 0; i < n; i++) {
        struct pv number = pv_at(&params, i), name = pv_at(&names, i);
        struct number *x = &l->number[l->numbers];

        if (!pv_u64(&number, &x->number) || name.kind != PV_STR)
            return err_set(e, EBADMSG,
                           "a group whose params are no numbers with names");
        TRY(keep_name(l, &name, x, e));
        l->numbers++;
    }
    return 0;
}

int olmo_local_optim(void *user, uint32_t file, struct torch_zip *zip, struct err *e)
{
    struct olmo_local *l = user;
    struct pv root = torch_zip_root(zip), items, groups, group;

    begin_file(l, file, zip);
    l->numbers = 0;
    if (!torch_mapping(&root, &items) || items.kind != PV_DICT ||
        !pv_dict_get(&items, "param_groups", &groups) || groups.kind != PV_LIST)
        return err_set(e, EBADMSG, "it is no optimizer's state: no param_groups");
    for (size_t i = 0; i < pv_count(&groups); i++) {
        group = pv_at(&groups, i);
        TRY(add_group(l, &group, torch_zip_pickle_len(zip), e));
    }
    if (l->numbers > 0)
        qsort(l->number, l->numbers, sizeof *l->number, compare_numbers);
    for (size_t i = 1; i < l->numbers; i++)
        if (l->number[i].number == l->number[i - 1].number)
            return err_set(e, EBADMSG, "two parameters have the number %" PRIu64,
                           l->number[i].number);
    return 0;
}

/* The parameter of "state.7.exp_avg", and where ".exp_avg" begins; NULL: of none. */
static const struct number *number_of(const struct olmo_local *l, const char *path,
                                      size_t len, size_t *rest)
{
    const struct number *found;
    struct number want = {0};
    size_t at = sizeof STATE - 1;

    if (len <= at || memcmp(path, STATE, at) != 0 || !isdigit((unsigned char)path[at]))
        return NULL;
    for (; at < len && isdigit((unsigned char)path[at]); at++) {
        want.number = want.number * 10 + (uint64_t)(path[at] - '0');
        if (want.number > MAX_NUMBER)
            return NULL;
    }
    if (at == len || path[at] != '.' || l->numbers == 0)
        return NULL;
    found = bsearch(&want, l->number, l->numbers, sizeof want, compare_numbers);
    *rest = found ? at : *rest;
    return found;
}

int olmo_local_rename(void *user, const char *path, size_t len, struct buf *key)
{
    const struct olmo_local *l = user;
    size_t rest = 0;
    const struct number *x = number_of(l, path, len, &rest);

    if (x) {
        buf_adds(key, STATE);
        buf_add(key, x->name, x->len);
    }
    return buf_add(key, path + rest, len - rest) < 0 ? -ENOMEM : 0;
}

/* ---- its tensors ---- */

static const struct range *range_of(struct olmo_local *l, const struct number *x)
{
    const struct ranges *r = ranges_of(l, l->file);
    const struct range want = {.name = x->name, .len = x->len};

    return r->count == 0
               ? NULL
               : bsearch(&want, r->range, r->count, sizeof want, compare_ranges);
}

/* As many elements as the rank has of the parameter, and not one number for all of it. */
static bool is_range(const struct torch_tensor *x, const struct range *r)
{
    struct err ignored = {0};
    uint64_t n;

    return x && r && x->shape.nd > 0 && shape_elements(&x->shape, &n, &ignored) == 0 &&
           n == r->count;
}

int olmo_local_state(void *user, uint32_t file, const struct torch_item *item,
                     struct err *e)
{
    struct olmo_local *l = user;
    size_t rest = 0;
    const struct number *x = number_of(l, item->key, item->key_len, &rest);
    const struct range *r = x ? range_of(l, x) : NULL;
    struct rank_flat flat = {.x = item->tensor};
    struct shape shape;

    buf_clear(&l->key);
    if (olmo_local_rename(l, item->key, item->key_len, &l->key) < 0)
        return err_nomem(e);
    if (!is_range(item->tensor, r))
        return rank_set_plain(*l->set, file, l->key.data, l->key.len, item, e);
    shape.nd = r->nd;
    memcpy(shape.dim, r->dim, r->nd * sizeof *r->dim);
    flat.path = l->key.data;
    flat.len = l->key.len;
    flat.shape = &shape;
    flat.begin = r->begin;
    flat.count = r->count;
    return rank_set_flat(*l->set, file, &flat, e);
}
