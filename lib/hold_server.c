/* SPDX-License-Identifier: MIT */
/* lib/hold_server.c - a thread a client, which lives as long as that is connected. */
#include "lib/hold.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <xxhash.h>

#include "base/endian.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "base/local_socket.h"

enum {
    CLIENTS_MAX = 256,
    PAUSE_MS = 100, /* where nobody can be let in for want of descriptors */
};

int hold_path(const char *source, const unsigned char uuid[16], struct buf *out,
              struct err *e)
{
    CLEANUP(buf_release) struct buf cache = {.max = PATH_MAX};
    CLEANUP_FREE char *real = realpath(source, NULL);
    const char *name = real ? real : source; /* a URL stands for itself */
    struct err ignored = {0};
    int ret = cache_dir(NULL, &cache, &ignored);

    ret = local_socket_dir(ret == 0 ? cache.data : NULL, out, e);
    if (ret < 0)
        return ret;
    buf_addf(out, "/hold-%016" PRIx64 "-", (uint64_t)XXH3_64bits(name, strlen(name)));
    for (int i = 0; i < 16; i++)
        buf_addf(out, "%02x", uuid[i]);
    return buf_adds(out, ".sock") < 0 ? err_nomem(e) : 0;
}

struct server {
    struct hold_table *table;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int fd[CLIENTS_MAX]; /* of clients that are there; -1: free. guarded by lock */
    unsigned clients;    /* guarded by lock */
};

struct caller {
    struct server *server;
    int fd;
    unsigned place;
};

/* ---- one question ---- */

struct question {
    struct unshard_part part;
    char dtype[HOLD_NAME + 1];
    uint64_t start[UNSHARD_DIMENSIONS], count[UNSHARD_DIMENSIONS];
    uint32_t nd; /* of the box */
    char *key;
    uint32_t key_len;
};

/* False: it ended, or says what is not to be understood. */
static bool receive_question(int fd, struct question *q)
{
    unsigned char head[HOLD_ASK], rows[2 * 8 * UNSHARD_DIMENSIONS];
    uint32_t nd;

    if (local_receive(fd, head, sizeof head, NULL) < 0)
        return false;
    q->key_len = get_le32(head);
    nd = get_le32(head + 4);
    memcpy(q->dtype, head + 16, HOLD_NAME);
    if (q->key_len > HOLD_KEY_MAX || (nd != HOLD_WHOLE && nd > UNSHARD_DIMENSIONS))
        return false;
    q->part = (struct unshard_part){.size = sizeof q->part,
                                    .dtype = *q->dtype ? q->dtype : NULL};
    if (nd != HOLD_WHOLE) {
        if (local_receive(fd, rows, 16 * (size_t)nd, NULL) < 0)
            return false;
        for (uint32_t k = 0; k < nd; k++) {
            q->start[k] = get_le64(rows + 8 * k);
            q->count[k] = get_le64(rows + 8 * (nd + k));
        }
        q->nd = nd;
        q->part.start = q->start;
        q->part.count = q->count;
    }
    q->key = malloc(q->key_len + 1);
    return q->key && local_receive(fd, q->key, q->key_len, NULL) == 0;
}

static int send_error(int fd, const struct err *e)
{
    unsigned char head[HOLD_REPLY] = {0};
    char words[HOLD_WORDS_MAX];
    size_t len;

    err_line(e, words, sizeof words);
    len = strlen(words);
    put_le32(head, (uint32_t)e->code);
    put_le32(head + 4, (uint32_t)len);
    return local_send(fd, head, sizeof head, -1) == 0 ? local_send(fd, words, len, -1)
                                                      : -EPIPE;
}

static int send_place(int fd, const struct hold_place *p, int passed)
{
    unsigned char reply[HOLD_REPLY + 8 * UNSHARD_DIMENSIONS] = {0};

    put_le32(reply + 4, p->result.nd);
    put_le64(reply + 8, hold_block_number(p->block));
    put_le64(reply + 16, hold_block_size(p->block));
    put_le64(reply + 24, p->offset);
    put_le64(reply + 32, p->result.bytes);
    snprintf((char *)reply + 40, HOLD_NAME, "%s", p->result.dtype);
    put_le32(reply + 56, passed >= 0);
    for (uint32_t k = 0; k < p->result.nd; k++)
        put_le64(reply + HOLD_REPLY + 8 * k, p->result.shape[k]);
    return local_send(fd, reply, HOLD_REPLY + 8 * (size_t)p->result.nd, passed);
}

