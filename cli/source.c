/* SPDX-License-Identifier: MIT */
/* cli/source.c - a command's source, opened with everything that reads it. */
#include <errno.h>
#include <string.h>
#include <sys/resource.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/confine.h"
#include "base/fsutil.h"
#include "base/log.h"
#include "base/pool.h"
#include "cli/cli.h"
#include "cli/suggest.h"
#include "index/dtype.h"
#include "index/formats/scan.h"
#include "lib/unshard.h"
#include "remote/block_cache.h"
#include "remote/decoded.h"
#include "remote/open_files.h"
#include "remote/store.h"

enum {
    KEEP_OPEN = 512,        /* shards that nobody reads now */
    NAMED_CHECKPOINTS = 3,  /* in the message about a tree */
    INFO_MEMORY = 64 << 20, /* strings of one checkpoint's row */
};

/* Decoded copies of compressed pieces, unless cache_size= says otherwise; as a mount's. */
static const uint64_t decoded_budget = (uint64_t)8 << 30;

static void cover(char *text, size_t len)
{
    memset(text, 'x', len);
}

int cli_hide(char *arg, char **secret, char **shown)
{
    char *host, *path, *at;

    *secret = NULL;
    if (!store_is_url(arg))
        return 0;
    host = strstr(arg, "://") + 3;
    path = host + strcspn(host, "/?#");
    at = memrchr(host, '@', (size_t)(path - host));
    if (!at && !strchr(path, '?'))
        return 0;
    *secret = strdup(arg);
    *shown = store_name_shown(arg);
    if (!*secret || !*shown) {
        free(*secret);
        free(*shown);
        return -ENOMEM;
    }
    if (at)
        cover(host, (size_t)(at - host));
    if ((path = strchr(path, '?')))
        cover(path + 1, strlen(path + 1));
    return 0;
}

/* What the user wrote. */
static const char *as_given(const struct cli *c, const char *name)
{
    for (int i = 0; i < (int)ARRAY_SIZE(c->secret) && i < c->args; i++)
        if (c->secret[i] && c->arg[i] == name)
            return c->secret[i];
    return name;
}

/* Why all is scanned anew each time; `unshard doctor` says it too. Forgets the error. */
static void told_of_index(struct cli *c)
{
    char line[1400];

    log_msg(LOG_CLI, LOG_INFO, "the index is kept in memory: %s",
            err_line(&c->err, line, sizeof line));
    c->err = (struct err){0};
}

static const char *temporary_dir(void)
{
    const char *name = getenv("TMPDIR");

    return name && *name ? name : "/tmp";
}

void cli_confine(const struct cli *c)
{
    CLEANUP(buf_release) struct buf cache = {0};
    struct err none = {0};
    const char *writable[] = {NULL, NULL};

    for (int i = 0; i < c->args; i++)
        if (store_is_url(c->arg[i]))
            return;
    writable[0] =
        cache_dir(c->opt.cache_dir, &cache, &none) == 0 ? cache.data : temporary_dir();
    (void)confine(CONFINE_CALLS | CONFINE_FILES, writable);
}

/*
 * Without a cache directory (no home, a read-only one) the index is kept in memory, and
 * what has to be decoded lies with other temporary files: nobody is kept from reading.
 */
static int find_cache(struct cli *c, struct buf *dir)
{
    int ret = cache_dir(c->opt.cache_dir, dir, &c->err);

    if (ret == 0 || c->opt.cache_dir)
        return ret;
    told_of_index(c);
    c->opt.index_memory = true;
    buf_clear(dir);
    return buf_adds(dir, temporary_dir());
}

static int open_catalog(struct cli *c, struct cli_source *s, const char *dir)
{
    struct catalog_options o = {.dir = dir, .memory = c->opt.index_memory};
    CLEANUP(buf_release) struct buf identity = {0};
    int ret = mapping_identity(s->mapping, s->store->identity, &identity, &c->err);

    if (ret < 0)
        return ret;
    ret = catalog_open(&o, identity.data, &s->catalog, &c->err);
    if (ret == 0 || o.memory)
        return ret;
    told_of_index(c); /* a full disk must not keep anyone from reading either */
    o.memory = true;
    return catalog_open(&o, identity.data, &s->catalog, &c->err);
}

/* Every shard of a checkpoint may be open at once. */
static void raise_open_files(void)
{
    struct rlimit lim;

    if (getrlimit(RLIMIT_NOFILE, &lim) == 0 && lim.rlim_cur < lim.rlim_max) {
        lim.rlim_cur = lim.rlim_max;
        setrlimit(RLIMIT_NOFILE, &lim);
    }
}

