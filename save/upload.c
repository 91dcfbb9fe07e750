/* SPDX-License-Identifier: MIT */
/* save/upload.c - a save to a bucket: journals, order, and what is never overwritten. */
#include "save/upload.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"
#include "remote/source.h"

enum {
    JOURNAL_MAX = 256 << 20, /* an upload a line, of a million files */
    NAMES_MAX = 64 << 20,
};

static const char path_prefix[] = ".unshard-staging-";

static struct upload *upload_of(struct save_target *t)
{
    return container_of(t, struct upload, base);
}

int upload_key(const struct upload *u, const char *path, struct buf *key, struct err *e)
{
    buf_clear(key);
    buf_addf(key, "%s/%s", u->prefix, path);
    return buf_failed(key) ? err_nomem(e) : 0;
}

int upload_is_ours(struct upload *u, const char *path, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0}, tag = {0};
    uint64_t size;
    int ret = upload_key(u, path, &key, e);

    if (ret == 0)
        ret = bucket_tag(u->bucket, key.data, &tag, &size, e);
    if (ret == -ENOENT)
        return 0;
    return ret < 0 ? ret : strcmp(tag.data, u->tag) == 0;
}

/* ---- journals ---- */

static int journal_key(const struct upload *u, unsigned part, struct buf *key,
                       struct err *e)
{
    buf_clear(key);
    buf_addf(key, "%sjournal.%u-of-%u", u->staging, part, u->parts);
    return buf_failed(key) ? err_nomem(e) : 0;
}

int upload_note(struct upload *u, bool first, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0}, text = {.max = JOURNAL_MAX};
    const struct bucket_put how = {.tag = u->tag, .absent = first};
    int ret = journal_key(u, u->part, &key, e);

    if (ret == 0)
        ret = upload_journal_text(&u->journal, &text, e);
    if (ret == 0)
        ret = bucket_put(u->bucket, key.data, text.data, text.len, &how, e);
    if (ret == -EEXIST)
        return err_set(e, EBUSY, "%s: another process has begun to write it", u->where);
    if (ret < 0)
        return err_wrap(e, "journal of %s", u->where);
    u->noted = true;
    return 0;
}

/* What part `part` has noted is added to *j. -ENOENT: it has not begun. */
static int read_part(struct upload *u, unsigned part, struct upload_journal *j,
                     struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0}, text = {.max = JOURNAL_MAX};
    CLEANUP(upload_journal_release) struct upload_journal seen = {0};
    int ret = journal_key(u, part, &key, e);

    if (ret == 0)
        ret = bucket_get(u->bucket, key.data, JOURNAL_MAX, &text, e);
    if (ret < 0)
        return ret;
    if (upload_journal_read(&seen, text.data ? text.data : "", text.len, e) < 0)
        return err_wrap(e, "%s/%s", bucket_url(u->bucket), key.data);
    if (strcmp(seen.what, j->what) != 0) {
        err_set(e, EINVAL, "%s/%s holds another save", bucket_url(u->bucket), key.data);
        return err_hint(e, "finish that with its own command, or remove that object");
    }
    for (size_t i = 0; ret == 0 && i < seen.uploads; i++)
        ret = upload_journal_add(j, seen.upload[i].path, seen.upload[i].id, e);
    upload_journal_sort(j);
    j->done = seen.done;
    if (seen.last && !j->last)
        j->last = steal(&seen.last);
    u->noted |= j == &u->journal;
    return ret;
}

static int check_part(struct upload *u, unsigned part, struct err *e)
{
    int ret = read_part(u, part, &u->others, e);

    if (ret == -ENOENT) {
        err_set(e, EINVAL, "part %u of %u has not begun", part, u->parts);
        return err_hint(e, "run it: --part %u/%u", part, u->parts);
    }
    if (ret == 0 && !u->others.done) {
        err_set(e, EINVAL, "part %u of %u is not done", part, u->parts);
        return err_hint(e, "run it again: --part %u/%u", part, u->parts);
    }
    return ret;
}

