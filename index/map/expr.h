/* SPDX-License-Identifier: MIT */
/* index/map/expr.h - whole numbers of a map: "heads / groups * head_dim". */
#ifndef UFS_INDEX_MAP_EXPR_H
#define UFS_INDEX_MAP_EXPR_H

#include "base/base.h"

struct err;

/*
 * The value of a name (letters, digits, '_' and '.'). 0; -ENOENT: nobody has given it one;
 * other errors stop the evaluation.
 */
typedef int expr_lookup(void *user, const char *name, size_t len, int64_t *out,
                        struct err *e);

/*
 * Evaluates numbers, names, + - * / % and parentheses with checked arithmetic. A division
 * must leave no rest: a shape that does not divide is another model's. -EINVAL for text
 * that is no expression, -ERANGE for numbers past 2^63 or a division that leaves a rest,
 * -ENOENT for a name without a value (words name it).
 */
int expr_eval(const char *text, expr_lookup *lookup, void *user, int64_t *out,
              struct err *e);

#endif
