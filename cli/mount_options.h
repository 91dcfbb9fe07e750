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

/* Is it one that is not built yet? Then the error says so. */
bool mount_option_later(const char *option, struct err *e);

/* The refusal of an option, `dashes` in front of it, that is for `what`. -EINVAL. */
int option_not_built(const char *dashes, const char *option, const char *what,
                     struct err *e);

/* The i-th option of ours, with '=' when it takes a value; NULL behind the last. */
const char *mount_option_name(size_t i);

#endif
