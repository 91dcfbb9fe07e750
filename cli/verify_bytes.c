/* SPDX-License-Identifier: MIT */
/* cli/verify_bytes.c - chunk by chunk where that reads all, else by windows of the tensor. */
#include "cli/verify_bytes.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/crc32.h"
#include "base/err.h"
#include "base/pool.h"
#include "cli/verify_archives.h"
#include "index/plan.h"
#include "remote/source.h"
#include "save/sums.h"

enum {
    WINDOW =
        256 << 10,   /* stays in the processor's cache for all that is done with it */
    PIECE = 8 << 20, /* of a large tensor: as much as one thread takes at a time */
    UNIT_MAX = 16,   /* bytes of an element */
};

/* ---- a run of bytes ---- */

/* Bytes [off, off + len) of a source, or of the tensor when there is none. */
struct run {
    const struct tensor_check *t;
    struct source *src;
    uint64_t off, len;
    struct part {
        struct nonfinite nonfinite;
        uint32_t crc;
    } * part; /* of each PIECE */
};

static int read_window(const struct run *r, uint64_t at, size_t len, void *dst,
                       struct err *e)
{
    uint64_t ahead = reader_ahead(r->t->env), next = r->off + at + len;

    if (!r->src) {
        reader_will_need(r->t->reader, next, ahead);
        return reader_read(r->t->reader, r->off + at, len, dst, e);
    }
    ahead = MIN(ahead, r->len - at - len);
    if (ahead > 0 && (r->src->remote || !source_resident(r->src, next + ahead - 1, 1)))
        source_will_need(r->src, next, ahead);
    return source_read(r->src, r->off + at, len, dst, e);
}

static int run_piece(void *user, size_t i, struct err *e)
{
    struct run *r = user;
    struct part *part = &r->part[i];
    uint64_t at = i * (uint64_t)PIECE, end = MIN(at + PIECE, r->len);
    CLEANUP_FREE char *window = malloc((size_t)MIN(end - at, (uint64_t)WINDOW) + 1);

    if (!window)
        return err_nomem(e);
    for (size_t len; at < end; at += len) {
        len = (size_t)MIN(end - at, (uint64_t)WINDOW);
        TRY(read_window(r, at, len, window, e));
        nonfinite_count(r->t->dtype, window, len, &part->nonfinite);
        if (r->src)
            part->crc = crc32_zip(part->crc, window, len);
    }
    return 0;
}

static void add_nonfinite(struct nonfinite *to, const struct nonfinite *from)
{
    to->nan += from->nan;
    to->inf += from->inf;
}

/* *crc becomes that of all, where the bytes lie in a source. */
static int run_all(struct run *r, struct nonfinite *found, uint32_t *crc, struct err *e)
{
    size_t pieces = (size_t)((r->len + PIECE - 1) / PIECE);
    CLEANUP_FREE struct part *part = calloc(pieces + 1, sizeof *part);

    if (!part)
        return err_nomem(e);
    r->part = part;
    TRY(pool_each(r->t->env->pool, pieces, run_piece, r, e));
    *crc = 0;
    for (size_t i = 0; i < pieces; i++) {
        uint64_t len = MIN(r->len - i * (uint64_t)PIECE, (uint64_t)PIECE);

        add_nonfinite(found, &part[i].nonfinite);
        if (r->src)
            sums_append(crc, part[i].crc, len);
    }
    return 0;
}

/* ---- chunks ---- */

struct chunks {
    const struct tensor_check *t;
    pthread_mutex_t lock;
    struct byte_findings *out; /* guarded by lock, as what follows */
    size_t first_bad;          /* chunk of out->bad_checksum */
    bool all_seen;             /* NaN and Inf were looked for in each so far */
};

static void note_checksum(struct chunks *k, size_t i, bool holds, const struct err *e)
{
    pthread_mutex_lock(&k->lock);
    k->out->checksums++;
    k->out->bad_checksums += !holds;
    if (!holds && i < k->first_bad) {
        k->first_bad = i;
        err_line(e, k->out->bad_checksum, sizeof k->out->bad_checksum);
    }
    pthread_mutex_unlock(&k->lock);
}

/* Of all of a chunk; NULL: they were not looked for. */
static void note_nonfinite(struct chunks *k, const struct nonfinite *found)
{
    pthread_mutex_lock(&k->lock);
    if (found)
        add_nonfinite(&k->out->nonfinite, found);
    else
        k->all_seen = false;
    pthread_mutex_unlock(&k->lock);
}

/*
 * Do the elements of the chunk stand row by row, as they are shown? Then they are *len
 * bytes from its base on. (Sizes and steps were checked when the chunk was placed.)
 */
