/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_intern.h - equal byte strings get one number, and are kept once. */
#ifndef UFS_INDEX_FORMATS_DCP_INTERN_H
#define UFS_INDEX_FORMATS_DCP_INTERN_H

#include "base/base.h"
#include "base/buf.h"

/*
 * `struct intern t = {0};` is empty. Numbers count from 0. Costs about 16 bytes a string
 * beside its own, which start at a multiple of 8 (shapes are kept as arrays of int64).
 */
struct intern {
    struct intern_entry *entry;
    uint32_t *slot; /* entry + 1, 0: free; open addressing */
    size_t nslots;
    uint32_t count, cap;
    struct buf bytes;
};

/* Numbers from here on are for the caller's marks ("none", "bad"). */
enum { INTERN_MAX = 0xfffffff0u };

void intern_release(struct intern *t);

/* 0, -ENOMEM, or -EFBIG when there are too many. */
int intern_add(struct intern *t, const void *data, size_t len, uint32_t *number);

/* The same for bytes that are there already; false when they are not. */
bool intern_find(const struct intern *t, const void *data, size_t len,
                 uint32_t *number);

/* The bytes of a number that intern_add gave, valid until the next add; no NUL behind. */
const void *intern_get(const struct intern *t, uint32_t number, size_t *len);

#endif
