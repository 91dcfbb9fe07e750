/* SPDX-License-Identifier: MIT */
/* fs/save_build.c - what was staged, made into a checkpoint in the staging directory. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fs/node.h"
#include "fs/save_beside.h"
#include "fs/save_priv.h"
#include "fs/save_shards.h"
#include "fs/save_whole.h"
#include "fs/slot.h"
#include "fs/tree.h"
#include "index/formats/format.h"
#include "save/incoming.h"
#include "save/merge.h"
#include "save/patch.h"
#include "save/staging.h"
#include "save/witness.h"
#include "save/write.h"

/* Not more rights than the files had that came, and the owner who wrote them. */
static int set_rights(const struct publication *p, struct err *e)
{
    mode_t mode = save_files_mode(p->stage, &p->files);
    int dir = staging_dir(p->stage->staging);
    struct layout_file_info f;

    for (size_t i = 0; i < layout_files(p->layout); i++) {
        layout_file_info(p->layout, i, &f);
        if (fchmodat(dir, f.path, mode, 0) < 0 ||
            (geteuid() == 0 && fchownat(dir, f.path, p->files.root.uid,
                                        p->files.root.gid, AT_SYMLINK_NOFOLLOW) < 0))
            return err_set(e, errno, "%s: %s", f.path, strerror(errno));
    }
    return 0;
}

static int lay_out(struct publication *p, struct err *e)
{
    const struct layout_input *in = merge_input(p->merge);
    const struct format_writer *w = p->format.writer;
    int ret = layout_new(&p->layout, e);

    if (ret == 0 && !p->stage->whole)
        ret = w->layout(in, &p->format.options, p->layout, e);
    if (ret == 0)
        ret = save_format_losses(p->layout, w, e);
    if (ret == -ENOTSUP)
        e->code = EINVAL;
    return ret < 0 ? -e->code : 0;
}

/* What a waiting `unshard umount` shows: of several at once the one that began last. */
static void count_written(void *user, uint64_t bytes)
{
    struct counters *c = user;

    atomic_fetch_add_explicit(&c->saving_done, bytes, memory_order_relaxed);
}

static int write_counted(struct counters *c, struct save_run *run, struct err *e)
{
    int ret;

    run->progress = count_written;
    run->user = c;
    atomic_store(&c->saving_done, 0);
    atomic_store(&c->saving_total, save_bytes(run));
    ret = save_write(run, e);
    atomic_store(&c->saving_total, 0);
    return ret;
}

static int write_tensors(struct publication *p, struct err *e)
{
    int ret = lay_out(p, e);

    if (ret == 0) {
        struct save_run run = {.layout = p->layout,
                               .input = merge_input(p->merge),
                               .source = merge_source(p->merge),
                               .dir = staging_dir(p->stage->staging),
                               .pool = p->fs->reading.pool,
                               .part = 1,
                               .parts = 1,
                               .first_stage = true,
                               .other_stages = true};

        ret = write_counted(&p->fs->counters, &run, e);
    }
    if (ret == 0)
        ret = set_rights(p, e);
    if (ret == -ENOTSUP)
        e->code = EINVAL;
    return ret < 0 ? -e->code : 0;
}

/* Other bytes for tensors that stay what they are: 1; 0: it takes more than that. */
static int patch_tensors(struct publication *p, struct err *e)
{
    CLEANUP_FREE struct patch_change *change = NULL;
    CLEANUP(patch_freep) struct patch *patch = NULL;
    struct stage *s = p->stage;
    struct patch_spec spec = {.env = &p->fs->reading.env,
                              .checkpoint = s->slot->info.id,
                              .source = merge_incoming(p->merge)};
    CLEANUP_FD int old = -1;
    int ret = merge_patch(p->merge, &change, &spec.changes, e);

    if (ret < 0 || !change)
        return ret;
    old = stage_directory(p->fs, s->path, e);
    if (old < 0)
        return old;
    spec.change = change;
    spec.old = old;
    ret = patch_new(&spec, &patch, e);
    if (ret == 0)
        ret = patch_write(patch, staging_dir(s->staging), e);
    return ret == 0 ? 1 : ret;
}

/* As the format's writer has it. */
static int rewrite_tensors(struct publication *p, const struct err *why, struct err *e)
{
    const struct stage *s = p->stage;

    if (p->format.writer)
        return merge_settle(p->merge, e) < 0 ? -e->code : write_tensors(p, e);
    err_set(e, EINVAL, "%s: checkpoints of format %s take other bytes for a tensor, %s",
            s->path, s->slot->info.format,
            why->code ? why->text
                      : "but none is added, removed or given another shape or dtype");
    return err_hint(e, "save to a new directory");
}

/* A new directory as Hugging Face's programs have written it, to be kept as such. */
static int keep_files(struct publication *p, bool *kept, struct err *e)
{
    uint64_t max = p->stage->slot ? 0 : save_format_keeps(&p->format);

    *kept = false;
    return max ? merge_verbatim(p->merge, max, kept, e) : 0;
}

