/* SPDX-License-Identifier: MIT */
/* save/parts.c - parts in order, and the sums that go across them. */
#include "save/parts.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <zlib.h>

#include "base/crc32.h"
#include "base/endian.h"
#include "base/err.h"
#include "save/gather.h"
#include "save/sums.h"

enum { ROUND = 1 << 20, BLOCK = 1 << 20 };

static const uint64_t object_most = (uint64_t)5 << 40;

int parts_of(const struct layout_file_info *f, struct parts *out, struct err *e)
{
    uint64_t part = MAX((uint64_t)PART_LEAST, (f->size + PARTS_MAX - 1) / PARTS_MAX);

    if (f->size > object_most)
        return err_set(e, EFBIG, "%s: %" PRIu64 " bytes; an object has 5 TiB at most",
                       f->path, f->size);
    part = (part + ROUND - 1) / ROUND * ROUND;
    *out = (struct parts){
        .size = f->size,
        .part = part,
        .count = f->size ? (uint32_t)((f->size + part - 1) / part) : 1,
    };
    return 0;
}

/* ---- waiting for others ---- */

struct part_turn {
    pthread_mutex_t lock; /* of all that follows, and of the sums of its files */
    pthread_cond_t noted;
    unsigned workers, waiting;
    bool stopped;
};

int part_turn_new(unsigned workers, struct part_turn **out, struct err *e)
{
    struct part_turn *t = calloc(1, sizeof *t);

    if (!t)
        return err_nomem(e);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->noted, NULL);
    t->workers = workers;
    *out = t;
    return 0;
}

