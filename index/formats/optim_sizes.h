/* SPDX-License-Identifier: MIT */
/* index/formats/optim_sizes.h - full shapes of parameters, as an optimizer's DCP tells them. */
#ifndef UFS_INDEX_FORMATS_OPTIM_SIZES_H
#define UFS_INDEX_FORMATS_OPTIM_SIZES_H

#include "base/base.h"
#include "index/shape.h"

struct err;
struct optim_sizes;
struct scan_context;

/*
 * Reads the .metadata in directory `dir` of the checkpoint: an Adam moment of a parameter
 * has the parameter's own shape. *out is NULL where it cannot be read, which is another's to
 * tell; only -ENOMEM and what else says nothing about the file is returned.
 */
int optim_sizes_load(const struct scan_context *c, const char *dir,
                     struct optim_sizes **out, struct err *e);
void optim_sizes_free(struct optim_sizes *o); /* NULL is fine */
void optim_sizes_freep(struct optim_sizes **o);

/* The shape of the parameter of this name, in elements; false: it is not told. */
bool optim_sizes_find(const struct optim_sizes *o, const char *name, size_t len,
                      struct shape *out);

/* The i-th parameter by name, without its NUL; NULL: there are no more. */
const char *optim_sizes_name(const struct optim_sizes *o, size_t i, size_t *len);

#endif
