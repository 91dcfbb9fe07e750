/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_local.h - ranks of OLMo's type local: the model's ranges, the optimizer's. */
#ifndef UFS_INDEX_FORMATS_OLMO_OLMO_LOCAL_H
#define UFS_INDEX_FORMATS_OLMO_OLMO_LOCAL_H

#include "base/base.h"

struct buf;
struct err;
struct olmo_local;
struct rank_set;
struct torch_item;
struct torch_zip;

/*
 * Which elements a rank's optimizer has of a parameter only its file of the model tells: they
 * are kept from the one to the other. `world` ranks.
 */
int olmo_local_new(uint32_t world, struct olmo_local **out, struct err *e);
void olmo_local_free(struct olmo_local *l); /* NULL is fine */
void olmo_local_freep(struct olmo_local **l);

/*
 * The callbacks below are for *set, whose n files are those of these ranks. All is borrowed
 * until the next call.
 */
void olmo_local_files(struct olmo_local *l, struct rank_set **set, const uint32_t *rank,
                      uint32_t n);

/* rank_set_how.on_file of the model: gives all its parameters. */
int olmo_local_model(void *user, uint32_t file, struct torch_zip *zip, struct err *e);

/*
 * on_file, on_tensor and rename of the optimizer: states are called by the names that its
 * groups tell (param_names), and have the ranges that the parameter has.
 */
int olmo_local_optim(void *user, uint32_t file, struct torch_zip *zip, struct err *e);
int olmo_local_state(void *user, uint32_t file, const struct torch_item *item,
                     struct err *e);
int olmo_local_rename(void *user, const char *path, size_t len, struct buf *key);

#endif
