/* SPDX-License-Identifier: MIT */
/* index/formats/torch/zip.c - the central directory of a zip archive, checked, and its members. */
#include "index/formats/torch/zip.h"

#include <errno.h>
#include <string.h>
#include <zlib.h>

#include "base/checked.h"
#include "base/crc32.h"
#include "base/endian.h"
#include "base/err.h"
#include "remote/source.h"

enum {
    LOCAL_SIZE = 30,
    CENTRAL_SIZE = 46,
    END_SIZE = 22,
    END64_SIZE = 56,
    LOCATOR_SIZE = 20,
    SHORT_TAIL = 4096, /* the archives inside .distcp files have a few entries */
    LONG_TAIL = 65535 + END_SIZE + LOCATOR_SIZE + END64_SIZE,
    MAX_DIRECTORY = 64 << 20,
    MAX_ENTRIES = 1000000,
    EXTRA_ZIP64 = 1,
    /* Metadata that grows more than this is a bomb: real pickles stay under 1:30. */
    MAX_RATIO = 200,
    RATIO_FREE = 1 << 20, /* so much may come out of anything */
};

#define SIGNATURE_LOCAL UINT32_C(0x04034b50)
#define SIGNATURE_CENTRAL UINT32_C(0x02014b50)
#define SIGNATURE_END UINT32_C(0x06054b50)
#define SIGNATURE_END64 UINT32_C(0x06064b50)
#define SIGNATURE_DESCRIPTOR UINT32_C(0x08074b50)
#define SIGNATURE_LOCATOR UINT32_C(0x07064b50)

enum zip_flags {
    FLAG_ENCRYPTED = 1 << 0,
    FLAG_DESCRIPTOR = 1 << 3, /* sizes follow the data, the local header has none */
    FLAG_PATCH = 1 << 5,
    FLAG_STRONG = 1 << 6,
    FLAG_MASKED = 1 << 13 /* encrypted directory */
};

enum {
    DESCRIPTOR = 16,     /* bytes of most data descriptors, */
    DESCRIPTOR_MIN = 12, /* and of those without a signature */
    READ_STEP = 256 << 10,
    CHECK_MAX = 64 << 20,
};

enum zip_method { METHOD_STORED = 0, METHOD_DEFLATED = 8 };

/* `limit`: where the next entry or the directory starts. */
struct member {
    struct zip_entry entry; /* first: callers hold pointers to it */
    uint64_t limit;
};

struct zip {
    struct source *src;
    uint64_t off, len; /* the archive in the source */
    struct member *member;
    size_t count;
    struct member **by_name;
    char *names;
};

/* The last bytes of the archive, while its end record is looked for. */
struct tail {
    unsigned char *data;
    size_t len;
    uint64_t start; /* in the archive */
};

/* What the end records say. */
struct directory {
    uint64_t offset, size, entries;
    uint64_t end; /* where the first end record stands */
};

static int bad(const struct zip *z, struct err *e, const char *why)
{
    return err_set(e, EBADMSG, "%s, zip at byte %" PRIu64 ": %s", z->src->name, z->off,
                   why);
}

static int read_at(const struct zip *z, uint64_t at, size_t len, void *dst,
                   struct err *e)
{
    if (range_outside(at, len, z->len))
        return bad(z, e, "a record outside the archive");
    return source_read(z->src, z->off + at, len, dst, e);
}

static int tail_read(const struct zip *z, size_t want, struct tail *t, struct err *e)
{
    size_t len = (size_t)MIN((uint64_t)want, z->len);

    free(t->data);
    t->data = malloc(len + 1);
    if (!t->data)
        return err_nomem(e);
    t->len = len;
    t->start = z->len - len;
    return read_at(z, t->start, len, t->data, e);
}

/*
 * The last end record whose comment reaches exactly to the end of the archive; readers that
 * disagree about which record counts are how archives with two faces are made. Where there is
 * none, bytes follow that are no part of it (copies in whole blocks leave zeros): then it is
 * the last one, as for miniz, which torch.load reads with, and for Python's zipfile.
 */
static const unsigned char *find_end(const struct tail *t)
{
    const unsigned char *last = NULL;

    for (size_t i = t->len; i >= END_SIZE; i--) {
        const unsigned char *p = t->data + i - END_SIZE;

        if (get_le32(p) != SIGNATURE_END || get_le16(p + 20) > t->len - i)
            continue;
        if (get_le16(p + 20) == t->len - i)
            return p;
        last = last ? last : p;
    }
    return last;
}