static int see_journal(void *user, const struct bucket_object *o)
{
    struct upload *u = user;
    const char *name = strrchr(o->key, '/');
    unsigned part, parts;

    if (name && sscanf(name, "/journal.%u-of-%u", &part, &parts) == 2 && part > 0 &&
        parts > 0)
        u->parts = parts;
    return 0;
}

/* What all parts have noted, and what an earlier try to finish has. */
static int take_parts(struct upload *u, struct err *e)
{
    int ret;

    u->part = u->parts = 0;
    ret = bucket_list(u->bucket, u->staging, see_journal, u, e);
    if (ret == 0 && !u->parts)
        ret = err_set(e, EINVAL, "%s: nothing to finish", u->where);
    for (unsigned i = 1; ret == 0 && i <= u->parts; i++)
        ret = check_part(u, i, e);
    return ret == 0 ? read_part(u, 0, &u->journal, e) : ret;
}

/* ---- giving up ---- */

static int see_key(void *user, const struct bucket_object *o)
{
    return buf_add(user, o->key, strlen(o->key) + 1);
}

/*
 * Objects of a save that was not completed. The one that completes it goes first, in case
 * it is there after all (`last`, or NULL).
 */
static int remove_shown(struct upload *u, const char *tag, const char *last,
                        struct err *e)
{
    CLEANUP(buf_release) struct buf keys = {.max = NAMES_MAX}, key = {0};
    int ret = last ? upload_is_ours(u, last, e) : 0;
    uint64_t size;

    if (ret == 1) {
        ret = upload_key(u, last, &key, e);
        if (ret == 0)
            ret = bucket_delete(u->bucket, key.data, e);
    }
    buf_clear(&key);
    buf_addf(&key, "%s/", u->prefix);
    if (ret == 0)
        ret = buf_failed(&key) ? err_nomem(e)
                               : bucket_list(u->bucket, key.data, see_key, &keys, e);
    for (size_t at = 0; ret == 0 && at < keys.len; at += strlen(keys.data + at) + 1) {
        CLEANUP(buf_release) struct buf theirs = {0};

        ret = bucket_tag(u->bucket, keys.data + at, &theirs, &size, e);
        if (ret == 0 && strcmp(theirs.data, tag) == 0)
            ret = bucket_delete(u->bucket, keys.data + at, e);
        else if (ret == -ENOENT)
            ret = 0;
    }
    return ret;
}

/* Journals go last: what they speak of can be found until it is gone. */
static int end_uploads(struct upload *u, const struct upload_journal *j, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < j->uploads; i++) {
        ret = upload_key(u, j->upload[i].path, &key, e);
        if (ret == 0)
            ret = bucket_abort(u->bucket, key.data, j->upload[i].id, e);
    }
    if (ret == 0)
        ret = journal_key(u, u->part, &key, e);
    return ret == 0 ? bucket_delete(u->bucket, key.data, e) : ret;
}

static void upload_abandon(struct save_target *t)
{
    struct upload *u = upload_of(t);
    struct err ignored = {0};
    int ret = 0;

    if (!u->noted)
        return;
    if (u->journal.last)
        ret = remove_shown(u, u->tag, u->journal.last, &ignored);
    if (ret == 0)
        end_uploads(u, &u->journal, &ignored);
}

static void name_tag(const char *what, char tag[33])
{
    XXH128_hash_t h = XXH3_128bits(what, strlen(what));

    snprintf(tag, 33, "%016" PRIx64 "%016" PRIx64, h.high64, h.low64);
}

/* Whole or nothing: what the dead one has completed stays. */
static int end_dead(struct upload *u, const struct upload_journal *j, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0}, tag = {0};
    char theirs[33];
    uint64_t size;
    int ret = 0;

    name_tag(j->what, theirs);
    if (j->last) {
        ret = upload_key(u, j->last, &key, e);
        if (ret == 0)
            ret = bucket_tag(u->bucket, key.data, &tag, &size, e);
        if (ret == -ENOENT || (ret == 0 && strcmp(tag.data, theirs) != 0))
            ret = remove_shown(u, theirs, NULL, e);
    }
    return ret == 0 ? end_uploads(u, j, e) : ret;
}

