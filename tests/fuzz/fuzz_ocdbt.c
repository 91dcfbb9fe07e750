/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_ocdbt.c - any bytes as OCDBT's manifest, node and tree; checksums are set right. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/crc32c.h"
#include "base/endian.h"
#include "base/err.h"
#include "index/formats/orbax/ocdbt.h"
#include "index/formats/orbax/ocdbt_node.h"

enum { MEMORY = 64 << 20, KEYS = 4000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

static bool is_usual(int rc)
{
    return rc == 0 || rc == -EBADMSG || rc == -ENOTSUP || rc == -ENOMEM || rc == -EFBIG;
}

/* Length and checksum as they have to be, so that what is behind them is looked at. */
static void seal(unsigned char *data, size_t size)
{
    if (size < 18)
        return;
    put_le64(data + 4, size);
    put_le32(data + size - 4, crc32c(0, data, size - 4));
}

static void check_node(const unsigned char *data, size_t size)
{
    const struct ocdbt_file base = {
        .path = "ocdbt.process_0/d/x", .len = 19, .base_len = 16};
    struct arena *a = arena_new(MEMORY);
    struct ocdbt_node n;
    struct err e = {0};
    int rc = ocdbt_node_parse(a, data, size, &base, &n, &e);

    require(is_usual(rc), "node", &e);
    for (size_t i = 0; rc == 0 && i < n.entries; i++) {
        const struct ocdbt_entry *x = &n.entry[i];

        require(x->child_prefix <= x->key_len, "prefix", &e);
        if (x->is_inline && !n.plain)
            require(!range_outside(x->place.offset, x->place.length, size), "inline",
                    &e);
        if (!x->is_inline)
            require(x->place.file < n.files, "file", &e);
    }
    for (size_t i = 0; rc == 0 && i < n.files; i++)
        require(n.file[i].base_len <= n.file[i].len &&
                    n.file[i].base_len >= base.base_len &&
                    memcmp(n.file[i].path, base.path, base.base_len) == 0,
                "path", &e);
    arena_free(a);
}

/* All files are the input: nodes may lead to one another and to themselves. */
struct one_file {
    const unsigned char *data;
    size_t size;
    unsigned reads;
};

static int any_file(void *user, const char *path, size_t len, uint32_t *number,
                    struct err *e)
{
    (void)user;
    (void)e;
    *number = len > 0 ? (uint32_t)path[0] : 0;
    return 0;
}

static int read_file(void *user, uint32_t number, uint64_t off, size_t len, void *dst,
                     struct err *e)
{
    struct one_file *f = user;

    (void)number;
    if (range_outside(off, len, f->size) || f->reads++ > KEYS)
        return err_set(e, EBADMSG, "outside");
    memcpy(dst, f->data + off, len);
    return 0;
}

/* The first two bytes say where the root is; it starts there. */
static void check_tree(const unsigned char *data, size_t size)
{
    struct one_file f = {.data = data, .size = size};
    const struct ocdbt_io io = {.file = any_file, .read = read_file, .user = &f};
    struct ocdbt_manifest m = {.file = {.path = "d/x", .len = 3}};
    struct ocdbt *o = NULL;
    struct err e = {0};
    int rc;

    if (size < 3)
        return;
    m.height = data[0] % 4;
    m.offset = data[1];
    m.length = size - MIN(size, (size_t)m.offset);
    rc = ocdbt_open(&m, &io, &o, &e);
    require(is_usual(rc), "tree", &e);
    for (size_t i = 1; rc == 0 && i < ocdbt_count(o); i++) {
        const struct ocdbt_value *x = ocdbt_at(o, i - 1), *y = ocdbt_at(o, i);
        int order = memcmp(x->key, y->key, MIN(x->key_len, y->key_len));

        require(order < 0 || (order == 0 && x->key_len < y->key_len), "order", &e);
        require(ocdbt_lower_bound(o, y->key, y->key_len) == i, "search", &e);
    }
    ocdbt_free(o);
}

static void check_manifest(const unsigned char *data, size_t size)
{
    struct arena *a = arena_new(MEMORY);
    struct ocdbt_manifest m;
    struct err e = {0};
    int rc = ocdbt_manifest_parse(a, data, size, &m, &e);

    require(is_usual(rc), "manifest", &e);
    if (rc == 0 && !m.numbered && !m.empty)
        require(m.file.base_len <= m.file.len && m.offset + m.length >= m.offset,
                "root", &e);
    arena_free(a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE unsigned char *copy = malloc(size + 1);

    if (!copy)
        return 0;
    memcpy(copy, data, size);
    check_manifest(copy, size);
    check_node(copy, size);
    check_tree(copy, size);
    seal(copy, size);
    check_manifest(copy, size);
    check_node(copy, size);
    return 0;
}
