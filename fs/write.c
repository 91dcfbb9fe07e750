/* SPDX-License-Identifier: MIT */
/* fs/write.c - bytes that are written: they go to a stage, never to the source. */
#include "fs/write.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/pool.h"
#include "fs/around.h"
#include "fs/attr.h"
#include "fs/handle.h"
#include "fs/node.h"
#include "fs/plain.h"
#include "fs/save.h"
#include "fs/slot.h"
#include "fs/stage_room.h"
#include "fs/staged.h"
#include "save/incoming.h"

/* Before bytes are put there, up to `end`; *before is what the file had. */
static int take_room(const struct request *r, const struct staged_handle *h,
                     uint64_t end, uint64_t *before, struct err *e)
{
    int rc;

    *before = 0;
    if (!h->node)
        return 0;
    stages_lock(r->fs);
    *before = h->node->room;
    rc = stage_room_take(r->fs, h->node, end, e);
    stages_unlock(r->fs);
    return rc;
}

/* They were not put there, or not all. */
static void give_room(const struct request *r, const struct staged_handle *h,
                      uint64_t end, uint64_t before)
{
    struct stat st;

    if (!h->node || fstat(h->fd, &st) < 0)
        return;
    stages_lock(r->fs);
    if (h->node->room == end) /* else another writer has more of it by now */
        stage_room_give(r->fs, h->node, MAX(before, (uint64_t)st.st_size));
    stages_unlock(r->fs);
}

/*
 * Will it be linked as it is, if nothing else comes? Then its fsync would wait for all of it,
 * and it is sent to the disk while it comes. What is read for shards is gone before the disk
 * need have it. Lock held.
 */
static bool may_stand(const struct fs *fs, const struct staged *n,
                      const struct incoming_header *header)
{
    const struct stage *s = n->stage;
    struct save_format format;
    struct err ignored = {0};
    char path[PATH_MAX];
    enum role role;

    return s && !s->slot && !fs->store->remote && header->pt &&
           staged_path(n, path, sizeof path) == 0 && incoming_is_whole(path, &role) &&
           role == ROLE_MODEL &&
           save_format_parse(s->format ? s->format : fs->options.save, &format,
                             &ignored) == 0 &&
           header->size <= save_format_keeps(&format);
}

/* Is the header whole by now? Then it is judged, and room is reserved for all of it. */
static int judge(struct request *r, struct staged_handle *h, struct err *e)
{
    struct incoming_header header;
    uint64_t before;
    int rc = incoming_judge(h->fd, h->node->came->prefix, &header, e);

    if (rc <= 0)
        return rc;
    h->node->checked = true;
    rc = take_room(r, h, header.size, &before, e);
    stages_lock(r->fs);
    h->node->stands = may_stand(r->fs, h->node, &header);
    stages_unlock(r->fs);
    if (rc < 0)
        return rc;
    rc = stage_room_reserve(h->fd, FALLOC_FL_KEEP_SIZE, 0, header.size);
    if (rc == ENOSPC || rc == EDQUOT || rc == EFBIG) {
        err_set(e, rc, "%s: %" PRIu64 " bytes: %s", h->node->name, header.size,
                strerror(rc));
        give_room(r, h, header.size, before);
        return -e->code;
    }
    return 0;
}

static bool is_judged(const struct staged *n)
{
    char path[PATH_MAX];

    return n->stage && !n->checked && staged_path(n, path, sizeof path) == 0 &&
           incoming_kind(path) == INCOMING_SAFETENSORS;
}

/* ---- to the disk while it still comes ---- */

enum { TO_DISK_STEP = 8 << 20 };

struct to_disk {
    int fd; /* owned */
    off_t off, len;
};

/* pool_later_fn. A hint: some file systems do not know it, and fsync tells what fails. */
static void run_to_disk(void *user, bool run)
{
    struct to_disk *t = user;

    if (run)
        (void)sync_file_range(t->fd, t->off, t->len, SYNC_FILE_RANGE_WRITE);
    close(t->fd);
    free(t);
}

static bool send_to_disk(const struct request *r, int fd, uint64_t off, uint64_t end)
{
    struct to_disk *t = malloc(sizeof *t);

    if (!t)
        return false;
    *t = (struct to_disk){.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0),
                          .off = (off_t)off,
                          .len = (off_t)(end - off)};
    if (t->fd >= 0 && pool_later(r->fs->reading.pool, run_to_disk, t))
        return true;
    if (t->fd >= 0)
        close(t->fd);
    free(t);
    return false;
}

