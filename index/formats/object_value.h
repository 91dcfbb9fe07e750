/* SPDX-License-Identifier: MIT */
/* index/formats/object_value.h - how objects.json spells values that JSON has no word for. */
#ifndef UFS_INDEX_FORMATS_OBJECT_VALUE_H
#define UFS_INDEX_FORMATS_OBJECT_VALUE_H

#include "base/base.h"

struct buf;

/*
 * All append one value of docs/formats/objects-json.md; whether it fitted is asked once,
 * by buf_failed(). Integers beyond 2^53 and inf, nan are {"$type": ...} with text.
 */
void object_value_int(struct buf *out, int64_t v);
void object_value_uint(struct buf *out, uint64_t v);
void object_value_double(struct buf *out, double v);
void object_value_bytes(struct buf *out, const void *data, size_t len);

/* Text that is UTF-8; everything else as opaque with its bytes. */
void object_value_text(struct buf *out, const char *text, size_t len);

/* The bytes alone, with quotes. */
void object_value_base64(struct buf *out, const void *data, size_t len);

/* The name of a member (UTF-8): "$type" is ours, so the file's own gets a dollar more. */
void object_value_name(struct buf *out, const char *text, size_t len);

/* Is all of it well-formed UTF-8? */
bool object_text_is_utf8(const char *text, size_t len);

#endif
