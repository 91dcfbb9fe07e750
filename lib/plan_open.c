/* SPDX-License-Identifier: MIT */
/* lib/plan_open.c - opens what a plan names, checks that it is that, and gathers from it. */
#include "lib/plan_open.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/xattr.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "remote/source.h"

/* The sources of a plan while its gather is made. */
struct sources {
    struct source **src;
    size_t n;
};

static void sources_release(struct sources *s)
{
    for (size_t i = 0; i < s->n; i++)
        source_put(s->src[i]);
    free(s->src);
}

/* A regular file; a fifo that took its place is not waited for. */
static int open_fd(const char *path, int *fd, struct err *e)
{
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    return *fd < 0 ? err_set(e, errno, "%s: %s", path, strerror(errno)) : 0;
}

static int open_source(const struct wire_source *w, struct source **out, struct err *e)
{
    int fd, ret = open_fd(w->path, &fd, e);

    if (ret == 0)
        ret = source_from_fd(fd, w->path, out, e);
    if (ret < 0)
        return ret;
    if ((*out)->size == w->size && (*out)->id.mtime_ns == w->mtime_ns)
        return 0;
    source_putp(out);
    return err_set(e, ESTALE, "%s: it changed since the plan was made", w->path);
}

/* One value all over the box, as a source of as many bytes. */
static int open_fill(const struct wire_piece *w, uint32_t nd, unsigned unit,
                     int64_t *step, struct source **out, struct err *e)
{
    uint64_t size = unit;

    for (uint32_t k = nd; k-- > 0;) {
        step[k] = (int64_t)size;
        if (mul_overflows(size, w->size[k], &size) || size > INT64_MAX)
            return err_set(e, EBADMSG, "a piece of more than 2^63 bytes");
    }
    return source_from_fill(w->value, unit, size, out, e);
}

/* Sources of files first, then one a fill; `steps` has a row for each of these. */
static int open_all(const struct plan_wire *p, struct sources *s,
                    struct gather_piece *piece, int64_t *steps, struct err *e)
{
    uint32_t nd = p->units.nd;
    unsigned unit = dtype_unit(p->stored);
    int ret = 0;

    for (; ret == 0 && s->n < p->sources; s->n += ret == 0)
        ret = open_source(&p->source[s->n], &s->src[s->n], e);
    for (size_t i = 0; ret == 0 && i < p->pieces; i++) {
        const struct wire_piece *w = &p->piece[i];

        piece[i] = (struct gather_piece){.start = w->start,
                                         .size = w->size,
                                         .step = w->step,
                                         .base = w->base,
                                         .source = w->source,
                                         .flags = w->flags};
        if (!w->fill)
            continue;
        ret = open_fill(w, nd, unit, steps, &s->src[s->n], e);
        piece[i].base = 0;
        piece[i].step = steps;
        piece[i].source = (uint32_t)s->n;
        s->n += ret == 0;
        steps += nd;
    }
    return ret;
}

static size_t count_fills(const struct plan_wire *p)
{
    size_t n = 0;

    for (size_t i = 0; i < p->pieces; i++)
        n += p->piece[i].fill;
    return n;
}

int plan_gather(const struct plan_wire *p, const struct gather_part *part,
                struct gather **out, struct err *e)
{
    size_t fills = count_fills(p);
    CLEANUP(sources_release)
    struct sources s = {.src = calloc(p->sources + fills + 1, sizeof *s.src)};
    CLEANUP_FREE struct gather_piece *piece = calloc(p->pieces + 1, sizeof *piece);
    CLEANUP_FREE int64_t *steps = calloc(fills * p->units.nd + 1, sizeof *steps);
    struct gather_request r = {.shape = &p->shape,
                               .stored = p->stored,
                               .dtype = part->dtype ? part->dtype : p->dtype,
                               .piece = piece,
                               .pieces = p->pieces,
                               .source = s.src,
                               .start = part->start,
                               .size = part->size,
                               .scale = part->scale};

    if (!s.src || !piece || !steps)
        return err_nomem(e);
    TRY(open_all(p, &s, piece, steps, e));
    r.sources = s.n;
    return gather_new(&r, out, e);
}

/* Is the attribute of the open file this text, or not there at all? */
static bool attribute_is(int fd, const char *name, const char *want)
{
    char value[SHAPE_MAX_DIMS * 24];
    ssize_t n = fgetxattr(fd, name, value, sizeof value);

    if (n < 0)
        return errno == ENODATA || errno == EOPNOTSUPP;
    return (size_t)n == strlen(want) && memcmp(value, want, (size_t)n) == 0;
}

/* What a mount says of the file must be what its reader takes it for. */
static int check_shown(int fd, const char *path, const struct shape *shape,
                       enum dtype dtype, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {0};

    if (shape_format(shape, &text) < 0)
        return err_nomem(e);
    if (attribute_is(fd, "user.unshard.dtype", dtype_name(dtype)) &&
        attribute_is(fd, "user.unshard.shape", text.data))
        return 0;
    err_set(e, ESTALE, "%s: the checkpoint changed since it was opened", path);
    return err_hint(e, "open it again");
}

int plan_gather_file(const char *path, const struct shape *shape, enum dtype dtype,
                     const struct gather_part *part, struct gather **out, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP_FD int fd = -1;
    uint64_t start[SHAPE_MAX_DIMS] = {0}, bytes;
    int64_t step[SHAPE_MAX_DIMS];
    struct shape units;
    struct gather_piece piece = {.start = start, .size = units.dim, .step = step};
    struct gather_request r = {.shape = shape,
                               .stored = dtype,
                               .dtype = part->dtype ? part->dtype : dtype,
                               .piece = &piece,
                               .source = &src,
                               .sources = 1,
                               .start = part->start,
                               .size = part->size,
                               .scale = part->scale};
    uint64_t at = dtype_unit(dtype);
    int ret = shape_units(shape, dtype, &units, e);

    if (ret == 0)
        ret = shape_bytes(shape, dtype, &bytes, e);
    if (ret == 0)
        ret = open_fd(path, &fd, e);
    if (ret == 0)
        ret = check_shown(fd, path, shape, dtype, e);
    if (ret == 0)
        ret = source_from_fd(steal_fd(&fd), path, &src, e);
    if (ret < 0)
        return ret;
    if (src->size < bytes)
        return err_set(e, EBADMSG, "%s: %" PRIu64 " bytes, the tensor has %" PRIu64,
                       path, src->size, bytes);
    for (uint32_t k = units.nd; bytes && k-- > 0; at *= units.dim[k])
        step[k] = (int64_t)at;
    piece.base = src->size - bytes;
    r.pieces = bytes > 0;
    return gather_new(&r, out, e);
}
