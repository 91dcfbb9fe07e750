/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_integrity.c - any text as integrity.json: at most one digest changes. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/megatron/megatron_integrity.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { DIGITS = 64 };

static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char digest[DIGITS + 1], *text = malloc(size + 1);
    size_t first = size, last = 0;
    struct err e = {0};
    int rc;

    if (!text)
        return 0;
    memset(digest, 'f', DIGITS);
    digest[DIGITS] = '\0';
    memcpy(text, data, size);
    rc = megatron_integrity_set(text, size, "__0_0.distcp", digest, &e);
    require(rc == 0 || rc == -EBADMSG || rc == -ENOTSUP || rc == -ENOMEM, "code", &e);
    for (size_t i = 0; i < size; i++) {
        if (text[i] == (char)data[i])
            continue;
        first = first < i ? first : i;
        last = i;
    }
    require(first == size || (rc == 0 && last - first < DIGITS), "changes", &e);
    free(text);
    return 0;
}
