/* SPDX-License-Identifier: MIT */
/* fs/write_attr.c - size, times, rights and extended attributes of what is being written. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "fs/attr.h"
#include "fs/node.h"
#include "fs/plain.h"
#include "fs/save.h"
#include "fs/slot.h"
#include "fs/stage_room.h"
#include "fs/staged.h"
#include "fs/write.h"
#include "index/dtype.h"

enum { XATTR_MAX = 256 };

static int set_size(struct fs *fs, struct staged *n, int fd, uint64_t size,
                    struct err *e)
{
    CLEANUP_FD int own_fd = fd < 0 ? staged_open_spool(n, O_RDWR) : -1;
    uint64_t before;
    struct stat st;
    int code = 0;

    if (fd < 0)
        fd = own_fd;
    if (fd < 0 || fstat(fd, &st) < 0)
        return err_set(e, EIO, "%s: cannot be opened", n->name);
    before = n->room;
    if (stage_room_take(fs, n, size, e) < 0)
        return -e->code;
    if (ftruncate(fd, (off_t)size) < 0) {
        err_set(e, errno, "%s: %s", n->name, strerror(errno));
        stage_room_give(fs, n, MAX(before, (uint64_t)st.st_size));
        return -e->code;
    }
    /* Told now rather than in the middle of writing it. */
    if (size > (uint64_t)st.st_size)
        code = stage_room_reserve(fd, FALLOC_FL_KEEP_SIZE, 0, size);
    if (code == ENOSPC || code == EDQUOT || code == EFBIG) {
        err_set(e, code, "%s: %" PRIu64 " bytes: %s", n->name, size, strerror(code));
        if (ftruncate(fd, st.st_size) == 0)
            stage_room_give(fs, n, (uint64_t)st.st_size);
        return -e->code;
    }
    stage_room_give(fs, n, size);
    staged_cut(n, size);
    return 0;
}

static void set_times(struct staged *n, const struct stat *attr, int to_set)
{
    struct timespec t[2];
    CLEANUP_FD int fd = n->kind == STAGED_FILE ? staged_open_spool(n, O_RDONLY) : -1;

    attr_times(attr, to_set, t);
    if (fd >= 0)
        futimens(fd, t);
    else if (to_set & FUSE_SET_ATTR_MTIME)
        n->mtime = attr->st_mtim;
}

static int set_attr(const struct request *r, struct staged *n, int fd,
                    const struct stat *attr, int to_set, struct err *e)
{
    bool owner = to_set & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID);
    bool cut = (to_set & FUSE_SET_ATTR_SIZE) && fuse_req_ctx(r->req)->uid != 0;

    if (to_set & FUSE_SET_ATTR_SIZE) {
        if (n->kind != STAGED_FILE)
            return -EISDIR;
        if (set_size(r->fs, n, fd, (uint64_t)attr->st_size, e) < 0)
            return -e->code;
    }
    if (to_set & FUSE_SET_ATTR_MODE)
        n->mode = attr->st_mode & 07777;
    if (to_set & FUSE_SET_ATTR_UID)
        n->uid = attr->st_uid;
    if (to_set & FUSE_SET_ATTR_GID)
        n->gid = attr->st_gid;
    if (n->kind == STAGED_FILE && (owner || cut))
        n->mode = attr_written_mode(n->mode);
    n->marked |= (to_set & ~FUSE_SET_ATTR_SIZE) != 0;
    set_times(n, attr, to_set);
    clock_gettime(CLOCK_REALTIME, &n->ctime);
    if (n->stage)
        stage_touch(n->stage);
    return 0;
}

/* Directories of a checkpoint are as the source's: programs that copy times go on. */
static bool is_harmless(const struct request *r, int to_set)
{
    const struct node *n;

    if (to_set & FUSE_SET_ATTR_SIZE)
        return false;
    if (ino_is_inside(r->ino))
        return inside_is_dir(ino_kind(r->ino));
    n = node_of_ino(r->fs, r->ino);
    return n && node_is_dir(n);
}

/* Is it the directory of a checkpoint, or in that, and none that is changed as any other? */
static bool is_checkpoints(struct fs *fs, struct node *n)
{
    struct slot *slot = n ? node_slot(fs, n) : NULL;
    bool is = slot;

    if (is && n->kind == NODE_DIR) {
        stages_lock(fs);
        is = !where_is_plain(fs, slot);
        stages_unlock(fs);
    }
    slot_unref(fs, slot, 1);
    return is;
}

/* A file, directory or link of the source that is no checkpoint's, or NULL. */
static const struct node *plain_node(const struct request *r)
{
    struct node *n = ino_is_inside(r->ino) ? NULL : node_of_ino(r->fs, r->ino);
    bool is = is_checkpoints(r->fs, n) || (n && is_checkpoints(r->fs, n->parent));

    return !is && n && n->kind != NODE_FILE_DIR && n->kind != NODE_META &&
                   n->kind != NODE_LATEST
               ? n
               : NULL;
}

/* truncate(2) of what a checkpoint has, as open(2) with O_TRUNC does it. */
static int truncate_stored(struct request *r, const struct stat *attr, int to_set,
                           struct err *e)
{
    struct staged_handle *h = NULL;
    struct stat st;
    int rc;

    r->fi.flags = O_WRONLY | (attr->st_size == 0 ? O_TRUNC : 0);
    rc = write_over(r, &h, e);
    if (rc != 0)
        return rc;
    stages_lock(r->fs);
    rc = set_attr(r, h->node, h->fd, attr, to_set, e);
    staged_attr(h->node, &st);
    stages_unlock(r->fs);
    staged_drop(r->fs, h);
    if (rc == 0)
        fuse_reply_attr(r->req, &st, 0);
    return rc;
}