static int parse_end64(const struct zip *z, const unsigned char *p,
                       const struct directory *end, struct directory *d, struct err *e)
{
    if (get_le32(p) != SIGNATURE_END64)
        return bad(z, e, "the zip64 end record is missing");
    if (d->end + 12 + get_le64(p + 4) != end->end - LOCATOR_SIZE)
        return bad(z, e, "the zip64 end record has a wrong length");
    if (get_le32(p + 16) != 0 || get_le32(p + 20) != 0 ||
        get_le64(p + 24) != get_le64(p + 32))
        return bad(z, e, "an archive of several disks");
    d->entries = get_le64(p + 32);
    d->size = get_le64(p + 40);
    d->offset = get_le64(p + 48);
    if ((end->entries != UINT16_MAX && end->entries != d->entries) ||
        (end->size != UINT32_MAX && end->size != d->size) ||
        (end->offset != UINT32_MAX && end->offset != d->offset))
        return bad(z, e, "the two end records differ");
    return 0;
}

/* The zip64 end record, when a locator stands before the end record. */
static int read_end64(const struct zip *z, const struct tail *t, struct directory *d,
                      struct err *e)
{
    const unsigned char *locator = NULL;
    bool needed =
        d->entries == UINT16_MAX || d->size == UINT32_MAX || d->offset == UINT32_MAX;
    struct directory found = {0};
    unsigned char record[END64_SIZE];

    if (d->end - t->start >= LOCATOR_SIZE)
        locator = t->data + (d->end - t->start - LOCATOR_SIZE);
    if (!locator || get_le32(locator) != SIGNATURE_LOCATOR)
        return needed ? bad(z, e, "the zip64 end record is missing") : 0;
    if (get_le32(locator + 4) != 0 || get_le32(locator + 16) > 1)
        return bad(z, e, "an archive of several disks");
    found.end = get_le64(locator + 8);
    if (range_outside(found.end, END64_SIZE, d->end - LOCATOR_SIZE))
        return bad(z, e, "the zip64 end record lies outside the archive");
    if (found.end >= t->start)
        memcpy(record, t->data + (found.end - t->start), sizeof record);
    else
        TRY(read_at(z, found.end, sizeof record, record, e));
    TRY(parse_end64(z, record, d, &found, e));
    *d = found;
    return 0;
}

static int read_end(const struct zip *z, struct tail *t, struct directory *d,
                    struct err *e)
{
    const unsigned char *p;

    TRY(tail_read(z, SHORT_TAIL, t, e));
    p = find_end(t);
    if ((!p || p - t->data < LOCATOR_SIZE) && z->len > t->len) {
        TRY(tail_read(z, LONG_TAIL, t, e));
        p = find_end(t);
    }
    if (!p)
        return bad(z, e, "no end of central directory (cut, or no zip archive)");
    if (get_le16(p + 4) != 0 || get_le16(p + 6) != 0 ||
        get_le16(p + 8) != get_le16(p + 10))
        return bad(z, e, "an archive of several disks");
    d->end = t->start + (uint64_t)(p - t->data);
    d->entries = get_le16(p + 10);
    d->size = get_le32(p + 12);
    d->offset = get_le32(p + 16);
    return read_end64(z, t, d, e);
}

static int check_directory(const struct zip *z, const struct directory *d,
                           struct err *e)
{
    if (range_outside(d->offset, d->size, d->end) || d->offset + d->size != d->end)
        return bad(z, e, "the central directory is not where the end record says");
    if (d->size > MAX_DIRECTORY || d->entries > MAX_ENTRIES)
        return bad(z, e, "the central directory is too large");
    if (d->entries * CENTRAL_SIZE > d->size)
        return bad(z, e, "the central directory has fewer entries than declared");
    return 0;
}

/*
 * Values of 0xffffffff are in the zip64 extra field, in this order and only those. Less
 * than four bytes at the end of the extras are padding that some writers leave.
 */
static int apply_zip64(const struct zip *z, const unsigned char *extra, size_t len,
                       struct zip_entry *entry, struct err *e)
{
    uint64_t *value[] = {&entry->size, &entry->stored_size, &entry->header};
    size_t field = 0;

