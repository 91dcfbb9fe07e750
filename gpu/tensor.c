/* SPDX-License-Identifier: MIT */
/* gpu/tensor.c - from a tensor's row in the index to its bytes. */
#include "gpu/tensor.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/pool.h"
#include "gpu/fetch.h"
#include "remote/open_files.h"
#include "remote/source.h"

enum {
    /* Chunks of one tensor: 10 M of them at about 100 bytes (SECURITY-parsers rule 4). */
    TENSOR_MEMORY = 1 << 30,
    /* Longer windows are filled piece by piece, so that memory stays bounded. */
    WINDOW_MAX = 4 << 20,
    /*
     * Rows below this are copied: the kernel looks up each page of each piece. Measured,
     * server CPU per MiB: rows of 4 KiB 190 us copied, 310 us by pieces; of 16 KiB and
     * more no difference.
     */
    PIECE_MIN = 16 << 10,
};

/* A chunk once it is known where it lies. */
struct resolved {
    struct source *src; /* owned */
    struct plan_op op;
};

struct shard {
    uint32_t number;
    struct source *src;
};

struct tensor {
    struct reader_env env;
    atomic_uint refs;
    struct arena *arena; /* guarded by lock once the tensor is open */
    pthread_mutex_t lock;
    struct tensor_info info;
    struct shape units;
    unsigned unit;
    const struct plan *plan;
    struct shard *shards; /* sorted by number */
    size_t nshards;
    _Atomic(struct resolved *) *resolved; /* one a chunk of the plan */
};

struct tensor *tensor_get(struct tensor *t)
{
    atomic_fetch_add(&t->refs, 1);
    return t;
}

void tensor_put(struct tensor *t)
{
    if (!t || atomic_fetch_sub(&t->refs, 1) != 1)
        return;
    for (size_t i = 0; t->resolved && i < plan_chunks(t->plan); i++) {
        struct resolved *r = atomic_load(&t->resolved[i]);
        if (r)
            source_put(r->src);
    }
    for (size_t i = 0; i < t->nshards; i++)
        source_put(t->shards[i].src);
    arena_free(t->arena);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

void tensor_putp(struct tensor **t)
{
    tensor_put(*t);
}

const struct tensor_info *tensor_info_of(const struct tensor *t)
{
    return &t->info;
}

const struct plan *tensor_plan(const struct tensor *t)
{
    return t->plan;
}

/* ---- opening ---- */

static int compare_numbers(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

static int open_shard(struct tensor *t, int64_t checkpoint, uint32_t number,
                      struct err *e)
{
    struct catalog_file file;
    struct shard *s = &t->shards[t->nshards];
    int ret = catalog_file(t->env.catalog, checkpoint, number, t->arena, &file, e);

    if (ret == 0)
        ret = open_files_get(t->env.files, file.path, &file.id, &s->src, e);
    if (ret < 0)
        return ret;
    s->number = number;
    t->nshards++;
    return 0;
}

/* Opens each file that a chunk names, once. Empty chunks need none. */
static int open_shards(struct tensor *t, int64_t checkpoint, struct err *e)
{
    size_t n = plan_chunks(t->plan);
    CLEANUP_FREE uint32_t *number = calloc(n + 1, sizeof *number);
    int ret = 0;

    if (!number)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++)
        number[i] = plan_chunk(t->plan, i)->file;
    qsort(number, n, sizeof *number, compare_numbers);
    t->shards = arena_array(t->arena, n + 1, sizeof *t->shards);
    if (!t->shards)
        return err_nomem(e);
    for (size_t i = 0; ret == 0 && i < n; i++)
        if (i == 0 || number[i] != number[i - 1])
            ret = open_shard(t, checkpoint, number[i], e);
    return ret;
}

static int build_plan(struct tensor *t, int64_t checkpoint, struct err *e)
{
    struct plan_builder *b;
    const struct chunk *chunk;
    size_t n;
    int ret;

    ret = shape_units(&t->info.shape, t->info.dtype, &t->units, e);
    if (ret < 0)
        return ret;
    t->unit = dtype_unit(t->info.dtype);
    ret = catalog_chunks(t->env.catalog, checkpoint, &t->info, t->arena, &chunk, &n, e);
    if (ret < 0 || (ret = plan_begin(t->arena, &t->units, t->unit, &b, e)) < 0)
        return ret;
    ret = plan_take(b, chunk, n, e);
    if (ret == 0)
        ret = plan_finish(b, &t->plan, e);
    if (ret < 0)
        return ret;
    t->resolved = arena_array(t->arena, plan_chunks(t->plan) + 1, sizeof *t->resolved);
    return t->resolved ? 0 : err_nomem(e);
}

static int load(struct tensor *t, int64_t checkpoint, uint32_t ord, struct err *e)
{
    int ret = catalog_tensor(t->env.catalog, checkpoint, ord, t->arena, &t->info, e);

    if (ret < 0)
        return ret;
    if (t->info.fault)
        return err_set(e, EBADMSG, "%s", t->info.fault);
    ret = build_plan(t, checkpoint, e);
    if (ret == 0)
        ret = open_shards(t, checkpoint, e);
    return ret;
}

int tensor_open(const struct reader_env *env, int64_t checkpoint, uint32_t ord,
                struct tensor **out, struct err *e)
{
    struct tensor *t = calloc(1, sizeof *t);
    int ret;

    if (!t)
        return err_nomem(e);
    t->env = *env;
    atomic_init(&t->refs, 1);
    pthread_mutex_init(&t->lock, NULL);
    t->arena = arena_new(TENSOR_MEMORY);
    ret = t->arena ? load(t, checkpoint, ord, e) : err_nomem(e);
    if (ret < 0) {
        if (t->info.key)
            err_wrap(e, "tensor %s", t->info.key);
        tensor_put(t);
        return ret;
    }
    *out = t;
    return 0;
}

/* ---- where chunks lie ---- */

static struct source *shard_of(const struct tensor *t, uint32_t number)
{
    size_t lo = 0, hi = t->nshards;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (t->shards[mid].number < number)
            lo = mid + 1;
        else
            hi = mid;
    }
    return t->shards[lo].src;
}

