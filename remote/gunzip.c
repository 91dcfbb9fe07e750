/* SPDX-License-Identifier: MIT */
/* remote/gunzip.c - a gzip file read at any place, through points where inflating can start. */
#include "remote/gunzip.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <zlib.h>

#include "base/err.h"
#include "remote/source.h"

enum {
    INPUT_BYTES = 64 << 10,
    SKIP_BYTES = 64 << 10,
    WINDOW = 32 << 10, /* as far back as deflate can point */
    MAX_POINTS = 1024,
    IDLE = 8,    /* inflaters kept for reads that go on where others ended */
    TRAILER = 8, /* CRC and length behind a member */
    GZIP_BITS = 15 + 16,
    RAW_BITS = -15,
};

static const uint64_t FIRST_SPACING = 1 << 20;

bool gunzip_sniff(const void *head, size_t len)
{
    return len >= 3 && memcmp(head, "\x1f\x8b\x08", 3) == 0;
}

/* A place between two blocks of deflate. */
struct point {
    uint64_t out, in; /* plain and packed bytes before it */
    unsigned bits;    /* of the byte before `in` that belong behind the point */
    unsigned window_len;
    unsigned char *window;
};

/* ---- inflating from a place on ---- */

struct inflater {
    z_stream z;
    struct source *in; /* borrowed */
    uint64_t fetched;  /* bytes of `in` that were read */
    uint64_t out;      /* plain bytes before the place */
    bool raw;          /* started at a point: the member's trailer is ours to skip */
    bool ended;
    unsigned char input[INPUT_BYTES];
};

static void inflater_free(struct inflater *f)
{
    if (f)
        inflateEnd(&f->z);
    free(f);
}

static int bad(const struct inflater *f, const char *what, struct err *e)
{
    return err_set(e, EBADMSG, "%s: gzip, byte %" PRIu64 ": %s", f->in->name,
                   f->fetched - f->z.avail_in, what);
}

static int inflater_new(struct source *in, struct inflater **out, struct err *e)
{
    struct inflater *f = calloc(1, sizeof *f);

    if (!f || inflateInit2(&f->z, GZIP_BITS) != Z_OK) {
        free(f);
        return err_nomem(e);
    }
    f->in = in;
    *out = f;
    return 0;
}

/* More input, unless there is some; at its end there is none. */
static int refill(struct inflater *f, struct err *e)
{
    size_t len = (size_t)MIN((uint64_t)INPUT_BYTES, f->in->size - f->fetched);

    if (f->z.avail_in > 0 || len == 0)
        return 0;
    TRY(source_read(f->in, f->fetched, len, f->input, e));
    f->fetched += len;
    f->z.next_in = f->input;
    f->z.avail_in = (uInt)len;
    return 0;
}

/* Steps over n bytes of input. */
static int skip_input(struct inflater *f, size_t n, struct err *e)
{
    while (n > 0) {
        uInt part;

        TRY(refill(f, e));
        if (f->z.avail_in == 0)
            return bad(f, "it is cut off", e);
        part = (uInt)MIN(n, (size_t)f->z.avail_in);
        f->z.next_in += part;
        f->z.avail_in -= part;
        n -= part;
    }
    return 0;
}

/*
 * Behind a member: another one (files joined by cat, or packed in parallel), or the end.
 * What is no member there is padding, as gzip itself sees it.
 */
static int next_member(struct inflater *f, struct err *e)
{
    if (f->raw)
        TRY(skip_input(f, TRAILER, e));
    TRY(refill(f, e));
    f->ended = f->z.avail_in == 0 || *f->z.next_in != 0x1f;
    f->raw = false;
    if (!f->ended && inflateReset2(&f->z, GZIP_BITS) != Z_OK)
        return err_nomem(e);
    return 0;
}

/* One call of zlib; `flush` Z_BLOCK stops between blocks. Sets f->out. */
static int step(struct inflater *f, int flush, struct err *e)
{
    uInt before = f->z.avail_out, left;
    int rc;

    TRY(refill(f, e));
    left = f->z.avail_in;
    rc = inflate(&f->z, flush);
    f->out += before - f->z.avail_out;
    if (rc == Z_STREAM_END)
        return next_member(f, e);
    if (rc == Z_MEM_ERROR)
        return err_nomem(e);
    if (rc != Z_OK && rc != Z_BUF_ERROR)
        return bad(f, f->z.msg ? f->z.msg : "it is damaged", e);
    if (left == 0 && before == f->z.avail_out)
        return bad(f, "it is cut off", e);
    return 0;
}

