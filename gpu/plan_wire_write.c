/* SPDX-License-Identifier: MIT */
/* gpu/plan_wire_write.c - writes the plan of an open tensor for other processes. */
#include "gpu/plan_wire.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "gpu/plan_wire_priv.h"
#include "gpu/tensor_priv.h"
#include "remote/source.h"

enum { NOT_LOCAL = 1 }; /* what a plan cannot name: it is read through the mount */

static void add_u64(struct buf *out, uint64_t v)
{
    unsigned char le[8];

    put_le64(le, v);
    buf_add(out, le, sizeof le);
}

static void add_u32(struct buf *out, uint32_t v)
{
    unsigned char le[4];

    put_le32(le, v);
    buf_add(out, le, sizeof le);
}

static void add_text(struct buf *out, const char *text, size_t len)
{
    static const char zeros[8];

    buf_add(out, text, len);
    buf_add(out, zeros, -len & 7);
}

static void add_dtype(struct buf *out, enum dtype d)
{
    char name[WIRE_NAME] = {0};

    snprintf(name, sizeof name, "%s", dtype_name(d));
    buf_add(out, name, sizeof name);
}

static void add_head(struct buf *out, const struct tensor *t, bool through)
{
    const struct tensor_info *i = &t->info;

    buf_add(out, WIRE_MAGIC, 8);
    add_u64(out, 0); /* the length, once it is known */
    add_u64(out, through);
    add_u64(out, i->bytes);
    add_dtype(out, i->dtype);
    add_dtype(out, i->stored);
    add_u32(out, i->shape.nd);
    add_u32(out, t->units.nd);
    add_u64(out, through ? 0 : t->nshards);
    add_u64(out, through ? 0 : plan_chunks(t->plan));
    add_u64(out, i->key_len);
    for (uint32_t k = 0; k < i->shape.nd; k++)
        add_u64(out, i->shape.dim[k]);
    add_text(out, i->key, i->key_len);
}

/* A shard, when its path leads to the very file that was scanned. */
static int add_source(struct buf *out, const struct shard *s, const char *root)
{
    char path[PATH_MAX];
    struct stat st;
    struct file_id id;

    if (snprintf(path, sizeof path, "%s/%s", root, s->path) >= PATH_MAX ||
        path[0] != '/' || stat(path, &st) < 0 || !S_ISREG(st.st_mode))
        return NOT_LOCAL;
    id = file_id_of(&st);
    if (!file_id_equal(&id, &s->id))
        return NOT_LOCAL;
    add_u64(out, id.size);
    add_u64(out, (uint64_t)id.mtime_ns);
    add_u64(out, strlen(path));
    add_text(out, path, strlen(path));
    return 0;
}

static uint32_t shard_index(const struct tensor *t, uint32_t number)
{
    size_t lo = 0, hi = t->nshards;

    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;

        if (t->shards[mid].number <= number)
            lo = mid;
        else
            hi = mid;
    }
    return (uint32_t)lo;
}

static void add_box(struct buf *out, const struct tensor *t, const struct chunk *c,
                    const struct chunk_place *place)
{
    for (uint32_t k = 0; k < t->units.nd; k++)
        add_u64(out, c->start[k]);
    for (uint32_t k = 0; k < t->units.nd; k++)
        add_u64(out, c->size[k]);
    for (uint32_t k = 0; k < t->units.nd; k++)
        add_u64(out, c->encoding == CHUNK_FILL ? 0 : (uint64_t)place->step[k]);
}

/* Do the bytes lie in the shard itself, rather than in what was made of it? */
static bool lies_in_shard(const struct chunk_place *place, const struct shard *s)
{
    return !place->decoded && file_id_equal(&place->src->id, &s->id) &&
           place->src->size == s->id.size;
}

static int add_piece(struct buf *out, struct tensor *t, size_t i, struct err *e)
{
    struct chunk_room room = {0};
    const struct chunk *c = plan_chunk(t->plan, i, &room);
    uint32_t source = shard_index(t, c->file);
    bool fill = c->encoding == CHUNK_FILL;
    unsigned char value[WIRE_VALUE] = {0}, head[4] = {fill};
    struct chunk_place place = {0};
    const char *path;
    int ret = tensor_place(t, i, &place, &path, e);

    if (ret < 0)
        return ret;
    if (fill && place.src->size >= t->unit)
        ret = source_read(place.src, 0, t->unit, value, e);
    else if (!fill && !lies_in_shard(&place, &t->shards[source]))
        ret = NOT_LOCAL;
    head[1] = place.flags;
    add_u32(out, source);
    buf_add(out, head, sizeof head);
    add_u64(out, fill ? 0 : place.base);
    buf_add(out, value, sizeof value);
    add_box(out, t, c, &place);
    source_put(place.src);
    return ret;
}

/* Would some chunk have to be decoded? Then it is not worth looking at the others. */
static bool decodes_any(const struct tensor *t)
{
    for (size_t i = 0; i < plan_chunks(t->plan); i++)
        if (tensor_decodes(t, i))
            return true;
    return false;
}

static int add_all(struct buf *out, struct tensor *t, const char *root, struct err *e)
{
    int ret = decodes_any(t) ? NOT_LOCAL : 0;

    add_head(out, t, false);
    for (size_t i = 0; ret == 0 && i < t->nshards; i++)
        ret = add_source(out, &t->shards[i], root);
    for (size_t i = 0; ret == 0 && buf_failed(out) == 0 && i < plan_chunks(t->plan);
         i++)
        ret = add_piece(out, t, i, e);
    if (ret == 0 && buf_failed(out) == -EFBIG)
        return NOT_LOCAL;
    return ret;
}

int wire_write(struct tensor *t, const char *root, struct buf *out, struct err *e)
{
    struct buf all = {.max = WIRE_MAX};
    int ret = add_all(&all, t, root, e);

    if (ret == NOT_LOCAL) {
        buf_release(&all);
        all = (struct buf){.max = WIRE_MAX};
        add_head(&all, t, true);
        ret = 0;
    }
    if (ret == 0 && buf_failed(&all) < 0)
        ret = err_nomem(e);
    if (ret == 0) {
        put_le64(all.data + 8, all.len);
        buf_add(out, all.data, all.len);
        ret = buf_failed(out) < 0 ? err_nomem(e) : 0;
    }
    buf_release(&all);
    return ret;
}
