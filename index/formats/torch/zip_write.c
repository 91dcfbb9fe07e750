/* SPDX-License-Identifier: MIT */
/* index/formats/torch/zip_write.c - local headers, data and the directory of an archive. */
#include "index/formats/torch/zip_write.h"

#include <errno.h>
#include <zlib.h>

#include "base/err.h"
#include "base/vec.h"
#include "index/layout.h"

enum {
    LOCAL_SIZE = 30, /* of a local header before the name (APPNOTE.TXT 4.3.7) */
    EXTRA_HEAD = 4,
    ZIP64_ID = 1,
    PADDING_ID = 0x4246, /* "FB" */
    OLD = 20,            /* the version that is needed to read it: 2.0 */
    NEW = 45,            /* 4.5: ZIP64 */
    UTF8_NAMES = 0x800,
    FIRST_DAY = 0x21, /* 1980-01-01 */
    MANY_MEMBERS = 0xffff,
};

static const uint64_t large = UINT32_MAX; /* from here on a number stands in ZIP64 */

static void add16(struct zip_write *z, uint64_t v)
{
    buf_addc(&z->text, (char)v);
    buf_addc(&z->text, (char)(v >> 8));
}

static void add32(struct zip_write *z, uint64_t v)
{
    add16(z, v);
    add16(z, v >> 16);
}

static void add64(struct zip_write *z, uint64_t v)
{
    add32(z, v);
    add32(z, v >> 32);
}

/* Bytes of the archive so far. */
static uint64_t here(const struct zip_write *z)
{
    return layout_file_at(z->file) - z->base + z->text.len;
}

static int flush(struct zip_write *z, struct err *e)
{
    int ret;

    if (buf_failed(&z->text))
        return err_set(e, -buf_failed(&z->text), "a directory of more than 1 GiB");
    ret = layout_bytes(z->file, z->text.data, z->text.len, e);
    buf_clear(&z->text);
    return ret;
}

void zip_write_begin(struct zip_write *z, struct layout_file *f, unsigned align)
{
    z->file = f;
    z->base = layout_file_at(f);
    z->align = align;
    z->members = 0;
    buf_clear(&z->text);
    buf_clear(&z->names);
}

void zip_write_release(struct zip_write *z)
{
    buf_release(&z->text);
    buf_release(&z->names);
    free(z->member);
    *z = (struct zip_write){0};
}

static int add_member(struct zip_write *z, const char *name, size_t len, uint64_t size,
                      struct zip_written **out, struct err *e)
{
    struct zip_written *m;

    if (len > UINT16_MAX)
        return err_set(e, ENAMETOOLONG, "a name of %zu bytes in a zip archive", len);
    if (!VEC_ROOM(z->member, z->members, z->cap))
        return err_nomem(e);
    m = &z->member[z->members];
    *m = (struct zip_written){
        .name = z->names.len, .name_len = len, .header = here(z), .size = size};
    if (buf_add(&z->names, name, len) < 0)
        return err_nomem(e);
    z->members++;
    *out = m;
    return 0;
}

/* The four bytes of a checksum: what they are, or where the engine is to put them. */
static int add_crc(struct zip_write *z, const struct zip_written *m, struct err *e)
{
    if (m->known) {
        add32(z, m->crc);
        return 0;
    }
    TRY(flush(z, e));
    return layout_crc32(z->file, z->base + m->data, m->size, e);
}

/* Extra fields of a local header, so long that data is aligned. */
static uint64_t padding_of(const struct zip_write *z, const struct zip_written *m)
{
    uint64_t fixed = LOCAL_SIZE + m->name_len + (m->size >= large ? 20 : 0);
    uint64_t end = m->header + fixed;

    if (z->align <= 1)
        return 0;
    return EXTRA_HEAD + (-(end + EXTRA_HEAD) & (z->align - 1));
}

static void add_extra(struct zip_write *z, const struct zip_written *m, uint64_t pad)
{
    if (m->size >= large) {
        add16(z, ZIP64_ID);
        add16(z, 16);
        add64(z, m->size);
        add64(z, m->size);
    }
    if (pad) {
        add16(z, PADDING_ID);
        add16(z, pad - EXTRA_HEAD);
        for (uint64_t i = EXTRA_HEAD; i < pad; i++)
            buf_addc(&z->text, 'Z');
    }
}