    for (size_t at = 0; len - at >= 4; at += 4 + field) {
        const unsigned char *p = extra + at + 4, *end;

        field = get_le16(extra + at + 2);
        if (field > len - at - 4)
            return bad(z, e, "a damaged extra field");
        end = p + field;
        if (get_le16(extra + at) != EXTRA_ZIP64)
            continue;
        for (size_t i = 0; i < ARRAY_SIZE(value); i++) {
            if (*value[i] != UINT32_MAX)
                continue;
            if (end - p < 8)
                return bad(z, e, "a short zip64 field");
            *value[i] = get_le64(p);
            p += 8;
        }
        return 0;
    }
    if (entry->size == UINT32_MAX || entry->stored_size == UINT32_MAX ||
        entry->header == UINT32_MAX)
        return bad(z, e, "a zip64 entry without its field");
    return 0;
}

/*
 * Names never become paths, but one that climbs is no honest archive's. One that begins with
 * '/' may be: numpy.savez takes any key.
 */
static bool name_is_sound(const char *name, size_t len)
{
    if (len == 0 || memchr(name, '\0', len) || memchr(name, '\\', len))
        return false;
    for (size_t i = 0; i < len;) {
        const char *slash = memchr(name + i, '/', len - i);
        size_t part = (slash ? (size_t)(slash - name) : len) - i;

        if (part == 2 && name[i] == '.' && name[i + 1] == '.')
            return false;
        i += part + 1;
    }
    return true;
}

/* One entry at p; `left` bytes of the directory are there. Returns its length or < 0. */
static int64_t parse_entry(struct zip *z, const unsigned char *p, size_t left,
                           struct member *m, char **names, struct err *e)
{
    struct zip_entry *entry = &m->entry;
    size_t name_len, extra_len, len;

    if (left < CENTRAL_SIZE || get_le32(p) != SIGNATURE_CENTRAL)
        return bad(z, e, "a damaged central directory");
    name_len = get_le16(p + 28);
    extra_len = get_le16(p + 30);
    len = CENTRAL_SIZE + name_len + extra_len + get_le16(p + 32);
    if (len > left)
        return bad(z, e, "a damaged central directory");
    *entry = (struct zip_entry){
        .name = *names,
        .size = get_le32(p + 24),
        .stored_size = get_le32(p + 20),
        .header = get_le32(p + 42),
        .crc = get_le32(p + 16),
        .method = get_le16(p + 10),
        .flags = get_le16(p + 8),
    };
    if (entry->flags & (FLAG_ENCRYPTED | FLAG_PATCH | FLAG_STRONG | FLAG_MASKED))
        return bad(z, e, "an encrypted or patched entry");
    if (get_le16(p + 34) != 0)
        return bad(z, e, "an archive of several disks");
    if (!name_is_sound((const char *)p + CENTRAL_SIZE, name_len))
        return bad(z, e, "an unsafe entry name");
    memcpy(*names, p + CENTRAL_SIZE, name_len);
    *names += name_len + 1; /* the NUL is there: calloc */
    TRY(apply_zip64(z, p + CENTRAL_SIZE + name_len, extra_len, entry, e));
    if (entry->method == METHOD_STORED && entry->size != entry->stored_size)
        return bad(z, e, "a stored entry of two sizes");
    return (int64_t)len;
}

static int parse_directory(struct zip *z, const struct directory *d,
                           const unsigned char *data, struct err *e)
{
    char *names;
    size_t at = 0;

    z->names = calloc(1, d->size + d->entries + 1);
    z->member = calloc(d->entries + 1, sizeof *z->member);
    z->by_name = calloc(d->entries + 1, sizeof *z->by_name);
    if (!z->names || !z->member || !z->by_name)
        return err_nomem(e);
    names = z->names;
    for (; z->count < d->entries; z->count++) {
        int64_t len = parse_entry(z, data + at, (size_t)d->size - at,
                                  &z->member[z->count], &names, e);

        if (len < 0)
            return (int)len;
        z->member[z->count].entry.record = d->offset + at;
        at += (size_t)len;
    }
    return at == d->size ? 0 : bad(z, e, "more in the central directory than declared");
}

static int compare_headers(const void *a, const void *b)
{
    const struct member *x = *(struct member *const *)a,
                        *y = *(struct member *const *)b;

    return x->entry.header < y->entry.header ? -1 : x->entry.header > y->entry.header;
}

static int compare_names(const void *a, const void *b)
{
    const struct member *x = *(struct member *const *)a,
                        *y = *(struct member *const *)b;

    return strcmp(x->entry.name, y->entry.name);
}

