/* SPDX-License-Identifier: MIT */
/* fs/dir.c - listing directories. */
#include "fs/dir.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "fs/alias.h"
#include "fs/lookup.h"
#include "fs/staged.h"

/*
 * An open directory. A mirrored one keeps the snapshot of what it showed, so positions
 * stay what they are; one inside a checkpoint needs nothing but its generation, whose
 * entries are paged through by number.
 */
struct dir_handle {
    struct opened opened;
    struct shown *shown;
    struct slot *slot;
    char *latest;               /* of an .unshard: there is a `latest` */
    struct staged_name *staged; /* that were written, and are not published; or NULL */
};

/* Positions from here on are of staged names. */
#define STAGED_POS ((off_t)1 << 48)

/* Positions: 1 is behind ".", 2 behind "..", then the entries. */
enum { DOTS = 2 };

/* The kernel's struct fuse_entry_out and fuse_dirent, as libfuse writes them. */
enum { PLUS_HEAD = 128, DIRENT_HEAD = 24, DIRENT_LEN = 16 };

static struct dir_handle *handle_of(const struct fuse_file_info *fi)
{
    return (struct dir_handle *)(uintptr_t)fi->fh;
}

static void handle_free(struct fs *fs, struct opened *o)
{
    struct dir_handle *h = container_of(o, struct dir_handle, opened);

    shown_put(fs, h->shown);
    slot_unref(fs, h->slot, 1);
    free(h->latest);
    staged_names_free(h->staged);
    free(h);
}

/* What was written into it, as of now. */
static void look_at_stages(const struct request *r, struct dir_handle *h)
{
    const struct node *n = h->slot ? NULL : node_of_ino(r->fs, r->ino);

    if (r->fs->stages)
        h->staged =
            staged_names(r->fs, r->ino, n && n->kind == NODE_DIR ? n->path : NULL,
                         h->slot    ? h->slot
                         : h->shown ? h->shown->slot
                                    : NULL,
                         h->shown);
}

static int open_inside(const struct request *r, struct dir_handle *h, struct err *e)
{
    int rc;

    h->slot = slot_of_ino(r->fs, r->ino);
    if (!h->slot)
        return -ESTALE;
    if (ino_kind(r->ino) == INSIDE_META && !h->slot->file)
        h->latest = tracker_of_slot(r->fs, h->slot);
    rc = slot_ready(r, h->slot, e);
    /* Told here, the kernel comes back by the path; a listing would just end. */
    return rc == 0 ? catalog_has(r->fs->catalog, h->slot->info.id, e) : rc;
}

static int open_outside(const struct request *r, struct dir_handle *h, struct err *e)
{
    struct node *n = node_of_ino(r->fs, r->ino);

    if (!n)
        return -ESTALE;
    if (n->kind == NODE_META) {
        h->latest = tracker_target(r->fs, n->path);
        return 0;
    }
    return tree_shown(r->fs, n, r->may_block, &h->shown, e);
}

/* Will it list the same as long as the kernel knows its node? Then the kernel keeps it. */
static bool is_frozen(const struct request *r, const struct dir_handle *h)
{
    return h->slot && !r->fs->stages && ino_kind(r->ino) != INSIDE_META;
}

int opendir_run(struct request *r, struct err *e)
{
    struct dir_handle *h = calloc(1, sizeof *h);
    int rc;

    if (!h)
        return err_nomem(e);
    rc = ino_is_inside(r->ino) ? open_inside(r, h, e) : open_outside(r, h, e);
    if (rc != 0) {
        handle_free(r->fs, &h->opened);
        return rc;
    }
    look_at_stages(r, h);
    h->opened.free = handle_free;
    opened_add(&r->fs->opened, &h->opened);
    r->fi.fh = (uintptr_t)h;
    r->fi.cache_readdir = r->fi.keep_cache = is_frozen(r, h);
    if (fuse_reply_open(r->req, &r->fi) < 0)
        opened_end(r->fs, &h->opened);
    return 0;
}

/* ---- the reply being filled ---- */

