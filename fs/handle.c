/* SPDX-License-Identifier: MIT */
/* fs/handle.c - open files. */
#include "fs/handle.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/utf8.h"
#include "fs/materialized.h"
#include "fs/lookup.h"
#include "fs/node.h"
#include "fs/overlay.h"
#include "fs/passthrough.h"
#include "fs/permit.h"
#include "fs/report.h"

enum { TENSOR_MEMORY = 16 << 20, NAME_SHOWN = 512 };

static void handle_free(struct fs *fs, struct opened *o)
{
    struct handle *h = container_of(o, struct handle, opened);

    way_close(fs, h->way);
    materialized_put(fs->materialized, h->copy);
    early_free(h->early);
    reader_close(h->reader);
    side_close(h->side);
    generation_unref(fs, h->gen, 1);
    buf_release(&h->text);
    free(h->name);
    free(h);
}

static int name_handle(struct handle *h, const struct generation *gen, const char *name,
                       struct err *e)
{
    char line[NAME_SHOWN], path[NAME_SHOWN];

    text_escape(line, sizeof line, name);
    text_escape(path, sizeof path, gen->path);
    if (asprintf(&h->name, "%s%s%s%s%s", path, path[0] ? ": " : "",
                 gen->file ? gen->file : "", gen->file ? ": " : "", line) < 0) {
        h->name = NULL;
        return err_nomem(e);
    }
    return 0;
}

static int open_tensor(struct fs *fs, struct handle *h, enum inside kind, uint32_t ord,
                       struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    int64_t id = h->gen->info.id;
    struct tensor_info t;
    int rc = a ? catalog_tensor(fs->catalog, id, ord, a, &t, e) : err_nomem(e);

    if (rc == 0)
        rc = name_handle(h, h->gen, t.key, e);
    if (rc == 0)
        rc = reader_open_tensor(&fs->reading.env, id, ord, kind == INSIDE_NPY,
                                &h->reader, e);
    return rc;
}

static int open_view(struct fs *fs, struct handle *h, enum view_kind kind,
                     struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    int64_t id = h->gen->info.id;
    struct view_info v;
    int rc = a ? view_get(fs->catalog, id, kind, fs->options.prefix, a, &v, e)
               : err_nomem(e);

    if (rc == 0)
        rc = name_handle(h, h->gen, v.name, e);
    if (rc == 0 && v.fault)
        rc = err_set(e, EBADMSG, "%s", v.fault);
    if (rc == 0)
        rc = reader_open_view(&fs->reading.env, id, &v, &h->reader, e);
    return rc;
}

static int open_report(struct fs *fs, struct handle *h, enum inside kind, struct err *e)
{
    struct source *src;
    int rc = report_get(fs, h->gen, kind, &src, e);

    return rc < 0 ? rc : side_open_source(src, &h->side, e);
}

static int open_text(struct fs *fs, struct handle *h, enum inside kind, struct err *e)
{
    h->is_text = true;
    return report_text(fs, kind, &h->text) < 0 ? err_nomem(e) : 0;
}

static int open_kind(struct request *r, struct handle *h, struct err *e)
{
    enum inside kind = ino_kind(r->ino);

    switch (kind) {
    case INSIDE_NPY:
    case INSIDE_BARE:
        return open_tensor(r->fs, h, kind, ino_index(r->ino), e);
    case INSIDE_MODEL:
        return open_view(r->fs, h, VIEW_MODEL, e);
    case INSIDE_OPTIMIZER_FILE:
        return open_view(r->fs, h, VIEW_OPTIMIZER, e);
    case INSIDE_CHECKPOINT_JSON:
    case INSIDE_OBJECTS_JSON:
    case INSIDE_INDEX:
        if (!r->may_block && !report_made(h->gen, kind))
            return FS_LATER;
        return open_report(r->fs, h, kind, e);
    case INSIDE_COUNTERS_JSON:
    case INSIDE_LAST_ERROR:
        return open_text(r->fs, h, kind, e);
    case INSIDE_OVERLAY:
        return overlay_open_file(r->fs->overlay, ino_index(r->ino), &h->side, e);
    case INSIDE_TENSORS:
    case INSIDE_TREE:
    case INSIDE_RAW:
    case INSIDE_OPTIMIZER:
    case INSIDE_META:
    case INSIDE_LATEST:
    default:
        return -EISDIR;
    }
}

static int open_inside(struct request *r, struct handle *h, struct err *e)
{
    int rc;

    h->gen = generation_of_ino(r->fs, r->ino);
    if (!h->gen)
        return -ESTALE;
    rc = inside_is_of_mount(ino_kind(r->ino)) ? 0 : generation_ready(r, h->gen, e);
    if (rc == 0)
        rc = permit_open(r, h->gen, e);
    if (rc == 0)
        rc = open_kind(r, h, e);
    if (rc < 0 && h->name && e->code)
        err_wrap(e, "open %s", h->name);
    /* Nodes of a generation never change: what the kernel has of them stays good. */
    r->fi.keep_cache = !h->is_text;
    if (h->reader)
        r->fi.direct_io =
            !habit_open(&r->fs->habits, r->ino, !fs_writable(r->fs), &h->habit);
    else
        r->fi.direct_io = h->is_text;
    return rc;
}

