/* SPDX-License-Identifier: MIT */
/* tests/formats/layout_run.c - runs a layout over given tensors: short, slow, and right. */
#include "layout_run.h"

#include <blosc.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <zlib.h>

#include "base/endian.h"
#include "base/err.h"
#include "tests/unit/unit.h"

/* Counts place[] up by one in a box of these sizes; false behind its last element. */
static bool next_place(uint64_t *place, const uint64_t *size, uint32_t nd)
{
    while (nd-- > 0) {
        if (++place[nd] < size[nd])
            return true;
        place[nd] = 0;
    }
    return false;
}

static void take_box(const struct layout_piece *p, const struct layout_input *in,
                     const struct buf *bytes, char *dst)
{
    const struct layout_tensor *t = &in->tensor[p->tensor];
    unsigned unit = dtype_unit(t->dtype);
    uint64_t place[SHAPE_MAX_DIMS] = {0}, n = 0;
    struct shape units;
    struct err e = {0};

    assert_ok(shape_units(&t->shape, t->dtype, &units, &e), &e);
    assert_int_equal(units.nd, p->nd);
    do {
        uint64_t from = 0;

        for (uint32_t k = 0; k < p->nd; k++) {
            assert_true(p->start[k] + place[k] < units.dim[k]);
            from = from * units.dim[k] + p->start[k] + place[k];
        }
        assert_true((from + 1) * unit <= bytes[p->tensor].len);
        memcpy(dst + n, bytes[p->tensor].data + from * unit, unit);
        n += unit;
    } while (next_place(place, p->size, p->nd));
    assert_int_equal(n, p->len);
}

static void encode(const struct layout_file_info *f, struct buf *out)
{
    CLEANUP(buf_release) struct buf plain = *out;
    size_t room = plain.len + BLOSC_MAX_OVERHEAD;
    int len;

    *out = (struct buf){0};
    len = blosc_compress_ctx(5, BLOSC_SHUFFLE, f->type_size, plain.len, plain.data,
                             buf_grow(out, room), room, "lz4", 0, 1);
    assert_true(len > 0);
    out->len = (size_t)len;
}

void layout_run_file(const struct layout_file_info *f, const struct layout_input *in,
                     const struct buf *bytes, struct buf *out)
{
    uint64_t at = 0;
    char *dst = f->size ? buf_grow(out, f->size) : NULL;

    assert_true(f->size == 0 || dst);
    for (size_t i = 0; i < f->pieces; i++) {
        const struct layout_piece *p = &f->piece[i];

        assert_int_equal(p->at, at);
        at += p->len;
        if (p->kind == LAYOUT_LITERAL)
            memcpy(dst + p->at, p->data, p->len);
        else if (p->kind == LAYOUT_BOX)
            take_box(p, in, bytes, dst + p->at);
        else
            memset(dst + p->at, 0, p->len);
    }
    assert_int_equal(at, f->size);
    for (size_t i = 0; i < f->pieces; i++) {
        const struct layout_piece *p = &f->piece[i];

        if (p->kind == LAYOUT_CRC32)
            put_le32((unsigned char *)dst + p->at,
                     (uint32_t)crc32_z(0, (unsigned char *)dst + p->from, p->sum));
    }
    if (f->codec != LAYOUT_PLAIN)
        encode(f, out);
}

void layout_run(const struct layout *l, const struct layout_input *in,
                const struct buf *bytes, const struct made *to)
{
    struct layout_file_info f;
    char path[PATH_MAX];

    for (size_t i = 0; i < layout_files(l); i++) {
        CLEANUP(buf_release) struct buf file = {0};

        layout_file_info(l, i, &f);
        layout_run_file(&f, in, bytes, &file);
        made_file(to, f.path, file.data, file.len);
    }
    for (size_t i = 0; i < layout_directories(l); i++) {
        snprintf(path, sizeof path, "%s/%s", to->dir, layout_directory_at(l, i));
        mkdir(path, 0777);
    }
}
