/* SPDX-License-Identifier: MIT */
/* save/upload_parts.c - parts are made and sent by a few threads; then objects appear. */
#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "base/pool.h"
#include "save/gather.h"
#include "save/upload.h"

enum {
    SENDERS = 8,            /* parts on their way at a time */
    MEMORY_MAX = 256 << 20, /* of parts, however large they are */
};

/* A part that is to be made. */
struct upload_unit {
    uint32_t file, part;
};

struct making {
    struct upload *u;
    struct gather gather;
    struct part_turn *turn;
    struct part_sums **sums; /* of each file; NULL: nothing of it is made */
    struct upload_unit *unit;
    size_t units;
    uint32_t *list; /* files that something is asked of */
    size_t listed;
};

static void file_info(const struct upload *u, size_t i, struct layout_file_info *f)
{
    layout_file_info(u->run.layout, i, f);
}

static const char *id_of(const struct upload *u, const char *path)
{
    const char *id = upload_journal_find(&u->journal, path);

    return id ? id : upload_journal_find(&u->others, path);
}

static void report(struct upload *u, uint64_t bytes)
{
    if (!u->run.progress)
        return;
    pthread_mutex_lock(&u->lock);
    u->run.progress(u->run.user, bytes);
    pthread_mutex_unlock(&u->lock);
}

/* ---- what the store has ---- */

struct seen_parts {
    const struct layout_file_info *f;
    struct upload_file *file;
};

/* One of another length is none of ours, and is made anew. */
static int see_part(void *user, const struct bucket_part *p)
{
    struct seen_parts *s = user;
    const struct parts *parts = &s->file->parts;
    uint32_t n = p->number - 1;

    if (p->number == 0 || p->number > parts->count)
        return 0;
    s->file->part[n] =
        s->f->codec == LAYOUT_PLAIN ? p->size == part_len(parts, n) : p->size > 0;
    return 0;
}

/* The upload is gone: it was completed, by us, or somebody has ended it. */
static int look_gone(struct upload *u, const struct layout_file_info *f,
                     struct upload_file *file, struct err *e)
{
    int ret = upload_is_ours(u, f->path, e);

    file->there = ret == 1;
    free(file->part); /* NULL: there is no upload */
    file->part = NULL;
    return MIN(ret, 0);
}

/* Of a file whose upload was begun by an earlier process. */
static int look_nth(void *user, size_t n, struct err *e)
{
    struct making *m = user;
    struct upload *u = m->u;
    struct upload_file *file = &u->file[m->list[n]];
    struct layout_file_info f;
    struct seen_parts seen = {.f = &f, .file = file};
    CLEANUP(buf_release) struct buf key = {0};
    int ret;

    file_info(u, m->list[n], &f);
    file->part = calloc(file->parts.count, sizeof *file->part);
    ret = file->part ? upload_key(u, f.path, &key, e) : err_nomem(e);
    if (ret == 0)
        ret = bucket_parts(u->bucket, key.data, id_of(u, f.path), see_part, &seen, e);
    return ret == -ENOENT ? look_gone(u, &f, file, e) : ret;
}

/* ---- beginning ---- */

struct beginning {
    struct making *m;
    struct buf *id; /* of each listed file */
};

static int begin_nth(void *user, size_t n, struct err *e)
{
    struct beginning *b = user;
    struct upload *u = b->m->u;
    struct layout_file_info f;
    CLEANUP(buf_release) struct buf key = {0};
    int ret;

    file_info(u, b->m->list[n], &f);
    ret = upload_key(u, f.path, &key, e);
    return ret == 0 ? bucket_create(u->bucket, key.data, u->tag, &b->id[n], e) : ret;
}

/* Which of our files have an upload that the store knows (`begun`), or have none. */
static void list_files(struct making *m, bool begun)
{
    struct upload *u = m->u;
    struct layout_file_info f;

    m->listed = 0;
    for (size_t i = 0; i < u->files; i++) {
        const struct upload_file *file = &u->file[i];

        if (!file->ours || !file->in_parts || file->there)
            continue;
        file_info(u, i, &f);
        if (begun ? id_of(u, f.path) != NULL : file->part == NULL)
            m->list[m->listed++] = (uint32_t)i;
    }
}

