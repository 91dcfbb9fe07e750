/* SPDX-License-Identifier: MIT */
/* index/catalog_print.c - all that a scan found, as one number. */
#include "index/catalog_stage.h"
#include "index/catalog_write.h"

static uint64_t print_rights(const struct stage_rights *r, uint64_t seed)
{
    const struct cell row[] = {cell_int(seed),     cell_int(r->any),
                               cell_int(r->mixed), cell_int(r->mixed_groups),
                               cell_int(r->mode),  cell_int(r->uid),
                               cell_int(r->gid),   cell_int((uint64_t)r->mtime_ns)};

    return cells_sum(row, ARRAY_SIZE(row));
}

uint64_t stage_print(const struct stage *st, const struct stage_result *r)
{
    const struct sink_checkpoint *about = r->about;
    const struct cell row[] = {
        cell_int(st->print),
        cell_text(about->format),
        cell_text(about->framework),
        cell_text(about->version),
        cell_text(about->topology),
        cell_text(about->header),
        about->has_step ? cell_int((uint64_t)about->step) : cell_text(NULL),
        cell_int(about->adapter),
        cell_text(about->metadata_file),
        cell_int(r->files),
    };
    uint64_t print = cells_sum(row, ARRAY_SIZE(row));

    if (r->error)
        return 0;
    print = print_rights(&r->all, print_rights(&r->owner, print));
    for (uint32_t i = 0; i < r->files; i++) {
        struct stage_use use;

        r->file_use(r->user, i, &use);
        print = cells_sum((const struct cell[]){cell_int(print), cell_int(use.storage),
                                                cell_int(use.copy), cell_int(use.whole),
                                                cell_int(use.tensors)},
                          5);
    }
    return MAX(print, 1);
}
