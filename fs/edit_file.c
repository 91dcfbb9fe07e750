/* SPDX-License-Identifier: MIT */
/* fs/edit_file.c - open files of transactions. */
#include <errno.h>
#include <inttypes.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/fsutil.h"
#include "fs/attr.h"
#include "fs/edit_meta.h"
#include "fs/edit_priv.h"
#include "fs/handle.h"
#include "fs/permit.h"
#include "fs/read.h"
#include "index/npy.h"
#include "save/incoming.h"

enum { TENSOR_MEMORY = 16 << 20, COPY_BLOCK = 1 << 20 };

/* ---- attributes ---- */

/* With `busy` held for reading, or of a file that nobody else knows. */
static uint64_t size_of(const struct edit_node *n)
{
    struct stat st;

    if (n->in)
        return intake_size(n->in);
    return n->fd >= 0 && fstat(n->fd, &st) == 0 ? (uint64_t)st.st_size : 0;
}

void edit_stat(struct fs *fs, struct edit_node *n, struct stat *st)
{
    struct err ignored = {0};
    uint64_t size = 0;

    if (!n->is_dir && target_enter(fs, n->target, false, &ignored) == 0) {
        size = size_of(n);
        target_leave(n->target);
    } else if (n->file) { /* published or removed while it is open */
        size = size_of(n);
    }
    edits_lock(fs);
    *st = (struct stat){.st_ino = n->ino & ~((fuse_ino_t)1 << 62),
                        .st_mode = (n->is_dir ? S_IFDIR : S_IFREG) | n->mode,
                        .st_nlink = n->is_dir ? 2 : n->path != NULL,
                        .st_uid = n->uid,
                        .st_gid = n->gid,
                        .st_size = (off_t)size,
                        .st_blocks = (blkcnt_t)(size / 512 + (size % 512 > 0)),
                        .st_blksize = 256 << 10,
                        .st_atim = n->mtime,
                        .st_mtim = n->mtime,
                        .st_ctim = n->mtime};
    edits_unlock(fs);
}

int edit_entry(struct fs *fs, struct edit_node *n, struct fuse_entry_param *out)
{
    *out = (struct fuse_entry_param){.ino = n->ino, .generation = n->generation};
    edit_stat(fs, n, &out->attr);
    return 0; /* the caller's reference is the kernel's now */
}

void edit_forget(struct fs *fs, fuse_ino_t ino, uint64_t lookups)
{
    struct edit_node *n;

    if (edit_meta_is(ino)) {
        edit_meta_forget(fs, ino, lookups);
        return;
    }
    n = edit_node_of(fs, ino);
    edit_node_put(fs, n, lookups + 1);
}

int edit_getattr(struct request *r, struct err *e)
{
    struct edit_node *n;
    struct stat st;

    if (edit_meta_is(r->ino))
        return edit_meta_getattr(r, e);
    n = edit_node_of(r->fs, r->ino);
    if (!n)
        return -ESTALE;
    edit_stat(r->fs, n, &st);
    edit_node_put(r->fs, n, 1);
    fuse_reply_attr(r->req, &st, 0);
    return 0;
}

/* ---- handles ---- */

static struct edit_handle *handle_of_file(const struct fuse_file_info *fi)
{
    return container_of((struct opened *)(uintptr_t)fi->fh, struct edit_handle, opened);
}

/* With the lock: nothing was written by it since a close(2), or something was. */
static void note_flushed(struct edit_handle *h, bool flushed)
{
    if (h->node && !h->node->is_dir)
        h->node->flushed += flushed - h->flushed;
    h->flushed = flushed;
}

static void handle_free(struct fs *fs, struct opened *o)
{
    struct edit_handle *h = container_of(o, struct edit_handle, opened);
    struct edit_node *n = h->node;

    if (n && !n->is_dir) {
        bool last;

        edits_lock(fs);
        n->writers -= h->writes;
        note_flushed(h, false);
        last = --n->handles == 0;
        n->closing = last;
        if (h->writes)
            n->closed = ++fs->edits->closes;
        if (last && h->writes)
            clock_gettime(CLOCK_REALTIME, &n->mtime);
        pthread_cond_broadcast(&fs->edits->wake);
        edits_unlock(fs);
        if (last)
            edit_closed(fs, n);
    }
    edit_node_put(fs, n, 1);
    if (h->fd >= 0)
        close(h->fd);
    buf_release(&h->text);
    edit_names_release(&h->names);
    free(h);
}

