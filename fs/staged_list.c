/* SPDX-License-Identifier: MIT */
/* fs/staged_list.c - listings of what was written and is not published. */
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/dir_page.h"
#include "fs/node.h"
#include "fs/slot.h"
#include "fs/staged.h"
#include "fs/tree.h"

/* Room for so many, and what stood there goes. */
static int names_begin(struct staged_handle *h, size_t count, struct err *e)
{
    staged_names_free(h->name);
    h->names = 0;
    h->name = calloc(count + 1, sizeof *h->name);
    return h->name ? 0 : err_nomem(e);
}

/* Of a node, as a listing calls it; false: no memory. */
static bool name_node(struct staged_name *at, const struct staged *n, const char *name)
{
    *at = (struct staged_name){.name = strdup(name),
                               .type = n->kind == STAGED_DIR ? S_IFDIR : S_IFREG,
                               .ino = n->ino};
    return at->name;
}

static void take_name(void *user, struct staged *n)
{
    struct staged_handle *h = user;

    if (n->kind == STAGED_GONE)
        return;
    if (name_node(&h->name[h->names], n, n->name))
        h->names++;
    else
        h->cut = true;
}

int staged_opendir(struct request *r, struct err *e)
{
    struct staged_handle *h;
    struct staged *n;

    stages_lock(r->fs);
    n = ino_is_staged(r->ino) ? staged_of_ino(r->fs, r->ino) : NULL;
    if (!n || !n->stage) {
        stages_unlock(r->fs);
        return ino_is_staged(r->ino) ? -ESTALE : STAGED_NONE;
    }
    h = staged_handle_new(n);
    stages_unlock(r->fs);
    if (!h)
        return err_nomem(e);
    opened_add(&r->fs->opened, &h->opened);
    r->fi.fh = (uintptr_t)h;
    if (fuse_reply_open(r->req, &r->fi) < 0)
        opened_end(r->fs, &h->opened);
    return 0;
}

/* With the lock: what it holds now. */
static int list_names(struct staged_handle *h, const struct staged *n, struct err *e)
{
    int rc = names_begin(h, n->count, e);

    h->cut = false;
    if (rc == 0)
        staged_each(n, take_name, h);
    return h->cut ? err_nomem(e) : rc;
}

/* It was published since: what the directory of the source shows; types are not told. */
static int list_published(const struct request *r, struct staged_handle *h,
                          struct err *e)
{
    struct node *n = node_of_ino(r->fs, r->ino);
    struct shown *shown = NULL;
    struct staged_name *more = NULL;
    size_t count = 0, places = 0;
    int rc = n ? tree_shown(r->fs, n, r->may_block, &shown, e) : -ESTALE;

    if (rc != 0)
        return rc;
    more = staged_names(r->fs, r->ino, n->path, shown->slot, shown);
    while (more && more[count].name)
        count++;
    places = shown_places(shown);
    rc = names_begin(h, places + count, e);
    if (!more)
        rc = err_nomem(e);
    for (size_t i = 0; rc == 0 && i < places; i++) {
        const struct shown_entry *entry = shown_at(shown, i);

        if (!entry || staged_hides(r->fs, r->ino, shown->slot, entry->name))
            continue;
        h->name[h->names] = (struct staged_name){.name = strdup(entry->name), .ino = 1};
        if (h->name[h->names].name)
            h->names++;
        else
            rc = err_nomem(e);
    }
    for (size_t i = 0; rc == 0 && i < count; i++) {
        h->name[h->names++] = more[i];
        more[i].name = NULL;
    }
    for (size_t i = 0; i < count; i++)
        free(more[i].name);
    free(more);
    shown_put(r->fs, shown);
    return rc;
}

/* At the start of a listing, and again after rewinddir(3): one moment's names. */
static int look(const struct request *r, struct staged_handle *h, struct err *e)
{
    const struct staged *n = h->node;
    bool staged;
    int rc = 0;

    stages_lock(r->fs);
    staged = n->stage != NULL;
    if (staged)
        rc = list_names(h, n, e);
    stages_unlock(r->fs);
    return staged || ino_is_staged(r->ino) ? rc : list_published(r, h, e);
}

