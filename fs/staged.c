/* SPDX-License-Identifier: MIT */
/* fs/staged.c - names, attributes and bytes of what was written and is not published. */
#include "fs/staged.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/lookup.h"
#include "fs/node.h"
#include "fs/slot.h"
#include "fs/stage_room.h"
#include "fs/tree.h"

enum { BLOCK_SIZE = 256 << 10 };

/* ---- attributes ---- */

static bool later(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec > b->tv_sec || (a->tv_sec == b->tv_sec && a->tv_nsec > b->tv_nsec);
}

void staged_attr(const struct staged *n, struct stat *st)
{
    struct stat file = {.st_size = (off_t)n->size, .st_mtim = n->mtime};
    bool dir = n->kind == STAGED_DIR;

    staged_stat(n, &file);
    *st = (struct stat){
        .st_ino = n->ino, /* no number of the source's files */
        .st_mode = n->mode | (dir ? S_IFDIR : S_IFREG),
        .st_nlink = n->removed && !n->stage ? 0
                    : dir                   ? 2
                                            : 1,
        .st_uid = n->uid,
        .st_gid = n->gid,
        .st_size = dir ? 0 : file.st_size,
        .st_blksize = BLOCK_SIZE,
        .st_blocks = file.st_blocks,
        .st_atim = dir ? n->mtime : file.st_atim,
        .st_mtim = dir ? n->mtime : file.st_mtim,
        .st_ctim = dir || later(&n->ctime, &file.st_ctim) ? n->ctime : file.st_ctim,
    };
}

void staged_entry(struct staged *n, struct fuse_entry_param *out)
{
    *out = (struct fuse_entry_param){.ino = n->ino, .generation = n->generation};
    staged_attr(n, &out->attr); /* time-outs 0: publication puts another in its place */
    staged_ref(n);
}

/* ---- which directory ---- */

const char *staged_fixed_name(enum inside kind)
{
    static const char *const names[] = {[INSIDE_TENSORS] = "tensors",
                                        [INSIDE_TREE] = "tree",
                                        [INSIDE_RAW] = "raw",
                                        [INSIDE_OPTIMIZER] = "optimizer",
                                        [INSIDE_META] = ".unshard"};

    return kind <= INSIDE_LAST_DIR ? names[kind] : NULL;
}

/* The stage over a directory of the source that is no checkpoint, or NULL. */
static struct stage *over_of(struct fs *fs, fuse_ino_t ino)
{
    const struct node *n =
        stage_first(fs) && !ino_is_inside(ino) ? node_of_ino(fs, ino) : NULL;
    struct stage *s = n && n->kind == NODE_DIR ? stage_at(fs, n->path) : NULL;

    return s && s->over ? s : NULL;
}

struct staged *staged_dir_of(struct fs *fs, fuse_ino_t ino, const struct slot *slot)
{
    struct stage *s;
    const char *name;

    if (ino_is_staged(ino))
        return staged_of_ino(fs, ino);
    s = slot ? stage_at(fs, slot->place) : over_of(fs, ino);
    if (!s || (s->over ? ino_is_inside(ino) : !s->slot))
        return NULL;
    if (!ino_is_inside(ino))
        return s->root;
    name = staged_fixed_name(ino_kind(ino));
    return name ? staged_find(s->root, name) : NULL;
}

static bool is_below_tree(fuse_ino_t ino)
{
    return ino_is_inside(ino) && ino_kind(ino) == INSIDE_TREE && ino_index(ino) > 0;
}

const char *staged_key(fuse_ino_t dir, const char *name, char *scratch, size_t size)
{
    if (!is_below_tree(dir))
        return name;
    snprintf(scratch, size, "%" PRIu32 "/%s", ino_index(dir), name);
    return scratch;
}

/* The new directory `name` that is staged in this directory of the source, or NULL. */
static struct staged *new_in(struct fs *fs, const char *dir, const char *name)
{
    char path[PATH_MAX];
    struct stage *s;

    if (store_join(dir, name, path, sizeof path) < 0)
        return NULL;
    s = stage_at(fs, path);
    return s && !s->slot && !s->over ? s->root : NULL;
}

bool staged_comes(struct fs *fs, const char *dir, const char *name)
{
    bool comes;

    stages_lock(fs);
    comes = new_in(fs, dir, name) != NULL;
    stages_unlock(fs);
    return comes;
}

static int reply(const struct request *r, struct staged *n)
{
    struct fuse_entry_param entry = {0};

    if (n->kind != STAGED_GONE && !n->removed)
        staged_entry(n, &entry);
    stages_unlock(r->fs);
    if (fuse_reply_entry(r->req, &entry) < 0 && entry.ino)
        entry_forget(r->fs, entry.ino, 1);
    return 0;
}