int edit_reply_handle(struct request *r, struct edit_handle *h,
                      const struct fuse_entry_param *entry)
{
    int rc;

    /*
     * Nobody else changes the file, so the kernel keeps its pages, and they have one mtime while
     * it is open: a page that is dropped while a write is on its way comes back without it.
     */
    r->fi.keep_cache = h->node != NULL;
    h->opened.free = handle_free;
    h->opened.kind = OPENED_EDIT;
    opened_add(&r->fs->opened, &h->opened);
    r->fi.fh = (uintptr_t)&h->opened;
    rc = entry ? fuse_reply_create(r->req, entry, &r->fi)
               : fuse_reply_open(r->req, &r->fi);
    if (rc < 0)
        opened_end(r->fs, &h->opened);
    if (rc < 0 && entry)
        disk_ops_forget(r->fs, entry->ino, 1);
    return 0;
}

static bool writes(const struct request *r)
{
    return (r->fi.flags & O_ACCMODE) != O_RDONLY || (r->fi.flags & O_TRUNC);
}

static int make_handle(struct request *r, struct edit_node *n, struct edit_handle **out,
                       struct err *e)
{
    struct edit_handle *h = calloc(1, sizeof *h);

    if (!h)
        return err_nomem(e);
    h->fd = n->in ? -1 : fcntl(n->fd, F_DUPFD_CLOEXEC, 0);
    if (!n->in && h->fd < 0) {
        free(h);
        return err_set(e, errno, "open: %s", strerror(errno));
    }
    h->node = n;
    h->writes = writes(r);
    edits_lock(r->fs);
    edit_node_ref(n);
    n->handles++;
    n->writers += h->writes;
    r->fi.direct_io = n->in && request_writes_directly(r, n->writers);
    n->fresh_ns = 0;
    n->complete = false;
    edits_unlock(r->fs);
    edit_came_back(r->fs, r); /* until now it was not published */
    *out = h;
    return 0;
}

/* The transaction was entered. */
int edit_reply_opened(struct request *r, struct edit_node *n, struct err *e)
{
    struct edit_handle *h;
    int rc = make_handle(r, n, &h, e);

    return rc == 0 ? edit_reply_handle(r, h, NULL) : rc;
}

/* A reference of the caller's becomes the kernel's, or goes. */
int edit_reply_created(struct request *r, struct edit_node *n, struct err *e)
{
    struct fuse_entry_param entry;
    struct edit_handle *h;
    int rc = make_handle(r, n, &h, e);

    if (rc < 0) {
        edit_node_put(r->fs, n, 1);
        return rc;
    }
    edit_entry(r->fs, n, &entry);
    return edit_reply_handle(r, h, &entry);
}

/* ---- bytes ---- */

/* Is the file still in its transaction? It was entered, unless *left. */
static bool is_live(struct fs *fs, struct edit_node *n)
{
    bool live;

    edits_lock(fs);
    live = n->path != NULL;
    edits_unlock(fs);
    return live;
}

static int enter_live(struct fs *fs, struct edit_node *n, bool *live, struct err *e)
{
    struct err none = {0};
    int rc = target_enter(fs, n->target, false, &none);

    *live = rc == 0 && is_live(fs, n);
    if (rc == 0 && !*live)
        target_leave(n->target);
    if (*live || !n->in)
        return 0;
    return err_set(e, ESTALE, "the file is published: open it again");
}

static int write_spooled(const struct edit_handle *h, const char *data, size_t size,
                         off_t off, struct err *e)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pwrite(h->fd, data + done, size - done, off + (off_t)done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_set(e, errno, "write: %s", strerror(errno));
        done += (size_t)n;
    }
    return 0;
}

static int judge_npy(struct edit_node *n, uint64_t size, struct err *e);

