/* SPDX-License-Identifier: MIT */
/* save/intake_bytes.c - an incoming file as its handles see it, and which bytes have arrived. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/endian.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "remote/source.h"
#include "save/incoming.h"
#include "save/intake_priv.h"

enum { BLOCK = 1 << 20, PREFIX = 8 /* the length of the header */ };

static int no_memory(struct err *e, int ret)
{
    return ret < 0 ? err_nomem(e) : 0;
}

/* ---- which bytes ---- */

/* Before bytes are written: were some of them written before? */
static int claim(struct intake_file *f, uint64_t from, uint64_t to, bool *again,
                 struct err *e)
{
    int ret;

    pthread_mutex_lock(&f->mutex);
    *again = ranges_meet(&f->claimed, from, to);
    ret = ranges_add(&f->claimed, from, to);
    pthread_mutex_unlock(&f->mutex);
    return no_memory(e, ret);
}

static int arrived(struct intake_file *f, uint64_t from, uint64_t to, struct err *e)
{
    int ret;

    pthread_mutex_lock(&f->mutex);
    ret = ranges_add(&f->received, from, to);
    if (ret == 0)
        f->size = MAX(f->size, to);
    pthread_mutex_unlock(&f->mutex);
    return no_memory(e, ret);
}

static bool has(struct intake_file *f, uint64_t from, uint64_t to)
{
    bool all;

    pthread_mutex_lock(&f->mutex);
    all = ranges_hold(&f->received, from, to);
    pthread_mutex_unlock(&f->mutex);
    return all;
}

int intake_received(struct intake_file *f, struct ranges *out, struct err *e)
{
    int ret;

    pthread_mutex_lock(&f->mutex);
    ret = ranges_copy(out, &f->received);
    pthread_mutex_unlock(&f->mutex);
    return no_memory(e, ret);
}

uint64_t intake_size(const struct intake_file *f)
{
    struct intake_file *x = (struct intake_file *)(uintptr_t)f;
    uint64_t size;

    pthread_mutex_lock(&x->mutex);
    size = x->size;
    pthread_mutex_unlock(&x->mutex);
    return size;
}

/* ---- bytes to and from where they are; with the lock ---- */

static int put(struct intake_file *f, const void *data, size_t len, uint64_t off,
               bool again, struct err *e)
{
    const char *p = data;
    size_t head = 0;
    int ret = 0;

    if (!f->known || off < f->data)
        head = f->known ? (size_t)MIN((uint64_t)len, f->data - off) : len;
    if (head > 0)
        ret = staged_file_write(f->intake, &f->plain, p, head, off, e);
    if (ret == 0 && len > head)
        ret = placement_write(f, p + head, len - head, off + head - f->data, again, e);
    return ret;
}

static int get(struct intake_file *f, void *dst, size_t len, uint64_t off,
               struct err *e)
{
    char *p = dst;
    uint64_t end = f->known ? f->total : UINT64_MAX;
    size_t head = 0, body = 0;
    int ret = 0;

    if (!f->known || off < f->data)
        head = f->known ? (size_t)MIN((uint64_t)len, f->data - off) : len;
    if (off + head < end)
        body = (size_t)MIN((uint64_t)(len - head), end - off - head);
    if (head > 0)
        ret = staged_file_read(f->intake, &f->plain, p, head, off, e);
    if (ret == 0 && body > 0)
        ret = placement_read(f, p + head, body, off + head - f->data, e);
    memset(p + head + body, 0, len - head - body);
    return ret;
}

/* What has not arrived may have any bytes where it is: they are not shown. */
static void hide_gaps(struct intake_file *f, char *dst, size_t len, uint64_t off)
{
    struct range gap;

    pthread_mutex_lock(&f->mutex);
    for (uint64_t at = off; ranges_next_gap(&f->received, &at, off + len, &gap);)
        memset(dst + (gap.from - off), 0, (size_t)(gap.to - gap.from));
    pthread_mutex_unlock(&f->mutex);
}

static ssize_t read_some(struct intake_file *f, void *dst, size_t len, uint64_t off,
                         struct err *e)
{
    uint64_t size = intake_size(f);

