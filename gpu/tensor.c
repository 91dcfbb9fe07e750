/* SPDX-License-Identifier: MIT */
/* gpu/tensor.c - a tensor opened: its plan, its shards, where its chunks lie. */
#include "gpu/tensor_priv.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/vec.h"
#include "gpu/cast.h"
#include "remote/open_files.h"
#include "remote/source.h"

enum {
    /* Chunks of one tensor: 10 M of them at about 100 bytes (SECURITY-parsers rule 4). */
    TENSOR_MEMORY = 1 << 30,
    FILE_MEMORY = 64 << 10, /* the row of one file */
    /*
     * Shards that an open tensor keeps open, if this process may have so many open beside
     * those of other tensors. Formats that store a chunk a file have hundreds of
     * thousands: of those each is opened for the window that needs it.
     */
    SHARDS_KEPT = 256,
    RECENT = 64,
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

uint64_t tensor_size(const struct tensor *t)
{
    return t->info.bytes;
}

/* ---- opening ---- */

/* Numbers of files as chunks name them; of few files, by turns, each once. */
struct numbers {
    uint32_t *number; /* malloc */
    size_t n, cap;
    uint64_t recent[RECENT]; /* by number: 1 + the last one that was added */
};

static void numbers_release(struct numbers *s)
{
    free(s->number);
}

static void numbers_clear(struct numbers *s)
{
    s->n = 0;
    memset(s->recent, 0, sizeof s->recent);
}

static int numbers_add(struct numbers *s, uint32_t number)
{
    uint64_t *recent = &s->recent[number % RECENT];

    if (*recent == (uint64_t)number + 1)
        return 0;
    if (!VEC_ROOM(s->number, s->n, s->cap))
        return -ENOMEM;
    *recent = (uint64_t)number + 1;
    s->number[s->n++] = number;
    return 0;
}

static int compare_numbers(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

/*
 * One of few is opened now. Of many it is noted what they are: the index may be made anew
 * while the tensor is open.
 */
static int add_shard(struct tensor *t, uint32_t number, struct err *e)
{
    struct shard *s = &t->shards[t->nshards];
    struct catalog_file file;
    int ret = catalog_file(t->env.catalog, t->checkpoint, number, t->arena, &file, e);

    if (ret == 0 && t->keeps_shards)
        ret = open_files_get(t->env.files, file.path, &file.id, &s->src, e);
    if (ret < 0)
        return ret;
    s->number = number;
    s->path = file.path;
    s->id = file.id;
    t->nshards++;
    return 0;
}

static size_t count_shards(const uint32_t *number, size_t n)
{
    size_t count = 0;

    for (size_t i = 0; i < n; i++)
        count += i == 0 || number[i] != number[i - 1];
    return count;
}

/* Each file that a chunk names, once. */
static int add_shards(struct tensor *t, struct numbers *of, struct err *e)
{
    size_t n = of->n, shards;
    const uint32_t *number = of->number;
    int ret = 0;

    if (n)
        qsort(of->number, n, sizeof *number, compare_numbers);
    shards = count_shards(number, n);
    t->shards = arena_array(t->arena, shards + 1, sizeof *t->shards);
    if (!t->shards)
        return err_nomem(e);
    t->keeps_shards = shards <= SHARDS_KEPT && open_files_promise(t->env.files, shards);
    for (size_t i = 0; ret == 0 && i < n; i++)
        if (i == 0 || number[i] != number[i - 1])
            ret = add_shard(t, number[i], e);
    if (t->keeps_shards)
        open_files_promised(t->env.files, shards);
    return ret;
}

/* Notes what is asked of a tensor's chunks as a whole. */
static int note_chunk(struct tensor *t, const struct chunk *c, struct numbers *files,
                      struct err *e)
{
    if (c->encoding != CHUNK_PLAIN && !t->decodes) {
        const struct chunk_codec *codec = t->env.codec(c->encoding);

        t->decodes = codec && codec->decodes;
    }
    return numbers_add(files, c->file) < 0 ? err_nomem(e) : 0;
}

struct packing {
    struct tensor *t;
    struct numbers *files;
    struct plan_packer *packer;
};

/* chunk_list_fn */
static int pack_chunk(void *user, const struct chunk *c, size_t i, size_t n,
                      struct err *e)
{
    struct packing *p = user;
    int ret = note_chunk(p->t, c, p->files, e);

    return ret == 0 ? plan_packer_add(p->packer, c, i, n, e) : ret;
}

/* The plan of many chunks, if they are those of a grid: 1, else 0. */
static int build_packed(struct tensor *t, int64_t checkpoint, struct numbers *files,
                        struct err *e)
{
    CLEANUP(plan_packer_freep) struct plan_packer *packer = NULL;
    struct packing p = {.t = t, .files = files};
    const struct chunk_list *list;
    int ret = plan_packer_new(t->arena, &t->units, t->unit, &packer, e);

    if (ret < 0)
        return ret;
    p.packer = packer;
    ret = catalog_chunk_list(t->env.catalog, checkpoint, &t->info, t->arena, pack_chunk,
                             &p, &list, e);
    if (ret == 0)
        return plan_packer_finish(packer, list, &t->plan, e);
    return MIN(ret, 0);
}

static int build_listed(struct tensor *t, int64_t checkpoint, struct numbers *files,
                        struct err *e)
{
    struct plan_builder *b;
    const struct chunk *chunk;
    size_t n;
    int ret =
        catalog_chunks(t->env.catalog, checkpoint, &t->info, t->arena, &chunk, &n, e);

    if (ret < 0 || (ret = plan_begin(t->arena, &t->units, t->unit, &b, e)) < 0)
        return ret;
    numbers_clear(files); /* who tried to pack them has noted some */
    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = note_chunk(t, &chunk[i], files, e);
    if (ret == 0)
        ret = plan_take(b, chunk, n, e);
    return ret == 0 ? plan_finish(b, &t->plan, e) : ret;
}

static int build_plan(struct tensor *t, int64_t checkpoint, struct numbers *files,
                      struct err *e)
{
    int ret;

    TRY(shape_units(&t->info.shape, t->info.stored, &t->units, e));
    if (!cast_possible(t->info.stored, t->info.dtype) && tensor_is_cast(t))
        return err_set(e, EBADMSG, "a cast of %s to %s", dtype_name(t->info.stored),
                       dtype_name(t->info.dtype));
    t->unit = dtype_unit(t->info.stored);
    ret = t->info.chunks >= PLAN_PACKED_MIN ? build_packed(t, checkpoint, files, e) : 0;
    if (ret == 0)
        ret = build_listed(t, checkpoint, files, e);
    if (ret < 0)
        return ret;
    t->resolved = arena_array(t->arena, plan_chunks(t->plan) + 1, sizeof *t->resolved);
    return t->resolved ? 0 : err_nomem(e);
}

static int load(struct tensor *t, int64_t checkpoint, uint32_t ord, struct err *e)
{
    CLEANUP(numbers_release) struct numbers files = {0};
    int ret = catalog_tensor(t->env.catalog, checkpoint, ord, t->arena, &t->info, e);

    if (ret < 0)
        return ret;
    if (t->info.fault)
        return err_set(e, EBADMSG, "%s", t->info.fault);
    ret = build_plan(t, checkpoint, &files, e);
    if (ret == 0)
        ret = add_shards(t, &files, e);
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
    t->checkpoint = checkpoint;
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

/* chunk_tensor.open: a file when it is still the one that was scanned. */
static int open_other(void *user, uint32_t number, struct source **out, struct err *e)
{
    const struct tensor *t = user;
    CLEANUP(arena_freep) struct arena *a = arena_new(FILE_MEMORY);
    struct catalog_file file;
    int ret;

    if (!a)
        return err_nomem(e);
    ret = catalog_file(t->env.catalog, t->checkpoint, number, a, &file, e);
    return ret < 0 ? ret : open_files_get(t->env.files, file.path, &file.id, out, e);
}

/* Of a chunk of the plan: add_shards() has noted the files of all. */
static const struct shard *find_shard(const struct tensor *t, uint32_t number)
{
    size_t lo = 0, hi = t->nshards;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (t->shards[mid].number < number)
            lo = mid + 1;
        else
            hi = mid;
    }
    assert(lo < t->nshards && t->shards[lo].number == number);
    return &t->shards[lo];
}

/* The caller's reference. */
static int shard_get(struct tensor *t, uint32_t number, struct source **out,
                     struct err *e)
{
    const struct shard *s = find_shard(t, number);

    if (!t->keeps_shards)
        return open_files_get(t->env.files, s->path, &s->id, out, e);
    *out = source_get(s->src);
    return 0;
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

/* What the chunk's codec may know of the tensor. */
static struct chunk_tensor about_chunk(struct tensor *t, const struct chunk *c)
{
    struct chunk_tensor about = {.key = t->info.key,
                                 .key_len = t->info.key_len,
                                 .dtype = t->info.stored,
                                 .units = &t->units,
                                 .open = open_other,
                                 .user = t};

    if (c->param) {
        about.key = c->param;
        about.key_len = c->param_len;
    } else if (t->info.codec_key) {
        about.key = t->info.codec_key;
        about.key_len = t->info.codec_key_len;
    }
    return about;
}

/* The bytes of the value; false: not `n` of them. */
static bool fill_value(const struct chunk *c, unsigned char *value, unsigned n)
{
    static const char digits[] = "0123456789abcdef";

    if (!c->param || c->param_len != 2 * n)
        return false;
    for (unsigned i = 0; i < n; i++) {
        const char *high = memchr(digits, c->param[2 * i], 16);
        const char *low = memchr(digits, c->param[2 * i + 1], 16);

        if (!high || !low)
            return false;
        value[i] = (unsigned char)((high - digits) << 4 | (low - digits));
    }
    return true;
}

/* One value, all over the box: a source of as many bytes as the box has. */
static int fill_place(const struct tensor *t, const struct chunk *c,
                      struct chunk_place *out, struct err *e)
{
    unsigned char value[SOURCE_FILL_MAX];
    uint64_t size = t->unit;

    if (t->unit > sizeof value || !fill_value(c, value, t->unit))
        return err_set(e, EBADMSG, "the index does not tell the fill value");
    for (uint32_t k = t->units.nd; k-- > 0;) {
        out->step[k] = (int64_t)size;
        if (mul_overflows(size, c->size[k], &size) || size > INT64_MAX)
            return err_set(e, EBADMSG, "a chunk's size is past 2^63");
    }
    out->base = 0;
    out->flags = c->flags;
    return source_from_fill(value, t->unit, size, &out->src, e);
}

static int shard_place(struct tensor *t, const struct chunk *c, struct source *shard,
                       struct chunk_place *out, struct err *e)
{
    const struct chunk_codec *codec;
    struct chunk_tensor about = about_chunk(t, c);
    int ret;

    if (range_outside(c->offset, c->length, shard->size))
        return err_set(e, EBADMSG,
                       "%s: a chunk is bytes %" PRIu64 "+%" PRIu64
                       ", the file has %" PRIu64,
                       shard->name, c->offset, c->length, shard->size);
    if (c->encoding == CHUNK_PLAIN)
        return plain_place(t, c, shard, out, e);
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

static int find_place(struct tensor *t, const struct chunk *c, struct chunk_place *out,
                      struct err *e)
{
    CLEANUP(source_putp) struct source *shard = NULL;

    if (c->encoding == CHUNK_FILL)
        return fill_place(t, c, out, e);
    TRY(shard_get(t, c->file, &shard, e));
    return shard_place(t, c, shard, out, e);
}

bool tensor_decodes(const struct tensor *t, size_t i)
{
    struct chunk_room room;
    const struct chunk_codec *codec;
    const struct chunk *c;

    if (!t->decodes)
        return false;
    room.list = NULL;
    c = plan_chunk(t->plan, i, &room);
    codec = c->encoding == CHUNK_PLAIN ? NULL : t->env.codec(c->encoding);
    return codec && codec->decodes;
}

/* Publishes what was found; when another thread was first, its finding stands. */
static void publish(struct tensor *t, size_t i, struct resolved *r)
{
    struct resolved *expected = NULL;

    if (!atomic_compare_exchange_strong(&t->resolved[i], &expected, r))
        source_put(r->src); /* its memory stays in the arena */
}

/* Notes where chunk i lies, for all windows to come. */
static int note_place(struct tensor *t, size_t i, const struct chunk *c,
                      const struct chunk_place *place, struct err *e)
{
    struct resolved *r;
    int ret;

    pthread_mutex_lock(&t->lock);
    r = arena_alloc(t->arena, sizeof *r);
    ret = r ? plan_lower(t->plan, c, place, dtype_component(t->info.stored), t->arena,
                         &r->op, e)
            : err_nomem(e);
    pthread_mutex_unlock(&t->lock);
    if (ret < 0)
        return ret;
    r->size = place->src->size;
    if (!place->decoded && t->keeps_shards)
        r->src = source_get(place->src);
    publish(t, i, r);
    return 0;
}

int tensor_resolve(struct tensor *t, size_t i, struct source **out, struct err *e)
{
    const struct resolved *r =
        atomic_load_explicit(&t->resolved[i], memory_order_acquire);
    struct chunk_place place = {0};
    struct chunk_room room;
    const struct chunk *c;
    int ret;

    if (r && r->src) {
        *out = source_get(r->src);
        return 0;
    }
    room.list = NULL;
    c = plan_chunk(t->plan, i, &room);
    ret = find_place(t, c, &place, e);
    if (ret == 0 && !r)
        ret = note_place(t, i, c, &place, e);
    else if (ret == 0 && place.src->size != r->size)
        ret = err_set(e, EBADMSG, "%s: a chunk has not the size that it had before",
                      place.src->name);
    if (ret < 0) {
        source_put(place.src);
        return ret;
    }
    *out = place.src;
    return 0;
}

bool tensor_is_placed(const struct tensor *t, size_t i)
{
    const struct resolved *r =
        atomic_load_explicit(&t->resolved[i], memory_order_acquire);

    return r && r->src;
}

int tensor_guess(struct tensor *t, size_t i, struct arena *a, struct plan_op *op,
                 struct source **out, struct err *e)
{
    struct chunk_room room = {0};
    const struct chunk *c = plan_chunk(t->plan, i, &room);
    CLEANUP(source_putp) struct source *shard = NULL;
    struct chunk_place place = {0};
    int ret;

    if (c->encoding == CHUNK_FILL)
        return err_set(e, ENOENT, "no file has the chunk");
    ret = shard_get(t, c->file, &shard, e);
    if (ret == 0)
        ret = plain_place(t, c, shard, &place, e);
    if (ret == 0)
        ret = plan_lower(t->plan, c, &place, dtype_component(t->info.stored), a, op, e);
    source_put(place.src);
    if (ret == 0)
        *out = steal(&shard);
    return ret;
}

int tensor_place(struct tensor *t, size_t i, struct chunk_place *out, const char **path,
                 struct err *e)
{
    struct chunk_room room = {0};
    const struct chunk *c = plan_chunk(t->plan, i, &room);

    *path = find_shard(t, c->file)->path;
    return find_place(t, c, out, e);
}

int tensor_verify(struct tensor *t, size_t i, struct chunk_look *look, struct err *e)
{
    struct chunk_room room = {0};
    const struct chunk *c = plan_chunk(t->plan, i, &room);
    const struct chunk_codec *codec =
        c->encoding == CHUNK_PLAIN ? NULL : t->env.codec(c->encoding);

    CLEANUP(source_putp) struct source *shard = NULL;

    if (!codec || !codec->verify)
        return 0;
    TRY(shard_get(t, c->file, &shard, e));
    return codec->verify(shard, c, t->env.decoded, look, e);
}

int tensor_compare(struct tensor *t, size_t i, struct err *e)
{
    struct chunk_room room = {0};
    const struct chunk *c = plan_chunk(t->plan, i, &room);
    const struct chunk_codec *codec =
        c->encoding == CHUNK_PLAIN ? NULL : t->env.codec(c->encoding);
    struct chunk_tensor about = about_chunk(t, c);
    CLEANUP(source_putp) struct source *shard = NULL;

    if (!codec || !codec->compare)
        return 0;
    TRY(shard_get(t, c->file, &shard, e));
    return codec->compare(shard, c, &about, e);
}
