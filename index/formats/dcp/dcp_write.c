/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_write.c - the writer of PyTorch's distributed checkpoints. */
#include "index/formats/dcp/dcp_write.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/keyset.h"
#include "index/formats/dcp/dcp_origin.h"
#include "index/formats/object_pickle.h"
#include "index/formats/object_value.h"
#include "index/formats/torch/torch_object_write.h"
#include "index/formats/torch/torch_zip_write.h"
#include "index/names.h"

/* ---- what can be written ---- */

/*
 * A key is text in the pickle, and all that tells a tensor's role when it is read again.
 */
static bool fits(const struct dcp_writing *w, const struct layout_tensor *t)
{
    int role = w->how->role_of ? w->how->role_of(t->key, t->key_len) : -1;
    struct shape units;

    if (role < 0)
        role = (int)role_of(NULL, t->key, t->key_len);
    return torch_shape(t->dtype, &t->shape, &units) &&
           object_text_is_utf8(t->key, t->key_len) && role == (int)t->role;
}

static int choose_tensors(struct dcp_writing *w, size_t **out, size_t *count,
                          struct keyset *keys, struct err *e)
{
    size_t *chosen =
        arena_array(layout_arena(w->out), w->in->tensors + 1, sizeof *chosen);
    size_t n = 0;

    if (!chosen)
        return err_nomem(e);
    for (size_t i = 0; i < w->in->tensors; i++) {
        const struct layout_tensor *t = &w->in->tensor[i];
        const struct layout_tensor *known = w->how->known ? &w->how->known[i] : t;
        int rc = 0; /* a key that is there twice would hide a tensor */

        if (w->how->skip && w->how->skip[i])
            continue;
        if (fits(w, t))
            rc = keyset_add(keys, t->key, t->key_len);
        if (rc < 0)
            return err_nomem(e);
        if (rc > 0)
            chosen[n++] = i;
        else
            TRY(layout_loss(w->out, LOSS_TENSOR, known->key, known->key_len, e));
    }
    *out = chosen;
    *count = n;
    return 0;
}

/* 1: it can be written as a pickle; 0: it cannot. */
static int object_fits(const struct dcp_writing *w, const struct layout_object *o,
                       struct keyset *keys, struct err *e)
{
    struct pickler p = {0};
    int rc;

    if (!object_text_is_utf8(o->key, o->key_len))
        return 0;
    rc = keyset_add(keys, o->key, o->key_len);
    if (rc <= 0 || w->how->objects)
        return rc; /* the caller has tried it */
    rc = object_pickle(o->json, o->json_len, &p, e);
    pickle_release(&p);
    return rc;
}

static int choose_objects(struct dcp_writing *w, struct keyset *keys, struct err *e)
{
    size_t *chosen =
        arena_array(layout_arena(w->out), w->in->objects + 1, sizeof *chosen);

    if (!chosen)
        return err_nomem(e);
    w->object = chosen;
    for (size_t i = 0; i < w->in->objects; i++) {
        const struct layout_object *o = &w->in->object[i];
        int rc = object_fits(w, o, keys, e);

        if (rc < 0)
            return err_nomem(e);
        if (rc)
            chosen[w->objects++] = i;
        else
            TRY(layout_loss(w->out, LOSS_OBJECT, o->key, o->key_len, e));
    }
    return 0;
}

static int choose(struct dcp_writing *w, const struct layout_options *o, struct err *e)
{
    CLEANUP(keyset_release) struct keyset keys = {0};
    size_t *tensor = NULL, count = 0;
    int ret = choose_tensors(w, &tensor, &count, &keys, e);

    if (ret == 0)
        ret = choose_objects(w, &keys, e);
    return ret == 0 ? dcp_cut_new(w->in, o, true, tensor, count, layout_arena(w->out),
                                  &w->cut, e)
                    : ret;
}

/* ---- data files ---- */

void dcp_file_name(uint32_t rank, uint32_t number, char dst[32])
{
    snprintf(dst, 32, "__%" PRIu32 "_%" PRIu32 ".distcp", rank, number);
}

struct data_files {
    struct layout_file **file; /* by dcp_file_of(), NULL: it has nothing */
    struct zip_write zip;
    size_t next; /* in `placed` */
};