    if (off >= size || len == 0)
        return 0;
    len = (size_t)MIN((uint64_t)len, MIN(size - off, (uint64_t)INT32_MAX));
    TRY(get(f, dst, len, off, e));
    hide_gaps(f, dst, len, off);
    return (ssize_t)len;
}

ssize_t intake_read(struct intake_file *f, void *dst, size_t len, uint64_t off,
                    struct err *e)
{
    ssize_t n;

    pthread_rwlock_rdlock(&f->lock);
    n = read_some(f, dst, len, off, e);
    pthread_rwlock_unlock(&f->lock);
    return n;
}

int intake_read_exact(struct intake_file *f, void *dst, size_t len, uint64_t off,
                      struct err *e)
{
    char *p = dst;

    while (len > 0) {
        ssize_t n = intake_read(f, p, len, off, e);

        if (n < 0)
            return (int)n;
        if (n == 0)
            return err_set(e, EIO, "%s: it ends at byte %" PRIu64, f->path, off);
        p += n;
        off += (uint64_t)n;
        len -= (size_t)n;
    }
    return 0;
}

/* ---- the header ---- */

/* Bytes from the start of the file that have arrived without a gap. */
static uint64_t prefix_of(struct intake_file *f)
{
    uint64_t n = 0;

    pthread_mutex_lock(&f->mutex);
    if (f->received.count > 0 && f->received.range[0].from == 0)
        n = f->received.range[0].to;
    pthread_mutex_unlock(&f->mutex);
    return n;
}

/* 1: it is whole and sound, and f->data and f->total are known; 0: more has to arrive. */
static int judge(struct intake_file *f, uint64_t prefix, struct err *e)
{
    struct incoming_header h;
    struct fd_use use;
    unsigned char len[PREFIX];
    int ret = fds_get(&f->intake->fds, f->intake->spec.dir, &f->plain, &use, e);

    if (ret < 0)
        return ret;
    ret = incoming_judge(use.fd, prefix, &h, e);
    if (ret > 0 && read_exact(use.fd, len, sizeof len, 0, e) < 0)
        ret = -e->code;
    fds_put(&f->intake->fds, &use);
    if (ret <= 0)
        return ret < 0 ? err_wrap(e, "%s", f->path) : 0;
    f->data = PREFIX + get_le64(len);
    f->total = h.size;
    return 1;
}

static int check_end(struct intake_file *f, uint64_t end, struct err *e)
{
    if (end <= f->total)
        return 0;
    return err_set(e, EINVAL,
                   "%s: byte %" PRIu64
                   " is behind its end, which its header says is at %" PRIu64,
                   f->path, end - 1, f->total);
}

/* What arrived before the header moves from the plain file to its places. */
static int move_early(struct intake_file *f, struct err *e)
{
    CLEANUP(ranges_release) struct ranges early = {0};
    CLEANUP_FREE char *block = malloc(BLOCK);
    int ret = block ? intake_received(f, &early, e) : err_nomem(e);

    for (size_t i = 0; ret == 0 && i < early.count; i++) {
        uint64_t at = MAX(early.range[i].from, f->data);

        while (ret == 0 && at < early.range[i].to) {
            size_t n = (size_t)MIN(early.range[i].to - at, (uint64_t)BLOCK);

            ret = staged_file_read(f->intake, &f->plain, block, n, at, e);
            if (ret == 0)
                ret = placement_write(f, block, n, at - f->data, false, e);
            at += n;
        }
    }
    return ret;
}

static int sync_staged(struct intake_file *f, struct staged *s, struct err *e)
{
    struct fd_use use;
    int ret;

    if (!atomic_exchange(&s->dirty, false))
        return 0;
    ret = fds_get(&f->intake->fds, f->intake->spec.dir, s, &use, e);
    if (ret == 0) {
        if (fsync(use.fd) < 0)
            ret = err_set(e, errno, "%s: %s", s->path, strerror(errno));
        fds_put(&f->intake->fds, &use);
    }
    if (ret < 0)
        atomic_store(&s->dirty, true);
    return ret;
}