/* How long the file will be, once its header says so; a header that is none is refused. */
static int expect(struct edit_node *n, struct err *e)
{
    CLEANUP(ranges_release) struct ranges missing = {0};
    uint64_t total;
    int rc;

    if (txn_expected(n->file))
        return 0;
    if (!n->in && incoming_kind(n->path) == INCOMING_NPY) {
        rc = judge_npy(n, size_of(n), e);
        return rc == -ENOTSUP ? (*e = (struct err){0}, 0) : MIN(rc, 0);
    }
    if (!n->in)
        return 0;
    rc = intake_missing(n->in, &missing, &total, e);
    return rc == 0 && total ? txn_expect(n->file, total, e) : rc;
}

/* stage_size=: the file will end at `size`, or further where `more`. */
static int charge(struct fs *fs, struct edit_node *n, uint64_t size, bool more,
                  struct err *e)
{
    struct edits *x = fs->edits;
    uint64_t limit = fs->options.stage_size, others;
    bool fits;

    if (!limit)
        return 0;
    edits_lock(fs);
    size = more ? MAX(size, n->charged) : size;
    others = x->charged - n->charged;
    fits = size <= n->charged || (size <= limit && others <= limit - size);
    if (fits && n->path) {
        x->charged = others + size;
        n->charged = size;
    }
    edits_unlock(fs);
    if (fits)
        return 0;
    err_set(e, EDQUOT,
            "%s: more would be staged than the %" PRIu64 " bytes of stage_size=",
            n->path ? n->path : "a removed file", limit);
    return err_hint(e, "finish or remove what is staged, see unshard doctor");
}

static int put(struct edit_handle *h, const char *data, size_t size, off_t off,
               struct err *e)
{
    struct edit_node *n = h->node;
    int rc = txn_writes(n->file, (uint64_t)off, size, e);

    if (rc < 0)
        return rc;
    rc = n->in ? intake_write(n->in, data, size, (uint64_t)off, e)
               : write_spooled(h, data, size, off, e);
    if (rc < 0) {
        txn_wrote(n->file, (uint64_t)off, 0, &(struct err){0});
        return rc;
    }
    rc = txn_wrote(n->file, (uint64_t)off, size, e);
    return rc == 0 ? expect(n, e) : rc;
}

static int sync_node(struct edit_node *n, struct err *e)
{
    int rc, end;

    if (!n->in) {
        rc = txn_confirm(n->file, size_of(n), e);
        return rc == 0 ? txn_file_sync(n->file, e) : rc;
    }
    rc = intake_confirm(n->in, e);
    if (rc == 0)
        rc = txn_confirm(n->file, size_of(n), e);
    if (rc == 0)
        rc = txn_sync_begin(n->file, e);
    if (rc < 0)
        return rc;
    rc = intake_sync(n->in, e);
    end = txn_sync_end(n->file, rc == 0, rc == 0 ? e : &(struct err){0});
    return rc < 0 ? rc : end;
}

int edit_write(struct request *r, const char *data, struct err *e)
{
    struct edit_handle *h = handle_of_file(&r->fi);
    struct edit_node *n = h->node;
    bool live;
    int rc;

    if (!n) { /* in `.unshard` */
        fuse_reply_write(r->req, r->size);
        return 0;
    }
    TRY(enter_live(r->fs, n, &live, e));
    rc = live ? charge(r->fs, n, (uint64_t)r->off + r->size, true, e) : 0;
    if (rc == 0)
        rc = live ? put(h, data, r->size, r->off, e)
                  : write_spooled(h, data, r->size, r->off, e);
    if (rc == 0 && live && request_is_synchronous(r))
        rc = sync_node(n, e);
    if (live)
        target_leave(n->target);
    edits_lock(r->fs);
    note_flushed(h, false);
    edits_unlock(r->fs);
    if (rc < 0) {
        edit_settle_maker(r->fs, n->target); /* it may look for .unshard/last-error */
        return rc;
    }
    fuse_reply_write(r->req, r->size);
    return 0;
}

static ssize_t read_spooled(const struct edit_handle *h, void *dst, size_t size,
                            off_t off)
{
    size_t got = 0;

    while (got < size) {
        ssize_t n = pread(h->fd, (char *)dst + got, size - got, off + (off_t)got);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        got += (size_t)n;
    }
    return (ssize_t)got;
}