static bool stands_in_a_row(const struct plan *plan, size_t i,
                            const struct chunk_place *place, uint64_t *len)
{
    struct chunk_room room = {0};
    const struct chunk *c = plan_chunk(plan, i, &room);
    int64_t step = plan_unit(plan);

    for (uint32_t k = plan_shape(plan)->nd; k-- > 0;) {
        if (c->size[k] > 1 && place->step[k] != step)
            return false;
        if (__builtin_mul_overflow(step, c->size[k], &step))
            return false;
    }
    *len = (uint64_t)step;
    return !(place->flags & CHUNK_SWAP);
}

struct counting {
    enum dtype dtype;
    struct nonfinite found;
};

static void count(void *user, const void *data, size_t len)
{
    struct counting *c = user;

    nonfinite_count(c->dtype, data, len, &c->found);
}

/* What its codec knows a checksum of, or nothing. */
static int check_item(struct chunks *k, size_t i, const struct chunk_place *place,
                      bool in_a_row, uint64_t len, struct err *e)
{
    const struct tensor_check *t = k->t;
    struct counting counting = {.dtype = t->dtype};
    struct chunk_look look = {.off = place->base,
                              .len = len,
                              .unit = plan_unit(reader_plan(t->reader)),
                              .see = count,
                              .user = &counting};
    int ret = reader_verify(t->reader, i, in_a_row ? &look : NULL, e);

    if (ret < 0 && ret != -EBADMSG)
        return ret;
    if (ret != 0)
        note_checksum(k, i, ret > 0, e);
    *e = (struct err){0};
    note_nonfinite(k, in_a_row && look.seen == len ? &counting.found : NULL);
    return 0;
}

/* Bytes of an archive: their checksum is a part of their record's. */
static int check_plain(struct chunks *k, size_t i, const struct chunk_place *place,
                       uint64_t len, struct err *e)
{
    const struct tensor_check *t = k->t;
    struct run run = {.t = t, .src = place->src, .off = place->base, .len = len};
    struct nonfinite found = {0};
    uint32_t crc;

    TRY(source_check(place->src, e));
    TRY(run_all(&run, &found, &crc, e));
    TRY(source_check(place->src, e));
    archives_note(t->archives,
                  plan_chunk(reader_plan(t->reader), i, &(struct chunk_room){0})->file,
                  place->base, len, crc);
    note_nonfinite(k, &found);
    return 0;
}

/* One value all over: its first element tells of all, however many there are. */
static int check_fill(struct chunks *k, const struct chunk *c, struct err *e)
{
    const struct plan *plan = reader_plan(k->t->reader);
    const struct shape *shape = plan_shape(plan);
    uint64_t at = 0, elements = 1, unit = plan_unit(plan);
    struct nonfinite found = {0};
    char value[UNIT_MAX];

    for (uint32_t d = 0; d < shape->nd; d++) {
        at = at * shape->dim[d] + c->start[d];
        elements *= c->size[d];
    }
    if (elements > 0)
        TRY(reader_read(k->t->reader, at * unit, unit, value, e));
    if (elements > 0)
        nonfinite_count(k->t->dtype, value, unit, &found);
    found.nan *= elements;
    found.inf *= elements;
    note_nonfinite(k, &found);
    return 0;
}

static int check_placed(struct chunks *k, size_t i, const struct chunk_place *place,
                        struct err *e)
{
    const struct tensor_check *t = k->t;
    const struct plan *plan = reader_plan(t->reader);
    struct chunk_room room = {0};
    const struct chunk *c = plan_chunk(plan, i, &room);
    uint64_t len = 0;
    bool in_a_row = !t->cast && stands_in_a_row(plan, i, place, &len);

    TRY(reader_compare(t->reader, i, e));
    if (c->encoding == CHUNK_FILL && !t->cast && plan_unit(plan) <= UNIT_MAX)
        return check_fill(k, c, e);
    if (c->encoding == CHUNK_PLAIN && in_a_row && archives_have(t->archives, c->file))
        return check_plain(k, i, place, len, e);
    return check_item(k, i, place, in_a_row, len, e);
}

static int check_chunk(void *user, size_t i, struct err *e)
{
    struct chunks *k = user;
    struct chunk_place place = {0};
    const char *path;
    int ret = reader_place(k->t->reader, i, &place, &path, e);

    if (ret == 0)
        ret = check_placed(k, i, &place, e);
    source_put(place.src);
    return ret;
}

int verify_bytes(const struct tensor_check *t, struct byte_findings *out, struct err *e)
{
    struct chunks k = {.t = t, .out = out, .first_bad = SIZE_MAX, .all_seen = true};
    struct run whole = {.t = t, .len = reader_size(t->reader)};
    uint32_t none;
    int ret;

    *out = (struct byte_findings){0};
    pthread_mutex_init(&k.lock, NULL);
    ret = pool_each(t->env->pool, plan_chunks(reader_plan(t->reader)), check_chunk, &k,
                    e);
    pthread_mutex_destroy(&k.lock);
    if (ret < 0 || k.all_seen)
        return ret;
    out->nonfinite = (struct nonfinite){0};
    return run_all(&whole, &out->nonfinite, &none, e);
}
