/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_upload_journal.c - journals of uploads: what is read is written the same. */
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "remote/store.h"
#include "save/upload_journal.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    struct upload_journal a = {0}, b = {0};
    struct buf text = {0}, again = {0};
    struct err e = {0};

    if (upload_journal_read(&a, (const char *)data, size, &e) == 0) {
        require(a.what != NULL, "a journal of nothing");
        for (size_t i = 0; i < a.uploads; i++)
            require(store_name_is_safe(a.upload[i].path, strlen(a.upload[i].path)) &&
                        upload_journal_find(&a, a.upload[i].path) != NULL,
                    "a path that is not safe, or not found");
        require(upload_journal_text(&a, &text, &e) == 0, e.text);
        require(upload_journal_read(&b, text.data, text.len, &e) == 0, e.text);
        require(upload_journal_text(&b, &again, &e) == 0, e.text);
        require(text.len == again.len && !memcmp(text.data, again.data, text.len),
                "read and written it is another one");
    }
    buf_release(&text);
    buf_release(&again);
    upload_journal_release(&a);
    upload_journal_release(&b);
    return 0;
}
