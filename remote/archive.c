/* SPDX-License-Identifier: MIT */
/* remote/archive.c - one tar archive: its members, and their bytes as sources. */
#include "remote/archive.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <string.h>

#include "base/err.h"
#include "remote/gunzip.h"
#include "remote/source.h"
#include "remote/tar.h"
#include "remote/tar_header.h"

struct archive {
    struct source *data; /* plain bytes */
    struct tar *tar;
    struct entry_stat st;
    bool packed;
    atomic_uint refs;
};

struct archive *archive_get(struct archive *a)
{
    atomic_fetch_add(&a->refs, 1);
    return a;
}

void archive_put(struct archive *a)
{
    if (!a || atomic_fetch_sub(&a->refs, 1) != 1)
        return;
    source_put(a->data);
    tar_free(a->tar);
    free(a);
}

void archive_putp(struct archive **a)
{
    archive_put(*a);
    *a = NULL;
}

const struct tar *archive_tar(const struct archive *a)
{
    return a->tar;
}

bool archive_is_packed(const struct archive *a)
{
    return a->packed;
}

bool archive_is_of(const struct archive *a, const struct file_id *id)
{
    return file_id_equal(&a->st.id, id);
}

/* ---- opening ---- */

static int read_plain(void *user, uint64_t off, size_t len, void *dst, size_t *got,
                      struct err *e)
{
    struct source *src = user;

    *got = off < src->size ? (size_t)MIN((uint64_t)len, src->size - off) : 0;
    return *got ? source_read(src, off, *got, dst, e) : 0;
}

static int read_packed(void *user, uint64_t off, size_t len, void *dst, size_t *got,
                       struct err *e)
{
    return gunzip_scan_read(user, off, len, dst, got, e);
}

/* Headers and points come from one pass. */
static int open_packed(struct archive *a, struct source *src, struct err *e)
{
    CLEANUP(gunzip_scan_freep) struct gunzip_scan *scan = NULL;

    a->packed = true;
    TRY(gunzip_scan_begin(src, &scan, e));
    TRY(tar_read(read_packed, scan, UINT64_MAX, &a->tar, e));
    TRY(gunzip_scan_finish(scan, &a->data, e));
    return tar_check_size(a->tar, a->data->size, e);
}

static int open_plain(struct archive *a, struct source *src, struct err *e)
{
    a->data = source_get(src);
    return tar_read(read_plain, src, src->size, &a->tar, e);
}

/* By its first bytes plain or packed. */
static int open_any(struct archive *a, struct source *src, struct err *e)
{
    unsigned char head[TAR_BLOCK];
    size_t got;

    TRY(read_plain(src, 0, sizeof head, head, &got, e));
    if (gunzip_sniff(head, got))
        return open_packed(a, src, e);
    if (tar_sniff(head, got))
        return open_plain(a, src, e);
    return err_set(e, EBADMSG, "it is no tar archive, plain or packed by gzip");
}

int archive_open(struct source *src, const struct entry_stat *st, struct archive **out,
                 struct err *e)
{
    struct archive *a = calloc(1, sizeof *a);

    if (!a)
        return err_nomem(e);
    atomic_init(&a->refs, 1);
    a->st = *st;
    if (open_any(a, src, e) == 0) {
        *out = a;
        return 0;
    }
    archive_put(a);
    return err_wrap(e, "%s", src->name);
}

/* ---- members ---- */

/*
 * Inode numbers are the archive's, turned by where the member lies: two members never have
 * the same, and what was kept of one (decoded pieces) is not taken for another's.
 */
static void stat_of(const struct archive *a, const struct tar_member *m,
                    struct entry_stat *out)
{
    *out = a->st;
    out->is_link = false;
    out->kind = m->kind;
    out->mode = (a->st.mode & 0444) | (m->kind == ENTRY_DIR ? 0111 : 0);
    out->id.ino ^= (m->off + 1) * UINT64_C(0x9e3779b97f4a7c15);
    out->id.size = m->kind == ENTRY_FILE ? m->size : 0;
}

