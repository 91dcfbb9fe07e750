/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/verl_files.h - which files of a directory are verl's, of which run. */
#ifndef UFS_INDEX_FORMATS_RANKFILES_VERL_FILES_H
#define UFS_INDEX_FORMATS_RANKFILES_VERL_FILES_H

#include "base/base.h"

struct err;
struct listing;

enum verl_kind { VERL_MODEL, VERL_OPTIM, VERL_EXTRA, VERL_KINDS };

/* "model_world_size_4_rank_0.pt", "optim_...", "extra_state_..." */
struct verl_name {
    enum verl_kind kind;
    uint32_t world, rank; /* rank < world */
};
bool verl_name(const char *name, struct verl_name *out);

/* The files of one save. Names are borrowed from the listing. */
struct verl_file {
    const char *name;
    uint32_t rank;
};
struct verl_files {
    uint32_t world;
    struct verl_file *file[VERL_KINDS]; /* malloc; by rank */
    uint32_t count[VERL_KINDS];
    const char **stale; /* malloc; files of other world sizes */
    size_t nstale;
    uint32_t stale_world; /* one of those */
};

/*
 * A run that was resumed with another number of ranks leaves files of both in one
 * directory: those of the world size `told` (fsdp_config.json; 0: it tells none) when
 * they are there, else those of the newest model. -ENOTSUP when that is not to be told,
 * -ESTALE when there are none.
 */
int verl_files_find(const struct listing *l, uint64_t told, struct verl_files *out,
                    struct err *e);
void verl_files_release(struct verl_files *f);

#endif
