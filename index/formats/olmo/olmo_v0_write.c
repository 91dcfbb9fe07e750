/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_v0_write.c - the writer of early OLMo-core's folders (0.1.0). */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/keyset.h"
#include "index/formats/dcp/dcp_cut.h"
#include "index/formats/format.h"
#include "index/formats/hf/safetensors_write.h"
#include "index/formats/olmo/olmo_part.h"
#include "index/layout.h"

/*
 * Each folder is a checkpoint of its own (olmo_core/distributed/checkpoint.py, 0.1.0):
 * rank_N.safetensors with the rows that rank N has, each tensor as one dimension, and
 * metadata.json, which says what elements those are: one interval a file.
 */
struct v0_writing {
    const struct layout_input *in;
    const struct layout_options *options;
    struct layout *out;
    bool
        own; /* it comes from such a checkpoint: keys stay, and so does the optimizer */
    bool alone;   /* and from one without model/ and optim/ */
    bool *chosen; /* tensors of the input that are written somewhere */
};

/* One folder. */
struct folder {
    struct v0_writing *w;
    const char *dir; /* "": the checkpoint itself */
    size_t *tensor;  /* of the input */
    size_t tensors;
    struct dcp_cut cut;
};

/* "rank_3.safetensors" */
static void file_name(uint32_t rank, char dst[40])
{
    snprintf(dst, 40, "rank_%" PRIu32 ".safetensors", rank);
}

/* ---- what can be written ---- */

static size_t dropped(const struct v0_writing *w, const struct layout_tensor *t)
{
    return t->role == ROLE_MODEL && !w->own ? t->wrapper : 0;
}

/* The table of 0.1.0; saving others raises KeyError there. */
static bool has_dtype(enum dtype d)
{
    static const enum dtype known[] = {
        DTYPE_F64, DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I64,     DTYPE_I32,
        DTYPE_I16, DTYPE_I8,  DTYPE_U8,  DTYPE_BOOL, DTYPE_F8_E4M3, DTYPE_F8_E5M2,
    };

    for (size_t i = 0; i < ARRAY_SIZE(known); i++)
        if (known[i] == d)
            return true;
    return false;
}

/* Other frameworks' optimizers have other names and groups: nothing of them is kept. */
static bool belongs(const struct folder *d, const struct layout_tensor *t)
{
    if (d->w->alone)
        return true;
    if (strcmp(d->dir, "model") == 0)
        return t->role == ROLE_MODEL;
    return d->w->own && t->role != ROLE_MODEL && t->part &&
           strcmp(t->part, "optim") == 0;
}

static int choose(struct folder *d, struct err *e)
{
    CLEANUP(keyset_release) struct keyset keys = {0};
    const struct layout_input *in = d->w->in;

    d->tensor =
        arena_array(layout_arena(d->w->out), in->tensors + 1, sizeof *d->tensor);
    if (!d->tensor)
        return err_nomem(e);
    for (size_t i = 0; i < in->tensors; i++) {
        const struct layout_tensor *t = &in->tensor[i];
        size_t cut = dropped(d->w, t);
        int rc = 0;

        if (!belongs(d, t))
            continue;
        if (has_dtype(t->dtype) && safetensors_takes(t, cut))
            rc = keyset_add(&keys, t->key + cut, t->key_len - cut);
        if (rc < 0)
            return err_nomem(e);
        if (rc > 0)
            d->tensor[d->tensors++] = i;
        else
            TRY(layout_loss(d->w->out, LOSS_TENSOR, t->key, t->key_len, e));
        d->w->chosen[i] = true;
    }
    return 0;
}

/* ---- rank files ---- */

/* Pickles (tensors of bytes, no parameter's) are read in one piece: rank 0 has all of it. */
static bool is_one_piece(const struct folder *d, const struct layout_tensor *t)
{
    return d->w->own && t->role == ROLE_OTHER && t->dtype == DTYPE_U8 &&
           t->shape.nd == 1;
}

static uint64_t shares_of(const struct folder *d, size_t i)
{
    const struct layout_tensor *t = &d->w->in->tensor[d->tensor[i]];

    return is_one_piece(d, t) ? 1 : dcp_shares(&d->cut, i, &t->shape);
}

static void share_of(const struct folder *d, size_t i, uint64_t k,
                     struct dcp_share *out)
{
    const struct layout_tensor *t = &d->w->in->tensor[d->tensor[i]];

    if (is_one_piece(d, t))
        *out = (struct dcp_share){.size = {t->shape.dim[0]}};
    else
        dcp_share(&d->cut, i, &t->shape, k, out);
}

