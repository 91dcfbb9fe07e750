/* SPDX-License-Identifier: MIT */
/* fs/dir.c - listing directories. */
#include "fs/dir.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "fs/dir_page.h"
#include "fs/edit.h"
#include "fs/lookup.h"
#include "fs/permit.h"

/*
 * An open directory. A mirrored one keeps the snapshot of what it showed, so positions
 * stay what they are; one inside a checkpoint needs nothing but its generation, whose
 * entries are paged through by number.
 */
struct dir_handle {
    struct opened opened;
    struct snapshot *snapshot;
    struct permit_parts parts; /* of it, as who opened it may list them */
    struct generation *gen;
    char *latest;            /* of an .unshard: there is a `latest` */
    struct edit_names edits; /* of transactions, in a mount for writing */
    pthread_mutex_t lock;    /* of `ready` */
    struct dir_page ready;   /* made before it is asked for */
};

/* Positions from here on are of names of transactions. */
#define EDIT_POS ((off_t)1 << 48)

/* Positions: 1 is behind ".", 2 behind "..", then the entries. */
enum { DOTS = 2 };

static struct dir_handle *handle_of(const struct fuse_file_info *fi)
{
    return (struct dir_handle *)(uintptr_t)fi->fh;
}

static void drop_ready(struct fs *fs, struct dir_handle *h)
{
    if (h->ready.data)
        dir_page_forget(&h->ready, fs);
    dir_page_free(&h->ready);
}

static void handle_free(struct fs *fs, struct opened *o)
{
    struct dir_handle *h = container_of(o, struct dir_handle, opened);

    drop_ready(fs, h);
    pthread_mutex_destroy(&h->lock);
    permit_parts_release(&h->parts);
    snapshot_put(fs, h->snapshot);
    generation_unref(fs, h->gen, 1);
    free(h->latest);
    edit_names_release(&h->edits);
    free(h);
}

static int open_inside(const struct request *r, struct dir_handle *h, struct err *e)
{
    int rc;

    h->gen = generation_of_ino(r->fs, r->ino);
    if (!h->gen)
        return -ESTALE;
    if (ino_kind(r->ino) == INSIDE_META && !h->gen->file)
        h->latest = tracker_of_generation(r->fs, h->gen);
    rc = generation_ready(r, h->gen, e);
    if (rc == 0)
        rc = permit_list(r, h->gen, e);
    /* Told here, the kernel comes back by the path; a listing would just end. */
    return rc == 0 ? catalog_has(r->fs->catalog, h->gen->info.id, e) : rc;
}

static int open_outside(const struct request *r, struct dir_handle *h, struct err *e)
{
    struct node *n = node_of_ino(r->fs, r->ino);
    int rc;

    if (!n)
        return -ESTALE;
    if (n->kind == NODE_META) {
        h->latest = tracker_target(r->fs, n->path);
        return 0;
    }
    rc = permit_node(r, n->path, 0, 0, e);
    if (rc == 0)
        rc = tree_snapshot(r->fs, n, r->may_block, &h->snapshot, e);
    return rc == 0 ? permit_parts(r, n, h->snapshot, &h->parts, e) : rc;
}

/* Will it list the same as long as the kernel knows its node? Then the kernel keeps it. */
static bool is_frozen(const struct request *r, const struct dir_handle *h)
{
    return h->gen && !fs_writable(r->fs) && ino_kind(r->ino) != INSIDE_META;
}

int opendir_run(struct request *r, struct err *e)
{
    struct dir_handle *h = calloc(1, sizeof *h);
    int rc;

    if (!h)
        return err_nomem(e);
    pthread_mutex_init(&h->lock, NULL);
    rc = ino_is_inside(r->ino) ? open_inside(r, h, e) : open_outside(r, h, e);
    if (rc == 0 && r->fs->disk)
        rc = edit_list(r, &h->edits, e);
    if (rc != 0) {
        handle_free(r->fs, &h->opened);
        return rc;
    }
    h->opened.free = handle_free;
    h->opened.kind = OPENED_DIR;
    opened_add(&r->fs->opened, &h->opened);
    r->fi.fh = (uintptr_t)h;
    r->fi.cache_readdir = r->fi.keep_cache = is_frozen(r, h);
    if (fuse_reply_open(r->req, &r->fi) < 0)
        opened_end(r->fs, &h->opened);
    return 0;
}