static int sync_places(struct intake_file *f, struct err *e)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < f->p.files; i++)
        ret = sync_staged(f, &f->p.staged[i], e);
    return ret;
}

static void forget_places(struct intake_file *f)
{
    char path[PATH_MAX];
    struct err ignored = {0};

    placement_release(f);
    f->known = false;
    snprintf(path, sizeof path, "%s/placed", f->dir);
    (void)unlinkat(f->intake->spec.dir, path, 0);
    snprintf(path, sizeof path, "%s/data", f->dir);
    intake_remove_tree(f->intake->spec.dir, path, &ignored);
}

static int place(struct intake_file *f, bool resumed, struct err *e)
{
    int ret;

    f->laying = true;
    ret = placement_new(f, resumed, e);
    f->laying = false;
    f->known = ret == 0;
    atomic_store(&f->named, false);
    return ret < 0 ? err_wrap(e, "%s", f->path) : 0;
}

/* With the lock for writing: lays out what the header announces, once it is whole. */
static int accept_header(struct intake_file *f, struct err *e)
{
    uint64_t end;
    int ret = judge(f, prefix_of(f), e);

    if (ret <= 0)
        return ret;
    pthread_mutex_lock(&f->mutex);
    end = f->received.range[f->received.count - 1].to;
    pthread_mutex_unlock(&f->mutex);
    ret = check_end(f, end, e);
    if (ret == 0)
        ret = place(f, false, e);
    if (ret == 0)
        ret = move_early(f, e);
    if (ret == 0 && atomic_load(&f->synced))
        ret = sync_places(f, e); /* before the plain file is not looked at any more */
    if (ret == 0)
        ret = placement_mark(f, e);
    if (ret < 0)
        forget_places(f);
    return ret;
}

/* ---- writing ---- */

/* Into the plain file, until the header is whole. */
static int write_early(struct intake_file *f, const void *data, size_t len,
                       uint64_t off, struct err *e)
{
    CLEANUP(ranges_release) struct ranges before = {0};
    uint64_t size = intake_size(f);
    bool again;
    int ret = intake_received(f, &before, e);

    if (ret == 0)
        ret = claim(f, off, off + len, &again, e);
    if (ret == 0)
        ret = put(f, data, len, off, true, e);
    if (ret == 0)
        ret = arrived(f, off, off + len, e);
    if (ret == 0)
        ret = accept_header(f, e);
    if (ret >= 0)
        return 0;
    pthread_mutex_lock(&f->mutex);
    if (ranges_copy(&f->received, &before) == 0)
        f->size = size;
    pthread_mutex_unlock(&f->mutex);
    return ret;
}

static int write_known(struct intake_file *f, const void *data, size_t len,
                       uint64_t off, struct err *e)
{
    bool again;
    int ret = check_end(f, off + len, e);

    if (ret == 0)
        ret = claim(f, off, off + len, &again, e);
    if (ret == 0)
        ret = put(f, data, len, off, again, e);
    return ret == 0 ? arrived(f, off, off + len, e) : ret;
}

/* All data that has arrived goes back to the plain file: another header lays it out. */
static int move_back(struct intake_file *f, struct err *e)
{
    CLEANUP(ranges_release) struct ranges all = {0};
    CLEANUP_FREE char *block = malloc(BLOCK);
    int ret = block ? intake_received(f, &all, e) : err_nomem(e);

    for (size_t i = 0; ret == 0 && i < all.count; i++) {
        uint64_t at = MAX(all.range[i].from, f->data);

        while (ret == 0 && at < all.range[i].to) {
            size_t n = (size_t)MIN(all.range[i].to - at, (uint64_t)BLOCK);

            ret = placement_read(f, block, n, at - f->data, e);
            if (ret == 0)
                ret = staged_file_write(f->intake, &f->plain, block, n, at, e);
            at += n;
        }
    }
    if (ret == 0)
        ret = sync_staged(f, &f->plain, e);
    if (ret == 0)
        forget_places(f);
    return ret;
}