/* Adds the new ids, in the place of those that nobody knows any more. */
static int take_ids(struct making *m, const struct buf *id, struct err *e)
{
    struct upload *u = m->u;
    struct layout_file_info f;
    bool old = u->journal.uploads > 0;
    int ret = 0;

    for (size_t n = 0; ret == 0 && n < m->listed; n++) {
        file_info(u, m->list[n], &f);
        ret = old ? upload_journal_set(&u->journal, f.path, id[n].data, e)
                  : upload_journal_add(&u->journal, f.path, id[n].data, e);
    }
    if (!old)
        upload_journal_sort(&u->journal);
    return ret;
}

static void abort_all(struct making *m, const struct buf *id)
{
    struct upload *u = m->u;
    CLEANUP(buf_release) struct buf key = {0};
    struct layout_file_info f;
    struct err ignored = {0};

    for (size_t n = 0; n < m->listed; n++) {
        file_info(u, m->list[n], &f);
        if (id[n].len && upload_key(u, f.path, &key, &ignored) == 0)
            bucket_abort(u->bucket, key.data, id[n].data, &ignored);
    }
}

/*
 * Ids are noted before anything is sent: what is in the store can always be found. (An
 * upload that was begun and not noted holds nothing.)
 */
static int begin_listed(struct making *m, struct pool *pool, struct err *e)
{
    struct beginning b = {.m = m, .id = calloc(m->listed, sizeof *b.id)};
    int ret = b.id ? pool_each(pool, m->listed, begin_nth, &b, e) : err_nomem(e);

    if (ret == 0)
        ret = take_ids(m, b.id, e);
    if (ret == 0)
        ret = upload_note(m->u, !m->u->noted, e);
    if (ret < 0 && b.id)
        abort_all(m, b.id);
    for (size_t n = 0; b.id && n < m->listed; n++)
        buf_release(&b.id[n]);
    free(b.id);
    return ret;
}

static int begin_uploads(struct making *m, struct pool *pool, struct err *e)
{
    list_files(m, true);
    TRY(pool_each(pool, m->listed, look_nth, m, e));
    list_files(m, false);
    return m->listed ? begin_listed(m, pool, e) : 0;
}

/* ---- parts ---- */

static bool is_missing(const struct upload_file *file, uint32_t part)
{
    return file->ours && file->in_parts && !file->there &&
           !(file->part && file->part[part]);
}

/* In the order of the files: checksums wait for parts that come soon. */
static int list_units(struct making *m, struct err *e)
{
    struct upload *u = m->u;
    struct layout_file_info f;
    int ret = 0;

    for (size_t i = 0; i < u->files; i++)
        for (uint32_t k = 0; k < u->file[i].parts.count; k++)
            m->units += is_missing(&u->file[i], k);
    m->unit = calloc(m->units + 1, sizeof *m->unit);
    if (!m->unit)
        return err_nomem(e);
    m->units = 0;
    for (size_t i = 0; ret == 0 && i < u->files; i++) {
        size_t before = m->units;

        for (uint32_t k = 0; k < u->file[i].parts.count; k++)
            if (is_missing(&u->file[i], k))
                m->unit[m->units++] =
                    (struct upload_unit){.file = (uint32_t)i, .part = k};
        file_info(u, i, &f);
        if (m->units > before && f.codec == LAYOUT_PLAIN)
            ret = part_sums_new(m->turn, &f, &u->file[i].parts, u->file[i].part,
                                &m->sums[i], e);
    }
    return ret;
}

static int make_plain(struct making *m, const struct upload_unit *unit, const char *key,
                      const char *id, struct err *e)
{
    struct upload *u = m->u;
    uint64_t len = part_len(&u->file[unit->file].parts, unit->part);
    CLEANUP_FREE void *bytes = malloc((size_t)len + 1);
    int ret = bytes ? part_make(m->sums[unit->file], &m->gather, unit->part, bytes, e)
                    : err_nomem(e);

    if (ret == 0)
        ret = bucket_part(u->bucket, key, id, unit->part + 1, bytes, (size_t)len, e);
    if (ret == 0)
        report(u, len);
    return ret;
}

static int make_encoded(struct making *m, const struct layout_file_info *f,
                        const char *key, const char *id, struct err *e)
{
    CLEANUP_FREE void *bytes = NULL;
    size_t len;
    int ret = gather_encoded(&m->gather, f, &bytes, &len, e);

    if (ret == 0)
        ret = bucket_part(m->u->bucket, key, id, 1, bytes, len, e);
    if (ret == 0)
        report(m->u, f->size);
    return ret;
}

