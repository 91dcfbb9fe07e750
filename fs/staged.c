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
#include "fs/tree.h"

enum { BLOCK_SIZE = 256 << 10 };

/* ---- attributes ---- */

void staged_attr(const struct staged *n, struct stat *st)
{
    struct stat file = {.st_size = (off_t)n->size, .st_mtim = n->mtime};
    bool dir = n->kind == STAGED_DIR;

    staged_stat(n, &file);
    *st = (struct stat){
        .st_ino = n->ino & ~(3ull << 62),
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
        .st_ctim = dir ? n->mtime : file.st_ctim,
    };
    st->st_ino += 1ull << 62; /* no number of the source's files */
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

struct staged *staged_dir_of(struct fs *fs, fuse_ino_t ino, const struct slot *slot)
{
    struct stage *s;
    const char *name;

    if (ino_is_staged(ino))
        return staged_of_ino(fs, ino);
    if (!slot)
        return NULL;
    s = stage_at(fs, slot->path);
    if (!s || !s->slot)
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
    return s && !s->slot ? s->root : NULL;
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
    return n && (n->removed || !(n->kind == STAGED_DIR && n->covers));
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
        n->lost = lost;
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

static void names_free(struct staged_handle *h)
{
    for (size_t i = 0; i < h->names; i++)
        free(h->name[i]);
    free(h->name);
    free(h->type);
    h->name = NULL;
    h->type = NULL;
    h->names = 0;
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
    names_free(h);
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

    (void)fs;
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
            n->prefix = 0;
            n->checked = false;
            n->lost = 0;
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

static void take_name(void *user, struct staged *n)
{
    struct staged_handle *h = user;

    if (n->kind == STAGED_GONE)
        return;
    h->name[h->names] = strdup(n->name);
    h->type[h->names] = n->kind == STAGED_DIR ? S_IFDIR : S_IFREG;
    if (h->name[h->names])
        h->names++;
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
    names_free(h);
    h->name = calloc(n->count + 1, sizeof *h->name);
    h->type = calloc(n->count + 1, sizeof *h->type);
    if (!h->name || !h->type)
        return err_nomem(e);
    staged_each(n, take_name, h);
    return 0;
}

/* It was published since: what the directory of the source shows; types are not told. */
static int list_published(const struct request *r, struct staged_handle *h,
                          struct err *e)
{
    struct node *n = node_of_ino(r->fs, r->ino);
    struct shown *shown = NULL;
    char **more = NULL;
    size_t count = 0;
    int rc = n ? tree_shown(r->fs, n, r->may_block, &shown, e) : -ESTALE;

    if (rc != 0)
        return rc;
    names_free(h);
    more = staged_names(r->fs, r->ino, n->path, shown->slot);
    while (more && more[count])
        count++;
    h->name = calloc(shown->count + count + 1, sizeof *h->name);
    h->type = calloc(shown->count + count + 1, sizeof *h->type);
    if (!more || !h->name || !h->type)
        rc = err_nomem(e);
    for (size_t i = 0; rc == 0 && i < shown->count; i++) {
        const char *name = shown->entry[i].name;

        if (!staged_hides(r->fs, r->ino, shown->slot, name) &&
            (h->name[h->names] = strdup(name)) != NULL)
            h->names++;
    }
    for (size_t i = 0; i < count; i++) {
        if (rc == 0)
            h->name[h->names++] = more[i];
        else
            free(more[i]);
    }
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

static size_t add_name(const struct request *r, char *at, size_t room, const char *name,
                       mode_t type, off_t next)
{
    const struct fuse_entry_param entry = {.attr = {.st_ino = 1, .st_mode = type}};

    return r->plus ? fuse_add_direntry_plus(r->req, at, room, name, &entry, next)
                   : fuse_add_direntry(r->req, at, room, name, &entry.attr, next);
}

int staged_readdir(struct request *r, struct err *e)
{
    struct staged_handle *h = staged_handle_of(&r->fi);
    CLEANUP_FREE char *data = malloc(r->size);
    size_t used = 0;
    int rc = 0;

    if (!data)
        return err_nomem(e);
    if (r->off == 0)
        rc = look(r, h, e);
    if (rc != 0)
        return rc;
    for (size_t i = (size_t)r->off; i < h->names + 2; i++) {
        const char *name = i == 0 ? "." : i == 1 ? ".." : h->name[i - 2];
        mode_t type = i < 2 ? S_IFDIR : h->type[i - 2];
        size_t n = add_name(r, data + used, r->size - used, name, type, (off_t)i + 1);

        if (n > r->size - used)
            break;
        used += n;
    }
    fuse_reply_buf(r->req, data, used);
    return 0;
}

struct list {
    char **name;
    size_t count;
};

static void add_to_list(void *user, struct staged *n)
{
    struct list *l = user;

    if (is_own(n) && n->kind != STAGED_GONE && !n->removed &&
        (l->name[l->count] = strdup(n->name)) != NULL)
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

static void add_new_dirs(struct fs *fs, const char *path, struct list *l)
{
    size_t len = strlen(path);

    for (const struct stage *s = stage_first(fs); s; s = s->next) {
        const char *slash = strrchr(s->path, '/');
        size_t dir = slash ? (size_t)(slash - s->path) : 0;

        if (!s->slot && dir == len && memcmp(s->path, path, len) == 0 &&
            (l->name[l->count] = strdup(slash ? slash + 1 : s->path)) != NULL)
            l->count++;
    }
}

char **staged_names(struct fs *fs, fuse_ino_t ino, const char *path, struct slot *slot)
{
    struct list l = {0};
    const struct staged *dir;

    stages_lock(fs);
    dir = is_below_tree(ino) ? NULL : staged_dir_of(fs, ino, slot);
    l.name = calloc((dir ? dir->count : 0) + count_stages(fs) + 1, sizeof *l.name);
    if (l.name && dir)
        staged_each(dir, add_to_list, &l);
    if (l.name && path)
        add_new_dirs(fs, path, &l);
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
