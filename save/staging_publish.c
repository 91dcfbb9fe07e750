/* SPDX-License-Identifier: MIT */
/* save/staging_publish.c - one rename, and what is done when the disk will not say it has it. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "save/publish.h"
#include "save/staging_priv.h"

/*
 * Nothing may be deleted while the disk can have what we deleted under the target's name:
 * a rename whose directory could not be made durable is durable, or is not.
 */
static int make_sure(struct staging *s, struct err *e)
{
    if (s->unsure_fd < 0)
        return 0;
    if (fsync(s->unsure_fd) < 0)
        return staged_fail(e, "fsync the directory of", s->target);
    close(s->unsure_fd);
    s->unsure_fd = -1;
    return 0;
}

int staging_discard(struct staging *s, struct err *e)
{
    int ret = make_sure(s, e);

    return ret < 0 ? ret : staged_remove_dir(s->parent_fd, s->path, e);
}

int staging_publish(struct staging *s, struct err *e)
{
    const struct publish_place at = {
        .dir = s->parent_fd, .name = s->name, .path = s->target};
    int ret = publish_new(&at, e);

    if (ret < 0 && s->unsure_fd < 0) /* what it took back may be there after a crash */
        s->unsure_fd = fcntl(s->parent_fd, F_DUPFD_CLOEXEC, 0);
    return ret;
}
