/* SPDX-License-Identifier: MIT */
/* fs/edit_meta.c - `.unshard` of plain directories, and what is written into one and dropped. */
#include "fs/edit_meta.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "fs/attr.h"
#include "fs/lookup.h"
#include "fs/report.h"
#include "fs/tree.h"

static fuse_ino_t ino_of(const struct disk_node *dir, enum edit_meta kind)
{
    return (fuse_ino_t)1 << 62 | (fuse_ino_t)kind << 56 | dir->ino;
}

struct disk_node *edit_meta_dir(struct fs *fs, fuse_ino_t ino)
{
    return disk_pin(fs, ino & (((fuse_ino_t)1 << 56) - 1));
}

static enum inside report_of(enum edit_meta kind)
{
    return kind == META_COUNTERS ? INSIDE_COUNTERS_JSON : INSIDE_LAST_ERROR;
}

static char *latest_of(struct fs *fs, struct disk_node *dir)
{
    struct err ignored = {0};
    char path[PATH_MAX];

    return disk_path(fs, dir, path, &ignored) == 0 ? tracker_target(fs, path) : NULL;
}

static uint64_t size_of(struct fs *fs, struct disk_node *dir, enum edit_meta kind)
{
    CLEANUP(buf_release) struct buf text = {0};
    CLEANUP_FREE char *latest = NULL;

    if (kind == META_LATEST || kind == META_LATEST_IN) {
        latest = latest_of(fs, dir);
        return latest ? strlen(latest) + (kind == META_LATEST_IN ? 3 : 0) : 0;
    }
    if (kind != META_COUNTERS && kind != META_ERROR)
        return 0;
    return report_text(fs, report_of(kind), &text) < 0 ? 0 : text.len;
}

/* The directory's owner, and who may read it. */
static int fill(struct fs *fs, struct disk_node *dir, enum edit_meta kind,
                struct stat *st, struct err *e)
{
    int fd = disk_get(fs, dir, e), rc = 0;
    struct stat of;

    if (fd < 0)
        return fd;
    if (fstatat(fd, "", &of, AT_EMPTY_PATH) < 0)
        rc = err_set(e, errno, "stat: %s", strerror(errno));
    disk_put(fs, dir);
    if (rc < 0)
        return rc;
    *st = (struct stat){.st_ino = ino_of(dir, kind) & ~((fuse_ino_t)1 << 62),
                        .st_mode = S_IFREG | (of.st_mode & 0666),
                        .st_nlink = 1,
                        .st_uid = of.st_uid,
                        .st_gid = of.st_gid,
                        .st_size = (off_t)size_of(fs, dir, kind),
                        .st_atim = of.st_mtim,
                        .st_mtim = of.st_mtim,
                        .st_ctim = of.st_mtim};
    if (kind == META_DIR) {
        st->st_mode = of.st_mode;
        st->st_nlink = 2;
    } else if (kind == META_LATEST || kind == META_LATEST_IN) {
        st->st_mode = S_IFLNK | 0777;
    }
    return 0;
}

/* The kernel's reference is one to the directory. */
static int entry(struct fs *fs, struct disk_node *dir, enum edit_meta kind,
                 struct fuse_entry_param *out, struct err *e)
{
    int rc;

    *out = (struct fuse_entry_param){.ino = ino_of(dir, kind),
                                     .generation = dir->generation};
    rc = fill(fs, dir, kind, &out->attr, e);
    if (rc == 0)
        disk_pin(fs, dir->ino);
    return rc;
}

int edit_meta_lookup(struct request *r, struct disk_node *dir,
                     struct fuse_entry_param *out, struct err *e)
{
    struct generation *gen = NULL;
    int rc = disk_generation(r->fs, dir, r->may_block, &gen, e);

    if (rc == -ENOENT) {
        *e = (struct err){0};
        return entry(r->fs, dir, META_DIR, out, e);
    }
    if (rc == 0)
        rc = attr_inside(r->fs, gen, INSIDE_META, 0, &out->attr, e);
    if (rc == 0)
        entry_inside(r->fs, gen, INSIDE_META, 0, out);
    generation_unref(r->fs, gen, 1);
    return rc;
}

int edit_meta_lookup_in(struct request *r, const struct edit_place *p,
                        struct fuse_entry_param *out, struct err *e)
{
    CLEANUP_FREE char *latest = NULL;
    struct disk_node *dir = p->dir;
    int rc = EDIT_ABSENT;

