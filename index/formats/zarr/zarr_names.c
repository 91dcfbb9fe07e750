/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_names.c - codecs by the names that zarr v2 and v3 metadata use. */
#include "index/formats/zarr/zarr_priv.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/json.h"
#include "base/json_lex.h"

/* As json_parse() has them. */
enum { MAX_DEPTH = 64, MAX_VALUES = 4000000 };

void zarr_refuse(struct zarr_array *a, const char *fmt, ...)
{
    va_list ap;

    if (a->why[0])
        return;
    va_start(ap, fmt);
    vsnprintf(a->why, sizeof a->why, fmt, ap);
    va_end(ap);
}

void zarr_array_broken(struct zarr_array *out, const char *fmt, ...)
{
    va_list ap;

    *out = (struct zarr_array){.dtype = DTYPE_U8, .shape.nd = 1};
    va_start(ap, fmt);
    vsnprintf(out->why, sizeof out->why, fmt, ap);
    va_end(ap);
    if (!out->why[0])
        zarr_refuse(out, "unknown fault");
}

bool zarr_take_dims(const struct json *v, struct shape *out)
{
    *out = (struct shape){0};
    if (!v || json_kind(v) != JSON_ARRAY || json_count(v) > SHAPE_MAX_DIMS)
        return false;
    for (v = json_first(v); v; v = json_next(v))
        if (!json_u64(v, &out->dim[out->nd++]))
            return false;
    return true;
}

/* ---- the text of a document ---- */

static int each_member(struct json_lexer *l, zarr_member_fn *fn, void *user,
                       struct err *e)
{
    int step = json_lex_enter_object(l, e);

    while (step == JSON_VALUE) {
        CLEANUP_FREE char *key = NULL;
        size_t key_len = l->key.len, start;
        int rc;

        key = malloc(key_len + 1);
        if (!key)
            return err_nomem(e);
        memcpy(key, l->key.data ? l->key.data : "", key_len);
        key[key_len] = '\0';
        json_lex_blanks(l);
        start = l->pos;
        rc = json_lex_value(l, e);
        if (rc >= 0)
            rc = fn(user, key, key_len, l->text + start, l->pos - start, e);
        if (rc != 0)
            return rc;
        step = json_lex_next(l, e);
    }
    return step < 0 ? step : 0;
}

int zarr_each_member(const char *text, size_t len, zarr_member_fn *fn, void *user,
                     struct err *e)
{
    struct json_lexer *l = calloc(1, sizeof *l);
    int rc;

    if (!l)
        return err_nomem(e);
    l->text = text;
    l->len = len;
    l->max_depth = MAX_DEPTH;
    l->max_values = MAX_VALUES;
    rc = each_member(l, fn, user, e);
    json_lexer_release(l);
    free(l);
    return rc;
}

struct wanted {
    const char *name;
    struct zarr_slice *out;
};

static int match_member(void *user, const char *key, size_t key_len, const char *text,
                        size_t len, struct err *e)
{
    const struct wanted *w = user;

    (void)e;
    if (key_len != strlen(w->name) || memcmp(key, w->name, key_len) != 0)
        return 0;
    *w->out = (struct zarr_slice){text, len};
    return 1;
}

bool zarr_member(const char *text, size_t len, const char *name, struct zarr_slice *out)
{
    struct wanted w = {name, out};
    struct err ignored = {0};

    return zarr_each_member(text, len, match_member, &w, &ignored) == 1;
}

/* ---- delta ---- */

bool zarr_number_type(const char *text, unsigned *bytes, char *kind, bool *big_endian)
{
    static const char *const known[] = {"i1", "i2", "i4", "i8", "u1",
                                        "u2", "u4", "u8", "f4", "f8"};
    char order = text[0];

    if (order != '<' && order != '>' && order != '|')
        return false;
    text++;
    for (size_t i = 0; i < ARRAY_SIZE(known); i++) {
        if (strcmp(text, known[i]) != 0)
            continue;
        *kind = text[0];
        *bytes = (unsigned)(text[1] - '0');
        *big_endian = order == '>';
        return order != '|' || *bytes == 1;
    }
    return false;
}

/* Sums of rounded differences depend on how they were rounded: of floats only the plain
 * case, which NumPy adds up element by element. */