int edit_read(struct request *r, struct err *e)
{
    struct edit_handle *h = handle_of_file(&r->fi);
    void *data;
    ssize_t got;
    bool live;
    int rc;

    if (!h->node) {
        size_t off = MIN((size_t)r->off, h->text.len);

        opened_get(&h->opened); /* it may be closed before the reply has ended */
        fuse_reply_buf(r->req, h->text.data ? h->text.data + off : NULL,
                       MIN(r->size, h->text.len - off));
        opened_put(r->fs, &h->opened);
        return 0;
    }
    data = read_buffer(r->fs, r->size + 1);
    rc = data ? enter_live(r->fs, h->node, &live, e) : err_nomem(e);
    if (rc < 0)
        return rc;
    got = h->node->in ? intake_read(h->node->in, data, r->size, (uint64_t)r->off, e)
                      : read_spooled(h, data, r->size, r->off);
    if (live)
        target_leave(h->node->target);
    if (got < 0)
        return e->code ? (int)got
                       : err_set(e, (int)-got, "read: %s", strerror((int)-got));
    fuse_reply_buf(r->req, data, (size_t)got);
    return 0;
}

/* ---- length and rights ---- */

int edit_cut(struct edit_node *n, uint64_t size, struct err *e)
{
    uint64_t old = size_of(n);
    int rc = n->in && old > 0 && size > 0 ? intake_confirm(n->in, e) : 0;

    if (rc == 0)
        rc = txn_truncates(n->file, old, size, e);
    if (rc < 0)
        return rc;
    if (n->in)
        return intake_truncate(n->in, size, e);
    return ftruncate(n->fd, (off_t)size) < 0
               ? err_set(e, errno, "truncate: %s", strerror(errno))
               : 0;
}

static int own(struct fs *fs, struct edit_node *n, const struct stat *attr, int to_set,
               struct err *e)
{
    edits_lock(fs);
    if (to_set & FUSE_SET_ATTR_MODE)
        n->mode = attr->st_mode & 0777;
    if (to_set & FUSE_SET_ATTR_UID)
        n->uid = attr->st_uid;
    if (to_set & FUSE_SET_ATTR_GID)
        n->gid = attr->st_gid;
    if (to_set & FUSE_SET_ATTR_MTIME)
        n->mtime = attr->st_mtim;
    edits_unlock(fs);
    return n->is_dir ? 0 : txn_file_own(n->file, n->uid, n->gid, n->mode, e);
}

/* Only root gives files away; the owner may name a group that it is in. */
static int check_owner(const struct request *r, const struct stat *attr, int to_set,
                       const struct edit_node *n)
{
    const struct fuse_ctx *c = fuse_req_ctx(r->req);

    if (c->uid == 0)
        return 0;
    if ((to_set & FUSE_SET_ATTR_UID) && attr->st_uid != n->uid)
        return -EPERM;
    return (to_set & FUSE_SET_ATTR_GID) && attr->st_gid != c->gid &&
                   attr->st_gid != n->gid
               ? -EPERM
               : 0;
}

static int set_node(struct request *r, struct edit_node *n, const struct stat *attr,
                    int to_set, struct err *e)
{
    int rc = check_owner(r, attr, to_set, n);
    bool live;

    if (rc == 0 && !n->is_dir)
        rc = enter_live(r->fs, n, &live, e);
    if (rc < 0 || n->is_dir)
        return rc < 0 ? rc : own(r->fs, n, attr, to_set, e);
    if (!live) {
        rc = to_set & FUSE_SET_ATTR_SIZE && ftruncate(n->fd, attr->st_size) < 0
                 ? err_set(e, errno, "truncate: %s", strerror(errno))
                 : 0;
        return rc;
    }
    if (to_set & FUSE_SET_ATTR_SIZE)
        rc = charge(r->fs, n, (uint64_t)attr->st_size, false, e);
    if (rc == 0 && to_set & FUSE_SET_ATTR_SIZE)
        rc = edit_cut(n, (uint64_t)attr->st_size, e);
    if (rc == 0)
        rc = own(r->fs, n, attr, to_set, e);
    target_leave(n->target);
    return rc;
}