/* Another header of which more has to arrive: what follows is not the data of it. */
static int forget_behind(struct intake_file *f, uint64_t at, struct err *e)
{
    int ret;

    pthread_mutex_lock(&f->mutex);
    ret = ranges_remove(&f->received, at, UINT64_MAX);
    pthread_mutex_unlock(&f->mutex);
    return no_memory(e, ret);
}

/*
 * Bytes of the header that are not as they were: a bad header changes nothing, a good one
 * lays the data out again.
 */
static int change_header(struct intake_file *f, const void *data, size_t len,
                         uint64_t off, struct err *e)
{
    uint64_t was_data = f->data, was_total = f->total, end = off + len;
    CLEANUP_FREE char *old = malloc(len);
    int whole, ret = old ? staged_file_read(f->intake, &f->plain, old, len, off, e)
                         : err_nomem(e);

    if (ret < 0)
        return ret;
    ret = staged_file_write(f->intake, &f->plain, data, len, off, e);
    whole = ret == 0 ? judge(f, MIN(prefix_of(f), MAX(end, was_data)), e) : ret;
    f->data = was_data;
    f->total = was_total;
    if (whole < 0) {
        staged_file_write(f->intake, &f->plain, old, len, off, &(struct err){0});
        return whole;
    }
    ret = move_back(f, e);
    if (ret == 0 && whole == 0)
        ret = forget_behind(f, end, e);
    return ret == 0 ? write_early(f, data, len, off, e) : ret;
}

static int write_header(struct intake_file *f, const void *data, size_t len,
                        uint64_t off, struct err *e)
{
    size_t n = (size_t)MIN((uint64_t)len, f->data - off);
    CLEANUP_FREE char *old = malloc(n);
    int ret =
        old ? staged_file_read(f->intake, &f->plain, old, n, off, e) : err_nomem(e);

    if (ret < 0)
        return ret;
    if (memcmp(old, data, n) != 0)
        return change_header(f, data, len, off, e);
    return len > n ? write_known(f, (const char *)data + n, len - n, off + n, e) : 0;
}

static int write_locked(struct intake_file *f, const void *data, size_t len,
                        uint64_t off, struct err *e)
{
    if (!f->known)
        return write_early(f, data, len, off, e);
    return off < f->data ? write_header(f, data, len, off, e)
                         : write_known(f, data, len, off, e);
}

int intake_write(struct intake_file *f, const void *data, size_t len, uint64_t off,
                 struct err *e)
{
    bool many;
    int ret;

    if (len == 0)
        return 0;
    if (off > INT64_MAX || len > INT64_MAX - off)
        return err_set(e, EFBIG, "%s: over 2^63 bytes", f->path);
    pthread_rwlock_rdlock(&f->lock);
    many = f->known && off >= f->data; /* as many threads as like */
    ret = many ? write_known(f, data, len, off, e) : 0;
    pthread_rwlock_unlock(&f->lock);
    if (many)
        return ret;
    pthread_rwlock_wrlock(&f->lock);
    ret = write_locked(f, data, len, off, e);
    pthread_rwlock_unlock(&f->lock);
    return ret;
}

/* ---- truncation and holes ---- */

/* With the lock for writing: the file is cut within its header, and starts again. */
static int cut_plain(struct intake_file *f, uint64_t size, struct err *e)
{
    struct fd_use use;
    int ret;

    if (f->known)
        forget_places(f);
    ret = fds_get(&f->intake->fds, f->intake->spec.dir, &f->plain, &use, e);
    if (ret < 0)
        return ret;
    if (ftruncate(use.fd, (off_t)size) < 0)
        ret = err_set(e, errno, "%s: %s", f->path, strerror(errno));
    fds_put(&f->intake->fds, &use);
    if (ret < 0)
        return ret;
    pthread_mutex_lock(&f->mutex);
    ret = ranges_remove(&f->claimed, size, UINT64_MAX);
    pthread_mutex_unlock(&f->mutex);
    return no_memory(e, ret);
}

