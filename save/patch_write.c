/* SPDX-License-Identifier: MIT */
/* save/patch_write.c - copies of files, and the changed tensors written into them. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "base/err.h"
#include "base/fsutil.h"
#include "base/pool.h"
#include "gpu/assemble.h"
#include "remote/source.h"
#include "save/patch_priv.h"

enum {
    COPY_BLOCK = 8 << 20,
    WINDOW = SAVE_WINDOW, /* of a tensor */
    SPAN = 1 << 20,       /* of a file that is read to change some bytes of it */
};

static int fail(const struct patch_file *f, struct err *e)
{
    return err_set(e, errno, "%s: %s", f->path, strerror(errno));
}

int patch_write_at(const struct patch_file *f, const void *data, uint64_t len,
                   uint64_t at, struct err *e)
{
    const char *p = data;

    while (len > 0) {
        ssize_t n = pwrite(f->fd, p, (size_t)MIN(len, (uint64_t)1 << 30), (off_t)at);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail(f, e);
        p += n;
        at += (uint64_t)n;
        len -= (uint64_t)n;
    }
    return 0;
}

/* ---- the copy ---- */

/*
 * Bytes [from, to) as they are. The kernel reads them out of the mapping, so that a file
 * that is cut meanwhile gives EFAULT and no signal.
 */
static int copy_range(const struct patch_file *f, uint64_t from, uint64_t to,
                      struct err *e)
{
    const char *map = source_map(f->src);
    CLEANUP_FREE char *block = map ? NULL : malloc(COPY_BLOCK);
    int ret = map || block ? 0 : err_nomem(e);

    while (ret == 0 && from < to) {
        size_t n = (size_t)MIN(to - from, (uint64_t)COPY_BLOCK);

        if (!map)
            ret = source_read(f->src, from, n, block, e);
        if (ret == 0)
            ret = patch_write_at(f, map ? map + from : block, n, from, e);
        from += n;
    }
    return ret;
}

/* All but what is written over. */
static int copy_rest(const struct patch *p, uint32_t file, struct err *e)
{
    const struct patch_file *f = &p->file[file];
    uint64_t at = 0;
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < p->ranges; i++) {
        const struct patch_range *r = &p->range[i];

        if (r->file != file || !r->whole)
            continue;
        if (r->from > at)
            ret = copy_range(f, at, r->from, e);
        at = MAX(at, r->to);
    }
    if (ret == 0 && at < f->id.size)
        ret = copy_range(f, at, f->id.size, e);
    return ret == 0 ? source_check(f->src, e) : ret;
}

static int make_parents(int dir, const struct patch_file *f, struct err *e)
{
    char part[PATH_MAX];

    for (const char *slash = strchr(f->path, '/'); slash;
         slash = strchr(slash + 1, '/')) {
        memcpy(part, f->path, (size_t)(slash - f->path));
        part[slash - f->path] = '\0';
        if (mkdirat(dir, part, 0777) < 0 && errno != EEXIST)
            return fail(f, e);
    }
    return 0;
}

static int begin_file(void *user, size_t i, struct err *e)
{
    const struct patch *p = user;
    struct patch_file *f = &p->file[i];

    TRY(make_parents(p->out, f, e));
    f->fd = openat(p->out, f->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
                   0600);
    if (f->fd < 0 || ftruncate(f->fd, (off_t)f->id.size) < 0)
        return fail(f, e);
    return copy_rest(p, (uint32_t)i, e);
}

/* ---- the bytes ---- */

/* The bytes between the first and the last of copies [first, end) of a run. */
static uint64_t span_of(const struct plan_run *r, uint64_t first, uint64_t end,
                        uint64_t *from)
{
    uint64_t step = (uint64_t)(r->src_step < 0 ? -r->src_step : r->src_step);

    *from = r->src_step < 0 ? r->src - (end - 1) * step : r->src + first * step;
    return (end - 1 - first) * step + r->len;
}

/* As many copies of it as a span holds; at least one. */
static uint64_t copies_in_span(const struct plan_run *r, uint64_t first)
{
    uint64_t step = (uint64_t)(r->src_step < 0 ? -r->src_step : r->src_step);
    uint64_t n = step && r->len < SPAN ? (SPAN - r->len) / step + 1 : 1;

    return first + MIN(n, r->count - first);
}

/*
 * Bytes between others, which are read and written again. They are the same tensor's, as
 * no other changed one has any between them, and one thread writes a tensor.
 */
