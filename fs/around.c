/* SPDX-License-Identifier: MIT */
/* fs/around.c - writes that go around the kernel's pages, beside mappings of the same file. */
#include "fs/around.h"

#include <errno.h>
#include <fcntl.h>
#include <search.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/thread.h"
#include "fs/request.h"
#include "fs/stage_priv.h"
#include "fs/staged.h"

/* A file of the source itself. */
struct plain_paging {
    struct paging paging;
    uint64_t dev, inode;
    unsigned refs;
    fuse_ino_t *inos; /* by which the kernel knows it, or knew it */
    size_t count;
};

static int by_file(const void *a, const void *b)
{
    const struct plain_paging *x = a, *y = b;
    int by_dev = (x->dev > y->dev) - (x->dev < y->dev);

    return by_dev ? by_dev : (x->inode > y->inode) - (x->inode < y->inode);
}

static void plain_free(struct plain_paging *p)
{
    if (p)
        free(p->inos);
    free(p);
}

/* With the lock. */
static bool know(struct plain_paging *p, fuse_ino_t ino)
{
    fuse_ino_t *inos;

    for (size_t i = 0; i < p->count; i++)
        if (p->inos[i] == ino)
            return true;
    inos = reallocarray(p->inos, p->count + 1, sizeof *inos);
    if (!inos)
        return false;
    p->inos = inos;
    p->inos[p->count++] = ino;
    return true;
}

/* With the lock. */
static struct plain_paging *find_or_add(struct stages *t, struct plain_paging *made,
                                        fuse_ino_t ino)
{
    struct plain_paging *p;
    void *found = tsearch(made, &t->plain, by_file);

    if (!found)
        return NULL;
    p = *(struct plain_paging **)found;
    if (know(p, ino)) {
        p->refs++;
        return p;
    }
    if (p == made)
        tdelete(made, &t->plain, by_file);
    return NULL;
}

struct paging *paging_join(struct fs *fs, uint64_t dev, uint64_t inode, fuse_ino_t ino)
{
    struct plain_paging *made = calloc(1, sizeof *made), *p;

    if (!made)
        return NULL;
    made->dev = dev;
    made->inode = inode;
    stages_lock(fs);
    p = find_or_add(fs->stages, made, ino);
    stages_unlock(fs);
    if (p != made)
        plain_free(made);
    return p ? &p->paging : NULL;
}

void paging_leave(struct fs *fs, struct paging *paging)
{
    struct plain_paging *p;

    if (!paging)
        return;
    p = container_of(paging, struct plain_paging, paging);
    stages_lock(fs);
    if (--p->refs == 0) {
        tdelete(p, &fs->stages->plain, by_file);
        came_put(p->paging.came);
    } else {
        p = NULL;
    }
    stages_unlock(fs);
    plain_free(p);
}

/* With the lock. */
static struct came *writes(struct paging *p, uint64_t size, bool cut)
{
    struct came *c = p->came ? p->came : (p->came = came_new());

    if (!c)
        return NULL;
    if (c->writers++ == 0 && c->refs == 1) { /* and in no stage: what it has, it has */
        c->prefix = size;
        c->lost = 0;
    } else if (cut) {
        came_cut(c, size);
    }
    return came_get(c);
}

struct came *paging_writes(struct fs *fs, struct paging *p, uint64_t size, bool cut)
{
    struct came *c;

    stages_lock(fs);
    c = writes(p, size, cut);
    stages_unlock(fs);
    return c;
}

struct came *paging_came(struct fs *fs, uint64_t dev, uint64_t inode)
{
    const struct plain_paging key = {.dev = dev, .inode = inode};
    void *found = tfind(&key, &fs->stages->plain, by_file);

    return found ? (*(struct plain_paging **)found)->paging.came : NULL;
}

void paging_cut(struct fs *fs, uint64_t dev, uint64_t inode, uint64_t size)
{
    struct came *c;

    stages_lock(fs);
    c = paging_came(fs, dev, inode);
    if (c)
        came_cut(c, size);
    stages_unlock(fs);
}

/* A write(2) that is under way. */
struct around {
    struct around *next; /* of the file: by the lock of stages */
    struct around *then; /* of those whose pages are to be dropped */
    struct fs *fs;
    fuse_req_t req;
    struct staged_handle *h; /* a reference, while it is among those */
    uint64_t from, to, turn;
    size_t done;  /* bytes that are there */
    bool appends; /* at the end; `to` may be farther */
};