static int make_nth(void *user, size_t n, struct err *e)
{
    struct making *m = user;
    const struct upload_unit *unit = &m->unit[n];
    CLEANUP(buf_release) struct buf key = {0};
    struct layout_file_info f;
    const char *id;
    int ret;

    file_info(m->u, unit->file, &f);
    id = id_of(m->u, f.path);
    ret = upload_key(m->u, f.path, &key, e);
    if (ret == 0)
        ret = f.codec == LAYOUT_PLAIN ? make_plain(m, unit, key.data, id, e)
                                      : make_encoded(m, &f, key.data, id, e);
    /* Another process of this save may have been faster, and have completed it. */
    if (ret == -ENOENT) {
        struct err later = {0};

        if (upload_is_ours(m->u, f.path, &later) == 1)
            return 0;
    }
    if (ret < 0)
        part_turn_stop(m->turn);
    return ret;
}

/* As many as memory allows: parts of very large files are large. */
static unsigned senders(const struct upload *u)
{
    uint64_t largest = PART_LEAST;

    for (size_t i = 0; i < u->files; i++)
        if (u->file[i].in_parts && u->file[i].ours)
            largest = MAX(largest, u->file[i].parts.part);
    return (unsigned)MAX(MIN((uint64_t)MEMORY_MAX / largest, (uint64_t)SENDERS),
                         (uint64_t)2);
}

static int make_all(struct making *m, struct pool *pool, struct err *e)
{
    int ret;

    m->list = calloc(m->u->files + 1, sizeof *m->list);
    m->sums = calloc(m->u->files + 1, sizeof *m->sums);
    if (!m->list || !m->sums)
        return err_nomem(e);
    ret = part_turn_new(pool_threads(pool) + 1, &m->turn, e);
    if (ret == 0)
        ret = begin_uploads(m, pool, e);
    if (ret == 0)
        ret = list_units(m, e);
    return ret == 0 ? pool_each(pool, m->units, make_nth, m, e) : ret;
}

int upload_make_parts(struct upload *u, struct err *e)
{
    struct making m = {.u = u, .gather = {u->run.input, u->run.source}};
    struct pool *pool = NULL;
    /* The calling thread works too. */
    int ret = pool_new(senders(u) - 1, &pool, e);

    if (ret == 0)
        ret = make_all(&m, pool, e);
    pool_free(pool);
    for (size_t i = 0; m.sums && i < u->files; i++)
        part_sums_free(m.sums[i]);
    part_turn_free(m.turn);
    free(m.sums);
    free(m.list);
    free(m.unit);
    return ret;
}

/* ---- objects appear ---- */

struct part_list {
    struct bucket_part *part;
    const struct parts *parts;
    bool encoded, wrong;
    size_t count;
    struct err *e;
};

static int take_part(void *user, const struct bucket_part *p)
{
    struct part_list *l = user;
    char *etag;

    /* They come in order, so that the n-th is part n, or one is missing. */
    if (l->count == l->parts->count || p->number != l->count + 1 ||
        (!l->encoded && p->size != part_len(l->parts, p->number - 1))) {
        l->wrong = true;
        return 1;
    }
    etag = strdup(p->etag);
    if (!etag)
        return err_nomem(l->e);
    l->part[l->count] = *p;
    l->part[l->count++].etag = etag;
    return 0;
}

static void part_list_release(struct part_list *l)
{
    for (size_t i = 0; i < l->count; i++)
        free((void *)(uintptr_t)l->part[i].etag);
    free(l->part);
}

/* What the store has of it is what it must have, or it is not put together. */
static int list_parts(struct upload *u, const char *path, const char *key,
                      const char *id, struct part_list *l, struct err *e)
{
    l->part = calloc(l->parts->count, sizeof *l->part);
    if (!l->part)
        return err_nomem(e);
    TRY(bucket_parts(u->bucket, key, id, take_part, l, e));
    if (l->wrong || l->count != l->parts->count)
        return err_set(e, EIO, "%s: the store has not all parts that were sent", path);
    return 0;
}