static int open_outside(struct request *r, struct handle *h, struct err *e)
{
    struct node *n = node_of_ino(r->fs, r->ino);
    int rc;

    if (!n)
        return -ESTALE;
    if (n->kind != NODE_FILE)
        return -EISDIR;
    rc = permit_node(r, n->path, n->dev, n->inode, e);
    if (rc == 0)
        rc = side_open(r->fs->store, n->path, n->dev, n->inode, &h->side, e);
    /* The kernel comes back by the path at once: it must not be told the same again. */
    if (rc == -ESTALE && n->parent)
        nodes_look_again(r->fs, n->parent->path);
    return rc;
}

int handle_open(struct fs *fs, fuse_ino_t ino, struct handle **out, struct err *e)
{
    struct request r = {.fs = fs, .ino = ino, .may_block = true};
    struct handle *h = calloc(1, sizeof *h);
    int rc;

    if (!h)
        return err_nomem(e);
    rc = ino_is_inside(ino) ? open_inside(&r, h, e) : open_outside(&r, h, e);
    if (rc < 0)
        handle_free(fs, &h->opened);
    else
        *out = h;
    return rc;
}

int handle_read(struct handle *h, uint64_t off, size_t len, void *dst, size_t *got,
                struct err *e)
{
    uint64_t size;

    if (h->side)
        return side_read(h->side, off, len, dst, got, e);
    size = h->reader ? reader_size(h->reader) : h->text.len;
    *got = off < size ? (size_t)MIN(size - off, (uint64_t)len) : 0;
    if (h->reader)
        return *got ? reader_read(h->reader, off, *got, dst, e) : 0;
    if (*got)
        memcpy(dst, h->text.data + off, *got);
    return 0;
}

void handle_close(struct fs *fs, struct handle *h)
{
    if (h)
        handle_free(fs, &h->opened);
}

/* What the kernel is to read: -1 for what the server reads. */
static int find_backing(const struct request *r, struct handle *h, uint64_t generation,
                        int *fd, struct err *e)
{
    const struct materialized_of what = {.gen = h->gen,
                                         .kind = ino_kind(r->ino),
                                         .index = ino_index(r->ino),
                                         .reader = h->reader};
    int rc = 0;

    *fd = h->side ? side_fd(h->side) : -1;
    if (h->reader && !way_is_server(r->fs, r->ino, generation))
        rc = materialized_get(r->fs->materialized, &what, r->may_fill, &h->copy, e);
    if (h->copy)
        *fd = materialized_fd(h->copy);
    return rc;
}

static int choose_way(const struct request *r, struct handle *h, struct err *e)
{
    uint64_t generation;
    const struct node *n;
    int fd, rc;

    if (!h->side && (!h->reader || !r->fs->materialized))
        return 0; /* such files are the server's to read, always */
    n = h->gen ? NULL : node_of_ino(r->fs, r->ino);
    if (!h->gen && !n)
        return -ESTALE;
    generation = h->gen ? h->gen->generation : n->generation;
    rc = find_backing(r, h, generation, &fd, e);
    if (rc != 0)
        return rc;
    h->way = way_open(r->fs, r->ino, generation, fd);
    return h->way ? 0 : err_nomem(e);
}

static int reply_opened(struct request *r, const struct handle *h)
{
    if (!h->way || !h->way->backing)
        return fuse_reply_open(r->req, &r->fi);
    counter_add(&r->fs->counters, COUNT_OPENS_PASSTHROUGH, 1);
    return passthrough_reply(r->req, &r->fi, h->way->backing);
}

int open_run(struct request *r, struct err *e)
{
    struct handle *h;
    int rc;

    if ((r->fi.flags & O_ACCMODE) != O_RDONLY || (r->fi.flags & O_TRUNC))
        return -EROFS;
    r->of_bytes = true;
    h = calloc(1, sizeof *h);
    if (!h)
        return err_nomem(e);
    rc = ino_is_inside(r->ino) ? open_inside(r, h, e) : open_outside(r, h, e);
    if (rc == 0)
        rc = choose_way(r, h, e);
    if (rc == 0 && h->reader && !r->fs->store->remote)
        h->early = early_new(&r->fs->early, r->fs->reading.pool, h->reader);
    if (rc != 0) {
        handle_free(r->fs, &h->opened);
        return rc;
    }
    h->opened.free = handle_free;
    opened_add(&r->fs->opened, &h->opened);
    counter_add(&r->fs->counters, COUNT_OPENS, 1);
    r->fi.fh = (uintptr_t)h;
    r->fi.noflush = 1;
    if (reply_opened(r, h) < 0)
        opened_end(r->fs, &h->opened);
    return 0;
}