struct page {
    const struct request *r;
    char *data;
    size_t used;
    struct err *e;
    struct slot *slot; /* whose entries are added */
    enum inside dir;
    const struct dir_handle *h;
};

/* Is there something else of this name, or nothing any more? */
static bool is_covered(const struct page *p, const char *name)
{
    const struct slot *slot = p->slot       ? p->slot
                              : p->h->shown ? p->h->shown->slot
                                            : NULL;

    return p->r->fs->stages && staged_hides(p->r->fs, p->r->ino, slot, name);
}

/* Does an entry of this name still fit? */
static bool has_room(const struct page *p, const char *name)
{
    struct stat none = {0};
    struct fuse_entry_param plus = {0};
    size_t need = p->r->plus
                      ? fuse_add_direntry_plus(p->r->req, NULL, 0, name, &plus, 0)
                      : fuse_add_direntry(p->r->req, NULL, 0, name, &none, 0);

    return need <= p->r->size - p->used;
}

/* Adds what fits, as has_room() said. `entry->ino` 0: the kernel learns no node. */
static void put_entry(struct page *p, const char *name,
                      const struct fuse_entry_param *entry, off_t next)
{
    char *at = p->data + p->used;
    size_t left = p->r->size - p->used;

    p->used += p->r->plus
                   ? fuse_add_direntry_plus(p->r->req, at, left, name, entry, next)
                   : fuse_add_direntry(p->r->req, at, left, name, &entry->attr, next);
}

/* The two directories themselves, both by the number of this one. True: full. */
static bool put_dots(struct page *p, uint64_t ino, off_t *off)
{
    static const char *const names[] = {".", ".."};
    struct fuse_entry_param self = {.attr = {.st_ino = ino, .st_mode = S_IFDIR}};

    for (; *off < DOTS; ++*off) {
        if (!has_room(p, names[*off]))
            return true;
        put_entry(p, names[*off], &self, *off + 1);
    }
    return false;
}

/* ---- inside a checkpoint ---- */

/* 1 when the page is full: stops the walk over the catalogue. */
static int put_tensor(void *user, const struct tensor_info *t)
{
    struct page *p = user;
    enum inside kind = p->dir == INSIDE_RAW ? INSIDE_BARE : INSIDE_NPY;
    const char *name = kind == INSIDE_BARE ? t->name : t->name_npy;
    struct fuse_entry_param entry = {0};
    int rc;

    if (is_covered(p, name))
        return 0;
    if (!has_room(p, name))
        return 1;
    rc = attr_tensor(p->r->fs, kind, t, &entry.attr, p->e);
    if (rc < 0)
        return rc;
    if (p->r->plus)
        entry_inside(p->r->fs, p->slot, kind, t->ord, &entry);
    put_entry(p, name, &entry, (off_t)t->ord + 1 + DOTS);
    return 0;
}

static int put_tree_entry(void *user, const struct tree_entry *t)
{
    struct page *p = user;
    enum inside kind = t->dir ? INSIDE_TREE : INSIDE_NPY;
    uint32_t index = t->dir ? t->dir : t->tensor;
    struct fuse_entry_param entry = {0};
    int rc;

    if (is_covered(p, t->name))
        return 0;
    if (!has_room(p, t->name))
        return 1;
    rc = t->info ? attr_tensor(p->r->fs, kind, t->info, &entry.attr, p->e)
                 : attr_inside(p->r->fs, p->slot, kind, index, &entry.attr, p->e);
    if (rc < 0)
        return rc;
    if (p->r->plus)
        entry_inside(p->r->fs, p->slot, kind, index, &entry);
    put_entry(p, t->name, &entry, (off_t)t->pos + 1 + DOTS);
    return 0;
}

/* The files of .unshard/ or optimizer/, and behind them `latest` where there is one. */
static const struct fixed_file *listed_file(const struct page *p,
                                            const struct dir_handle *h, size_t i)
{
    static const struct fixed_file latest = {"latest", INSIDE_LATEST};
    const struct fixed_file *f = fixed_file(p->slot, p->dir, i);

    if (f || !h->latest || (i > 0 && !fixed_file(p->slot, p->dir, i - 1)))
        return f;
    return &latest;
}