/* What local and central headers have in common: flags, method, time, date. */
static void add_common(struct zip_write *z)
{
    add16(z, UTF8_NAMES);
    add16(z, 0); /* stored */
    add16(z, 0);
    add16(z, FIRST_DAY);
}

static int add_local(struct zip_write *z, struct zip_written *m, struct err *e)
{
    uint64_t pad = padding_of(z, m), zip64 = m->size >= large ? 20 : 0;

    m->data = m->header + LOCAL_SIZE + m->name_len + zip64 + pad;
    add32(z, 0x04034b50);
    add16(z, zip64 ? NEW : OLD);
    add_common(z);
    TRY(add_crc(z, m, e));
    add32(z, MIN(m->size, large));
    add32(z, MIN(m->size, large));
    add16(z, m->name_len);
    add16(z, zip64 + pad);
    buf_add(&z->text, z->names.data + m->name, m->name_len);
    add_extra(z, m, pad);
    return 0;
}

int zip_write_literal(struct zip_write *z, const char *name, size_t name_len,
                      const void *data, size_t len, struct err *e)
{
    struct zip_written *m;

    TRY(add_member(z, name, name_len, len, &m, e));
    m->known = true;
    m->crc = (uint32_t)crc32_z(0, data, len);
    TRY(add_local(z, m, e));
    buf_add(&z->text, data, len);
    return 0;
}

int zip_write_open(struct zip_write *z, const char *name, size_t name_len,
                   uint64_t size, struct err *e)
{
    struct zip_written *m;

    TRY(add_member(z, name, name_len, size, &m, e));
    m->known = size == 0; /* zero, then */
    TRY(add_local(z, m, e));
    return flush(z, e);
}

/* ---- the directory ---- */

static int add_central(struct zip_write *z, const struct zip_written *m, struct err *e)
{
    bool sizes = m->size >= large, offset = m->header >= large;
    unsigned extra = (sizes ? 16 : 0) + (offset ? 8 : 0);

    add32(z, 0x02014b50);
    add16(z, extra ? NEW : OLD); /* made by, under DOS */
    add16(z, extra ? NEW : OLD);
    add_common(z);
    TRY(add_crc(z, m, e));
    add32(z, MIN(m->size, large));
    add32(z, MIN(m->size, large));
    add16(z, m->name_len);
    add16(z, extra ? EXTRA_HEAD + extra : 0);
    add16(z, 0); /* comment */
    add16(z, 0); /* disk */
    add16(z, 0);
    add32(z, 0); /* attributes */
    add32(z, MIN(m->header, large));
    buf_add(&z->text, z->names.data + m->name, m->name_len);
    if (extra) {
        add16(z, ZIP64_ID);
        add16(z, extra);
    }
    if (sizes) {
        add64(z, m->size);
        add64(z, m->size);
    }
    if (offset)
        add64(z, m->header);
    return 0;
}

static void add_end64(struct zip_write *z, uint64_t start, uint64_t end)
{
    add32(z, 0x06064b50);
    add64(z, 44); /* bytes behind this number */
    add16(z, NEW);
    add16(z, NEW);
    add32(z, 0);
    add32(z, 0);
    add64(z, z->members);
    add64(z, z->members);
    add64(z, end - start);
    add64(z, start);
    add32(z, 0x07064b50); /* where the record is */
    add32(z, 0);
    add64(z, end);
    add32(z, 1);
}

int zip_write_end(struct zip_write *z, uint64_t *len, struct err *e)
{
    uint64_t start = here(z), end, many;

    for (size_t i = 0; i < z->members; i++)
        TRY(add_central(z, &z->member[i], e));
    end = here(z);
    many = MIN(z->members, (size_t)MANY_MEMBERS);
    if (many == MANY_MEMBERS || start >= large || end - start >= large)
        add_end64(z, start, end);
    add32(z, 0x06054b50);
    add16(z, 0);
    add16(z, 0);
    add16(z, many);
    add16(z, many);
    add32(z, MIN(end - start, large));
    add32(z, MIN(start, large));
    add16(z, 0);
    *len = here(z);
    return flush(z, e);
}
