/* SPDX-License-Identifier: MIT */
/* index/formats/hf/train_shapes.c - a Hugging Face model against the shapes that FSDP's files tell. */
#include "index/formats/hf/train_shapes.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/dcp/dcp_metadata.h"
#include "index/formats/hf/choose.h"
#include "index/formats/rankfiles/dist_tensor.h"
#include "index/formats/torch/torch_walk.h"
#include "index/key_text.h"
#include "remote/listing.h"
#include "remote/source.h"

enum { MAX_MEMORY = 1 << 28 }; /* of names, and of shapes: those of a million tensors */

/* The full shapes of the model in FSDP's files. */
struct shapes {
    const char *from; /* the file or directory that tells them */
    bool pieces;      /* plain tensors in it may be a rank's slices */
    struct torch_zip *zip;
    struct intern names;
    struct shape_known {
        uint32_t nd;
        uint64_t *dim;
    } * known; /* by the number of the name */
    uint32_t room;
    struct arena *arena;
};

static void shapes_release(struct shapes *s)
{
    intern_release(&s->names);
    free(s->known);
    arena_free(s->arena);
}

static int grow(struct shapes *s, uint32_t number, struct err *e)
{
    uint32_t room = MAX(number * 2, UINT32_C(256));
    struct shape_known *known;

    if (number < s->room)
        return 0;
    known = reallocarray(s->known, room, sizeof *known);
    if (!known)
        return err_nomem(e);
    s->known = known;
    s->room = room;
    return 0;
}

static int add(struct shapes *s, const char *name, size_t len, const struct shape *x,
               struct err *e)
{
    uint32_t number;
    uint64_t *dim = arena_array(s->arena, (size_t)x->nd + 1, sizeof *dim);
    int rc = -EFBIG;

    if (dim && len < MAX_MEMORY - s->names.bytes.len)
        rc = intern_add(&s->names, name, len, &number);
    if (rc < 0)
        return err_set(e, -rc, "%s: too many tensors", s->from);
    TRY(grow(s, number, e));
    memcpy(dim, x->dim, x->nd * sizeof *dim);
    s->known[number] = (struct shape_known){x->nd, dim};
    return 0;
}

/* ---- what FSDP's files tell ---- */

static bool dcp_shape_is_known(const struct dcp_metadata *m,
                               const struct dcp_entry *entry, struct shape *out)
{
    const struct dcp_tensor *t;
    const int64_t *dim;

    if (entry->tensor == DCP_OBJECT || entry->whole != DCP_NO_SHAPE)
        return false;
    t = &m->tensor[entry->tensor];
    if (t->bad || t->dtype == DTYPE_F4)
        return false;
    dim = dcp_shape(m->names, t->size, &out->nd);
    for (uint32_t d = 0; d < out->nd; d++)
        out->dim[d] = (uint64_t)dim[d];
    return true;
}

static int read_dcp(struct shapes *s, struct listing *l, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(dcp_names_release) struct dcp_names names = {0};
    CLEANUP(dcp_metadata_freep) struct dcp_metadata *m = NULL;
    struct shape shape;

    TRY(listing_open(l, ".metadata", &src, e));
    TRY(dcp_metadata_load(src, &names, &m, e));
    for (uint32_t i = 0; i < m->nentries; i++) {
        size_t len, wrapper = m->entry[i].wrapper;
        const char *key = intern_get(&names.keys, m->entry[i].key, &len);

        if (dcp_shape_is_known(m, &m->entry[i], &shape))
            TRY(add(s, key + wrapper, len - wrapper, &shape, e));
    }
    return 0;
}

static int ignore_piece(void *user UNUSED, const struct torch_tensor *x UNUSED,
                        const uint64_t *start UNUSED, struct err *e UNUSED)
{
    return 0;
}

/* torch_item_fn */
static int see_item(void *user, const struct torch_item *item, struct err *e)
{
    struct shapes *s = user;
    struct dist_tensor whole = {0};
    struct err ignored = {0};

    if (item->tensor && !s->pieces && item->tensor->dtype != DTYPE_F4)
        return add(s, item->key, item->key_len, &item->tensor->shape, e);
    if (item->tensor || !dist_tensor_is(item->value) ||
        dist_tensor_read(s->zip, item->value, &whole, ignore_piece, NULL, &ignored) !=
            1 ||
        whole.dtype == DTYPE_F4)
        return 0;
    return add(s, item->key, item->key_len, &whole.shape, e);
}

