/* SPDX-License-Identifier: MIT */
/* fs/save_shards.c - shards of torch's own save and the metadata that tell of them. */
#include "fs/save_shards.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fsutil.h"
#include "base/keyset.h"
#include "fs/save_priv.h"
#include "fs/save_whole.h"
#include "fs/slot.h"
#include "index/formats/dcp/dcp_metadata.h"
#include "remote/source.h"
#include "save/staging.h"

static const char metadata_name[] = ".metadata", shard_end[] = ".distcp";

enum { HEAD = 4096 };

struct check {
    const struct publication *p;
    struct keyset came; /* paths of files */
    int dir;            /* the directory as it is in the source, or -1 */
};

static bool has_come(const struct check *c, const char *path)
{
    return keyset_has(&c->came, path, strlen(path));
}

static bool is_there(const struct check *c, const char *path)
{
    return c->dir >= 0 && faccessat(c->dir, path, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Bytes of the path up to the name. */
static int dir_of(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? (int)(slash + 1 - path) : 0;
}

static bool is_metadata(const char *path)
{
    return strcmp(path + dir_of(path), metadata_name) == 0;
}

/* One that lies over a checkpoint; those of a new one may come before their metadata. */
static bool is_shard(const struct publication *p, const char *path)
{
    const char *end = strrchr(path, '.');

    return p->stage->slot && end && strcmp(end, shard_end) == 0;
}

/* ---- shards without their metadata ---- */

/*
 * torch's own save over a checkpoint that is there writes the shards first, and the metadata
 * when all ranks have written: until then what is there tells where in the old shards which
 * bytes lie.
 */
static int check_shard(const struct check *c, const char *path, struct err *e)
{
    char metadata[PATH_MAX];

    if (snprintf(metadata, sizeof metadata, "%.*s%s", dir_of(path), path,
                 metadata_name) >= PATH_MAX ||
        has_come(c, metadata))
        return 0;
    if (!is_there(c, metadata) || !is_there(c, path)) /* one that lacked */
        return 0;
    err_set(e, EINVAL, "%s: %s of the same save is not there yet", path, metadata);
    return err_hint(e, "other bytes for single tensors: write tensors/KEY.npy");
}

/* ---- metadata without a shard ---- */

/* 1: the file in the source has the same bytes; 0: not. */
static int is_as_before(const struct check *c, const char *path, int now, struct err *e)
{
    const int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    CLEANUP_FD int old = c->dir < 0 ? -1 : openat(c->dir, path, flags);

    return old < 0 ? 0 : same_bytes(now, old, path, e);
}

/* Is this shard of the save that the metadata are of? Those of a new one all come. */
static int check_named(const struct check *c, const char *metadata, const char *name,
                       size_t len, bool others_may, struct err *e)
{
    char path[PATH_MAX];

    if (snprintf(path, sizeof path, "%.*s%.*s", dir_of(metadata), metadata, (int)len,
                 name) >= PATH_MAX ||
        has_come(c, path) || (others_may && is_there(c, path)))
        return 0;
    err_set(e, EINVAL, "%s: %s of the same save is not there yet", metadata, path);
    return err_hint(e, "copy that file too, or leave out %s", metadata);
}

/* others_may: shards that are there already count as well. */
static int check_all_named(const struct check *c, const char *path,
                           const struct dcp_names *names, bool others_may,
                           struct err *e)
{
    int ret = 0;

    for (uint32_t i = 0; ret == 0 && i < names->paths.count; i++) {
        size_t len;
        const char *name = intern_get(&names->paths, i, &len);

        ret = check_named(c, path, name, len, others_may, e);
    }
    return ret;
}

/* 0: what it names is in `names`; 1: it is none that can be read. */
static int read_names(struct source *src, struct dcp_names *names, struct err *e)
{
    CLEANUP(dcp_metadata_freep) struct dcp_metadata *m = NULL;
    size_t n = (size_t)MIN((uint64_t)HEAD, src->size);
    char head[HEAD], global[64];
    struct err damaged = {0};
    int ret = source_read(src, 0, n, head, e);

    if (ret < 0)
        return ret;
    if (!dcp_metadata_sniff(head, n, global, sizeof global))
        return 1;
    ret = dcp_metadata_load(src, names, &m, &damaged);
    if (ret == -ENOMEM)
        *e = damaged;
    else if (ret < 0)
        ret = 1; /* it is kept as it is, and a mount will tell what is wrong with it */
    return ret;
}

static int check_metadata(const struct check *c, const struct merge_file *f,
                          struct err *e)
{
    int fd = openat(staging_spool(c->p->stage->staging), f->spool,
                    O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    CLEANUP(source_putp) struct source *src = NULL;
    struct dcp_names names = {0};
    int others_may = save_waits(c->p->stage), ret;

    if (fd < 0)
        return err_set(e, errno, "%s: %s", f->path, strerror(errno));
    if (source_from_fd(fd, f->path, &src, e) < 0)
        return -e->code;
    if (!others_may)
        others_may = is_as_before(c, f->path, fd, e);
    ret = others_may < 0 ? others_may : read_names(src, &names, e);
    if (ret == 0)
        ret = check_all_named(c, f->path, &names, others_may, e);
    dcp_names_release(&names);
    return MIN(ret, 0);
}

static int check_files(const struct check *c, struct err *e)
{
    const struct save_files *files = &c->p->files;
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < files->count; i++) {
        const struct merge_file *f = &files->file[i];

        if (is_shard(c->p, f->path))
            ret = check_shard(c, f->path, e);
        else if (is_metadata(f->path))
            ret = check_metadata(c, f, e);
    }
    return ret;
}

/* Most publications have neither. */
static bool is_concerned(const struct publication *p)
{
    size_t i = 0;

    while (i < p->files.count && !is_metadata(p->files.file[i].path) &&
           !is_shard(p, p->files.file[i].path))
        i++;
    return i < p->files.count;
}

static int begin(struct check *c, struct err *e)
{
    const struct publication *p = c->p;
    struct err none = {0};

    for (size_t i = 0; i < p->files.count; i++)
        if (keyset_add(&c->came, p->files.file[i].path, strlen(p->files.file[i].path)) <
            0)
            return err_nomem(e);
    if (p->fs->store->remote)
        return 0;
    c->dir = stage_directory(p->fs, p->stage->path, p->stage->slot ? e : &none);
    return c->dir < 0 && p->stage->slot ? c->dir : 0;
}

int save_shards_check(const struct publication *p, struct err *e)
{
    struct check c = {.p = p, .dir = -1};
    int ret;

    if (!is_concerned(p))
        return 0;
    ret = begin(&c, e);
    if (ret == 0)
        ret = check_files(&c, e);
    if (c.dir >= 0)
        close(c.dir);
    keyset_release(&c.came);
    return ret;
}
