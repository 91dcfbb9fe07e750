/* SPDX-License-Identifier: MIT */
/* tests/fuzz/memory_store.c - a directory of files in memory as a store. */
#include "tests/fuzz/memory_store.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/err.h"

enum { FILES_MAX = 64, HEAD = 4 };

struct memory_file {
    char path[256];
    const uint8_t *data;
    size_t len;
};

struct memory_store {
    struct store base;
    struct memory_file file[FILES_MAX];
    size_t n;
};

static struct memory_store *memory_of(struct store *s)
{
    return container_of(s, struct memory_store, base);
}

static void describe(const struct memory_store *m, size_t i, struct entry_stat *out)
{
    *out = (struct entry_stat){
        .kind = ENTRY_FILE,
        .mode = 0644,
        .id = {.dev = 1, .ino = i + 2, .size = m->file[i].len, .mtime_ns = 1}};
}

/* Does `path` lie below `dir`? *rest: where the rest of it begins. */
static bool is_below(const char *path, const char *dir, size_t *rest)
{
    size_t len = strlen(dir);

    *rest = len ? len + 1 : 0;
    return len == 0 || (strncmp(path, dir, len) == 0 && path[len] == '/');
}

static int memory_find(const struct memory_store *m, const char *path)
{
    for (size_t i = 0; i < m->n; i++)
        if (strcmp(m->file[i].path, path) == 0)
            return (int)i;
    return -ENOENT;
}

static int memory_stat(struct store *s, const char *path, struct entry_stat *out,
                       struct err *e)
{
    const struct memory_store *m = memory_of(s);
    int i = memory_find(m, path);
    size_t rest;

    if (i >= 0) {
        describe(m, (size_t)i, out);
        return 0;
    }
    *out = (struct entry_stat){
        .kind = ENTRY_DIR, .mode = 0755, .id = {.dev = 1, .ino = 1, .mtime_ns = 1}};
    for (size_t k = 0; k < m->n; k++)
        if (is_below(m->file[k].path, path, &rest))
            return 0;
    return err_set(e, ENOENT, "%s: %s", path, strerror(ENOENT));
}

static int memory_list(struct store *s, const char *path, struct listing **out,
                       struct err *e)
{
    const struct memory_store *m = memory_of(s);
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct entry_stat st;
    int rc = memory_stat(s, path, &st, e);

    if (rc == 0 && st.kind != ENTRY_DIR)
        rc = err_set(e, ENOTDIR, "%s: %s", path, strerror(ENOTDIR));
    if (rc == 0)
        rc = listing_new(s, path, &l, e);
    for (size_t i = 0; rc == 0 && i < m->n; i++) {
        char full[256];
        size_t rest, len;

        if (!is_below(m->file[i].path, path, &rest))
            continue;
        len = rest + strcspn(m->file[i].path + rest, "/");
        memcpy(full, m->file[i].path, len);
        full[len] = '\0';
        if (!listing_find(l, full + rest) && memory_stat(s, full, &st, e) == 0)
            rc = listing_add(l, full + rest, &st, NULL, 0, e);
        listing_sort(l); /* find() searches */
    }
    *out = rc == 0 ? steal(&l) : NULL;
    return rc;
}

static int memory_open(struct store *s, const char *path, struct source **out,
                       struct err *e)
{
    const struct memory_store *m = memory_of(s);
    struct entry_stat st;
    int i = memory_find(m, path), rc;

    if (i < 0)
        return err_set(e, ENOENT, "%s: %s", path, strerror(ENOENT));
    rc = source_from_memory(m->file[i].data, m->file[i].len, false, path, out, e);
    if (rc == 0) {
        describe(m, (size_t)i, &st);
        (*out)->id = st.id;
    }
    return rc;
}

static int memory_readlink(struct store *s, const char *path, char *dst, size_t size,
                           struct err *e)
{
    (void)s;
    (void)dst;
    (void)size;
    return err_set(e, EINVAL, "%s: no link", path);
}

static void memory_close(struct store *s)
{
    free(memory_of(s)); /* store_close() frees the names */
}

static const struct store_ops memory_store_ops = {
    .name = "memory",
    .stat = memory_stat,
    .list = memory_list,
    .open = memory_open,
    .readlink = memory_readlink,
    .close = memory_close,
};

/* A file where a directory must be, or the other way round. */
static bool is_in_the_way(const struct memory_store *m, const char *path)
{
    size_t rest;

    for (size_t i = 0; i < m->n; i++)
        if (strcmp(m->file[i].path, path) == 0 ||
            is_below(m->file[i].path, path, &rest) ||
            is_below(path, m->file[i].path, &rest))
            return true;
    return false;
}

static void take_files(struct memory_store *m, const uint8_t *data, size_t size)
{
    while (size > HEAD && m->n < FILES_MAX) {
        size_t name = data[0];
        size_t len = (size_t)data[1] | (size_t)data[2] << 8 | (size_t)data[3] << 16;
        struct memory_file *f = &m->file[m->n];

        data += HEAD;
        size -= HEAD;
        name = MIN(name, size);
        memcpy(f->path, data, name);
        f->path[name] = '\0';
        f->data = data + name;
        f->len = MIN(len, size - name);
        data += name + f->len;
        size -= name + f->len;
        m->n += store_name_is_safe(f->path, name) && !is_in_the_way(m, f->path);
    }
}

int memory_store(const uint8_t *data, size_t size, struct store **out, struct err *e)
{
    struct memory_store *m = calloc(1, sizeof *m);

    if (!m)
        return err_nomem(e);
    m->base = (struct store){.ops = &memory_store_ops,
                             .url = strdup("/memory"),
                             .identity = strdup("memory")};
    take_files(m, data, size);
    *out = &m->base;
    return m->base.url && m->base.identity ? 0 : err_nomem(e);
}
