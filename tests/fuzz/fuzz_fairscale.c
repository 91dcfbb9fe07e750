/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_fairscale.c - any pickle as fairscale's shard_metadata. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/fairscale/fairscale_metadata.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MEMORY = 64 << 20 };

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

/* Members follow each other and have the elements that their shapes say. */
static void check(const struct fairscale_metadata *m)
{
    size_t members = 0;

    for (size_t p = 0; p < m->params; p++) {
        uint64_t at = 0;

        for (size_t i = 0; i < m->param[p].members; i++) {
            const struct flat_member *x = &m->param[p].member[i];
            const struct flat_member *found = fairscale_member(m, x->name, x->len);
            uint64_t count = 1;

            require(x->begin == at && x->nd <= SHAPE_MAX_DIMS, "a hole");
            for (uint32_t k = 0; k < x->nd; k++)
                count *= x->dim[k];
            require(count == x->count, "elements");
            require(found && found->param == p, "it is not found");
            at += x->count;
            members++;
        }
        require(at == m->param[p].total, "the sum");
    }
    require(members == m->members, "the index");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct pickle_options options = {
        .limits = {.opcodes = 100000, .nodes = 100000, .bytes = MEMORY}};
    CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    struct fairscale_metadata m;
    struct err e = {0};
    uint64_t used;
    struct pv root;

    if (!a || source_from_memory(data, size, false, "fuzz", &src, &e) < 0 ||
        pickle_load(src, 0, size, &options, &p, &used, &e) < 0)
        return 0;
    root = pickle_root(p);
    if (fairscale_metadata_read(&root, a, &m, &e) == 0)
        check(&m);
    else
        require((e.code == EBADMSG || e.code == ENOMEM) && e.text[0], "its error");
    return 0;
}
