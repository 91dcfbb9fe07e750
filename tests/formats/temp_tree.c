/* SPDX-License-Identifier: MIT */
/* tests/formats/temp_tree.c - a checkpoint made up in a directory of its own. */
#include "temp_tree.h"

#include <ftw.h>
#include <limits.h>
#include <stdio.h>

#include "base/endian.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "fixture.h"
#include "tests/unit/unit.h"

void temp_make(struct temp *t, const char *name)
{
    struct err e = {0};

    strcpy(t->top, "/tmp/test_formats.XXXXXX");
    assert_non_null(mkdtemp(t->top));
    snprintf(t->dir, sizeof t->dir, "%s/%s", t->top, name);
    assert_ok(make_dirs(t->dir, 0700, &e), &e);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st;
    (void)type;
    (void)at;
    return remove(path);
}

void temp_remove(const struct temp *t)
{
    assert_int_equal(nftw(t->top, remove_one, 8, FTW_DEPTH | FTW_PHYS), 0);
}

void put(const struct temp *t, const char *name, const void *data, size_t len)
{
    char path[PATH_MAX], *slash;
    struct err e = {0};
    FILE *f;

    snprintf(path, sizeof path, "%s/%s", t->dir, name);
    slash = strrchr(path, '/');
    *slash = '\0';
    assert_ok(make_dirs(path, 0700, &e), &e);
    *slash = '/';
    f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    assert_int_equal(fclose(f), 0);
}

void put_text(const struct temp *t, const char *name, const char *text)
{
    put(t, name, text, strlen(text));
}

/* Makes a zip archive one whose writer left all CRC-32 out: nothing in it is damaged. */
static void drop_checksums(struct buf *b)
{
    unsigned char *at, *p = (void *)b->data;

    if (b->len < 4 || memcmp(p, "PK\3\4", 4) != 0)
        return;
    at = p + b->len - 22; /* the end record, without a comment */
    assert_memory_equal(at, "PK\5\6", 4);
    for (at = p + get_le32(at + 16); get_le32(at) == 0x02014b50;
         at += 46 + get_le16(at + 28) + get_le16(at + 30) + get_le16(at + 32))
        put_le32(at + 16, 0);
}

/* How often it was there. */
static size_t put_replaced(const struct temp *t, const char *name, const char *path,
                           const char *was, const char *is)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    size_t done = 0, len = was ? strlen(was) : 0;
    char *at;

    read_file(path, &bytes);
    for (at = bytes.data;
         was && (at = memmem(at, (size_t)(bytes.data + bytes.len - at), was, len));
         done++)
        memcpy(at, is, len);
    if (done > 0)
        drop_checksums(&bytes);
    put(t, name, bytes.data, bytes.len);
    return done;
}

void put_copy(const struct temp *t, const char *name, const char *from, const char *was,
              const char *is, size_t times)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", from, name);
    assert_int_equal(put_replaced(t, name, path, was, is), times);
}

void put_changed(const struct temp *t, const char *name, const char *from,
                 const char *was, const char *is)
{
    assert_int_equal(put_replaced(t, name, from, was, is) > 0, was != NULL);
}
