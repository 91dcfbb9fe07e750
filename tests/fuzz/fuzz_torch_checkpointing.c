/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_torch_checkpointing.c - any pickle as torch_checkpointing's metadata. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/rankfiles/checkpointing_metadata.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MEMORY = 64 << 20, MAX_RANKS = 16 };

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

/* Boxes are within the whole. */
static void check_part(const struct checkpointing_part *part)
{
    require(part->boxes.nd == part->whole.nd, "dimensions");
    require(!part->exact || part->boxes.count == 1, "one box");
    for (size_t i = 0; i < part->boxes.count; i++)
        for (uint32_t k = 0; k < part->whole.nd; k++)
            require(!range_outside(part->boxes.box[i].to[k], part->boxes.box[i].size[k],
                                   part->whole.dim[k]),
                    "a box outside");
}

static void check(struct checkpointing_metadata *m, struct arena *a)
{
    for (size_t i = 0; i < m->items; i++) {
        for (size_t p = 0; p < m->item[i].paths; p++) {
            const struct checkpointing_path *path = &m->item[i].path[p];
            const struct checkpointing_path *found =
                checkpointing_find(&m->item[i], path->path, path->len);

            require(found && (found == path || path->twice), "it is not found");
            for (uint32_t rank = 0; rank < MIN(m->world, MAX_RANKS); rank++) {
                struct checkpointing_part part;
                struct err e = {0};
                int r = checkpointing_part(m, path, rank, a, &part, &e);

                require(r >= 0 || e.code == EBADMSG || e.code == ENOTSUP ||
                            e.code == ENOMEM || e.code == EFBIG,
                        "a known code");
                require(r >= 0 || e.text[0], "a reason");
                if (r > 0)
                    check_part(&part);
            }
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct pickle_options options = {
        .limits = {.opcodes = 100000, .nodes = 100000, .bytes = MEMORY}};
    CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    struct checkpointing_metadata m;
    struct err e = {0};
    uint64_t used;
    struct pv root;

    if (!a || source_from_memory(data, size, false, "fuzz", &src, &e) < 0 ||
        pickle_load(src, 0, size, &options, &p, &used, &e) < 0)
        return 0;
    root = pickle_root(p);
    if (checkpointing_metadata_read(&root, used, a, &m, &e) == 0)
        check(&m, a);
    else
        require((e.code == EBADMSG || e.code == ENOMEM || e.code == ENOTSUP ||
                 e.code == EFBIG) &&
                    e.text[0],
                "its error");
    return 0;
}