static int put_tensors(struct publication *p, struct err *e)
{
    struct err why = {0};
    bool kept;
    int ret;

    if (keep_files(p, &kept, e) < 0)
        return -e->code;
    if (kept)
        return 0;
    ret = p->stage->slot ? patch_tensors(p, &why) : 0;

    p->rewritten = ret == 0 || ret == -ENOTSUP;
    if (p->rewritten)
        return rewrite_tensors(p, &why, e);
    if (ret < 0)
        *e = why;
    return MIN(ret, 0);
}

static int merge_files(struct publication *p, struct err *e)
{
    struct merge_spec spec = {.spool = staging_spool(p->stage->staging),
                              .file = p->files.file,
                              .files = p->files.count,
                              .env = &p->fs->reading.env,
                              .checkpoint =
                                  p->stage->slot ? p->stage->slot->info.id : 0,
                              .removed = p->files.removed,
                              .removals = p->files.removals,
                              .drop_objects = p->format.drop_objects};

    memcpy(spec.drop_roles, p->format.drop_roles, sizeof spec.drop_roles);
    return merge_new(&spec, &p->merge, e);
}

/*
 * A try that failed had links to files of the checkpoint, which moves their ctime: it was
 * scanned anew. The stage goes on with that scan of the same files.
 */
static int take_new_scan(struct fs *fs, struct stage *s, struct err *e)
{
    struct node *n = node_pin(fs, s->slot->dir_ino);
    struct slot *old = s->slot;
    struct shown *shown = NULL;
    int ret;

    if (!n || strcmp(n->path, s->path) != 0) {
        if (n)
            node_unpin(fs, n);
        return -ESTALE;
    }
    nodes_look_again(fs, s->path);
    ret = tree_shown(fs, n, true, &shown, e);
    node_unpin(fs, n);
    if (ret < 0)
        return ret;
    if (!shown->slot || !shown->slot->info.format ||
        strcmp(shown->slot->info.format, old->info.format) != 0) {
        ret = -ESTALE;
    } else {
        stages_lock(fs);
        s->slot = slot_get(fs, shown->slot);
        stages_unlock(fs);
        slot_unref(fs, old, 1);
    }
    shown_put(fs, shown);
    return ret;
}

/*
 * Is the checkpoint still the one that was changed? What others change in it from now on
 * must not be lost either.
 */
static int check_fresh(struct fs *fs, struct stage *s, struct err *e)
{
    const char *name;
    CLEANUP_FD int parent = s->slot ? stage_parent(fs, s->path, &name, e) : -1;
    struct witness_filter storage = {.counts = slot_stores};
    int ret;

    if (!s->slot)
        return 0;
    if (parent < 0)
        return parent;
    storage.user = s->slot;
    ret = staging_watch(s->staging, parent, name, &storage, e);
    if (ret < 0 && ret != -ESTALE)
        return ret;
    scanner_suspect(fs->scanner, s->slot->path, s->slot->file);
    if (ret == 0 &&
        (slot_refresh(fs, s->slot, e) == 0 || take_new_scan(fs, s, e) == 0)) {
        *e = (struct err){0};
        return 0;
    }
    return save_changed(s, e);
}

/* Tensors that came by a view, and files that hold them: one of both would be lost. */
static int check_files(const struct publication *p, struct err *e)
{
    const struct slot *slot = p->stage->slot;

    if (!slot || !merge_changes(p->merge))
        return 0;
    for (size_t i = 0; i < p->files.count; i++) {
        const char *path = p->files.file[i].path;

        if (incoming_kind(path) != INCOMING_SIDE || !slot_hides(slot, path))
            continue;
        err_set(e, EINVAL, "%s: tensors of the checkpoint were written too", path);
        return err_hint(e, "publish the one (sync DIR) before the other");
    }
    return 0;
}

int save_build(struct publication *p, struct err *e)
{
    struct stage *s = p->stage;
    struct save_format *f = &p->format;
    int ret = check_fresh(p->fs, s, e);

    if (ret == 0)
        ret = save_waits(s)
                  ? save_format_parse(s->format ? s->format : p->fs->options.save, f, e)
                  : save_format_own(p->fs, s->slot, f, e);
    if (ret == 0)
        ret = save_shards_check(p, e);
    if (ret == 0)
        ret = staging_restart(s->staging, e);
    if (ret == 0 && !p->fs->store->remote)
        ret = save_beside(s, &p->files, e);
    if (ret == 0)
        ret = merge_files(p, e);
    if (ret == 0)
        ret = check_files(p, e);
    if (ret == 0)
        ret = save_whole(s, &p->files, p->merge, p->fs->store->remote, &s->whole, e);
    p->rewritten = s->whole;
    if (ret == 0 && !s->whole)
        ret = save_files_check(&p->files, e);
    if (ret == 0 && p->fs->store->remote)
        return merge_settle(p->merge, e) < 0 ? -e->code : lay_out(p, e);
    if (ret == 0 && (merge_changes(p->merge) || !s->slot) && !s->whole)
        ret = put_tensors(p, e);
    if (ret == 0)
        ret = save_files_check_read(p->fs, s, &p->files, e);
    if (ret == 0)
        ret = save_files_place(p->fs, s, &p->files, p->merge, e);
    return ret;
}
