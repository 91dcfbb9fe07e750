/* SPDX-License-Identifier: MIT */
/* lib/library.c - the shared library alone: it prints nothing, whatever happens. */
#include "base/log.h"

__attribute__((constructor)) static void be_quiet(void)
{
    log_to(-1);
}