static int put_span(const struct patch_file *f, const struct plan_run *r,
                    uint64_t first, uint64_t end, const unsigned char *window,
                    unsigned char *span, struct err *e)
{
    uint64_t from, len = span_of(r, first, end, &from);
    uint64_t at = r->src_step < 0 ? r->src - first * (uint64_t)-r->src_step - from : 0;
    const struct assemble_run run = {.piece = span + at,
                                     .at = r->dst + first * r->dst_step,
                                     .len = r->len,
                                     .count = end - first,
                                     .piece_step = r->src_step,
                                     .at_step = r->dst_step,
                                     .flags = r->flags,
                                     .component = r->component};
    int ret;

    ret = read_exact(f->fd, span, (size_t)len, from, e);
    if (ret == 0)
        ret = assembler_cpu.scatter(&assembler_cpu, &run, 1, window, WINDOW, e);
    if (ret == 0)
        ret = patch_write_at(f, span, len, from, e);
    return ret < 0 ? err_wrap(e, "%s", f->path) : 0;
}

static int put_run(const struct patch_file *f, const struct plan_run *r,
                   const unsigned char *window, unsigned char *span, struct err *e)
{
    int ret = 0;

    if (r->count == 1 && !r->flags)
        return patch_write_at(f, window + r->dst, r->len, r->src, e);
    for (uint64_t k = 0; ret == 0 && k < r->count;) {
        uint64_t end = copies_in_span(r, k);

        ret = put_span(f, r, k, end, window, span, e);
        k = end;
    }
    return ret;
}

/* Of the window at `off` what belongs to one piece. */
static int put_piece(const struct patch *p, const struct patch_piece *x, uint64_t off,
                     uint64_t len, unsigned char *window, struct err *e)
{
    struct run_list runs = {0};
    int ret = 0;

    if (x->first >= off + len || x->after <= off)
        return 0;
    ret = plan_op_cut(&x->op, off, len, 0, &runs, e);
    for (size_t i = 0; ret == 0 && i < runs.count; i++)
        ret = put_run(&p->file[x->file], &runs.run[i], window, window + WINDOW, e);
    run_list_release(&runs);
    return ret;
}

static int put_tensor(void *user, size_t n, struct err *e)
{
    const struct patch *p = user;
    const struct patch_tensor *t = &p->tensor[n];
    const struct save_source *s = &p->spec.source;
    CLEANUP_FREE unsigned char *window = malloc(WINDOW + SPAN + WINDOW);
    int ret = window ? 0 : err_nomem(e);

    for (uint64_t off = 0; ret == 0 && off < t->bytes; off += WINDOW) {
        uint64_t len = MIN(t->bytes - off, (uint64_t)WINDOW);

        ret = s->read(s->user, t->change.tensor, off, (size_t)len, window, e);
        for (size_t i = 0; ret == 0 && i < t->pieces; i++)
            ret = put_piece(p, &t->piece[i], off, len, window, e);
    }
    return ret;
}

/* ---- the end ---- */

/* Checksums, rights, and that the disk has it. */
static int end_file(void *user, size_t i, struct err *e)
{
    const struct patch *p = user;
    const struct patch_file *f = &p->file[i];

    TRY(patch_sum_zip(p, (uint32_t)i, e));
    if (geteuid() == 0 && fchown(f->fd, f->st.st_uid, f->st.st_gid) < 0)
        return fail(f, e);
    if (fchmod(f->fd, f->st.st_mode & 07777) < 0)
        return fail(f, e);
    return fsync(f->fd) < 0 ? fail(f, e) : 0;
}

static int check_room(const struct patch *p, int dir, struct err *e)
{
    uint64_t need = 0, have;
    struct statvfs v;

    for (size_t i = 0; i < p->files; i++)
        need += p->file[i].id.size;
    if (fstatvfs(dir, &v) < 0)
        return 0; /* then writing will tell */
    have = (uint64_t)v.f_bavail * v.f_frsize;
    return need <= have ? 0
                        : err_set(e, ENOSPC,
                                  "%" PRIu64 " bytes are needed, %" PRIu64 " are free",
                                  need, have);
}

int patch_write(struct patch *p, int dir, struct err *e)
{
    struct pool *pool = p->spec.env->pool;

    if (p->files == 0)
        return 0;
    TRY(check_room(p, dir, e));
    p->out = dir;
    TRY(pool_each(pool, p->files, begin_file, p, e));
    TRY(pool_each(pool, p->tensors, put_tensor, p, e));
    TRY(pool_each(pool, p->files, end_file, p, e));
    return patch_sum_digests(p, e);
}