int edit_setattr(struct request *r, const struct stat *attr, int to_set, struct err *e)
{
    struct edit_node *n;
    int rc;

    if (edit_meta_is(r->ino))
        return edit_meta_getattr(r, e); /* it keeps nothing */
    if (!ino_is_edit(r->ino))
        return edit_setattr_view(r, attr, to_set, e);
    n = edit_node_of(r->fs, r->ino);
    rc = n ? set_node(r, n, attr, to_set, e) : -ESTALE;
    edit_came_back(r->fs, r); /* truncate(2) opens nothing */
    edit_node_put(r->fs, n, 1);
    return rc == 0 ? edit_getattr(r, e) : rc;
}

/* ---- close and fsync ---- */

/* A descriptor of a tensor's .npy file that says whether all of it is there. */
static int judge_npy(struct edit_node *n, uint64_t size, struct err *e)
{
    CLEANUP_FREE char *dtype = txn_file_noted(n->file, "dtype");
    CLEANUP_FREE char *head = NULL;
    int fd = n->fd, rc;
    struct npy_layout x;
    uint64_t header, end;
    char first[NPY_PREFIX];

    if (size < sizeof first || !txn_has(n->file, 0, sizeof first))
        return 0;
    if (read_exact(fd, first, sizeof first, 0, e) < 0)
        return -EIO;
    rc = npy_header_size(first, sizeof first, &header, e);
    if (rc < 0)
        return err_set(e, EINVAL, "%s: not an .npy file", n->path);
    if (header > size || !txn_has(n->file, 0, header))
        return 0;
    head = malloc((size_t)header);
    if (!head)
        return err_nomem(e);
    if (read_exact(fd, head, (size_t)header, 0, e) < 0)
        return -EIO;
    rc = npy_parse_as(head, (size_t)header, dtype ? dtype_from_name(dtype) : DTYPE_NONE,
                      &x, e);
    if (rc < 0) {
        err_wrap(e, "%s", n->path);
        if (rc != -ENOTSUP) /* which a dtype may mend that is set later */
            e->code = EINVAL;
        return -e->code;
    }
    end = x.header + x.bytes;
    TRY(txn_expect(n->file, end, e));
    if (size > end)
        return err_set(e, EINVAL, "%s: %" PRIu64 " bytes follow the last element",
                       n->path, size - end);
    return size == end && txn_has(n->file, 0, end);
}

/* raw/KEY: its length is the tensor's that is there. */
static int judge_raw(struct fs *fs, struct edit_node *n, const struct generation *gen,
                     uint64_t size, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    struct tensor_info t;
    int rc;

    if (!a)
        return err_nomem(e);
    if (!gen)
        return 0; /* no tensor of this name is there yet */
    rc = catalog_tensor_by_name(fs->catalog, gen->info.id, n->path + strlen("raw/"),
                                false, a, &t, e);
    if (rc == -ENOENT) {
        *e = (struct err){0};
        return 0;
    }
    if (rc == 0)
        rc = txn_expect(n->file, t.bytes, e);
    if (rc < 0)
        return rc;
    if (size > t.bytes)
        return err_set(e, EINVAL, "%s: %" PRIu64 " bytes, the tensor has %" PRIu64,
                       n->path, size, t.bytes);
    return size == t.bytes && txn_has(n->file, 0, t.bytes);
}

int edit_judge(struct fs *fs, struct edit_node *n, const struct generation *gen,
               struct err *e)
{
    uint64_t size = size_of(n);

    switch (incoming_kind(n->path)) {
    case INCOMING_SAFETENSORS:
        return n->in && intake_complete(n->in);
    case INCOMING_NPY:
        return judge_npy(n, size, e);
    case INCOMING_RAW:
        return judge_raw(fs, n, gen, size, e);
    case INCOMING_INDEX:
        return size > 0 && txn_has(n->file, 0, size);
    case INCOMING_SIDE: /* a temporary name */
    case INCOMING_IGNORED:
    default:
        return 0;
    }
}

/* |V1 without a dtype, which may be set after close. */
static bool is_one_byte(const struct err *e)
{
    return strstr(e->text, "|V1") != NULL;
}

