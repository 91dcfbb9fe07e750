/* SPDX-License-Identifier: MIT */
/* index/formats/json_object.h - a JSON file of a checkpoint, as one value of objects.json. */
#ifndef UFS_INDEX_FORMATS_JSON_OBJECT_H
#define UFS_INDEX_FORMATS_JSON_OBJECT_H

#include "base/base.h"

struct buf;
struct err;
struct json;
struct listing;
struct sink;

/*
 * Python's JSON as docs/formats/objects-json.md has it: what is no JSON (NaN, Infinity) or
 * does not survive a reader with doubles (integers beyond 2^53) becomes {"$type": ...},
 * and a member that is called $type gets a dollar more. Nothing is checked: parse `out`.
 */
int json_to_object(const char *text, size_t len, struct buf *out, struct err *e);

/*
 * Reports the file `name` of the listed directory as the object `name`. It stays visible
 * and is watched. *doc: its content, or NULL where it cannot be read: that is told by the
 * object and a warning. -ESTALE, -ENOMEM and errors of the index are returned.
 */
int json_file_object(struct listing *l, const char *name, struct sink *sink,
                     struct json **doc, struct err *e);

/* An object that is there and cannot be read, and a warning. */
int object_unreadable(struct sink *sink, const char *key, size_t key_len,
                      const struct err *why, struct err *e);

#endif
