/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/rank_files.c - the torch.save files of a checkpoint's ranks, loaded. */
#include "index/formats/ranks/rank_files.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/pool.h"
#include "index/formats/format.h"
#include "index/sink.h"

enum { AT_ONCE = 16 /* graphs in memory */ };

struct rank_file *rank_files_new(size_t n)
{
    return calloc(n + 1, sizeof(struct rank_file));
}

void rank_files_free(struct rank_file *f, size_t n)
{
    for (size_t i = 0; f && i < n; i++) {
        torch_file_close(&f[i].file);
        rank_tensors_release(&f[i].tensors);
    }
    free(f);
}

struct loading {
    const struct scan_context *c;
    struct sink *sink;
    struct rank_file *file;
};

static int load_nth(void *user, size_t i, struct err *e)
{
    struct loading *l = user;
    struct rank_file *f = &l->file[i];

    if (f->err.code || torch_file_load(l->c, &f->file, &f->err) == 0 ||
        torch_file_is_damaged(f->err.code))
        return 0;
    return err_copy(e, &f->err);
}

static int tell(struct sink *sink, const struct rank_file *f, struct err *e)
{
    int r = 0;

    if (f->err.code == ENOENT)
        r = sink_warning(sink, "missing-file", "%s is missing", f->file.path);
    else if (f->err.code)
        r = sink_warning(sink, "damaged-file", "%s: %s", f->file.path, f->err.text);
    return r < 0 ? err_nomem(e) : 0;
}

static int see(struct loading *l, size_t at, size_t n, rank_file_fn *fn, void *user,
               struct err *e)
{
    for (size_t i = 0; i < n; i++) {
        struct rank_file *f = &l->file[i];

        if (!f->err.code && fn(user, at + i, f, &f->err) < 0 &&
            !torch_file_is_damaged(f->err.code)) {
            return err_copy(e, &f->err);
        }
        torch_file_close(&f->file);
        TRY(tell(l->sink, f, e));
    }
    return 0;
}

static int register_file(struct sink *sink, struct rank_file *f, struct err *e)
{
    if (torch_file_register(sink, &f->file, &f->err) == 0 || f->err.code == ENOENT)
        return 0;
    return err_copy(e, &f->err);
}

int rank_files_load(const struct scan_context *c, struct sink *sink,
                    struct rank_file *f, size_t n, rank_file_fn *fn, void *user,
                    struct err *e)
{
    for (size_t at = 0; at < n; at += AT_ONCE) {
        size_t some = MIN(n - at, (size_t)AT_ONCE);
        struct loading l = {.c = c, .sink = sink, .file = f + at};

        for (size_t i = 0; i < some; i++)
            TRY(register_file(sink, &f[at + i], e));
        TRY(pool_each(c->pool, some, load_nth, &l, e));
        TRY(see(&l, at, some, fn, user, e));
    }
    return 0;
}

const struct rank_file *rank_files_first(const struct rank_file *f, size_t n,
                                         struct err *why)
{
    for (size_t i = 0; i < n; i++)
        if (!f[i].err.code)
            return &f[i];
    if (n > 0)
        *why = f[0].err;
    return NULL;
}

struct rank_part rank_file_part(const struct rank_file *f, const char *name, size_t len)
{
    struct rank_part part = {.file = &f->file};

    if (f->err.code == ENOENT)
        part.why = "it is missing";
    else if (f->err.code)
        part.why = f->err.text;
    else
        part.x = rank_tensors_find(&f->tensors, name, len);
    if (!part.x && !part.why)
        part.why = "it does not have it";
    return part;
}

bool rank_files_lack(const struct rank_file *f, size_t n, const struct rank_tensor *x)
{
    for (size_t i = 0; i < n; i++)
        if (rank_tensors_find(&f[i].tensors, x->name, x->len))
            return false;
    return true;
}

/* torch_report.wants */
static bool no_tensor(void *user UNUSED, const char *key UNUSED, size_t len UNUSED)
{
    return false;
}

int rank_file_objects(struct sink *sink, const struct rank_file *f,
                      const char *const *skip, struct err *e)
{
    CLEANUP(buf_release) struct buf object = {0};
    struct torch_report how = {
        .prefix = "",
        .role = ROLE_MODEL,
        .entries = true,
        .skip = skip,
        .wants = no_tensor,
    };

    buf_addf(&object, "%s:", f->file.path);
    if (buf_failed(&object))
        return err_nomem(e);
    how.object = object.data;
    return torch_file_report_loaded(sink, &f->file, &how, e);
}

int rank_file_raw(struct sink *sink, const struct rank_file *f,
                  const struct rank_tensor *x, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    const struct rank_part part = {.file = &f->file, .x = x};
    struct sink_tensor t = {.role = ROLE_OTHER};

    buf_addf(&key, "%s:", f->file.path);
    buf_add(&key, x->name, x->len);
    if (buf_failed(&key))
        return err_nomem(e);
    t.key = key.data;
    t.key_len = key.len;
    return rank_report_alone(sink, &part, &t, e);
}