static int truncate_locked(struct intake_file *f, uint64_t size, struct err *e)
{
    int ret = 0;

    if (size < f->data || !f->known)
        ret = cut_plain(f, size, e);
    if (ret < 0)
        return ret;
    pthread_mutex_lock(&f->mutex);
    ret = ranges_remove(&f->received, size, UINT64_MAX);
    if (ret == 0)
        f->size = size;
    pthread_mutex_unlock(&f->mutex);
    return no_memory(e, ret);
}

int intake_truncate(struct intake_file *f, uint64_t size, struct err *e)
{
    int ret;

    if (size > INT64_MAX)
        return err_set(e, EFBIG, "%s: over 2^63 bytes", f->path);
    pthread_rwlock_wrlock(&f->lock);
    ret = truncate_locked(f, size, e);
    pthread_rwlock_unlock(&f->lock);
    return ret;
}

/* The next bytes of the gap, at most a block; `stale`: they may have been written. */
static size_t next_block(struct intake_file *f, const struct range *gap, uint64_t at,
                         bool *stale)
{
    uint64_t to = MIN(gap->to, at + BLOCK);

    pthread_mutex_lock(&f->mutex);
    *stale = ranges_meet(&f->claimed, at, to);
    pthread_mutex_unlock(&f->mutex);
    return (size_t)(to - at);
}

/* Zeros are written only where other bytes may be: what was made has zeros. */
static int fill_gap(struct intake_file *f, const struct range *gap, const char *zeros,
                    struct err *e)
{
    int ret = 0;

    for (uint64_t at = gap->from; ret == 0 && at < gap->to;) {
        bool stale;
        size_t n = next_block(f, gap, at, &stale);

        ret = stale ? put(f, zeros, n, at, true, e) : 0;
        if (ret == 0)
            ret = arrived(f, at, at + n, e);
        at += n;
    }
    return ret;
}

static int confirm_locked(struct intake_file *f, struct err *e)
{
    CLEANUP(ranges_release) struct ranges had = {0};
    CLEANUP_FREE char *zeros = calloc(1, BLOCK);
    uint64_t end = intake_size(f);
    struct range gap;
    int ret = zeros ? intake_received(f, &had, e) : err_nomem(e);

    if (f->known)
        end = MIN(end, f->total);
    for (uint64_t at = 0; ret == 0 && ranges_next_gap(&had, &at, end, &gap);)
        ret = fill_gap(f, &gap, zeros, e);
    return ret == 0 && !f->known ? MIN(accept_header(f, e), 0) : ret;
}

int intake_confirm(struct intake_file *f, struct err *e)
{
    int ret = 0;

    pthread_rwlock_wrlock(&f->lock);
    if (!has(f, 0, intake_size(f)))
        ret = confirm_locked(f, e);
    pthread_rwlock_unlock(&f->lock);
    return ret;
}

/* ---- durability ---- */

static int sync_locked(struct intake_file *f, struct err *e)
{
    int lost = atomic_load(&f->intake->fds.lost), ret = sync_places(f, e);

    if (ret == 0)
        ret = sync_staged(f, &f->plain, e);
    if (ret == 0 && lost)
        ret = err_set(e, lost, "%s: bytes were lost: %s", f->path, strerror(lost));
    /* Names of many files, in directories below each other. */
    if (ret == 0 && !atomic_load(&f->named) && syncfs(f->intake->spec.dir) < 0)
        ret = err_set(e, errno, "syncfs: %s", strerror(errno));
    if (ret == 0) {
        atomic_store(&f->named, true);
        atomic_store(&f->synced, true);
    }
    return ret;
}

int intake_sync(struct intake_file *f, struct err *e)
{
    int ret;

    pthread_rwlock_rdlock(&f->lock);
    ret = sync_locked(f, e);
    pthread_rwlock_unlock(&f->lock);
    return ret;
}

/* ---- taking up ---- */

static int restore_locked(struct intake_file *f, const struct ranges *received,
                          uint64_t size, struct err *e)
{
    int ret = ranges_copy(&f->received, received);

    if (ret == 0)
        ret = ranges_add(&f->claimed, 0, UINT64_MAX);
    if (ret < 0)
        return err_nomem(e);
    f->size = size;
    atomic_store(&f->synced, true);
    ret = judge(f, prefix_of(f), e);
    if (ret <= 0)
        return ret;
    return place(f, true, e);
}

