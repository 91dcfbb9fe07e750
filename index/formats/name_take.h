/* SPDX-License-Identifier: MIT */
/* index/formats/name_take.h - names of files, taken apart from left to right. */
#ifndef UFS_INDEX_FORMATS_NAME_TAKE_H
#define UFS_INDEX_FORMATS_NAME_TAKE_H

#include "base/base.h"

/* `text` stands there: *p goes behind it. */
bool name_take(const char **p, const char *text);

/* A number of 1 to 8 digits, zeros before it or not ("00", "0"), and no digit behind. */
bool name_take_number(const char **p, uint32_t *out);

#endif
