/* SPDX-License-Identifier: MIT */
/* fs/staged_handle.c - open files of a spool, and of the source itself. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fs/stage_room.h"
#include "fs/staged.h"

/* That which is not published before its writers have closed it, or NULL. */
static struct stage *stage_of(struct fs *fs, const struct staged *n)
{
    return n->owes ? stage_numbered(fs, n->owes) : n->stage;
}

/*
 * The last close(2) of a file comes back before its release is sent, and what was done then
 * came after it. One of many who have the file open (a child that ends) counts only if it
 * was written to.
 */
void staged_closed(struct staged_handle *h)
{
    struct staged *n = h->node;

    if (!h->changed)
        return;
    h->changed = false;
    if (!n->stage)
        return;
    n->changing--;
    n->order = ++n->stage->closes;
}

void staged_changed(struct staged_handle *h)
{
    if (h->changed)
        return;
    h->changed = true;
    h->node->changing++;
}

static void end_use(struct fs *fs, struct staged_handle *h, struct staged *n, int lost)
{
    struct stage *s;

    stages_lock(fs);
    s = h->writes ? stage_of(fs, n) : NULL;
    if (lost)
        staged_lose(n, lost, 0, UINT64_MAX);
    else if (h->writes && h->killed && !n->came->lost && staged_may_lack(n))
        staged_lose(n, CAME_WRITER_KILLED, n->came->prefix, UINT64_MAX);
    if (--n->handles == 0 && !n->stage)
        stage_room_give(fs, n, 0);
    if (s) {
        n->writers--;
        s->writers--;
        staged_closed(h); /* of what a mapping brought after its close */
        stage_touch(s);
        stage_wake(fs); /* who waits for the last writer */
    }
    staged_unref(fs, n, 1);
    stages_unlock(fs);
}

/* Of a file of the source, of so many bytes: it may have got a name in a stage since. */
static void end_plain(struct fs *fs, struct staged_handle *h, uint64_t size, int lost)
{
    struct came *c = h->came;

    if (c) {
        stages_lock(fs);
        if (lost)
            came_lose(c, lost, 0, UINT64_MAX, size);
        else if (h->killed && !c->lost && c->prefix < size)
            came_lose(c, CAME_WRITER_KILLED, c->prefix, UINT64_MAX, size);
        c->writers--;
        came_put(c);
        stages_unlock(fs);
    }
    paging_leave(fs, h->paging);
}

bool staged_lacks(const struct staged_handle *h)
{
    struct stat st;

    if (h->node)
        return staged_may_lack(h->node);
    return h->came && fstat(h->fd, &st) == 0 && h->came->prefix < (uint64_t)st.st_size;
}

void staged_names_free(struct staged_name *names)
{
    for (size_t i = 0; names && names[i].name; i++)
        free(names[i].name);
    free(names);
}

static void handle_free(struct fs *fs, struct opened *o)
{
    struct staged_handle *h = container_of(o, struct staged_handle, opened);
    struct stat st = {0};
    int lost = 0;

    if (h->came && fstat(h->fd, &st) < 0)
        st.st_size = 0;
    /* Before it counts as closed; a disk across a network may tell only now. */
    if (h->fd >= 0 && close(h->fd) < 0 && h->writes && errno != EINTR)
        lost = errno;
    if (h->node)
        end_use(fs, h, h->node, lost);
    else
        end_plain(fs, h, (uint64_t)st.st_size, lost);
    staged_names_free(h->name);
    free(h);
}

/* One that is closed, or NULL. */
static struct opened *find_closed(struct fs *fs)
{
    struct opened_list *l = &fs->opened;
    struct opened *found = NULL;

    stages_lock(fs);
    pthread_mutex_lock(&l->lock);
    for (struct ring *x = l->ring.next; x != &l->ring && !found; x = x->next) {
        struct opened *o = container_of(x, struct opened, ring);
        const struct staged_handle *h = container_of(o, struct staged_handle, opened);

        if (o->staged && h->writes && !h->changed)
            found = o;
    }
    pthread_mutex_unlock(&l->lock);
    stages_unlock(fs);
    return found;
}

void staged_end_closed(struct fs *fs)
{
    struct opened *o;

    while ((o = find_closed(fs)))
        opened_end(fs, o);
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

struct staged_handle *staged_handle_new(struct staged *n)
{
    struct staged_handle *h = calloc(1, sizeof *h);

    if (!h)
        return NULL;
    h->opened.free = handle_free;
    h->opened.staged = true;
    h->fd = -1;
    h->node = n;
    h->paging = &n->paging;
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
    h = staged_handle_new(n);
    if (!h) {
        close(fd);
        return err_nomem(e);
    }
    h->fd = fd;
    h->writes = writes;
    if (writes) {
        /* Of who writes it all anew nobody knows when that was: he has it open still. */
        if (!(flags & O_TRUNC) && n->since == STAGED_ALL_NEW && n->changing == 0)
            n->since = n->order;
        n->writers++;
        n->stage->writers++;
        staged_changed(h);
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
    paging_note(h->paging, &r->fi);
    n = pread(h->fd, data, r->size, r->off);
    if (n < 0)
        return -errno;
    fuse_reply_buf(r->req, data, (size_t)n);
    return 0;
}