/* Without its places only the header is left, or nothing. */
static int restore_header(struct intake_file *f, struct err *e)
{
    int ret;

    forget_places(f);
    pthread_mutex_lock(&f->mutex);
    ret = ranges_remove(&f->received, f->data, UINT64_MAX);
    pthread_mutex_unlock(&f->mutex);
    return ret < 0 ? err_nomem(e) : MIN(accept_header(f, e), 0);
}

int intake_restore(struct intake_file *f, const struct ranges *received, uint64_t size,
                   struct err *e)
{
    int ret;

    pthread_rwlock_wrlock(&f->lock);
    ret = restore_locked(f, received, size, e);
    if (ret == -ESTALE)
        ret = restore_header(f, e);
    else if (ret < 0 && ret != -ENOMEM)
        ret = truncate_locked(f, 0, e);
    pthread_rwlock_unlock(&f->lock);
    return ret;
}

/* ---- what is missing ---- */

/* Of a header that is not whole: its length, or the rest of it. */
static uint64_t wanted(struct intake_file *f, struct err *e)
{
    unsigned char len[PREFIX];

    if (f->known)
        return f->total;
    if (!has(f, 0, PREFIX) ||
        staged_file_read(f->intake, &f->plain, len, sizeof len, 0, e) < 0 ||
        get_le64(len) > INT32_MAX)
        return PREFIX;
    return PREFIX + get_le64(len);
}

int intake_missing(struct intake_file *f, struct ranges *out, uint64_t *total,
                   struct err *e)
{
    struct range gap;
    uint64_t end;
    int ret = 0;

    ranges_clear(out);
    pthread_rwlock_rdlock(&f->lock);
    end = wanted(f, e);
    *total = f->known ? f->total : 0;
    pthread_mutex_lock(&f->mutex);
    for (uint64_t at = 0; ret == 0 && ranges_next_gap(&f->received, &at, end, &gap);)
        ret = ranges_add(out, gap.from, gap.to);
    pthread_mutex_unlock(&f->mutex);
    pthread_rwlock_unlock(&f->lock);
    return no_memory(e, ret);
}

bool intake_complete(struct intake_file *f)
{
    bool all;

    pthread_rwlock_rdlock(&f->lock);
    all = f->known && intake_size(f) == f->total && has(f, 0, f->total);
    pthread_rwlock_unlock(&f->lock);
    return all;
}

bool intake_is_placed(struct intake_file *f)
{
    bool all;

    pthread_rwlock_rdlock(&f->lock);
    all = f->known;
    for (size_t i = 0; all && i < f->p.tensors; i++)
        all = f->p.tensor[i].places > 0;
    pthread_rwlock_unlock(&f->lock);
    return all;
}

/* ---- as a source ---- */

struct incoming_source {
    struct source base;
    struct intake_file *f;
};

/* The header also while its file is locked, by who lays it out. */
static int source_read_range(struct source *s, uint64_t off, size_t len, void *dst,
                             struct err *e)
{
    struct intake_file *f = container_of(s, struct incoming_source, base)->f;

    return off + len <= f->data
               ? staged_file_read(f->intake, &f->plain, dst, len, off, e)
               : intake_read_exact(f, dst, len, off, e);
}

static void source_close(struct source *s)
{
    free(container_of(s, struct incoming_source, base));
}

int intake_source(struct intake_file *f, struct source **out, struct err *e)
{
    static const struct source_ops ops = {
        .name = "intake", .read = source_read_range, .close = source_close};
    struct incoming_source *s;
    int ret;

    if (!f->known && !f->laying)
        return err_set(e, EINVAL, "%s: its header has not arrived", f->path);
    s = calloc(1, sizeof *s);
    if (!s)
        return err_nomem(e);
    s->f = f;
    ret = source_init(&s->base, &ops, f->path, f->total, e);
    if (ret < 0)
        free(s);
    else
        *out = &s->base;
    return ret;
}