/* Reports come without attributes: finding their size would mean making them. */
static int fixed_entry(struct page *p, enum inside kind, struct fuse_entry_param *out)
{
    int rc;

    if (kind != INSIDE_OPTIMIZER_FILE) {
        attr_inside_brief(p->r->fs, p->slot, kind, &out->attr);
        return 0;
    }
    rc = attr_inside(p->r->fs, p->slot, kind, 0, &out->attr, p->e);
    if (rc == 0 && p->r->plus)
        entry_inside(p->r->fs, p->slot, kind, 0, out);
    return rc;
}

static int put_fixed(struct page *p, const struct dir_handle *h, size_t from)
{
    const struct fixed_file *f;

    for (size_t i = from; (f = listed_file(p, h, i)); i++) {
        struct fuse_entry_param entry = {0};
        int rc;

        if (is_covered(p, f->name))
            continue;
        if (!has_room(p, f->name))
            return 1;
        rc = fixed_entry(p, f->kind, &entry);
        if (rc < 0)
            return rc;
        put_entry(p, f->name, &entry, (off_t)i + 1 + DOTS);
    }
    return 0;
}

/* Behind all others. The kernel asks for their attributes when it needs them. */
static void put_staged(struct page *p, off_t off)
{
    const struct staged_name *name = p->h->staged;
    off_t i = off >= STAGED_POS ? off - STAGED_POS : 0;

    for (off_t k = 0; name && name[k].name; k++) {
        const struct fuse_entry_param entry = {
            .attr = {.st_ino = name[k].ino, .st_mode = name[k].type}};

        if (k < i)
            continue;
        if (!has_room(p, name[k].name))
            break;
        put_entry(p, name[k].name, &entry, STAGED_POS + k + 1);
    }
}

static int list_inside(struct page *p, const struct dir_handle *h, off_t off)
{
    struct catalog *c = p->r->fs->catalog;
    int64_t id = p->slot->info.id;
    struct stat self;
    int rc;

    if (p->slot->stale)
        return err_set(p->e, ESTALE, "%s: the checkpoint changed", p->slot->path);
    slot_used(p->r->fs, p->slot);
    rc = attr_inside(p->r->fs, p->slot, p->dir, ino_index(p->r->ino), &self, p->e);
    if (rc < 0 || put_dots(p, self.st_ino, &off))
        return rc;
    if (off >= STAGED_POS) {
        put_staged(p, off);
        return 0;
    }
    if (off - DOTS > UINT32_MAX)
        return 0;
    if (p->dir == INSIDE_TENSORS || p->dir == INSIDE_RAW)
        rc = catalog_tensors(c, id, (uint32_t)(off - DOTS), put_tensor, p, p->e);
    else if (p->dir == INSIDE_TREE)
        rc = catalog_tree_list(c, id, ino_index(p->r->ino), (uint32_t)(off - DOTS),
                               put_tree_entry, p, p->e);
    else
        rc = put_fixed(p, h, (size_t)(off - DOTS));
    if (rc == 0)
        put_staged(p, 0);
    return MIN(rc, 0); /* 1: the page is full */
}

/* ---- outside ---- */

/*
 * A new directory is in the source before its publication ends, and has its own node there
 * until then: told to the kernel, that one would take the directory away from who stands in
 * it. The first look is for the stage: when it is gone, there is the alias.
 */
static bool has_two_nodes(struct fs *fs, const struct node *dir, const char *name,
                          fuse_ino_t ino)
{
    if (!fs->stages || ino_is_inside(ino) || ino_is_staged(ino))
        return false;
    return staged_comes(fs, dir->path, name) || alias_of(fs, ino) != ino;
}

static void put_shown(struct page *p, struct node *dir, const struct shown *shown,
                      const struct shown_entry *entry, off_t next)
{
    struct fuse_entry_param out = {0};
    struct err e = {0};
    /* What cannot be looked up now is listed, and the kernel asks when it needs it. */
    bool whole = p->r->plus && entry_shown(p->r->fs, dir, shown, entry, &out, &e) == 0;

    if (whole && has_two_nodes(p->r->fs, dir, entry->name, out.ino)) {
        entry_forget(p->r->fs, out.ino, 1);
        whole = false;
    }
    if (!whole) {
        out = (struct fuse_entry_param){0};
        entry_brief(p->r->fs, dir, shown, entry, &out.attr);
    }
    put_entry(p, entry->name, &out, next);
}

