/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_batch.c - one file a rank: opened by the dozen, in parallel. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/pool.h"

enum { BATCH = 32 }; /* files whose graphs are in memory at a time */

struct batch {
    struct ds_scan *s;
    struct torch_file file[BATCH];
    struct err damage[BATCH];
    size_t count;
    bool tolerant; /* damage of a file is told to the callback */
};

static void close_batch(struct batch *b)
{
    for (size_t i = 0; i < b->count; i++)
        torch_file_close(&b->file[i]);
    b->count = 0;
}

static int load_nth(void *user, size_t i, struct err *e)
{
    struct batch *b = user;
    struct err *why = &b->damage[i];

    *why = (struct err){0};
    if (torch_file_load(b->s->c, &b->file[i], why) == 0)
        return 0;
    err_wrap(why, "%s", b->file[i].path);
    if (b->tolerant && torch_file_is_damaged(why->code)) {
        torch_file_close(&b->file[i]);
        return 0;
    }
    return err_copy(e, why);
}

static int register_file(struct batch *b, const struct ds_file *file, struct err *e)
{
    struct torch_file *f = &b->file[b->count];
    const char *dir = b->s->how->dir ? b->s->how->dir : "";
    char path[PATH_MAX];

    if (store_join(dir, file->name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", file->name);
    *f = (struct torch_file){.path = arena_memdup(b->s->arena, path, strlen(path))};
    if (!f->path)
        return err_nomem(e);
    b->count++;
    if (torch_file_register(b->s->sink, f, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    return 0;
}

static int run_batch(struct batch *b, const struct ds_file *files, size_t n,
                     struct err *e)
{
    for (size_t i = 0; i < n; i++)
        TRY(register_file(b, &files[i], e));
    return pool_each(b->s->c->pool, n, load_nth, b, e);
}

static int each_file(struct batch *b, const struct ds_file *files, size_t n,
                     ds_file_fn *fn, void *user, struct err *e)
{
    int rc = 0;

    for (size_t done = 0; rc == 0 && done < n; done += BATCH) {
        rc = run_batch(b, files + done, MIN(n - done, (size_t)BATCH), e);
        for (size_t i = 0; rc == 0 && i < b->count; i++) {
            b->s->damage = &b->damage[i];
            rc = fn(user, done + i, &b->file[i], e);
        }
        close_batch(b);
    }
    return rc;
}

static int each_with(struct ds_scan *s, const struct ds_file *files, size_t n,
                     bool tolerant, ds_file_fn *fn, void *user, struct err *e)
{
    CLEANUP_FREE struct batch *b = calloc(1, sizeof *b); /* too large for a stack */

    if (!b)
        return err_nomem(e);
    b->s = s;
    b->tolerant = tolerant;
    return each_file(b, files, n, fn, user, e);
}

int ds_each_file(struct ds_scan *s, const struct ds_file *files, size_t n,
                 ds_file_fn *fn, void *user, struct err *e)
{
    return each_with(s, files, n, false, fn, user, e);
}

int ds_each_file_or_damage(struct ds_scan *s, const struct ds_file *files, size_t n,
                           ds_file_fn *fn, void *user, struct err *e)
{
    return each_with(s, files, n, true, fn, user, e);
}
