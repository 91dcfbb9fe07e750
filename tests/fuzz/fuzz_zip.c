/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_zip.c - any bytes as a zip archive: members lie within it, and apart. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/torch/zip.h"
#include "remote/source.h"

enum { MAX_MEMBER = 1 << 20, MAX_RANGES = 64 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

struct range {
    uint64_t off, len;
};

/* Stored members share no byte. */
static void check_range(struct range *seen, size_t *n, struct range r)
{
    struct err e = {0};

    for (size_t i = 0; i < *n; i++)
        require(r.len == 0 || seen[i].len == 0 || r.off + r.len <= seen[i].off ||
                    seen[i].off + seen[i].len <= r.off,
                "members overlap", &e);
    if (*n < MAX_RANGES)
        seen[(*n)++] = r;
}

static void check_member(struct zip *z, const struct zip_entry *entry, uint64_t start,
                         uint64_t end, struct range *seen, size_t *n)
{
    CLEANUP_FREE void *data = NULL;
    struct err e = {0};
    uint64_t off = 0;
    size_t len = 0;
    int rc = zip_data_offset(z, entry, &off, &e);

    require(rc == 0 || rc == -EBADMSG || rc == -ENOTSUP, "zip_data_offset", &e);
    if (rc == 0) {
        require(entry->size == entry->stored_size, "sizes", &e);
        require(off >= start && off <= end && entry->size <= end - off, "outside", &e);
        check_range(seen, n, (struct range){off, entry->size});
    }
    rc = zip_read(z, entry, MAX_MEMBER, &data, &len, &e);
    require(rc == 0 || rc == -EBADMSG || rc == -EFBIG, "zip_read", &e);
    require(rc < 0 || len == entry->size, "length", &e);
}

/* The archive is what lies behind the first `skip` bytes. */
static void check(struct source *s, uint64_t skip)
{
    CLEANUP(zip_freep) struct zip *z = NULL;
    struct range seen[MAX_RANGES];
    struct err e = {0};
    size_t n = 0;
    int rc = zip_open(s, skip, s->size - skip, &z, &e);

    require(rc == 0 || rc == -EBADMSG, "zip_open", &e);
    for (size_t i = 0; rc == 0 && i < zip_count(z); i++) {
        const struct zip_entry *entry = zip_at(z, i);

        require(zip_find(z, entry->name) == entry, entry->name, &e);
        check_member(z, entry, skip, s->size, seen, &n);
    }
    if (rc == 0)
        zip_find_suffix(z, "/data.pkl");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP(source_putp) struct source *s = NULL;
    struct err e = {0};

    if (source_from_memory(data, size, false, "fuzz", &s, &e) < 0)
        return 0;
    check(s, 0);
    check(s, MIN(size, (size_t)7));
    return 0;
}
