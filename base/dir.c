/* SPDX-License-Identifier: MIT */
/* base/dir.c - the names of a directory, and whether those were all. */
#include "base/dir.h"

#include <errno.h>
#include <string.h>

int dir_next(DIR *dir, const char **name)
{
    const struct dirent *d;

    do {
        errno = 0;
        d = readdir(dir); /* NOLINT(concurrency-mt-unsafe): the caller's own stream */
        if (!d)
            return -errno;
    } while (!strcmp(d->d_name, ".") || !strcmp(d->d_name, ".."));
    *name = d->d_name;
    return 1;
}