/*
 * Nobody goes on with what a mount that died has begun: the bytes were in its spool. Others'
 * are left alone.
 */
static int clear_dead(struct upload *u, bool mount, struct err *e)
{
    CLEANUP(upload_journal_release) struct upload_journal seen = {0};
    CLEANUP(buf_release) struct buf key = {0}, text = {.max = JOURNAL_MAX};
    int ret = journal_key(u, u->part, &key, e);

    if (ret == 0)
        ret = bucket_get(u->bucket, key.data, JOURNAL_MAX, &text, e);
    if (ret == 0)
        ret = upload_journal_read(&seen, text.data ? text.data : "", text.len, e);
    if (ret == -ENOENT)
        return 0;
    if (ret == 0 && !staging_writer_is_dead(seen.what)) {
        if (!mount)
            return 0; /* ours to go on with, or another save: read_part() tells */
        err_set(e, EBUSY, "%s/%s is another save's (%.200s)", bucket_url(u->bucket),
                key.data, seen.what);
        return err_hint(e, "let it finish, or remove that object");
    }
    return ret == 0 ? end_dead(u, &seen, e) : ret;
}

/* ---- opening ---- */

/* Is anything there already, that an earlier process of this save has not made? */
struct first_object {
    struct buf key;
};

static int see_first(void *user, const struct bucket_object *o)
{
    struct first_object *f = user;

    buf_adds(&f->key, o->key);
    return 1;
}

static int check_target(struct upload *u, struct err *e)
{
    CLEANUP(buf_release) struct buf prefix = {0}, tag = {0};
    struct first_object first = {0};
    uint64_t size;
    int ret;

    buf_addf(&prefix, "%s/", u->prefix);
    if (buf_failed(&prefix))
        return err_nomem(e);
    ret = bucket_list(u->bucket, prefix.data, see_first, &first, e);
    if (ret == 1 && u->journal.last)
        ret = bucket_tag(u->bucket, first.key.data, &tag, &size, e);
    buf_release(&first.key);
    if (ret <= 0 && (!tag.data || strcmp(tag.data, u->tag) == 0))
        return ret;
    err_set(e, EEXIST, "%s is there already", u->where);
    return err_hint(e, "name another place, or remove it first");
}

/* "a/b" is "b" below "a/"; the bucket itself is no place for a checkpoint. */
static int name_keys(struct upload *u, struct err *e)
{
    const char *slash = strrchr(u->prefix, '/');
    const char *name = slash ? slash + 1 : u->prefix;

    if (!u->prefix[0] || !strcmp(name, ".") || !strcmp(name, "..")) {
        err_set(e, EINVAL, "%s is no name for a new checkpoint", bucket_url(u->bucket));
        return err_hint(e, "save to %s/PREFIX", bucket_url(u->bucket));
    }
    if (asprintf(&u->staging, "%.*s%s%s/", (int)(name - u->prefix), u->prefix,
                 path_prefix, name) < 0)
        u->staging = NULL;
    if (asprintf(&u->where, "%s/%s", bucket_url(u->bucket), u->prefix) < 0)
        u->where = NULL;
    return u->staging && u->where ? 0 : err_nomem(e);
}

static int open_all(struct upload *u, const struct staging_claim *claim, struct err *e)
{
    int ret = bucket_open(claim->target, &u->bucket, &u->prefix, e);

    name_tag(claim->what, u->tag);
    u->part = claim->part;
    u->parts = claim->parts;
    u->finish = claim->finish;
    u->journal.what = strdup(claim->what);
    u->others.what = strdup(claim->what);
    if (ret == 0 && (!u->journal.what || !u->others.what))
        ret = err_nomem(e);
    if (ret == 0)
        ret = name_keys(u, e);
    if (ret == 0 && !u->finish)
        ret = clear_dead(u, claim->mount, e);
    if (ret < 0)
        return ret;
    ret = u->finish ? take_parts(u, e) : read_part(u, u->part, &u->journal, e);
    return ret == 0 || ret == -ENOENT ? check_target(u, e) : ret;
}

