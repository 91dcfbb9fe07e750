/* SPDX-License-Identifier: MIT */
/* fs/bucket_dir.c - listing directories of an object store in a mount for writing. */
#include <errno.h>
#include <limits.h>
#include <string.h>

#include "fs/attr.h"
#include "fs/bucket.h"
#include "fs/dir_page.h"
#include "fs/disk_view.h"

/* The names as of opendir or rewinddir. */
struct bucket_list {
    struct opened opened;
    pthread_mutex_t lock;
    /* guarded by lock */
    struct bucket_name {
        char *name;
        mode_t type;
    } * at;
    size_t count, cap;
};

static struct bucket_list *list_of(const struct fuse_file_info *fi)
{
    return container_of((struct opened *)(uintptr_t)fi->fh, struct bucket_list, opened);
}

static void list_clear(struct bucket_list *l)
{
    for (size_t i = 0; i < l->count; i++)
        free(l->at[i].name);
    l->count = 0;
}

static void list_free(struct fs *fs, struct opened *o)
{
    struct bucket_list *l = container_of(o, struct bucket_list, opened);

    (void)fs;
    list_clear(l);
    free(l->at);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static int list_add(void *user, const char *name, mode_t type)
{
    struct bucket_list *l = user;
    char *copy = strdup(name);

    if (copy && l->count == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 64;
        struct bucket_name *grown = reallocarray(l->at, cap, sizeof *grown);

        if (grown) {
            l->at = grown;
            l->cap = cap;
        }
    }
    if (!copy || l->count == l->cap) {
        free(copy);
        return -ENOMEM;
    }
    l->at[l->count++] = (struct bucket_name){copy, type};
    return 0;
}

/* `views=` has the views listed. */
static int add_views(struct request *r, struct bucket_node *dir, struct bucket_list *l,
                     struct err *e)
{
    const struct disk_view *view;
    struct generation *gen = NULL;
    int rc =
        r->fs->options.views ? bucket_generation(r->fs, dir, true, &gen, e) : -ENOENT;

    if (rc < 0)
        return rc == -ENOENT ? 0 : rc;
    for (size_t i = 0; rc >= 0 && (view = disk_view_at(i)); i++) {
        if (!disk_view_listed(r->fs, view))
            continue;
        rc = disk_has_view(r->fs, gen, view, e);
        if (rc > 0)
            rc = list_add(l, view->name, view->is_dir ? S_IFDIR : S_IFREG);
    }
    generation_unref(r->fs, gen, 1);
    return MIN(rc, 0);
}

/* Names of directories before the views, so that the first of each is what is there. */
static int by_name(const void *a, const void *b)
{
    const struct bucket_name *x = a, *y = b;

    return strcmp(x->name, y->name);
}

static void list_finish(struct bucket_list *l)
{
    size_t kept = 0;

    if (l->count)
        qsort(l->at, l->count, sizeof *l->at, by_name);
    for (size_t i = 0; i < l->count; i++) {
        if (kept > 0 && strcmp(l->at[kept - 1].name, l->at[i].name) == 0)
            free(l->at[i].name);
        else
            l->at[kept++] = l->at[i];
    }
    l->count = kept;
}

static int look(struct request *r, struct bucket_list *l, struct err *e)
{
    struct bucket_node *dir = bucket_pin(r->fs, r->ino);
    char path[PATH_MAX];
    bool gone;
    int rc;

    if (!dir)
        return -ESTALE;
    list_clear(l);
    bucket_node_path(r->fs, dir, path, &gone);
    rc = gone ? 0 : bucket_each_name(r->fs, path, list_add, l, e);
    if (rc == 0 && !gone)
        rc = add_views(r, dir, l, e);
    bucket_unpin(r->fs, dir);
    list_finish(l);
    return rc == -ENOMEM ? err_nomem(e) : rc;
}

int bucket_opendir_run(struct request *r, struct err *e)
{
    struct bucket_list *l = calloc(1, sizeof *l);

    if (!l)
        return err_nomem(e);
    pthread_mutex_init(&l->lock, NULL);
    l->opened.free = list_free;
    l->opened.kind = OPENED_LIST;
    opened_add(&r->fs->opened, &l->opened);
    r->fi.fh = (uintptr_t)&l->opened;
    if (fuse_reply_open(r->req, &r->fi) < 0)
        opened_end(r->fs, &l->opened);
    return 0;
}

static void put_names(struct request *r, const struct bucket_list *l,
                      struct dir_page *page)
{
    static const char *const dots[] = {".", ".."};
    CLEANUP_FREE char *path = malloc(PATH_MAX);
    struct err ignored = {0};

    for (size_t i = (size_t)r->off; path && i < l->count + 2; i++) {
        struct fuse_entry_param entry = {
            .attr = {.st_ino = r->ino, .st_mode = S_IFDIR}};
        const char *name = i < 2 ? dots[i] : l->at[i - 2].name;

        if (!dir_page_has_room(page, name))
            return;
        if (i >= 2) {
            entry.attr.st_mode = l->at[i - 2].type;
            if (bucket_path(r->fs, r->ino, name, path, &ignored) == 0)
                entry.attr.st_ino = attr_path_ino(path, "", 0, 0);
        }
        dir_page_put(page, name, &entry, (off_t)i + 1);
    }
}

int bucket_readdir_run(struct request *r, struct err *e)
{
    struct bucket_list *l = list_of(&r->fi);
    struct dir_page page;
    int rc = 0;

    if (r->off < 0)
        return -EINVAL;
    opened_get(&l->opened); /* it may be closed before the reply has ended */
    pthread_mutex_lock(&l->lock);
    if (r->off == 0)
        rc = look(r, l, e);
    if (rc == 0)
        rc = dir_page_init(&page, r->size, r->off, false, e);
    if (rc == 0) {
        put_names(r, l, &page);
        fuse_reply_buf(r->req, page.data, page.used);
        dir_page_free(&page);
    }
    pthread_mutex_unlock(&l->lock);
    opened_put(r->fs, &l->opened);
    return rc;
}
