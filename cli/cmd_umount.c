/* SPDX-License-Identifier: MIT */
/* cli/cmd_umount.c - ends a mount of ours. */
#include "cli/cli.h"
#include "fs/mount.h"

static int run(struct cli *c)
{
    return fs_umount(c->arg[0], &c->err);
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
