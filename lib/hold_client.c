/* SPDX-License-Identifier: MIT */
/* lib/hold_client.c - maps what a holder keeps in device memory. */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/checked.h"
#include "base/endian.h"
#include "base/local_socket.h"
#include "base/vec.h"
#include "lib/client.h"
#include "lib/hold.h"

/* A block of the holder's, as this process sees it. */
struct mapped {
    uint64_t number;
    struct device_block memory;
};

struct unshard_hold {
    int fd;
    struct device *device;
    pthread_mutex_t lock; /* one question at a time; for all below */
    struct mapped *mapped;
    size_t n, cap;
    bool broken; /* what was said is not to be understood: nothing more is asked */
};

/* ---- open and close ---- */

static int find_socket(const char *source, const struct device *d, struct buf *out,
                       struct err *e)
{
    struct stat st;

    if (stat(source, &st) == 0 && S_ISSOCK(st.st_mode))
        return buf_adds(out, source) < 0 ? err_nomem(e) : 0;
    return hold_path(source, device_info_of(d)->uuid, out, e);
}

/* It must hold on the very device that is mapped from. */
static int read_greeting(const struct unshard_hold *h, struct err *e)
{
    unsigned char hello[HOLD_HELLO];

    if (local_receive(h->fd, hello, sizeof hello, NULL) < 0 ||
        memcmp(hello, HOLD_MAGIC, 8) != 0)
        return err_set(e, EPROTO, "the holder does not answer as one");
    if (memcmp(hello + 8, device_info_of(h->device)->uuid, 16) != 0)
        return err_set(e, ENODEV, "the holder's device is another one");
    return 0;
}

static int attach(struct unshard_hold *h, const char *source, int device, struct err *e)
{
    const struct device_options o = {.ordinal = device};
    CLEANUP(buf_release) struct buf path = {.max = PATH_MAX};
    int ret = device_open(&o, &h->device, e);

    if (ret == 0)
        ret = find_socket(source, h->device, &path, e);
    if (ret == 0)
        ret = local_connect(path.data, 0, &h->fd, e);
    if (ret == -ENOENT || ret == -ECONNREFUSED)
        err_hint(e, "`unshard hold --device %d %s` starts one", device, source);
    return ret < 0 ? ret : read_greeting(h, e);
}

int unshard_hold_open(const char *source, int device, struct unshard_hold **out,
                      char *error)
{
    struct unshard_hold *h = calloc(1, sizeof *h);
    struct err e = {0};
    int ret;

    *out = NULL;
    if (!h) {
        err_nomem(&e);
        return client_fail(&e, error);
    }
    h->fd = -1;
    pthread_mutex_init(&h->lock, NULL);
    ret = attach(h, source, device, &e);
    if (ret < 0) {
        unshard_hold_close(h);
        return client_fail(&e, error);
    }
    *out = h;
    return 0;
}

void unshard_hold_close(struct unshard_hold *h)
{
    if (!h)
        return;
    for (size_t i = 0; i < h->n; i++)
        device_block_release(h->device, &h->mapped[i].memory);
    free(h->mapped);
    if (h->fd >= 0)
        close(h->fd); /* only now may the holder let go of them */
    device_close(h->device);
    pthread_mutex_destroy(&h->lock);
    free(h);
}

/* ---- one tensor ---- */

static int ask(const struct unshard_hold *h, const char *key, size_t key_len,
               const char *dtype, const uint64_t *start, const uint64_t *count,
               uint32_t nd)
{
    CLEANUP(buf_release) struct buf q = {0};
    unsigned char head[HOLD_ASK] = {0}, number[8];

    put_le32(head, (uint32_t)key_len);
    put_le32(head + 4, start ? nd : HOLD_WHOLE);
    snprintf((char *)head + 16, HOLD_NAME, "%s", dtype ? dtype : "");
    buf_add(&q, head, sizeof head);
    for (uint32_t k = 0; start && k < 2 * nd; k++) {
        put_le64(number, k < nd ? start[k] : count[k - nd]);
        buf_add(&q, number, sizeof number);
    }
    buf_add(&q, key, key_len);
    return buf_failed(&q) < 0 ? -ENOMEM : local_send(h->fd, q.data, q.len, -1);
}

static int take_error(const struct unshard_hold *h, const unsigned char *head,
                      struct err *e)
{
    char words[HOLD_WORDS_MAX + 1];
    uint32_t code = get_le32(head), len = get_le32(head + 4);

    if (len > HOLD_WORDS_MAX || local_receive(h->fd, words, len, NULL) < 0)
        return -EPROTO;
    words[len] = '\0';
    return err_set(e, code < 4096 ? (int)code : EIO, "%s", words);
}

