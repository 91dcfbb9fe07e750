/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_train.h - NeMo 1's training checkpoints: Lightning's file of each rank. */
#ifndef UFS_INDEX_FORMATS_NEMO_TRAIN_H
#define UFS_INDEX_FORMATS_NEMO_TRAIN_H

#include "base/base.h"

#include "index/formats/format.h"

/*
 * checkpoints/RANK/NAME.ckpt, RANK being mp_rank_TT or tp_rank_TT_pp_rank_PPP
 * (inject_model_parallel_rank of nemo/utils/model_utils.py, NLPDDPStrategy.save_checkpoint of
 * nemo/collections/nlp/parts/nlp_overrides.py; 1.0 to 1.23): as format_driver.sets. None
 * where a rank's directory holds anything else, or no such file is of torch.save.
 */
int nemo_train_sets(struct listing *l, format_set_fn *fn, void *user);
bool nemo_train_is_dir(const char *name);

/* The checkpoint of c->file. */
int nemo_train_scan(const struct scan_context *c, struct sink *sink, struct err *e);

#endif