/* ---- a page being filled ---- */

struct listing {
    const struct request *r;
    struct dir_page *page;
    struct err *e;
    struct generation *gen; /* whose entries are added */
    enum inside dir;
    const struct dir_handle *h;
};

/* Is there something else of this name, or nothing any more? */
static bool is_covered(const struct listing *l, const char *name)
{
    return edit_names_find(&l->h->edits, name) != NULL;
}

static bool has_room(const struct listing *l, const char *name)
{
    return dir_page_has_room(l->page, name);
}

static void put_entry(struct listing *l, const char *name,
                      const struct fuse_entry_param *entry, off_t next)
{
    dir_page_put(l->page, name, entry, next);
}

/* The two directories themselves, both by the number of this one. True: full. */
static bool put_dots(struct listing *l, uint64_t ino, off_t *off)
{
    static const char *const names[] = {".", ".."};
    struct fuse_entry_param self = {.attr = {.st_ino = ino, .st_mode = S_IFDIR}};

    for (; *off < DOTS; ++*off) {
        if (!has_room(l, names[*off]))
            return true;
        put_entry(l, names[*off], &self, *off + 1);
    }
    return false;
}

/* ---- inside a checkpoint ---- */

/* 1 when the page is full: stops the walk over the catalogue. */
static int put_tensor(void *user, const struct tensor_info *t)
{
    struct listing *l = user;
    enum inside kind = l->dir == INSIDE_RAW ? INSIDE_BARE : INSIDE_NPY;
    const char *name = kind == INSIDE_BARE ? t->name : t->name_npy;
    struct fuse_entry_param entry = {0};

    if (is_covered(l, name))
        return 0;
    if (!has_room(l, name))
        return 1;
    TRY(attr_tensor(l->r->fs, kind, t, &entry.attr, l->e));
    if (l->r->plus)
        entry_inside(l->r->fs, l->gen, kind, t->ord, &entry);
    put_entry(l, name, &entry, (off_t)t->ord + 1 + DOTS);
    return 0;
}

static int put_tree_entry(void *user, const struct tree_entry *t)
{
    struct listing *l = user;
    enum inside kind = t->dir ? INSIDE_TREE : INSIDE_NPY;
    uint32_t index = t->dir ? t->dir : t->tensor;
    struct fuse_entry_param entry = {0};
    int rc;

    if (is_covered(l, t->name))
        return 0;
    if (!has_room(l, t->name))
        return 1;
    rc = t->info ? attr_tensor(l->r->fs, kind, t->info, &entry.attr, l->e)
                 : attr_inside(l->r->fs, l->gen, kind, index, &entry.attr, l->e);
    if (rc < 0)
        return rc;
    if (l->r->plus)
        entry_inside(l->r->fs, l->gen, kind, index, &entry);
    put_entry(l, t->name, &entry, (off_t)t->pos + 1 + DOTS);
    return 0;
}

/* The files of .unshard/ or optimizer/, and behind them `latest` where there is one. */
static const struct fixed_file *listed_file(const struct listing *l,
                                            const struct dir_handle *h, size_t i)
{
    static const struct fixed_file latest = {"latest", INSIDE_LATEST};
    const struct fixed_file *f = fixed_file(l->gen, l->dir, i);

    if (f || !h->latest || (i > 0 && !fixed_file(l->gen, l->dir, i - 1)))
        return f;
    return &latest;
}

/* Reports come without attributes: finding their size would mean making them. */
static int fixed_entry(struct listing *l, enum inside kind,
                       struct fuse_entry_param *out)
{
    int rc;

    if (kind != INSIDE_OPTIMIZER_FILE) {
        attr_inside_brief(l->r->fs, l->gen, kind, &out->attr);
        return 0;
    }
    rc = attr_inside(l->r->fs, l->gen, kind, 0, &out->attr, l->e);
    if (rc == 0 && l->r->plus)
        entry_inside(l->r->fs, l->gen, kind, 0, out);
    return rc;
}

