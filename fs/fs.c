/* SPDX-License-Identifier: MIT */
/* fs/fs.c - the root object of a mount: what it opens, in which order. */
#include "fs/fs.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "base/log.h"
#include "base/pool.h"
#include "fs/copies.h"
#include "fs/lane.h"
#include "fs/node.h"
#include "fs/overlay.h"
#include "fs/read.h"
#include "fs/slot.h"
#include "fs/stage.h"
#include "fs/watch.h"
#include "remote/block_cache.h"
#include "remote/bucket.h"
#include "remote/decoded.h"
#include "remote/open_files.h"

#define DEFAULT_CACHE_SIZE (8ull << 30)
enum { OPEN_FILES_MAX = 4096 };

int mount_views_parse(const char *text, unsigned *out, struct err *e)
{
    static const struct {
        const char *name;
        enum mount_show bit;
    } views[] = {{"tensors", SHOW_TENSORS},
                 {"tree", SHOW_TREE},
                 {"raw", SHOW_RAW},
                 {"optimizer", SHOW_OPTIMIZER},
                 {"model", SHOW_MODEL}};
    unsigned bits = 0;

    do {
        size_t len = strcspn(text, ","), i = 0;

        while (i < ARRAY_SIZE(views) &&
               (strlen(views[i].name) != len || memcmp(views[i].name, text, len) != 0))
            i++;
        if (i == ARRAY_SIZE(views)) {
            err_set(e, EINVAL, "views=: there is no view \"%.*s\"", (int)MIN(len, 64u),
                    text);
            return err_hint(e, "they are tensors, tree, raw, optimizer and model");
        }
        bits |= views[i].bit;
        text += len + (text[len] == ',');
    } while (*text);
    *out = bits;
    return 0;
}

const char *fs_fuse_version(void)
{
    return fuse_pkgversion();
}

static int find_cache_dir(struct fs *fs, struct err *e)
{
    CLEANUP(buf_release) struct buf dir = {.max = PATH_MAX};
    int rc = cache_dir(fs->options.cache_dir, &dir, e);

    if (rc < 0)
        return rc;
    fs->cache_dir = realpath(dir.data, NULL);
    if (!fs->cache_dir)
        return err_set(e, errno, "%s: %s", dir.data, strerror(errno));
    return 0;
}

/*
 * A disk that is full or cannot be written is no reason not to show a checkpoint: without
 * a directory all is kept in memory.
 */
static void open_cache_dir(struct fs *fs)
{
    struct err why = {0};
    char line[1400];

    if (!fs->options.memory_index && find_cache_dir(fs, &why) < 0)
        log_msg(LOG_FS, LOG_WARN, "the index is kept in memory: %s",
                err_line(&why, line, sizeof line));
}

static int open_blocks(struct fs *fs, struct err *e)
{
    const struct block_cache_options options = {
        .dir = fs->options.no_cache ? NULL : fs->cache_dir,
        .limit = fs->options.cache_size};

    return store_is_url(fs->options.source) ? block_cache_new(&options, &fs->blocks, e)
                                            : 0;
}

static int open_store(struct fs *fs, struct err *e)
{
    const struct store_options options = {.follow_symlinks =
                                              fs->options.follow_symlinks,
                                          .refresh = fs->options.refresh,
                                          .cache = fs->blocks ? block_cache_over : NULL,
                                          .cache_user = fs->blocks};

    return store_open(fs->options.source, &options, &fs->store, e);
}

static int index_on_disk(struct fs *fs, struct err *e)
{
    CLEANUP(buf_release) struct buf identity = {0};
    struct catalog_options options = {.dir = fs->cache_dir};
    int rc = mapping_identity(fs->mapping, fs->store->identity, &identity, e);
    return rc < 0 ? rc : catalog_open(&options, identity.data, &fs->catalog, e);
}

/*
 * An index in memory where the one on disk cannot be had: a disk that is full or cannot
 * be written is no reason not to show a checkpoint.
 */
static int open_index(struct fs *fs, struct err *e)
{
    const struct catalog_options memory = {.memory = true};
    struct err why = {0};
    char line[1400];

    if (fs->cache_dir) {
        if (index_on_disk(fs, &why) == 0)
            return 0;
        log_msg(LOG_FS, LOG_WARN, "the index is kept in memory: %s",
                err_line(&why, line, sizeof line));
        free(steal(&fs->cache_dir));
    }
    return catalog_open(&memory, fs->store->identity, &fs->catalog, e);
}

static unsigned files_to_keep(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return 64;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit); /* if not, then with fewer */
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return 64;
    return (unsigned)MIN(limit.rlim_cur / 4, (rlim_t)OPEN_FILES_MAX);
}

