/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_loader_name.h - by which name libraries ask for a model's file. */
#ifndef UFS_INDEX_FORMATS_HF_HF_LOADER_NAME_H
#define UFS_INDEX_FORMATS_HF_HF_LOADER_NAME_H

#include "base/base.h"

/* Is it a file of weights, or an index of some? */
bool hf_is_weights(const char *name);

/*
 * The name that a loader asks for where this file is the model: diffusers for no other than
 * its own, both libraries for that of a variant. "": it is a piece of such a model and says
 * nothing, NULL: of a model that goes by another name.
 * Lasts as long as `name`.
 */
const char *hf_loader_name(const char *name);

#endif