int edit_flush(struct request *r, struct err *e)
{
    struct edit_handle *h = handle_of_file(&r->fi);
    struct generation *gen = NULL;
    struct err ignored = {0};
    bool live = false;
    int rc = 0;

    if (h->node && h->writes && enter_live(r->fs, h->node, &live, &ignored) == 0 &&
        live) {
        disk_generation(r->fs, h->node->target->dir, true, &gen, &ignored);
        rc = edit_judge(r->fs, h->node, gen, e);
        target_leave(h->node->target);
        generation_unref(r->fs, gen, 1);
        if (rc == -ENOTSUP)
            rc = is_one_byte(e) ? 0 : (e->code = EINVAL, -EINVAL);
    }
    edits_lock(r->fs);
    note_flushed(h, true);
    edits_unlock(r->fs);
    if (rc < 0)
        return rc;
    fuse_reply_err(r->req, 0);
    return 0;
}

int edit_fsync(struct request *r, struct err *e)
{
    struct edit_handle *h = handle_of_file(&r->fi);
    bool live = false;
    int rc = h->node ? enter_live(r->fs, h->node, &live, e) : 0;

    if (rc == 0 && live) {
        rc = sync_node(h->node, e);
        target_leave(h->node->target);
    }
    if (rc < 0)
        return rc;
    fuse_reply_err(r->req, 0);
    return 0;
}

/* Room is reserved once the header is known; here only the length can change. */
int edit_fallocate(struct request *r, off_t len, struct err *e)
{
    struct edit_handle *h = handle_of_file(&r->fi);
    uint64_t end = (uint64_t)r->off + (uint64_t)len;
    bool live;
    int rc;

    if (r->flags & ~(unsigned)FALLOC_FL_KEEP_SIZE || !h->node)
        return -EOPNOTSUPP;
    rc = enter_live(r->fs, h->node, &live, e);
    if (rc < 0)
        return rc;
    if (live && !r->flags && end > size_of(h->node))
        rc = edit_cut(h->node, end, e);
    if (live)
        target_leave(h->node->target);
    if (rc < 0)
        return rc;
    fuse_reply_err(r->req, 0);
    return 0;
}

/* ---- open ---- */

/* A file that is opened without O_TRUNC begins with the bytes that the view has. */
static int copy_old(struct request *r, const struct edit_place *p, fuse_ino_t view,
                    struct edit_node *n, struct err *e)
{
    CLEANUP_FREE char *block = malloc(COPY_BLOCK);
    struct handle *h = NULL;
    struct edit_handle to = {.node = n, .fd = n->fd};
    uint64_t at = 0;
    size_t got = 1;
    int rc = block ? permit_open(r, p->gen, e) : err_nomem(e);

    if (rc == 0)
        rc = handle_open(r->fs, view, &h, e);

    while (rc == 0 && got > 0) {
        rc = handle_read(h, at, COPY_BLOCK, block, &got, e);
        if (rc == 0 && got > 0)
            rc = put(&to, block, got, (off_t)at, e);
        at += got;
    }
    handle_close(r->fs, h);
    return rc;
}

/* Bytes of an open file of the disk. */
static int copy_fd(struct edit_node *n, int fd, struct err *e)
{
    CLEANUP_FREE char *block = malloc(COPY_BLOCK);
    struct edit_handle to = {.node = n, .fd = n->fd};
    off_t at = 0;
    ssize_t got;
    int rc = block ? 0 : err_nomem(e);

    while (rc == 0 && (got = pread(fd, block, COPY_BLOCK, at)) != 0) {
        if (got < 0 && errno == EINTR)
            continue;
        rc = got < 0 ? err_set(e, errno, "read: %s", strerror(errno))
                     : put(&to, block, (size_t)got, at, e);
        at += MAX(got, (ssize_t)0);
    }
    return rc;
}

/* Elements of |V1 are of the type that the tensor has. */
static int note_dtype(struct request *r, const struct edit_place *p,
                      struct edit_node *n, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    struct tensor_info t;
    int rc;

    if (!p->gen || strncmp(p->path, "tensors/", 8) != 0)
        return 0;
    rc = a ? catalog_tensor_by_name(r->fs->catalog, p->gen->info.id, p->path + 8, true,
                                    a, &t, e)
           : err_nomem(e);
    return rc == 0 && dtype_bits(t.dtype) == 8
               ? txn_file_note(n->file, "dtype", dtype_name(t.dtype), e)
               : rc;
}

