/* SPDX-License-Identifier: MIT */
/* gpu/element_diff.h - where two tensors of one shape differ, and how much. */
#ifndef UFS_GPU_ELEMENT_DIFF_H
#define UFS_GPU_ELEMENT_DIFF_H

#include "gpu/elements.h"

/* What counts as equal. */
struct element_rule {
    bool values; /* equal values are equal, whatever their bits (0 and -0, NaNs) */
    bool
        tolerance; /* so are a and b with |a - b| <= atol + rtol * |b| (numpy's rule) */
    double rtol, atol;
};

/*
 * Two types under one rule. Of one type: bits are compared first, and what has the same is
 * equal. Where the types are not the same, only values are. Types of which a number takes
 * less than a byte are compared with themselves only.
 */
struct element_pair {
    struct element_rule rule;
    struct element_decoder a, b;
    bool same_type, integers, bytes; /* bytes: no numbers to us */
};

/* False when the two cannot be compared. */
bool element_pair_init(struct element_pair *p, const struct element_rule *rule,
                       enum dtype a, enum dtype b);

/*
 * Of a part of a tensor. A complex number is one element, and its distance that in the
 * plane. NaN in both places is no difference of values; a value that is not finite against
 * another is one without a size, counted as such. Integers are compared exactly.
 */
struct element_diff {
    uint64_t elements;
    uint64_t
        differing; /* by their bits; where types differ, or values are asked: by value */
    uint64_t outside; /* beyond the tolerance; without one the same as differing */
    uint64_t
        nonfinite;  /* of the differing: NaN or Inf on one side, or Infs of two signs */
    double max_abs; /* of the others: |a - b| */
    double max_rel; /* of those with b other than 0: |a - b| / |b| */
    uint64_t first; /* index of the first outside; UINT64_MAX: none */
    unsigned char first_a[16], first_b[16]; /* its storage units */
};

void element_diff_init(struct element_diff *d);

/* Adds `units` storage units whose first has the index `at` in the tensor. */
void element_diff_add(struct element_diff *d, const struct element_pair *p,
                      const void *a, const void *b, uint64_t at, size_t units);

/* Adds what `from` found behind what `d` did. */
void element_diff_merge(struct element_diff *d, const struct element_diff *from);

#endif