int upload_settle(struct upload *u, const char *path, int ret, struct err *e)
{
    struct err was = *e;
    int ours = upload_is_ours(u, path, e);

    if (ours != 0)
        return MIN(ours, 0);
    if (ret == -EEXIST)
        return err_set(e, EEXIST, "%s/%s: somebody else has written it meanwhile",
                       u->where, path);
    *e = was;
    return err_wrap(e, "the upload was ended by somebody else");
}

static int complete(struct upload *u, const char *path, const char *id,
                    struct part_list *l, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    int ret = upload_key(u, path, &key, e);

    if (ret == 0)
        ret = list_parts(u, path, key.data, id, l, e);
    if (ret == 0)
        ret = bucket_complete(u->bucket, key.data, id, l->part, l->count, true, e);
    return ret == -ENOENT || ret == -EEXIST ? upload_settle(u, path, ret, e) : ret;
}

int upload_complete(struct upload *u, const char *path, const char *id,
                    const struct parts *parts, bool encoded, struct err *e)
{
    CLEANUP(part_list_release)
    struct part_list l = {.parts = parts, .encoded = encoded, .e = e};

    return complete(u, path, id, &l, e);
}

/* A small file, made now. */
static int put_whole(struct upload *u, const struct layout_file_info *f,
                     const struct parts *parts, struct err *e)
{
    const struct gather g = {u->run.input, u->run.source};
    const struct bucket_put how = {.tag = u->tag, .absent = true};
    CLEANUP(buf_release) struct buf key = {0};
    CLEANUP_FREE void *bytes = NULL;
    size_t len = (size_t)f->size;
    struct part_turn *turn = NULL;
    struct part_sums *sums = NULL;
    int ret = upload_key(u, f->path, &key, e);

    if (ret == 0 && f->codec != LAYOUT_PLAIN) {
        ret = gather_encoded(&g, f, &bytes, &len, e);
    } else if (ret == 0) {
        bytes = malloc(len + 1);
        ret = bytes ? part_turn_new(1, &turn, e) : err_nomem(e);
        if (ret == 0)
            ret = part_sums_new(turn, f, parts, NULL, &sums, e);
        if (ret == 0)
            ret = part_make(sums, &g, 0, bytes, e);
        part_sums_free(sums);
        part_turn_free(turn);
    }
    if (ret == 0)
        ret = bucket_put(u->bucket, key.data, bytes, len, &how, e);
    if (ret == -EEXIST)
        ret = upload_settle(u, f->path, ret, e);
    if (ret == 0)
        report(u, f->size);
    return ret;
}

static int show_file(struct upload *u, size_t i, struct err *e)
{
    const struct upload_file *file = &u->file[i];
    struct layout_file_info f;
    const char *id;

    file_info(u, i, &f);
    if (file->there)
        return 0;
    if (!file->in_parts)
        return put_whole(u, &f, &file->parts, e);
    id = id_of(u, f.path);
    if (!id)
        return err_set(e, EINVAL, "%s: no part has begun to write it", f.path);
    return upload_complete(u, f.path, id, &file->parts, f.codec != LAYOUT_PLAIN, e);
}

struct showing {
    struct upload *u;
    uint32_t *list;
};

static int show_nth(void *user, size_t n, struct err *e)
{
    struct showing *s = user;

    return show_file(s->u, s->list[n], e);
}

/*
 * One stage: all files but the first at once, in any order, then that one. (The first is
 * the model's where a layout has only one stage.)
 */
static int show_stage(struct showing *s, unsigned stage, struct pool *pool,
                      struct err *e)
{
    struct layout_file_info f;
    size_t n = 0;
    int ret;

    for (size_t i = 0; i < s->u->files; i++) {
        file_info(s->u, i, &f);
        if (f.stage == stage)
            s->list[n++] = (uint32_t)i;
    }
    if (n == 0)
        return 0;
    ret = pool_each(pool, n - 1, show_nth, &(struct showing){s->u, s->list + 1}, e);
    return ret == 0 ? show_nth(s, 0, e) : ret;
}

int upload_show(struct upload *u, unsigned from, unsigned to, struct err *e)
{
    struct showing s = {.u = u, .list = calloc(u->files + 1, sizeof *s.list)};
    struct pool *pool = NULL;
    int ret = s.list ? pool_new(SENDERS - 1, &pool, e) : err_nomem(e);

    for (unsigned stage = from; ret == 0 && stage <= to; stage++)
        ret = show_stage(&s, stage, pool, e);
    pool_free(pool);
    free(s.list);
    return ret;
}
