/* SPDX-License-Identifier: MIT */
/* fs/fs.c - the root object of a mount: what it opens, in which order. */
#include "fs/fs.h"

#include <errno.h>
#include <string.h>
#include <sys/resource.h>

#include "base/log.h"
#include "base/pool.h"
#include "fs/bucket.h"
#include "fs/materialized.h"
#include "fs/disk.h"
#include "fs/edit.h"
#include "fs/queue.h"
#include "fs/node.h"
#include "fs/overlay.h"
#include "fs/permit.h"
#include "fs/read.h"
#include "fs/generation.h"
#include "fs/watch.h"
#include "remote/bucket.h"

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
    const struct mount_options *m = &fs->options;
    const struct reading_options o = {.cache_dir = m->cache_dir,
                                      .cache_optional = true,
                                      .index_memory = m->memory_index,
                                      .no_cache = m->no_cache,
                                      .cache_size = m->cache_size,
                                      .follow_symlinks = m->follow_symlinks,
                                      .refresh = m->refresh,
                                      .jobs = m->jobs,
                                      .keep_open = files_to_keep(),
                                      .mapping = m->mapping};
    struct reading *r = &fs->reading;
    char line[1400];
    int rc = reading_open(m->source, &o, r, e);

    if (r->why_memory.code)
        log_msg(LOG_FS, LOG_WARN, "the index is kept in memory: %s",
                err_line(&r->why_memory, line, sizeof line));
    fs->store = r->store;
    fs->catalog = r->catalog;
    fs->scanner = r->scanner;
    fs->cache_dir = r->cache_dir;
    return rc;
}

static int check_writable(const struct fs *fs, struct err *e)
{
    if (!fs->options.rw)
        return 0;
    if (fs->store->remote && !bucket_is_url(fs->options.source)) {
        err_set(e, ENOTSUP, "%s: -o rw: nothing can be written there", fs->store->url);
        return err_hint(e, "mount a local directory, s3:// or gs://");
    }
    if (fs->store->remote && fs->options.save) {
        err_set(e, ENOTSUP, "%s: -o save=: nothing is resharded into an object store",
                fs->store->url);
        return err_hint(e, "mount it without save=, or use unshard convert");
    }
    if (!fs->store->file)
        return 0;
    err_set(e, EINVAL, "%s: -o rw: the source is a file", fs->options.source);
    return err_hint(e, "mount its directory");
}

static int open_all(struct fs *fs, struct err *e)
{
    int rc = open_reading(fs, e);

    if (rc == 0)
        rc = check_writable(fs, e);
    if (rc == 0)
        early_room_init(&fs->early, pool_threads(fs->reading.pool));
    if (rc == 0 && fs->options.mapping.hf)
        rc = overlay_open(fs->options.mapping.hf, &fs->overlay, e);
    if (rc == 0)
        rc = nodes_new(&fs->nodes, e);
    if (rc == 0)
        rc = generations_new(&fs->generations, e);
    if (rc == 0)
        rc = permits_new(&fs->permits, e);
    if (rc == 0 && fs->options.rw && fs->store->remote)
        rc = bucket_mount_new(fs, &fs->bucket, e);
    if (rc == 0 && fs->options.rw && !fs->store->remote)
        rc = disk_new(fs, &fs->disk, e);
    if (rc == 0 && fs->disk)
        rc = edits_new(fs, &fs->edits, e);
    if (rc == 0 && fs->options.materialize)
        rc = materialized_new(fs, &fs->materialized, e);
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
    queue_free(fs->queue);
    materialized_stop(fs->materialized);
    queue_free(fs->fills);
    watch_free(fs->watch);
    fs->watch = NULL; /* nobody is told any more */
    opened_end_all(fs);
    materialized_free(fs->materialized);
    fs->materialized = NULL;
    ways_destroy(&fs->ways);
    edits_free(fs);
    disk_free(fs);
    bucket_mount_free(fs);
    nodes_free(fs);
    generations_free(fs->generations);
    permits_free(fs->permits);
    reading_close(&fs->reading);
    early_room_release(&fs->early);
    overlay_free(fs->overlay);
    pthread_key_delete(fs->buffers);
    last_error_destroy(&fs->last_error);
    free(fs);
}

void fs_closep(struct fs **fs)
{
    fs_close(*fs);
}
