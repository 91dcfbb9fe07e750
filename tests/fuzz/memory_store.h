/* SPDX-License-Identifier: MIT */
/* tests/fuzz/memory_store.h - a directory of files in memory as a store. */
#ifndef UFS_TESTS_FUZZ_MEMORY_STORE_H
#define UFS_TESTS_FUZZ_MEMORY_STORE_H

#include "remote/store.h"

/*
 * The files stand one behind the other in data[0..size), which is borrowed: a byte with the
 * length of the path, three bytes (little-endian) with that of the contents, the path, the
 * contents. What is left over when a length leads beyond the end belongs to the last file; a
 * path that is not safe, or comes twice, is left out. make_scan_seed.py writes them.
 */
int memory_store(const uint8_t *data, size_t size, struct store **out, struct err *e);

#endif