/* The place of a chunk that is plain bytes. Bounds are checked when it is lowered. */
static int plain_place(const struct tensor *t, const struct chunk *c,
                       struct source *shard, struct chunk_place *out, struct err *e)
{
    uint64_t first, step = t->unit;

    if (mul_overflows(c->first, t->unit, &first) ||
        add_overflows(c->offset, first, &out->base))
        return err_set(e, EBADMSG, "a chunk's offset is past 2^64");
    for (uint32_t k = t->units.nd; k-- > 0;) {
        if (c->step) {
            if (__builtin_mul_overflow(c->step[k], (int64_t)t->unit, &out->step[k]))
                return err_set(e, EBADMSG, "a chunk's stride is past 2^63");
            continue;
        }
        out->step[k] = (int64_t)step;
        if (mul_overflows(step, c->size[k], &step) || step > INT64_MAX)
            return err_set(e, EBADMSG, "a chunk's size is past 2^63");
    }
    out->flags = c->flags;
    out->src = source_get(shard);
    return 0;
}

static int find_place(struct tensor *t, const struct chunk *c, struct chunk_place *out,
                      struct err *e)
{
    struct source *shard = shard_of(t, c->file);
    const struct chunk_codec *codec;
    struct chunk_tensor about = {.key = t->info.key,
                                 .key_len = t->info.key_len,
                                 .dtype = t->info.dtype,
                                 .units = &t->units};
    int ret;

