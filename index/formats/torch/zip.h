/* SPDX-License-Identifier: MIT */
/* index/formats/torch/zip.h - stored members of a zip archive as byte ranges. */
#ifndef UFS_INDEX_FORMATS_ZIP_H
#define UFS_INDEX_FORMATS_ZIP_H

#include "base/base.h"

struct err;
struct source;
struct zip;

struct zip_entry {
    const char *name; /* NUL-terminated; names with NUL inside are refused */
    uint64_t size, stored_size;
    uint64_t header; /* byte of the local header, relative to the archive */
    uint64_t record; /* the same of its record in the directory */
    uint32_t crc;
    uint16_t method, flags; /* 0: stored, 8: deflated */
};

/*
 * Reads the central directory of the archive that is bytes [off, off + len) of the source
 * (zip64 too): one read of the tail, a second when the directory is longer. Refused
 * (-EBADMSG): encryption, several disks, names twice or climbing, entries outside the
 * archive or overlapping, a directory over 64 MiB or 1 M entries.
 */
int zip_open(struct source *s, uint64_t off, uint64_t len, struct zip **out,
             struct err *e);
void zip_free(struct zip *z);
void zip_freep(struct zip **z);

size_t zip_count(const struct zip *z);
const struct zip_entry *zip_at(const struct zip *z, size_t i);
const struct zip_entry *zip_find(const struct zip *z, const char *name);
/* The entry whose name ends in `suffix` ("/data.pkl"); NULL: none, or more than one. */
const struct zip_entry *zip_find_suffix(const struct zip *z, const char *suffix);

/*
 * The absolute offset in the source of a stored entry's bytes, from its local header,
 * which must agree in name and method. -ENOTSUP for a compressed entry.
 */
int zip_data_offset(struct zip *z, const struct zip_entry *entry, uint64_t *off,
                    struct err *e);

/* The same for an entry of any method: where its stored_size bytes start. */
int zip_packed_offset(struct zip *z, const struct zip_entry *entry, uint64_t *off,
                      struct err *e);

/* -EBADMSG in words when `crc`, that of the bytes from `off` of the source on, is not the
 * entry's. */
int zip_check_crc(const struct zip *z, const struct zip_entry *entry, uint64_t off,
                  uint32_t crc, struct err *e);

/*
 * The bytes of the source at which the entry's CRC-32 stands, little-endian: in the
 * directory, and in the local header or behind the data where it is there too.
 */
struct zip_crc_places {
    uint64_t at[3];
    unsigned n;
};
int zip_crc_places(struct zip *z, const struct zip_entry *entry,
                   struct zip_crc_places *out, struct err *e);

/* The whole of a small entry, inflated when deflated; -EFBIG over `max`. Caller frees. */
int zip_read(struct zip *z, const struct zip_entry *entry, size_t max, void **data,
             size_t *len, struct err *e);

#endif