static void upload_close(struct save_target *t)
{
    struct upload *u = upload_of(t);

    for (size_t i = 0; i < u->files; i++)
        free(u->file[i].part);
    free(u->file);
    upload_journal_release(&u->journal);
    upload_journal_release(&u->others);
    bucket_close(u->bucket);
    free(u->prefix);
    free(u->staging);
    free(u->where);
    pthread_mutex_destroy(&u->lock);
    free(u);
}

/* ---- writing ---- */

static int mark_ours(void *user, uint32_t i, const struct layout_file_info *f)
{
    struct upload *u = user;

    (void)f;
    u->file[i].ours = true;
    return 0;
}

/*
 * What is large, and all of the first stage, goes up in parts, of which nothing is seen
 * until they are put together. The rest is small, and made when its time comes.
 */
static int list_files(struct upload *u, struct err *e)
{
    const struct layout *l = u->run.layout;
    struct layout_file_info f;
    int ret = 0;

    u->file = calloc(layout_files(l) + 1, sizeof *u->file);
    if (!u->file)
        return err_nomem(e);
    u->files = layout_files(l);
    for (size_t i = 0; ret == 0 && i < u->files; i++) {
        struct upload_file *file = &u->file[i];

        layout_file_info(l, i, &f);
        ret = parts_of(&f, &file->parts, e);
        if (f.codec != LAYOUT_PLAIN)
            file->parts.count = 1; /* of a length that is not known yet */
        file->in_parts = f.size > 0 && (f.stage == 0 || file->parts.count > 1);
    }
    for (unsigned stage = 0; stage <= save_last_stage(l); stage++)
        save_each_file(&u->run, stage, mark_ours, u);
    return ret;
}

/* The first file of the last stage: upload_show(). */
static int name_last(struct upload *u, struct err *e)
{
    unsigned last = save_last_stage(u->run.layout);
    struct layout_file_info f;

    free(u->journal.last);
    u->journal.last = NULL;
    for (size_t i = 0; i < u->files && !u->journal.last; i++) {
        layout_file_info(u->run.layout, i, &f);
        if (f.stage != last)
            continue;
        u->journal.last = strdup(f.path);
        if (!u->journal.last)
            return err_nomem(e);
    }
    return 0;
}

static int upload_write(struct save_target *t, const struct save_run *run,
                        struct err *e)
{
    struct upload *u = upload_of(t);
    unsigned last = save_last_stage(run->layout);
    int ret;

    u->run = *run;
    ret = list_files(u, e);
    if (ret == 0)
        ret = upload_make_parts(u, e);
    if (ret < 0)
        return ret;
    u->journal.done = true;
    ret = run->other_stages ? name_last(u, e) : 0;
    if (ret == 0)
        ret = upload_note(u, false, e);
    return ret == 0 && run->other_stages && last > 0 ? upload_show(u, 0, last - 1, e)
                                                     : ret;
}

/* ---- files beside the tensors ---- */

static int side_whole(struct upload *u, const char *key, const char *name,
                      struct source *src, struct err *e)
{
    const struct bucket_put how = {.tag = u->tag, .absent = true};
    CLEANUP_FREE char *data = malloc((size_t)src->size + 1);
    int ret = data ? source_read(src, 0, (size_t)src->size, data, e) : err_nomem(e);

    if (ret == 0)
        ret = bucket_put(u->bucket, key, data, (size_t)src->size, &how, e);
    return ret == -EEXIST ? upload_settle(u, name, ret, e) : ret;
}

static int side_parts(struct upload *u, const char *key, const char *name,
                      const char *id, const struct parts *p, struct source *src,
                      struct err *e)
{
    CLEANUP_FREE char *data = malloc((size_t)p->part);
    int ret = data ? 0 : err_nomem(e);

    for (uint32_t n = 0; ret == 0 && n < p->count; n++) {
        size_t len = (size_t)part_len(p, n);

        ret = source_read(src, part_at(p, n), len, data, e);
        if (ret == 0)
            ret = bucket_part(u->bucket, key, id, n + 1, data, len, e);
    }
    return ret == 0 ? upload_complete(u, name, id, p, false, e) : ret;
}

