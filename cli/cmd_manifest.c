/* SPDX-License-Identifier: MIT */
/* cli/cmd_manifest.c - `unshard manifest`: what a web server without listings needs. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fsutil.h"
#include "cli/cli.h"
#include "remote/manifest.h"
#include "remote/store.h"

#define MANIFEST_NEW "." MANIFEST_NAME ".new"

/* Beside it and renamed over it: who reads it now has the old or the new one. */
static int put_in_place(int dir, const struct buf *text, struct err *e)
{
    CLEANUP_FD int fd = openat(
        dir, MANIFEST_NEW, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    int rc;

    if (fd < 0)
        return err_set(e, errno, "%s: %s", MANIFEST_NEW, strerror(errno));
    rc = write_all(fd, text->data, text->len, e);
    if (rc == 0 &&
        (fsync(fd) < 0 || renameat(dir, MANIFEST_NEW, dir, MANIFEST_NAME) < 0 ||
         fsync(dir) < 0))
        rc = err_set(e, errno, "%s: %s", MANIFEST_NAME, strerror(errno));
    if (rc < 0)
        unlinkat(dir, MANIFEST_NEW, 0);
    return rc;
}

static int run(struct cli *c)
{
    const struct store_options options = {.follow_symlinks = c->opt.follow_symlinks};
    CLEANUP(store_closep) struct store *store = NULL;
    CLEANUP(buf_release) struct buf text = {.max = MANIFEST_BYTES_MAX};
    CLEANUP_FD int dir = open(c->arg[0], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uint64_t files = 0, others = 0;
    struct progress progress = {0};
    int rc;

    if (store_is_url(c->arg[0])) {
        err_set(&c->err, EINVAL, "%s: a manifest is written into a local directory",
                c->arg[0]);
        return cli_usage(c);
    }
    if (dir < 0)
        return err_set(&c->err, errno, "%s: %s", c->arg[0], strerror(errno));
    rc = store_open_local(c->arg[0], &options, &store, &c->err);
    if (rc == 0) {
        progress_begin(&progress, c, "list", c->arg[0], 0);
        rc = manifest_make(store, &text, &files, &others, &c->err);
        progress_end(&progress);
    }
    if (rc == 0)
        rc = put_in_place(dir, &text, &c->err);
    if (rc < 0)
        return err_wrap(&c->err, "%s", c->arg[0]);
    if (!c->opt.quiet && others)
        fprintf(stderr, "unshard: %" PRIu64 " entries are no regular files: left out\n",
                others);
    if (!c->opt.quiet)
        printf("%s/%s: %" PRIu64 " files\n", c->arg[0], MANIFEST_NAME, files);
    return STATUS_DONE;
}

const struct cli_command cmd_manifest = {
    .name = "manifest",
    .usage = "manifest DIR",
    .summary = "lists a directory's files for a web server that does not",
    .min_args = 1,
    .max_args = 1,
    .takes = "",
    .run = run,
};
