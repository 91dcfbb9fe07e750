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
#include "base/keyset.h"
#include "fs/save_priv.h"
#include "fs/save_whole.h"
#include "fs/slot.h"
#include "index/formats/dcp/dcp_metadata.h"
#include "remote/source.h"
#include "save/staging.h"

static const char metadata_name[] = ".metadata", shard_end[] = ".distcp";

enum { HEAD = 4096, COMPARED = 64 << 10 };

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

static bool ends_in(const char *path, const char *end)
{
    size_t len = strlen(path), n = strlen(end);

    return len >= n && strcmp(path + len - n, end) == 0;
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

/* Has the file in the source the same bytes? */
static int is_as_before(const struct check *c, const char *path, struct source *now,
                        bool *same, struct err *e)
{
    int fd = c->dir < 0
                 ? -1
                 : openat(c->dir, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    CLEANUP(source_putp) struct source *old = NULL;
    CLEANUP_FREE char *a = NULL, *b = NULL;
    int ret = 0;

    *same = false;
    if (fd < 0)
        return 0;
    if (source_from_fd(fd, path, &old, e) < 0)
        return -e->code;
    *same = old->size == now->size;
    a = malloc(COMPARED);
    b = malloc(COMPARED);
    if (!a || !b)
        return err_nomem(e);
    for (uint64_t at = 0; ret == 0 && *same && at < now->size; at += COMPARED) {
        size_t n = (size_t)MIN((uint64_t)COMPARED, now->size - at);

        ret = source_read(now, at, n, a, e);
        if (ret == 0)
            ret = source_read(old, at, n, b, e);
        *same = ret == 0 && memcmp(a, b, n) == 0;
    }
    return ret;
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

static int check_all_named(const struct check *c, const char *path, struct source *src,
                           struct err *e)
{
    CLEANUP(dcp_metadata_freep) struct dcp_metadata *m = NULL;
    struct dcp_names names = {0};
    struct err damaged = {0};
    bool others_may = save_waits(c->p->stage);
    int ret = dcp_metadata_load(src, &names, &m, &damaged);

    if (ret == -ENOMEM) {
        *e = damaged;
    } else if (ret < 0) {
        ret = 0; /* it is kept as it is, and a mount will tell what is wrong with it */
    } else {
        if (!others_may)
            ret = is_as_before(c, path, src, &others_may, e);
        for (uint32_t i = 0; ret == 0 && i < names.paths.count; i++) {
            size_t len;
            const char *name = intern_get(&names.paths, i, &len);

            ret = check_named(c, path, name, len, others_may, e);
        }
    }
    dcp_names_release(&names);
    return ret;
}

static int check_metadata(const struct check *c, const struct merge_file *f,
                          struct err *e)
{
    int fd = openat(staging_spool(c->p->stage->staging), f->spool,
                    O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    CLEANUP(source_putp) struct source *src = NULL;
    char head[HEAD], global[64];
    size_t n;

    if (fd < 0)
        return err_set(e, errno, "%s: %s", f->path, strerror(errno));
    if (source_from_fd(fd, f->path, &src, e) < 0)
        return -e->code;
    n = (size_t)MIN((uint64_t)sizeof head, src->size);
    if (source_read(src, 0, n, head, e) < 0)
        return -e->code;
    if (!dcp_metadata_sniff(head, n, global, sizeof global))
        return 0; /* some other file of this name */
    return check_all_named(c, f->path, src, e);
}

static int check_files(const struct check *c, struct err *e)
{
    const struct save_files *files = &c->p->files;
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < files->count; i++) {
        const struct merge_file *f = &files->file[i];

        if (c->p->stage->slot && ends_in(f->path, shard_end))
            ret = check_shard(c, f->path, e);
        else if (strcmp(f->path + dir_of(f->path), metadata_name) == 0)
            ret = check_metadata(c, f, e);
    }
    return ret;
}

int save_shards_check(const struct publication *p, struct err *e)
{
    struct check c = {.p = p, .dir = -1};
    struct err none = {0};
    int ret = 0;

    for (size_t i = 0; ret >= 0 && i < p->files.count; i++)
        ret = keyset_add(&c.came, p->files.file[i].path, strlen(p->files.file[i].path));
    ret = ret < 0 ? err_nomem(e) : 0;
    if (ret == 0 && !p->fs->store->remote)
        c.dir = stage_directory(p->fs, p->stage->path, p->stage->slot ? e : &none);
    if (ret == 0 && c.dir < 0 && p->stage->slot && !p->fs->store->remote)
        ret = c.dir;
    if (ret == 0)
        ret = check_files(&c, e);
    if (c.dir >= 0)
        close(c.dir);
    keyset_release(&c.came);
    return ret;
}
