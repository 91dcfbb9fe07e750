/* SPDX-License-Identifier: MIT */
/* base/env.c - numbers from the environment. */
#include "base/env.h"

#include <stdint.h>
#include <stdlib.h>

unsigned env_seconds(const char *variable, unsigned otherwise)
{
    const char *text = getenv(variable);
    unsigned long v;
    char *end;

    if (!text || !*text)
        return otherwise;
    v = strtoul(text, &end, 10);
    return *end || *text == '-' || v > INT32_MAX ? otherwise : (unsigned)v;
}
