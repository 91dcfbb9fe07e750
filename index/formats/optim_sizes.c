/* SPDX-License-Identifier: MIT */
/* index/formats/optim_sizes.c - full shapes of parameters, as an optimizer's DCP tells them. */
#include "index/formats/optim_sizes.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/dcp/dcp_metadata.h"
#include "index/formats/format.h"
#include "index/formats/hf/safetensors_files.h"
#include "remote/source.h"

/* A parameter: its name is a piece of a key of the metadata. */
struct param {
    const char *name;
    size_t len;
    uint32_t shape;
};

struct optim_sizes {
    struct dcp_names names;
    struct dcp_metadata *m;
    struct param *param; /* malloc; in order of the name */
    size_t count;
};

void optim_sizes_free(struct optim_sizes *o)
{
    if (!o)
        return;
    dcp_metadata_free(o->m);
    dcp_names_release(&o->names);
    free(o->param);
    free(o);
}

void optim_sizes_freep(struct optim_sizes **o)
{
    optim_sizes_free(*o);
}

static int compare(const void *a, const void *b)
{
    const struct param *x = a, *y = b;
    int order = memcmp(x->name, y->name, MIN(x->len, y->len));

    return order ? order : (x->len > y->len) - (x->len < y->len);
}

/* "optim.state.NAME.exp_avg", with one "optim." more in the summer of 2025: NAME. */
static bool take_name(const char *key, size_t len, struct param *out)
{
    static const char *const starts[] = {"optim.state.", "optim.optim.state."};
    static const char *const ends[] = {".exp_avg", ".momentum_buffer"};

    for (size_t i = 0; i < ARRAY_SIZE(starts); i++) {
        for (size_t k = 0; k < ARRAY_SIZE(ends); k++) {
            size_t start = strlen(starts[i]), end = strlen(ends[k]);

            if (len <= start + end || memcmp(key, starts[i], start) != 0 ||
                memcmp(key + len - end, ends[k], end) != 0)
                continue;
            out->name = key + start;
            out->len = len - start - end;
            return true;
        }
    }
    return false;
}

static int take_params(struct optim_sizes *o, struct err *e)
{
    o->param = calloc((size_t)o->m->nentries + 1, sizeof *o->param);
    if (!o->param)
        return err_nomem(e);
    for (uint32_t i = 0; i < o->m->nentries; i++) {
        const struct dcp_entry *entry = &o->m->entry[i];
        struct param *p = &o->param[o->count];
        const char *key;
        size_t len;

        if (entry->tensor == DCP_OBJECT || o->m->tensor[entry->tensor].bad)
            continue;
        key = intern_get(&o->names.keys, entry->key, &len);
        p->shape = o->m->tensor[entry->tensor].size;
        o->count += take_name(key, len, p);
    }
    qsort(o->param, o->count, sizeof *o->param, compare);
    return 0;
}

static int read_metadata(const struct scan_context *c, const char *dir,
                         struct optim_sizes *o, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    char below[PATH_MAX], path[PATH_MAX];

    if (store_join(dir, ".metadata", below, sizeof below) < 0 ||
        store_join(c->dir, below, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", dir);
    TRY(c->store->ops->open(c->store, path, &src, e));
    return dcp_metadata_load(src, &o->names, &o->m, e);
}

int optim_sizes_load(const struct scan_context *c, const char *dir,
                     struct optim_sizes **out, struct err *e)
{
    CLEANUP(optim_sizes_freep) struct optim_sizes *o = calloc(1, sizeof *o);
    struct err why = {0};

    *out = NULL;
    if (!o)
        return err_nomem(e);
    if (read_metadata(c, dir, o, &why) < 0) {
        if (!safetensors_stops_scan(why.code))
            return 0;
        return err_copy(e, &why);
    }
    TRY(take_params(o, e));
    *out = steal(&o);
    return 0;
}

bool optim_sizes_find(const struct optim_sizes *o, const char *name, size_t len,
                      struct shape *out)
{
    const struct param key = {.name = name, .len = len}, *p;
    const int64_t *dim;

    p = o ? bsearch(&key, o->param, o->count, sizeof *o->param, compare) : NULL;
    if (!p || p->shape == DCP_NO_SHAPE || p->shape == DCP_BAD_SHAPE)
        return false;
    dim = dcp_shape(&o->names, p->shape, &out->nd);
    for (uint32_t d = 0; d < out->nd; d++) {
        if (dim[d] < 0)
            return false;
        out->dim[d] = (uint64_t)dim[d];
    }
    return true;
}

const char *optim_sizes_name(const struct optim_sizes *o, size_t i, size_t *len)
{
    if (!o || i >= o->count)
        return NULL;
    *len = o->param[i].len;
    return o->param[i].name;
}
