/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/rank_collect.c - the tensors of one rank's file, as pieces of full ones. */
#include <errno.h>
#include <string.h>

#include "index/formats/rankfiles/rank_set_priv.h"
#include "index/formats/torch/torch_walk.h"

/* ---- one tensor of one file ---- */

struct collect {
    struct rank_set *s;
    uint32_t file;
    struct rank_entry *t; /* the one that is read */
    const struct dist_tensor *whole;
};

/* dist_piece_fn */
static int collect_piece(void *user, const struct torch_tensor *x,
                         const uint64_t *start, struct err *e)
{
    const struct collect *k = user;
    const struct rank_set_how *how = k->s->how;
    const struct rank_set_piece piece = {.path = k->t->path,
                                         .len = k->t->len,
                                         .dtype = k->whole->dtype,
                                         .shape = &k->whole->shape,
                                         .x = x,
                                         .start = start};
    const char *why = how->doubt ? how->doubt(how->user, k->file, &piece) : NULL;

    return why ? rank_entry_fault(k->s, k->t, k->file, why, e)
               : rank_entry_piece(k->s, k->t, k->file, x, start, e);
}

static int collect_distributed(struct collect *k, const struct pv *v, struct err *e)
{
    struct rank_set *s = k->s;
    struct rank_entry *t = k->t;
    struct dist_tensor whole;
    struct err why = {0};
    int rc;

    k->whole = &whole;
    rc = dist_tensor_read(s->file[k->file].file.zip, v, &whole, collect_piece, k, &why);
    if (rc == -ENOMEM) {
        *e = why;
        return rc;
    }
    s->distributed = t->distributed = true;
    if (whole.mesh.naxes > s->mesh.naxes)
        s->mesh = whole.mesh;
    if (whole.dtype != DTYPE_NONE)
        TRY(rank_entry_shape(s, t, k->file, whole.dtype, &whole.shape, e));
    return rc < 0 ? rank_entry_fault(s, t, k->file, why.text, e) : 0;
}

int rank_set_plain(struct rank_set *s, uint32_t file, const char *path, size_t len,
                   const struct torch_item *item, struct err *e)
{
    const struct torch_tensor *x = item->tensor;
    struct rank_entry *t;
    bool same;

    if (rank_entry_meet(s, file, path, len, false, &t, e) < 0 || !t)
        return -e->code;
    t->loose |= item->opaque || item->shard;
    if (!x)
        return rank_entry_fault(s, t, file, item->why, e);
    TRY(rank_entry_learn(s, t, x->dtype, &x->shape, &same, e));
    t->uneven |= !same;
    return rank_entry_piece(s, t, file, x, NULL, e);
}

/* torch_item_fn */
static int collect_item(void *user, const struct torch_item *item, struct err *e)
{
    struct collect *k = user;
    const struct rank_set_how *how = k->s->how;

    if (item->tensor || !dist_tensor_is(item->value))
        return how->on_tensor
                   ? how->on_tensor(how->user, k->file, item, e)
                   : rank_set_plain(k->s, k->file, item->key, item->key_len, item, e);
    TRY(rank_entry_meet(k->s, k->file, item->key, item->key_len, true, &k->t, e));
    return k->t ? collect_distributed(k, item->value, e) : 0;
}

/* ---- one file ---- */

/* All of the graph, or those entries of it that ranks have shards of. */
static int walk_merged(const struct rank_set *s, struct torch_walk *w, struct err *e)
{
    struct pv root = torch_zip_root(w->zip), items, v;

    if (!s->how->merged)
        return torch_walk_value(w, root, e);
    if (!torch_mapping(&root, &items) || items.kind != PV_DICT)
        return err_set(e, EBADMSG, "it is no dict of a rank's state");
    for (const char *const *name = s->how->merged; *name; name++) {
        if (!pv_dict_get(&items, *name, &v))
            continue;
        buf_clear(&w->key);
        buf_clear(&w->path);
        if (buf_adds(&w->key, *name) < 0 || buf_adds(&w->path, *name) < 0)
            return err_nomem(e);
        TRY(torch_walk_value(w, v, e));
    }
    return 0;
}

int rank_collect_file(struct rank_set *s, uint32_t file, struct err *e)
{
    struct collect k = {.s = s, .file = file};
    struct torch_zip *zip = s->file[file].file.zip;
    CLEANUP(torch_walk_release)
    struct torch_walk w = {.zip = zip,
                           .fn = collect_item,
                           .claims = dist_tensor_is,
                           .user = &k,
                           .key = {.max = TORCH_MAX_PATH},
                           .path = {.max = TORCH_MAX_PATH}};
    int taken;

    s->cursor = s->entry;
    s->budget += RANK_MEMORY_A_BYTE * torch_zip_pickle_len(zip);
    taken = s->how->on_file ? s->how->on_file(s->how->user, file, zip, e) : 0;
    if (taken != 0)
        return taken;
    TRY(walk_merged(s, &w, e));
    if ((w.too_deep > 0 || w.unnamed > 0) &&
        sink_warning(s->sink, "nested",
                     "%s: %" PRIu64 " values are nested too deep: what they hold is "
                     "not shown",
                     s->file[file].path, w.too_deep + w.unnamed) < 0)
        return err_nomem(e);
    return 0;
}
