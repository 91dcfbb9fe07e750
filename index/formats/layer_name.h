/* SPDX-License-Identifier: MIT */
/* index/formats/layer_name.h - the layer that a parameter's name puts it into. */
#ifndef UFS_INDEX_FORMATS_LAYER_NAME_H
#define UFS_INDEX_FORMATS_LAYER_NAME_H

#include "base/base.h"

/*
 * "model.layers.3.mlp.up_proj.weight": `layer` is how long "model.layers.3." is, and `all`
 * "model.layers.". The first number counts. false: there is none, or nothing behind it.
 */
bool layer_name(const char *name, size_t len, size_t *layer, size_t *all);

#endif
