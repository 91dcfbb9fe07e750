/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_gunzip.c - any bytes as gzip: a read at any place gives what one pass gave. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "remote/gunzip.h"
#include "remote/source.h"

enum { MAX_PLAIN = 1 << 22 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static void compare(struct source *s, const char *plain, uint64_t off, size_t len)
{
    CLEANUP_FREE char *got = malloc(len + 1);
    struct err e = {0};

    require(got && source_read(s, off, len, got, &e) == 0, e.text);
    require(memcmp(got, plain + off, len) == 0, "other bytes");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP(source_putp) struct source *in = NULL, *s = NULL;
    CLEANUP(gunzip_scan_freep) struct gunzip_scan *scan = NULL;
    CLEANUP_FREE char *plain = malloc(MAX_PLAIN);
    struct err e = {0};
    size_t got = 0;
    int rc;

    if (!plain || source_from_memory(data, size, false, "fuzz", &in, &e) < 0 ||
        gunzip_scan_begin(in, &scan, &e) < 0)
        return 0;
    rc = gunzip_scan_read(scan, 0, MAX_PLAIN, plain, &got, &e);
    if (rc == 0)
        rc = gunzip_scan_finish(scan, &s, &e);
    require(rc == 0 || rc == -EBADMSG, e.text);
    if (rc < 0 || got == 0 || s->size > got)
        return 0;
    require(s->size == got, "size");
    compare(s, plain, got / 2, got - got / 2);
    compare(s, plain, 0, got);
    compare(s, plain, got - 1, 1);
    compare(s, plain, got / 3, 1);
    return 0;
}
