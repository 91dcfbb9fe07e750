/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_checksum.c - do the records of a torch.save blob have their CRC-32? */
#include <errno.h>

#include "base/crc32.h"
#include "base/err.h"
#include "index/formats/torch/torch_zip.h"
#include "index/formats/torch/zip.h"
#include "remote/source.h"

enum { READ_STEP = 256 << 10, METHOD_STORED = 0 };

static int crc_of(struct source *src, uint64_t off, uint64_t len, uint32_t *out,
                  struct err *e)
{
    CLEANUP_FREE unsigned char *data = malloc(READ_STEP);
    uint32_t crc = 0;

    if (!data)
        return err_nomem(e);
    for (uint64_t at = 0; at < len; at += READ_STEP) {
        size_t n = (size_t)MIN(len - at, (uint64_t)READ_STEP);
        int rc = source_read(src, off + at, n, data, e);

        if (rc < 0)
            return rc;
        crc = crc32_ieee(crc, data, n);
    }
    *out = crc;
    return 0;
}

static int check_entry(struct source *src, struct zip *zip,
                       const struct zip_entry *entry, struct err *e)
{
    uint32_t crc = 0;
    uint64_t off;
    int rc = zip_data_offset(zip, entry, &off, e);

    if (rc == 0)
        rc = crc_of(src, off, entry->size, &crc, e);
    if (rc == 0 && crc != entry->crc)
        return err_set(e, EBADMSG,
                       "%s, record %s at byte %" PRIu64
                       ": its CRC-32 is %08x, the archive says %08x",
                       src->name, entry->name, off, crc, entry->crc);
    return rc;
}

int torch_zip_checksums(struct source *src, uint64_t off, uint64_t len, struct err *e)
{
    CLEANUP(zip_freep) struct zip *zip = NULL;
    int rc = zip_open(src, off, len, &zip, e), checked = 0;

    for (size_t i = 0; rc == 0 && i < zip_count(zip); i++) {
        const struct zip_entry *entry = zip_at(zip, i);

        if (entry->method != METHOD_STORED || entry->size == 0)
            continue; /* inflating checks the others */
        rc = check_entry(src, zip, entry, e);
        checked = 1;
    }
    return rc < 0 ? rc : checked;
}
