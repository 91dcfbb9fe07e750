/* SPDX-License-Identifier: MIT */
/* cli/cmd_umount.c - ends a mount of ours. */
#include "cli/cli.h"
#include "fs/mount.h"

/* How far the mount's server is with what was written. */
static void look(void *user, struct progress *p)
{
    const char *mountpoint = user;
    uint64_t done, total;

    if (!fs_publishing(mountpoint, &done, &total))
        return;
    p->total = total;
    atomic_store(&p->done, done);
}

static int run(struct cli *c)
{
    struct progress progress = {.look = look, .look_user = c->arg[0]};
    struct err why = {0};
    int ret, kept;

    progress_begin(&progress, c, "save to", c->arg[0], 0);
    kept = fs_publish(c->arg[0], &c->err);
    progress_end(&progress); /* who still looks would keep the mount busy */
    if (kept == 0)
        return fs_umount(c->arg[0], &c->err);
    /* What is incomplete stays staged: the mount goes, and the answer is no. */
    ret = fs_umount(c->arg[0], &why);
    if (ret < 0) {
        c->err = why;
        return ret;
    }
    cli_fail(c, kept);
    return 1;
}

const struct cli_command cmd_umount = {
    .name = "umount",
    .usage = "umount MNT",
    .summary = "ends the mount",
    .min_args = 1,
    .max_args = 1,
    .takes = "",
    .run = run,
};
