/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_checksum.c - do the records of a torch.save blob have their CRC-32? */
#include <errno.h>

#include "base/crc32.h"
#include "base/err.h"
#include "index/formats/torch/torch_zip.h"
#include "index/formats/torch/zip.h"
#include "remote/source.h"

enum { READ_STEP = 256 << 10, METHOD_STORED = 0, SMALL_RECORD = 4096 };

/* Bytes [off, off + n) of the source, which come in order, are at hand. */
static void show(struct chunk_look *look, uint64_t off, const unsigned char *data,
                 size_t n)
{
    uint64_t from = MAX(off, look->off + look->seen);
    uint64_t end = MIN(off + n, look->off + look->len);

    if (from != look->off + look->seen || from >= end)
        return;
    look->see(look->user, data + (from - off), (size_t)(end - from));
    look->seen += end - from;
}

/* Steps through the record must not cut a unit of what is looked for. */
static bool suits(const struct chunk_look *look, uint64_t off)
{
    return look && look->off >= off && (look->off - off) % look->unit == 0 &&
           READ_STEP % look->unit == 0;
}

static int crc_of(struct source *src, uint64_t off, uint64_t len,
                  struct chunk_look *look, uint32_t *out, struct err *e)
{
    CLEANUP_FREE unsigned char *data = malloc((size_t)MIN(len, (uint64_t)READ_STEP));
    uint32_t crc = 0;

    if (!data)
        return err_nomem(e);
    for (uint64_t at = 0; at < len; at += READ_STEP) {
        size_t n = (size_t)MIN(len - at, (uint64_t)READ_STEP);

        TRY(source_read(src, off + at, n, data, e));
        crc = crc32_zip(crc, data, n);
        if (suits(look, off))
            show(look, off + at, data, n);
    }
    *out = crc;
    return 0;
}

static int check_entry(struct source *src, struct zip *zip,
                       const struct zip_entry *entry, struct chunk_look *look,
                       struct err *e)
{
    uint32_t crc = 0;
    uint64_t off;
    int rc = zip_data_offset(zip, entry, &off, e);

    if (rc == 0)
        rc = crc_of(src, off, entry->size, look, &crc, e);
    return rc == 0 ? zip_check_crc(zip, entry, off, crc, e) : rc;
}

int torch_zip_checksums(struct source *src, uint64_t off, uint64_t len,
                        struct chunk_look *look, struct err *e)
{
    CLEANUP(zip_freep) struct zip *zip = NULL;
    int rc = zip_open(src, off, len, &zip, e), checked = 0;

    for (size_t i = 0; rc == 0 && i < zip_count(zip); i++) {
        const struct zip_entry *entry = zip_at(zip, i);

        if (entry->method != METHOD_STORED || entry->size == 0)
            continue; /* inflating checks the others */
        rc = check_entry(src, zip, entry, look, e);
        checked = 1;
    }
    return rc < 0 ? rc : checked;
}

/* Does a record beside this one hold? Small ones tell: version, byteorder. */
static bool has_checksums(struct source *src, struct zip *zip,
                          const struct zip_entry *but)
{
    for (size_t i = 0; i < zip_count(zip); i++) {
        const struct zip_entry *entry = zip_at(zip, i);
        struct err why = {0};

        if (entry != but && entry->method == METHOD_STORED && entry->size > 0 &&
            entry->size <= SMALL_RECORD &&
            check_entry(src, zip, entry, NULL, &why) == 0)
            return true;
    }
    return false;
}

int torch_zip_check_record(struct source *src, struct zip *zip,
                           const struct zip_entry *entry, struct err *e)
{
    struct err why = {0};

    if (entry->method != METHOD_STORED || entry->size == 0 ||
        check_entry(src, zip, entry, NULL, &why) == 0)
        return 0;
    if (why.code == EBADMSG && !has_checksums(src, zip, entry))
        return 0;
    return err_copy(e, &why);
}
