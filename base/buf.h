/* SPDX-License-Identifier: MIT */
/* base/buf.h - bytes that grow up to a ceiling. */
#ifndef UFS_BASE_BUF_H
#define UFS_BASE_BUF_H

#include "base/base.h"

/*
 * `struct buf b = {.max = CEILING};` is an empty buffer (max 0: 1 GiB). After a failed
 * add the buffer keeps what it had and every later add fails too: check once at the end
 * with buf_failed().
 */
struct buf {
    char *data; /* NUL behind the last byte once anything was added */
    size_t len, cap, max;
    int failed; /* 0, ENOMEM or EFBIG */
};

void buf_release(struct buf *b);

/* Empties it and keeps the memory. */
void buf_clear(struct buf *b);

/* 0, -ENOMEM or -EFBIG (over the ceiling). */
int buf_add(struct buf *b, const void *data, size_t len);
int buf_adds(struct buf *b, const char *text);
int buf_addc(struct buf *b, char c);
int buf_addf(struct buf *b, const char *fmt, ...) PRINTF(2, 3);

/* LEB128: seven bits a byte, low first. */
int buf_add_varint(struct buf *b, uint64_t v);

/* Appends a JSON string with its quotes; invalid UTF-8 bytes become U+FFFD. */
int buf_add_json(struct buf *b, const char *text, size_t len);

/* Reserves `len` bytes at the end (uninitialised) and returns them, or NULL. */
void *buf_grow(struct buf *b, size_t len);

static inline int buf_failed(const struct buf *b)
{
    return -b->failed;
}

/* Takes the bytes out; the caller frees them. NULL after a failed add. */
char *buf_steal(struct buf *b, size_t *len);

/* Signed numbers for varints: small ones of either sign are short. */
static inline uint64_t zigzag(int64_t v)
{
    return (uint64_t)v << 1 ^ (v < 0 ? UINT64_MAX : 0);
}

static inline int64_t unzigzag(uint64_t v)
{
    return (int64_t)(v >> 1 ^ (v & 1 ? UINT64_MAX : 0));
}

/* Decodes a varint at *pos of data[0..len); false at a bad or cut one. */
bool varint_get(const unsigned char *data, size_t len, size_t *pos, uint64_t *out);

#endif