static struct mapped *find_block(const struct unshard_hold *h, uint64_t number)
{
    for (size_t i = 0; i < h->n; i++)
        if (h->mapped[i].number == number)
            return &h->mapped[i];
    return NULL;
}

static int map_block(struct unshard_hold *h, uint64_t number, uint64_t size, int fd,
                     struct err *e)
{
    if (!VEC_ROOM(h->mapped, h->n, h->cap))
        return err_nomem(e);
    h->mapped[h->n].number = number;
    TRY(device_block_import(h->device, fd, size, &h->mapped[h->n].memory, e));
    h->n++;
    return 0;
}

/* What the holder says must be true of itself: a shape of these bytes, within the block. */
static int check_place(const unsigned char *head, const struct unshard_result *r,
                       uint64_t size)
{
    struct shape shape = {.nd = r->nd};
    enum dtype dtype = r->dtype ? dtype_from_name(r->dtype) : DTYPE_NONE;
    struct err ignored = {0};
    uint64_t bytes;

    memcpy(shape.dim, r->shape, r->nd * sizeof *shape.dim);
    if (dtype == DTYPE_NONE || shape_bytes(&shape, dtype, &bytes, &ignored) < 0 ||
        bytes != r->bytes || range_outside(get_le64(head + 24), bytes, size))
        return -EPROTO;
    return 0;
}

static int take_place(struct unshard_hold *h, const unsigned char *head, int fd,
                      struct unshard_held *out, struct err *e)
{
    unsigned char rows[8 * UNSHARD_DIMENSIONS];
    char name[HOLD_NAME + 1] = "";
    uint64_t number = get_le64(head + 8), size = get_le64(head + 16);
    const struct mapped *m;
    uint32_t nd = get_le32(head + 4);

    if (nd > UNSHARD_DIMENSIONS || local_receive(h->fd, rows, 8 * (size_t)nd, NULL) < 0)
        return -EPROTO;
    memcpy(name, head + 40, HOLD_NAME);
    out->result = (struct unshard_result){.nd = nd, .bytes = get_le64(head + 32)};
    if (dtype_from_name(name) != DTYPE_NONE)
        out->result.dtype = dtype_name(dtype_from_name(name));
    for (uint32_t k = 0; k < nd; k++)
        out->result.shape[k] = get_le64(rows + 8 * k);
    m = find_block(h, number);
    if (!m != (fd >= 0) ||
        check_place(head, &out->result, m ? m->memory.size : size) < 0)
        return -EPROTO;
    if (!m) {
        TRY(map_block(h, number, size, fd, e));
        m = &h->mapped[h->n - 1];
    }
    out->address = m->memory.address + get_le64(head + 24);
    return 0;
}

static int exchange(struct unshard_hold *h, const char *key, size_t key_len,
                    const char *dtype, const uint64_t *start, const uint64_t *count,
                    uint32_t nd, struct unshard_held *out, struct err *e)
{
    unsigned char head[HOLD_REPLY];
    CLEANUP_FD int fd = -1;
    int ret;

    if (h->broken)
        return err_set(e, EPIPE, "the holder is gone");
    ret = ask(h, key, key_len, dtype, start, count, nd);
    if (ret == 0)
        ret = local_receive(h->fd, head, sizeof head, &fd);
    if (ret == 0)
        ret = get_le32(head) ? take_error(h, head, e) : take_place(h, head, fd, out, e);
    if (ret < 0 && !e->code) { /* not the holder's own words */
        h->broken = true;
        return err_set(e, -ret, "the holder does not answer: %s", strerror(-ret));
    }
    return ret;
}

int unshard_hold_get(struct unshard_hold *h, const char *key, size_t key_len,
                     const char *dtype, const uint64_t *start, const uint64_t *count,
                     uint32_t nd, struct unshard_held *out, char *error)
{
    struct err e = {0};
    int ret;

    if (key_len > HOLD_KEY_MAX || nd > UNSHARD_DIMENSIONS || !start != !count)
        ret = err_set(&e, EINVAL, "a key or box that cannot be");
    else {
        pthread_mutex_lock(&h->lock);
        ret = exchange(h, key, key_len, dtype, start, count, nd, out, &e);
        pthread_mutex_unlock(&h->lock);
    }
    return ret < 0 ? client_fail(&e, error) : 0;
}

int unshard_hold_read(struct unshard_hold *h, void *to, uint64_t from, uint64_t bytes,
                      char *error)
{
    struct err e = {0};

    return device_copy_out(h->device, to, from, (size_t)bytes, &e) < 0
               ? client_fail(&e, error)
               : 0;
}
