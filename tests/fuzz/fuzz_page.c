/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_page.c - any bytes as a listing page: links are names below its directory. */
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "remote/web.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int check_name(void *user, const char *name, bool is_dir)
{
    size_t len = strlen(name);

    (void)user;
    (void)is_dir;
    if (len == 0 || len > NAME_MAX || strchr(name, '/') || strcmp(name, ".") == 0 ||
        strcmp(name, "..") == 0) {
        fprintf(stderr, "a link that is no name\n");
        abort();
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    page_links((const char *)data, size, "/run/", check_name, NULL);
    return 0;
}
