/* SPDX-License-Identifier: MIT */
/* index/formats/torch/zip_write.h - zip archives of stored members as parts of a layout. */
#ifndef UFS_INDEX_FORMATS_TORCH_ZIP_WRITE_H
#define UFS_INDEX_FORMATS_TORCH_ZIP_WRITE_H

#include "base/base.h"
#include "base/buf.h"

struct err;
struct layout_file;

/*
 * An archive is written into a file of a layout, from where that one stands. Data of
 * members begin at multiples of `align` bytes (a power of two; of the archive, not of the
 * file), by padding in an extra field "FB" as PyTorch does it (caffe2/serialize/
 * inline_container.cc). ZIP64 fields only where a number needs them. Dates are 1980-01-01:
 * the same input gives the same bytes.
 */
struct zip_write {
    struct layout_file *file;
    uint64_t base; /* where the archive begins in the file */
    unsigned align;
    struct buf text; /* literal bytes that the file does not have yet */
    struct zip_written {
        size_t name, name_len; /* in `names` */
        uint64_t header, data, size;
        uint32_t crc;
        bool known; /* the checksum; else the engine fills it in */
    } * member;
    size_t members, cap;
    struct buf names;
};

/* `z` is {0} or was used before: memory is used again. */
void zip_write_begin(struct zip_write *z, struct layout_file *f, unsigned align);
void zip_write_release(struct zip_write *z);

/* A member of these bytes. -ENAMETOOLONG for names over 65535 bytes. */
int zip_write_literal(struct zip_write *z, const char *name, size_t name_len,
                      const void *data, size_t len, struct err *e);

/*
 * The header of a member of `size` bytes, which the caller then adds to the file by
 * layout_bytes() and layout_box(), all of them and nothing else.
 */
int zip_write_open(struct zip_write *z, const char *name, size_t name_len,
                   uint64_t size, struct err *e);

/* The directory. Bytes of the whole archive in *len. */
int zip_write_end(struct zip_write *z, uint64_t *len, struct err *e);

#endif