/* What may stand as it came. Lock held. */
static void begin_to_disk(const struct request *r, const struct staged_handle *h)
{
    struct staged *n = h->node;
    uint64_t prefix = n->came->prefix;

    if (n->stands && prefix >= n->to_disk + TO_DISK_STEP &&
        send_to_disk(r, h->fd, n->to_disk, prefix))
        n->to_disk = prefix;
}

static const char *name_shown(const struct staged_handle *h)
{
    return h->node ? h->node->name : "a file of the source";
}

/* Set-uid bits go with what others than root write. */
static int written(const struct request *r, const struct staged_handle *h,
                   struct err *e)
{
    if (!h->node)
        return plain_written(r, h->fd) < 0
                   ? err_set(e, errno, "%s: %s", name_shown(h), strerror(errno))
                   : 0;
    stages_lock(r->fs);
    if (fuse_req_ctx(r->req)->uid != 0)
        h->node->mode = attr_written_mode(h->node->mode);
    stages_unlock(r->fs);
    return 0;
}

static struct came *came_of(const struct staged_handle *h)
{
    return h->node ? h->node->came : h->came;
}

/*
 * Who writes is told, but may not look: a program that dies of it closes the file all the
 * same, and of a mapping's pages nobody is told. Its length may be right, and zeros be where
 * the bytes should: it is not published so.
 */
static int refused(const struct request *r, const struct staged_handle *h,
                   uint64_t from, struct err *e)
{
    stages_lock(r->fs);
    came_lose(came_of(h), e->code, from, (uint64_t)r->off + r->size, 0);
    stages_unlock(r->fs);
    return -e->code;
}

static ssize_t put_at(const struct request *r, const struct staged_handle *h,
                      const char *data, size_t size, off_t off)
{
    const struct iovec v = {(void *)(uintptr_t)data, size};

    return r->flags ? pwritev2(h->fd, &v, 1, off, (int)r->flags)
                    : pwrite(h->fd, data, size, off);
}

static ssize_t put(const struct request *r, const struct staged_handle *h,
                   const char *data, size_t size, off_t off)
{
    ssize_t n;

    if (r->fi.writepage)
        return around_put_pages(r->fs, h, data, size, off);
    if (h->node)
        return put_at(r, h, data, size, off);
    stages_plain_begin(r->fs);
    n = put_at(r, h, data, size, off);
    stages_plain_end(r->fs);
    return n;
}

/* All of it, or -errno. */
static int put_all(struct request *r, struct staged_handle *h, const char *data,
                   struct err *e)
{
    uint64_t end = (uint64_t)r->off + r->size, before;
    size_t done = 0;
    bool look;

    if (take_room(r, h, end, &before, e) < 0)
        return refused(r, h, (uint64_t)r->off, e);
    while (done < r->size) {
        ssize_t n = put(r, h, data + done, r->size - done, r->off + (off_t)done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            err_set(e, errno, "%s: %s", name_shown(h), strerror(errno));
            give_room(r, h, end, before);
            return refused(r, h, (uint64_t)r->off + done, e);
        }
        done += (size_t)n;
    }
    if (written(r, h, e) < 0)
        return -e->code;
    stages_lock(r->fs);
    came_wrote(came_of(h), (uint64_t)r->off, (uint64_t)r->off + done);
    if (!h->node) {
        stages_unlock(r->fs);
        return 0;
    }
    if (h->node->stage) {
        staged_changed(h);
        stage_touch(h->node->stage);
    }
    begin_to_disk(r, h);
    /* Pages of a mapping come when the kernel likes: half a header is none that is wrong. */
    look = !r->fi.writepage && is_judged(h->node);
    stages_unlock(r->fs);
    if (look && judge(r, h, e) < 0)
        return err_wrap(e, "%s", h->node->name);
    return 0;
}

/*
 * After a failed fsync the kernel holds what it could not write for written, and the next
 * fsync says nothing: the file must not be published until it is written anew.
 */
static int sync_written(const struct request *r, const struct staged_handle *h,
                        int (*sync)(int fd), struct err *e)
{
    uint64_t size = UINT64_MAX;
    struct stat st;

    if (sync(h->fd) == 0)
        return 0;
    err_set(e, errno, "%s: %s", name_shown(h), strerror(errno));
    if (fstat(h->fd, &st) == 0)
        size = (uint64_t)st.st_size;
    stages_lock(r->fs);
    came_lose(came_of(h), e->code, 0, UINT64_MAX, size);
    stages_unlock(r->fs);
    return -e->code;
}

