/* SPDX-License-Identifier: MIT */
/* fs/save.c - publication: what was staged becomes a checkpoint of the source. */
#include "fs/save.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/json.h"
#include "base/log.h"
#include "fs/alias.h"
#include "fs/node.h"
#include "fs/over.h"
#include "fs/save_files.h"
#include "fs/save_upload.h"
#include "fs/save_whole.h"
#include "fs/slot.h"
#include "fs/tree.h"
#include "index/formats/format.h"
#include "save/merge.h"
#include "save/patch.h"
#include "save/staging.h"
#include "save/witness.h"
#include "save/write.h"

enum {
    CLOSE_SECONDS = 2, /* close(2) returns before the kernel tells us of it */
    LOSSES_SHOWN = 5,
    TRIES = 3, /* to save what is scanned anew meanwhile */
    NOTHING = 1,
    MAX_RANKS = 1 << 20,
};

/* ---- the format ---- */

/* The bytes of the largest storage file: what the shards of a checkpoint are cut to. */
struct shards {
    uint64_t largest;
    size_t count;
};

static int see_shard(void *user, const struct catalog_file *f)
{
    struct shards *s = user;

    if (f->storage) {
        s->largest = MAX(s->largest, f->id.size);
        s->count++;
    }
    return 0;
}

/* How many ranks have written it: as the scan told, else one a file. */
static unsigned ranks_of(const struct slot *slot, size_t files)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    const char *text = slot->info.topology;
    uint64_t ranks = files;
    struct err ignored = {0};

    if (text && json_parse(text, strlen(text), NULL, &doc, &ignored) == 0)
        json_u64(json_get(doc, "ranks"), &ranks);
    return ranks > 0 && ranks <= MAX_RANKS ? (unsigned)ranks : 1;
}

/* One that is there keeps its format; shards stay about as large as they are. */
static int own_format(struct fs *fs, const struct slot *slot, struct save_format *out,
                      struct err *e)
{
    struct shards shards = {0};

    *out = (struct save_format){.writer = save_format_of(slot->info.format)};
    if (!out->writer)
        return 0; /* bytes of its tensors can be changed */
    if (catalog_files(fs->catalog, slot->info.id, see_shard, &shards, e) < 0)
        return -e->code;
    /* Objects of these are read out of config.json (tied weights), which stays. */
    out->drop_objects = strcmp(out->writer->name, "hf") == 0;
    if (strcmp(out->writer->name, "hf") == 0)
        out->options.max_shard_size = shards.count > 1 ? shards.largest : UINT64_MAX;
    else
        out->options.ranks = ranks_of(slot, shards.count);
    return 0;
}

static int refuse_losses(const struct layout *l, const struct format_writer *w,
                         struct err *e)
{
    static const char *const name[] = {
        [LOSS_OBJECT] = "object", [LOSS_TENSOR] = "tensor", [LOSS_ROLE] = "role"};
    CLEANUP(buf_release) struct buf list = {.max = 800};
    size_t n = layout_losses(l);
    enum layout_loss kind;

    if (n == 0)
        return 0;
    for (size_t i = 0; i < MIN(n, (size_t)LOSSES_SHOWN); i++) {
        const char *what = layout_loss_at(l, i, &kind);

        buf_addf(&list, "%s%s %.100s", i ? ", " : "", name[kind], what);
    }
    err_set(e, EINVAL, "%s cannot hold %s%s", w->name, list.data ? list.data : "",
            n > LOSSES_SHOWN ? ", ..." : "");
    return err_hint(e, "leave them out: save=%s:drop=optimizer+other+objects", w->name);
}

/* ---- writing ---- */

struct publication {
    struct fs *fs;
    struct stage *stage;
    struct save_files files; /* that came, and names that are to go */
    struct save_format format;
    struct merge *merge;
    struct layout *layout;
    bool rewritten; /* all storage is new */
};

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
        ret = refuse_losses(p->layout, w, e);
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

static int changed(const struct stage *s, struct err *e)
{
    err_set(e, EINVAL, "%s: the checkpoint was changed by another writer meanwhile",
            s->path);
    return err_hint(e, "what was written here is kept: copy it, then remove it");
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
    return changed(s, e);
}