/* Ranks that have something get a file; in order of the ranks. */
static int make_files(struct dcp_writing *w, struct data_files *d, struct err *e)
{
    size_t files = dcp_files(&w->cut);
    CLEANUP_FREE bool *used = calloc(files, sizeof *used);
    struct dcp_share box;
    struct shape units;
    size_t items = w->objects;
    char name[32];

    if (!used)
        return err_nomem(e);
    used[0] = w->objects > 0;
    for (size_t i = 0; i < w->cut.count; i++) {
        const struct layout_tensor *t = &w->in->tensor[w->cut.chosen[i]];

        TRY(shape_units(&t->shape, t->dtype, &units, e));
        for (uint64_t n = 0; n < dcp_shares(&w->cut, i, &units); n++, items++) {
            dcp_share(&w->cut, i, &units, n, &box);
            used[dcp_file_of(&w->cut, box.rank, box.number)] = true;
        }
    }
    w->placed = arena_array(layout_arena(w->out), items + 1, sizeof *w->placed);
    d->file = calloc(files, sizeof *d->file);
    if (!w->placed || !d->file)
        return err_nomem(e);
    for (size_t i = 0; i < files; i++) {
        uint32_t ranks = dcp_ranks(&w->cut);
        char path[80];

        dcp_file_name((uint32_t)(i % ranks), w->cut.number[i / ranks], name);
        dcp_path(w, name, path, sizeof path);
        if (used[i])
            TRY(layout_file_new(w->out, path, 0, &d->file[i], e));
    }
    return 0;
}

static int put_tensor(struct dcp_writing *w, struct data_files *d, size_t i,
                      struct err *e)
{
    size_t tensor = w->cut.chosen[i];
    const struct layout_tensor *t = &w->in->tensor[tensor];
    struct shape units;
    struct dcp_share box;
    int ret = shape_units(&t->shape, t->dtype, &units, e);

    for (uint64_t n = 0; ret == 0 && n < dcp_shares(&w->cut, i, &units); n++) {
        struct dcp_placed *p = &w->placed[d->next++];
        struct layout_file *f;

        dcp_share(&w->cut, i, &units, n, &box);
        f = d->file[dcp_file_of(&w->cut, box.rank, box.number)];
        p->at = layout_file_at(f);
        ret =
            torch_zip_item(&d->zip, f, w->in, tensor, box.start, box.size, &p->len, e);
    }
    return ret;
}

/* With tensors in it, if need be. */
static int put_list_of_one(struct dcp_writing *w, struct data_files *d,
                           const struct layout_object *o, struct dcp_placed *p,
                           struct err *e)
{
    struct torch_object x;
    int rc = torch_object_make(w->how->objects, o, true, &x, e);

    assert(rc != 0);
    if (rc > 0) {
        p->at = layout_file_at(d->file[0]);
        rc = torch_object_put(&x, &d->zip, d->file[0], &p->len, e);
    }
    torch_object_release(&x);
    return rc;
}

static int put_object(struct dcp_writing *w, struct data_files *d, size_t i,
                      struct err *e)
{
    const struct layout_object *o = &w->in->object[w->object[i]];
    struct dcp_placed *p = &w->placed[d->next++];
    struct pickler pickle = {0};
    int ret;

    if (w->how->objects)
        return put_list_of_one(w, d, o, p, e);
    pickle_begin(&pickle);
    ret = object_pickle(o->json, o->json_len, &pickle, e);
    pickle_end(&pickle);
    if (ret >= 0) {
        p->at = layout_file_at(d->file[0]);
        ret = torch_zip_object(&d->zip, d->file[0], &pickle.out, &p->len, e);
    }
    pickle_release(&pickle);
    return ret;
}

static int put_data(struct dcp_writing *w, struct err *e)
{
    struct data_files d = {0};
    int ret = make_files(w, &d, e);

    for (size_t i = 0; ret == 0 && i < w->cut.count; i++)
        ret = put_tensor(w, &d, i, e);
    for (size_t i = 0; ret == 0 && i < w->objects; i++)
        ret = put_object(w, &d, i, e);
    zip_write_release(&d.zip);
    free(d.file);
    return ret;
}

void dcp_path(const struct dcp_writing *w, const char *name, char *dst, size_t size)
{
    snprintf(dst, size, "%s%s%s", w->how->dir ? w->how->dir : "",
             w->how->dir ? "/" : "", name);
}

int dcp_write(const struct layout_input *in, const struct layout_options *o,
              const struct dcp_write_how *how, struct layout *out, struct err *e)
{
    struct dcp_writing w = {.in = in, .how = how, .out = out};
    int ret = choose(&w, o, e);

    if (ret == 0)
        ret = put_data(&w, e);
    if (ret == 0 && !how->no_paths)
        ret = dcp_paths_new(&w, &w.paths, e);
    if (ret == 0)
        ret = dcp_write_metadata(&w, e);
    dcp_paths_free(w.paths);
    return ret;
}

static int layout_dcp(const struct layout_input *in, const struct layout_options *o,
                      struct layout *out, struct err *e)
{
    static const struct dcp_write_how how = {.role_of = dcp_origin_role};

    if (o->max_shard_size || o->codec)
        return err_set(e, EINVAL,
                       "dcp: a file a rank is written, plain: no shard size, no codec");
    return dcp_write(in, o, &how, out, e);
}

const struct format_writer writer_dcp = {
    .name = "dcp",
    .title = "PyTorch distributed checkpoint (DCP)",
    .layout = layout_dcp,
};