static int read_torch(struct shapes *s, struct source *src, struct err *e)
{
    CLEANUP(torch_zip_freep) struct torch_zip *zip = NULL;
    CLEANUP(torch_walk_release)
    struct torch_walk w = {.fn = see_item,
                           .claims = dist_tensor_is,
                           .user = s,
                           .key = {.max = TORCH_MAX_PATH},
                           .path = {.max = TORCH_MAX_PATH}};

    TRY(torch_open(src, &zip, e));
    s->zip = w.zip = zip;
    return torch_walk_value(&w, torch_zip_root(zip), e);
}

static int read_shapes(struct shapes *s, struct listing *l, enum train_kind kind,
                       struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    struct listing *sub = NULL;

    if (kind == TRAIN_MODEL_DCP)
        return (sub = listing_sub(l, s->from)) ? read_dcp(s, sub, e) : 0;
    s->pieces = kind != TRAIN_MODEL_FILE;
    TRY(listing_open(l, s->from, &src, e));
    return read_torch(s, src, e);
}

/* ---- compared ---- */

static bool differs(const struct shape_known *known, const struct shape *x)
{
    return known->nd != x->nd ||
           (x->nd > 0 && memcmp(known->dim, x->dim, x->nd * sizeof *x->dim) != 0);
}

struct comparing {
    struct listing *l;
    const struct shapes *shapes;
    bool differ;
};

/* hf_tensor_fn; the first one that differs is named. */
static int compare(void *user, const char *name, size_t len, const struct shape *x,
                   struct err *e)
{
    CLEANUP(buf_release) struct buf here = {0}, there = {0};
    struct comparing *k = user;
    struct shape other = {0};
    const struct shape_known *known;
    uint32_t number;
    char text[120];

    if (k->differ || !x || !intern_find(&k->shapes->names, name, len, &number))
        return 0;
    known = &k->shapes->known[number];
    if (!differs(known, x))
        return 0;
    other.nd = known->nd;
    memcpy(other.dim, known->dim, known->nd * sizeof *known->dim);
    if (shape_format(x, &here) < 0 || shape_format(&other, &there) < 0)
        return err_nomem(e);
    hf_choice_doubt(k->l, "its %s has shape %.50s, in %s %.50s",
                    key_text(text, sizeof text, name, len), here.data, k->shapes->from,
                    there.data);
    k->differ = true;
    return 0;
}

/* The first model's file or directory of that kind, or NULL. */
static const char *name_of(const struct listing *l, enum train_kind kind)
{
    struct train_part part;

    for (size_t i = 0; i < listing_count(l); i++)
        if (train_part_of(listing_at(l, i), &part) && part.kind == kind &&
            part.index == 0)
            return listing_at(l, i)->name;
    return NULL;
}

/* In the order in which they would be the model; DeepSpeed's placeholders are known before. */
static const char *choose(const struct listing *l, const struct train_survey *s,
                          enum train_kind *kind)
{
    static const enum train_kind kinds[] = {TRAIN_MODEL_DCP, TRAIN_MODEL_RANK,
                                            TRAIN_MODEL_LOCAL, TRAIN_DEEPSPEED,
                                            TRAIN_MODEL_FILE};
    size_t i = 0;

    while (i < ARRAY_SIZE(kinds) && s->count[kinds[i]] == 0)
        i++;
    if (i == ARRAY_SIZE(kinds) || kinds[i] == TRAIN_DEEPSPEED)
        return NULL;
    *kind = kinds[i];
    return name_of(l, *kind);
}

int train_shapes_compare(struct listing *l, const struct train_survey *s, struct err *e)
{
    CLEANUP(shapes_release) struct shapes shapes = {0};
    struct comparing k = {.l = l, .shapes = &shapes};
    enum train_kind kind = TRAIN_KINDS;
    struct err why = {0};

    if (s->main == MAIN_HF && !s->hf.adapter)
        shapes.from = choose(l, s, &kind);
    if (!shapes.from)
        return 0;
    shapes.arena = arena_new(MAX_MEMORY);
    if (!shapes.arena)
        return err_nomem(e);
    if (read_shapes(&shapes, l, kind, &why) == 0)
        hf_choice_each(l, compare, &k, &why);
    return why.code == ENOMEM ? err_nomem(e) : k.differ;
}