    if (range_outside(c->offset, c->length, shard->size))
        return err_set(e, EBADMSG,
                       "%s: a chunk is bytes %" PRIu64 "+%" PRIu64
                       ", the file has %" PRIu64,
                       shard->name, c->offset, c->length, shard->size);
    if (c->encoding == CHUNK_PLAIN)
        return plain_place(t, c, shard, out, e);
    if (t->info.codec_key) {
        about.key = t->info.codec_key;
        about.key_len = t->info.codec_key_len;
    }
    codec = t->env.codec(c->encoding);
    if (!codec)
        return err_set(e, ENOTSUP, "%s: encoding %u of a chunk is not known",
                       shard->name, c->encoding);
    ret = source_check(shard, e);
    if (ret == 0)
        ret = codec->resolve(shard, c, &about, t->env.decoded, out, e);
    return ret < 0 ? err_wrap(e, "%s, item at byte %" PRIu64, shard->name, c->offset)
                   : 0;
}

/* Publishes what was found; when another thread was first, its finding stands. */
static void publish(struct tensor *t, size_t i, struct resolved *r)
{
    struct resolved *expected = NULL;

    if (!atomic_compare_exchange_strong(&t->resolved[i], &expected, r))
        source_put(r->src); /* its memory stays in the arena */
}

static int resolve(struct tensor *t, size_t i, struct err *e)
{
    struct chunk_place place = {0};
    struct resolved *r = NULL;
    int ret = find_place(t, plan_chunk(t->plan, i), &place, e);

    if (ret < 0)
        return ret;
    pthread_mutex_lock(&t->lock);
    r = arena_alloc(t->arena, sizeof *r);
    ret = r ? plan_lower(t->plan, i, &place, dtype_component(t->info.dtype), t->arena,
                         &r->op, e)
            : err_nomem(e);
    pthread_mutex_unlock(&t->lock);
    if (ret < 0) {
        source_put(place.src);
        return ret;
    }
    r->src = place.src;
    publish(t, i, r);
    return 0;
}

int tensor_place(struct tensor *t, size_t i, struct chunk_place *out, const char **path,
                 struct err *e)
{
    const struct chunk *c = plan_chunk(t->plan, i);

    *path = shard_of(t, c->file)->name;
    return find_place(t, c, out, e);
}

int tensor_verify(struct tensor *t, size_t i, struct err *e)
{
    const struct chunk *c = plan_chunk(t->plan, i);
    const struct chunk_codec *codec =
        c->encoding == CHUNK_PLAIN ? NULL : t->env.codec(c->encoding);

    if (!codec || !codec->verify)
        return 0;
    return codec->verify(shard_of(t, c->file), c, t->env.decoded, e);
}

/* ---- windows ---- */

/* The chunks of one window, resolved, and the runs that copy them. */
struct cut {
    struct tensor *t;
    size_t *chunk; /* indices in the plan */
    size_t n, cap;
    struct source **src; /* by tag: place in `chunk` */
    struct run_list runs;
    bool flags; /* any work on elements */
};

static void cut_release(struct cut *c)
{
    free(c->chunk);
    free(c->src);
    run_list_release(&c->runs);
}

static int note_chunk(void *user, size_t i)
{
    struct cut *c = user;

    if (c->n == c->cap) {
        size_t cap = c->cap ? c->cap * 2 : 16;
        size_t *grown = reallocarray(c->chunk, cap, sizeof *grown);

        if (!grown)
            return -ENOMEM;
        c->chunk = grown;
        c->cap = cap;
    }
    c->chunk[c->n++] = i;
    return 0;
}

static int resolve_nth(void *user, size_t n, struct err *e)
{
    struct cut *c = user;
    size_t i = c->chunk[n];

    if (atomic_load_explicit(&c->t->resolved[i], memory_order_acquire))
        return 0;
    return resolve(c->t, i, e);
}

/* Headers of items that nobody has looked at yet are read side by side. */
static int resolve_all(struct cut *c, struct err *e)
{
    bool missing = false;

    for (size_t n = 0; n < c->n && !missing; n++)
        missing =
            !atomic_load_explicit(&c->t->resolved[c->chunk[n]], memory_order_acquire);
    if (!missing)
        return 0;
    return pool_each(c->n > 1 ? c->t->env.pool : NULL, c->n, resolve_nth, c, e);
}

