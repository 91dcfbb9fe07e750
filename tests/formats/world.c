/* SPDX-License-Identifier: MIT */
/* tests/formats/world.c - a source opened with its index in memory, and tensors read. */
#include "world.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include <openssl/sha.h>

#include "base/arena.h"
#include "base/err.h"
#include "remote/decoded.h"
#include "remote/source.h"
#include "remote/store.h"

enum { MEMORY = 1 << 28 };

int world_open(const char *path, struct world *out, struct err *e)
{
    static const struct store_options store_options;
    const struct catalog_options options = {.memory = true};
    const char *tmp = getenv("TMPDIR");

    *out = (struct world){.arena = arena_new(MEMORY)};
    if (!out->arena)
        return err_nomem(e);
    if (store_open_local(path, &store_options, &out->store, e) < 0 ||
        catalog_open(&options, out->store->identity, &out->catalog, e) < 0 ||
        decoded_new(tmp ? tmp : "/tmp", MEMORY, &out->decoded, e) < 0 ||
        scanner_new(out->store, out->catalog, NULL, &out->scanner, e) < 0) {
        world_close(out);
        return -e->code;
    }
    return 0;
}

void world_close(struct world *w)
{
    scanner_free(w->scanner);
    catalog_close(w->catalog);
    decoded_free(w->decoded);
    store_close(w->store);
    arena_free(w->arena);
    *w = (struct world){0};
}

/* One chunk on its way into the tensor. */
struct copy {
    const struct tensor_info *t;
    struct shape units; /* of the tensor */
    const struct chunk *c;
    struct chunk_place place;
    unsigned char *dst, *seen; /* `seen`: how often each unit was written */
};

/* chunk_tensor.open */
struct others {
    struct world *w;
    int64_t checkpoint;
};

static int open_other(void *user, uint32_t number, struct source **out, struct err *e)
{
    struct others *o = user;
    struct catalog_file file;

    if (catalog_file(o->w->catalog, o->checkpoint, number, o->w->arena, &file, e) < 0 ||
        o->w->store->ops->open(o->w->store, file.path, out, e) < 0)
        return -e->code;
    return 0;
}

/* One element that stands for all: its bytes, out of the hexadecimal digits. */
static int place_fill(struct copy *k, struct err *e)
{
    size_t unit = dtype_unit(k->t->dtype);
    char *value = calloc(unit, 1);

    if (!value)
        return err_nomem(e);
    if (!k->c->param || k->c->param_len != 2 * unit) {
        free(value);
        return err_set(e, EBADMSG, "a fill value of %u digits", k->c->param_len);
    }
    for (size_t i = 0; i < unit; i++) {
        char digits[3] = {k->c->param[2 * i], k->c->param[2 * i + 1], 0};

        value[i] = (char)strtol(digits, NULL, 16);
    }
    return source_from_memory(value, unit, true, "fill", &k->place.src, e);
}

static int place_chunk(struct world *w, int64_t checkpoint, struct source *src,
                       struct copy *k, struct err *e)
{
    struct chunk_tensor about = {.key = k->t->codec_key ? k->t->codec_key : k->t->key,
                                 .key_len = k->t->codec_key ? k->t->codec_key_len
                                                            : k->t->key_len,
                                 .dtype = k->t->dtype,
                                 .units = &k->units,
                                 .open = open_other,
                                 .user = &(struct others){w, checkpoint}};
    int64_t step = dtype_unit(k->t->dtype);
    const struct chunk_codec *codec;

    if (k->c->encoding == CHUNK_FILL)
        return place_fill(k, e);
    if (k->c->param) {
        about.key = k->c->param;
        about.key_len = k->c->param_len;
    }
    if (k->c->encoding != CHUNK_PLAIN) {
        codec = format_codec(k->c->encoding);
        return codec ? codec->resolve(src, k->c, &about, w->decoded, &k->place, e)
                     : err_set(e, ENOTSUP, "encoding %u", k->c->encoding);
    }
    k->place.src = source_get(src);
    k->place.base = k->c->offset + k->c->first * dtype_unit(k->t->dtype);
    k->place.flags = k->c->flags;
    for (uint32_t d = k->units.nd; d-- > 0; step *= (int64_t)k->c->size[d])
        k->place.step[d] =
            k->c->step ? k->c->step[d] * (int64_t)dtype_unit(k->t->dtype) : step;
    return 0;
}

/* Other types than floating point, complex ones too, have no sign bit to turn. */
static bool has_sign_bit(enum dtype d)
{
    return d == DTYPE_F16 || d == DTYPE_BF16 || d == DTYPE_F32 || d == DTYPE_F64 ||
           dtype_is_complex(d);
}

/* Swaps and negations as the flags say; what no fixture has is refused. */
static int apply_flags(const struct copy *k, unsigned char *element, struct err *e)
{
    unsigned size = dtype_component(k->t->dtype), unit = dtype_unit(k->t->dtype);
    uint8_t flags = k->place.flags;

    if ((flags & (CHUNK_CONJ | CHUNK_NEG)) && !has_sign_bit(k->t->dtype))
        return err_set(e, ENOTSUP, "a chunk with flags %u", flags);
    for (unsigned at = 0; at < unit; at += size) {
        for (unsigned i = 0; (flags & CHUNK_SWAP) && i < size / 2; i++) {
            unsigned char x = element[at + i];

            element[at + i] = element[at + size - 1 - i];
            element[at + size - 1 - i] = x;
        }
        if ((flags & CHUNK_CONJ) && at > 0)
            element[at + size - 1] ^= 0x80;
        if (flags & CHUNK_NEG)
            element[at + size - 1] ^= 0x80;
    }
    return 0;
}

