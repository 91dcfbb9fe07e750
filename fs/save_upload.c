/* SPDX-License-Identifier: MIT */
/* fs/save_upload.c - what was written into a mounted bucket, by way of save/upload.c. */
#include "fs/save_upload.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/buf.h"
#include "base/fsutil.h"
#include "fs/save_files.h"
#include "remote/source.h"
#include "remote/store.h"
#include "save/incoming.h"
#include "save/merge.h"
#include "save/staging.h"
#include "save/target.h"
#include "save/write.h"

int save_upload_refuse(const struct fs *fs, const char *path, struct err *e)
{
    err_set(
        e, EROFS,
        "%s%s%s: an object store cannot put one checkpoint or directory in the place "
        "of another in one step",
        fs->store->url, path[0] ? "/" : "", path);
    return err_hint(e, "save to a new directory: mkdir DIR");
}

/* A directory for each directory of each store: names in it are those of checkpoints. */
int save_upload_spools(const struct fs *fs, const char *path, struct err *e)
{
    CLEANUP(buf_release) struct buf dir = {0}, text = {0};
    const char *slash = strrchr(path, '/');
    int fd;

    if (!path[0])
        return save_upload_refuse(fs, path, e);
    if (cache_dir(fs->options.cache_dir, &dir, e) < 0)
        return -e->code;
    buf_adds(&text, fs->store->identity);
    buf_addf(&text, " %.*s", slash ? (int)(slash - path) : 0, path);
    if (buf_failed(&text))
        return err_nomem(e);
    buf_addf(&dir, "/spool/%016" PRIx64, XXH3_64bits(text.data, text.len));
    if (buf_failed(&dir))
        return err_nomem(e);
    if (make_dirs(dir.data, 0700, e) < 0)
        return -e->code;
    fd = open(dir.data, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? err_set(e, errno, "%s: %s", dir.data, strerror(errno)) : fd;
}

/* Nobody goes on with it: what is saved is this process's, and this try's. */
static int name_try(struct buf *out, struct err *e)
{
    uint64_t one;

    if (getrandom(&one, sizeof one, 0) != sizeof one)
        return err_set(e, EIO, "no random number");
    if (staging_writer(out, e) < 0)
        return -e->code;
    buf_addf(out, " try %016" PRIx64, one);
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int open_target(const struct fs *fs, const struct stage *s,
                       struct save_target **out, struct err *e)
{
    CLEANUP(buf_release) struct buf url = {0}, what = {0};
    size_t len = strlen(fs->options.source);
    struct staging_claim claim = {.part = 1, .parts = 1, .mount = true};

    while (len > 0 && fs->options.source[len - 1] == '/')
        len--;
    buf_addf(&url, "%.*s/%s", (int)len, fs->options.source, s->path);
    if (buf_failed(&url))
        return err_nomem(e);
    if (name_try(&what, e) < 0)
        return -e->code;
    claim.target = url.data;
    claim.what = what.data;
    return save_target_open(&claim, out, e);
}

static bool is_written(const struct layout *l, const char *path)
{
    struct layout_file_info f;

    for (size_t i = 0; i < layout_files(l); i++) {
        layout_file_info(l, i, &f);
        if (strcmp(f.path, path) == 0)
            return true;
    }
    return false;
}

/* A file that the format's writer makes goes first, as on a disk. */
static int send_sides(const struct stage *s, const struct save_files *f,
                      const struct merge *m, const struct layout *l,
                      struct save_target *t, struct err *e)
{
    int spool = staging_spool(s->staging), ret = 0;

    for (size_t i = 0; ret == 0 && i < f->count; i++) {
        const struct merge_file *file = &f->file[i];
        CLEANUP(source_putp) struct source *src = NULL;
        int fd;

        if (!save_files_is_placed(s, f, m, i) || is_written(l, file->path))
            continue;
        fd = openat(spool, file->spool, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0)
            return err_set(e, errno, "%s: %s", file->path, strerror(errno));
        ret = source_from_fd(fd, file->path, &src, e);
        if (ret == 0)
            ret = t->ops->side(t, file->path, src, e);
    }
    return ret;
}

int save_upload(struct fs *fs, const struct stage *s, const struct save_files *f,
                struct merge *m, const struct layout *l, struct err *e)
{
    const struct save_run run = {.layout = l,
                                 .input = merge_input(m),
                                 .source = merge_source(m),
                                 .pool = fs->reading.pool,
                                 .part = 1,
                                 .parts = 1,
                                 .first_stage = true,
                                 .other_stages = true};
    struct save_target *t = NULL;
    int ret = open_target(fs, s, &t, e);

    if (ret < 0)
        return ret;
    ret = t->ops->write(t, &run, e);
    if (ret == 0)
        ret = send_sides(s, f, m, l, t, e);
    if (ret == 0)
        ret = save_files_check_read(fs, s, f, e);
    if (ret == 0)
        ret = t->ops->publish(t, e);
    if (ret < 0)
        t->ops->abandon(t);
    save_target_close(t);
    return ret;
}