/* `dir`: the cache directory, or NULL. */
static int open_store(struct cli *c, struct cli_source *s, const char *dir)
{
    const struct block_cache_options bo = {.dir = c->opt.no_cache ? NULL : dir,
                                           .limit = c->opt.cache_size};
    struct store_options so = {.follow_symlinks = c->opt.follow_symlinks};
    int ret = 0;

    if (store_is_url(s->name))
        ret = block_cache_new(&bo, &s->blocks, &c->err);
    so.cache = s->blocks ? block_cache_over : NULL;
    so.cache_user = s->blocks;
    return ret < 0 ? ret : store_open(as_given(c, s->name), &so, &s->store, &c->err);
}

static int open_parts(struct cli *c, struct cli_source *s)
{
    CLEANUP(buf_release) struct buf dir = {0};
    uint64_t budget = c->opt.cache_size ? c->opt.cache_size : decoded_budget;
    int ret = find_cache(c, &dir);

    if (ret == 0)
        ret = open_store(c, s, c->opt.index_memory ? NULL : dir.data);
    if (ret == 0)
        ret = pool_new(c->opt.jobs        ? c->opt.jobs
                       : s->store->remote ? POOL_REMOTE
                                          : 0,
                       &s->pool, &c->err);
    if (ret == 0)
        ret = mapping_open(&c->opt.mapping, &s->mapping, &c->err);
    if (ret == 0)
        ret = open_catalog(c, s, dir.data);
    if (ret == 0)
        ret = scanner_new(s->store, s->catalog, s->pool, &s->scanner, &c->err);
    if (ret == 0)
        scanner_use(s->scanner, s->mapping);
    if (ret == 0)
        ret = open_files_new(s->store, KEEP_OPEN, &s->files, &c->err);
    if (ret == 0)
        ret = decoded_new(c->opt.no_cache ? NULL : dir.data,
                          c->opt.no_cache ? DECODED_MEMORY_ALONE : budget, &s->decoded,
                          &c->err);
    return ret;
}

int cli_open(struct cli *c, const char *name, struct cli_source *out)
{
    int ret;

    *out = (struct cli_source){.name = name};
    raise_open_files();
    ret = open_parts(c, out);
    if (ret < 0) {
        if (!out->store && ret == -ENOTSUP && store_is_url(name))
            ret = cli_usage(c);
        cli_close(out);
        return ret;
    }
    out->env = (struct reader_env){.ahead = out->store->remote ? BLOCK_CACHE_AHEAD : 0,
                                   .catalog = out->catalog,
                                   .files = out->files,
                                   .decoded = out->decoded,
                                   .pool = out->pool,
                                   .codec = format_codec,
                                   .once = true};
    return 0;
}

void cli_library_options(const struct cli *c, struct unshard_options *out)
{
    const struct cli_options *o = &c->opt;

    *out = (struct unshard_options){.size = sizeof *out,
                                    .cache_dir = o->cache_dir,
                                    .index_memory = o->index_memory,
                                    .follow_symlinks = o->follow_symlinks,
                                    .jobs = o->jobs,
                                    .map = o->mapping.map,
                                    .hf = o->mapping.hf,
                                    .module_weights = o->mapping.module_weights};
    if (o->mapping.dtype != DTYPE_NONE)
        out->dtype = dtype_name(o->mapping.dtype);
}

void cli_close(struct cli_source *s)
{
    store_stop(s->store);
    block_cache_stop(s->blocks);
    scanner_free(s->scanner);
    pool_free(s->pool); /* what it does ahead of time uses all of these */
    open_files_free(s->files);
    decoded_free(s->decoded);
    catalog_close(s->catalog);
    mapping_free(s->mapping);
    store_close(s->store);
    block_cache_free(s->blocks);
    *s = (struct cli_source){0};
}

int cli_is_checkpoint(struct cli *c, struct cli_source *s)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP(place_release) struct place place = {0};
    int ret = s->store->ops->list(s->store, "", &l, &c->err);

    if (ret == 0)
        ret = place_of(l, s->store->file, &place, &c->err);
    return ret < 0 ? ret : place.kind == PLACE_CHECKPOINT;
}

struct found {
    struct buf names;
    size_t count;
};

static int note_checkpoint(void *user, const char *dir, const char *file,
                           const struct format_driver *d)
{
    struct found *f = user;

    (void)d;
    if (f->count++ < NAMED_CHECKPOINTS)
        buf_addf(&f->names, "%s%s%s%s", f->count > 1 ? ", " : "", dir,
                 file && *dir ? "/" : "", file ? file : "");
    return f->count > 1000; /* enough to tell a person */
}

/* A save that is not finished has its shards and not yet what tells where they belong. */
static size_t shards_without_metadata(struct cli_source *s)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct err ignored = {0};
    size_t shards = 0;

    if (s->store->ops->list(s->store, "", &l, &ignored) < 0 ||
        listing_find(l, ".metadata"))
        return 0;
    for (size_t i = 0; i < listing_count(l); i++) {
        const char *dot = strrchr(listing_at(l, i)->name, '.');

        shards += dot && strcmp(dot, ".distcp") == 0;
    }
    return shards;
}