static int cut_begin(struct cut *c, uint64_t off, uint64_t len, struct err *e)
{
    int ret = plan_touched(c->t->plan, off, len, note_chunk, c);

    if (ret < 0)
        return err_nomem(e);
    ret = resolve_all(c, e);
    if (ret < 0)
        return ret;
    c->src = calloc(c->n + 1, sizeof *c->src);
    if (!c->src)
        return err_nomem(e);
    for (size_t n = 0; n < c->n; n++) {
        const struct resolved *r = atomic_load(&c->t->resolved[c->chunk[n]]);

        c->src[n] = r->src;
        c->flags |= r->op.flags != 0;
    }
    return 0;
}

static int cut_runs(struct cut *c, uint64_t off, uint64_t len, struct err *e)
{
    int ret = 0;

    for (size_t n = 0; ret == 0 && n < c->n; n++) {
        const struct resolved *r = atomic_load(&c->t->resolved[c->chunk[n]]);

        ret = plan_op_cut(&r->op, off, len, (uint32_t)n, &c->runs, e);
    }
    return ret;
}

static int check_sources(const struct cut *c, struct err *e)
{
    int ret = 0;

    for (size_t n = 0; ret == 0 && n < c->n; n++)
        if (n == 0 || c->src[n] != c->src[n - 1])
            ret = source_check(c->src[n], e);
    return ret;
}

/* Fills a window whose edges cut no element that needs work. */
static int fill(struct cut *c, uint64_t off, size_t len, void *dst, struct err *e)
{
    struct fetch_sources sources = {.src = c->src, .count = c->n};
    int ret = cut_runs(c, off, len, e);

    if (ret == 0)
        ret = check_sources(c, e);
    if (ret == 0)
        ret = fetch_window(&c->runs, &sources, c->t->env.pool, dst, len, e);
    if (ret == 0) /* what was copied is what was scanned only if nothing moved since */
        ret = check_sources(c, e);
    return ret;
}

/* Elements at the edges are needed whole: fills a wider window and copies its middle. */
static int fill_widened(struct cut *c, uint64_t off, size_t len, void *dst,
                        struct err *e)
{
    uint64_t wide_off = off, wide_len = len;
    CLEANUP_FREE unsigned char *wide = NULL;
    int ret;

    plan_widen(c->t->plan, &wide_off, &wide_len);
    if (wide_off == off && wide_len == len)
        return fill(c, off, len, dst, e);
    wide = malloc((size_t)wide_len);
    if (!wide)
        return err_nomem(e);
    ret = fill(c, wide_off, (size_t)wide_len, wide, e);
    if (ret == 0)
        memcpy(dst, wide + (off - wide_off), len);
    return ret;
}

static int read_window(struct tensor *t, uint64_t off, size_t len, void *dst,
                       struct err *e)
{
    CLEANUP(cut_release) struct cut c = {.t = t};
    int ret = cut_begin(&c, off, len, e);

    if (ret < 0)
        return ret;
    return c.flags ? fill_widened(&c, off, len, dst, e) : fill(&c, off, len, dst, e);
}

int tensor_read(struct tensor *t, uint64_t off, size_t len, void *dst, struct err *e)
{
    size_t done = 0;

    while (done < len) {
        size_t part = MIN(len - done, (size_t)WINDOW_MAX);
        int ret = read_window(t, off + done, part, (char *)dst + done, e);

        if (ret < 0)
            return err_wrap(e, "tensor %s, bytes %" PRIu64 "+%zu", t->info.key,
                            off + done, part);
        done += part;
    }
    return 0;
}

/* ---- replies by pieces ---- */

static bool hold(struct reader_iov *v, struct source *src)
{
    for (unsigned i = 0; i < v->nheld; i++)
        if (v->held[i] == src)
            return true;
    if (v->nheld == ARRAY_SIZE(v->held))
        return false;
    v->held[v->nheld++] = source_get(src);
    return true;
}

