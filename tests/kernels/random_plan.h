/* SPDX-License-Identifier: MIT */
/* tests/kernels/random_plan.h - random tensors, cut to random boxes, stored at random. */
#ifndef UFS_TESTS_RANDOM_PLAN_H
#define UFS_TESTS_RANDOM_PLAN_H

#include "index/chunk.h"
#include "index/shape.h"

enum { SOURCES = 3, MAX_BOXES = 400 };

struct random {
    uint64_t state;
};

uint64_t random_next(struct random *r);
uint64_t random_below(struct random *r, uint64_t n); /* 0 .. n - 1 */
bool random_one_in(struct random *r, uint64_t n);

/* A box of the tensor and where its bytes are. */
struct box {
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS];
    unsigned source;
    struct chunk_place place; /* src is set by the test */
};

/*
 * A tensor, the boxes that cover it exactly once (and some empty ones), their places in
 * exactly sized random sources, and the tensor's bytes made by the simplest loop there is.
 */
struct random_plan {
    struct shape units;
    unsigned unit, component;
    uint64_t elements, bytes;
    struct box box[MAX_BOXES];
    size_t n;
    unsigned char *source[SOURCES];
    uint64_t source_size[SOURCES];
    unsigned char *used[SOURCES]; /* 1: some box reads this byte */
    unsigned char *tensor;
    size_t *owner; /* the box of each element */
};

/* `most`: about how many elements; 0 dimensions and empty tensors occur. */
void random_plan_make(struct random_plan *p, struct random *r, uint64_t most);
void random_plan_release(struct random_plan *p);

#endif
