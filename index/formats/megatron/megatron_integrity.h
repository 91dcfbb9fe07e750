/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_integrity.h - the digests that Megatron Core keeps of a checkpoint's files. */
#ifndef UFS_INDEX_FORMATS_MEGATRON_INTEGRITY_H
#define UFS_INDEX_FORMATS_MEGATRON_INTEGRITY_H

#include "base/base.h"

struct err;

/* Megatron Core 0.19, with the option to verify: {"algorithm": "sha256", "files": {NAME: HEX}}. */
#define MEGATRON_INTEGRITY "integrity.json"

/*
 * Puts the digest (64 hexadecimal digits) of file `name` into the text, which keeps its
 * length. 0 too where the text has none of that file; -ENOTSUP: another algorithm, or not
 * as Megatron writes it.
 */
int megatron_integrity_set(char *text, size_t len, const char *name, const char *hex,
                           struct err *e);

#endif