/* A large one: its upload is noted as others are, so that it is not left behind. */
static int side_large(struct upload *u, const char *key, const char *name,
                      const struct parts *p, struct source *src, struct err *e)
{
    const char *before = upload_journal_find(&u->journal, name);
    CLEANUP(buf_release) struct buf id = {0};
    int ret = upload_is_ours(u, name, e);

    if (ret != 0)
        return MIN(ret, 0);
    if (before)
        ret = bucket_abort(u->bucket, key, before, e);
    if (ret == 0)
        ret = bucket_create(u->bucket, key, u->tag, &id, e);
    if (ret == 0)
        ret = upload_journal_set(&u->journal, name, id.data, e);
    if (ret == 0)
        ret = upload_note(u, false, e);
    return ret == 0 ? side_parts(u, key, name, id.data, p, src, e) : ret;
}

static int upload_side(struct save_target *t, const char *name, struct source *src,
                       struct err *e)
{
    struct upload *u = upload_of(t);
    const struct layout_file_info f = {.path = name, .size = src->size};
    CLEANUP(buf_release) struct buf key = {0};
    struct parts p;
    int ret = upload_key(u, name, &key, e);

    if (ret == 0)
        ret = parts_of(&f, &p, e);
    if (ret == 0)
        ret = p.count > 1 ? side_large(u, key.data, name, &p, src, e)
                          : side_whole(u, key.data, name, src, e);
    return ret < 0 ? err_wrap(e, "%s", name) : 0;
}

/* ---- the end ---- */

static int see_upload(void *user, const struct bucket_upload *up)
{
    buf_add(user, up->key, strlen(up->key) + 1);
    return buf_add(user, up->id, strlen(up->id) + 1);
}

static int see_any(void *user, const struct bucket_part *p)
{
    (void)user;
    (void)p;
    return 1;
}

/*
 * Uploads whose ids a process that was killed did not note: they are of names of this
 * checkpoint, and hold nothing. What holds something is somebody else's.
 */
static void end_empty_uploads(struct upload *u)
{
    CLEANUP(buf_release) struct buf found = {.max = NAMES_MAX}, prefix = {0};
    struct err ignored = {0};

    buf_addf(&prefix, "%s/", u->prefix);
    if (buf_failed(&prefix) ||
        bucket_uploads(u->bucket, prefix.data, see_upload, &found, &ignored) < 0)
        return;
    for (size_t at = 0; at < found.len;) {
        const char *key = found.data + at, *id = key + strlen(key) + 1;

        if (bucket_parts(u->bucket, key, id, see_any, NULL, &ignored) == 0)
            bucket_abort(u->bucket, key, id, &ignored);
        at += strlen(key) + strlen(id) + 2;
    }
}

/* Journals; what is left of them harms nobody. */
static void discard(struct upload *u)
{
    CLEANUP(buf_release) struct buf keys = {.max = NAMES_MAX};
    struct err ignored = {0};

    end_empty_uploads(u);
    if (bucket_list(u->bucket, u->staging, see_key, &keys, &ignored) < 0)
        return;
    for (size_t at = 0; at < keys.len; at += strlen(keys.data + at) + 1)
        bucket_delete(u->bucket, keys.data + at, &ignored);
}

static int upload_publish(struct save_target *t, struct err *e)
{
    struct upload *u = upload_of(t);
    unsigned last = save_last_stage(u->run.layout);
    int ret = upload_show(u, last, last, e);

    if (ret == 0)
        discard(u);
    return ret;
}

static const struct save_target_ops upload_ops = {
    .name = "upload",
    .write = upload_write,
    .side = upload_side,
    .publish = upload_publish,
    .abandon = upload_abandon,
    .close = upload_close,
};

int save_upload_open(const struct staging_claim *claim, struct save_target **out,
                     struct err *e)
{
    struct upload *u = calloc(1, sizeof *u);
    int ret;

    if (!u)
        return err_nomem(e);
    u->base.ops = &upload_ops;
    pthread_mutex_init(&u->lock, NULL);
    ret = open_all(u, claim, e);
    if (ret < 0) {
        upload_close(&u->base);
        return ret;
    }
    *out = &u->base;
    return 0;
}
