/* SPDX-License-Identifier: MIT */
/* cli/diff_report.h - what `unshard diff` found, as rows for people or as JSON. */
#ifndef UFS_CLI_DIFF_REPORT_H
#define UFS_CLI_DIFF_REPORT_H

#include "cli/diff_objects.h"
#include "cli/diff_pairs.h"
#include "gpu/element_diff.h"

enum pair_state {
    PAIR_IDENTICAL, /* type, shape and every bit */
    PAIR_EQUAL,     /* by value, or within the tolerance */
    PAIR_DIFFERS,
    PAIR_ONLY_A,
    PAIR_ONLY_B,
    PAIR_DTYPE,
    PAIR_SHAPE,
    PAIR_DAMAGED,
    PAIR_STATES
};

struct pair_result {
    enum pair_state state;
    const struct tensor_pair *pair;
    const struct element_diff *diff; /* of PAIR_EQUAL and PAIR_DIFFERS */
    const char *damage;              /* of PAIR_DAMAGED */
};

/* What was found so far, and how it is told. */
struct diff_report {
    bool json, quiet, verbose, tolerance;
    const struct screen *screen;
    uint64_t pairs[PAIR_STATES];
    struct object_totals objects;
    bool with_objects;
    uint64_t shown;
};

void report_begin(const struct diff_report *r, const char *a, const char *b);
/* Counts it, and prints what is not identical (as text: not equal, unless verbose). */
void report_pair(struct diff_report *r, const struct pair_result *p);
/* Between the tensors and the objects. */
void report_objects_begin(struct diff_report *r);
void report_object(struct diff_report *r, enum object_state state, const char *key,
                   size_t key_len);
void report_end(const struct diff_report *r);

/* Is anything not the same? */
bool report_differs(const struct diff_report *r);

#endif
