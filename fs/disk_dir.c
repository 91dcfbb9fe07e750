/* SPDX-License-Identifier: MIT */
/* fs/disk_dir.c - listing directories of the source in a mount for writing. */
#include "fs/disk_ops.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "base/buf.h"
#include "base/vec.h"
#include "fs/attr.h"
#include "fs/dir_page.h"
#include "fs/disk_view.h"
#include "save/publish.h"

/*
 * The names as of opendir or rewinddir, in the order of the disk: positions stay what they
 * are while names come and go. Entries are packed: struct name, then its text.
 */
struct name {
    uint64_t ino;
    uint32_t type; /* S_IFMT bits, or 0 */
    uint32_t size; /* of the text with its end */
};

struct disk_list {
    struct opened opened;
    int fd;
    pthread_mutex_t lock;
    struct buf names; /* guarded by lock */
    size_t *at;       /* where each is */
    size_t count, cap;
};

static struct disk_list *list_of(const struct fuse_file_info *fi)
{
    struct opened *o = (struct opened *)(uintptr_t)fi->fh;

    return container_of(o, struct disk_list, opened);
}

static void list_free(struct fs *fs, struct opened *o)
{
    struct disk_list *l = container_of(o, struct disk_list, opened);

    (void)fs;
    close(l->fd);
    buf_release(&l->names);
    free(l->at);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static int add(struct disk_list *l, const char *text, uint64_t ino, mode_t type,
               struct err *e)
{
    struct name n = {.ino = ino, .type = type, .size = (uint32_t)strlen(text) + 1};

    if (!VEC_ROOM(l->at, l->count, l->cap))
        return err_nomem(e);
    l->at[l->count++] = l->names.len;
    buf_add(&l->names, &n, sizeof n);
    buf_add(&l->names, text, n.size);
    return buf_failed(&l->names) < 0 ? err_nomem(e) : 0;
}

/* `views=` has the views listed, behind the names of the disk. */
static int add_views(struct request *r, struct disk_node *dir, struct disk_list *l,
                     struct err *e)
{
    const struct disk_view *view;
    struct generation *gen = NULL;
    int rc =
        r->fs->options.views ? disk_generation(r->fs, dir, true, &gen, e) : -ENOENT;

    if (rc < 0)
        return rc == -ENOENT ? 0 : rc;
    for (size_t i = 0; rc == 0 && (view = disk_view_at(i)); i++) {
        struct stat st;

        if (!disk_view_listed(r->fs, view) ||
            fstatat(l->fd, view->name, &st, AT_SYMLINK_NOFOLLOW) == 0)
            continue;
        rc = disk_has_view(r->fs, gen, view, e);
        if (rc > 0)
            rc = add(l, view->name, generation_ino(gen, view->kind, 0),
                     view->is_dir ? S_IFDIR : S_IFREG, e);
    }
    generation_unref(r->fs, gen, 1);
    return rc;
}

static int read_names(const struct fs *fs, const struct disk_node *at,
                      struct disk_list *l, struct err *e)
{
    int fd = fcntl(l->fd, F_DUPFD_CLOEXEC, 0), rc = 0;
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    const struct dirent *x;

    if (!dir) {
        rc = err_set(e, errno, "list: %s", strerror(errno));
        if (fd >= 0)
            close(fd);
        return rc;
    }
    rewinddir(dir);
    while (rc == 0 && (errno = 0, x = readdir(dir)))
        if (!publish_is_staging(x->d_name))
            rc = add(l, x->d_name, disk_number(fs, at->dev, x->d_ino),
                     DTTOIF(x->d_type), e);
    if (rc == 0 && errno)
        rc = err_set(e, errno, "list: %s", strerror(errno));
    closedir(dir);
    return rc;
}

static int look(struct request *r, struct disk_list *l, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    int rc = disk_ref(r->fs, r->ino, &dir, e);

    l->names.len = 0;
    l->count = 0;
    if (rc == 0)
        rc = read_names(r->fs, dir.node, l, e);
    return rc == 0 ? add_views(r, dir.node, l, e) : rc;
}

static int open_dir(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref ref = {0};
    CLEANUP(as_server) struct acting acting = {0};
    int rc = disk_ref(r->fs, r->ino, &ref, e), fd;

    if (rc == 0)
        rc = as_caller(r, &acting, e);
    if (rc < 0)
        return rc;
    /* Not "." in it: that needs the right to search. */
    fd = disk_openat(r->fs, AT_FDCWD, disk_proc(ref.fd).path,
                     O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    return fd < 0 ? err_set(e, errno, "open a directory: %s", strerror(errno)) : fd;
}

int disk_opendir(struct request *r, struct err *e)
{
    int fd = open_dir(r, e);
    struct disk_list *l = fd < 0 ? NULL : calloc(1, sizeof *l);

    if (fd < 0)
        return fd;
    if (!l) {
        close(fd);
        return err_nomem(e);
    }
    l->fd = fd;
    pthread_mutex_init(&l->lock, NULL);
    l->opened.free = list_free;
    l->opened.kind = OPENED_LIST;
    opened_add(&r->fs->opened, &l->opened);
    r->fi.fh = (uintptr_t)&l->opened;
    if (fuse_reply_open(r->req, &r->fi) < 0)
        opened_end(r->fs, &l->opened);
    return 0;
}

static void put_names(const struct disk_list *l, struct dir_page *page, off_t from)
{
    for (size_t i = (size_t)from; i < l->count; i++) {
        struct fuse_entry_param entry = {0};
        const char *text = l->names.data + l->at[i] + sizeof(struct name);
        struct name n;

        memcpy(&n, l->names.data + l->at[i], sizeof n);
        if (!dir_page_has_room(page, text))
            return;
        entry.attr.st_ino = n.ino;
        entry.attr.st_mode = n.type;
        dir_page_put(page, text, &entry, (off_t)i + 1);
    }
}

static int fill(struct request *r, struct disk_list *l, struct dir_page *page,
                struct err *e)
{
    int rc = r->off == 0 ? look(r, l, e) : 0;

    if (rc == 0)
        rc = dir_page_init(page, r->size, r->off, false, e);
    if (rc == 0)
        put_names(l, page, r->off);
    return rc;
}

/* Once it is answered, the kernel may release the handle: nothing of it is touched then. */
int disk_readdir(struct request *r, struct err *e)
{
    struct disk_list *l = list_of(&r->fi);
    struct dir_page page;
    int rc;

    if (r->off < 0)
        return -EINVAL;
    pthread_mutex_lock(&l->lock);
    rc = fill(r, l, &page, e);
    pthread_mutex_unlock(&l->lock);
    if (rc < 0)
        return rc;
    fuse_reply_buf(r->req, page.data, page.used);
    dir_page_free(&page);
    return 0;
}

int disk_fsyncdir(struct request *r, bool data, struct err *e)
{
    const struct disk_list *l = list_of(&r->fi);

    if ((data ? fdatasync(l->fd) : fsync(l->fd)) < 0)
        return err_set(e, errno, "fsync of a directory: %s", strerror(errno));
    fuse_reply_err(r->req, 0);
    return 0;
}