static bool delta_pair_known(const char *dtype, const char *astype)
{
    unsigned a, b;
    char x, y;
    bool swap;

    if (!zarr_number_type(dtype, &a, &x, &swap) ||
        !zarr_number_type(astype, &b, &y, &swap))
        return false;
    return (x == 'f') == (y == 'f') && (x != 'f' || a == b);
}

static void take_delta(struct zarr_array *a, struct zarr_codec *c,
                       const struct json *config)
{
    const char *dtype = "", *astype;

    json_string(json_get(config, "dtype"), &dtype);
    astype = dtype;
    json_string(json_get(config, "astype"), &astype);
    if (!delta_pair_known(dtype, astype)) {
        zarr_refuse(a, "filter \"delta\" from \"%.20s\" to \"%.20s\" is not supported",
                    dtype, astype);
        return;
    }
    snprintf(c->arg[0], sizeof c->arg[0], "%s", dtype);
    snprintf(c->arg[1], sizeof c->arg[1], "%s", astype);
}

/* ---- configurations ---- */

/* Formats 1 and 2 of Python's lzma (xz, lzma_alone) tell themselves; raw ones do not. */
static void check_lzma(struct zarr_array *a, const struct json *config)
{
    uint64_t format = 1;

    if (json_get(config, "format") && !json_u64(json_get(config, "format"), &format))
        format = 0;
    if (format != 1 && format != 2)
        zarr_refuse(a, "compressor \"lzma\" of a format other than xz and lzma is not "
                       "supported");
}

/* Both types of a cast, under the names that the codec has for them. */
static void take_cast(struct zarr_array *a, struct zarr_codec *c,
                      const struct json *config, const char *name, const char *type,
                      const char *stored)
{
    const char *to = "", *from;
    unsigned bytes;
    char kind;
    bool swap;

    json_string(json_get(config, type), &to);
    from = to;
    json_string(json_get(config, stored), &from);
    if (!zarr_number_type(to, &bytes, &kind, &swap) ||
        !zarr_number_type(from, &bytes, &kind, &swap)) {
        zarr_refuse(a, "filter \"%s\" from \"%.20s\" to \"%.20s\" is not supported",
                    name, to, from);
        return;
    }
    snprintf(c->arg[0], sizeof c->arg[0], "%s", to);
    snprintf(c->arg[1], sizeof c->arg[1], "%s", from);
}

static void take_scale(struct zarr_array *a, struct zarr_codec *c,
                       const struct json *config)
{
    take_cast(a, c, config, "fixedscaleoffset", "dtype", "astype");
    if (!json_double(json_get(config, "scale"), &c->scale) || c->scale == 0 ||
        !json_double(json_get(config, "offset"), &c->offset))
        zarr_refuse(a, "filter \"fixedscaleoffset\" without scale and offset");
}

static void take_shuffle(struct zarr_array *a, struct zarr_codec *c,
                         const struct json *config)
{
    uint64_t bytes = 4; /* numcodecs' default */

    if (json_get(config, "elementsize") &&
        !json_u64(json_get(config, "elementsize"), &bytes))
        bytes = UINT64_MAX;
    if (bytes > 9999)
        zarr_refuse(a, "filter \"shuffle\" of no size of elements");
    else
        snprintf(c->arg[0], sizeof c->arg[0], "%u", bytes ? (unsigned)bytes : 1);
}

static void take_config(struct zarr_array *a, struct zarr_codec *c, const char *name,
                        const struct json *config)
{
    switch (c->kind) {
    case ZARR_DELTA:
        take_delta(a, c, config);
        break;
    case ZARR_LZMA:
        check_lzma(a, config);
        break;
    case ZARR_SHUFFLE:
        take_shuffle(a, c, config);
        break;
    case ZARR_SCALE:
        take_scale(a, c, config);
        break;
    case ZARR_CAST:
        if (strcmp(name, "astype") == 0)
            take_cast(a, c, config, name, "decode_dtype", "encode_dtype");
        else
            take_cast(a, c, config, name, "dtype", "astype");
        break;
    default:
        break;
    }
}

/* ---- names ---- */