static int build(struct publication *p, struct err *e)
{
    struct stage *s = p->stage;
    struct save_format *f = &p->format;
    int ret = check_fresh(p->fs, s, e);

    if (ret == 0)
        ret = save_waits(s)
                  ? save_format_parse(s->format ? s->format : p->fs->options.save, f, e)
                  : own_format(p->fs, s->slot, f, e);
    if (ret == 0)
        ret = staging_restart(s->staging, e);
    if (ret == 0)
        ret = merge_files(p, e);
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
        ret = save_files_place(s, &p->files, p->merge, e);
    return ret;
}

/* ---- the step ---- */

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
        return changed(s, e);
    if (ret == 0)
        ret = save_files_carry(p->fs, s, &p->files, p->rewritten, e);
    return ret == 0 ? save_put_in_place(p->fs, s, e) : ret;
}

static int put_all_in_place(struct publication *p, struct err *e)
{
    int ret;

    if (p->stage->over)
        return over_put_in_place(p->fs, p->stage, &p->files, e);
    if (!p->stage->slot)
        return save_put_in_place(p->fs, p->stage, e);
    stages_place_begin(p->fs);
    ret = replace_old(p, e);
    stages_place_end(p->fs);
    return ret;
}

/* Nobody goes on believing what was there before. */
void save_tell(struct fs *fs, const char *path, struct slot *slot)
{
    CLEANUP_FREE char *above = strdup(path);
    char *slash = above ? strrchr(above, '/') : NULL;

    if (slot) {
        scanner_suspect(fs->scanner, slot->path, slot->file);
        slot_retire(fs, slot);
    }
    if (slash)
        *slash = '\0';
    else if (above)
        above[0] = '\0';
    store_forget(fs->store, path);
    nodes_look_again(fs, path);
    if (above)
        nodes_look_again(fs, above);
}

/* What stands in .unshard/ is a view of what was copied, and objects are no files. */
static void tell_left_out(struct fs *fs, const struct stage *s)
{
    struct err e = {0};

    err_set(&e, ENOTSUP,
            "save %s: it has none of the objects (steps, schedulers, ...) of the "
            "checkpoint that it is a copy of",
            s->path);
    err_hint(&e, "unshard convert carries them to formats that hold objects");
    last_error_report(&fs->last_error, &e);
}

static int publish_once(struct fs *fs, struct stage *s, struct err *e)
{
    struct publication p = {.fs = fs, .stage = s};
    bool left_out;
    int ret;

    stages_lock(fs);
    ret = save_files_list(s, &p.files, e);
    left_out = ret == 0 && !s->slot && save_files_bring_objects(s, &p.files);
    stages_unlock(fs);
    /* Names that are hidden in this mount only are nothing to publish. */
    if (ret == 0 && (s->slot || s->over) && save_files_none(&p.files))
        ret = NOTHING;
    if (ret == 0)
        ret = build(&p, e);
    if (ret == 0 && fs->store->remote)
        ret = save_upload(fs, s, &p.files, p.merge, p.layout, e);
    else if (ret == 0)
        ret = put_all_in_place(&p, e);
    if (ret < 0)
        save_files_again(s, &p.files);
    else if (ret == 0 && left_out)
        tell_left_out(fs, s);
    merge_free(p.merge);
    layout_free(p.layout);
    save_files_release(&p.files);
    return ret < 0 ? err_wrap(e, "save %s", s->path) : ret;
}

/*
 * The watch may scan the checkpoint anew between check_fresh() and the reading of its rows:
 * -ESTALE. Each try begins with check_fresh(), which tells that from another writer's work.
 */
static int publish(struct fs *fs, struct stage *s, struct err *e)
{
    int ret = publish_once(fs, s, e);

    for (int i = 1;
         ret == -ESTALE && (s->slot || s->over) && !fs->store->remote && i < TRIES;
         i++) {
        log_msg(LOG_FS, LOG_INFO, "%s; it is tried again", e->text);
        *e = (struct err){0};
        ret = publish_once(fs, s, e);
    }
    return ret;
}

/* ---- stages ---- */

/* Waits a moment for writers to be gone: -EBUSY. NOTHING: somebody else has published it. */
static int wait_closed(struct fs *fs, struct stage *s, struct err *e)
{
    int64_t until = now_ns() + CLOSE_SECONDS * 1000000000ll;

    while (s->writers > 0 || over_is_written(fs, s)) {
        if (now_ns() > until)
            return err_set(e, EBUSY, "save %s: a file is open for writing", s->path);
        if (!stage_sleep_wait(fs, s, 20000000))
            return NOTHING;
    }
    return 0;
}

