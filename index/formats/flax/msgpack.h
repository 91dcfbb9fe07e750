/* SPDX-License-Identifier: MIT */
/* index/formats/flax/msgpack.h - MessagePack read value by value, without its long bytes. */
#ifndef UFS_INDEX_FORMATS_FLAX_MSGPACK_H
#define UFS_INDEX_FORMATS_FLAX_MSGPACK_H

#include "base/base.h"

struct buf;
struct err;
struct source;

enum msgpack_kind {
    MSGPACK_NIL,
    MSGPACK_BOOL,
    MSGPACK_INT,  /* i */
    MSGPACK_UINT, /* u: only above INT64_MAX */
    MSGPACK_FLOAT,
    MSGPACK_STR,   /* len bytes at `at`; UTF-8 by the standard, not checked */
    MSGPACK_BIN,   /* the same, any bytes */
    MSGPACK_EXT,   /* the same, of type `ext` */
    MSGPACK_ARRAY, /* len values follow */
    MSGPACK_MAP,   /* len pairs of values follow */
};

/* "a map", for messages. */
const char *msgpack_kind_name(enum msgpack_kind kind);

struct msgpack_value {
    enum msgpack_kind kind;
    int8_t ext;
    union {
        bool b;
        int64_t i;
        uint64_t u;
        double f;
    };
    uint64_t at;  /* byte of the source where what belongs to it starts */
    uint64_t len; /* bytes, values or pairs */
};

enum { MSGPACK_WINDOW = 4096 }; /* read at once: headers are small, bytes are skipped */

/*
 * A place in bytes [pos, end) of a source, which is borrowed. A plain value: copying it
 * gives a second reader. Nothing recurs: who wants a tree counts the values of arrays and
 * maps himself.
 */
struct msgpack {
    struct source *src;
    uint64_t pos, end;
    uint64_t start; /* of the window in the source */
    size_t have;
    unsigned char window[MSGPACK_WINDOW];
};

/* Bytes [off, off + len) of the source; -EBADMSG when they are not within it. */
int msgpack_init(struct msgpack *m, struct source *src, uint64_t off, uint64_t len,
                 struct err *e);

/*
 * The next value; the bytes of STR, BIN and EXT are stepped over. 1; 0 at the end;
 * -EBADMSG when it is cut, is 0xc1 (never used) or counts more than there are bytes.
 */
int msgpack_next(struct msgpack *m, struct msgpack_value *out, struct err *e);

/* The same where one must be there: -EBADMSG at the end as well. */
int msgpack_need(struct msgpack *m, struct msgpack_value *out, struct err *e);

/* Appends the bytes of a STR, BIN or EXT; -EFBIG over `max`. The place stays. */
int msgpack_bytes(const struct msgpack *m, const struct msgpack_value *v, size_t max,
                  struct buf *out, struct err *e);

/* A reader of what an EXT or BIN holds, where that is MessagePack itself. */
void msgpack_enter(const struct msgpack *m, const struct msgpack_value *v,
                   struct msgpack *out);

#endif