static int copy_element(struct copy *k, const uint64_t *at, struct err *e)
{
    unsigned unit = dtype_unit(k->t->dtype);
    uint64_t to = 0, from = k->place.base;

    for (uint32_t d = 0; d < k->units.nd; d++) {
        if (k->c->start[d] + at[d] >= k->units.dim[d])
            return err_set(e, EBADMSG, "a chunk outside of the tensor");
        to = to * k->units.dim[d] + k->c->start[d] + at[d];
        from += at[d] * (uint64_t)k->place.step[d];
    }
    if (k->seen[to] < UINT8_MAX)
        k->seen[to]++;
    if (source_read(k->place.src, from, unit, k->dst + to * unit, e) < 0)
        return -e->code;
    return apply_flags(k, k->dst + to * unit, e);
}

static bool is_empty(const struct copy *k)
{
    for (uint32_t d = 0; d < k->units.nd; d++)
        if (k->c->size[d] == 0)
            return true;
    return false;
}

static int copy_box(struct copy *k, struct err *e)
{
    uint64_t at[SHAPE_MAX_DIMS] = {0};
    uint32_t nd = k->units.nd, d;

    do {
        if (copy_element(k, at, e) < 0)
            return -e->code;
        for (d = nd; d-- > 0;) {
            if (++at[d] < k->c->size[d])
                break;
            at[d] = 0;
        }
    } while (d != UINT32_MAX);
    return 0;
}

static int copy_chunk(struct world *w, int64_t checkpoint, struct copy *k,
                      struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    struct catalog_file file;
    int rc = catalog_file(w->catalog, checkpoint, k->c->file, w->arena, &file, e);

    if (rc == 0)
        rc = w->store->ops->open(w->store, file.path, &src, e);
    if (rc == 0 && !file_id_equal(&src->id, &file.id))
        rc = err_set(e, ESTALE, "%s: not the file of the index", file.path);
    if (rc == 0)
        rc = place_chunk(w, checkpoint, src, k, e);
    if (rc == 0)
        rc = copy_box(k, e);
    source_put(k->place.src);
    return rc;
}

static int check_seen(const unsigned char *seen, uint64_t n, struct err *e)
{
    for (uint64_t i = 0; i < n; i++)
        if (seen[i] != 1)
            return err_set(e, EBADMSG, "unit %" PRIu64 " was written %u times", i,
                           seen[i]);
    return 0;
}

int world_read(struct world *w, int64_t checkpoint, const struct tensor_info *t,
               struct buf *out, struct err *e)
{
    struct copy k = {.t = t};
    uint64_t count = t->bytes / dtype_unit(t->dtype);
    CLEANUP_FREE unsigned char *seen = NULL;
    const struct chunk *c;
    size_t n;

    if (t->fault)
        return err_set(e, EBADMSG, "%s", t->fault);
    if (shape_units(&t->shape, t->dtype, &k.units, e) < 0 ||
        catalog_chunks(w->catalog, checkpoint, t, w->arena, &c, &n, e) < 0)
        return -e->code;
    seen = calloc(count + 1, 1);
    k.dst = buf_grow(out, t->bytes);
    k.seen = seen;
    if (!seen || !k.dst)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++) {
        k.c = &c[i];
        k.place = (struct chunk_place){0};
        if (!is_empty(&k) && copy_chunk(w, checkpoint, &k, e) < 0)
            return err_wrap(e, "chunk %zu", i);
    }
    return check_seen(seen, count, e);
}

struct tensor_list {
    struct arena *arena;
    struct tensor_info *t;
    size_t count, cap;
};

static const char *keep(struct arena *a, const char *text)
{
    return text ? arena_memdup(a, text, strlen(text)) : NULL;
}

static int note_tensor(void *user, const struct tensor_info *t)
{
    struct tensor_list *l = user;
    struct tensor_info *mine;

    if (l->count == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 64;
        l->t = reallocarray(l->t, l->cap, sizeof *l->t);
        if (!l->t)
            abort();
    }
    mine = &l->t[l->count++];
    *mine = *t;
    mine->key = arena_memdup(l->arena, t->key, t->key_len);
    mine->name = keep(l->arena, t->name);
    mine->name_npy = keep(l->arena, t->name_npy);
    mine->part = keep(l->arena, t->part);
    mine->fault = keep(l->arena, t->fault);
    mine->attributes = keep(l->arena, t->attributes);
    if (t->codec_key)
        mine->codec_key = arena_memdup(l->arena, t->codec_key, t->codec_key_len);
    return 0;
}

int world_tensors(struct world *w, int64_t checkpoint, struct tensor_info **out,
                  size_t *count, struct err *e)
{
    struct tensor_list l = {.arena = w->arena};
    int rc = catalog_tensors(w->catalog, checkpoint, 0, note_tensor, &l, e);

    *out = arena_array(w->arena, l.count + 1, sizeof **out);
    *count = l.count;
    if (*out && l.count > 0)
        memcpy(*out, l.t, l.count * sizeof **out);
    free(l.t);
    return *out ? rc : err_nomem(e);
}

void sha256_hex(const void *data, size_t len, char out[65])
{
    unsigned char digest[SHA256_DIGEST_LENGTH];

    SHA256(data, len, digest);
    for (size_t i = 0; i < sizeof digest; i++)
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
}