/* A directory that is shown anyway keeps its own node: here are only changes of it. */
static bool is_own(const struct staged *n)
{
    return n && !n->filling && (n->removed || !(n->kind == STAGED_DIR && n->covers));
}

static int lookup_staged(struct request *r)
{
    struct staged *dir = staged_of_ino(r->fs, r->ino), *n;
    struct fuse_entry_param none = {0};

    if (!dir || !dir->stage) {
        stages_unlock(r->fs);
        return -ESTALE;
    }
    n = staged_find(dir, r->name);
    if (n)
        return reply(r, n);
    stages_unlock(r->fs);
    fuse_reply_entry(r->req, &none);
    return 0;
}

int staged_lookup(struct request *r, struct err *e)
{
    struct fs *fs = r->fs;
    struct slot *slot = NULL;
    const struct node *node = NULL;
    char scratch[STAGED_KEY_MAX];
    struct staged *dir, *n = NULL;

    (void)e;
    if (strlen(r->name) > NAME_MAX)
        return -ENAMETOOLONG;
    if (!ino_is_staged(r->ino)) {
        node = ino_is_inside(r->ino) ? NULL : node_of_ino(fs, r->ino);
        slot = node ? node_slot(fs, (struct node *)(uintptr_t)node)
                    : slot_of_ino(fs, r->ino);
    }
    stages_lock(fs);
    if (ino_is_staged(r->ino))
        return lookup_staged(r);
    if (stage_first(fs)) {
        dir = staged_dir_of(fs, r->ino, slot);
        n = dir ? staged_find(dir, staged_key(r->ino, r->name, scratch, sizeof scratch))
                : NULL;
        if (!n && node && node->kind == NODE_DIR)
            n = new_in(fs, node->path, r->name);
    }
    slot_unref(fs, slot, 1);
    if (is_own(n))
        return reply(r, n);
    stages_unlock(fs);
    return STAGED_NONE;
}

int staged_getattr(struct request *r, struct err *e)
{
    struct staged *n;
    struct stat st;

    (void)e;
    stages_lock(r->fs);
    n = staged_of_ino(r->fs, r->ino);
    if (!n || (n->covers && n->kind == STAGED_DIR && !ino_is_staged(r->ino))) {
        stages_unlock(r->fs);
        return ino_is_staged(r->ino) ? -ESTALE : STAGED_NONE;
    }
    staged_attr(n, &st);
    stages_unlock(r->fs);
    fuse_reply_attr(r->req, &st, 0);
    return 0;
}

/* ---- handles ---- */

static void end_use(struct fs *fs, const struct staged_handle *h, struct staged *n,
                    int lost)
{
    stages_lock(fs);
    if (lost)
        staged_lose(n, lost, 0, UINT64_MAX);
    if (--n->handles == 0 && !n->stage)
        stage_room_give(fs, n, 0);
    if (h->writes && n->stage) {
        n->writers--;
        n->stage->writers--;
        n->order = ++n->stage->closes;
        stage_touch(n->stage);
        stage_wake(fs); /* who waits for the last writer */
    }
    staged_unref(fs, n, 1);
    stages_unlock(fs);
}

void staged_names_free(struct staged_name *names)
{
    for (size_t i = 0; names && names[i].name; i++)
        free(names[i].name);
    free(names);
}

/* Room for so many, and what stood there goes. */
static int names_begin(struct staged_handle *h, size_t count, struct err *e)
{
    staged_names_free(h->name);
    h->names = 0;
    h->name = calloc(count + 1, sizeof *h->name);
    return h->name ? 0 : err_nomem(e);
}

static void handle_free(struct fs *fs, struct opened *o)
{
    struct staged_handle *h = container_of(o, struct staged_handle, opened);
    int lost = 0;

    /* Before it counts as closed; a disk across a network may tell only now. */
    if (h->fd >= 0 && close(h->fd) < 0 && h->writes && errno != EINTR)
        lost = errno;
    if (h->node)
        end_use(fs, h, h->node, lost);
    staged_names_free(h->name);
    free(h);
}

struct staged_handle *staged_plain(int fd)
{
    struct staged_handle *h = calloc(1, sizeof *h);

    if (!h)
        return NULL;
    h->opened.free = handle_free;
    h->opened.staged = true;
    h->fd = fd;
    h->writes = true;
    return h;
}

/* With the lock of the list. */
static const struct staged_handle *find_plain(const struct opened_list *l,
                                              fuse_ino_t ino)
{
    for (struct ring *x = l->ring.next; x != &l->ring; x = x->next) {
        struct opened *o = container_of(x, struct opened, ring);
        const struct staged_handle *h = container_of(o, struct staged_handle, opened);

        if (o->staged && !h->node && h->ino == ino)
            return h;
    }
    return NULL;
}

