/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_ranks.h - NeMo 1's files of model parallel ranks, merged. */
#ifndef UFS_INDEX_FORMATS_NEMO_RANKS_H
#define UFS_INDEX_FORMATS_NEMO_RANKS_H

#include "base/base.h"
#include "index/formats/nemo/nemo_config.h"

struct err;
struct json;
struct scan_context;
struct sink;

/*
 * "mp_rank_01", or "tp_rank_01_pp_rank_003" where there are pipelines (NLPSaveRestoreConnector
 * and inject_model_parallel_rank of NeMo 1). False: it is no such name.
 */
bool nemo_rank_name(const char *name, uint32_t *tensor, uint32_t *pipeline);

struct nemo_ranks {
    const struct scan_context *c;
    struct sink *sink;
    /* In each rank's directory; where it is not the rank is missing. */
    const char *file;
    /*
     * It is Lightning's: the model is its entry state_dict, with virtual pipelines model0,
     * model1, ...; else all of the file is the model.
     */
    bool training;
};

/*
 * Reports the whole model from the ranks' files, which are cut as `config` tells: names of layers
 * as of the whole model, what cannot be told by name and configuration as each rank has it.
 * *merged false: nothing was reported, and *why says why the ranks cannot be put together.
 * Errors are those of the index, and what shows only on the way (-EBADMSG).
 */
int nemo_ranks_report(const struct nemo_ranks *r, const struct nemo_config *config,
                      bool *merged, struct err *why, struct err *e);

#endif
