/* SPDX-License-Identifier: MIT */
/* tests/unit/catalog_fixture.h - a made-up store, an index in a directory, short scans. */
#ifndef UFS_TESTS_UNIT_CATALOG_FIXTURE_H
#define UFS_TESTS_UNIT_CATALOG_FIXTURE_H

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/catalog.h"
#include "index/view.h"

#include "remote_tmp.h"

/* Files that stat() knows; `size_of_all` not 0: every other path is a file of that size. */
struct fake_file {
    const char *path;
    uint64_t size;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    int64_t mtime_ns;
};

struct fake_store {
    struct store store;
    struct fake_file file[16];
    size_t n;
    uint64_t size_of_all;
};

static inline int fake_stat(struct store *s, const char *path, struct entry_stat *out,
                            struct err *e)
{
    const struct fake_store *f = container_of(s, struct fake_store, store);

    *out = (struct entry_stat){.kind = ENTRY_FILE, .mode = 0644};
    for (size_t i = 0; i < f->n; i++) {
        const struct fake_file *file = &f->file[i];

        if (strcmp(file->path, path) != 0)
            continue;
        out->kind = S_ISDIR(file->mode) ? ENTRY_DIR : ENTRY_FILE;
        out->mode = file->mode;
        out->uid = file->uid;
        out->gid = file->gid;
        out->id =
            (struct file_id){1, 100 + i, file->size, file->mtime_ns, file->mtime_ns};
        return 0;
    }
    if (f->size_of_all == 0)
        return err_set(e, ENOENT, "%s: not there", path);
    out->id = (struct file_id){1, 7, f->size_of_all, 1, 1};
    return 0;
}

static const struct store_ops fake_ops = {.name = "fake", .stat = fake_stat};

static inline struct fake_store fake_new(void)
{
    return (struct fake_store){.store = {.ops = &fake_ops}};
}

static inline void fake_add(struct fake_store *f, const char *path, uint64_t size)
{
    f->file[f->n++] = (struct fake_file){path, size, 0644, 1000, 100, 1000};
}

/* --- an index --- */

static inline struct catalog *index_open(const struct tmp *t, const char *identity)
{
    const struct catalog_options options = {.dir = t ? t->path : NULL, .memory = !t};
    struct catalog *c = NULL;
    struct err e = {0};

    assert_ok(catalog_open(&options, identity, &c, &e), &e);
    return c;
}

/* --- a scan --- */

static inline struct sink *scan_begin(struct catalog *c, struct fake_store *f,
                                      const char *path, const char *file)
{
    const struct catalog_place place = {.path = path,
                                        .file = file,
                                        .store = &f->store,
                                        .dir_id = {1, 2, 3, 4, 5},
                                        .names_hash = 77};
    struct sink *s = NULL;
    struct err e = {0};

    assert_ok(sink_begin(c, &place, &s, &e), &e);
    return s;
}

static inline int64_t scan_commit(struct sink *s)
{
    struct err e = {0};
    int64_t id = 0;

    assert_ok(sink_commit(s, NULL, &id, &e), &e);
    assert_true(id > 0);
    return id;
}

static inline uint32_t scan_file(struct sink *s, const char *path)
{
    struct err e = {0};
    uint32_t number = UINT32_MAX;

    assert_ok(sink_file(s, path, strlen(path), &number, &e), &e);
    return number;
}

/* A one-dimensional tensor of F32. */
static inline struct sink_tensor f32(const char *key, const struct shape *shape)
{
    return (struct sink_tensor){.key = key,
                                .key_len = strlen(key),
                                .dtype = DTYPE_F32,
                                .shape = shape,
                                .role = -1};
}

static inline void scan_plain(struct sink *s, const char *key, uint64_t n,
                              uint32_t file, uint64_t offset)
{
    const struct shape shape = {1, {n}};
    const struct sink_tensor t = f32(key, &shape);
    struct err e = {0};

    assert_ok(sink_tensor_plain(s, &t, file, offset, &e), &e);
}

/* The only tensor with this key; its strings live in the arena. */
static inline struct tensor_info get_key(struct catalog *c, int64_t id, const char *key,
                                         struct arena *a)
{
    struct tensor_info t;
    struct err e = {0};

    assert_ok(catalog_tensor_by_key(c, id, key, strlen(key), a, &t, &e), &e);
    return t;
}

/* All of a descriptor's file from its start, with a NUL behind. */
static inline char *slurp(int fd, size_t *len)
{
    off_t size = lseek(fd, 0, SEEK_END);
    char *text = malloc((size_t)size + 1);

    assert_non_null(text);
    assert_int_equal(pread(fd, text, (size_t)size, 0), size);
    text[size] = '\0';
    if (len)
        *len = (size_t)size;
    return text;
}

#endif