static int begin_with(struct request *r, const struct edit_place *p, fuse_ino_t view,
                      int fd, struct edit_node *n, struct err *e)
{
    int rc = view && p->gen->stale ? -ESTALE : view ? note_dtype(r, p, n, e) : 0;

    if (rc < 0 || (r->fi.flags & O_TRUNC))
        return rc;
    if (view)
        return copy_old(r, p, view, n, e);
    return fd >= 0 ? copy_fd(n, fd, e) : 0;
}

/* Nothing came of it: if that was all, the next one begins with what is there then. */
static void give_up(struct fs *fs, struct target *t)
{
    pthread_rwlock_wrlock(&t->busy);
    if (t->txn && !t->begun && txn_is_empty(t->txn))
        target_settle(fs, t, &(struct err){0});
    pthread_rwlock_unlock(&t->busy);
}

int edit_begin_at(struct request *r, const struct edit_place *p, struct target **t,
                  struct edit_node **n, struct err *e)
{
    struct target *of = target_get(r->fs, p->dir, true);
    int rc = of ? edit_may_write(r, p, e) : err_nomem(e);

    if (rc == 0) {
        pthread_mutex_lock(&of->begin);
        rc = target_enter(r->fs, of, true, e);
        if (rc < 0)
            pthread_mutex_unlock(&of->begin);
    }
    if (rc < 0) {
        target_put(r->fs, of);
        return rc;
    }
    edits_lock(r->fs);
    *n = edit_node_find(of, p->path);
    edits_unlock(r->fs);
    *t = of;
    return 0;
}

int edit_begin(struct request *r, const struct edit_place *p, fuse_ino_t view, int fd,
               struct err *e)
{
    struct edit_node *n;
    struct target *t;
    int rc = edit_begin_at(r, p, &t, &n, e);

    if (rc < 0)
        return rc;
    if (!n) {
        rc = edit_file_new(r, t, p->path, 0644, &n, e);
        if (rc == 0)
            rc = begin_with(r, p, view, fd, n, e);
        if (rc < 0 && n)
            txn_drop(t->txn, n->file, &(struct err){0});
    }
    edits_lock(r->fs);
    if (n && rc < 0)
        edit_node_unlink(r->fs, n);
    else if (n && n->fresh_ns)
        n->fresh_ns = now_ns();
    edits_unlock(r->fs);
    if (rc == 0)
        edit_turn_away(r->fs, r, p->dir->ino, p->path, VERDICT_EDIT);
    target_begun(t);
    edit_node_put(r->fs, n, 1);
    if (rc < 0)
        give_up(r->fs, t);
    target_put(r->fs, t);
    return rc;
}

/* ---- a file of the disk that became one of the transaction while somebody writes it ---- */

static ssize_t read_back(struct edit_node *n, void *dst, size_t len, off_t off,
                         struct err *e)
{
    const struct edit_handle from = {.node = n, .fd = n->fd};

    return n->in ? intake_read(n->in, dst, len, (uint64_t)off, e)
                 : read_spooled(&from, dst, len, off);
}

/* Takes over what was written since it was copied. */
static int copy_again(struct edit_node *n, int fd, struct err *e)
{
    CLEANUP_FREE char *block = malloc(2 * (size_t)COPY_BLOCK);
    struct edit_handle to = {.node = n, .fd = n->fd};
    off_t at = 0;
    int rc = block ? 0 : err_nomem(e);

    while (rc == 0) {
        ssize_t got = pread(fd, block, COPY_BLOCK, at), has;

        if (got < 0)
            return err_set(e, errno, "read: %s", strerror(errno));
        if (got == 0)
            break;
        has = read_back(n, block + COPY_BLOCK, (size_t)got, at, e);
        if (has != got || memcmp(block, block + COPY_BLOCK, (size_t)got) != 0)
            rc = put(&to, block, (size_t)got, at, e);
        at += got;
    }
    return rc == 0 && (uint64_t)at != size_of(n) ? edit_cut(n, (uint64_t)at, e) : rc;
}

