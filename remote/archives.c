/* SPDX-License-Identifier: MIT */
/* remote/archives.c - a store in which tar archives can also be used as directories. */
#include "remote/archives.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>

#include "base/err.h"
#include "base/interrupt.h"
#include "remote/archive.h"
#include "remote/store.h"
#include "remote/tar.h"

enum {
    KEPT = 4, /* archives whose members are known: a packed one takes up to 32 MiB */
};

static const char suffix[] = ".nemo";

struct kept {
    char *path;
    struct archive *archive;
};

struct archives {
    struct store base;
    struct store *inner;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    struct kept kept[KEPT]; /* guarded by lock; the latest last */
    size_t count;           /* guarded by lock */
    bool opening;           /* guarded by lock: somebody reads headers */
};

static struct archives *archives_of(struct store *s)
{
    return container_of(s, struct archives, base);
}

static bool ends_in_suffix(const char *name, size_t len)
{
    return len > strlen(suffix) &&
           memcmp(name + len - strlen(suffix), suffix, strlen(suffix)) == 0 &&
           name[len - strlen(suffix) - 1] != '/';
}

bool archive_is_named(const char *name)
{
    return ends_in_suffix(name, strlen(name));
}

/* ---- archives that are known ---- */

/* With a reference, or NULL; one made from a file that has changed goes. Locked. */
static struct archive *find_kept(struct archives *s, const char *path,
                                 const struct file_id *id)
{
    for (size_t i = 0; i < s->count; i++) {
        struct kept k = s->kept[i];

        if (strcmp(k.path, path) != 0)
            continue;
        memmove(s->kept + i, s->kept + i + 1, (s->count - i - 1) * sizeof k);
        s->count--;
        if (archive_is_of(k.archive, id)) {
            s->kept[s->count++] = k;
            return archive_get(k.archive);
        }
        archive_put(k.archive);
        free(k.path);
        return NULL;
    }
    return NULL;
}

/* Locked. */
static void keep(struct archives *s, const char *path, struct archive *a)
{
    char *own = strdup(path);

    if (!own)
        return; /* it is read again next time */
    if (s->count == KEPT) {
        archive_put(s->kept[0].archive);
        free(s->kept[0].path);
        memmove(s->kept, s->kept + 1, (KEPT - 1) * sizeof *s->kept);
        s->count--;
    }
    s->kept[s->count++] = (struct kept){.path = own, .archive = archive_get(a)};
}

static int open_new(struct archives *s, const char *path, const struct entry_stat *st,
                    struct archive **out, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;

    TRY(s->inner->ops->open(s->inner, path, &src, e));
    if (!file_id_equal(&src->id, &st->id))
        return source_stale(path, &st->id, &src->id, e);
    return archive_open(src, st, out, e);
}

/* Reads headers for all who wait, one archive at a time. Locked when called and after. */
static int open_alone(struct archives *s, const char *path, const struct entry_stat *st,
                      struct archive **out, struct err *e)
{
    int rc;

    s->opening = true;
    pthread_mutex_unlock(&s->lock);
    rc = open_new(s, path, st, out, e);
    pthread_mutex_lock(&s->lock);
    s->opening = false;
    pthread_cond_broadcast(&s->ended);
    if (rc == 0)
        keep(s, path, *out);
    return rc;
}

