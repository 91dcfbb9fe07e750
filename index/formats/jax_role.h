/* SPDX-License-Identifier: MIT */
/* index/formats/jax_role.h - roles of tensors by the names that JAX programs give them. */
#ifndef UFS_INDEX_FORMATS_JAX_ROLE_H
#define UFS_INDEX_FORMATS_JAX_ROLE_H

#include "base/base.h"
#include "index/sink.h"

/*
 * As role_of(), but parts of the key end at "." or "/", and those that Flax, Optax and
 * Levanter call so are the optimizer's (opt_state) or a generator's (training_key).
 */
enum role jax_role(const char *part, const char *key, size_t len);

#endif