/* A directory: by a member of its own or by what is in it. */
static void stat_dir(const struct archive *a, size_t first, struct entry_stat *out)
{
    struct tar_member dir = {.kind = ENTRY_DIR};

    if (first < tar_count(a->tar))
        dir.off = ~tar_at(a->tar, first)->off; /* no file has that number */
    stat_of(a, &dir, out);
}

/* The member of that very name, or NULL. */
static const struct tar_member *find_member(const struct archive *a, const char *path)
{
    size_t i = tar_lower_bound(a->tar, path);
    const struct tar_member *m = i < tar_count(a->tar) ? tar_at(a->tar, i) : NULL;

    return m && strcmp(m->name, path) == 0 ? m : NULL;
}

/* The first member below a directory ("": any); tar_count() when nothing is. */
static int first_below(const struct archive *a, const char *path, size_t *first,
                       struct err *e)
{
    char below[PATH_MAX + 1];
    size_t len = strlen(path), i;

    if (len >= PATH_MAX)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", path);
    memcpy(below, path, len + 1);
    if (len > 0)
        memcpy(below + len++, "/", 2);
    i = tar_lower_bound(a->tar, below);
    if (i < tar_count(a->tar) && strncmp(tar_at(a->tar, i)->name, below, len) != 0)
        i = tar_count(a->tar);
    *first = i;
    return 0;
}

int archive_stat(const struct archive *a, const char *path, struct entry_stat *out,
                 struct err *e)
{
    const struct tar_member *m = find_member(a, path);
    size_t first;

    if (m && m->kind != ENTRY_DIR) {
        stat_of(a, m, out);
        return 0;
    }
    TRY(first_below(a, path, &first, e));
    if (!m && first == tar_count(a->tar) && path[0])
        return err_set(e, ENOENT, "%s: %s", path, strerror(ENOENT));
    stat_dir(a, first, out);
    return 0;
}

/*
 * Adds the entry of a directory that member `i` is or lies in; *next is the first member
 * behind all that belongs to it.
 */
static int list_one(const struct archive *a, size_t i, size_t skip, struct listing *l,
                    size_t *next, struct err *e)
{
    const char *name = tar_at(a->tar, i)->name;
    size_t len = skip + strcspn(name + skip, "/");
    char path[PATH_MAX + 1];
    struct entry_stat st;

    memcpy(path, name, len);
    path[len] = '\0';
    TRY(archive_stat(a, path, &st, e));
    TRY(listing_add(l, path + skip, &st, NULL, 0, e));
    *next = i + 1;
    if (st.kind == ENTRY_DIR && name[len] == '/') {
        memcpy(path + len, "0", 2); /* what comes after '/' */
        *next = tar_lower_bound(a->tar, path);
    }
    return 0;
}

int archive_list(const struct archive *a, const char *path, struct listing *l,
                 struct err *e)
{
    const struct tar_member *self = find_member(a, path);
    size_t i, skip = path[0] ? strlen(path) + 1 : 0;

    if (self && self->kind != ENTRY_DIR)
        return err_set(e, ENOTDIR, "%s: %s", path, strerror(ENOTDIR));
    TRY(first_below(a, path, &i, e));
    if (i == tar_count(a->tar) && path[0] && !self)
        return err_set(e, ENOENT, "%s: %s", path, strerror(ENOENT));
    while (i < tar_count(a->tar)) {
        const char *name = tar_at(a->tar, i)->name;

        if (skip > 0 && (strncmp(name, path, skip - 1) != 0 || name[skip - 1] != '/'))
            break;
        TRY(list_one(a, i, skip, l, &i, e));
    }
    listing_sort(l); /* a directory's own member makes its name come twice */
    return 0;
}

int archive_source(const struct archive *a, const char *path, const char *name,
                   struct source **out, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    const struct tar_member *m = find_member(a, path);
    struct entry_stat st;
    char *own;

    TRY(archive_stat(a, path, &st, e));
    if (!m || st.kind != ENTRY_FILE)
        return err_set(e, EINVAL, "%s: not a regular file", path);
    TRY(source_window(a->data, m->off, m->size, &src, e));
    own = strdup(name);
    if (!own)
        return err_nomem(e);
    free(src->name);
    src->name = own;
    src->id = st.id;
    *out = steal(&src);
    return 0;
}