/* Gives each entry its limit; entries that reach into each other are refused. */
static int check_places(struct zip *z, uint64_t directory, struct err *e)
{
    struct member **sorted = z->by_name; /* for now in order of the headers */

    qsort(sorted, z->count, sizeof(struct member *), compare_headers);
    for (size_t i = 0; i < z->count; i++) {
        struct member *m = sorted[i];
        uint64_t least = LOCAL_SIZE + strlen(m->entry.name);

        m->limit = i + 1 < z->count ? sorted[i + 1]->entry.header : directory;
        if (m->entry.header > m->limit || least > m->limit - m->entry.header ||
            m->entry.stored_size > m->limit - m->entry.header - least)
            return bad(z, e, "entries that overlap or lie outside the archive");
    }
    return 0;
}

static int check_members(struct zip *z, uint64_t directory, struct err *e)
{
    for (size_t i = 0; i < z->count; i++)
        z->by_name[i] = &z->member[i];
    TRY(check_places(z, directory, e));
    qsort(z->by_name, z->count, sizeof(struct member *), compare_names);
    for (size_t i = 1; i < z->count; i++) {
        if (compare_names(&z->by_name[i - 1], &z->by_name[i]) == 0)
            return bad(z, e, "a name twice");
    }
    return 0;
}

static int load(struct zip *z, struct err *e)
{
    CLEANUP_FREE unsigned char *own = NULL;
    struct tail t = {0};
    struct directory d = {0};
    const unsigned char *data = NULL;
    int rc = read_end(z, &t, &d, e);

    if (rc == 0)
        rc = check_directory(z, &d, e);
    if (rc == 0 && d.offset >= t.start) {
        data = t.data + (d.offset - t.start);
    } else if (rc == 0) {
        data = own = malloc(d.size + 1);
        rc = own ? read_at(z, d.offset, (size_t)d.size, own, e) : err_nomem(e);
    }
    if (rc == 0)
        rc = parse_directory(z, &d, data, e);
    if (rc == 0)
        rc = check_members(z, d.offset, e);
    free(t.data);
    return rc;
}

int zip_open(struct source *s, uint64_t off, uint64_t len, struct zip **out,
             struct err *e)
{
    CLEANUP(zip_freep) struct zip *z = NULL;

    if (range_outside(off, len, s->size))
        return err_set(e, EBADMSG,
                       "%s: a zip at bytes %" PRIu64 "+%" PRIu64 " of %" PRIu64,
                       s->name, off, len, s->size);
    z = calloc(1, sizeof *z);
    if (!z)
        return err_nomem(e);
    z->src = source_get(s);
    z->off = off;
    z->len = len;
    TRY(load(z, e));
    *out = steal(&z);
    return 0;
}

void zip_free(struct zip *z)
{
    if (!z)
        return;
    source_put(z->src);
    free(z->member);
    free(z->by_name);
    free(z->names);
    free(z);
}

void zip_freep(struct zip **z)
{
    zip_free(*z);
    *z = NULL;
}

size_t zip_count(const struct zip *z)
{
    return z->count;
}

const struct zip_entry *zip_at(const struct zip *z, size_t i)
{
    return &z->member[i].entry;
}