/* The archive that the regular file `path` is. */
static int get_archive(struct archives *s, const char *path,
                       const struct entry_stat *st, struct archive **out, struct err *e)
{
    int rc = 0;

    pthread_mutex_lock(&s->lock);
    while (rc == 0 && !(*out = find_kept(s, path, &st->id)) && s->opening)
        rc = interrupt_wait(&s->ended, &s->lock, e);
    if (rc == 0 && !*out)
        rc = open_alone(s, path, st, out, e);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

/* ---- paths ---- */

/*
 * The file that is an archive on the way of `path` (or is that way's end, with `itself`): true,
 * and *rest is what follows behind its name. Of names alone nothing is looked up.
 */
static bool find_file(struct archives *s, const char *path, bool itself,
                      char file[PATH_MAX], struct entry_stat *st, const char **rest)
{
    for (const char *end = path; *end;) {
        size_t len = strcspn(end, "/");
        struct err ignored = {0};

        end += len;
        if (!ends_in_suffix(path, (size_t)(end - path)) || (!*end && !itself) ||
            end - path >= PATH_MAX) {
            end += *end == '/';
            continue;
        }
        memcpy(file, path, (size_t)(end - path));
        file[end - path] = '\0';
        end += *end == '/';
        *rest = end;
        if (s->inner->ops->stat(s->inner, file, st, &ignored) == 0 &&
            st->kind == ENTRY_FILE)
            return true;
    }
    return false;
}

/*
 * Does the path lead into an archive? 1: *out is it, *rest what follows behind its name
 * ("": itself, only with `itself`). 0: it does not.
 */
static int find_archive(struct archives *s, const char *path, bool itself,
                        struct archive **out, const char **rest, struct err *e)
{
    struct entry_stat st;
    char file[PATH_MAX];
    int rc;

    if (!find_file(s, path, itself, file, &st, rest))
        return 0;
    rc = get_archive(s, file, &st, out, e);
    return rc < 0 ? rc : 1;
}

static int archives_stat(struct store *store, const char *path, struct entry_stat *out,
                         struct err *e)
{
    CLEANUP(archive_putp) struct archive *a = NULL;
    struct archives *s = archives_of(store);
    const char *rest;
    int rc = find_archive(s, path, false, &a, &rest, e);

    if (rc == 0)
        return s->inner->ops->stat(s->inner, path, out, e);
    return rc < 0 ? rc : archive_stat(a, rest, out, e);
}

/* Listings of the store below are made ours: what is below them may be archives. */
static int archives_list(struct store *store, const char *path, struct listing **out,
                         struct err *e)
{
    CLEANUP(archive_putp) struct archive *a = NULL;
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct archives *s = archives_of(store);
    const char *rest;
    int rc = find_archive(s, path, true, &a, &rest, e);

    if (rc == 0) {
        rc = s->inner->ops->list(s->inner, path, &l, e);
        if (rc == 0)
            listing_adopt(l, store);
    } else if (rc > 0) {
        rc = listing_new(store, path, &l, e);
        if (rc == 0)
            rc = archive_list(a, rest, l, e);
    }
    if (rc == 0)
        *out = steal(&l);
    return rc;
}

static int archives_open(struct store *store, const char *path, struct source **out,
                         struct err *e)
{
    CLEANUP(archive_putp) struct archive *a = NULL;
    struct archives *s = archives_of(store);
    const char *rest;
    int rc = find_archive(s, path, false, &a, &rest, e);

    if (rc == 0)
        return s->inner->ops->open(s->inner, path, out, e);
    return rc < 0 ? rc : archive_source(a, rest, path, out, e);
}

/*
 * Of a member what its archive is. Then that is what the member is looked up in: where an
 * archive stood that somebody may read, another must not be shown.
 */
static int archives_readable(struct store *store, const char *path,
                             const struct access_by *by, struct file_id *id,
                             struct err *e)
{
    CLEANUP(archive_putp) struct archive *a = NULL;
    struct archives *s = archives_of(store);
    struct entry_stat st;
    char file[PATH_MAX];
    const char *rest;
    int rc;

    if (!s->inner->ops->readable)
        return 0;
    if (!find_file(s, path, false, file, &st, &rest))
        return s->inner->ops->readable(s->inner, path, by, id, e);
    rc = s->inner->ops->readable(s->inner, file, by, &st.id, e);
    if (rc == 0)
        rc = get_archive(s, file, &st, &a, e);
    if (rc == 0)
        rc = archive_stat(a, rest, &st, e);
    if (rc == 0)
        *id = st.id;
    return rc;
}

/* There are no links to directories in archives. */
static int archives_readlink(struct store *store, const char *path, char *dst,
                             size_t size, struct err *e)
{
    struct archives *s = archives_of(store);

    return s->inner->ops->readlink(s->inner, path, dst, size, e);
}

static void archives_follow(struct store *store)
{
    struct store *inner = archives_of(store)->inner;

    store_follow(inner);
    atomic_store(&store->moves, atomic_load(&inner->moves));
}

static uint64_t archives_retries(struct store *store)
{
    return store_retries(archives_of(store)->inner);
}

static void archives_stop(struct store *store)
{
    store_stop(archives_of(store)->inner);
}

static void archives_forget(struct store *store, const char *path)
{
    store_forget(archives_of(store)->inner, path);
}

static void archives_close(struct store *store)
{
    struct archives *s = archives_of(store);

    for (size_t i = 0; i < s->count; i++) {
        archive_put(s->kept[i].archive);
        free(s->kept[i].path);
    }
    pthread_cond_destroy(&s->ended);
    pthread_mutex_destroy(&s->lock);
    store_close(s->inner);
    free(s);
}

static const struct store_ops archives_ops = {
    .name = "archives",
    .stat = archives_stat,
    .list = archives_list,
    .open = archives_open,
    .readlink = archives_readlink,
    .follow = archives_follow,
    .stop = archives_stop,
    .retries = archives_retries,
    .readable = archives_readable,
    .forget = archives_forget,
    .close = archives_close,
};

/* ---- opening ---- */

static char *copy(const char *text)
{
    return text ? strdup(text) : NULL;
}

int archives_over(struct store *inner, struct store **out, struct err *e)
{
    CLEANUP(store_closep) struct store *owned = inner;
    struct archives *s = calloc(1, sizeof *s);

    if (!s)
        return err_nomem(e);
    pthread_mutex_init(&s->lock, NULL);
    interrupt_cond_init(&s->ended);
    s->base.ops = &archives_ops;
    s->inner = steal(&owned);
    s->base.remote = inner->remote;
    s->base.url = copy(inner->url);
    s->base.file = copy(inner->file);
    s->base.dir = copy(inner->dir);
    s->base.identity = copy(inner->identity);
    if ((inner->url && !s->base.url) || (inner->file && !s->base.file) ||
        (inner->dir && !s->base.dir) || (inner->identity && !s->base.identity)) {
        store_close(&s->base);
        return err_nomem(e);
    }
    *out = &s->base;
    return 0;
}

int archives_oddities(struct store *store, const char *path,
                      struct archive_oddities *out, struct err *e)
{
    CLEANUP(archive_putp) struct archive *a = NULL;
    const char *rest;
    int rc;

    *out = (struct archive_oddities){0};
    if (store->ops != &archives_ops)
        return 0;
    rc = find_archive(archives_of(store), path, true, &a, &rest, e);
    if (rc <= 0)
        return rc;
    *out = (struct archive_oddities){.packed = archive_is_packed(a),
                                     .unended = !tar_is_ended(archive_tar(a)),
                                     .doubles = tar_doubles(archive_tar(a))};
    return 0;
}
