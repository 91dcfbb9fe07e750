/* SPDX-License-Identifier: MIT */
/* lib/origin_mount.c - a checkpoint shown by a mount: its server tells where the bytes are. */
#include "lib/origin.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "base/json.h"
#include "base/pool.h"
#include "index/names.h"
#include "lib/plan_ask.h"
#include "lib/plan_open.h"

enum {
    FUSE_MAGIC = 0x65735546, /* FUSE_SUPER_MAGIC of linux/magic.h */
    REPORT_MAX = 1 << 30,
    PLAN_MEMORY = 1 << 30,
    TRIES = 2, /* a checkpoint may change while its plan is worked off: once more */
};

struct mount_origin {
    struct origin base;
    char *dir;
};

static struct mount_origin *mount_of(struct origin *o)
{
    return container_of(o, struct mount_origin, base);
}

/* ---- one tensor ---- */

/* The file that shows a tensor: raw/KEY, or where that view is not shown tensors/KEY.npy. */
static int tensor_path(const struct mount_origin *m, const struct row *row,
                       char path[PATH_MAX], struct err *e)
{
    static const char *const view[][2] = {{"raw", ""}, {"tensors", ".npy"}};
    struct stat st;

    for (size_t i = 0; i < ARRAY_SIZE(view); i++) {
        CLEANUP(buf_release) struct buf name = {0};

        if (name_of_key(row->key, row->key_len, view[i][1], &name) < 0)
            return err_nomem(e);
        if (snprintf(path, PATH_MAX, "%s/%s/%s", m->dir, view[i][0], name.data) <
                PATH_MAX &&
            stat(path, &st) == 0)
            return 0;
    }
    return err_set(e, ENOENT, "%s: the mount shows no tensor %s", m->dir, row->key);
}

static int check_same(const struct row *row, const struct plan_wire *p, struct err *e)
{
    if (p->dtype == row->dtype && shape_equal(&p->shape, &row->shape))
        return 0;
    return err_set(e, ESTALE, "%s: the checkpoint changed since it was opened",
                   row->key);
}

/*
 * A tensor that is shown cast was rounded to what it is shown as: another type, or factors,
 * start from there, not from what is stored.
 */
static bool rounds_before(const struct plan_wire *p, const struct gather_part *part)
{
    return p->stored != p->dtype &&
           (part->scale || (part->dtype != DTYPE_NONE && part->dtype != p->dtype));
}

/* By the server's plan. -ENOTTY: the file has to be read. */
static int by_plan(const char *path, const struct row *row,
                   const struct gather_part *part, struct gather **out, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(PLAN_MEMORY);
    struct plan_wire p;
    int ret = a ? plan_ask(path, a, &p, e) : err_nomem(e);

    if (ret == 0)
        ret = check_same(row, &p, e);
    if (ret < 0)
        return ret;
    if (p.through || rounds_before(&p, part))
        return -ENOTTY;
    ret = plan_gather(&p, part, out, e);
    /* Files that this process cannot see or open are the server's to read. */
    return ret == -ENOENT || ret == -EACCES || ret == -EPERM ? -ENOTTY : ret;
}

static int mount_gather(struct origin *o, const struct row *row,
                        const struct gather_part *part, struct gather **out,
                        struct err *e)
{
    char path[PATH_MAX];
    int ret = tensor_path(mount_of(o), row, path, e);

    if (ret < 0)
        return ret;
    for (int i = 0; i < TRIES; i++) {
        *e = (struct err){0};
        ret = by_plan(path, row, part, out, e);
        if (ret != -ESTALE)
            break;
    }
    if (ret != -ENOTTY)
        return ret < 0 ? err_wrap(e, "%s", path) : 0;
    *e = (struct err){0};
    return plan_gather_file(path, &row->shape, row->dtype, part, out, e);
}

static void mount_close(struct origin *o)
{
    struct mount_origin *m = mount_of(o);

    pool_free(o->pool);
    origin_release(o);
    free(m->dir);
    free(m);
}

static const struct origin_ops mount_ops = {
    .gather = mount_gather,
    .close = mount_close,
};

/* ---- the table in .unshard/checkpoint.json ---- */

static int read_shape(const struct json *v, struct shape *out)
{
    out->nd = 0;
    for (const struct json *d = json_first(v); d; d = json_next(d))
        if (out->nd == SHAPE_MAX_DIMS || !json_u64(d, &out->dim[out->nd++]))
            return -EBADMSG;
    return json_kind(v) == JSON_ARRAY ? 0 : -EBADMSG;
}

