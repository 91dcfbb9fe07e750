/* SPDX-License-Identifier: MIT */
/* save/files.c - the files of a run, by stage and part. */
#include "save/files.h"

/* Files of stage 0 go to parts by the middle of their bytes: parts are of like size. */
static bool is_ours(const struct save_run *r, const struct layout_file_info *f,
                    uint64_t before, uint64_t total)
{
    uint64_t middle = before + f->size / 2;

    if (f->stage > 0)
        return r->other_stages;
    if (!r->first_stage)
        return false;
    return r->parts <= 1 ||
           (unsigned)((unsigned __int128)middle * r->parts / (total + 1)) + 1 ==
               r->part;
}

static uint64_t stage_bytes(const struct layout *l, unsigned stage)
{
    struct layout_file_info f;
    uint64_t total = 0;

    for (size_t i = 0; i < layout_files(l); i++) {
        layout_file_info(l, i, &f);
        total += f.stage == stage ? f.size : 0;
    }
    return total;
}

int save_each_file(const struct save_run *r, unsigned stage, save_file_fn *fn,
                   void *user)
{
    uint64_t total = stage_bytes(r->layout, stage), before = 0;
    struct layout_file_info f;
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < layout_files(r->layout); i++) {
        layout_file_info(r->layout, i, &f);
        if (f.stage != stage)
            continue;
        if (is_ours(r, &f, before, total))
            ret = fn(user, (uint32_t)i, &f);
        before += f.size;
    }
    return ret;
}

unsigned save_last_stage(const struct layout *l)
{
    struct layout_file_info f;
    unsigned last = 0;

    for (size_t i = 0; i < layout_files(l); i++) {
        layout_file_info(l, i, &f);
        last = MAX(last, f.stage);
    }
    return last;
}
