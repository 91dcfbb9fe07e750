/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_olmo_key.c - any text as an encoded key, any bytes as a file's first. */
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/olmo/olmo_key.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static void check_first(const char *head, size_t size, const char *key, size_t len)
{
    require(!key || (key >= head && key <= head + size &&
                     len <= (size_t)(head + size - key)),
            "a key outside of what was read");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE char *text = malloc(size ? size : 1); /* no byte more than there is */
    CLEANUP(buf_release) struct buf key = {0};
    struct err e = {0};
    bool pickled = false;
    size_t len = 0;
    const char *first;

    if (!text)
        return 0;
    if (size > 0)
        memcpy(text, data, size);
    if (olmo_key_decode(text, size, &key, &pickled, &e) < 0)
        require(e.code && e.text[0], "an error without words");
    first = olmo_first_key(text, size, &len);
    check_first(text, size, first, len);
    first = olmo_first_torch_key(text, size, &len);
    check_first(text, size, first, len);
    return 0;
}