static int answer(struct caller *c, struct hold_client *client,
                  const struct question *q)
{
    struct hold_table *t = c->server->table;
    CLEANUP_FD int passed = -1;
    struct hold_place place;
    struct err e = {0};
    int ret =
        hold_table_get(t, client, q->key, q->key_len, &q->part, q->nd, &place, &e);

    if (ret == 0 && place.first)
        ret = hold_table_export(t, place.block, &passed, &e);
    return ret < 0 ? send_error(c->fd, &e) : send_place(c->fd, &place, passed);
}

static bool greet(const struct caller *c)
{
    unsigned char hello[HOLD_HELLO] = HOLD_MAGIC;

    memcpy(hello + 8, hold_table_device(c->server->table)->uuid, 16);
    return local_send(c->fd, hello, sizeof hello, -1) == 0;
}

static void *serve_caller(void *user)
{
    struct caller *c = user;
    struct server *s = c->server;
    struct hold_client client = {0};
    bool goes_on = greet(c);

    while (goes_on) {
        struct question q = {0};

        goes_on = receive_question(c->fd, &q) && answer(c, &client, &q) == 0;
        free(q.key);
    }
    hold_client_release(s->table, &client);
    pthread_mutex_lock(&s->lock);
    s->fd[c->place] = -1;
    s->clients--;
    pthread_cond_signal(&s->ended);
    close(c->fd);
    pthread_mutex_unlock(&s->lock);
    free(c);
    return NULL;
}

/* ---- all of them ---- */

static void take_caller(struct server *s, int fd)
{
    struct caller *c = calloc(1, sizeof *c);
    pthread_attr_t detached;
    pthread_t thread;
    unsigned place = 0;

    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_mutex_lock(&s->lock);
    while (place < CLIENTS_MAX && s->fd[place] >= 0)
        place++;
    if (c && place < CLIENTS_MAX) {
        *c = (struct caller){s, fd, place};
        s->fd[place] = fd;
        s->clients++;
        if (pthread_create(&thread, &detached, serve_caller, c) == 0) {
            c = NULL;
            fd = -1;
        } else {
            s->fd[place] = -1;
            s->clients--;
        }
    }
    pthread_mutex_unlock(&s->lock);
    pthread_attr_destroy(&detached);
    free(c);
    if (fd >= 0)
        close(fd); /* there are too many */
}

static void end_all(struct server *s)
{
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < CLIENTS_MAX; i++)
        if (s->fd[i] >= 0)
            shutdown(s->fd[i], SHUT_RDWR);
    while (s->clients)
        pthread_cond_wait(&s->ended, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

static void serve(struct server *s, int listener, int stop)
{
    struct pollfd p[] = {{.fd = listener, .events = POLLIN},
                         {.fd = stop, .events = POLLIN}};
    int fd;

    while (!p[1].revents) {
        if (poll(p, ARRAY_SIZE(p), -1) < 0 && errno != EINTR)
            return;
        if (!p[0].revents)
            continue;
        if (local_accept(listener, 0, &fd) == 0)
            take_caller(s, fd);
        else /* no more descriptors: who asks waits, and asking again at once is no help */
            poll(&p[1], 1, PAUSE_MS);
    }
}

int hold_serve(struct hold_table *t, const char *path, int stop,
               void (*ready)(void *user, const char *path), void *user, struct err *e)
{
    struct server *s = calloc(1, sizeof *s);
    CLEANUP_FD int listener = -1;
    int ret = s ? local_listen(path, &listener, e) : err_nomem(e);

    if (ret < 0) {
        free(s);
        return ret;
    }
    s->table = t;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->ended, NULL);
    for (int i = 0; i < CLIENTS_MAX; i++)
        s->fd[i] = -1;
    ready(user, path);
    serve(s, listener, stop);
    unlink(path);
    end_all(s);
    pthread_cond_destroy(&s->ended);
    pthread_mutex_destroy(&s->lock);
    free(s);
    return 0;
}
