/* SPDX-License-Identifier: MIT */
/* fs/plans.c - answers one question a connection, one after the other. */
#include "fs/plans.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/buf.h"
#include "base/endian.h"
#include "base/local_socket.h"
#include "base/log.h"
#include "fs/fs.h"
#include "gpu/plan_service.h"
#include "gpu/plan_wire.h"
#include "gpu/tensor.h"

enum {
    PATIENCE_SECONDS = 5, /* for who calls and then says nothing */
    PAUSE_US = 1000,      /* after who was sent away, or when no file can be opened */
};

struct plans {
    struct fs *fs;
    char path[PATH_MAX];
    char root[PATH_MAX]; /* what paths of the store are relative to */
    int listener;
    pthread_t thread;
};

const char *plans_path(const struct plans *p)
{
    return p->path;
}

static int make_plan(const struct plans *p, int64_t checkpoint, uint32_t ord,
                     struct buf *out, struct err *e)
{
    CLEANUP(tensor_putp) struct tensor *t = NULL;
    int rc = tensor_open(&p->fs->reading.env, checkpoint, ord, &t, e);

    return rc < 0 ? rc : wire_write(t, p->root, out, e);
}

static void reply(int fd, const struct err *e, const struct buf *plan)
{
    unsigned char head[PLAN_REPLY_BYTES] = {0};
    const char *data = e->code ? e->text : plan->data;
    size_t len = e->code ? strlen(e->text) : plan->len;

    put_le32(head, (uint32_t)e->code);
    put_le64(head + 8, len);
    if (local_send(fd, head, sizeof head, -1) == 0)
        local_send(fd, data, len, -1);
}

/* What is said is taken as it comes: any numbers find a tensor or none. */
static void answer(const struct plans *p, int fd)
{
    unsigned char ask[PLAN_ASK_BYTES];
    CLEANUP(buf_release) struct buf plan = {.max = WIRE_MAX};
    struct err e = {0};

    if (local_receive(fd, ask, sizeof ask, NULL) < 0)
        return;
    if (memcmp(ask, PLAN_ASK_MAGIC, 8) != 0)
        err_set(&e, EPROTO, "not a question that is known");
    else
        make_plan(p, (int64_t)get_le64(ask + 8), get_le32(ask + 16), &plan, &e);
    reply(fd, &e, &plan);
}

static void *plans_thread(void *user)
{
    const struct plans *p = user;
    int fd, rc = 0;

    while (rc != -EINVAL) {
        rc = local_accept(p->listener, PATIENCE_SECONDS, &fd);
        if (rc < 0) {
            usleep(PAUSE_US);
            continue;
        }
        answer(p, fd);
        close(fd);
    }
    return NULL;
}

/* The directory of a store; of one file the directory that it is in. */
static void set_root(struct plans *p)
{
    const struct store *s = p->fs->store;
    char *slash;

    snprintf(p->root, sizeof p->root, "%s", s->url);
    slash = s->file ? strrchr(p->root, '/') : NULL;
    if (slash)
        *slash = '\0';
}

static int set_path(struct plans *p, struct err *e)
{
    CLEANUP(buf_release) struct buf dir = {.max = PATH_MAX};

    TRY(local_socket_dir(p->fs->cache_dir, &dir, e));
    local_sweep(dir.data, "plan-");
    if (snprintf(p->path, sizeof p->path, "%s/plan-%d.sock", dir.data, getpid()) >=
        PATH_MAX)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", dir.data);
    return 0;
}

int plans_new(struct fs *fs, struct plans **out, struct err *e)
{
    CLEANUP_FREE struct plans *p = calloc(1, sizeof *p);
    int rc;

    if (!p)
        return err_nomem(e);
    p->fs = fs;
    set_root(p);
    rc = set_path(p, e);
    if (rc == 0)
        rc = local_listen(p->path, &p->listener, e);
    if (rc < 0)
        return rc;
    rc = pthread_create(&p->thread, NULL, plans_thread, p);
    if (rc) {
        close(p->listener);
        unlink(p->path);
        return err_set(e, rc, "start a thread: %s", strerror(rc));
    }
    *out = steal(&p);
    return 0;
}

void plans_free(struct plans *p)
{
    if (!p)
        return;
    shutdown(p->listener, SHUT_RDWR); /* accept(2) gives EINVAL */
    pthread_join(p->thread, NULL);
    close(p->listener);
    unlink(p->path);
    free(p);
}
