/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_plan_wire.c - any bytes as a plan: refused, or all of it within its bounds. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "gpu/plan_wire.h"
#include "index/chunk.h"

enum { MEMORY = 1 << 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

static void check_piece(const struct plan_wire *p, const struct wire_piece *w,
                        uint64_t *sum, const struct err *e)
{
    require(w->source < p->sources, "source", e);
    require(!(w->flags & ~(CHUNK_SWAP | CHUNK_CONJ | CHUNK_NEG)), "flags", e);
    for (uint32_t k = 0; k < p->units.nd; k++)
        *sum +=
            w->start[k] + w->size[k] + (uint64_t)w->step[k]; /* all of it is there */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);
    struct plan_wire p;
    struct err e = {0};
    uint64_t sum = 0, bytes;
    int ret;

    if (!a)
        return 0;
    ret = wire_parse(a, data, size, &p, &e);
    require(ret == 0 || ret == -EBADMSG || ret == -ENOMEM, "wire_parse", &e);
    require((ret == 0) == (e.code == 0), "words", &e);
    if (ret < 0)
        return 0;
    require(shape_bytes(&p.shape, p.dtype, &bytes, &e) == 0 && bytes == p.bytes,
            "bytes", &e);
    require(!p.through || (!p.sources && !p.pieces), "through", &e);
    for (size_t i = 0; i < p.sources; i++)
        require(p.source[i].path[0] == '/' && p.source[i].size <= INT64_MAX, "path",
                &e);
    for (size_t i = 0; i < p.pieces; i++)
        check_piece(&p, &p.piece[i], &sum, &e);
    require(sum != 1 || p.pieces, "sum", &e);
    return 0;
}