int cli_no_checkpoint(struct cli *c, struct cli_source *s)
{
    size_t shards = shards_without_metadata(s);

    if (shards) {
        err_set(&c->err, ENOENT,
                "%s: no checkpoint: %zu .distcp files, and no .metadata beside them",
                s->name, shards);
        return err_hint(&c->err,
                        "the save is not finished, or .metadata was not copied "
                        "along: names that begin with a dot are left out by *");
    }
    err_set(&c->err, ENOENT, "%s: no checkpoint that a driver recognises", s->name);
    return err_hint(&c->err, "`unshard probe %s` tells what each driver saw", s->name);
}

static int not_one_checkpoint(struct cli *c, struct cli_source *s)
{
    struct found found = {.names = {.max = 4096}};
    struct err ignored = {0};

    scanner_walk(s->scanner, "", note_checkpoint, &found, &ignored);
    if (!found.count) {
        cli_no_checkpoint(c, s);
    } else {
        err_set(&c->err, ENOENT, "%s: a tree with %zu%s checkpoint%s (%s%s)", s->name,
                found.count, found.count > 1000 ? " or more" : "",
                found.count > 1 ? "s" : "", found.names.data ? found.names.data : "",
                found.count > NAMED_CHECKPOINTS ? ", ..." : "");
        err_hint(&c->err, "name one: %s/CHECKPOINT", s->name);
    }
    buf_release(&found.names);
    return -ENOENT;
}

int cli_checkpoint(struct cli *c, struct cli_source *s, struct arena *a,
                   struct checkpoint_info *out)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP(place_release) struct place place = {0};
    int ret = s->store->ops->list(s->store, "", &l, &c->err);

    if (ret == 0)
        ret = place_of(l, s->store->file, &place, &c->err);
    if (ret < 0)
        return ret;
    if (place.kind != PLACE_CHECKPOINT)
        return not_one_checkpoint(c, s);
    ret = scanner_get(s->scanner, "", place.file, a, out, &c->err);
    if (ret < 0)
        return ret;
    if (out->error) {
        err_set(&c->err, EBADMSG, "%s", out->error);
        err_hint(&c->err, "the tensors cannot be found without it: get that file anew");
        return err_wrap(&c->err, "%s", s->name);
    }
    return 0;
}

/* ---- keys that are not there ---- */

struct near {
    struct suggestion suggestion;
    const char *part; /* of keys, literally */
    size_t len;
    uint64_t with_part;
};

static int see_key(void *user, const struct tensor_info *t)
{
    struct near *n = user;

    suggest_try(&n->suggestion, t->key, t->key_len);
    n->with_part += n->len && memmem(t->key, t->key_len, n->part, n->len);
    return 0;
}

/* What a key or a pattern that nothing matches may have meant. */
static int hint_key(struct cli *c, struct cli_source *s, int64_t checkpoint,
                    const char *word)
{
    size_t skip = strspn(word, "*."), len = strcspn(word + skip, "*?[");
    struct near n = {.part = word + skip, .len = len};
    struct err ignored = {0};

    while (n.len && n.part[n.len - 1] == '.')
        n.len--;
    suggest_begin(&n.suggestion, n.part, n.len);
    if (catalog_tensors(s->catalog, checkpoint, 0, see_key, &n, &ignored) == 0) {
        if (n.with_part > 1)
            return err_hint(&c->err, "\"*%.*s*\" matches %" PRIu64 " of its keys",
                            (int)n.len, n.part, n.with_part);
        if (suggest_found(&n.suggestion))
            return err_hint(&c->err, "is %s meant?", suggest_found(&n.suggestion));
    }
    return err_hint(&c->err, "`unshard ls %s` lists them", s->name);
}

int cli_no_match(struct cli *c, struct cli_source *s, int64_t checkpoint,
                 const char *pattern)
{
    err_set(&c->err, ENOENT, "%s: no tensor matches %s", s->name, pattern);
    return hint_key(c, s, checkpoint, pattern);
}

int cli_tensor(struct cli *c, struct cli_source *s, const char *key, struct arena *a,
               struct checkpoint_info *info, struct tensor_info *out)
{
    int ret = cli_checkpoint(c, s, a, info);

    if (ret < 0)
        return ret;
    ret =
        catalog_tensor_by_key(s->catalog, info->id, key, strlen(key), a, out, &c->err);
    if (ret != -ENOENT)
        return ret;
    err_set(&c->err, ENOENT, "%s: no tensor %s", s->name, key);
    return hint_key(c, s, info->id, key);
}
