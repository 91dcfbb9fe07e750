/* SPDX-License-Identifier: MIT */
/* tests/formats/ocdbt_build.h - writes stores of OCDBT for tests, honest ones and others. */
#ifndef UFS_TESTS_FORMATS_OCDBT_BUILD_H
#define UFS_TESTS_FORMATS_OCDBT_BUILD_H

#include <string.h>
#include <zstd.h>

#include "base/base.h"
#include "base/buf.h"
#include "base/crc32c.h"
#include "base/endian.h"

enum { OB_MANIFEST = 0x0cdb3a2a, OB_NODE = 0x0cdb20de };

/* What is put round each body. */
struct ob_record {
    uint32_t magic;
    unsigned version, compression; /* 1: zstd */
    size_t length_off;             /* added to the length that is written */
    bool bad_crc;
};

static inline void ob_seal(struct buf *out, const struct ob_record *r,
                           const struct buf *body)
{
    CLEANUP(buf_release) struct buf all = {0};
    unsigned char word[8];

    for (int i = 3; i >= 0; i--)
        buf_addc(&all, (char)(r->magic >> 8 * i));
    buf_add(&all, "\0\0\0\0\0\0\0\0", 8);
    buf_add_varint(&all, r->version);
    buf_add_varint(&all, r->compression);
    if (r->compression == 1) {
        size_t max = ZSTD_compressBound(body->len);
        CLEANUP_FREE char *packed = malloc(max);

        buf_add(&all, packed, ZSTD_compress(packed, max, body->data, body->len, 1));
    } else {
        buf_add(&all, body->data, body->len);
    }
    put_le64(word, all.len + 4 + r->length_off);
    memcpy(all.data + 4, word, 8);
    put_le32(word, crc32c(0, all.data, all.len) + r->bad_crc);
    buf_add(&all, word, 4);
    buf_add(out, all.data, all.len);
}

/* Paths of data files; none shares a prefix. `base`: bytes of it for nodes' own files. */
struct ob_file {
    const char *path;
    size_t base;
};

static inline void ob_files(struct buf *b, const struct ob_file *f, size_t n)
{
    buf_add_varint(b, n);
    for (size_t i = 1; i < n; i++)
        buf_add_varint(b, 0);
    for (size_t i = 0; i < n; i++)
        buf_add_varint(b, strlen(f[i].path));
    for (size_t i = 0; i < n; i++)
        buf_add_varint(b, f[i].base);
    for (size_t i = 0; i < n; i++)
        buf_adds(b, f[i].path);
}

/* A value (of a leaf) or a child: `text` inside the node, else a place in a file. */
struct ob_entry {
    const char *key; /* behind the prefix of the node, and what is shared */
    size_t shared;   /* bytes of the key before it that it starts with */
    const char *text;
    size_t text_len; /* 0: that of the text */
    unsigned file;
    uint64_t offset, length;
    size_t child_prefix;
};

static inline void ob_keys(struct buf *b, const struct ob_entry *x, size_t n,
                           unsigned height)
{
    buf_add_varint(b, n);
    for (size_t i = 1; i < n; i++)
        buf_add_varint(b, x[i].shared);
    for (size_t i = 0; i < n; i++)
        buf_add_varint(b, strlen(x[i].key));
    for (size_t i = 0; height > 0 && i < n; i++)
        buf_add_varint(b, x[i].child_prefix);
    for (size_t i = 0; i < n; i++)
        buf_adds(b, x[i].key);
}

static inline size_t ob_text_len(const struct ob_entry *x)
{
    return x->text_len ? x->text_len : strlen(x->text);
}

static inline void ob_leaf(struct buf *b, const struct ob_entry *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        buf_add_varint(b, x[i].text ? ob_text_len(&x[i]) : x[i].length);
    for (size_t i = 0; i < n; i++)
        buf_addc(b, x[i].text ? 0 : 1);
    for (size_t i = 0; i < n; i++)
        if (!x[i].text)
            buf_add_varint(b, x[i].file);
    for (size_t i = 0; i < n; i++)
        if (!x[i].text)
            buf_add_varint(b, x[i].offset);
    for (size_t i = 0; i < n; i++)
        if (x[i].text)
            buf_add(b, x[i].text, ob_text_len(&x[i]));
}

static inline void ob_inner(struct buf *b, const struct ob_entry *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        buf_add_varint(b, x[i].file);
    for (size_t i = 0; i < n; i++)
        buf_add_varint(b, x[i].offset);
    for (size_t i = 0; i < n; i++)
        buf_add_varint(b, x[i].length);
    for (size_t i = 0; i < 3 * n; i++)
        buf_add_varint(b, 0);
}

/* Appends a node to `out`; its first byte and length are for whoever refers to it. */
static inline void ob_node(struct buf *out, const struct ob_record *r, unsigned height,
                           const struct ob_file *f, size_t files,
                           const struct ob_entry *x, size_t n)
{
    CLEANUP(buf_release) struct buf body = {0};

    buf_addc(&body, (char)height);
    ob_files(&body, f, files);
    ob_keys(&body, x, n, height);
    if (height == 0)
        ob_leaf(&body, x, n);
    else
        ob_inner(&body, x, n);
    ob_seal(out, r, &body);
}

/* The root is bytes [offset, offset + length) of `file`. */
struct ob_manifest {
    unsigned kind, height, generation;
    struct ob_file file;
    uint64_t offset, length;
};

static inline void ob_manifest(struct buf *out, const struct ob_record *r,
                               const struct ob_manifest *m)
{
    CLEANUP(buf_release) struct buf body = {0};

    buf_adds(&body, "uuid-of-sixteen.");
    buf_add_varint(&body, m->kind);
    buf_add_varint(&body, 100);
    buf_add_varint(&body, 8 << 20);
    buf_addc(&body, 4);
    buf_add_varint(&body, 0);
    if (m->kind == 0) {
        ob_files(&body, &m->file, 1);
        buf_add_varint(&body, 1);
        buf_add_varint(&body, m->generation);
        buf_addc(&body, (char)m->height);
        buf_add_varint(&body, 0);
        buf_add_varint(&body, m->offset);
        buf_add_varint(&body, m->length);
        buf_add(&body, "\0\0\0\0\0\0\0\0\0\0\0", 11); /* statistics and time */
        buf_add_varint(&body, 0);
    }
    ob_seal(out, r, &body);
}

#endif