/* The file that follows this one of the disk, with a reference; NULL: none does. */
static struct edit_node *follower(struct fs *fs, const struct disk_node *stored)
{
    edits_lock(fs);
    for (struct target *t = fs->edits->targets; t; t = t->next)
        for (struct edit_node *n = t->nodes; n; n = n->next)
            if (n->follows == stored) {
                n->refs++;
                edits_unlock(fs);
                return n;
            }
    edits_unlock(fs);
    return NULL;
}

void edit_stored_closed(struct fs *fs, struct disk_node *stored)
{
    struct edit_node *n = follower(fs, stored);
    struct err e = {0};
    int at = n ? disk_get(fs, stored, &e) : -1, rc = at;
    CLEANUP_FD int fd = at < 0 ? -1 : open(disk_proc(at).path, O_RDONLY | O_CLOEXEC);
    bool live;

    if (at >= 0)
        disk_put(fs, stored);
    if (!n)
        return;
    if (fd >= 0 && enter_live(fs, n, &live, &e) == 0 && live) {
        rc = copy_again(n, fd, &e);
        target_leave(n->target);
    }
    edits_lock(fs);
    n->follows = NULL;
    edits_unlock(fs);
    disk_unpin(fs, stored);
    if (rc < 0) /* what was copied may not be all: it has to be written again */
        last_error_report(&fs->last_error, &e);
    else
        edit_closed(fs, n);
    edit_node_put(fs, n, 1);
}

int edit_receive_copy(struct request *r, const struct edit_place *p, int fd,
                      struct disk_node *stored, struct err *e)
{
    struct edit_node *n;
    struct target *t;
    int rc = edit_begin_at(r, p, &t, &n, e);

    if (rc < 0)
        return rc;
    rc = n ? edit_cut(n, 0, e) : edit_file_new(r, t, p->path, 0644, &n, e);
    if (rc == 0)
        rc = copy_fd(n, fd, e);
    target_begun(t);
    edits_lock(r->fs);
    if (n)
        n->fresh_ns = 0;
    if (rc == 0 && stored && disk_writers(r->fs, stored, 0) > 0)
        n->follows = disk_pin(r->fs, stored->ino);
    edits_unlock(r->fs);
    if (rc == 0)
        edit_closed(r->fs, n);
    edit_node_put(r->fs, n, 1);
    target_put(r->fs, t);
    return rc;
}

static int open_node(struct request *r, struct edit_node *n, struct err *e)
{
    bool live;
    int rc = enter_live(r->fs, n, &live, e);

    if (rc < 0)
        return rc;
    if (!live)
        return writes(r) ? edit_open_published(r, e) : -ESTALE;
    if (r->fi.flags & O_TRUNC)
        rc = edit_cut(n, 0, e);
    if (rc == 0)
        rc = edit_reply_opened(r, n, e);
    target_leave(n->target);
    return rc;
}

/* Readers of a complete file get the view that it becomes. */
static int publish_first(struct request *r, struct edit_node *n, struct err *e)
{
    bool waits;
    int rc;

    edits_lock(r->fs);
    waits = n->path && n->complete && n->handles == 0;
    edits_unlock(r->fs);
    if (!waits || writes(r))
        return 0;
    rc = edit_publish(r->fs, n->target, false, e);
    if (rc == 0 || (rc == -EAGAIN && !is_live(r->fs, n)))
        return -ESTALE;
    *e = (struct err){0};
    return 0; /* it is read as it was written */
}

int edit_open(struct request *r, struct err *e)
{
    struct edit_node *n;
    int rc;

    if (edit_meta_is(r->ino))
        return edit_meta_open(r, e);
    if (!ino_is_edit(r->ino))
        return edit_open_view(r, e);
    n = edit_node_of(r->fs, r->ino);
    if (!n)
        return -ESTALE;
    rc = n->is_dir ? -EISDIR : publish_first(r, n, e);
    if (rc == 0)
        rc = open_node(r, n, e);
    if (rc < 0)
        edit_came_back(r->fs, r);
    edit_node_put(r->fs, n, 1);
    return rc;
}
