/* SPDX-License-Identifier: MIT */
/* cli/verify_archives.h - files that are zip archives: do their records have their CRC-32? */
#ifndef UFS_CLI_VERIFY_ARCHIVES_H
#define UFS_CLI_VERIFY_ARCHIVES_H

#include "cli/cli.h"

struct archives;

/*
 * The files of a checkpoint that begin as zip archives do (.pt, .npz). A file that holds
 * many archives, an item each (.distcp), is none as a whole: those are their codec's.
 */
int archives_new(struct reading *s, int64_t checkpoint, struct archives **out,
                 struct err *e);
void archives_free(struct archives *a); /* NULL is fine */
void archives_freep(struct archives **a);

/* Is the file with this number of the catalog one of them? */
bool archives_have(const struct archives *a, uint32_t file);

/*
 * Bytes [off, off + len) of one of them have been read for something else, and have this
 * CRC-32: they are not read again. Any thread.
 */
void archives_note(struct archives *a, uint32_t file, uint64_t off, uint64_t len,
                   uint32_t crc);

/* What was found in one archive. */
struct archive_finding {
    uint64_t records;  /* that have a CRC-32 */
    uint64_t bad;      /* of these: whose bytes have another */
    const char *first; /* why, of the first; NULL: none is bad */
};

/*
 * Reads what was not noted, and tells of each archive, in order of files, on this thread.
 * Where not one record holds, the writer left the sums out (torch: save.compute_crc32=False):
 * that is the caller's to judge. An archive that cannot be read is one bad record of none.
 */
typedef void archive_fn(void *user, const struct archive_finding *f);
int archives_check(struct archives *a, archive_fn *tell, void *user, struct err *e);

#endif