const struct zip_entry *zip_find(const struct zip *z, const char *name)
{
    size_t low = 0, high = z->count;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int order = strcmp(name, z->by_name[mid]->entry.name);

        if (order == 0)
            return &z->by_name[mid]->entry;
        if (order < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

const struct zip_entry *zip_find_suffix(const struct zip *z, const char *suffix)
{
    const struct zip_entry *found = NULL;
    size_t len = strlen(suffix);

    for (size_t i = 0; i < z->count; i++) {
        const struct zip_entry *entry = &z->member[i].entry;
        size_t name_len = strlen(entry->name);

        if (name_len < len || strcmp(entry->name + name_len - len, suffix) != 0)
            continue;
        if (found)
            return NULL;
        found = entry;
    }
    return found;
}

static int entry_error(const struct zip *z, const struct zip_entry *entry, int code,
                       struct err *e, const char *why)
{
    return err_set(e, code, "%s, zip at byte %" PRIu64 ", entry %.200s: %s",
                   z->src->name, z->off, entry->name, why);
}

/* Compares the local header with the directory, which is what counts. */
static int check_local(const struct zip *z, const struct zip_entry *entry,
                       const unsigned char *p, struct err *e)
{
    size_t name_len = strlen(entry->name);
    uint32_t stored = get_le32(p + 18), size = get_le32(p + 22);

    if (get_le32(p) != SIGNATURE_LOCAL)
        return entry_error(z, entry, EBADMSG, e, "no local header at its place");
    if (get_le16(p + 26) != name_len ||
        memcmp(p + LOCAL_SIZE, entry->name, name_len) != 0)
        return entry_error(z, entry, EBADMSG, e, "the local header has another name");
    if (get_le16(p + 8) != entry->method || (get_le16(p + 6) & FLAG_ENCRYPTED))
        return entry_error(z, entry, EBADMSG, e, "the local header has another method");
    if (!(get_le16(p + 6) & FLAG_DESCRIPTOR) &&
        ((stored != UINT32_MAX && stored != entry->stored_size) ||
         (size != UINT32_MAX && size != entry->size)))
        return entry_error(z, entry, EBADMSG, e, "the local header has another size");
    return 0;
}

/*
 * Is the entry's data descriptor at this byte? One without a signature looks like the rest
 * of one with it, from which it is four bytes away.
 */
static int find_descriptor(const struct zip *z, const struct member *m, uint64_t at,
                           bool *found, struct err *e)
{
    const struct zip_entry *entry = &m->entry;
    unsigned char p[12];

    *found = false;
    if (!(entry->flags & FLAG_DESCRIPTOR) || m->limit - at < DESCRIPTOR_MIN)
        return 0;
    TRY(read_at(z, at - 4, sizeof p, p, e));
    if (get_le32(p + 4) == SIGNATURE_DESCRIPTOR)
        *found = get_le32(p + 8) == entry->crc;
    else
        *found = entry->crc && get_le32(p + 4) == entry->crc &&
                 get_le32(p) != SIGNATURE_DESCRIPTOR;
    return 0;
}

static int crc_of(const struct zip *z, uint64_t at, uint64_t len, uint32_t *crc,
                  struct err *e)
{
    CLEANUP_FREE unsigned char *data = malloc(READ_STEP);

    if (!data)
        return err_nomem(e);
    *crc = 0;
    for (uint64_t end = at + len; at < end;) {
        size_t n = (size_t)MIN(end - at, (uint64_t)READ_STEP);

        TRY(read_at(z, at, n, data, e));
        *crc = crc32_zip(*crc, data, n);
        at += n;
    }
    return 0;
}

/*
 * A wrong length in the local header moves every byte of the entry. What follows it tells:
 * the next entry, or its data descriptor. Where neither is at the end of its bytes, the
 * CRC-32 of them decides, but for large ones, which would take their time at every scan.
 */
static int check_end(const struct zip *z, const struct member *m, uint64_t at,
                     struct err *e)
{
    const struct zip_entry *entry = &m->entry;
    bool described = entry->flags & FLAG_DESCRIPTOR, found;
    uint64_t end = at + entry->stored_size, gap = m->limit - end;
    uint32_t crc = 0;

    if (gap == (described ? DESCRIPTOR : 0) && entry->stored_size < UINT32_MAX)
        return 0;
    TRY(find_descriptor(z, m, end, &found, e));
    if (found || entry->method != METHOD_STORED || entry->stored_size == 0 ||
        entry->stored_size > CHECK_MAX || (!described && entry->crc == 0))
        return 0;
    TRY(crc_of(z, at, entry->stored_size, &crc, e));
    return crc == entry->crc
               ? 0
               : entry_error(
                     z, entry, EBADMSG, e,
                     "its bytes are not where its local header says, or damaged");
}

/* Where the bytes of an entry start in the archive, whatever its method. */
static int data_start(const struct zip *z, const struct zip_entry *entry, uint64_t *at,
                      struct err *e)
{
    const struct member *m = (const void *)entry; /* its first part */
    size_t len = LOCAL_SIZE + strlen(entry->name);
    CLEANUP_FREE unsigned char *header = malloc(len);

    if (!header)
        return err_nomem(e);
    TRY(read_at(z, entry->header, len, header, e));
    TRY(check_local(z, entry, header, e));
    *at = entry->header + len + get_le16(header + 28);
    if (*at > m->limit || entry->stored_size > m->limit - *at)
        return entry_error(z, entry, EBADMSG, e, "its bytes reach into the next entry");
    return check_end(z, m, *at, e);
}

int zip_packed_offset(struct zip *z, const struct zip_entry *entry, uint64_t *off,
                      struct err *e)
{
    uint64_t at = 0;

    if (entry->method != METHOD_STORED && entry->method != METHOD_DEFLATED)
        return entry_error(z, entry, EBADMSG, e, "an unknown compression method");
    TRY(data_start(z, entry, &at, e));
    *off = z->off + at;
    return 0;
}

int zip_data_offset(struct zip *z, const struct zip_entry *entry, uint64_t *off,
                    struct err *e)
{
    if (entry->method != METHOD_STORED)
        return entry_error(z, entry, ENOTSUP, e,
                           "compressed, so it has no plain bytes");
    return zip_packed_offset(z, entry, off, e);
}

int zip_check_crc(const struct zip *z, const struct zip_entry *entry, uint64_t off,
                  uint32_t crc, struct err *e)
{
    if (crc == entry->crc)
        return 0;
    return err_set(e, EBADMSG,
                   "%s, record %s at byte %" PRIu64
                   ": its CRC-32 is %08x, the archive says %08x",
                   z->src->name, entry->name, off, crc, entry->crc);
}

/* Adds the place where it holds the entry's checksum as the directory has it. */
static int add_crc(const struct zip *z, const struct zip_entry *entry, uint64_t at,
                   struct zip_crc_places *out, struct err *e)
{
    unsigned char p[4];

    TRY(read_at(z, at, sizeof p, p, e));
    if (get_le32(p) == entry->crc)
        out->at[out->n++] = z->off + at;
    return 0;
}

int zip_crc_places(struct zip *z, const struct zip_entry *entry,
                   struct zip_crc_places *out, struct err *e)
{
    unsigned char signature[4];
    uint64_t at = 0;

    *out = (struct zip_crc_places){0};
    TRY(data_start(z, entry, &at, e));
    TRY(add_crc(z, entry, entry->record + 16, out, e));
    if (!(entry->flags & FLAG_DESCRIPTOR))
        return add_crc(z, entry, entry->header + 14, out, e);
    /* The descriptor's signature may be left out; some writers fill the header in too. */
    at += entry->stored_size;
    TRY(read_at(z, at, sizeof signature, signature, e));
    if (get_le32(signature) == SIGNATURE_DESCRIPTOR)
        at += 4;
    if (entry->crc)
        TRY(add_crc(z, entry, entry->header + 14, out, e));
    return add_crc(z, entry, at, out, e);
}

/* All of `in` gives exactly all of `out`, and the checksum is right. */
static int inflate_all(const struct zip *z, const struct zip_entry *entry,
                       unsigned char *in, unsigned char *out, struct err *e)
{
    z_stream s = {
        .next_in = in,
        .avail_in = (uInt)entry->stored_size,
        .next_out = out,
        .avail_out = (uInt)entry->size,
    };
    int rc;

    if (inflateInit2(&s, -MAX_WBITS) != Z_OK)
        return err_nomem(e);
    rc = inflate(&s, Z_FINISH);
    inflateEnd(&s);
    if (rc == Z_MEM_ERROR)
        return err_nomem(e);
    if (rc != Z_STREAM_END || s.avail_in != 0 || s.avail_out != 0)
        return entry_error(z, entry, EBADMSG, e, "damaged deflate data");
    if (crc32_z(0, out, entry->size) != entry->crc)
        return entry_error(z, entry, EBADMSG, e, "a wrong checksum");
    return 0;
}

static int check_sizes(const struct zip *z, const struct zip_entry *entry, size_t max,
                       struct err *e)
{
    if (entry->method != METHOD_STORED && entry->method != METHOD_DEFLATED)
        return entry_error(z, entry, EBADMSG, e, "an unknown compression method");
    if (entry->size > max || entry->size > UINT32_MAX ||
        entry->stored_size > UINT32_MAX)
        return entry_error(z, entry, EFBIG, e, "too large");
    if (entry->size > RATIO_FREE && entry->size / MAX_RATIO > entry->stored_size)
        return entry_error(z, entry, EBADMSG, e, "inflates more than any honest entry");
    return 0;
}

int zip_read(struct zip *z, const struct zip_entry *entry, size_t max, void **data,
             size_t *len, struct err *e)
{
    CLEANUP_FREE unsigned char *stored = NULL, *plain = NULL;
    uint64_t at = 0;

    TRY(check_sizes(z, entry, max, e));
    TRY(data_start(z, entry, &at, e));
    stored = malloc(entry->stored_size + 1);
    if (!stored)
        return err_nomem(e);
    TRY(read_at(z, at, (size_t)entry->stored_size, stored, e));
    if (entry->method == METHOD_DEFLATED) {
        plain = malloc(entry->size + 1);
        if (!plain)
            return err_nomem(e);
        TRY(inflate_all(z, entry, stored, plain, e));
    }
    *len = (size_t)entry->size;
    *data = plain ? steal(&plain) : steal(&stored);
    return 0;
}