/* Of what is not staged; the caller answers with the attributes as they are then. */
static int set_other(struct request *r, int fd, const struct stat *attr, int to_set,
                     struct err *e)
{
    const struct node *n = plain_node(r);
    int rc = STAGED_NONE;

    if (n && n->kind == NODE_FILE && fd < 0 && (to_set & FUSE_SET_ATTR_SIZE) &&
        !staged_plain_is_open(r->fs, n->ino))
        rc = truncate_stored(r, attr, to_set,
                             e); /* one that is a checkpoint by itself */
    if (rc != STAGED_NONE)
        return rc;
    if (n || fd >= 0) {
        rc = plain_setattr(r, n, fd, attr, to_set, e);
        return rc < 0 ? rc : STAGED_NONE;
    }
    if (is_harmless(r, to_set))
        return STAGED_NONE;
    if (to_set & FUSE_SET_ATTR_SIZE) {
        rc = truncate_stored(r, attr, to_set, e);
        return rc == STAGED_NONE ? -ESTALE : rc;
    }
    return err_set(e, EROFS, "what is published changes by writing it anew only");
}

/*
 * With the lock: the node, when no publication goes on of its stage. That has taken rights
 * and format as they were, reads the file, or has made a link to it.
 */
static struct staged *settled(struct fs *fs, fuse_ino_t ino)
{
    struct staged *n = staged_of_ino(fs, ino);

    if (!n || !n->stage)
        return n;
    stage_wait(fs, n->stage);
    return staged_of_ino(fs, ino);
}

/* A file that was unlinked has rights and times as long as it is open. */
static bool is_published(const struct staged *n, int to_set)
{
    return !n->stage && n->kind == STAGED_FILE &&
           (!n->removed || (to_set & FUSE_SET_ATTR_SIZE));
}

int write_setattr(struct request *r, const struct stat *attr, int to_set, struct err *e)
{
    struct staged_handle *h = staged_handle_of(&r->fi);
    struct staged *n;
    struct stat st;
    int rc;

    stages_lock(r->fs);
    n = h ? h->node : settled(r->fs, r->ino);
    if (!h && n && is_published(n, to_set)) {
        stages_unlock(r->fs);
        return -ESTALE; /* the name is another file's now */
    }
    if (!n) {
        stages_unlock(r->fs);
        return set_other(r, h ? h->fd : -1, attr, to_set, e);
    }
    rc = set_attr(r, n, h ? h->fd : -1, attr, to_set, e);
    staged_attr(n, &st);
    stages_unlock(r->fs);
    if (rc == 0)
        fuse_reply_attr(r->req, &st, 0);
    return rc;
}

static int set_dtype(struct staged *n, const char *value, struct err *e)
{
    char *copy;

    if (dtype_from_name(value) == DTYPE_NONE) {
        err_set(e, EINVAL, "user.unshard.dtype: %s is no dtype", value);
        return err_hint(e, "names are those of safetensors: F8_E4M3, BF16, ...");
    }
    copy = strdup(value);
    if (!copy)
        return err_nomem(e);
    free(n->dtype);
    n->dtype = copy;
    stage_touch(n->stage);
    return 0;
}

static int set_save(struct stage *s, const char *value, struct err *e)
{
    struct save_format f;
    char *copy;

    if (save_format_parse(value, &f, e) < 0)
        return -e->code;
    if (s->slot) {
        err_set(e, EINVAL, "%s: a checkpoint that is there keeps its format", s->path);
        return err_hint(e, "save to a new directory");
    }
    copy = strdup(value);
    if (!copy)
        return err_nomem(e);
    free(s->format);
    s->format = copy;
    return 0;
}

/* Attributes of ours that cp -a brings along say what the bytes say already. */
static bool is_ours(const char *name)
{
    return strncmp(name, "user.unshard.", 13) == 0;
}

static int set_staged(struct staged *n, const char *name, const char *value,
                      struct err *e)
{
    if (strcmp(name, "user.unshard.dtype") == 0 && n->kind == STAGED_FILE)
        return set_dtype(n, value, e);
    if (strcmp(name, "user.unshard.save") == 0 && n->kind == STAGED_DIR)
        return set_save(n->stage, value, e);
    return is_ours(name) ? 0 : -EOPNOTSUPP;
}

int write_setxattr(struct request *r, const char *value, struct err *e)
{
    char text[XATTR_MAX];
    struct staged *n;
    int rc;

    if (r->size >= sizeof text)
        return -E2BIG;
    memcpy(text, value, r->size);
    text[r->size] = '\0';
    if (strcmp(r->name, SAVE_ATTRIBUTE) == 0 && r->ino == FUSE_ROOT_ID) {
        rc = save_all(r->fs, e);
        /* Other codes are also the kernel's own, of a mount that has nothing to save. */
        if (rc < 0 && rc != -EINVAL && rc != -EBUSY && rc != -ENOSPC && rc != -EDQUOT &&
            rc != -EEXIST)
            rc = -EIO;
        if (rc < 0)
            e->code = -rc;
    } else {
        stages_lock(r->fs);
        n = settled(r->fs, r->ino);
        if (!n)
            rc = is_ours(r->name) ? -EROFS : -EOPNOTSUPP;
        else
            rc = n->stage ? set_staged(n, r->name, text, e) : -ESTALE;
        stages_unlock(r->fs);
    }
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}