static int put_fixed(struct listing *l, const struct dir_handle *h, size_t from)
{
    const struct fixed_file *f;

    for (size_t i = from; (f = listed_file(l, h, i)); i++) {
        struct fuse_entry_param entry = {0};
        int rc;

        if (is_covered(l, f->name))
            continue;
        if (!has_room(l, f->name))
            return 1;
        rc = fixed_entry(l, f->kind, &entry);
        if (rc < 0)
            return rc;
        put_entry(l, f->name, &entry, (off_t)i + 1 + DOTS);
    }
    return 0;
}

/* Behind all others. The kernel asks for their attributes when it needs them. */
static void put_edits(struct listing *l, off_t off)
{
    const struct edit_names *edits = &l->h->edits;

    for (size_t i = off >= EDIT_POS ? (size_t)(off - EDIT_POS) : 0; i < edits->count;
         i++) {
        const struct edit_name *name = &edits->name[i];
        const struct fuse_entry_param entry = {
            .attr = {.st_ino = name->ino, .st_mode = name->type}};

        if (!name->type)
            continue; /* it is hidden */
        if (!has_room(l, name->name))
            break;
        put_entry(l, name->name, &entry, EDIT_POS + (off_t)i + 1);
    }
}

static int list_inside(struct listing *l, const struct dir_handle *h, off_t off)
{
    struct catalog *c = l->r->fs->catalog;
    int64_t id = l->gen->info.id;
    struct stat self;
    int rc;

    if (l->gen->stale)
        return err_set(l->e, ESTALE, "%s: the checkpoint changed", l->gen->path);
    generation_used(l->r->fs, l->gen);
    rc = attr_inside(l->r->fs, l->gen, l->dir, ino_index(l->r->ino), &self, l->e);
    if (rc < 0 || put_dots(l, self.st_ino, &off))
        return rc;
    if (off >= EDIT_POS) {
        put_edits(l, off);
        return 0;
    }
    if (off - DOTS > UINT32_MAX)
        return 0;
    if (l->dir == INSIDE_TENSORS || l->dir == INSIDE_RAW)
        rc = catalog_tensors(c, id, (uint32_t)(off - DOTS), put_tensor, l, l->e);
    else if (l->dir == INSIDE_TREE)
        rc = catalog_tree_list(c, id, ino_index(l->r->ino), (uint32_t)(off - DOTS),
                               put_tree_entry, l, l->e);
    else
        rc = put_fixed(l, h, (size_t)(off - DOTS));
    if (rc == 0)
        put_edits(l, 0);
    return MIN(rc, 0); /* 1: the page is full */
}

/* ---- outside ---- */

static void put_snapshot_entry(struct listing *l, struct node *dir,
                               const struct snapshot *snapshot,
                               const struct snapshot_entry *entry, off_t next)
{
    struct fuse_entry_param out = {0};
    struct err e = {0};
    /* What cannot be looked up now is listed, and the kernel asks when it needs it. */
    bool whole =
        l->r->plus && entry_of_snapshot(l->r->fs, dir, snapshot, entry, &out, &e) == 0;

    if (!whole) {
        out = (struct fuse_entry_param){0};
        entry_brief(l->r->fs, dir, snapshot, entry, &out.attr);
    }
    put_entry(l, entry->name, &out, next);
}

static int list_snapshot(struct listing *l, struct node *dir, struct snapshot *snapshot,
                         off_t off)
{
    if (put_dots(l,
                 attr_path_ino(dir->path, dir->kind == NODE_FILE_DIR ? "/" : "", 0, 0),
                 &off))
        return 0;
    if (snapshot->gen)
        generation_used(l->r->fs, snapshot->gen);
    for (size_t i = (size_t)(off - DOTS); i < snapshot->count; i++) {
        const struct snapshot_entry *entry = &snapshot->entry[i];

        if (!permit_lists(&l->h->parts, entry->part))
            continue;
        if (!has_room(l, entry->name))
            return 0;
        put_snapshot_entry(l, dir, snapshot, entry, (off_t)i + 1 + DOTS);
    }
    return 0;
}