int staged_plain_open(struct fs *fs, fuse_ino_t ino)
{
    struct opened_list *l = &fs->opened;
    const struct staged_handle *h;
    int fd = -ENOENT;

    pthread_mutex_lock(&l->lock);
    h = find_plain(l, ino);
    if (h)
        fd = fcntl(h->fd, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_unlock(&l->lock);
    return fd < 0 ? -ENOENT : fd;
}

bool staged_plain_is_open(struct fs *fs, fuse_ino_t ino)
{
    struct opened_list *l = &fs->opened;
    bool open;

    pthread_mutex_lock(&l->lock);
    open = find_plain(l, ino) != NULL;
    pthread_mutex_unlock(&l->lock);
    return open;
}

void staged_drop(struct fs *fs, struct staged_handle *h)
{
    handle_free(fs, &h->opened);
}

static struct staged_handle *handle_new(struct staged *n)
{
    struct staged_handle *h = calloc(1, sizeof *h);

    if (!h)
        return NULL;
    h->opened.free = handle_free;
    h->opened.staged = true;
    h->fd = -1;
    h->node = n;
    n->handles++;
    staged_ref(n);
    return h;
}

int staged_open_handle(struct fs *fs, struct staged *n, int flags,
                       struct staged_handle **out, struct err *e)
{
    bool writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC);
    int fd = staged_open_spool(n, (writes ? O_RDWR : O_RDONLY) |
                                      (flags & (O_CREAT | O_TRUNC)));
    struct staged_handle *h;

    if (fd < 0)
        return err_set(e, -fd, "%s: %s", n->name, strerror(-fd));
    h = handle_new(n);
    if (!h) {
        close(fd);
        return err_nomem(e);
    }
    h->fd = fd;
    h->writes = writes;
    if (writes) {
        n->writers++;
        n->stage->writers++;
        stage_touch(n->stage);
        if (flags & O_TRUNC) {
            stage_room_give(fs, n, 0);
            staged_cut(n, 0);
        }
    }
    *out = h;
    return 0;
}

int staged_read(struct request *r, struct err *e)
{
    const struct staged_handle *h = staged_handle_of(&r->fi);
    CLEANUP_FREE char *data = malloc(r->size + 1);
    ssize_t n;

    if (!data)
        return err_nomem(e);
    n = pread(h->fd, data, r->size, r->off);
    if (n < 0)
        return -errno;
    fuse_reply_buf(r->req, data, (size_t)n);
    return 0;
}

/* ---- listings ---- */

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
    h = handle_new(n);
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
    size_t count = 0;
    int rc = n ? tree_shown(r->fs, n, r->may_block, &shown, e) : -ESTALE;

    if (rc != 0)
        return rc;
    more = staged_names(r->fs, r->ino, n->path, shown->slot, shown);
    while (more && more[count].name)
        count++;
    rc = names_begin(h, shown->count + count, e);
    if (!more)
        rc = err_nomem(e);
    for (size_t i = 0; rc == 0 && i < shown->count; i++) {
        const char *name = shown->entry[i].name;

        if (staged_hides(r->fs, r->ino, shown->slot, name))
            continue;
        h->name[h->names] = (struct staged_name){.name = strdup(name), .ino = 1};
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

static size_t add_name(const struct request *r, char *at, size_t room,
                       const struct staged_name *n, off_t next)
{
    const struct fuse_entry_param entry = {
        .attr = {.st_ino = n->ino, .st_mode = n->type}};

    return r->plus ? fuse_add_direntry_plus(r->req, at, room, n->name, &entry, next)
                   : fuse_add_direntry(r->req, at, room, n->name, &entry.attr, next);
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
    CLEANUP_FREE char *data = malloc(r->size);
    struct staged_name dots[2];
    size_t used = 0;
    int rc = 0;

    if (!data)
        return err_nomem(e);
    if (r->off == 0)
        rc = look(r, h, e);
    if (rc != 0)
        return rc;
    list_dots(r, h, dots);
    for (size_t i = (size_t)r->off; i < h->names + 2; i++) {
        const struct staged_name *name = i < 2 ? &dots[i] : &h->name[i - 2];
        size_t n = add_name(r, data + used, r->size - used, name, (off_t)i + 1);

        if (n > r->size - used)
            break;
        used += n;
    }
    fuse_reply_buf(r->req, data, used);
    return 0;
}

struct list {
    struct staged_name *name;
    size_t count;
};

static void add_to_list(void *user, struct staged *n)
{
    struct list *l = user;

    if (is_own(n) && n->kind != STAGED_GONE && !n->removed &&
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

static void add_new_dirs(struct fs *fs, const char *path, const struct shown *shown,
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
                                 struct slot *slot, const struct shown *shown)
{
    struct list l = {0};
    const struct staged *dir;

    stages_lock(fs);
    dir = is_below_tree(ino) ? NULL : staged_dir_of(fs, ino, slot);
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
    hidden = is_own(n);
    stages_unlock(fs);
    return hidden;
}
