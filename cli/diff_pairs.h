/* SPDX-License-Identifier: MIT */
/* cli/diff_pairs.h - which tensor of one checkpoint is which of another. */
#ifndef UFS_CLI_DIFF_PAIRS_H
#define UFS_CLI_DIFF_PAIRS_H

#include "cli/tensor_list.h"

/* One of them may be NULL: it is only on the other side. */
struct tensor_pair {
    const char *name; /* what both are called */
    size_t name_len;
    const struct listed_tensor *a, *b;
};

/*
 * Tensors of role model meet by the names that they have in model.safetensors, without a
 * saver's wrapper, unless two of one side would have one name (then that side keeps its
 * keys, as the view does); what is left of them, and all others, meet by their full keys.
 * Model first, then by name.
 * *out is to be freed, and borrows from both lists.
 */
int pair_tensors(const struct tensor_list *a, const struct tensor_list *b,
                 struct tensor_pair **out, size_t *n, struct err *e);

#endif
