/* SPDX-License-Identifier: MIT */
/* fs/save.c - publication: what was staged becomes a checkpoint of the source. */
#include "fs/save.h"

#include <errno.h>
#include <string.h>

#include "base/log.h"
#include "fs/alias.h"
#include "fs/node.h"
#include "fs/over.h"
#include "fs/remove_whole.h"
#include "fs/save_priv.h"
#include "fs/save_upload.h"
#include "save/merge.h"

enum {
    CLOSE_SECONDS = 2, /* close(2) returns before the kernel tells us of it */
    TRIES = 3,         /* to save what is scanned anew meanwhile */
    NOTHING = 1,
};

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
    bool left_out = false;
    int ret;

    stages_lock(fs);
    ret = save_files_list(s, &p.files, e);
    stages_unlock(fs);
    /* Names that are hidden in this mount only are nothing to publish. */
    if (ret == 0 && (s->slot || s->over) && save_files_none(&p.files))
        ret = NOTHING;
    if (ret == 0)
        ret = save_build(&p, e);
    if (ret == 0)
        left_out =
            !s->slot && (p.files.lost_objects || save_files_bring_objects(s, &p.files));
    if (ret == 0 && fs->store->remote)
        ret = save_upload(fs, s, &p.files, p.merge, p.layout, e);
    else if (ret == 0)
        ret = save_place(&p, e);
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

bool save_is_written(const struct stage *s)
{
    return s->writers > 0 || s->comes_ns > now_ns() || over_is_written(s);
}

static bool any_is_written(struct fs *fs)
{
    const struct stage *s = stage_first(fs);

    while (s && !save_is_written(s))
        s = s->next;
    return s != NULL;
}

void save_await_closed(struct fs *fs)
{
    int64_t until = now_ns() + CLOSE_SECONDS * 1000000000ll;

    stages_lock(fs);
    while (any_is_written(fs) && now_ns() < until)
        stage_sleep(fs, 20000000);
    stages_unlock(fs);
}

/* Waits a moment for writers to be gone: -EBUSY. NOTHING: somebody else has published it. */
static int wait_closed(struct fs *fs, struct stage *s, struct err *e)
{
    int64_t until = now_ns() + CLOSE_SECONDS * 1000000000ll;

    while (save_is_written(s)) {
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
    if (!remove_whole_begun(fs, s))
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