/*
 * A checkpoint is removed when its directory is, and not at all by an rm -r that ended
 * before: what that has hidden shows again. True: the stage has ended with it.
 */
static bool give_up_removal(struct fs *fs, struct stage *s)
{
    if (!stage_is_removal(s))
        return false;
    log_msg(LOG_FS, LOG_WARN, "%s: its removal was not finished: nothing is removed",
            s->path);
    if (stage_unhide(fs, s))
        return false;
    stage_end(fs, s, false);
    return true;
}

/* One below it that is to be published and was begun after the last that was tried. */
static struct stage *next_inside(struct fs *fs, const struct stage *s, uint64_t tried)
{
    struct stage *found = NULL, *x = NULL;

    while ((x = stage_inside(fs, s, x)))
        if (x->number > tried && !stage_is_removal(x) &&
            (!found || x->number < found->number))
            found = x;
    return found;
}

/*
 * What is on its way in the directory comes first: with it, none takes the place of another.
 * What cannot be published stays on its way. NOTHING: somebody else has published it.
 */
static int publish_inside(struct fs *fs, const struct stage *s)
{
    uint64_t number = s->number, tried = 0;
    struct stage *x;

    while ((s = stage_numbered(fs, number)) && (x = next_inside(fs, s, tried))) {
        struct err e = {0};

        tried = x->number;
        if (stage_wait(fs, x) && save_publish(fs, x, &e) < 0)
            last_error_report(&fs->last_error, &e);
    }
    return s && stage_wait(fs, stage_numbered(fs, number)) ? 0 : NOTHING; /* gone */
}

int save_publish(struct fs *fs, struct stage *s, struct err *e)
{
    struct node *node = NULL;
    int ret = s->slot || s->over ? publish_inside(fs, s) : 0;

    if (ret == 0)
        ret = wait_closed(fs, s, e);
    if (ret != 0 || give_up_removal(fs, s))
        return MIN(ret, 0);
    s->publishing = true;
    stages_unlock(fs);
    ret = publish(fs, s, e);
    if (ret == 0) {
        save_tell(fs, s->path, s->slot);
        node = s->slot || s->over ? NULL : alias_node(fs, s->path);
        log_msg(LOG_FS, LOG_INFO, "saved %s", s->path);
    }
    stages_lock(fs);
    s->publishing = false;
    if (node)
        alias_make(fs, s->root, node);
    if (ret == 0)
        stage_end(fs, s, true);
    else if (ret == -EBUSY && stage_inside(fs, s, NULL))
        s->touched_ns = now_ns(); /* when that is published: again in a while */
    else
        s->failed = true; /* until something changes */
    stage_wake(fs);
    return MIN(ret, 0);
}

/* A directory is published after those in it: with them on their way it cannot be exchanged. */
static int by_depth(const void *a, const void *b)
{
    size_t x = strlen(*(const char *const *)a), y = strlen(*(const char *const *)b);

    return (x < y) - (x > y);
}

/* With the lock: the paths of all stages, deep ones first; `text` holds them. */
static const char **list_stages(struct fs *fs, struct buf *text, size_t *count)
{
    const char **list;
    size_t i = 0;

    *count = 0;
    for (const struct stage *s = stage_first(fs); s; s = s->next, ++*count)
        buf_add(text, s->path, strlen(s->path) + 1);
    list = calloc(*count + 1, sizeof *list);
    if (!list || buf_failed(text)) {
        free(list);
        return NULL;
    }
    for (size_t at = 0; at < text->len; at += strlen(text->data + at) + 1)
        list[i++] = text->data + at;
    qsort(list, *count, sizeof *list, by_depth);
    return list;
}

int save_all(struct fs *fs, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {0};
    CLEANUP_FREE const char **path = NULL;
    size_t count;
    int first = 0;

    stages_lock(fs);
    path = list_stages(fs, &text, &count);
    if (!path) {
        stages_unlock(fs);
        return err_nomem(e);
    }
    for (size_t i = 0; i < count; i++) {
        struct stage *s = stage_at(fs, path[i]);
        struct err here = {0};
        int rc = s && stage_wait(fs, s) ? save_publish(fs, s, &here) : 0;

        if (rc < 0 && first == 0) {
            first = rc;
            *e = here;
        } else if (rc < 0) {
            last_error_report(&fs->last_error, &here);
        }
    }
    stages_unlock(fs);
    return first;
}