static int put_rank(struct folder *d, struct safetensors_entry *entry, size_t n,
                    uint32_t rank, struct err *e)
{
    char name[40], path[64];
    struct layout_file *f;

    file_name(rank, name);
    snprintf(path, sizeof path, "%s%s%s", d->dir, *d->dir ? "/" : "", name);
    TRY(layout_file_new(d->w->out, path, 0, &f, e));
    return safetensors_write(f, d->w->in, entry, n, NULL, e);
}

struct placed {
    uint32_t rank;
    struct safetensors_entry entry;
};

static int by_rank(const void *a, const void *b)
{
    const struct placed *x = a, *y = b;

    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return (x->entry.tensor > y->entry.tensor) - (x->entry.tensor < y->entry.tensor);
}

/* What rank has what share of the i-th tensor, from *n on. */
static int place(struct folder *d, size_t i, struct placed *p, size_t *n, struct err *e)
{
    const struct layout_tensor *t = &d->w->in->tensor[d->tensor[i]];
    size_t cut = dropped(d->w, t), nd = t->shape.nd;

    for (uint64_t k = 0; k < shares_of(d, i); k++) {
        uint64_t *box = arena_array(layout_arena(d->w->out), 2 * nd + 1, sizeof *box);
        struct dcp_share share;

        if (!box)
            return err_nomem(e);
        share_of(d, i, k, &share);
        memcpy(box, share.start, nd * sizeof *box);
        memcpy(box + nd, share.size, nd * sizeof *box);
        p[(*n)++] = (struct placed){.rank = share.rank,
                                    .entry = {.tensor = d->tensor[i],
                                              .name = t->key + cut,
                                              .name_len = t->key_len - cut,
                                              .start = box,
                                              .size = box + nd,
                                              .flat = true}};
    }
    return 0;
}

/* A file for every rank, also for one that has nothing: they tell how many there were. */
static int put_ranks(struct folder *d, const struct placed *p, size_t count,
                     struct err *e)
{
    CLEANUP_FREE struct safetensors_entry *entry = calloc(count + 1, sizeof *entry);
    size_t at = 0;

    if (!entry)
        return err_nomem(e);
    for (uint32_t rank = 0; rank < dcp_ranks(&d->cut); rank++) {
        size_t n = 0;

        while (at < count && p[at].rank == rank)
            entry[n++] = p[at++].entry;
        TRY(put_rank(d, entry, n, rank, e));
    }
    return 0;
}

static int put_files(struct folder *d, struct err *e)
{
    CLEANUP_FREE struct placed *p = NULL;
    size_t count = 0, n = 0;
    int ret = 0;

    for (size_t i = 0; i < d->tensors; i++)
        count += shares_of(d, i);
    p = calloc(count + 1, sizeof *p);
    if (!p)
        return err_nomem(e);
    for (size_t i = 0; ret == 0 && i < d->tensors; i++)
        ret = place(d, i, p, &n, e);
    if (count > 1)
        qsort(p, count, sizeof *p, by_rank);
    return ret == 0 ? put_ranks(d, p, count, e) : ret;
}

/* ---- metadata.json ---- */

/* Elements [first, end) of the row-major tensor; shares are whole rows. */
static void interval_of(const struct layout_tensor *t, const struct dcp_share *share,
                        uint64_t *first, uint64_t *end)
{
    uint64_t row = 1, rows = t->shape.nd ? share->size[0] : 1;

    for (uint32_t k = 1; k < t->shape.nd; k++)
        row *= t->shape.dim[k];
    *first = t->shape.nd ? share->start[0] * row : 0;
    *end = *first + rows * row;
}

static void add_tensor(const struct folder *d, size_t i, struct buf *out)
{
    const struct layout_tensor *t = &d->w->in->tensor[d->tensor[i]];
    uint64_t shares = shares_of(d, i);
    size_t cut = dropped(d->w, t);
    struct dcp_share share;
    char name[40];

    buf_adds(out, i ? ", " : "");
    buf_add_json(out, t->key + cut, t->key_len - cut);
    buf_adds(out, ": {\"shape\": ");
    shape_format(&t->shape, out);
    buf_addf(out, ", \"is_sharded\": %s, \"dtype\": \"%s\", \"shard_spec_per_file\": {",
             shares > 1 ? "true" : "false", dtype_name(t->dtype));
    for (uint64_t n = 0; n < shares; n++) {
        uint64_t first, end;

        share_of(d, i, n, &share);
        interval_of(t, &share, &first, &end);
        file_name(share.rank, name);
        buf_addf(out,
                 "%s\"%s\": {\"flattened_offsets\": [[%" PRIu64 ", %" PRIu64
                 "]], \"local_shape\": null, \"global_offset\": null}",
                 n ? ", " : "", name, first, end);
    }
    buf_adds(out, "}}");
}

