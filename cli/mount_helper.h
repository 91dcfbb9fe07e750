/* SPDX-License-Identifier: MIT */
/* cli/mount_helper.h - mount.unshardfs, as mount(8) calls it for fstab. */
#ifndef UFS_CLI_MOUNT_HELPER_H
#define UFS_CLI_MOUNT_HELPER_H

#include "cli/cli.h"

/* mount.unshardfs SOURCE MNT [-sfnv] [-o options]; mount(8)'s exit codes. */
int mount_helper(struct cli *c, int argc, char **argv);

/* `unshard mount`: `text` is the -o list (NULL: none), cut in place. */
int mount_source(struct cli *c, const char *source, const char *mountpoint, char *text);

#endif
