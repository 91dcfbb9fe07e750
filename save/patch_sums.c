/* SPDX-License-Identifier: MIT */
/* save/patch_sums.c - checksums of changed bytes, where their containers keep them. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>

#include "base/crc32.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "index/formats/megatron/megatron_integrity.h"
#include "index/formats/torch/zip.h"
#include "remote/source.h"
#include "save/patch_priv.h"

enum { BLOCK = 1 << 20, DIGESTS_MAX = 64 << 20 };

/* ---- zip ---- */

static int crc_of(const struct patch_file *f, uint64_t from, uint64_t len,
                  uint32_t *out, struct err *e)
{
    CLEANUP_FREE unsigned char *block = malloc(BLOCK);

    *out = 0;
    if (!block)
        return err_nomem(e);
    while (len > 0) {
        size_t n = (size_t)MIN(len, (uint64_t)BLOCK);

        if (read_exact(f->fd, block, n, from, e) < 0)
            return err_wrap(e, "%s", f->path);
        *out = crc32_zip(*out, block, n);
        from += n;
        len -= n;
    }
    return 0;
}

/* Does any of the file's ranges, which are in order, meet these bytes? */
static bool is_changed(const struct patch *p, uint32_t file, uint64_t from, uint64_t to)
{
    size_t low = 0, high = p->ranges;

    while (low < high) { /* the ranges that begin before `to` */
        size_t mid = low + (high - low) / 2;
        const struct patch_range *r = &p->range[mid];

        if (r->file < file || (r->file == file && r->from < to))
            low = mid + 1;
        else
            high = mid;
    }
    return low > 0 && p->range[low - 1].file == file && p->range[low - 1].reach > from;
}

static int sum_entry(const struct patch *p, uint32_t file, struct zip *z,
                     const struct zip_entry *entry, struct err *e)
{
    const struct patch_file *f = &p->file[file];
    struct zip_crc_places places;
    unsigned char bytes[4];
    uint64_t at = 0;
    uint32_t crc;
    int ret = zip_packed_offset(z, entry, &at, e);

    if (ret < 0 || !is_changed(p, file, at, at + entry->stored_size))
        return ret;
    ret = zip_crc_places(z, entry, &places, e);
    if (ret == 0)
        ret = crc_of(f, at, entry->stored_size, &crc, e);
    if (ret < 0)
        return ret;
    put_le32(bytes, crc);
    for (unsigned i = 0; ret == 0 && i < places.n; i++)
        ret = patch_write_at(f, bytes, sizeof bytes, places.at[i], e);
    return ret;
}

/* The records of the archive at these bytes of the copy that have changed. */
static int sum_archive(const struct patch *p, uint32_t file, struct source *copy,
                       uint64_t off, uint64_t len, struct err *e)
{
    CLEANUP(zip_freep) struct zip *z = NULL;
    int ret = zip_open(copy, off, len, &z, e);

    for (size_t i = 0; ret == 0 && i < zip_count(z); i++)
        ret = sum_entry(p, file, z, zip_at(z, i), e);
    return ret;
}

/* A file that is one archive: torch.save's, NumPy's. Bytes that only look so have no end. */
static int sum_whole(const struct patch *p, uint32_t file, struct source *copy,
                     struct err *e)
{
    CLEANUP(zip_freep) struct zip *z = NULL;
    struct err why = {0};
    unsigned char head[4];

    if (copy->size < sizeof head)
        return 0;
    TRY(source_read(copy, 0, sizeof head, head, e));
    if (memcmp(head, "PK\3\4", sizeof head) != 0)
        return 0;
    if (zip_open(copy, 0, copy->size, &z, &why) < 0) {
        if (why.code != ENOMEM && why.code != EIO)
            return 0;
        return err_copy(
            e,
            &why); /* else its records would keep the sums of what stood there before */
    }
    return sum_archive(p, file, copy, 0, copy->size, e);
}

int patch_sum_zip(const struct patch *p, uint32_t file, struct err *e)
{
    const struct patch_file *f = &p->file[file];
    CLEANUP(source_putp) struct source *copy = NULL;
    const struct patch_range *before = NULL;
    bool items = false;
    int fd = fcntl(f->fd, F_DUPFD_CLOEXEC, 0), ret;

    if (fd < 0)
        return err_set(e, errno, "%s: %s", f->path, strerror(errno));
    ret = source_from_fd(fd, f->path, &copy, e);
    for (size_t i = 0; ret == 0 && i < p->ranges; i++) {
        const struct patch_range *r = &p->range[i];

        if (r->file != file || r->item_len == 0)
            continue;
        items = true;
        if (!before || before->item != r->item)
            ret = sum_archive(p, file, copy, r->item, r->item_len, e);
        before = r;
    }
    return ret < 0 || items ? ret : sum_whole(p, file, copy, e);
}