static const struct {
    const char *name;
    enum zarr_codec_kind kind;
} codec_names[] = {
    {"blosc", ZARR_BLOSC},       {"lz4", ZARR_LZ4},
    {"zstd", ZARR_ZSTD},         {"gzip", ZARR_GZIP},
    {"zlib", ZARR_ZLIB},         {"bz2", ZARR_BZ2},
    {"lzma", ZARR_LZMA},         {"delta", ZARR_DELTA},
    {"shuffle", ZARR_SHUFFLE},   {"astype", ZARR_CAST},
    {"quantize", ZARR_CAST},     {"fixedscaleoffset", ZARR_SCALE},
    {"packbits", ZARR_PACKBITS},
};

/* Version 3 has those from elements to elements in front of others, with types of their own. */
static bool is_for(enum zarr_codec_kind kind, const char *what)
{
    return strcmp(what, "codec") != 0 || kind <= ZARR_SHUFFLE;
}

static enum zarr_codec_kind kind_of_name(const char *name, const char *what)
{
    /* v3 knows it as a codec, numcodecs has one of that name with another layout. */
    if (strcmp(name, "crc32c") == 0)
        return strcmp(what, "codec") == 0 ? ZARR_CRC32C : 0;
    if (strncmp(name, "numcodecs.", 10) == 0)
        name += 10;
    for (size_t i = 0; i < ARRAY_SIZE(codec_names); i++)
        if (strcmp(name, codec_names[i].name) == 0)
            return is_for(codec_names[i].kind, what) ? codec_names[i].kind : 0;
    return 0;
}

void zarr_take_codec(struct zarr_array *a, struct zarr_chain *chain, const char *name,
                     const struct json *config, const char *what)
{
    enum zarr_codec_kind kind = kind_of_name(name, what);
    struct zarr_codec *c;

    /* Its values were rounded; what is stored is what is read. */
    if (strcmp(what, "filter") == 0 && strcmp(name, "bitround") == 0)
        return;
    if (kind == 0) {
        zarr_refuse(a, "%s \"%.60s\" is not supported", what, name);
        return;
    }
    if (chain->n == ZARR_MAX_CODECS) {
        zarr_refuse(a, "more than %d codecs", ZARR_MAX_CODECS);
        return;
    }
    c = &chain->codec[chain->n++];
    *c = (struct zarr_codec){.kind = (uint8_t)kind};
    take_config(a, c, name, config);
}

void zarr_chain_reverse(struct zarr_chain *chain)
{
    for (uint32_t i = 0, j = chain->n; i + 1 < j; i++) {
        struct zarr_codec c = chain->codec[i];

        j--;
        chain->codec[i] = chain->codec[j];
        chain->codec[j] = c;
    }
}

/* ---- shapes ---- */

static void check_inner(struct zarr_array *a)
{
    uint64_t n = 1;

    if (!a->sharded)
        return;
    if (a->inner.nd != a->grid_chunk.nd) {
        zarr_refuse(a, "chunks inside a shard have %u dimensions, the array has %u",
                    a->inner.nd, a->shape.nd);
        return;
    }
    for (uint32_t k = 0; k < a->inner.nd; k++) {
        if (a->inner.dim[k] == 0 || a->grid_chunk.dim[k] % a->inner.dim[k] != 0) {
            zarr_refuse(a, "chunks inside a shard do not divide it");
            return;
        }
        if (mul_overflows(n, a->grid_chunk.dim[k] / a->inner.dim[k], &n))
            n = UINT64_MAX;
    }
}

void zarr_settle(struct zarr_array *a)
{
    struct err why = {0};

    if (a->shape.nd != a->grid_chunk.nd)
        zarr_refuse(a, "shape has %u dimensions, chunks have %u", a->shape.nd,
                    a->grid_chunk.nd);
    for (uint32_t k = 0; k < a->grid_chunk.nd; k++)
        if (a->grid_chunk.dim[k] == 0)
            zarr_refuse(a, "a chunk of no elements");
    if (!a->sharded)
        a->inner = a->grid_chunk;
    if (!a->why[0])
        check_inner(a);
    if (!a->why[0] && shape_bytes(&a->shape, a->dtype, &a->bytes, &why) < 0)
        zarr_refuse(a, "its shape: %s", why.text);
    if (!a->why[0] && shape_bytes(&a->grid_chunk, a->dtype, &a->bytes, &why) < 0)
        zarr_refuse(a, "its chunks: %s", why.text);
    if (!a->why[0] && shape_bytes(&a->inner, a->dtype, &a->bytes, &why) < 0)
        zarr_refuse(a, "its chunks: %s", why.text);
}
