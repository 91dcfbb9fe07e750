/* SPDX-License-Identifier: MIT */
/* remote/tar_header.c - one header block of a tar archive, and the records of pax. */
#include "remote/tar_header.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"

/* Where POSIX has the fields. */
enum {
    NAME = 0,
    NAME_LEN = 100,
    SIZE = 124,
    SIZE_LEN = 12,
    CHECKSUM = 148,
    CHECKSUM_LEN = 8,
    TYPE = 156,
    MAGIC = 257,
    PREFIX = 345,
    PREFIX_LEN = 155,
};

static bool is_empty(const unsigned char *block)
{
    for (size_t i = 0; i < TAR_BLOCK; i++)
        if (block[i])
            return false;
    return true;
}

/* Octal digits between blanks; a NUL ends it too. */
static bool parse_octal(const unsigned char *p, size_t len, uint64_t *out)
{
    size_t i = 0;

    while (i < len && p[i] == ' ')
        i++;
    for (*out = 0; i < len && p[i] >= '0' && p[i] <= '7'; i++) {
        if (*out >> 60)
            return false;
        *out = *out * 8 + (uint64_t)(p[i] - '0');
    }
    for (; i < len; i++)
        if (p[i] != ' ' && p[i] != '\0')
            return false;
    return true;
}

/* GNU's numbers of 2^33 and more: big-endian, marked by the first bit. */
static bool parse_base256(const unsigned char *p, size_t len, uint64_t *out)
{
    *out = p[0] & 0x7f;
    for (size_t i = 1; i < len; i++) {
        if (*out >> 54)
            return false; /* 2^62 and more: no file has that */
        *out = *out << 8 | p[i];
    }
    return !(p[0] & 0x40); /* negative */
}

static bool parse_number(const unsigned char *p, size_t len, uint64_t *out)
{
    return p[0] & 0x80 ? parse_base256(p, len, out) : parse_octal(p, len, out);
}

/* The sum of all bytes with the field itself as blanks; some old tars took signed ones. */
static bool checksum_holds(const unsigned char *block)
{
    int64_t plain = 0, with_sign = 0;
    uint64_t told;

    if (!parse_octal(block + CHECKSUM, CHECKSUM_LEN, &told))
        return false;
    for (size_t i = 0; i < TAR_BLOCK; i++) {
        unsigned char c = i >= CHECKSUM && i < CHECKSUM + CHECKSUM_LEN ? ' ' : block[i];

        plain += c;
        with_sign += (signed char)c;
    }
    return (int64_t)told == plain || (int64_t)told == with_sign;
}

/* POSIX puts the beginning of long names into a field that GNU uses for times. */
static void take_name(const unsigned char *block, struct tar_header *out)
{
    const char *prefix = (const char *)block + PREFIX,
               *name = (const char *)block + NAME;
    int plen = (int)strnlen(prefix, PREFIX_LEN), nlen = (int)strnlen(name, NAME_LEN);
    bool posix = memcmp(block + MAGIC, "ustar\0", 6) == 0;

    if (posix && plen > 0)
        snprintf(out->name, sizeof out->name, "%.*s/%.*s", plen, prefix, nlen, name);
    else
        snprintf(out->name, sizeof out->name, "%.*s", nlen, name);
}

int tar_header_parse(const unsigned char block[TAR_BLOCK], struct tar_header *out,
                     struct err *e)
{
    *out = (struct tar_header){.type = (char)block[TYPE]};
    if (is_empty(block))
        return 0;
    if (!checksum_holds(block))
        return err_set(e, EBADMSG, "a header whose checksum is wrong");
    if (!parse_number(block + SIZE, SIZE_LEN, &out->size))
        return err_set(e, EBADMSG, "a member whose size is no number");
    take_name(block, out);
    if (out->type == '\0')
        out->type = '0';
    return 1;
}

/* ---- pax ---- */

static bool parse_decimal(const char *p, size_t len, uint64_t *out)
{
    *out = 0;
    for (size_t i = 0; i < len; i++) {
        if (p[i] < '0' || p[i] > '9' || *out > INT64_MAX / 10 - 1)
            return false;
        *out = *out * 10 + (uint64_t)(p[i] - '0');
    }
    return len > 0;
}

static bool key_is(const char *key, size_t len, const char *name)
{
    return len == strlen(name) && memcmp(key, name, len) == 0;
}

static int take_record(const char *key, size_t key_len, const char *value, size_t len,
                       struct tar_pax *pax, struct buf *path, struct err *e)
{
    static const char sparse[] = "GNU.sparse.";

    if (key_is(key, key_len, "path")) {
        if (memchr(value, '\0', len))
            return err_set(e, EBADMSG, "a member whose name holds NUL");
        pax->has_path = true;
        buf_clear(path);
        return buf_add(path, value, len) < 0 ? err_nomem(e) : 0;
    }
    if (key_is(key, key_len, "size")) {
        pax->has_size = parse_decimal(value, len, &pax->size);
        return pax->has_size ? 0
                             : err_set(e, EBADMSG, "a member whose size is no number");
    }
    if (key_len >= strlen(sparse) && memcmp(key, sparse, strlen(sparse)) == 0)
        pax->is_sparse = true;
    return 0;
}

int tar_pax_parse(const char *data, size_t len, struct tar_pax *pax, struct buf *path,
                  struct err *e)
{
    size_t pos = 0;

    while (pos < len && data[pos] != '\0') {
        const char *blank = memchr(data + pos, ' ', len - pos), *equals;
        uint64_t size;

        if (!blank || !parse_decimal(data + pos, (size_t)(blank - data) - pos, &size) ||
            size > len - pos || size <= (size_t)(blank - data) - pos + 1 ||
            data[pos + size - 1] != '\n')
            return err_set(e, EBADMSG, "records of pax that are none");
        pos += size;
        blank++;
        equals = memchr(blank, '=', (size_t)(data + pos - 1 - blank));
        if (!equals)
            return err_set(e, EBADMSG, "records of pax that are none");
        TRY(take_record(blank, (size_t)(equals - blank), equals + 1,
                        (size_t)(data + pos - 1 - (equals + 1)), pax, path, e));
    }
    return 0;
}