/* ---- digests of whole files ---- */

static int sha256_of(const struct patch_file *f, char hex[65], struct err *e)
{
    CLEANUP_FREE unsigned char *block = malloc(BLOCK);
    EVP_MD_CTX *c = EVP_MD_CTX_new();
    unsigned char sum[EVP_MAX_MD_SIZE];
    uint64_t at = 0;
    int ret = block && c && EVP_DigestInit_ex(c, EVP_sha256(), NULL) ? 0 : err_nomem(e);

    while (ret == 0 && at < f->id.size) {
        size_t n = (size_t)MIN(f->id.size - at, (uint64_t)BLOCK);

        ret = read_exact(f->fd, block, n, at, e);
        if (ret == 0 && !EVP_DigestUpdate(c, block, n))
            ret = err_nomem(e);
        at += n;
    }
    if (ret == 0 && !EVP_DigestFinal_ex(c, sum, NULL))
        ret = err_nomem(e);
    EVP_MD_CTX_free(c);
    for (unsigned i = 0; ret == 0 && i < 32; i++)
        snprintf(hex + 2 * (size_t)i, 3, "%02x", sum[i]);
    return ret;
}

/* The digests in a directory of the checkpoint (length of its name with '/'). */
struct digests {
    char path[PATH_MAX];
    size_t dir;
    char *text; /* NULL: it has none */
    size_t len;
    struct stat st;
};

static int read_digests(const struct patch *p, struct digests *d, struct err *e)
{
    CLEANUP_FD int fd = openat(p->spec.old, d->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0)
        return errno == ENOENT ? 0
                               : err_set(e, errno, "%s: %s", d->path, strerror(errno));
    if (fstat(fd, &d->st) < 0 || !S_ISREG(d->st.st_mode) || d->st.st_size > DIGESTS_MAX)
        return err_set(e, EBADMSG, "%s: no file of digests", d->path);
    d->len = (size_t)d->st.st_size;
    d->text = malloc(d->len + 1);
    return d->text ? read_exact(fd, d->text, d->len, 0, e) : err_nomem(e);
}

static int write_digests(const struct patch *p, const struct digests *d, struct err *e)
{
    CLEANUP_FD int fd = openat(
        p->out, d->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);

    if (fd < 0)
        return err_set(e, errno, "%s: %s", d->path, strerror(errno));
    if (write_all(fd, d->text, d->len, e) < 0)
        return err_wrap(e, "%s", d->path);
    if ((geteuid() == 0 && fchown(fd, d->st.st_uid, d->st.st_gid) < 0) ||
        fchmod(fd, d->st.st_mode & 07777) < 0 || fsync(fd) < 0)
        return err_set(e, errno, "%s: %s", d->path, strerror(errno));
    return 0;
}

/* Of all changed files that stand beside this one. */
static int sum_directory(const struct patch *p, struct digests *d, struct err *e)
{
    char hex[65];

    for (size_t i = 0; i < p->files; i++) {
        const struct patch_file *f = &p->file[i];

        if (strncmp(f->path, d->path, d->dir) != 0 || strchr(f->path + d->dir, '/'))
            continue;
        if (sha256_of(f, hex, e) < 0 ||
            megatron_integrity_set(d->text, d->len, f->path + d->dir, hex, e) < 0)
            return err_wrap(e, "%s", d->path);
    }
    return write_digests(p, d, e);
}

int patch_sum_digests(const struct patch *p, struct err *e)
{
    for (size_t i = 0; i < p->files; i++) {
        const char *path = p->file[i].path, *slash = strrchr(path, '/');
        struct digests d = {.dir = slash ? (size_t)(slash - path) + 1 : 0};
        bool seen = false;
        int ret;

        for (size_t k = 0; k < i && !seen; k++)
            seen = strncmp(p->file[k].path, path, d.dir) == 0 &&
                   !strchr(p->file[k].path + d.dir, '/');
        if (seen)
            continue;
        snprintf(d.path, sizeof d.path, "%.*s" MEGATRON_INTEGRITY, (int)d.dir, path);
        ret = read_digests(p, &d, e);
        if (ret == 0 && d.text)
            ret = sum_directory(p, &d, e);
        free(d.text);
        if (ret < 0)
            return ret;
    }
    return 0;
}
