/* SPDX-License-Identifier: MIT */
/* fs/save_beside.c - views that came along with the files that hold the same tensors. */
#include "fs/save_beside.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "fs/save_files.h"
#include "fs/save_whole.h"
#include "fs/slot.h"
#include "index/view.h"
#include "lib/reading.h"
#include "save/incoming.h"
#include "save/merge.h"
#include "save/patch.h"
#include "save/staging.h"

/* ---- what came ---- */

static bool is_tensors(const char *path)
{
    enum incoming_kind kind = incoming_kind(path);

    return kind == INCOMING_SAFETENSORS || kind == INCOMING_NPY ||
           kind == INCOMING_RAW || kind == INCOMING_INDEX || kind == INCOMING_IGNORED;
}

/* Views of tensors and nothing else in them, beside storage of a framework's own. */
static bool may_be_copy(const struct save_files *f)
{
    bool views = false;

    for (size_t i = 0; i < f->count; i++) {
        const char *path = f->file[i].path;

        if (!save_files_is_view(path))
            continue;
        if (!is_tensors(path))
            return false;
        views |= incoming_kind(path) != INCOMING_IGNORED;
    }
    return views && save_whole_has_storage(f);
}

/* Those that are views come first; how many. */
static size_t views_first(struct save_files *f)
{
    size_t n = 0;

    for (size_t i = 0; i < f->count; i++) {
        const struct merge_file file = f->file[i];
        const struct save_rights rights = f->rights[i];

        if (!save_files_is_view(file.path))
            continue;
        f->file[i] = f->file[n];
        f->rights[i] = f->rights[n];
        f->file[n] = file;
        f->rights[n++] = rights;
    }
    return n;
}

static void drop_first(struct save_files *f, size_t n)
{
    f->count -= n;
    memmove(f->file, f->file + n, f->count * sizeof *f->file);
    memmove(f->rights, f->rights + n, f->count * sizeof *f->rights);
}

/* ---- is it all in the other files? ---- */

/* The first `views` files, as changes of the checkpoint that the others are. */
struct beside {
    const struct stage *stage;
    const struct save_files *files;
    size_t views;
    struct reading reading;
    struct checkpoint_info info;
    bool objects; /* these have all of them */
};

static int compare(struct beside *b, bool *same, struct err *e)
{
    const struct merge_spec of = {.spool = staging_spool(b->stage->staging),
                                  .file = b->files->file,
                                  .files = b->views,
                                  .env = &b->reading.env,
                                  .checkpoint = b->info.id};
    struct patch_spec spec = {.env = &b->reading.env,
                              .checkpoint = b->info.id,
                              .old = staging_dir(b->stage->staging)};
    CLEANUP_FREE struct patch_change *change = NULL;
    CLEANUP(patch_freep) struct patch *patch = NULL;
    CLEANUP(merge_freep) struct merge *merge = NULL;
    int ret = merge_new(&of, &merge, e);

    if (ret == 0)
        ret = merge_patch(merge, &change, &spec.changes, e);
    if (ret < 0 || !change)
        return ret;
    spec.change = change;
    spec.source = merge_incoming(merge);
    ret = patch_new(&spec, &patch, e);
    *same = ret == 0 && patch_files(patch) == 0;
    return ret;
}

/* Do the files have the objects that the copy was shown? 1, 0. */
static int have_objects(const struct beside *b, struct err *e)
{
    CLEANUP_FD int came = -1;
    CLEANUP_FD int have = -1;

    for (size_t i = 0; came < 0 && i < b->views; i++)
        if (strcmp(b->files->file[i].path, ".unshard/objects.json") == 0)
            came = openat(staging_spool(b->stage->staging), b->files->file[i].spool,
                          O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (came < 0)
        return 1;
    have = memfd_create("unshard-objects", MFD_CLOEXEC);
    if (have < 0)
        return err_set(e, errno, "objects.json: %s", strerror(errno));
    if (report_objects(b->reading.catalog, b->info.id, have, e) < 0)
        return -e->code;
    return same_bytes(came, have, "objects.json", e);
}

static int look(struct beside *b, bool *same, struct err *e)
{
    static const struct reading_options options = {.index_memory = true};
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    char path[40];
    int ret;

    if (!a)
        return err_nomem(e);
    snprintf(path, sizeof path, "/proc/self/fd/%d", staging_dir(b->stage->staging));
    ret = reading_open(path, &options, &b->reading, e);
    if (ret == 0)
        ret = reading_checkpoint(&b->reading, a, &b->info, e);
    if (ret == 0)
        ret = compare(b, same, e);
    if (ret == 0 && *same)
        b->objects = have_objects(b, e) == 1;
    reading_close(&b->reading);
    return ret;
}

int save_beside(const struct stage *s, struct save_files *f, struct err *e)
{
    struct beside b = {.stage = s, .files = f};
    struct err why = {0};
    bool same = false;
    int ret;

    if (s->slot || !may_be_copy(f))
        return 0;
    b.views = views_first(f);
    ret = save_files_link(s, f, b.views, e);
    if (ret == 0 && look(&b, &same, &why) == -ENOMEM)
        ret = err_nomem(e);
    if (ret == 0)
        ret = staging_restart(s->staging, e);
    if (ret < 0 || !same)
        return ret;
    drop_first(f, b.views);
    f->lost_objects = !b.objects;
    return 0;
}
