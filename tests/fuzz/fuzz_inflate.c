/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_inflate.c - any bytes as deflate data: what zlib takes, the other library inflates to the same. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/inflate.h"
#include "tests/unit/guarded.h"

enum { MAX_PLAIN = 1 << 18 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

struct result {
    int rc;
    bool ended;
    size_t got;
    uint64_t length;
    struct guarded plain;
};

/* In pieces of `step` bytes of input; all that comes out lies before a guard page. */
static struct result unpack(enum inflate_by by, const uint8_t *data, size_t size,
                            size_t step)
{
    CLEANUP(inflate_freep) struct inflate *s = NULL;
    struct result r = {.plain = guarded_new(MAX_PLAIN)};
    struct guarded in = guarded_new(step);
    struct err e = {0};
    size_t at = 0, take, put;

    if (inflate_new(by, &s, &e) < 0)
        abort();
    do {
        take = MIN(size - at, step);
        put = MIN(MAX_PLAIN - r.got, 1 + step * 3);
        memcpy(in.data + step - take, data + at, take);
        r.rc = inflate_some(s, in.data + step - take, &take, r.plain.data + r.got, &put,
                            &r.ended, &e);
        at += take;
        r.got += put;
    } while (r.rc == 0 && !r.ended && (take > 0 || put > 0));
    r.length = inflate_length(s);
    guarded_free(&in);
    return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t step = size > 0 ? 1 + data[size - 1] % 64u * 8 : 1;
    struct result a = unpack(INFLATE_ZLIB, data, size, step);
    struct result b = unpack(INFLATE_BEST, data, size, step);

    require(a.rc == 0 || a.rc == -EBADMSG, "zlib's code");
    require(b.rc == 0 || b.rc == -EBADMSG, "the other's code");
    if (a.rc == 0 && a.ended) {
        require(a.length <= size, "length");
        require(b.rc == 0 && b.ended, "it does not end");
        require(b.got == a.got && b.length == a.length, "lengths differ");
        require(memcmp(a.plain.data, b.plain.data, a.got) == 0, "bytes differ");
    }
    guarded_free(&a.plain);
    guarded_free(&b.plain);
    return 0;
}