/* Pages that are being put, on the stack of who does. */
struct pages_put {
    struct pages_put *next;
    uint64_t turn; /* writes of later turns were not heeded */
};

/* With the lock. */
static bool is_before(const struct paging *paging, uint64_t turn)
{
    const struct pages_put *p = paging->pages;

    while (p && p->turn >= turn)
        p = p->next;
    return p != NULL;
}

/* With the lock: is none on its way that the kernel sent by this number? */
static bool is_alone(const struct paging *p, const struct staged_handle *h)
{
    const struct around *a = p->around;

    while (a && (a->done > 0 || a->h->ino != h->ino))
        a = a->next;
    return a == NULL;
}

/*
 * With the lock: does the file end elsewhere than the kernel, which appends at `off`, believes?
 * It may have sent a long write in parts, at once and in any order: what ends where its own
 * writes do, or while one is under way, says nothing of others.
 */
static bool is_apart(const struct paging *p, const struct staged_handle *h,
                     uint64_t off, uint64_t size)
{
    bool known = p->ino == h->ino;

    if (size == off)
        return false;
    if (known && p->apart)
        return true;
    return size > off ? size > (known ? p->end : off)
                      : known && off == p->end && is_alone(p, h);
}

/* With the lock. Others may have appended too, in the source or by another mount. */
static bool find_end(struct request *r, const struct staged_handle *h)
{
    struct paging *p = h->paging;
    uint64_t off = (uint64_t)r->off, size;
    struct stat st;
    bool fits;

    p->waits++;
    while (p->appends) /* short, too */
        pthread_cond_wait(&r->fs->stages->wake, &r->fs->stages->lock);
    p->waits--;
    if (fstat(h->fd, &st) < 0)
        return false;
    size = (uint64_t)st.st_size;
    fits = size == off && is_alone(p, h);
    p->apart = is_apart(p, h, off, size);
    if (p->ino != h->ino || fits)
        p->end = off;
    p->ino = h->ino;
    p->end = MAX(p->end, off + r->size);
    p->appends = p->apart || fits;
    if (p->appends) {
        r->off = st.st_size;
        r->flags = RWF_APPEND;
    }
    return p->appends;
}

int around_begin(struct request *r, struct staged_handle *h, struct around **out,
                 struct err *e)
{
    struct paging *p = h->paging;
    struct around *a;
    bool appends;

    *out = NULL;
    a = calloc(1, sizeof *a);
    if (!a)
        return err_nomem(e);
    stages_lock(r->fs);
    appends = (r->fi.flags & O_APPEND) && find_end(r, h);
    *a = (struct around){.fs = r->fs,
                         .req = r->req,
                         .h = h,
                         .from = (uint64_t)r->off,
                         .to = (uint64_t)r->off + r->size,
                         .appends = appends};
    a->turn = ++p->turn;
    a->next = p->around;
    p->around = a;
    while (is_before(p, a->turn)) /* they are on their way to the file, and short */
        pthread_cond_wait(&r->fs->stages->wake, &r->fs->stages->lock);
    stages_unlock(r->fs);
    *out = a;
    return 0;
}

/* With the lock. */
static void leave(struct around *a)
{
    struct around **p = &a->h->paging->around;

    while (*p && *p != a)
        p = &(*p)->next;
    if (*p)
        *p = a->next;
}

/* With the lock: what came to the end is there, or is not to come. */
static void settle_end(const struct around *a)
{
    if (!a->appends)
        return;
    a->h->paging->appends = false;
    if (a->h->paging->waits > 0)
        stage_wake(a->fs);
}

void around_fail(struct around *a)
{
    if (!a)
        return;
    stages_lock(a->fs);
    settle_end(a);
    leave(a);
    stages_unlock(a->fs);
    free(a);
}

static void drop_pages(const struct around *a, fuse_ino_t ino)
{
    off_t len = a->appends ? 0 /* all behind it */ : (off_t)(a->to - a->from);

    if (ino)
        fuse_lowlevel_notify_inval_inode(a->fs->session, ino, (off_t)a->from, len);
}

/* Numbers that come meanwhile are of opens that take up no pages from before. */
static void drop_plain(const struct around *a)
{
    struct plain_paging *p = container_of(a->h->paging, struct plain_paging, paging);

    for (size_t i = 0;; i++) {
        fuse_ino_t ino = 0;

        stages_lock(a->fs);
        if (i < p->count)
            ino = p->inos[i];
        stages_unlock(a->fs);
        if (!ino)
            return;
        drop_pages(a, ino);
    }
}

