/* SPDX-License-Identifier: MIT */
/* index/formats/scan_priv.h - the scanner's parts, and what a walk and tests ask it. */
#ifndef UFS_INDEX_FORMATS_SCAN_PRIV_H
#define UFS_INDEX_FORMATS_SCAN_PRIV_H

#include <stddef.h>

struct arena;
struct catalog;
struct checkpoint_info;
struct err;
struct scanner;
struct store;

struct store *scanner_store(const struct scanner *s);
struct catalog *scanner_catalog(const struct scanner *s);

/* How many places it remembers. */
size_t scanner_places(struct scanner *s);

/* 1: every file of the checkpoint is as the index has it; 0: not. */
int scan_files_same(struct store *s, struct catalog *c,
                    const struct checkpoint_info *info, struct arena *a, struct err *e);

#endif
