/* SPDX-License-Identifier: MIT */
/* fs/save_place.c - the step in which what was made comes to the source. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/amend.h"
#include "fs/node.h"
#include "fs/over.h"
#include "fs/save_priv.h"
#include "fs/slot.h"
#include "fs/written.h"
#include "save/staging.h"
#include "save/witness.h"

int save_changed(const struct stage *s, struct err *e)
{
    err_set(e, EINVAL, "%s: the checkpoint was changed by another writer meanwhile",
            s->path);
    return err_hint(e, "what was written here is kept: copy it, then remove it");
}

bool save_is_same(const struct file_id *id, const struct stat *st)
{
    struct file_id now = file_id_of(st);

    return id->dev == now.dev && id->ino == now.ino && id->size == now.size &&
           id->mtime_ns == now.mtime_ns;
}

int save_put_in_place(struct fs *fs, struct stage *s, struct err *e)
{
    bool replaces = s->slot || s->over;
    struct stat old, new;
    const char *name;
    int ret;
    CLEANUP_FD int parent = stage_parent(fs, s->path, &name, e);

    if (parent < 0)
        return parent;
    if (replaces && fstatat(parent, name, &old, AT_SYMLINK_NOFOLLOW) < 0)
        return err_set(e, errno, "%s: %s", s->path, strerror(errno));
    if (fstat(staging_dir(s->staging), &new) < 0)
        return err_set(e, errno, "%s: %s", s->path, strerror(errno));
    save_files_date(s);
    if (replaces) /* else what had the name before is another one */
        nodes_expect(fs, s->path, new.st_ino);
    ret = staging_replace(s->staging, parent, name, replaces ? &old : NULL, e);
    nodes_replaced(fs, s->path, ret == 0);
    if (ret < 0)
        return -e->code;
    return s->path[0] ? 0 : fs->store->ops->reopen(fs->store, e);
}

/* Of a checkpoint that is there, with all that is in it and stays. */
static int replace_old(struct publication *p, struct err *e)
{
    struct stage *s = p->stage;
    const struct witness_filter storage = {.counts = slot_stores, .user = s->slot};
    const char *name;
    CLEANUP_FD int parent = stage_parent(p->fs, s->path, &name, e);
    int ret;

    if (parent < 0)
        return parent;
    /* Its logs may have grown as long as tensors were written: that is no conflict. */
    ret = staging_watch(s->staging, parent, name, &storage, e);
    if (ret == -ESTALE)
        return save_changed(s, e);
    if (ret == 0)
        ret = save_files_check_bases(p->fs, s, &p->files, e);
    if (ret == 0)
        ret = save_files_carry(p->fs, s, &p->files, p->rewritten, e);
    return ret == 0 ? save_put_in_place(p->fs, s, e) : ret;
}

/* A file that is the checkpoint and has other bytes now is still its program's. */
static void note_written(const struct publication *p)
{
    const struct slot *slot = p->stage->slot;
    struct err ignored = {0};
    CLEANUP_FD int dir =
        slot->plain ? stage_directory(p->fs, p->stage->path, &ignored) : -1;
    struct stat st;

    for (size_t i = 0; dir >= 0 && i < slot->hidden.count; i++)
        if (fstatat(dir, slot->hidden.name[i], &st, AT_SYMLINK_NOFOLLOW) == 0)
            written_add(p->fs->written, &st);
}

int save_place(struct publication *p, struct err *e)
{
    int ret;

    if (p->stage->over)
        return over_put_in_place(p->fs, p->stage, &p->files, e);
    if (p->stage->slot) {
        stages_place_begin(p->fs);
        ret = replace_old(p, e);
        stages_place_end(p->fs);
        if (ret == 0)
            note_written(p);
    } else { /* not while the directory that it comes to is exchanged */
        stages_plain_begin(p->fs);
        ret = save_put_in_place(p->fs, p->stage, e);
        stages_plain_end(p->fs);
    }
    return ret;
}

/* Nobody goes on believing what was there before. */
void save_tell(struct fs *fs, const char *path, struct slot *slot)
{
    if (slot) {
        scanner_suspect(fs->scanner, slot->path, slot->file);
        slot_retire(fs, slot);
    } else {
        scanner_suspect_all(fs->scanner, path); /* what had the name before */
    }
    store_forget(fs->store, path);
    nodes_look_again(fs, path);
    amend_path(fs, path);
}
