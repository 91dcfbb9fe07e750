/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_hparams.h - the model's configuration in a training checkpoint's pickle. */
#ifndef UFS_INDEX_FORMATS_NEMO_HPARAMS_H
#define UFS_INDEX_FORMATS_NEMO_HPARAMS_H

#include "base/base.h"

struct buf;
struct err;
struct pv;

/*
 * Appends the configuration to `out` as a JSON object: what stands in "hyper_parameters" of
 * Lightning's outermost dict, or in its "cfg" (ModelPT of NeMo 1.0 and 1.23; nlp_model.py's
 * load_from_checkpoint takes both). It is a dict or OmegaConf's DictConfig, whose instances are
 * only looked at. Members that are numbers, truths and texts stand as they are, so do
 * those of `encoder` and `decoder`; any other is the text "?", as it is told and is none of
 * these. -ENOENT: there is none, in words.
 */
int nemo_hparams_json(const struct pv *root, struct buf *out, struct err *e);

#endif