void part_turn_free(struct part_turn *t)
{
    if (!t)
        return;
    pthread_cond_destroy(&t->noted);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

void part_turn_stop(struct part_turn *t)
{
    pthread_mutex_lock(&t->lock);
    t->stopped = true;
    pthread_cond_broadcast(&t->noted);
    pthread_mutex_unlock(&t->lock);
}

/* ---- what is summed ---- */

/* A range that a checksum is of; `sum` has one entry for each part that it touches. */
struct range {
    uint64_t from, len;
    uint32_t first, parts; /* numbers of parts */
    struct portion {
        uint32_t crc;
        bool known;
    } * portion;
};

struct part_sums {
    struct part_turn *turn;
    struct layout_file_info file;
    struct parts parts;
    const bool *skipped;
    struct range *range; /* by place, each once; none overlaps another */
    size_t ranges;
    struct portion *portion; /* of all of them */
};

static int by_place(const void *a, const void *b)
{
    const struct range *x = a, *y = b;

    if (x->from != y->from)
        return x->from < y->from ? -1 : 1;
    return (x->len > y->len) - (x->len < y->len);
}

/* Of a range that is not empty. */
static void place_range(struct part_sums *s, struct range *r)
{
    r->first = (uint32_t)(r->from / s->parts.part);
    r->parts = (uint32_t)((r->from + r->len - 1) / s->parts.part) - r->first + 1;
}

/* The ranges that checksums are of, sorted; a header and a directory may name one twice. */
static int list_ranges(struct part_sums *s, struct err *e)
{
    const struct layout_file_info *f = &s->file;
    size_t n = 0, kept = 0;

    for (size_t i = 0; i < f->pieces; i++)
        n += f->piece[i].kind == LAYOUT_CRC32;
    s->range = calloc(n + 1, sizeof *s->range);
    if (!s->range)
        return err_nomem(e);
    n = 0;
    for (size_t i = 0; i < f->pieces; i++)
        if (f->piece[i].kind == LAYOUT_CRC32 && f->piece[i].sum > 0)
            s->range[n++] =
                (struct range){.from = f->piece[i].from, .len = f->piece[i].sum};
    qsort(s->range, n, sizeof *s->range, by_place);
    for (size_t i = 0; i < n; i++) {
        const struct range *before = kept ? &s->range[kept - 1] : NULL;

        if (before && by_place(&s->range[i], before) == 0)
            continue;
        if (before && s->range[i].from < before->from + before->len)
            return err_set(e, ENOTSUP, "%s: checksums of ranges that overlap", f->path);
        s->range[kept++] = s->range[i];
    }
    s->ranges = kept;
    return 0;
}

static int place_ranges(struct part_sums *s, struct err *e)
{
    size_t n = 0;

    for (size_t i = 0; i < s->ranges; i++) {
        place_range(s, &s->range[i]);
        n += s->range[i].parts;
    }
    s->portion = calloc(n + 1, sizeof *s->portion);
    if (!s->portion)
        return err_nomem(e);
    n = 0;
    for (size_t i = 0; i < s->ranges; i++) {
        s->range[i].portion = s->portion + n;
        n += s->range[i].parts;
    }
    return 0;
}

int part_sums_new(struct part_turn *t, const struct layout_file_info *f,
                  const struct parts *p, const bool *skipped, struct part_sums **out,
                  struct err *e)
{
    struct part_sums *s = malloc(sizeof *s);

    if (!s)
        return err_nomem(e);
    *s = (struct part_sums){.turn = t, .file = *f, .parts = *p, .skipped = skipped};
    if (list_ranges(s, e) < 0 || place_ranges(s, e) < 0) {
        part_sums_free(s);
        return -e->code;
    }
    *out = s;
    return 0;
}

void part_sums_free(struct part_sums *s)
{
    if (!s)
        return;
    free(s->range);
    free(s->portion);
    free(s);
}

/* ---- one part ---- */

/* What part n has of the range. */
static void portion_of(const struct part_sums *s, const struct range *r, uint32_t n,
                       uint64_t *from, uint64_t *len)
{
    uint64_t end = MIN(r->from + r->len, part_at(&s->parts, n) + s->parts.part);

    *from = MAX(r->from, part_at(&s->parts, n));
    *len = end - *from;
}

/* The first range that ends behind `at`. */
static size_t range_behind(const struct part_sums *s, uint64_t at)
{
    size_t low = 0, high = s->ranges;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (s->range[mid].from + s->range[mid].len <= at)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* With the lock. */
static void note(struct part_sums *s, const struct range *r, uint32_t n, uint32_t crc)
{
    r->portion[n - r->first] = (struct portion){.crc = crc, .known = true};
    pthread_cond_broadcast(&s->turn->noted);
}

static void note_part(struct part_sums *s, uint32_t n, const char *bytes)
{
    uint64_t at = part_at(&s->parts, n), end = at + part_len(&s->parts, n), from, len;

    for (size_t i = range_behind(s, at); i < s->ranges && s->range[i].from < end; i++) {
        uint32_t crc;

        portion_of(s, &s->range[i], n, &from, &len);
        crc = crc32_zip(0, bytes + (from - at), (size_t)len);
        pthread_mutex_lock(&s->turn->lock);
        note(s, &s->range[i], n, crc);
        pthread_mutex_unlock(&s->turn->lock);
    }
}

static int read_sum(const struct part_sums *s, const struct gather *g, uint64_t from,
                    uint64_t len, uint32_t *crc, struct err *e)
{
    CLEANUP_FREE char *block = malloc(BLOCK);
    int ret = block ? 0 : err_nomem(e);

    *crc = 0;
    while (ret == 0 && len > 0) {
        uint64_t part = MIN(len, (uint64_t)BLOCK);

        ret = gather_range(g, &s->file, from, part, block, e);
        if (ret == 0)
            *crc = crc32_zip(*crc, block, (size_t)part);
        from += part;
        len -= part;
    }
    return ret;
}

/*
 * What part n has of the range: noted, or awaited, or read. One thread at least never
 * waits, so that all parts are made at last; each notes its sums before it waits.
 */
static int portion_sum(struct part_sums *s, const struct gather *g,
                       const struct range *r, uint32_t n, uint32_t *crc, struct err *e)
{
    const struct portion *p = &r->portion[n - r->first];
    struct part_turn *t = s->turn;
    uint64_t from, len;
    int ret = 0;

    pthread_mutex_lock(&t->lock);
    while (!p->known && !t->stopped && !(s->skipped && s->skipped[n]) &&
           t->waiting + 1 < t->workers) {
        t->waiting++;
        pthread_cond_wait(&t->noted, &t->lock);
        t->waiting--;
    }
    if (!p->known) {
        pthread_mutex_unlock(&t->lock);
        portion_of(s, r, n, &from, &len);
        ret = read_sum(s, g, from, len, crc, e);
        pthread_mutex_lock(&t->lock);
        if (ret == 0)
            note(s, r, n, *crc);
    }
    *crc = p->crc;
    pthread_mutex_unlock(&t->lock);
    return ret;
}

static int range_sum(struct part_sums *s, const struct gather *g, uint64_t at,
                     uint64_t size, uint32_t *crc, struct err *e)
{
    const struct range *r;
    int ret = 0;

    *crc = 0;
    if (size == 0)
        return 0;
    r = &s->range[range_behind(s, at)];
    for (uint32_t i = 0; ret == 0 && i < r->parts; i++) {
        uint64_t from, len;
        uint32_t more;

        portion_of(s, r, r->first + i, &from, &len);
        ret = portion_sum(s, g, r, r->first + i, &more, e);
        if (ret == 0)
            *crc = (uint32_t)crc32_combine64(*crc, more, (off_t)len);
    }
    return ret;
}

/* The checksums that stand in part n; one may go across its ends. */
static int fill(struct part_sums *s, const struct gather *g, uint32_t n, char *bytes,
                struct err *e)
{
    const struct layout_file_info *f = &s->file;
    uint64_t at = part_at(&s->parts, n), end = at + part_len(&s->parts, n);
    int ret = 0;

    for (size_t i = gather_piece_at(f, at);
         ret == 0 && i < f->pieces && f->piece[i].at < end; i++) {
        const struct layout_piece *p = &f->piece[i];
        unsigned char text[4];
        uint32_t crc;

        if (p->kind != LAYOUT_CRC32)
            continue;
        ret = range_sum(s, g, p->from, p->sum, &crc, e);
        put_le32(text, crc);
        for (uint64_t k = 0; ret == 0 && k < sizeof text; k++)
            if (p->at + k >= at && p->at + k < end)
                bytes[p->at + k - at] = (char)text[k];
    }
    return ret;
}

int part_make(struct part_sums *s, const struct gather *g, uint32_t n, void *dst,
              struct err *e)
{
    uint64_t at = part_at(&s->parts, n);
    int ret = gather_range(g, &s->file, at, part_len(&s->parts, n), dst, e);

    if (ret < 0 || s->ranges == 0)
        return ret;
    note_part(s, n, dst);
    return fill(s, g, n, dst, e);
}
