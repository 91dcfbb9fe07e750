/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_files.c - the storage files of a scan, by number, a few of them open. */
#include "index/formats/orbax/orbax_files.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "remote/source.h"

void orbax_files_release(struct orbax_files *f)
{
    for (uint32_t i = 0; i < f->paths; i++)
        free(f->path[i]);
    free(f->path);
    for (size_t i = 0; i < ARRAY_SIZE(f->open); i++)
        source_put(f->open[i].src);
    free(f->last);
}

/* Keeps where number is to be found. */
static int note_path(struct orbax_files *f, uint32_t number, const char *relative,
                     struct err *e)
{
    char full[PATH_MAX];

    if (number >= f->paths) {
        uint32_t count = MAX(number + 1, f->paths + f->paths / 2);
        char **more = reallocarray(f->path, count, sizeof *more);

        if (!more)
            return err_nomem(e);
        memset(more + f->paths, 0, (count - f->paths) * sizeof *more);
        f->path = more;
        f->paths = count;
    }
    if (f->path[number])
        return 0;
    if (store_join(f->c->dir, relative, full, sizeof full) < 0)
        return err_set(e, ENAMETOOLONG, "%.200s: the path is too long", relative);
    f->path[number] = strdup(full);
    return f->path[number] ? 0 : err_nomem(e);
}

/*
 * Hides the file, or the directory of the item that it lies in: d, but a writer may have
 * called it anything.
 */
static int hide(const struct orbax_files *f, const char *relative, struct err *e)
{
    size_t above = strlen(f->dir) + (f->dir[0] ? 1 : 0);
    char name[PATH_MAX];

    snprintf(name, sizeof name, "%.*s", (int)(above + strcspn(relative + above, "/")),
             relative);
    return sink_hide(f->sink, name, false, e);
}

static int remember(struct orbax_files *f, const char *path, size_t len,
                    uint32_t number, struct err *e)
{
    char *copy = malloc(len + 1);

    if (!copy)
        return err_nomem(e);
    memcpy(copy, path, len);
    copy[len] = '\0';
    free(f->last);
    f->last = copy;
    f->last_len = len;
    f->last_number = number;
    return 0;
}

int orbax_files_add(void *files, const char *path, size_t len, uint32_t *number,
                    struct err *e)
{
    struct orbax_files *f = files;
    CLEANUP(buf_release) struct buf relative = {.max = PATH_MAX};

    if (f->last && f->last_len == len && memcmp(f->last, path, len) == 0) {
        *number = f->last_number;
        return 0;
    }
    buf_adds(&relative, f->dir);
    if (f->dir[0])
        buf_addc(&relative, '/');
    buf_add(&relative, path, len);
    if (relative.failed == EFBIG)
        return err_set(e, EBADMSG, "the path of a file has more than %d bytes",
                       PATH_MAX);
    if (buf_failed(&relative))
        return err_nomem(e);
    TRY(sink_file(f->sink, relative.data, relative.len, number, e));
    TRY(note_path(f, *number, relative.data, e));
    TRY(hide(f, relative.data, e));
    return remember(f, path, len, *number, e);
}

int orbax_files_source(struct orbax_files *f, uint32_t number, struct source **out,
                       struct err *e)
{
    struct orbax_open *slot = &f->open[number % ORBAX_OPEN_FILES];
    struct source *src = NULL;
    struct file_id id;

    if (slot->src && slot->number == number) {
        *out = slot->src;
        return 0;
    }
    if (number >= f->paths || !f->path[number])
        return err_set(e, EINVAL, "file %u was never named", number);
    if (!sink_file_id(f->sink, number, &id))
        return err_set(e, ENOENT, "%s is missing or cannot be read", f->path[number]);
    if (f->c->store->ops->open(f->c->store, f->path[number], &src, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", f->path[number])
                                 : -e->code;
    if (!file_id_equal(&src->id, &id)) {
        source_stale(f->path[number], &id, &src->id, e);
        source_put(src);
        return -e->code;
    }
    source_put(slot->src);
    *slot = (struct orbax_open){src, number};
    *out = src;
    return 0;
}

int orbax_files_read(void *files, uint32_t number, uint64_t off, size_t len, void *dst,
                     struct err *e)
{
    struct source *src;

    TRY(orbax_files_source(files, number, &src, e));
    return source_read(src, off, len, dst, e);
}