bool iov_add(struct reader_iov *v, const void *p, size_t len, struct source *src)
{
    struct iovec *last = v->count ? &v->iov[v->count - 1] : NULL;

    if (!len)
        return true;
    if (src && !hold(v, src))
        return false;
    if (last && (const char *)last->iov_base + last->iov_len == p) {
        last->iov_len += len;
        return true;
    }
    if (v->count == v->max)
        return false;
    /* writev takes a pointer that is not const, and only reads. */
    v->iov[v->count++] = (struct iovec){(void *)(uintptr_t)p, len};
    return true;
}

/* One copy of a run, in order of where it goes. */
struct piece {
    uint64_t dst, src, len;
    uint32_t tag;
};

static int compare_pieces(const void *a, const void *b)
{
    const struct piece *x = a, *y = b;

    return (x->dst > y->dst) - (x->dst < y->dst);
}

/* How many pieces the window is in, or 0 when they are too many or too short. */
static size_t count_pieces(const struct cut *c, int room)
{
    uint64_t copies = 0;

    if (c->flags)
        return 0;
    for (size_t i = 0; i < c->runs.count; i++) {
        const struct plan_run *r = &c->runs.run[i];

        /* A short rest at a window's edge is fine, many short rows are not. */
        if ((r->len < PIECE_MIN && r->count > 2) || r->count > (uint64_t)room)
            return 0;
        copies += r->count;
        if (copies > (uint64_t)room)
            return 0;
    }
    return (size_t)copies;
}

static void expand(const struct run_list *runs, struct piece *out)
{
    size_t n = 0;

    for (size_t i = 0; i < runs->count; i++) {
        const struct plan_run *r = &runs->run[i];

        for (uint64_t k = 0; k < r->count; k++)
            out[n++] = (struct piece){.dst = r->dst + k * r->dst_step,
                                      .src = r->src + k * (uint64_t)r->src_step,
                                      .len = r->len,
                                      .tag = r->tag};
    }
    qsort(out, n, sizeof *out, compare_pieces);
}

static int add_pieces(const struct cut *c, size_t n, struct reader_iov *v,
                      struct err *e)
{
    CLEANUP_FREE struct piece *piece = reallocarray(NULL, n, sizeof *piece);

    if (!piece)
        return err_nomem(e);
    expand(&c->runs, piece);
    for (size_t i = 0; i < n; i++) {
        struct source *src = c->src[piece[i].tag];
        const char *map = source_map(src);

        if (!iov_add(v, map + piece[i].src, (size_t)piece[i].len, src))
            return 0;
    }
    return 1;
}

int tensor_map(struct tensor *t, uint64_t off, size_t len, struct reader_iov *v,
               struct err *e)
{
    CLEANUP(cut_release) struct cut c = {.t = t};
    struct fetch_sources sources;
    size_t pieces;
    int ret;

    if (!len)
        return 1;
    ret = cut_begin(&c, off, len, e);
    if (ret == 0)
        ret = c.flags ? 0 : cut_runs(&c, off, len, e);
    if (ret == 0)
        ret = check_sources(&c, e);
    if (ret < 0)
        return err_wrap(e, "tensor %s, bytes %" PRIu64 "+%zu", t->info.key, off, len);
    sources = (struct fetch_sources){.src = c.src, .count = c.n};
    pieces = count_pieces(&c, v->max - v->count);
    if (!pieces || !fetch_all_mapped(&c.runs, &sources))
        return 0;
    return add_pieces(&c, pieces, v, e);
}

void tensor_will_need(struct tensor *t, uint64_t off, uint64_t len)
{
    CLEANUP(cut_release) struct cut c = {.t = t};
    struct fetch_sources sources;
    struct err ignored = {0};

    if (cut_begin(&c, off, len, &ignored) < 0 || cut_runs(&c, off, len, &ignored) < 0)
        return;
    sources = (struct fetch_sources){.src = c.src, .count = c.n};
    fetch_will_need(&c.runs, &sources);
}
