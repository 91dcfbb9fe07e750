/* SPDX-License-Identifier: MIT */
/* fs/save_whole.c - new directories whose files stay what they are: no format's writer is asked. */
#include "fs/save_whole.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "fs/save_files.h"
#include "fs/slot.h"
#include "index/formats/scan.h"
#include "remote/store.h"
#include "save/incoming.h"
#include "save/merge.h"
#include "save/staging.h"

/* ---- what a framework has written ---- */

/* Safetensors files that may be pieces of what several files are together; and others. */
static void count_files(const struct save_files *f, size_t *odd, size_t *whole)
{
    enum role role;

    *odd = *whole = 0;
    for (size_t i = 0; i < f->count; i++) {
        if (strchr(f->file[i].path, '/') ||
            incoming_kind(f->file[i].path) != INCOMING_SAFETENSORS)
            continue;
        if (incoming_is_whole(f->file[i].path, &role))
            ++*whole;
        else
            ++*odd;
    }
}

bool save_whole_has_storage(const struct save_files *f)
{
    static const char *const end[] = {".distcp", ".metadata", ".pt",   ".pth",  ".bin",
                                      ".ckpt",   ".npz",      ".npy",  ".gguf", ".nemo",
                                      ".h5",     ".msgpack",  ".onnx", ".pkl",  ".pt2"};

    for (size_t i = 0; i < f->count; i++) {
        const char *path = f->file[i].path, *dot = strrchr(path, '.');

        for (size_t k = 0; dot && !strchr(path, '/') && k < ARRAY_SIZE(end); k++)
            if (strcmp(dot, end[k]) == 0)
                return true;
    }
    return false;
}

/* Does one stand where checkpoints show views? It would be seen no more. */
static bool has_hidden_files(const struct save_files *f)
{
    for (size_t i = 0; i < f->count; i++)
        if (save_files_is_view(f->file[i].path) &&
            incoming_kind(f->file[i].path) != INCOMING_IGNORED)
            return true;
    return false;
}

/* What a directory with these files is. */
enum what { PLAIN_FILES, A_CHECKPOINT, OF_ANOTHER_FORMAT /* than safetensors files */ };

static enum what what_is(const struct place *p)
{
    if (p->kind == PLACE_PLAIN)
        return PLAIN_FILES;
    return p->kind == PLACE_CHECKPOINT && !p->file && p->driver &&
                   strcmp(p->driver->name, "safetensors") != 0
               ? OF_ANOTHER_FORMAT
               : A_CHECKPOINT;
}

static int ask_formats(int dir, enum what *out, struct err *e)
{
    static const struct store_options plain = {0};
    CLEANUP(store_closep) struct store *store = NULL;
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP(place_release) struct place place = {0};
    char path[40];

    snprintf(path, sizeof path, "/proc/self/fd/%d", dir);
    if (store_open_local(path, &plain, &store, e) < 0 ||
        store->ops->list(store, "", &l, e) < 0 || place_of(l, NULL, &place, e) < 0)
        return -e->code;
    *out = what_is(&place);
    return 0;
}

static int look(const struct stage *s, const struct save_files *f, enum what *out,
                struct err *e)
{
    int ret = save_files_link(s, f, 0, e);

    if (ret == 0)
        ret = ask_formats(staging_dir(s->staging), out, e);
    return ret == 0 ? staging_restart(s->staging, e) : ret;
}

bool save_waits(const struct stage *s)
{
    return !s->slot || (s->slot->info.tensors == 0 && s->slot->info.objects == 0);
}

/*
 * Are the tensors that came shards of another format? On a disk the formats are asked. In a
 * bucket it is told by tensors that several files have, of which none is called as a model.
 */
static int are_shards(const struct stage *s, const struct save_files *f,
                      const struct merge *m, bool remote, bool *out, struct err *e)
{
    enum what what = PLAIN_FILES;
    size_t odd, whole;
    int ret = 0;

    count_files(f, &odd, &whole);
    if (!remote && odd > 0)
        ret = look(s, f, &what, e);
    *out = remote ? odd > 0 && whole == 0 && merge_meets(m) : what == OF_ANOTHER_FORMAT;
    return ret;
}

int save_whole(const struct stage *s, const struct save_files *f, const struct merge *m,
               bool remote, bool *out, struct err *e)
{
    bool tensors = merge_has_tensors(m);
    enum what what = PLAIN_FILES;
    int ret = 0;

    *out = false;
    if (!save_waits(s) || (s->slot && tensors))
        return 0;
    if (!tensors) {
        /* A trainer's output that its steps are yet to come to; a bucket has no directories. */
        *out = (!s->slot && !s->format && !remote) || save_whole_has_storage(f) ||
               has_hidden_files(f);
        if (!*out && !remote && f->count > 0)
            ret = look(s, f, &what, e);
        *out |= what != PLAIN_FILES;
        return ret;
    }
    ret = are_shards(s, f, m, remote, out, e);
    if (ret == 0 && *out)
        log_msg(LOG_FS, LOG_WARN,
                "save %s: its safetensors files are shards as another format has them: "
                "all is kept as it is",
                s->path);
    else if (ret == 0 && merge_meets(m))
        log_msg(LOG_FS, LOG_WARN,
                "save %s: several safetensors files have the same tensor: that of the "
                "one that was closed last counts",
                s->path);
    return ret;
}