/* "." and "..". */
static void list_dots(const struct request *r, const struct staged_handle *h,
                      struct staged_name dots[2])
{
    static char one[] = ".", two[] = "..";
    const struct staged *parent;

    stages_lock(r->fs);
    parent = h->node->parent;
    dots[0] = (struct staged_name){.name = one, .type = S_IFDIR, .ino = h->node->ino};
    dots[1] = (struct staged_name){
        .name = two, .type = S_IFDIR, .ino = parent ? parent->ino : h->node->ino};
    stages_unlock(r->fs);
}

int staged_readdir(struct request *r, struct err *e)
{
    struct staged_handle *h = staged_handle_of(&r->fi);
    struct staged_name dots[2];
    struct dir_page page;
    int rc = r->off == 0 ? look(r, h, e) : 0;

    if (rc == 0)
        rc = dir_page_init(&page, r->size, r->off, r->plus, e);
    if (rc != 0)
        return rc;
    list_dots(r, h, dots);
    for (size_t i = (size_t)r->off; i < h->names + 2; i++) {
        const struct staged_name *n = i < 2 ? &dots[i] : &h->name[i - 2];
        const struct fuse_entry_param entry = {
            .attr = {.st_ino = n->ino, .st_mode = n->type}};

        if (!dir_page_has_room(&page, n->name))
            break;
        dir_page_put(&page, n->name, &entry, (off_t)i + 1);
    }
    fuse_reply_buf(r->req, page.data, page.used);
    dir_page_free(&page);
    return 0;
}

struct list {
    struct staged_name *name;
    size_t count;
};

static void add_to_list(void *user, struct staged *n)
{
    struct list *l = user;

    if (staged_is_own(n) && n->kind != STAGED_GONE && !n->removed &&
        name_node(&l->name[l->count], n, n->name))
        l->count++;
}

/* How many new directories are staged at most. */
static size_t count_stages(struct fs *fs)
{
    size_t n = 0;

    for (const struct stage *s = stage_first(fs); s; s = s->next)
        n++;
    return n;
}

static void add_new_dirs(struct fs *fs, const char *path, struct shown *shown,
                         struct list *l)
{
    size_t len = strlen(path);

    for (const struct stage *s = stage_first(fs); s; s = s->next) {
        const char *slash = strrchr(s->path, '/');
        size_t dir = slash ? (size_t)(slash - s->path) : 0;
        const char *name = slash ? slash + 1 : s->path;

        if (!s->slot && !s->over && dir == len && memcmp(s->path, path, len) == 0 &&
            !(shown && shown_find(shown, name)) &&
            name_node(&l->name[l->count], s->root, name))
            l->count++;
    }
}

struct staged_name *staged_names(struct fs *fs, fuse_ino_t ino, const char *path,
                                 struct slot *slot, struct shown *shown)
{
    struct list l = {0};
    const struct staged *dir;

    stages_lock(fs);
    dir = staged_is_below_tree(ino) ? NULL : staged_dir_of(fs, ino, slot);
    l.name = calloc((dir ? dir->count : 0) + count_stages(fs) + 1, sizeof *l.name);
    if (l.name && dir)
        staged_each(dir, add_to_list, &l);
    if (l.name && path)
        add_new_dirs(fs, path, shown, &l);
    stages_unlock(fs);
    return l.name;
}

bool staged_hides(struct fs *fs, fuse_ino_t ino, const struct slot *slot,
                  const char *name)
{
    char scratch[STAGED_KEY_MAX];
    const struct staged *dir, *n;
    bool hidden;

    stages_lock(fs);
    dir = staged_dir_of(fs, ino, slot);
    n = dir ? staged_find(dir, staged_key(ino, name, scratch, sizeof scratch)) : NULL;
    hidden = staged_is_own(n);
    stages_unlock(fs);
    return hidden;
}
