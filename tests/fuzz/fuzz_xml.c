/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_xml.c - the answers of object stores. */
#include <string.h>

#include "base/err.h"
#include "remote/xml.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static int see(void *user, const char *path, const char *text, size_t len,
               struct err *e)
{
    size_t *bytes = user;

    (void)e;
    *bytes += strlen(path) + len + (text[len] == '\0');
    return 0;
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    struct err e = {0};
    size_t bytes = 0;

    xml_each(data, size, see, &bytes, &e);
    return 0;
}
