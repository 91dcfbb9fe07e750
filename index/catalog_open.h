/* SPDX-License-Identifier: MIT */
/* index/catalog_open.h - what connections and commits need to know of an open catalog. */
#ifndef UFS_INDEX_CATALOG_OPEN_H
#define UFS_INDEX_CATALOG_OPEN_H

#include "base/base.h"

struct catalog;
struct err;

const char *catalog_path(const struct catalog *c); /* for messages */
bool catalog_in_memory(const struct catalog *c);

/* The file is to be made anew at the next conn_take. */
void catalog_mark_damaged(struct catalog *c);

/* Somebody deleted or replaced the file: connections made from now on see the new one. */
void catalog_check_moved(struct catalog *c);

#endif
