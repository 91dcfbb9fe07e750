/* SPDX-License-Identifier: MIT */
/* save/upload_file.c - one local file becomes one object. */
#include "save/upload_file.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "base/pool.h"
#include "remote/bucket.h"
#include "save/parts.h"

enum { TAG_BYTES = 16 };

struct sending {
    struct bucket *bucket;
    const char *key, *id;
    int fd;
    struct parts parts;
    /* What the store says that it has. */
    struct bucket_part *have;
    struct buf etags; /* their texts, one after another */
    size_t count;
};

static int read_part(const struct sending *s, uint32_t n, char **out, size_t *len,
                     struct err *e)
{
    CLEANUP_FREE char *data = NULL;
    int rc;

    *len = (size_t)part_len(&s->parts, n);
    data = malloc(*len + 1);
    if (!data)
        return err_nomem(e);
    rc = read_exact(s->fd, data, *len, part_at(&s->parts, n), e);
    if (rc < 0)
        return err_wrap(e, "%s: its local copy", s->key);
    *out = steal(&data);
    return 0;
}

static int send_whole(const struct sending *s, struct err *e)
{
    const struct bucket_put how = {0};
    CLEANUP_FREE char *data = NULL;
    size_t len;
    int rc = read_part(s, 0, &data, &len, e);

    return rc == 0 ? bucket_put(s->bucket, s->key, data, len, &how, e) : rc;
}

static int send_nth(void *user, size_t n, struct err *e)
{
    const struct sending *s = user;
    CLEANUP_FREE char *data = NULL;
    size_t len;

    TRY(read_part(s, (uint32_t)n, &data, &len, e));
    return bucket_part(s->bucket, s->key, s->id, (unsigned)n + 1, data, len, e);
}

/* Positions of the texts for now: they may move while they are added. */
static int see_part(void *user, const struct bucket_part *p)
{
    struct sending *s = user;

    if (s->count == s->parts.count || p->number != s->count + 1 ||
        p->size != part_len(&s->parts, (uint32_t)s->count))
        return -EBADMSG;
    s->have[s->count] = *p;
    s->have[s->count++].etag = NULL;
    return buf_add(&s->etags, p->etag, strlen(p->etag) + 1);
}

static int list_parts(struct sending *s, struct err *e)
{
    const char *text;
    int rc = bucket_parts(s->bucket, s->key, s->id, see_part, s, e);

    if (buf_failed(&s->etags))
        return err_nomem(e);
    if (rc == -EBADMSG || (rc == 0 && s->count < s->parts.count))
        return err_set(e, EIO, "%s/%s: the store has other parts than were sent",
                       bucket_url(s->bucket), s->key);
    text = s->etags.data;
    for (size_t i = 0; rc == 0 && i < s->count; i++) {
        s->have[i].etag = text;
        text += strlen(text) + 1;
    }
    return rc;
}

/* The answer to a request that was done may be lost, and the upload is gone when asked again. */
static int settle(const struct sending *s, const char *tag, int rc, struct err *e)
{
    CLEANUP(buf_release) struct buf now = {0};
    struct err ignored = {0};
    uint64_t size;

    if (rc != -ENOENT || bucket_tag(s->bucket, s->key, &now, &size, &ignored) < 0 ||
        size != s->parts.size || strcmp(now.data ? now.data : "", tag) != 0)
        return rc;
    *e = (struct err){0};
    return 0;
}

static int send_parts(struct sending *s, const char *tag, struct pool *pool,
                      struct err *e)
{
    int rc = pool_each(pool, s->parts.count, send_nth, s, e);

    if (rc == 0)
        rc = list_parts(s, e);
    if (rc < 0)
        return rc;
    rc = bucket_complete(s->bucket, s->key, s->id, s->have, s->count, false, e);
    return settle(s, tag, rc, e);
}

static int make_tag(char tag[2 * TAG_BYTES + 1], struct err *e)
{
    unsigned char random[TAG_BYTES];

    if (getrandom(random, sizeof random, 0) != sizeof random)
        return err_set(e, EIO, "getrandom: %s", strerror(errno));
    for (size_t i = 0; i < TAG_BYTES; i++)
        snprintf(tag + 2 * i, 3, "%02x", random[i]);
    return 0;
}

static int send_large(struct sending *s, struct pool *pool, struct err *e)
{
    CLEANUP(buf_release) struct buf id = {0};
    char tag[2 * TAG_BYTES + 1];
    struct err ignored = {0};
    int rc = make_tag(tag, e);

    s->have = calloc(s->parts.count, sizeof *s->have);
    if (rc == 0 && !s->have)
        rc = err_nomem(e);
    if (rc == 0)
        rc = bucket_create(s->bucket, s->key, tag, &id, e);
    if (rc < 0)
        return rc;
    s->id = id.data;
    rc = send_parts(s, tag, pool, e);
    if (rc < 0)
        bucket_abort(s->bucket, s->key, s->id, &ignored);
    return rc;
}

int upload_file(struct bucket *b, const char *key, int fd, uint64_t size,
                struct pool *pool, struct err *e)
{
    const struct layout_file_info f = {.path = key, .size = size};
    struct sending s = {.bucket = b, .key = key, .fd = fd};
    int rc = parts_of(&f, &s.parts, e);

    if (rc == 0)
        rc = s.parts.count > 1 ? send_large(&s, pool, e) : send_whole(&s, e);
    free(s.have);
    buf_release(&s.etags);
    return rc;
}
