/* SPDX-License-Identifier: MIT */
/* remote/objects.c - a store of objects behind HTTP: names with slashes, read in ranges. */
#include "remote/objects.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"
#include "remote/archives.h"
#include "remote/objects_priv.h"

static struct objects *objects_of(struct store *s)
{
    return container_of(s, struct objects, base);
}

/* How messages name a path. */
static const char *shown(const struct objects *o, const char *path)
{
    return path[0] ? path : o->base.url;
}

/* "a/b/c" is "c" in "a/b". */
static int split(const char *path, char dir[PATH_MAX], const char **name)
{
    const char *slash = strrchr(path, '/');
    size_t len = slash ? (size_t)(slash - path) : 0;

    if (strlen(path) >= PATH_MAX)
        return -ENAMETOOLONG;
    memcpy(dir, path, len);
    dir[len] = '\0';
    *name = slash ? slash + 1 : path;
    return 0;
}

/* The entry of a path that is not the root, within its directory's listing. */
static int find(struct objects *o, const char *path, struct object_list **list,
                const struct object **out, struct err *e)
{
    char dir[PATH_MAX];
    const char *name;
    int rc = split(path, dir, &name);

    if (rc < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", path);
    if (!store_name_is_safe(path, strlen(path)))
        return err_set(e, ENOENT, "%s: %s", path, strerror(ENOENT));
    TRY(dirs_get(o, dir, list, e));
    *out = object_list_find(*list, name);
    return *out ? 0 : err_set(e, ENOENT, "%s: %s", path, strerror(ENOENT));
}

/* A directory is known by the names in it: whether they changed is what is asked. */
static int stat_dir(struct objects *o, const char *path, struct entry_stat *out,
                    struct err *e)
{
    CLEANUP(object_list_putp) struct object_list *l = NULL;
    int rc = dirs_get(o, path, &l, e);

    if (rc == 0)
        object_dir_stat(l, out);
    return rc;
}

static int objects_stat(struct store *s, const char *path, struct entry_stat *out,
                        struct err *e)
{
    struct objects *o = objects_of(s);
    CLEANUP(object_list_putp) struct object_list *l = NULL;
    const struct object *object;

    if (path[0] == '\0')
        return stat_dir(o, path, out, e);
    TRY(find(o, path, &l, &object, e));
    if (object->st.kind == ENTRY_DIR)
        return stat_dir(o, path, out, e);
    *out = object->st;
    return 0;
}

static int objects_list(struct store *s, const char *path, struct listing **out,
                        struct err *e)
{
    struct objects *o = objects_of(s);
    CLEANUP(object_list_putp) struct object_list *l = NULL, *above = NULL;
    CLEANUP(listing_freep) struct listing *listing = NULL;
    const struct object *object;
    int rc = 0;

    if (path[0])
        rc = find(o, path, &above, &object, e);
    if (rc == 0 && path[0] && object->st.kind != ENTRY_DIR)
        rc = err_set(e, ENOTDIR, "%s: %s", path, strerror(ENOTDIR));
    if (rc == 0)
        rc = dirs_get(o, path, &l, e);
    if (rc == 0)
        rc = listing_new(s, path, &listing, e);
    for (size_t i = 0; rc == 0 && i < l->count; i++)
        rc = listing_add(listing, l->object[i].name, &l->object[i].st, NULL, 0, e);
    if (rc == 0)
        *out = steal(&listing);
    return rc;
}

static int objects_open_source(struct store *s, const char *path, struct source **out,
                               struct err *e)
{
    struct objects *o = objects_of(s);
    CLEANUP(object_list_putp) struct object_list *l = NULL;
    const struct object *object;

    if (path[0] == '\0')
        return err_set(e, EINVAL, "%s: is a directory, not a regular file",
                       shown(o, path));
    TRY(find(o, path, &l, &object, e));
    if (object->st.kind != ENTRY_FILE)
        return err_set(e, EINVAL, "%s: is a directory, not a regular file", path);
    return object_source(o, path, object, out, e);
}

/* Objects are no links. */
static int objects_readlink(struct store *s, const char *path, char *dst, size_t size,
                            struct err *e)
{
    (void)s;
    (void)dst;
    (void)size;
    return err_set(e, EINVAL, "%s: is no link", path);
}

static uint64_t objects_retries(struct store *s)
{
    return http_retries(objects_of(s)->http);
}

static void objects_stop(struct store *s)
{
    http_stop(objects_of(s)->http);
}

static void objects_forget(struct store *s, const char *path)
{
    char dir[PATH_MAX];
    char *slash;

    if (snprintf(dir, sizeof dir, "%s", path) >= (int)sizeof dir)
        return;
    dirs_changed(objects_of(s), dir);
    while ((slash = strrchr(dir, '/'))) {
        *slash = '\0';
        dirs_changed(objects_of(s), dir);
    }
    dirs_changed(objects_of(s), "");
}

static void objects_close(struct store *s)
{
    struct objects *o = objects_of(s);

    dirs_free(o->dirs);
    if (o->protocol->close)
        o->protocol->close(o->self);
    http_free(o->http);
    for (size_t i = 0; i < PIECES; i++)
        free(o->piece[i].data);
    pthread_mutex_destroy(&o->pieces_lock);
    free(o);
}

static const struct store_ops objects_ops = {
    .name = "objects",
    .stat = objects_stat,
    .list = objects_list,
    .open = objects_open_source,
    .readlink = objects_readlink,
    .stop = objects_stop,
    .retries = objects_retries,
    .forget = objects_forget,
    .close = objects_close,
};

static int copy_names(struct objects *o, const struct objects_spec *spec, struct err *e)
{
    o->base.url = strdup(spec->url);
    o->base.identity = strdup(spec->identity);
    o->base.file = spec->file ? strdup(spec->file) : NULL;
    o->base.dir = spec->dir ? strdup(spec->dir) : NULL;
    if (!o->base.url || !o->base.identity || (spec->file && !o->base.file) ||
        (spec->dir && !o->base.dir))
        return err_nomem(e);
    o->id = XXH3_64bits(spec->identity, strlen(spec->identity));
    return 0;
}

int objects_open(const struct objects_spec *spec, const struct store_options *options,
                 struct store **out, struct err *e)
{
    CLEANUP(store_closep) struct store *owned = NULL;
    struct objects *o = calloc(1, sizeof *o);
    unsigned refresh = options && options->refresh ? options->refresh : STORE_REFRESH;

    if (!o) {
        if (spec->protocol->close)
            spec->protocol->close(spec->self);
        http_free(spec->http);
        return err_nomem(e);
    }
    o->base.ops = &objects_ops;
    o->base.remote = true;
    o->protocol = spec->protocol;
    o->self = spec->self;
    o->http = spec->http;
    if (options)
        o->options = *options;
    /* What stands above keeps its own look for as long again. */
    o->refresh_ns = (int64_t)refresh * 500000000;
    pthread_mutex_init(&o->pieces_lock, NULL);
    owned = &o->base;
    TRY(copy_names(o, spec, e));
    TRY(dirs_new(o, &o->dirs, e));
    return archives_over(steal(&owned), out, e);
}