    if (p->gen)
        return EDIT_NONE; /* fs/lookup.c */
    if (strcmp(r->name, "counters.json") == 0)
        rc = entry(r->fs, dir, META_COUNTERS, out, e);
    else if (strcmp(r->name, "last-error") == 0)
        rc = entry(r->fs, dir, META_ERROR, out, e);
    else if (strcmp(r->name, "latest") == 0 && (latest = latest_of(r->fs, dir)))
        rc = entry(r->fs, dir, META_LATEST_IN, out, e);
    return rc;
}

int edit_latest_lookup(struct request *r, struct disk_node *dir,
                       struct fuse_entry_param *out, struct err *e)
{
    CLEANUP_FREE char *latest =
        strcmp(r->name, "latest") == 0 ? latest_of(r->fs, dir) : NULL;

    return latest ? entry(r->fs, dir, META_LATEST, out, e) : EDIT_ABSENT;
}

void edit_meta_forget(struct fs *fs, fuse_ino_t ino, uint64_t lookups)
{
    disk_forget(fs, ino & (((fuse_ino_t)1 << 56) - 1), lookups);
}

int edit_meta_getattr(struct request *r, struct err *e)
{
    struct disk_node *dir = edit_meta_dir(r->fs, r->ino);
    struct stat st;
    int rc = dir ? fill(r->fs, dir, edit_meta_kind(r->ino), &st, e) : -ESTALE;

    disk_unpin(r->fs, dir);
    if (rc == 0)
        fuse_reply_attr(r->req, &st, 0);
    return rc;
}

int edit_readlink(struct request *r, struct err *e)
{
    struct disk_node *dir = edit_meta_is(r->ino) ? edit_meta_dir(r->fs, r->ino) : NULL;
    CLEANUP_FREE char *latest = dir ? latest_of(r->fs, dir) : NULL;
    char text[PATH_MAX];

    disk_unpin(r->fs, dir);
    if (!latest)
        return err_set(e, ENOENT, "no tracker names a step any more");
    snprintf(text, sizeof text, "%s%s",
             edit_meta_kind(r->ino) == META_LATEST_IN ? "../" : "", latest);
    fuse_reply_readlink(r->req, text);
    return 0;
}

int edit_meta_open(struct request *r, struct err *e)
{
    enum edit_meta kind = edit_meta_kind(r->ino);
    struct edit_handle *h = calloc(1, sizeof *h);
    int rc = 0;

    if (!h)
        return err_nomem(e);
    h->fd = -1;
    if (kind == META_COUNTERS || kind == META_ERROR)
        rc = report_text(r->fs, report_of(kind), &h->text);
    if (rc < 0) {
        free(h);
        return err_nomem(e);
    }
    r->fi.direct_io = 1;
    return edit_reply_handle(r, h, NULL);
}

int edit_meta_drop(struct request *r, const struct fuse_entry_param *entry,
                   struct err *e)
{
    struct edit_handle *h = calloc(1, sizeof *h);

    if (!h)
        return err_nomem(e);
    h->fd = -1;
    r->fi.direct_io = 1;
    return edit_reply_handle(r, h, entry);
}

int edit_meta_create(struct request *r, const struct edit_place *p, struct err *e)
{
    struct fuse_entry_param out;
    int rc = entry(r->fs, p->dir, META_DROPPED, &out, e);

    return rc == 0 ? edit_meta_drop(r, &out, e) : rc;
}

/* The names in `.unshard` of a plain directory. */
int edit_meta_list(struct request *r, struct edit_names *out, struct err *e)
{
    static const struct {
        const char *name;
        enum edit_meta kind;
    } files[] = {{"counters.json", META_COUNTERS}, {"last-error", META_ERROR}};
    struct disk_node *dir = edit_meta_dir(r->fs, r->ino);
    CLEANUP_FREE char *latest = dir ? latest_of(r->fs, dir) : NULL;
    int rc = dir ? 0 : -ESTALE;

    for (size_t i = 0; rc == 0 && i < ARRAY_SIZE(files); i++)
        rc = edit_names_add(out, files[i].name, ino_of(dir, files[i].kind), S_IFREG, e);
    if (rc == 0 && latest)
        rc = edit_names_add(out, "latest", ino_of(dir, META_LATEST_IN), S_IFLNK, e);
    disk_unpin(r->fs, dir);
    return rc;
}
