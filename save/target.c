/* SPDX-License-Identifier: MIT */
/* save/target.c - a save to a local directory; and which kind of target a name is. */
#include "save/target.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fsutil.h"
#include "remote/source.h"
#include "remote/store.h"

enum { COPY_BLOCK = 1 << 20 };

struct local_target {
    struct save_target base;
    struct staging *staging;
};

static struct local_target *local_of(struct save_target *t)
{
    return container_of(t, struct local_target, base);
}

static int local_write(struct save_target *t, const struct save_run *run, struct err *e)
{
    struct save_run r = *run;

    r.staging = local_of(t)->staging;
    r.dir = staging_dir(r.staging);
    return save_write(&r, e);
}

static int copy_bytes(struct source *src, int fd, struct err *e)
{
    CLEANUP_FREE char *block = malloc(COPY_BLOCK);
    uint64_t at = 0;
    int ret = block ? 0 : err_nomem(e);

    while (ret == 0 && at < src->size) {
        size_t part = (size_t)MIN(src->size - at, (uint64_t)COPY_BLOCK);

        ret = source_read(src, at, part, block, e);
        if (ret == 0)
            ret = write_all(fd, block, part, e);
        at += part;
    }
    return ret;
}

static int local_side(struct save_target *t, const char *name, struct source *src,
                      struct err *e)
{
    int dir = staging_dir(local_of(t)->staging), ret;
    int fd =
        openat(dir, name, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);

    if (fd < 0)
        return err_set(e, errno, "%s: %s", name, strerror(errno));
    ret = copy_bytes(src, fd, e);
    if (ret == 0 && fsync(fd) < 0)
        ret = err_set(e, errno, "%s: %s", name, strerror(errno));
    close(fd);
    if (ret < 0)
        unlinkat(dir, name, 0);
    return ret;
}

static int local_publish(struct save_target *t, struct err *e)
{
    return staging_publish(local_of(t)->staging, e);
}

static void local_abandon(struct save_target *t)
{
    struct err ignored = {0};

    staging_discard(local_of(t)->staging, &ignored);
}

static void local_close(struct save_target *t)
{
    struct local_target *l = local_of(t);

    staging_close(l->staging);
    free(l);
}

static const struct save_target_ops local_ops = {
    .name = "local",
    .write = local_write,
    .side = local_side,
    .publish = local_publish,
    .abandon = local_abandon,
    .close = local_close,
};

int save_local_open(const struct staging_claim *claim, struct save_target **out,
                    struct err *e)
{
    struct local_target *l = calloc(1, sizeof *l);
    int ret;

    if (!l)
        return err_nomem(e);
    l->base.ops = &local_ops;
    ret = staging_open(claim, &l->staging, e);
    if (ret < 0)
        free(l);
    else
        *out = &l->base;
    return ret;
}

int save_target_open(const struct staging_claim *claim, struct save_target **out,
                     struct err *e)
{
    return store_is_url(claim->target) ? save_upload_open(claim, out, e)
                                       : save_local_open(claim, out, e);
}

void save_target_close(struct save_target *t)
{
    if (t)
        t->ops->close(t);
}
