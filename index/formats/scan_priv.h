/* SPDX-License-Identifier: MIT */
/* index/formats/scan_priv.h - what the walk over a tree needs of the scanner. */
#ifndef UFS_INDEX_FORMATS_SCAN_PRIV_H
#define UFS_INDEX_FORMATS_SCAN_PRIV_H

struct catalog;
struct scanner;
struct store;

struct store *scanner_store(const struct scanner *s);
struct catalog *scanner_catalog(const struct scanner *s);

#endif
