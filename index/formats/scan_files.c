/* SPDX-License-Identifier: MIT */
/* index/formats/scan_files.c - are a checkpoint's files still those that the index has? */
#include "index/formats/scan_priv.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/catalog.h"
#include "index/watched.h"
#include "remote/store.h"

struct watched {
    const char *path;
    struct file_id id;
};

struct watch_list {
    struct arena *arena;
    struct watched *file;
    size_t count, cap;
};

static int note_file(void *user, const struct catalog_file *f)
{
    struct watch_list *w = user;

    if (!VEC_ROOM(w->file, w->count, w->cap))
        return -ENOMEM;
    w->file[w->count].path = arena_memdup(w->arena, f->path, strlen(f->path));
    w->file[w->count].id = f->id;
    return w->file[w->count++].path ? 0 : -ENOMEM;
}

/* All zero, as the index has it: there is no such file. */
static bool is_same(struct store *s, const char *path, const struct file_id *was)
{
    struct entry_stat st;
    struct err ignored = {0};

    if (s->ops->stat(s, path, &st, &ignored) < 0 || st.kind == ENTRY_OTHER)
        st.id = (struct file_id){0};
    else if (st.kind == ENTRY_DIR)
        return watched_same(s, path, &st, was);
    return file_id_equal(&st.id, was);
}

int scan_files_same(struct store *s, struct catalog *c,
                    const struct checkpoint_info *info, struct arena *a, struct err *e)
{
    struct watch_list w = {.arena = a};
    int rc = catalog_files(c, info->id, note_file, &w, e);
    bool same = !info->file || w.count > 0; /* nothing to go by: better scan it */

    /* Only now: no statement of the index stays open while disks are slow. */
    for (size_t i = 0; rc == 0 && same && i < w.count; i++)
        same = is_same(s, w.file[i].path, &w.file[i].id);
    free(w.file);
    if (rc == -ENOMEM && !e->code)
        return err_nomem(e);
    return rc < 0 ? rc : same;
}
