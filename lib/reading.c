/* SPDX-License-Identifier: MIT */
/* lib/reading.c - opens a source: its store, its index, and what reads its tensors. */
#include "lib/reading.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/fsutil.h"
#include "base/pool.h"
#include "index/formats/scan.h"
#include "remote/block_cache.h"
#include "remote/decoded.h"
#include "remote/open_files.h"
#include "remote/store.h"

/* ---- where it writes ---- */

static const char *temporary_dir(void)
{
    const char *name = getenv("TMPDIR");

    return name && *name ? name : "/tmp";
}

int reading_writes_to(const struct reading_options *options, struct buf *dir)
{
    struct err none = {0};

    if (!options->index_memory && cache_dir(options->cache_dir, dir, &none) == 0)
        return 0;
    buf_clear(dir);
    return buf_adds(dir, temporary_dir());
}

/* From now on the index is in memory. `e` is forgotten here. */
static void do_without(struct reading *r, struct err *e)
{
    r->why_memory = *e;
    *e = (struct err){0};
    free(steal(&r->cache_dir));
}

static int find_cache(struct reading *r, const struct reading_options *o, struct err *e)
{
    CLEANUP(buf_release) struct buf dir = {0};
    int ret;

    if (o->index_memory)
        return 0;
    ret = cache_dir(o->cache_dir, &dir, e);
    if (ret == 0) {
        r->cache_dir = realpath(dir.data, NULL);
        if (!r->cache_dir)
            ret = err_set(e, errno, "%s: %s", dir.data, strerror(errno));
    }
    if (ret == 0 || (o->cache_dir && !o->cache_optional))
        return ret;
    do_without(r, e);
    return 0;
}

/* ---- its parts ---- */

static int open_store(struct reading *r, const char *source,
                      const struct reading_options *o, struct err *e)
{
    const struct block_cache_options bo = {.dir = o->no_cache ? NULL : r->cache_dir,
                                           .limit = o->cache_size};
    struct store_options so = {.follow_symlinks = o->follow_symlinks,
                               .refresh = o->refresh};
    int ret = store_is_url(source) ? block_cache_new(&bo, &r->blocks, e) : 0;

    so.cache = r->blocks ? block_cache_over : NULL;
    so.recall = r->blocks ? block_cache_recall : NULL;
    so.note = r->blocks ? block_cache_note : NULL;
    so.cache_user = r->blocks;
    return ret < 0 ? ret : store_open(source, &so, &r->store, e);
}

/* A disk that is full or cannot be written must not keep anyone from reading either. */
static int open_catalog(struct reading *r, struct err *e)
{
    struct catalog_options o = {.dir = r->cache_dir, .memory = !r->cache_dir};
    CLEANUP(buf_release) struct buf identity = {0};
    int ret = mapping_identity(r->mapping, r->store->identity, &identity, e);

    if (ret < 0)
        return ret;
    ret = catalog_open(&o, identity.data, &r->catalog, e);
    if (ret == 0 || o.memory)
        return ret;
    do_without(r, e);
    o = (struct catalog_options){.memory = true};
    return catalog_open(&o, identity.data, &r->catalog, e);
}

static bool can_write(const char *dir)
{
    CLEANUP_FD int fd = unnamed_file(dir);

    return fd >= 0;
}

/*
 * Decoded pieces lie in the cache directory; without one, with other temporary files. Who
 * gave up writing there (base/confine.h) still has `known`, which took no index; or NULL.
 */
static int open_decoded(struct reading *r, const struct reading_options *o,
                        const char *known, struct err *e)
{
    const char *dir = r->cache_dir ? r->cache_dir : temporary_dir();

    if (o->no_cache)
        return decoded_new(NULL, DECODED_MEMORY_ALONE, &r->decoded, e);
    if (!r->cache_dir && known && !can_write(dir))
        dir = known;
    return decoded_new(dir, o->cache_size ? o->cache_size : READING_DECODED,
                       &r->decoded, e);
}

static int open_parts(struct reading *r, const char *source,
                      const struct reading_options *o, struct err *e)
{
    CLEANUP_FREE char *known = NULL;
    int ret = find_cache(r, o, e);

    if (ret == 0 && r->cache_dir && !(known = strdup(r->cache_dir)))
        ret = err_nomem(e);
    if (ret == 0)
        ret = open_store(r, source, o, e);
    if (ret == 0)
        ret = mapping_open(&o->mapping, &r->mapping, e);
    if (ret == 0)
        ret = open_catalog(r, e);
    if (ret == 0)
        ret = pool_new(o->jobs            ? o->jobs
                       : r->store->remote ? POOL_REMOTE
                                          : 0,
                       &r->pool, e);
    if (ret == 0)
        ret = scanner_new(r->store, r->catalog, r->pool, &r->scanner, e);
    if (ret == 0)
        scanner_use(r->scanner, r->mapping);
    if (ret == 0)
        ret = open_files_new(r->store, o->keep_open ? o->keep_open : READING_KEEP_OPEN,
                             &r->files, e);
    return ret < 0 ? ret : open_decoded(r, o, known, e);
}

