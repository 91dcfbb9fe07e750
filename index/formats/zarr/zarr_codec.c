/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_codec.c - where the elements of a compressed chunk lie: in a decoded copy. */
#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "base/checked.h"
#include "base/err.h"
#include "index/formats/zarr/zarr_priv.h"
#include "remote/decoded.h"
#include "remote/source.h"

/* decode_block_fn */
static int decode(void *user, struct source *in, void *dst, size_t size, struct err *e)
{
    const struct zarr_spec *spec = user;

    return zarr_decode(&spec->chain, in, dst, size, e);
}

static int place(const struct chunk *c, const struct chunk_tensor *t, uint64_t bytes,
                 struct chunk_place *out, struct err *e)
{
    int64_t unit = dtype_unit(t->dtype);

    TRY(chunk_steps(c, t->units->nd, bytes / (uint64_t)unit, out->step, e));
    for (uint32_t k = 0; k < t->units->nd; k++)
        if (__builtin_mul_overflow(out->step[k], unit, &out->step[k]))
            return err_set(e, EBADMSG, "a stride over 2^63 bytes");
    out->base = c->first * (uint64_t)unit; /* within the bytes */
    out->flags = c->flags;
    out->decoded = true;
    return 0;
}

/* The stored bytes as a source. */
static int open_stored(struct source *shard, const struct chunk *c,
                       const struct zarr_spec *spec, struct source **out, struct err *e)
{
    if (c->encoding == CHUNK_ZARR_LITERAL) {
        if (!spec->literal)
            return err_set(e, EBADMSG, "the index has not the bytes of a chunk");
        return source_from_memory(spec->literal, spec->literal_len, false, shard->name,
                                  out, e);
    }
    if (range_outside(c->offset, c->length, shard->size))
        return err_set(e, EBADMSG, "the file has only %" PRIu64 " bytes", shard->size);
    return source_window(shard, c->offset, c->length, out, e);
}

static int open_decoded(struct source *shard, const struct chunk *c,
                        const struct chunk_tensor *t, struct decoded_cache *decoded,
                        struct chunk_place *out, struct err *e)
{
    CLEANUP(source_putp) struct source *stored = NULL;
    struct zarr_spec spec;
    /* Other arrays may name the same bytes, and mean something else by them. */
    struct decoded_key key = decoded_key_of(shard, c->offset, c->length, c->encoding);

    if (!decoded)
        return err_set(e, ENOTSUP, "compressed, and there is no place to decode it");
    key.variant = XXH3_64bits(t->key, t->key_len);
    TRY(zarr_spec_read(t->key, t->key_len, &spec, e));
    TRY(open_stored(shard, c, &spec, &stored, e));
    if (spec.bytes == 0 || spec.bytes > INT64_MAX)
        return err_set(e, EBADMSG, "chunks of %" PRIu64 " bytes", spec.bytes);
    TRY(place(c, t, spec.bytes, out, e));
    return decoded_get_block(decoded, &key, stored, (size_t)spec.bytes, decode, &spec,
                             &out->src, e);
}

static int resolve(struct source *shard, const struct chunk *c,
                   const struct chunk_tensor *t, struct decoded_cache *decoded,
                   struct chunk_place *out, struct err *e)
{
    if (open_decoded(shard, c, t, decoded, out, e) < 0)
        return err_wrap(e, "%s, chunk of %" PRIu64 " bytes at %" PRIu64, shard->name,
                        c->length, c->offset);
    return 0;
}

const struct chunk_codec codec_zarr = {
    .encoding = CHUNK_ZARR,
    .name = "zarr",
    .decodes = true,
    .resolve = resolve,
};

const struct chunk_codec codec_zarr_literal = {
    .encoding = CHUNK_ZARR_LITERAL,
    .name = "zarr-literal",
    .decodes = true,
    .resolve = resolve,
};