/* Fills dst or stops at the end: *got. */
static int inflate_some(struct inflater *f, void *dst, size_t len, size_t *got,
                        struct err *e)
{
    *got = 0;
    while (*got < len && !f->ended) {
        uInt part = (uInt)MIN(len - *got, (size_t)1 << 30);
        int rc;

        f->z.next_out = (unsigned char *)dst + *got;
        f->z.avail_out = part;
        rc = step(f, Z_NO_FLUSH, e);
        *got += part - f->z.avail_out;
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- the source ---- */

struct gunzip {
    struct source base;
    struct source *in;
    struct point *point;
    size_t points;
    pthread_mutex_t lock;
    struct inflater *idle[IDLE]; /* guarded by lock; the latest last */
    size_t nidle;                /* guarded by lock */
};

static struct gunzip *gunzip_of(struct source *s)
{
    return container_of(s, struct gunzip, base);
}

/* The last point at or before `off`; NULL: the beginning. */
static const struct point *point_before(const struct gunzip *g, uint64_t off)
{
    size_t lo = 0, hi = g->points;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (g->point[mid].out <= off)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo > 0 ? &g->point[lo - 1] : NULL;
}

/* Sets a new inflater to a point. */
static int go_to(struct inflater *f, const struct point *p, struct err *e)
{
    unsigned char last;

    f->fetched = p->in;
    f->out = p->out;
    f->raw = true;
    if (inflateReset2(&f->z, RAW_BITS) != Z_OK)
        return err_nomem(e);
    if (p->bits) {
        TRY(source_read(f->in, p->in - 1, 1, &last, e));
        if (inflatePrime(&f->z, (int)p->bits, last >> (8 - p->bits)) != Z_OK)
            return bad(f, "it cannot start here", e);
    }
    if (p->window_len && inflateSetDictionary(&f->z, p->window, p->window_len) != Z_OK)
        return bad(f, "it cannot start here", e);
    return 0;
}

/* An idle inflater that is behind `from` and nearest before `off`, or NULL. */
static struct inflater *take_idle(struct gunzip *g, uint64_t from, uint64_t off)
{
    struct inflater *best = NULL;
    size_t at = 0;

    pthread_mutex_lock(&g->lock);
    for (size_t i = 0; i < g->nidle; i++) {
        struct inflater *f = g->idle[i];

        if (f->out <= off && f->out >= from && (!best || f->out > best->out)) {
            best = f;
            at = i;
        }
    }
    if (best) {
        g->nidle--;
        memmove(g->idle + at, g->idle + at + 1, (g->nidle - at) * sizeof *g->idle);
    }
    pthread_mutex_unlock(&g->lock);
    return best;
}

static void give_idle(struct gunzip *g, struct inflater *f)
{
    struct inflater *oldest = NULL;

    pthread_mutex_lock(&g->lock);
    if (g->nidle == IDLE) {
        oldest = g->idle[0];
        g->nidle--;
        memmove(g->idle, g->idle + 1, g->nidle * sizeof *g->idle);
    }
    g->idle[g->nidle++] = f;
    pthread_mutex_unlock(&g->lock);
    inflater_free(oldest);
}

/* An inflater somewhere before `off`. */
static int start_before(struct gunzip *g, uint64_t off, struct inflater **out,
                        struct err *e)
{
    const struct point *p = point_before(g, off);
    int rc = 0;

    *out = take_idle(g, p ? p->out : 0, off);
    if (*out)
        return 0;
    rc = inflater_new(g->in, out, e);
    if (rc == 0 && p)
        rc = go_to(*out, p, e);
    return rc;
}

static int skip_to(struct inflater *f, uint64_t off, struct err *e)
{
    CLEANUP_FREE void *scratch = f->out < off ? malloc(SKIP_BYTES) : NULL;

    if (f->out < off && !scratch)
        return err_nomem(e);
    while (f->out < off) {
        size_t got, len = (size_t)MIN((uint64_t)SKIP_BYTES, off - f->out);

        TRY(inflate_some(f, scratch, len, &got, e));
        if (got < len)
            return bad(f, "it is shorter than it was", e);
    }
    return 0;
}

static int gunzip_read(struct source *s, uint64_t off, size_t len, void *dst,
                       struct err *e)
{
    struct gunzip *g = gunzip_of(s);
    struct inflater *f = NULL;
    size_t got = 0;
    int rc = start_before(g, off, &f, e);

    if (rc == 0)
        rc = skip_to(f, off, e);
    if (rc == 0)
        rc = inflate_some(f, dst, len, &got, e);
    if (rc == 0 && got < len)
        rc = bad(f, "it is shorter than it was", e);
    if (rc == 0)
        give_idle(g, f);
    else
        inflater_free(f);
    return rc;
}

static int gunzip_check(struct source *s, struct err *e)
{
    return source_check(gunzip_of(s)->in, e);
}

static void points_free(struct point *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(p[i].window);
    free(p);
}

static void gunzip_close(struct source *s)
{
    struct gunzip *g = gunzip_of(s);

    for (size_t i = 0; i < g->nidle; i++)
        inflater_free(g->idle[i]);
    points_free(g->point, g->points);
    pthread_mutex_destroy(&g->lock);
    source_put(g->in);
    free(g);
}

static const struct source_ops gunzip_ops = {
    .name = "gunzip",
    .read = gunzip_read,
    .check = gunzip_check,
    .close = gunzip_close,
};

/* ---- the one pass ---- */

struct gunzip_scan {
    struct inflater *f;
    struct source *in;
    struct point *point; /* MAX_POINTS */
    size_t points;
    uint64_t spacing;
    unsigned char skipped[SKIP_BYTES];
};

int gunzip_scan_begin(struct source *in, struct gunzip_scan **out, struct err *e)
{
    struct gunzip_scan *s = calloc(1, sizeof *s);
    int rc;

    if (!s)
        return err_nomem(e);
    s->in = source_get(in);
    s->spacing = FIRST_SPACING;
    s->point = calloc(MAX_POINTS, sizeof *s->point);
    rc = s->point ? inflater_new(in, &s->f, e) : err_nomem(e);
    if (rc < 0)
        gunzip_scan_free(s);
    else
        *out = s;
    return rc;
}

void gunzip_scan_free(struct gunzip_scan *s)
{
    if (!s)
        return;
    inflater_free(s->f);
    points_free(s->point, s->points);
    source_put(s->in);
    free(s);
}

void gunzip_scan_freep(struct gunzip_scan **s)
{
    gunzip_scan_free(*s);
    *s = NULL;
}

/* Every second point goes; the others are twice as far apart. */
static void thin_out(struct gunzip_scan *s)
{
    size_t kept = 0;

    for (size_t i = 0; i < s->points; i++) {
        if (i % 2 == 0)
            free(s->point[i].window);
        else
            s->point[kept++] = s->point[i];
    }
    s->points = kept;
    s->spacing *= 2;
}

/* zlib stands behind a block that is not the last of its member. */
static int add_point(struct gunzip_scan *s, struct err *e)
{
    const struct inflater *f = s->f;
    struct point *p;
    uInt len = 0;

    if (s->points == MAX_POINTS)
        thin_out(s);
    p = &s->point[s->points];
    *p = (struct point){.out = f->out,
                        .in = f->fetched - f->z.avail_in,
                        .bits = (unsigned)f->z.data_type & 7,
                        .window = malloc(WINDOW)};
    if (!p->window)
        return err_nomem(e);
    s->points++;
    if (inflateGetDictionary(&s->f->z, p->window, &len) != Z_OK)
        return bad(f, "it is damaged", e);
    p->window_len = len;
    return 0;
}

static int scan_step(struct gunzip_scan *s, struct err *e)
{
    uint64_t last = s->points ? s->point[s->points - 1].out : 0;

    TRY(step(s->f, Z_BLOCK, e));
    if (!s->f->ended && (s->f->z.data_type & 128) && !(s->f->z.data_type & 64) &&
        s->f->out >= last + s->spacing)
        return add_point(s, e);
    return 0;
}

/* Fills dst or stops at the end. */
static int scan_some(struct gunzip_scan *s, void *dst, size_t len, size_t *got,
                     struct err *e)
{
    struct inflater *f = s->f;

    *got = 0;
    while (*got < len && !f->ended) {
        uInt part = (uInt)MIN(len - *got, (size_t)1 << 30);
        int rc;

        f->z.next_out = (unsigned char *)dst + *got;
        f->z.avail_out = part;
        rc = scan_step(s, e);
        *got += part - f->z.avail_out;
        if (rc < 0)
            return rc;
    }
    return 0;
}

int gunzip_scan_read(struct gunzip_scan *s, uint64_t off, size_t len, void *dst,
                     size_t *got, struct err *e)
{
    *got = 0;
    while (s->f->out < off && !s->f->ended) {
        size_t part = (size_t)MIN((uint64_t)SKIP_BYTES, off - s->f->out), skipped;

        TRY(scan_some(s, s->skipped, part, &skipped, e));
    }
    return s->f->out == off ? scan_some(s, dst, len, got, e) : 0;
}

/* Moves the points to the source, in no more memory than they take. */
static int finish(struct gunzip_scan *s, struct source **out, struct err *e)
{
    CLEANUP_FREE struct gunzip *g = calloc(1, sizeof *g);
    struct point *fit;

    if (!g)
        return err_nomem(e);
    TRY(source_init(&g->base, &gunzip_ops, s->in->name, s->f->out, e));
    g->base.id = s->in->id;
    fit = realloc(s->point, (s->points + 1) * sizeof *fit);
    g->point = fit ? fit : s->point;
    g->points = s->points;
    s->point = NULL;
    s->points = 0;
    g->in = source_get(s->in);
    pthread_mutex_init(&g->lock, NULL);
    *out = &steal(&g)->base;
    return 0;
}

int gunzip_scan_finish(struct gunzip_scan *s, struct source **out, struct err *e)
{
    while (!s->f->ended) {
        size_t got;

        TRY(scan_some(s, s->skipped, SKIP_BYTES, &got, e));
    }
    return finish(s, out, e);
}