static int open_reading(struct fs *fs, struct err *e)
{
    const char *tmp = getenv("TMPDIR");
    const char *dir = fs->cache_dir ? fs->cache_dir : tmp ? tmp : "/tmp";
    uint64_t budget =
        fs->options.cache_size ? fs->options.cache_size : DEFAULT_CACHE_SIZE;
    unsigned jobs = fs->store->remote ? POOL_REMOTE : 0;
    int rc = pool_new(fs->options.jobs ? fs->options.jobs : jobs, &fs->pool, e);

    if (fs->options.no_cache) {
        dir = NULL;
        budget = DECODED_MEMORY_ALONE;
    }
    if (rc == 0)
        rc = open_files_new(fs->store, files_to_keep(), &fs->files, e);
    if (rc == 0)
        rc = decoded_new(dir, budget, &fs->decoded, e);
    if (rc == 0)
        rc = scanner_new(fs->store, fs->catalog, fs->pool, &fs->scanner, e);
    if (rc == 0)
        scanner_use(fs->scanner, fs->mapping);
    fs->env = (struct reader_env){.catalog = fs->catalog,
                                  .files = fs->files,
                                  .decoded = fs->decoded,
                                  .pool = fs->pool,
                                  .codec = format_codec};
    return rc;
}

static int open_all(struct fs *fs, struct err *e)
{
    int rc;

    open_cache_dir(fs);
    rc = open_blocks(fs, e);
    if (rc == 0)
        rc = open_store(fs, e);
    if (rc == 0 && fs->options.rw && fs->store->remote &&
        !bucket_is_url(fs->options.source)) {
        err_set(e, ENOTSUP, "%s: -o rw: nothing is saved to this kind of source",
                fs->store->url);
        return err_hint(e, "mount a local directory, s3:// or gs://");
    }
    if (rc == 0)
        rc = mapping_open(&fs->options.mapping, &fs->mapping, e);
    if (rc == 0 && fs->options.mapping.hf)
        rc = overlay_open(fs->options.mapping.hf, &fs->overlay, e);
    if (rc == 0)
        rc = open_index(fs, e);
    if (rc == 0)
        rc = open_reading(fs, e);
    if (rc == 0)
        rc = nodes_new(&fs->nodes, e);
    if (rc == 0)
        rc = slots_new(&fs->slots, e);
    if (rc == 0 && fs->options.rw)
        rc = stages_new(&fs->stages, e);
    if (rc == 0 && fs->options.materialize)
        rc = copies_new(fs, &fs->copies, e);
    return rc;
}

int fs_open(const struct mount_options *options, struct fs **out, struct err *e)
{
    struct fs *fs = calloc(1, sizeof *fs);
    int rc;

    if (!fs)
        return err_nomem(e);
    fs->options = *options;
    fs->begun_ns = (int64_t)time(NULL) * 1000000000;
    last_error_init(&fs->last_error);
    opened_init(&fs->opened);
    ways_init(&fs->ways);
    rc = pthread_key_create(&fs->buffers, read_buffer_free);
    if (rc) {
        last_error_destroy(&fs->last_error);
        free(fs);
        return err_set(e, rc, "thread key: %s", strerror(rc));
    }
    rc = open_all(fs, e);
    if (rc < 0)
        fs_close(fs);
    else
        *out = fs;
    return rc;
}

/* The threads end before what they use goes. */
void fs_close(struct fs *fs)
{
    if (!fs)
        return;
    watch_stop(fs->watch);
    lane_free(fs->lane);
    copies_stop(fs->copies);
    lane_free(fs->fills);
    watch_free(fs->watch);
    fs->watch = NULL; /* nobody is told any more */
    opened_end_all(fs);
    copies_free(fs->copies);
    fs->copies = NULL;
    ways_destroy(&fs->ways);
    stages_free(fs);
    nodes_free(fs);
    slots_free(fs->slots);
    store_stop(fs->store);
    block_cache_stop(fs->blocks);
    scanner_free(fs->scanner);
    pool_free(fs->pool); /* what it does ahead of time uses all of these */
    decoded_free(fs->decoded);
    open_files_free(fs->files);
    catalog_close(fs->catalog);
    mapping_free(fs->mapping);
    overlay_free(fs->overlay);
    store_close(fs->store);
    block_cache_free(fs->blocks);
    free(fs->cache_dir);
    pthread_key_delete(fs->buffers);
    last_error_destroy(&fs->last_error);
    free(fs);
}

void fs_closep(struct fs **fs)
{
    fs_close(*fs);
}
