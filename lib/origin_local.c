/* SPDX-License-Identifier: MIT */
/* lib/origin_local.c - a checkpoint read by its own files, in this process. */
#include "lib/origin.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "gpu/tensor.h"
#include "index/formats/scan.h"
#include "index/formats/unread.h"
#include "index/names.h"
#include "lib/reading.h"
#include "remote/store.h"

enum { INFO_MEMORY = 64 << 20 };

struct local {
    struct origin base;
    struct reading in;
    int64_t checkpoint;
    const char *file; /* the one that is the checkpoint, or NULL */
};

static struct local *local_of(struct origin *o)
{
    return container_of(o, struct local, base);
}

static int local_gather(struct origin *o, const struct row *row,
                        const struct gather_part *part, struct gather **out,
                        struct err *e)
{
    struct local *l = local_of(o);
    CLEANUP(tensor_putp) struct tensor *t = NULL;
    int ret = tensor_open(&l->in.env, l->checkpoint, row->ord, &t, e);

    return ret < 0 ? ret : gather_new_tensor(t, part, out, e);
}

static int local_current(struct origin *o, struct err *e)
{
    struct local *l = local_of(o);
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    struct checkpoint_info info;
    int ret = a ? scanner_get(l->in.scanner, "", l->file, a, &info, e) : err_nomem(e);

    if (ret == 0 && info.id != l->checkpoint)
        return err_set(e, ESTALE, "%s: another checkpoint by now", l->in.store->url);
    return ret;
}

static void local_close(struct origin *o)
{
    struct local *l = local_of(o);

    reading_close(&l->in);
    origin_release(o);
    free(l);
}

static const struct origin_ops local_ops = {
    .gather = local_gather,
    .current = local_current,
    .close = local_close,
};

/* ---- what it holds ---- */

struct listing_rows {
    struct local *l;
    struct err *e;
};

static int add_row(void *user, const struct tensor_info *t)
{
    struct listing_rows *r = user;
    const struct row row = {.key = t->key,
                            .key_len = t->key_len,
                            .ord = t->ord,
                            .dtype = t->dtype,
                            .role = role_name(t->role),
                            .fault = t->fault,
                            .shape = t->shape,
                            .bytes = t->bytes};

    return origin_add(&r->l->base, &row, r->e);
}

static int find_checkpoint(struct local *l, struct checkpoint_info *info,
                           struct arena *a, struct err *e)
{
    CLEANUP(listing_freep) struct listing *names = NULL;
    struct store *store = l->in.store;
    struct err ignored = {0};
    int ret = reading_checkpoint(&l->in, a, info, e);

    if (ret <= 0)
        return ret;
    if (store->file && store->ops->list(store, "", &names, &ignored) == 0)
        TRY(unread_tell(names, store->file, l->in.name, e));
    err_set(e, ENOENT, "%s: no checkpoint that a driver recognises", l->in.name);
    return err_hint(
        e,
        "`unshard ls %s` lists those of a tree, `unshard probe` tells what each driver saw",
        l->in.name);
}

static int read_rows(struct local *l, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    struct listing_rows rows = {l, e};
    struct checkpoint_info info;
    int ret = a ? find_checkpoint(l, &info, a, e) : err_nomem(e);

    if (ret < 0)
        return ret;
    l->checkpoint = info.id;
    if (info.file) {
        l->file = arena_memdup(l->base.arena, info.file, strlen(info.file));
        if (!l->file)
            return err_nomem(e);
    }
    return catalog_tensors(l->in.catalog, info.id, 0, add_row, &rows, e);
}

static int open_reading(struct local *l, const char *source,
                        const struct origin_options *options, struct err *e)
{
    const struct reading_options o = {.cache_dir = options->cache_dir,
                                      .index_memory = options->index_memory,
                                      .follow_symlinks = options->follow_symlinks,
                                      .no_cache = options->no_cache,
                                      .cache_size = options->cache_size,
                                      .jobs = options->jobs,
                                      .mapping = options->mapping};
    int ret = reading_open(source, &o, &l->in, e);

    l->base.pool = l->in.pool;
    return ret;
}

int origin_local(const char *source, const struct origin_options *options,
                 struct origin **out, struct err *e)
{
    struct local *l = calloc(1, sizeof *l);
    int ret = l ? origin_init(&l->base, &local_ops, e) : err_nomem(e);

    if (!l)
        return ret;
    if (ret == 0)
        ret = open_reading(l, source, options, e);
    if (ret == 0)
        ret = read_rows(l, e);
    if (ret < 0) {
        local_close(&l->base);
        return ret;
    }
    origin_sort(&l->base);
    *out = &l->base;
    return 0;
}