/* Of a file that is open for direct I/O the kernel leaves it to us. */
static int sync_as_opened(const struct request *r, const struct staged_handle *h,
                          struct err *e)
{
    int flags = r->fi.flags & O_SYNC; /* O_DSYNC is a part of it */

    return flags ? sync_written(r, h, flags == O_SYNC ? fsync : fdatasync, e) : 0;
}

int write_bytes(struct request *r, const char *data, struct err *e)
{
    struct staged_handle *h = staged_handle_of(&r->fi);
    struct around *around;
    int rc;

    if (!h || h->fd < 0)
        return -EROFS;
    if (r->fi.writepage) { /* of a mapping */
        rc = put_all(r, h, data, e);
        if (rc == 0)
            fuse_reply_write(r->req, r->size);
        return rc;
    }
    if (around_begin(r, h, &around, e) < 0)
        return refused(r, h, (uint64_t)r->off, e);
    rc = put_all(r, h, data, e);
    if (rc == 0)
        rc = sync_as_opened(r, h, e);
    if (rc < 0)
        around_fail(around);
    else
        around_end(around, r, r->size);
    return rc;
}

/* 0, or errno. */
static int reserve(const struct request *r, const struct staged_handle *h, off_t len)
{
    int code;

    if (!h->node)
        stages_plain_begin(r->fs);
    code = stage_room_reserve(h->fd, (int)r->flags, (uint64_t)r->off, (uint64_t)len);
    if (!h->node)
        stages_plain_end(r->fs);
    return code;
}

int write_fallocate(struct request *r, off_t len, struct err *e)
{
    struct staged_handle *h = staged_handle_of(&r->fi);
    uint64_t end = (uint64_t)r->off + (uint64_t)len, before;
    int code;

    if (!h || h->fd < 0)
        return -EROFS;
    if (r->flags & ~(unsigned)FALLOC_FL_KEEP_SIZE)
        return -EOPNOTSUPP;
    if (take_room(r, h, end, &before, e) < 0)
        return -e->code;
    code = reserve(r, h, len);
    if (code) {
        err_set(e, code, "%s: %s", name_shown(h), strerror(code));
        give_room(r, h, end, before);
        return -e->code;
    }
    if (h->node && !r->flags) {
        stages_lock(r->fs);
        h->node->came->copied = false; /* it may be longer now */
        stages_unlock(r->fs);
    }
    if (written(r, h, e) < 0)
        return -e->code;
    fuse_reply_err(r->req, 0);
    return 0;
}

/* Of a file that is open for reading: others may have written it, and closed it since. */
static int sync_read(const struct request *r, struct err *e)
{
    struct handle *h = handle_of(&r->fi);
    int rc;

    if (!r->fs->stages || !h->side)
        return 0;
    opened_get(&h->opened);
    rc = side_sync(h->side, e);
    opened_put(r->fs, &h->opened);
    return rc;
}

int write_fsync(struct request *r, struct err *e)
{
    struct staged_handle *h = staged_handle_of(&r->fi);

    if (h && h->fd >= 0 && sync_written(r, h, fsync, e) < 0)
        return -e->code;
    if (!h && sync_read(r, e) < 0)
        return -e->code;
    fuse_reply_err(r->req, 0);
    return 0;
}

int write_fsyncdir(struct request *r, struct err *e)
{
    struct node *n = ino_is_staged(r->ino) || ino_is_inside(r->ino)
                         ? NULL
                         : node_of_ino(r->fs, r->ino);
    struct slot *slot = NULL;
    struct staged *dir;
    struct stage *s;
    int rc = 0;

    if (!ino_is_staged(r->ino))
        slot = n ? node_slot(r->fs, n) : slot_of_ino(r->fs, r->ino);
    stages_lock(r->fs);
    dir = staged_dir_of(r->fs, r->ino, slot);
    s = dir ? dir->stage : NULL;
    if (s && stage_wait(r->fs, s))
        rc = save_publish(r->fs, s, e);
    stages_unlock(r->fs);
    slot_unref(r->fs, slot, 1);
    if (rc == 0 && n && n->kind == NODE_DIR)
        rc = plain_fsyncdir(r->fs, n, e);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}
