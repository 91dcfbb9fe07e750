/* SPDX-License-Identifier: MIT */
/* index/formats/npz/npz_member.h - the arrays of an .npz archive: headers and places. */
#ifndef UFS_INDEX_FORMATS_NPZ_NPZ_MEMBER_H
#define UFS_INDEX_FORMATS_NPZ_NPZ_MEMBER_H

#include "index/npy.h"

struct err;
struct source;
struct zip;
struct zip_entry;

/* An array and where it lies in the file. */
struct npz_array {
    struct npy_layout npy;
    uint64_t offset, length; /* of the elements; when packed: of the deflated member */
    uint64_t trailing;       /* bytes behind the elements, which nothing reads */
    bool packed;
    uint64_t plain; /* packed: bytes of the member when inflated, header and all */
    uint32_t crc;   /* packed: of these bytes */
};

/*
 * An .npy file: reads its header. -EBADMSG when the elements are not all there; errors of
 * npy_header_size() and npy_parse().
 */
int npy_file_read(struct source *s, struct npz_array *out, struct err *e);

/* The same for a member of an archive in `s`, stored or deflated. */
int npz_member_read(struct source *s, struct zip *z, const struct zip_entry *entry,
                    struct npz_array *out, struct err *e);

extern const struct format_writer writer_npz; /* npz_write.c */

#endif