/* Its own number, that by which it was opened, and that of what it covers. */
static void drop_staged(const struct around *a)
{
    const struct staged_handle *h = a->h;
    fuse_ino_t covers;

    stages_lock(a->fs);
    covers = h->node->covers;
    stages_unlock(a->fs);
    drop_pages(a, h->node->ino);
    drop_pages(a, h->ino != h->node->ino ? h->ino : 0);
    drop_pages(a, covers != h->ino ? covers : 0);
}

/*
 * Waits for pages that are being read or put: the threads that take requests must go on
 * meanwhile.
 */
static void drop(struct around *a)
{
    struct staged_handle *h = a->h;

    if (h->node)
        drop_staged(a);
    else
        drop_plain(a);
    stages_lock(a->fs);
    leave(a);
    stages_unlock(a->fs);
    fuse_reply_write(a->req, a->done);
    opened_put(a->fs, &h->opened);
    free(a);
}

static void *around_thread(void *user)
{
    struct fs *fs = user;
    struct stages *t = fs->stages;

    stages_lock(fs);
    for (;;) {
        struct around *a = t->dropping;

        if (a) {
            t->dropping = a->then;
            stages_unlock(fs);
            drop(a);
            stages_lock(fs);
        } else if (t->drop_stop) {
            break;
        } else {
            pthread_cond_wait(&t->drop_more, &t->lock);
        }
    }
    stages_unlock(fs);
    return NULL;
}

/* With the lock. Most mounts never need it. */
static bool start(struct fs *fs)
{
    struct stages *t = fs->stages;

    if (!t->drops && !t->drop_stop)
        t->drops = thread_start(&t->dropper, around_thread, fs) == 0;
    return t->drops;
}

void around_end(struct around *a, const struct request *r, size_t done)
{
    struct stages *t = a->fs->stages;
    struct around **p = &t->dropping;
    bool here;

    stages_lock(a->fs);
    a->done = done;
    settle_end(a);
    if (!atomic_load(&a->h->paging->fills)) {
        leave(a);
        stages_unlock(a->fs);
        free(a);
        fuse_reply_write(r->req, done);
        return;
    }
    opened_get(&a->h->opened);
    here = !start(a->fs);
    while (*p)
        p = &(*p)->then;
    if (!here) {
        *p = a;
        pthread_cond_signal(&t->drop_more);
    }
    stages_unlock(a->fs);
    if (here)
        drop(a);
}

/* With the lock: the next bytes from *at on that no write has in hand; false: none. */
static bool next_part(const struct paging *p, uint64_t *at, uint64_t end, uint64_t *to)
{
    const struct around *a = p->around;

    *to = end;
    while (a && *at < end) {
        if (a->from <= *at && a->to > *at) {
            *at = a->to;
            *to = end;
            a = p->around; /* it may be in another one now */
            continue;
        }
        if (a->from > *at)
            *to = MIN(*to, a->from);
        a = a->next;
    }
    return *at < end;
}

static int put(int fd, const char *data, uint64_t from, uint64_t to)
{
    while (from < to) {
        ssize_t n = pwrite(fd, data, to - from, (off_t)from);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno;
        data += n;
        from += (uint64_t)n;
    }
    return 0;
}

ssize_t around_put_pages(struct fs *fs, const struct staged_handle *h, const char *data,
                         size_t size, off_t off)
{
    struct paging *paging = h->paging;
    uint64_t start = (uint64_t)off, at = start, end = start + size, to;
    struct pages_put here, **p = &paging->pages;
    int code = 0;

    stages_lock(fs);
    here = (struct pages_put){.next = paging->pages, .turn = paging->turn};
    paging->pages = &here;
    while (code == 0 && next_part(paging, &at, end, &to)) {
        stages_unlock(fs);
        if (!h->node)
            stages_plain_begin(fs);
        code = put(h->fd, data + (at - start), at, to);
        if (!h->node)
            stages_plain_end(fs);
        stages_lock(fs);
        at = to;
    }
    while (*p != &here)
        p = &(*p)->next;
    *p = here.next;
    if (paging->around)
        stage_wake(fs);
    stages_unlock(fs);
    errno = code;
    return code ? -1 : (ssize_t)size;
}

void around_stop(struct fs *fs)
{
    struct stages *t = fs->stages;

    if (!t)
        return;
    stages_lock(fs);
    t->drop_stop = true;
    pthread_cond_signal(&t->drop_more);
    stages_unlock(fs);
    if (t->drops)
        pthread_join(t->dropper, NULL);
    t->drops = false;
}
