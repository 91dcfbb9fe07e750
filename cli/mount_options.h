/* SPDX-License-Identifier: MIT */
/* cli/mount_options.h - the -o list of a mount. */
#ifndef UFS_CLI_MOUNT_OPTIONS_H
#define UFS_CLI_MOUNT_OPTIONS_H

#include "fs/mount.h"

struct err;

/*
 * Takes a comma list apart, in place; values stay in it. Options of capabilities that are
 * not built yet are refused by name, unknown ones with the nearest name. -EINVAL.
 */
int mount_options_parse(char *text, struct mount_options *out, struct err *e);

/* The i-th option of ours, with '=' when it takes a value; NULL behind the last. */
const char *mount_option_name(size_t i);

#endif