static int add_tensor(struct mount_origin *m, const struct json *t, struct err *e)
{
    struct row row = {0};
    const char *dtype, *role = NULL;

    if (!json_string(json_get(t, "key"), &row.key) ||
        !json_string(json_get(t, "dtype"), &dtype) ||
        !json_string(json_get(t, "role"), &role) || !json_get(t, "shape") ||
        read_shape(json_get(t, "shape"), &row.shape) < 0)
        return err_set(e, EBADMSG, "a tensor is not described as it should be");
    row.key_len = strlen(row.key);
    row.dtype = dtype_from_name(dtype);
    for (unsigned r = ROLE_MODEL; r <= ROLE_OTHER; r++)
        if (!strcmp(role, role_name((enum role)r)))
            row.role = role_name((enum role)r);
    json_string(json_get(t, "fault"), &row.fault);
    /* A tensor with a fault may have a strange type or shape; nothing of it is read. */
    if (!row.role ||
        (row.fault ? !json_u64(json_get(t, "bytes"), &row.bytes)
                   : row.dtype == DTYPE_NONE ||
                         shape_bytes(&row.shape, row.dtype, &row.bytes, e) < 0))
        return err_set(e, EBADMSG, "%s: type, shape or role is not known", row.key);
    return origin_add(&m->base, &row, e);
}

static int read_report(int fd, struct buf *out, struct err *e)
{
    char *at;
    ssize_t n = 1;

    while (n > 0) {
        at = buf_grow(out, 1 << 16);
        if (!at)
            return err_nomem(e);
        n = read(fd, at, 1 << 16);
        out->len -= (1 << 16) - (n > 0 ? (size_t)n : 0);
        if (n < 0 && errno == EINTR)
            n = 1;
        else if (n < 0)
            return err_set(e, errno, "%s", strerror(errno));
    }
    return 0;
}

static int read_rows(struct mount_origin *m, int fd, struct err *e)
{
    const struct json_limits limits = {
        .bytes = REPORT_MAX, .values = 100000000, .nul_ok = true};
    CLEANUP(buf_release) struct buf text = {.max = REPORT_MAX};
    CLEANUP(json_freep) struct json *doc = NULL;
    const char *why;
    int ret = read_report(fd, &text, e);

    if (ret == 0)
        ret = json_parse(text.data, text.len, &limits, &doc, e);
    if (ret == 0 && json_string(json_get(doc, "error"), &why))
        ret = err_set(e, EBADMSG, "%s", why);
    for (const struct json *t = ret < 0 ? NULL : json_first(json_get(doc, "tensors"));
         ret == 0 && t; t = json_next(t))
        ret = add_tensor(m, t, e);
    return ret < 0 ? err_wrap(e, "%s/.unshard/checkpoint.json", m->dir) : 0;
}

/* The table of a directory in a mount of ours, or -1. */
static int open_report(const char *source)
{
    char path[PATH_MAX];
    struct statfs fs;
    CLEANUP_FD int fd = -1;

    if (snprintf(path, sizeof path, "%s/.unshard/checkpoint.json", source) >= PATH_MAX)
        return -1;
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstatfs(fd, &fs) < 0 || fs.f_type != FUSE_MAGIC)
        return -1;
    return steal_fd(&fd);
}

int origin_mount(const char *source, const struct origin_options *options,
                 struct origin **out, struct err *e)
{
    CLEANUP_FD int fd = open_report(source);
    const struct mapping_choice *mapping = &options->mapping;
    struct mount_origin *m;
    int ret;

    if (fd < 0)
        return err_set(e, ENOTTY, "%s: not in a mount", source);
    if (mapping->map || mapping->hf || mapping->dtype || mapping->module_weights) {
        err_set(e, EINVAL, "%s: a mount has a map of its own", source);
        return err_hint(e, "open what it is a mount of, or mount that with the map");
    }
    m = calloc(1, sizeof *m);
    if (!m)
        return err_nomem(e);
    ret = origin_init(&m->base, &mount_ops, e);
    if (ret == 0)
        ret = pool_new(options->jobs, &m->base.pool, e);
    m->dir = ret == 0 ? realpath(source, NULL) : NULL;
    if (ret == 0 && !m->dir)
        ret = err_set(e, errno, "%s: %s", source, strerror(errno));
    if (ret == 0)
        ret = read_rows(m, fd, e);
    if (ret < 0) {
        mount_close(&m->base);
        return ret;
    }
    origin_sort(&m->base);
    *out = &m->base;
    return 0;
}
