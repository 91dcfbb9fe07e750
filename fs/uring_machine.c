/* SPDX-License-Identifier: MIT */
/* fs/uring_machine.c - has this machine what requests by io_uring take? */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "fs/uring_priv.h"

const char uring_off_kernel[] = "off: the kernel does not offer it (6.14 and later do)";
const char uring_off_memory[] = "off: no memory for its rings (RLIMIT_MEMLOCK)";
static const char off_parameter[] =
    "off: the kernel was not told to offer it (root: echo Y > "
    "/sys/module/fuse/parameters/enable_uring, then mount again)";
static const char off_refused[] =
    "off: io_uring is refused to this process (kernel.io_uring_disabled, seccomp)";

static const char *parameter_lacks(void)
{
    FILE *f = fopen("/sys/module/fuse/parameters/enable_uring", "re");
    int c;

    if (!f)
        return uring_off_kernel;
    c = fgetc(f);
    fclose(f);
    return c == 'Y' || c == '1' ? NULL : off_parameter;
}

const char *uring_lacks(void)
{
    const char *why = parameter_lacks();
    int rc = why ? 0 : ring_try();

    if (why || rc == 0)
        return why;
    return rc == ENOMEM                   ? uring_off_memory
           : rc == EINVAL || rc == ENOSYS ? uring_off_kernel
                                          : off_refused;
}

const char *fs_io_uring_lacks(void)
{
    const char *why = uring_lacks();

    return why ? why + strlen("off: ") : NULL;
}

/* As the kernel counts them: "0-3", "0,2-5". 0: not to be found out. */
unsigned uring_processors(void)
{
    FILE *f = fopen("/sys/devices/system/cpu/possible", "re");
    unsigned first, last, count = 0;
    int n, c = ',';

    while (f && c == ',' && (n = fscanf(f, "%6u-%6u", &first, &last)) >= 1) {
        last = n == 2 ? last : first;
        if (last < first || last >= PROCESSORS_MAX) {
            count = 0;
            break;
        }
        count += last - first + 1;
        c = fgetc(f);
    }
    if (f)
        fclose(f);
    return count;
}
