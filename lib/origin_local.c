/* SPDX-License-Identifier: MIT */
/* lib/origin_local.c - a checkpoint read by its own files, in this process. */
#include "lib/origin.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "base/pool.h"
#include "gpu/tensor.h"
#include "index/catalog.h"
#include "index/formats/scan.h"
#include "index/names.h"
#include "remote/decoded.h"
#include "remote/open_files.h"
#include "remote/store.h"

enum { KEEP_OPEN = 512, INFO_MEMORY = 64 << 20 };

/* Decoded copies of compressed pieces; as the command's. */
static const uint64_t decoded_budget = (uint64_t)8 << 30;

struct local {
    struct origin base;
    struct store *store;
    struct mapping *mapping;
    struct catalog *catalog;
    struct scanner *scanner;
    struct open_files *files;
    struct decoded_cache *decoded;
    struct reader_env env;
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
    int ret = tensor_open(&l->env, l->checkpoint, row->ord, &t, e);

    return ret < 0 ? ret : gather_new_tensor(t, part, out, e);
}

static int local_current(struct origin *o, struct err *e)
{
    struct local *l = local_of(o);
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    struct checkpoint_info info;
    int ret = a ? scanner_get(l->scanner, "", l->file, a, &info, e) : err_nomem(e);

    if (ret == 0 && info.id != l->checkpoint)
        return err_set(e, ESTALE, "%s: another checkpoint by now", l->store->url);
    return ret;
}

static void local_close(struct origin *o)
{
    struct local *l = local_of(o);

    scanner_free(l->scanner);
    pool_free(steal(&o->pool)); /* what it does ahead of time uses all of these */
    open_files_free(l->files);
    decoded_free(l->decoded);
    catalog_close(l->catalog);
    mapping_free(l->mapping);
    store_close(l->store);
    origin_release(o);
    free(l);
}

static const struct origin_ops local_ops = {
    .gather = local_gather,
    .current = local_current,
    .close = local_close,
};

/* ---- opening ---- */

/*
 * Without a cache directory (no home, a read-only one) the index is kept in memory, and
 * what has to be decoded lies with other temporary files: nobody is kept from reading.
 */
static int find_cache(const struct origin_options *o, struct buf *dir, bool *memory,
                      struct err *e)
{
    const char *temporary = getenv("TMPDIR");
    int ret = cache_dir(o->cache_dir, dir, e);

    *memory = o->index_memory;
    if (ret == 0 || o->cache_dir)
        return ret;
    *e = (struct err){0};
    *memory = true;
    buf_clear(dir);
    return buf_adds(dir, temporary && *temporary ? temporary : "/tmp");
}

static int open_catalog(struct local *l, const char *dir, bool memory, struct err *e)
{
    struct catalog_options o = {.dir = dir, .memory = memory};
    CLEANUP(buf_release) struct buf identity = {0};
    int ret = mapping_identity(l->mapping, l->store->identity, &identity, e);

    if (ret < 0)
        return ret;
    ret = catalog_open(&o, identity.data, &l->catalog, e);
    if (ret == 0 || memory)
        return ret;
    *e = (struct err){0}; /* a full disk must not keep anyone from reading */
    o.memory = true;
    return catalog_open(&o, identity.data, &l->catalog, e);
}

static int open_parts(struct local *l, const char *source,
                      const struct origin_options *o, struct err *e)
{
    const struct store_options so = {.follow_symlinks = o->follow_symlinks};
    CLEANUP(buf_release) struct buf dir = {0};
    bool memory = false;
    int ret = store_open(source, &so, &l->store, e);

    if (ret == 0)
        ret = find_cache(o, &dir, &memory, e);
    if (ret == 0)
        ret = mapping_open(&o->mapping, &l->mapping, e);
    if (ret == 0)
        ret = open_catalog(l, dir.data, memory, e);
    if (ret == 0)
        ret = scanner_new(l->store, l->catalog, l->base.pool, &l->scanner, e);
    if (ret == 0)
        scanner_use(l->scanner, l->mapping);
    if (ret == 0)
        ret = open_files_new(l->store, KEEP_OPEN, &l->files, e);
    if (ret == 0)
        ret = decoded_new(dir.data, decoded_budget, &l->decoded, e);
    l->env = (struct reader_env){.catalog = l->catalog,
                                 .files = l->files,
                                 .decoded = l->decoded,
                                 .pool = l->base.pool,
                                 .codec = format_codec};
    return ret;
}

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

static int no_checkpoint(const char *source, struct err *e)
{
    err_set(e, ENOENT, "%s: no checkpoint that a driver recognises", source);
    return err_hint(
        e,
        "`unshard ls %s` lists those of a tree, `unshard probe` tells what each driver saw",
        source);
}

static int find_checkpoint(struct local *l, struct checkpoint_info *info,
                           struct arena *a, struct err *e)
{
    CLEANUP(listing_freep) struct listing *list = NULL;
    CLEANUP(place_release) struct place place = {0};
    int ret = l->store->ops->list(l->store, "", &list, e);

    if (ret == 0)
        ret = place_of(list, l->store->file, &place, e);
    if (ret == 0 && place.kind != PLACE_CHECKPOINT)
        return no_checkpoint(l->store->url, e);
    if (ret == 0)
        ret = scanner_get(l->scanner, "", place.file, a, info, e);
    if (ret == 0 && info->error) {
        err_set(e, EBADMSG, "%s", info->error);
        return err_wrap(e, "%s", l->store->url);
    }
    return ret;
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
    return catalog_tensors(l->catalog, info.id, 0, add_row, &rows, e);
}

int origin_local(const char *source, const struct origin_options *options,
                 struct origin **out, struct err *e)
{
    struct local *l = calloc(1, sizeof *l);
    int ret = l ? origin_init(&l->base, &local_ops, options->jobs, e) : err_nomem(e);

    if (!l)
        return ret;
    if (ret == 0)
        ret = open_parts(l, source, options, e);
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
