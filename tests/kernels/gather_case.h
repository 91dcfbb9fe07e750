/* SPDX-License-Identifier: MIT */
/* tests/kernels/gather_case.h - random gathers with the bytes that they must give. */
#ifndef UFS_TESTS_GATHER_CASE_H
#define UFS_TESTS_GATHER_CASE_H

#include "gpu/gather.h"
#include "random_plan.h"

/*
 * A random plan, a part of it, and, where its elements are floats, a cast and factors.
 * `want` is the result, made element by element from the definitions.
 */
struct gather_case {
    struct random_plan plan;
    struct source *source[SOURCES];
    struct gather_piece piece[MAX_BOXES];
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS], block[SHAPE_MAX_DIMS];
    struct gather_scale scale;
    float *factor;
    struct gather_request request;
    struct gather *gather;
    unsigned char *want;
    uint64_t bytes;
};

/* `most`: about how many elements the tensor has. */
void gather_case_make(struct gather_case *c, struct random *r, uint64_t most);
void gather_case_release(struct gather_case *c);

/* Prints where `got` is not what it must be, or nothing: true. */
bool gather_case_equal(const struct gather_case *c, const unsigned char *got,
                       const char *who);

/* Bytes (owned) of a file that changes once it has been read from. */
struct source *open_changing(unsigned char *bytes, uint64_t size);

#endif
