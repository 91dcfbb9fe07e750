/* SPDX-License-Identifier: MIT */
/* remote/tar.h - the members of a tar archive as byte ranges of it. */
#ifndef UFS_REMOTE_TAR_H
#define UFS_REMOTE_TAR_H

#include "base/base.h"
#include "remote/listing.h"

struct err;
struct tar;

/*
 * Reads of the archive, at offsets that never decrease: *got is less than `len` only at
 * its end.
 */
typedef int tar_read_fn(void *user, uint64_t off, size_t len, void *dst, size_t *got,
                        struct err *e);

struct tar_member {
    const char *name; /* safe (store_name_is_safe), without "./" before or '/' behind */
    enum entry_kind kind; /* ENTRY_OTHER: a link, a device, ...: it has no bytes */
    uint64_t off, size;
};

/*
 * Reads all headers: old, ustar, GNU (long names, sizes in base 256) and pax. Refused
 * (-EBADMSG): a header whose checksum is wrong, members past the end of `size` (UINT64_MAX:
 * not known yet), names that are absolute or climb, a file with members below it;
 * (-ENOTSUP) sparse files and archives in several volumes; (-EFBIG) more than a million
 * members. Of members with one name the last counts, as for tar.
 */
int tar_read(tar_read_fn *fn, void *user, uint64_t size, struct tar **out,
             struct err *e);
void tar_free(struct tar *t); /* NULL is fine */

/* Members by name; directories that only other names tell of are no members. */
size_t tar_count(const struct tar *t);
const struct tar_member *tar_at(const struct tar *t, size_t i);

/* The first member whose name is not before `name`: tar_count() when there is none. */
size_t tar_lower_bound(const struct tar *t, const char *name);

/* For archives whose size was not known before: -EBADMSG when a member is not within it. */
int tar_check_size(const struct tar *t, uint64_t size, struct err *e);

/* How many members were there more than once. */
size_t tar_doubles(const struct tar *t);

/* Does it end as tar ends archives, with an empty block? Else it may be cut off. */
bool tar_is_ended(const struct tar *t);

/* Is this block (512 bytes) the header of a member, by its checksum? */
bool tar_sniff(const void *head, size_t len);

#endif
