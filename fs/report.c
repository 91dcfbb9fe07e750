/* SPDX-License-Identifier: MIT */
/* fs/report.c - the generated files in .unshard. */
#include "fs/report.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "base/fsutil.h"
#include "base/log.h"
#include "remote/block_cache.h"

/* An unnamed file in the cache directory, or in memory where there is none. */
static int report_file(const struct fs *fs, struct err *e)
{
    int fd = -1;

    if (fs->cache_dir)
        fd = unnamed_file(fs->cache_dir);
    if (fd < 0)
        fd = memfd_create("unshard-report", MFD_CLOEXEC);
    return fd < 0 ? err_set(e, errno, "temporary file: %s", strerror(errno)) : fd;
}

static int index_of(enum inside kind)
{
    if (kind == INSIDE_INDEX)
        return REPORT_INDEX;
    return kind == INSIDE_OBJECTS_JSON ? REPORT_OBJECTS : REPORT_CHECKPOINT;
}

static int write_report(struct fs *fs, const struct generation *gen, enum inside kind,
                        int fd, struct err *e)
{
    if (kind == INSIDE_INDEX)
        return report_index(fs->catalog, gen->info.id, fs->options.prefix, fd, e);
    return kind == INSIDE_OBJECTS_JSON
               ? report_objects(fs->catalog, gen->info.id, fd, e)
               : report_checkpoint(fs->catalog, gen->info.id, fd, e);
}

static int make(struct fs *fs, const struct generation *gen, enum inside kind,
                struct source **out, struct err *e)
{
    static const char *const names[] = {[REPORT_CHECKPOINT] = "checkpoint.json",
                                        [REPORT_OBJECTS] = "objects.json",
                                        [REPORT_INDEX] =
                                            "model.safetensors.index.json"};
    CLEANUP_FD int fd = report_file(fs, e);
    const char *name = names[index_of(kind)];

    if (fd < 0)
        return fd;
    if (write_report(fs, gen, kind, fd, e) < 0)
        return err_wrap(e, "%s", name);
    return source_from_fd(steal_fd(&fd), name, out, e);
}

static struct source *report_find(struct generation *gen, enum inside kind)
{
    struct source *src;

    pthread_mutex_lock(&gen->lock);
    src = gen->report[index_of(kind)];
    src = src ? source_get(src) : NULL;
    pthread_mutex_unlock(&gen->lock);
    return src;
}

bool report_made(struct generation *gen, enum inside kind)
{
    CLEANUP(source_putp) struct source *src = NULL;

    if (!inside_is_report(kind))
        return true;
    src = report_find(gen, kind);
    return src != NULL;
}

int report_get(struct fs *fs, struct generation *gen, enum inside kind,
               struct source **out, struct err *e)
{
    struct source *mine = NULL, **kept = &gen->report[index_of(kind)];

    *out = report_find(gen, kind);
    if (*out)
        return 0;
    TRY(make(fs, gen, kind, &mine, e));
    pthread_mutex_lock(&gen->lock);
    if (!*kept)
        *kept = source_get(mine);
    *out = source_get(*kept); /* who was first, so that all see one file */
    pthread_mutex_unlock(&gen->lock);
    source_put(mine);
    return 0;
}

int report_text(struct fs *fs, enum inside kind, struct buf *out)
{
    struct block_cache_counts blocks;
    struct counters_remote remote = {.blocks = &blocks};

    if (kind != INSIDE_COUNTERS_JSON)
        return last_error_text(&fs->last_error, out);
    if (!fs->reading.blocks)
        return counters_json(&fs->counters, NULL, out);
    blocks = block_cache_counts(fs->reading.blocks);
    remote.retries = store_retries(fs->store);
    return counters_json(&fs->counters, &remote, out);
}

int report_size(struct fs *fs, struct generation *gen, enum inside kind, uint64_t *size,
                struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(buf_release) struct buf text = {0};
    int rc;

    if (inside_is_of_mount(kind)) {
        rc = report_text(fs, kind, &text);
        *size = text.len;
        return rc < 0 ? err_nomem(e) : 0;
    }
    rc = report_get(fs, gen, kind, &src, e);
    *size = rc == 0 ? src->size : 0;
    return rc;
}