int reading_open(const char *source, const struct reading_options *options,
                 struct reading *out, struct err *e)
{
    *out = (struct reading){0};
    TRY(open_parts(out, source, options, e));
    out->name = out->store->url;
    out->env = (struct reader_env){.ahead = out->store->remote ? BLOCK_CACHE_AHEAD : 0,
                                   .catalog = out->catalog,
                                   .files = out->files,
                                   .decoded = out->decoded,
                                   .pool = out->pool,
                                   .codec = format_codec,
                                   .once = options->once};
    return 0;
}

void reading_close(struct reading *r)
{
    store_stop(r->store);
    block_cache_stop(r->blocks);
    scanner_free(r->scanner);
    pool_free(r->pool); /* what it does ahead of time uses all of these */
    decoded_free(r->decoded);
    open_files_free(r->files);
    catalog_close(r->catalog);
    mapping_free(r->mapping);
    store_close(r->store);
    block_cache_free(r->blocks);
    free(r->cache_dir);
    *r = (struct reading){0};
}

/* ---- what it holds ---- */

/* Reasons of scans have what to do about them at their end, in parentheses. */
static bool has_hint(const char *error)
{
    size_t len = strlen(error);

    return len > 0 && error[len - 1] == ')';
}

/* The only checkpoint of a tree. */
struct only {
    char dir[PATH_MAX], file[NAME_MAX + 1];
    bool has_file;
    unsigned count;
};

static int note_only(void *user, const char *dir, const char *file,
                     const struct format_driver *d)
{
    struct only *o = user;

    (void)d;
    if (o->count++ > 0)
        return 1;
    snprintf(o->dir, sizeof o->dir, "%s", dir);
    snprintf(o->file, sizeof o->file, "%s", file ? file : "");
    o->has_file = file != NULL;
    return 0;
}

static int note_unfinished(void *user, const char *dir, const char *why)
{
    struct only *o = user;

    (void)dir;
    (void)why;
    o->count += 2;
    return 1;
}

/*
 * Is there exactly one? Not where it cannot be known: directories without end, a file that
 * cannot be read. Whoever lists the tree then reports that, beside what it finds.
 */
static bool find_only(struct reading *r, struct only *out)
{
    struct err ignored = {0};

    *out = (struct only){0};
    return !r->store->file &&
           scanner_walk_all(r->scanner, "", note_only, note_unfinished, out,
                            &ignored) >= 0 &&
           out->count == 1;
}

static int tell_failed(const struct reading *r, const struct checkpoint_info *info,
                       struct err *e)
{
    err_set(e, EBADMSG, "%s", info->error);
    if (!has_hint(info->error))
        err_hint(e, "the tensors cannot be found without it: get that file anew");
    return err_wrap(e, "%s", r->name);
}

int reading_checkpoint(struct reading *r, struct arena *a, struct checkpoint_info *out,
                       struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP(place_release) struct place place = {0};
    struct only only = {0};
    int ret = r->store->ops->list(r->store, "", &l, e);

    if (ret == 0)
        ret = place_of(l, r->store->file, &place, e);
    if (ret < 0)
        return ret;
    if (place.kind != PLACE_CHECKPOINT && place.trouble) {
        return err_copy(e, place.trouble);
    }
    if (place.kind == PLACE_CHECKPOINT) {
        ret = scanner_get(r->scanner, "", place.file, a, out, e);
    } else {
        if (!find_only(r, &only))
            return 1;
        r->below = true;
        ret = scanner_get(r->scanner, only.dir, only.has_file ? only.file : NULL, a,
                          out, e);
    }
    return ret < 0 || !out->error ? ret : tell_failed(r, out, e);
}

int reading_is_tree(struct reading *r, struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP(place_release) struct place place = {0};
    struct only only;
    int ret = r->store->ops->list(r->store, "", &l, e);

    if (ret == 0)
        ret = place_of(l, r->store->file, &place, e);
    if (ret < 0 || place.kind == PLACE_CHECKPOINT)
        return MIN(ret, 0);
    return !find_only(r, &only);
}
