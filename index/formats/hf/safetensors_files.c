/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_files.c - the safetensors files of a checkpoint and their headers. */
#include "index/formats/hf/safetensors_files.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <string.h>

#include "base/pool.h"
#include "index/formats/format.h"
#include "remote/source.h"

enum { MAX_HEADERS = 1 << 30 /* of all files of a model; 50 MB is a large one */ };

int safetensors_files_new(struct safetensors_files *f, size_t count, struct err *e)
{
    f->file = calloc(count + 1, sizeof *f->file);
    f->count = f->file ? count : 0;
    return f->file ? 0 : err_nomem(e);
}

void safetensors_files_release(struct safetensors_files *f)
{
    for (size_t i = 0; i < f->count; i++)
        safetensors_header_release(&f->file[i].h);
    free(f->file);
    *f = (struct safetensors_files){0};
}

bool safetensors_stops_scan(int code)
{
    return code == ESTALE || code == ENOMEM || code == EMFILE || code == ENFILE ||
           code == EINTR;
}

struct reading {
    const struct scan_context *c;
    struct safetensors_files *f;
    atomic_ullong bytes; /* of all headers */
};

static int path_of(const struct scan_context *c, const char *name, char path[PATH_MAX],
                   struct err *e)
{
    if (store_join(c->dir, name, path, PATH_MAX) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", c->dir, name);
    return 0;
}

/* A copy holds no chunks: only whether it is still the same matters. */
static int register_copy(const struct scan_context *c, struct sink *sink,
                         struct safetensors_file *f, struct err *e)
{
    struct entry_stat st;
    struct err why = {0};
    char path[PATH_MAX];

    TRY(sink_copy(sink, f->name, e));
    TRY(path_of(c, f->name, path, e));
    f->missing =
        c->store->ops->stat(c->store, path, &st, &why) < 0 || st.kind != ENTRY_FILE;
    if (!f->missing)
        f->id = st.id;
    return 0;
}

static int register_file(const struct scan_context *c, struct sink *sink,
                         struct safetensors_file *f, struct err *e)
{
    int (*add)(struct sink * s, const char *path, size_t len, uint32_t *number,
               struct err *e) = f->shown ? sink_file_shown : sink_file;

    if (f->fault)
        return 0;
    if (f->copy) {
        TRY(register_copy(c, sink, f, e));
    } else {
        TRY(add(sink, f->name, strlen(f->name), &f->number, e));
        f->missing = !sink_file_id(sink, f->number, &f->id);
    }
    if (f->missing && sink_warning(sink, "missing-file", "%s is missing", f->name) < 0)
        return err_nomem(e);
    return 0;
}

static int read_header(struct reading *r, struct safetensors_file *f, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    char path[PATH_MAX];

    TRY(path_of(r->c, f->name, path, e));
    if (r->c->store->ops->open(r->c->store, path, &src, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    if (!file_id_equal(&src->id, &f->id))
        return err_set(e, ESTALE, "%s was changed during the scan", path);
    if (safetensors_read(src, 0, src->size, &f->h, e) < 0)
        return err_wrap(e, "%s", path);
    f->read = true;
    if (atomic_fetch_add(&r->bytes, f->h.data) + f->h.data > MAX_HEADERS)
        return err_set(e, EFBIG, "the headers of this model are larger than %d MB",
                       MAX_HEADERS >> 20);
    return source_check(src, e);
}

static int read_nth(void *user, size_t i, struct err *e)
{
    struct reading *r = user;
    struct safetensors_file *f = &r->f->file[i];

    if (f->fault || f->missing || read_header(r, f, &f->err) == 0)
        return 0;
    if (!safetensors_stops_scan(f->err.code) && !(f->read && f->err.code == EFBIG))
        return 0;
    return err_copy(e, &f->err);
}

int safetensors_files_read(const struct scan_context *c, struct sink *sink,
                           struct safetensors_files *f, struct err *e)
{
    struct reading r = {.c = c, .f = f};

    for (size_t i = 0; i < f->count; i++)
        TRY(register_file(c, sink, &f->file[i], e));
    return pool_each(c->pool, f->count, read_nth, &r, e);
}