static int put_metadata(struct folder *d, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct layout_file *f;
    char path[64];

    buf_adds(&text, "{\"tensors\": {");
    for (size_t i = 0; i < d->tensors; i++)
        add_tensor(d, i, &text);
    buf_adds(&text, "}}");
    if (buf_failed(&text))
        return err_set(e, -buf_failed(&text), "metadata.json of more than 1 GiB");
    snprintf(path, sizeof path, "%s%smetadata.json", d->dir, *d->dir ? "/" : "");
    TRY(layout_file_new(d->w->out, path, 1, &f, e));
    return layout_bytes(f, text.data, text.len, e);
}

static int put_folder(struct v0_writing *w, const char *dir, struct err *e)
{
    struct folder d = {.w = w, .dir = dir};
    int ret = choose(&d, e);

    if (ret == 0 && d.tensors == 0 && strcmp(dir, "optim") == 0)
        return 0;
    if (ret == 0)
        ret = dcp_cut_new(w->in, w->options, false, d.tensor, d.tensors,
                          layout_arena(w->out), &d.cut, e);
    if (ret == 0)
        ret = put_files(&d, e);
    return ret == 0 ? put_metadata(&d, e) : ret;
}

/* ---- what is lost ---- */

/* Groups of parameters are pickles in tensors of bytes, and shown as objects as well. */
static bool is_pickle(const struct v0_writing *w, const struct layout_object *o)
{
    size_t cut = w->alone || o->key_len < 6 || memcmp(o->key, "optim.", 6) != 0 ? 0 : 6;

    for (size_t i = 0; w->own && i < w->in->tensors; i++) {
        const struct layout_tensor *t = &w->in->tensor[i];

        if (w->chosen[i] && t->key_len == o->key_len - cut &&
            memcmp(t->key, o->key + cut, t->key_len) == 0)
            return true;
    }
    return false;
}

static int tell_losses(struct v0_writing *w, struct err *e)
{
    static const char *const role[] = {"model", "optimizer", "other"};
    size_t left[3] = {0};
    char what[80];

    for (size_t i = 0; i < w->in->tensors; i++)
        left[w->in->tensor[i].role] += !w->chosen[i];
    for (unsigned r = 0; r < ARRAY_SIZE(role); r++) {
        int n = snprintf(what, sizeof what, "%s (%zu tensors)", role[r], left[r]);

        if (left[r])
            TRY(layout_loss(w->out, LOSS_ROLE, what, (size_t)n, e));
    }
    for (size_t i = 0; i < w->in->objects; i++) {
        const struct layout_object *o = &w->in->object[i];

        if (!is_pickle(w, o))
            TRY(layout_loss(w->out, LOSS_OBJECT, o->key, o->key_len, e));
    }
    return 0;
}

/* ---- all of it ---- */

/* Without folders it is where something that is not the model's has none. */
static bool is_alone(const struct v0_writing *w)
{
    for (size_t i = 0; w->own && i < w->in->tensors; i++)
        if (w->in->tensor[i].role != ROLE_MODEL && !w->in->tensor[i].part &&
            !memchr(w->in->tensor[i].key, ':', w->in->tensor[i].key_len))
            return true;
    return false;
}

static int layout_v0(const struct layout_input *in, const struct layout_options *o,
                     struct layout *out, struct err *e)
{
    struct v0_writing w = {.in = in, .options = o, .out = out};
    int ret;

    if (o->max_shard_size || o->codec || o->mesh[0])
        return err_set(e, EINVAL,
                       "olmo: a file a rank is written, cut by rows: no mesh, no shard "
                       "size, no codec");
    w.own = in->format && strncmp(in->format, "olmo-core-v0", 12) == 0;
    w.alone = is_alone(&w);
    w.chosen = arena_array(layout_arena(out), in->tensors + 1, sizeof *w.chosen);
    if (!w.chosen)
        return err_nomem(e);
    ret = put_folder(&w, w.alone ? "" : "model", e);
    if (ret == 0 && !w.alone)
        ret = put_folder(&w, "optim", e);
    return ret == 0 ? tell_losses(&w, e) : ret;
}

const struct format_writer writer_olmo = {
    .name = "olmo",
    .title = "OLMo-core 0.1: metadata.json and rank_N.safetensors",
    .layout = layout_v0,
};