static int list_shown(struct page *p, struct node *dir, struct shown *shown, off_t off)
{
    if (put_dots(p,
                 attr_path_ino(dir->path, dir->kind == NODE_FILE_DIR ? "/" : "", 0, 0),
                 &off))
        return 0;
    if (shown->slot)
        slot_used(p->r->fs, shown->slot);
    for (size_t i = (size_t)(off - DOTS); off < STAGED_POS && i < shown_places(shown);
         i++) {
        const struct shown_entry *entry = shown_at(shown, i);

        if (!entry || is_covered(p, entry->name))
            continue;
        if (!has_room(p, entry->name))
            return 0;
        put_shown(p, dir, shown, entry, (off_t)i + 1 + DOTS);
    }
    put_staged(p, off);
    return 0;
}

/* .unshard beside trackers. */
static int list_meta(struct page *p, const struct node *dir, const struct dir_handle *h,
                     off_t off)
{
    struct fuse_entry_param link = {
        .attr = {.st_ino = attr_path_ino(dir->path, "latest", 0, 0),
                 .st_mode = S_IFLNK}};

    if (put_dots(p, attr_path_ino(dir->path, ".unshard", 0, 0), &off) || off != DOTS ||
        !h->latest || !has_room(p, "latest"))
        return 0;
    put_entry(p, "latest", &link, DOTS + 1);
    return 0;
}

/* Back at the start of a mirrored directory: what it shows now (rewinddir). */
static int look_again(const struct request *r, struct dir_handle *h, struct node *n,
                      struct err *e)
{
    struct shown *now;
    int rc = tree_shown(r->fs, n, r->may_block, &now, e);

    if (rc != 0)
        return rc;
    shown_put(r->fs, h->shown);
    h->shown = now;
    staged_names_free(h->staged);
    look_at_stages(r, h);
    return 0;
}

static int list_outside(struct page *p, struct dir_handle *h, off_t off)
{
    struct node *n = node_of_ino(p->r->fs, p->r->ino);
    int rc = 0;

    if (!n)
        return -ESTALE;
    if (n->kind == NODE_META)
        return list_meta(p, n, h, off);
    if (off == 0)
        rc = look_again(p->r, h, n, p->e);
    return rc == 0 ? list_shown(p, n, h->shown, off) : rc;
}

/* ---- the request ---- */

/* The lookups in a page that the kernel did not take. */
static void forget_page(const struct page *p)
{
    size_t at = 0;

    while (p->r->plus && at + PLUS_HEAD + DIRENT_HEAD <= p->used) {
        uint64_t ino;
        uint32_t len;

        memcpy(&ino, p->data + at, sizeof ino);
        memcpy(&len, p->data + at + PLUS_HEAD + DIRENT_LEN, sizeof len);
        if (ino)
            entry_forget(p->r->fs, ino, 1);
        at += (PLUS_HEAD + DIRENT_HEAD + len + 7) & ~(size_t)7;
    }
}

int readdir_run(struct request *r, struct err *e)
{
    struct dir_handle *h = handle_of(&r->fi);
    struct page p = {.r = r, .e = e, .slot = h->slot, .h = h};
    int rc;

    if (r->off < 0)
        return -EINVAL;
    p.data = malloc(r->size);
    if (!p.data)
        return err_nomem(e);
    if (h->slot) {
        p.dir = ino_kind(r->ino);
        rc = list_inside(&p, h, r->off);
    } else {
        rc = list_outside(&p, h, r->off);
    }
    /* What was found before the fault is told; the fault with the next page. */
    if (rc < 0 && p.used > 0)
        rc = 0;
    if (rc == 0 && fuse_reply_buf(r->req, p.data, p.used) < 0)
        forget_page(&p);
    free(p.data);
    return rc;
}
