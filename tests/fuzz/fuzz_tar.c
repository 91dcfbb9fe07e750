/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_tar.c - any bytes as a tar archive, as they are and with right checksums: members lie within it, names are safe. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "remote/source.h"
#include "remote/store.h"
#include "remote/tar.h"
#include "remote/tar_header.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static bool climbs(const char *name)
{
    for (const char *p = name; *p; p += strcspn(p, "/") + (p[strcspn(p, "/")] == '/'))
        if (p[0] == '.' && p[1] == '.' && (p[2] == '/' || p[2] == '\0'))
            return true;
    return false;
}

struct input {
    const uint8_t *data;
    size_t size;
    uint64_t last;
};

static int read_input(void *user, uint64_t off, size_t len, void *dst, size_t *got,
                      struct err *e)
{
    struct input *in = user;

    (void)e;
    require(off >= in->last, "backwards");
    in->last = off;
    *got = off < in->size ? MIN(len, in->size - (size_t)off) : 0;
    if (*got > 0)
        memcpy(dst, in->data + off, *got);
    return 0;
}

/* The checksum of each block that says that it is a header: else none gets past the first. */
static void seal(uint8_t *data, size_t size)
{
    for (uint8_t *b = data; size - (size_t)(b - data) >= TAR_BLOCK; b += TAR_BLOCK) {
        unsigned sum = 8 * ' ';

        if (memcmp(b + 257, "ustar", 5) != 0)
            continue;
        for (size_t i = 0; i < TAR_BLOCK; i++)
            sum += i >= 148 && i < 156 ? 0 : b[i];
        snprintf((char *)b + 148, 8, "%06o", sum);
        b[155] = ' ';
    }
}

static void check(const uint8_t *data, size_t size)
{
    struct input in = {.data = data, .size = size};
    struct err e = {0};
    struct tar *t;
    int rc = tar_read(read_input, &in, size, &t, &e);

    require(rc == 0 || rc == -EBADMSG || rc == -ENOTSUP || rc == -EFBIG ||
                rc == -ENAMETOOLONG,
            e.text);
    if (rc < 0)
        return;
    for (size_t i = 0; i < tar_count(t); i++) {
        const struct tar_member *m = tar_at(t, i);

        require(m->off <= size && m->size <= size - m->off, "outside");
        require(m->name[0] != '/' && !strstr(m->name, "//"), "name");
        require(!climbs(m->name), "climbs");
        require(i == 0 || strcmp(tar_at(t, i - 1)->name, m->name) < 0, "order");
    }
    tar_free(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE uint8_t *copy = malloc(size + 1);

    if (!copy)
        return 0;
    memcpy(copy, data, size);
    check(copy, size);
    seal(copy, size);
    check(copy, size);
    return 0;
}
