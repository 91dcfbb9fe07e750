/* SPDX-License-Identifier: MIT */
/* index/formats/object_json_writer.h - how parts of an object's JSON are written. */
#ifndef UFS_INDEX_FORMATS_OBJECT_JSON_WRITER_H
#define UFS_INDEX_FORMATS_OBJECT_JSON_WRITER_H

#include "base/base.h"
#include "index/formats/object_json_priv.h"

struct buf;
struct object_keys;
struct torch_zip;

enum {
    /*
     * Values in each other. A value takes up to four levels of JSON, and readers of JSON
     * stop at 256 (jq) to 1000 (Python); real objects are under 20 deep.
     */
    OBJECT_DEPTH_MAX = 60
};

/* A step on the way to a value: the key of a dict, or a position alone. */
struct object_step {
    bool keyed;
    struct pv key;
    size_t position;
};

struct object_writer {
    struct torch_zip *t;
    const struct object_keys *keys;
    struct buf *out;
    uint64_t budget;
    bool no_memory;
    uintptr_t open[OBJECT_DEPTH_MAX]; /* what is being written: cycles end here */
    unsigned depth;
    struct object_step part[OBJECT_DEPTH_MAX]; /* one for each that is open, at most */
    unsigned parts;
};

/* Remembers that memory ran out; true when the helper found what it looks for. */
bool object_writer_found(struct object_writer *w, int rc);

/* Is there more to it than the arguments of its call? */
bool object_has_extras(const struct pv *v);

void object_write_text(struct object_writer *w, const char *text);

/* `{"$type":"TYPE"`: members and the end are to follow. */
void object_write_type(struct object_writer *w, const char *type);

void object_write_bytes(struct object_writer *w, const struct object_bytes *b);
void object_write_base64(struct object_writer *w, const char *data, size_t len);
void object_write_name(struct object_writer *w, const struct pv *global);

/* `[...]`, and what a sequence or dict of that type is. */
void object_write_items(struct object_writer *w, const struct pv *v);
void object_write_sequence(struct object_writer *w, const char *type,
                           const struct pv *v, bool frozen);
void object_write_dict(struct object_writer *w, const struct pv *dict);

/* Members of an opaque object. Arguments from `from` on; `alone`: a single simple one
 * (enums, devices, paths) as "value". */
void object_write_args(struct object_writer *w, const struct pv *args, size_t from,
                       bool alone);
void object_write_extras(struct object_writer *w, const struct pv *v);

/* False, and nothing is written: its class means nothing to us, or it is none of it. */
bool object_write_known(struct object_writer *w, const struct pv *v);

#endif
