/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_s3_list.c - any bytes as a page of a bucket's listing. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "remote/s3_list.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const char *text, size_t size, const char *prefix)
{
    CLEANUP(s3_page_release) struct s3_page page = {0};
    struct err e = {0};
    int rc = s3_page_read(text, size, prefix, &page, &e);

    if (rc != 0 && rc != -EBADMSG && rc != -ENOMEM) {
        fprintf(stderr, "%d: %s\n", rc, e.text);
        abort();
    }
    if (rc < 0)
        return;
    for (size_t i = 0; i < s3_page_count(&page); i++) {
        const struct s3_entry *entry = s3_page_at(&page, i);

        if (entry->name >= page.names.len ||
            (entry->etag != SIZE_MAX && entry->etag >= page.names.len) ||
            entry->size > INT64_MAX)
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE char *text = malloc(size ? size : 1); /* no byte more than there is */

    if (!text)
        return 0;
    if (size > 0)
        memcpy(text, data, size);
    check(text, size, "");
    check(text, size, "p/");
    return 0;
}