/* .unshard beside trackers. */
static int list_meta(struct listing *l, const struct node *dir,
                     const struct dir_handle *h, off_t off)
{
    struct fuse_entry_param link = {
        .attr = {.st_ino = attr_path_ino(dir->path, "latest", 0, 0),
                 .st_mode = S_IFLNK}};

    if (put_dots(l, attr_path_ino(dir->path, ".unshard", 0, 0), &off) || off != DOTS ||
        !h->latest || !has_room(l, "latest"))
        return 0;
    put_entry(l, "latest", &link, DOTS + 1);
    return 0;
}

/* Back at the start of a mirrored directory: what it shows now (rewinddir). */
static int look_again(const struct request *r, struct dir_handle *h, struct node *n,
                      struct err *e)
{
    struct snapshot *now;
    int rc = tree_snapshot(r->fs, n, r->may_block, &now, e);

    if (rc != 0)
        return rc;
    permit_parts_release(&h->parts);
    snapshot_put(r->fs, h->snapshot);
    h->snapshot = now;
    if (permit_parts(r, n, now, &h->parts, e) < 0)
        return -ENOMEM;
    return 0;
}

static int list_outside(struct listing *l, struct dir_handle *h, off_t off)
{
    struct node *n = node_of_ino(l->r->fs, l->r->ino);
    int rc = 0;

    if (!n)
        return -ESTALE;
    if (n->kind == NODE_META)
        return list_meta(l, n, h, off);
    if (off == 0)
        rc = look_again(l->r, h, n, l->e);
    return rc == 0 ? list_snapshot(l, n, h->snapshot, off) : rc;
}

/* ---- the request ---- */

static int fill(struct listing *l, struct dir_handle *h, off_t off)
{
    int rc;

    if (h->gen) {
        l->dir = ino_kind(l->r->ino);
        rc = list_inside(l, h, off);
    } else {
        rc = list_outside(l, h, off);
    }
    /* What was found before the fault is told; the fault with the next page. */
    return rc < 0 && l->page->used > 0 ? 0 : rc;
}

/* The page that is asked for, if it is the one that was made. */
static bool take_ready(const struct request *r, struct dir_handle *h,
                       struct dir_page *page)
{
    if (!h->ready.data || h->gen->stale || h->ready.from != r->off ||
        h->ready.size != r->size || h->ready.plus != r->plus) {
        drop_ready(r->fs, h);
        return false;
    }
    generation_used(r->fs, h->gen);
    *page = h->ready;
    h->ready.data = NULL;
    return true;
}

/*
 * The kernel takes longer to make nodes of a page than we to find the next one's entries:
 * where the directory stays as it is, this is done meanwhile. From the second page on, as
 * most listings have one. A fault is left to who asks for the page.
 */
static void make_ready(const struct request *r, struct dir_handle *h, off_t from)
{
    struct err e = {0};
    struct listing l = {.r = r, .page = &h->ready, .e = &e, .gen = h->gen, .h = h};

    if (dir_page_init(&h->ready, r->size, from, r->plus, &e) < 0)
        return;
    if (fill(&l, h, from) != 0 || h->ready.used == 0)
        drop_ready(r->fs, h);
}

/* Answers, and with the lock: who asks for the page that is being made waits for it. */
static int readdir_locked(const struct request *r, struct dir_handle *h, struct err *e)
{
    struct dir_page page;
    struct listing l = {.r = r, .page = &page, .e = e, .gen = h->gen, .h = h};
    int rc = 0;

    if (!take_ready(r, h, &page)) {
        rc = dir_page_init(&page, r->size, r->off, r->plus, e);
        if (rc == 0)
            rc = fill(&l, h, r->off);
    }
    if (rc == 0 && fuse_reply_buf(r->req, page.data, page.used) < 0)
        dir_page_forget(&page, r->fs);
    else if (rc == 0 && r->off > 0 && page.used > 0 && is_frozen(r, h))
        make_ready(r, h, page.next);
    dir_page_free(&page);
    return rc;
}

int readdir_run(struct request *r, struct err *e)
{
    struct dir_handle *h = handle_of(&r->fi);
    int rc;

    if (r->off < 0)
        return -EINVAL;
    opened_get(&h->opened);
    pthread_mutex_lock(&h->lock);
    rc = readdir_locked(r, h, e);
    pthread_mutex_unlock(&h->lock);
    opened_put(r->fs, &h->opened);
    return rc;
}
