/* SPDX-License-Identifier: MIT */
/* base/dir.h - the names of a directory, and whether those were all. */
#ifndef UFS_BASE_DIR_H
#define UFS_BASE_DIR_H

#include <dirent.h>

#include "base/base.h"

/*
 * The next name of a directory that is neither "." nor "..", valid until the next call: 1;
 * 0 at the end; or -errno: what was not listed is not known then, and may be anything.
 */
MUST_USE int dir_next(DIR *dir, const char **name);

#endif
