/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/ocdbt_node.c - OCDBT's manifests and B+tree nodes, out of their bytes. */
#include "index/formats/orbax/ocdbt_node.h"

#include <errno.h>
#include <string.h>
#include <zstd.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/checked.h"
#include "base/crc32c.h"
#include "base/endian.h"
#include "base/err.h"
#include "index/formats/zstd_fail.h"

enum {
    ENVELOPE = 12, /* magic and length in front */
    CRC = 4,       /* behind */
    WINDOW_LOG_MAX = 27,
    FIRST_PLAIN = 4, /* a first guess: nodes shrink to a quarter */
    MAX_ARITY_LOG2 = 16,
    COMPRESSION_NONE = 0,
    COMPRESSION_ZSTD = 1,
    LEAST_UNFOLDED = 16 << 20,
    UNFOLDED_TIMES = 256,
};

#define MAGIC_MANIFEST UINT32_C(0x0cdb3a2a)
#define MAGIC_NODE UINT32_C(0x0cdb20de)

/* ---- bytes ---- */

struct cursor {
    const unsigned char *data;
    size_t len, pos;
    uint64_t room; /* what keys and paths may still come to, unfolded */
};

static int cut(const struct cursor *c, struct err *e)
{
    return err_set(e, EBADMSG, "it ends within its fields, at byte %zu of %zu", c->pos,
                   c->len);
}

static int take_varint(struct cursor *c, uint64_t max, const char *what, uint64_t *out,
                       struct err *e)
{
    if (!varint_get(c->data, c->len, &c->pos, out))
        return cut(c, e);
    if (*out > max)
        return err_set(e, EBADMSG, "%s of %" PRIu64 ", at most %" PRIu64 " is possible",
                       what, *out, max);
    return 0;
}

/* The next n bytes, or NULL. */
static const unsigned char *take_bytes(struct cursor *c, size_t n, struct err *e)
{
    const unsigned char *p = c->data + c->pos;

    if (n > c->len - c->pos) {
        cut(c, e);
        return NULL;
    }
    c->pos += n;
    return p;
}

static int take_byte(struct cursor *c, unsigned *out, struct err *e)
{
    const unsigned char *p = take_bytes(c, 1, e);

    if (!p)
        return -e->code;
    *out = *p;
    return 0;
}

/* A count of records of which each has at least `each` bytes in what is left. */
static int take_count(struct cursor *c, uint64_t max, size_t each, const char *what,
                      size_t *out, struct err *e)
{
    uint64_t n;

    TRY(take_varint(c, max, what, &n, e));
    if (n > (c->len - c->pos) / each)
        return err_set(e, EBADMSG, "%s of %" PRIu64 " in %zu bytes", what, n,
                       c->len - c->pos);
    *out = (size_t)n;
    return 0;
}

static int skip_varints(struct cursor *c, size_t n, struct err *e)
{
    uint64_t v;

    for (size_t i = 0; i < n; i++)
        TRY(take_varint(c, UINT64_MAX, "number", &v, e));
    return 0;
}

uint64_t ocdbt_unfolded_max(uint64_t stored)
{
    return stored > (UINT64_MAX - LEAST_UNFOLDED) / UNFOLDED_TIMES
               ? UINT64_MAX
               : LEAST_UNFOLDED + UNFOLDED_TIMES * stored;
}

/* A key or path of n bytes is about to be put together. */
static int unfold(struct cursor *c, size_t n, struct err *e)
{
    if (n > c->room)
        return err_set(e, EFBIG, "its keys and paths are too long for its size");
    c->room -= n;
    return 0;
}

static int at_end(const struct cursor *c, struct err *e)
{
    if (c->pos != c->len)
        return err_set(e, EBADMSG, "%zu bytes are left over", c->len - c->pos);
    return 0;
}

/* ---- the envelope ---- */

/* Decodes one zstd frame that is all of the input. */
static int inflate(ZSTD_DCtx *ctx, const struct cursor *in, struct buf *out,
                   struct err *e)
{
    ZSTD_inBuffer input = {in->data + in->pos, in->len - in->pos, 0};
    size_t step = MAX(input.size * FIRST_PLAIN, (size_t)4096), left = 1;

    while (left != 0) {
        size_t had = out->len;
        ZSTD_outBuffer output = {0};

        if (had == OCDBT_MAX_PLAIN)
            return err_set(e, EBADMSG, "more than %d bytes come out of zstd",
                           OCDBT_MAX_PLAIN);
        output.size = MIN(step, OCDBT_MAX_PLAIN - had);
        output.dst = buf_grow(out, output.size);
        if (!output.dst)
            return err_nomem(e);
        left = ZSTD_decompressStream(ctx, &output, &input);
        if (ZSTD_isError(left))
            return zstd_fail(left, e);
        out->len = had + output.pos;
        if (left != 0 && input.pos == input.size && output.pos < output.size)
            return err_set(e, EBADMSG, "zstd: the frame is cut");
        step = MAX(out->len, (size_t)4096);
    }
    if (input.pos != input.size)
        return err_set(e, EBADMSG, "%zu bytes behind the zstd frame",
                       input.size - input.pos);
    return 0;
}

static int decompress(struct arena *a, struct cursor *c, struct err *e)
{
    CLEANUP(buf_release) struct buf plain = {.max = OCDBT_MAX_PLAIN + 4096};
    ZSTD_DCtx *ctx = ZSTD_createDCtx();
    char *kept;
    int rc;

    if (!ctx ||
        ZSTD_isError(ZSTD_DCtx_setParameter(ctx, ZSTD_d_windowLogMax, WINDOW_LOG_MAX)))
        rc = err_nomem(e);
    else
        rc = inflate(ctx, c, &plain, e);
    ZSTD_freeDCtx(ctx);
    if (rc < 0)
        return rc;
    kept = arena_memdup(a, plain.data ? plain.data : "", plain.len);
    if (!kept)
        return err_nomem(e);
    *c = (struct cursor){
        .data = (const unsigned char *)kept, .len = plain.len, .room = c->room};
    return 0;
}

/*
 * Checks what all records of OCDBT start and end with and sets `c` to the body: within
 * data, or decoded (*plain is then set).
 */
static int open_envelope(struct arena *a, const unsigned char *data, size_t len,
                         uint32_t magic, struct cursor *c, const unsigned char **plain,
                         struct err *e)
{
    uint64_t version, compression;

    *plain = NULL;
    if (len < ENVELOPE + 2 + CRC)
        return err_set(e, EBADMSG, "%zu bytes are no record of OCDBT", len);
    if (__builtin_bswap32(get_le32(data)) != magic)
        return err_set(e, EBADMSG, "it starts with %08" PRIx32 ", not %08" PRIx32,
                       __builtin_bswap32(get_le32(data)), magic);
    if (get_le64(data + 4) != len)
        return err_set(e, EBADMSG,
                       "it says that it has %" PRIu64 " bytes, it is kept as %zu",
                       get_le64(data + 4), len);
    if (crc32c(0, data, len - CRC) != get_le32(data + len - CRC))
        return err_set(e, EBADMSG, "its checksum (CRC-32C) is wrong");
    *c = (struct cursor){.data = data,
                         .len = len - CRC,
                         .pos = ENVELOPE,
                         .room = ocdbt_unfolded_max(len)};
    TRY(take_varint(c, UINT64_MAX, "version", &version, e));
    TRY(take_varint(c, UINT64_MAX, "compression", &compression, e));
    if (version != 0)
        return err_set(e, ENOTSUP, "OCDBT version %" PRIu64 " is not known; 0 is",
                       version);
    if (compression == COMPRESSION_NONE)
        return 0;
    if (compression != COMPRESSION_ZSTD)
        return err_set(e, ENOTSUP,
                       "OCDBT compression %" PRIu64 " is not known; 0 (none) and 1 "
                       "(zstd) are",
                       compression);
    TRY(decompress(a, c, e));
    *plain = c->data;
    return 0;
}

/* ---- the list of files ---- */

struct path_lengths {
    uint32_t prefix, suffix, base;
};

static int take_lengths(struct cursor *c, struct path_lengths *x, size_t n,
                        struct err *e)
{
    uint64_t v = 0;

    for (size_t i = 1; i < n; i++) {
        TRY(take_varint(c, OCDBT_MAX_PATH, "path", &v, e));
        x[i].prefix = (uint32_t)v;
    }
    for (size_t i = 0; i < n; i++) {
        TRY(take_varint(c, OCDBT_MAX_PATH, "path", &v, e));
        x[i].suffix = (uint32_t)v;
    }
    for (size_t i = 0; i < n; i++) {
        TRY(take_varint(c, OCDBT_MAX_PATH, "path", &v, e));
        x[i].base = (uint32_t)v;
    }
    return 0;
}

/* base + start of the path before + suffix. */
static int make_path(struct arena *a, struct cursor *c, const struct path_lengths *x,
                     const struct ocdbt_file *base, const struct ocdbt_file *before,
                     struct ocdbt_file *out, struct err *e)
{
    uint32_t own = x->prefix + x->suffix, had = before ? before->len - base->len : 0;
    const unsigned char *suffix;
    char *path;

    if (x->prefix > had || x->base > own || own > OCDBT_MAX_PATH - base->len)
        return err_set(e, EBADMSG, "the list of data files is damaged");
    suffix = take_bytes(c, x->suffix, e);
    if (!suffix || unfold(c, (size_t)base->len + own, e) < 0)
        return -e->code;
    path = arena_alloc(a, (size_t)base->len + own + 1);
    if (!path)
        return err_nomem(e);
    if (base->len > 0)
        memcpy(path, base->path, base->len);
    if (x->prefix > 0)
        memcpy(path + base->len, before->path + base->len, x->prefix);
    memcpy(path + base->len + x->prefix, suffix, x->suffix);
    *out = (struct ocdbt_file){path, base->len + own, base->len + x->base};
    return 0;
}

static int take_files(struct arena *a, struct cursor *c, const struct ocdbt_file *base,
                      const struct ocdbt_file **out, size_t *count, struct err *e)
{
    struct path_lengths *lengths;
    struct ocdbt_file *files;
    size_t n;

    /* Each has a length of its suffix and of its base. */
    TRY(take_count(c, OCDBT_MAX_FILES, 2, "a list of data files", &n, e));
    files = arena_array(a, n, sizeof *files);
    lengths = arena_array(a, n, sizeof *lengths);
    if (n > 0 && (!files || !lengths))
        return err_nomem(e);
    TRY(take_lengths(c, lengths, n, e));
    for (size_t i = 0; i < n; i++)
        TRY(make_path(a, c, &lengths[i], base, i ? &files[i - 1] : NULL, &files[i], e));
    *out = files;
    *count = n;
    return 0;
}

/* ---- places ---- */

static int take_file_number(struct cursor *c, size_t files, struct ocdbt_place *out,
                            struct err *e)
{
    uint64_t v;

    TRY(take_varint(c, UINT32_MAX, "number of a data file", &v, e));
    if (v >= files)
        return err_set(e, EBADMSG, "data file %" PRIu64 " of %zu", v, files);
    out->file = (uint32_t)v;
    return 0;
}

static int check_place(const struct ocdbt_place *p, struct err *e)
{
    uint64_t end;

    if (add_overflows(p->offset, p->length, &end))
        return err_set(e, EBADMSG, "bytes %" PRIu64 "+%" PRIu64 " of a data file",
                       p->offset, p->length);
    return 0;
}

/* ---- manifests ---- */

static int take_config(struct cursor *c, struct ocdbt_manifest *out, unsigned *arity,
                       struct err *e)
{
    const unsigned char *uuid = take_bytes(c, OCDBT_UUID, e);
    uint64_t kind, unused, compression;

    if (!uuid || take_varint(c, UINT64_MAX, "kind", &kind, e) < 0 ||
        take_varint(c, UINT64_MAX, "size", &unused, e) < 0 ||
        take_varint(c, UINT64_MAX, "size", &unused, e) < 0 ||
        take_byte(c, arity, e) < 0 ||
        take_varint(c, UINT64_MAX, "compression", &compression, e) < 0)
        return -e->code;
    memcpy(out->uuid, uuid, OCDBT_UUID);
    if (kind > 1)
        return err_set(e, ENOTSUP,
                       "manifest kind %" PRIu64 " is not known; 0 (single) "
                       "and 1 (numbered) are",
                       kind);
    out->numbered = kind == 1;
    if (*arity < 1 || *arity > MAX_ARITY_LOG2)
        return err_set(e, EBADMSG, "a version tree of arity 2^%u", *arity);
    if (compression > COMPRESSION_ZSTD)
        return err_set(e, ENOTSUP, "OCDBT compression %" PRIu64 " is not known",
                       compression);
    /* The level, of which a reader needs nothing. */
    return compression == COMPRESSION_NONE || take_bytes(c, 4, e) ? 0 : -e->code;
}

/* Strictly ascending; the last one is the newest. */
static int take_generations(struct cursor *c, size_t n, struct ocdbt_manifest *out,
                            struct err *e)
{
    uint64_t before = 0;

    for (size_t i = 0; i < n; i++) {
        TRY(take_varint(c, UINT64_MAX, "generation", &out->generation, e));
        if (out->generation <= before)
            return err_set(e, EBADMSG, "its versions are out of order");
        before = out->generation;
    }
    for (size_t i = 0; i < n; i++)
        TRY(take_byte(c, &out->height, e));
    return 0;
}

/* The last of n places. */
static int take_root(struct cursor *c, size_t n, size_t files, struct ocdbt_place *out,
                     struct err *e)
{
    for (size_t i = 0; i < n; i++)
        TRY(take_file_number(c, files, out, e));
    for (size_t i = 0; i < n; i++)
        TRY(take_varint(c, UINT64_MAX, "offset", &out->offset, e));
    for (size_t i = 0; i < n; i++)
        TRY(take_varint(c, UINT64_MAX, "length", &out->length, e));
    return 0;
}

static int take_versions(struct cursor *c, const struct ocdbt_file *file, size_t files,
                         unsigned arity, struct ocdbt_manifest *out, struct err *e)
{
    struct ocdbt_place root;
    size_t n;

    /* Generation, height, place, three statistics, eight bytes of time. */
    TRY(take_count(c, UINT64_C(1) << arity, 16, "a list of versions", &n, e));
    if (n == 0)
        return err_set(e, EBADMSG, "it has no version");
    if (take_generations(c, n, out, e) < 0 || take_root(c, n, files, &root, e) < 0 ||
        skip_varints(c, 3 * n, e) < 0 || !take_bytes(c, 8 * n, e))
        return -e->code;
    out->empty = root.offset == UINT64_MAX && root.length == UINT64_MAX;
    if (out->empty)
        return 0;
    out->file = file[root.file];
    out->offset = root.offset;
    out->length = root.length;
    return check_place(&root, e);
}

/* Older versions, which nothing here reads; their list ends the manifest. */
static int skip_version_nodes(struct cursor *c, size_t files, struct err *e)
{
    struct ocdbt_place place;
    size_t n;

    if (take_count(c, 64, 14, "a list of version nodes", &n, e) < 0 ||
        skip_varints(c, n, e) < 0 || take_root(c, n, files, &place, e) < 0 ||
        skip_varints(c, n, e) < 0 || !take_bytes(c, 9 * n, e))
        return -e->code;
    return at_end(c, e);
}

int ocdbt_manifest_parse(struct arena *a, const void *data, size_t len,
                         struct ocdbt_manifest *out, struct err *e)
{
    static const struct ocdbt_file top = {.path = ""};
    const struct ocdbt_file *file;
    const unsigned char *plain;
    struct cursor c;
    unsigned arity = 0;
    size_t files;

    *out = (struct ocdbt_manifest){0};
    TRY(open_envelope(a, data, len, MAGIC_MANIFEST, &c, &plain, e));
    TRY(take_config(&c, out, &arity, e));
    if (out->numbered)
        return at_end(&c, e);
    TRY(take_files(a, &c, &top, &file, &files, e));
    TRY(take_versions(&c, file, files, arity, out, e));
    return skip_version_nodes(&c, files, e);
}

/* ---- nodes ---- */

struct key_lengths {
    uint32_t prefix, suffix;
};

static int take_key_lengths(struct cursor *c, bool leaf, struct key_lengths *x,
                            struct ocdbt_entry *entry, size_t n, struct err *e)
{
    uint64_t v = 0;

    for (size_t i = 1; i < n; i++) {
        TRY(take_varint(c, OCDBT_MAX_KEY, "key", &v, e));
        x[i].prefix = (uint32_t)v;
    }
    for (size_t i = 0; i < n; i++) {
        TRY(take_varint(c, OCDBT_MAX_KEY, "key", &v, e));
        x[i].suffix = (uint32_t)v;
    }
    for (size_t i = 0; i < n && !leaf; i++) {
        TRY(take_varint(c, OCDBT_MAX_KEY, "key", &v, e));
        entry[i].child_prefix = (uint32_t)v;
    }
    return 0;
}

static bool ascends(const struct ocdbt_entry *a, const struct ocdbt_entry *b)
{
    int order = memcmp(a->key, b->key, MIN(a->key_len, b->key_len));

    return order < 0 || (order == 0 && a->key_len < b->key_len);
}

/* The start of the key before, and a suffix. */
static int make_key(struct arena *a, struct cursor *c, const struct key_lengths *x,
                    const struct ocdbt_entry *before, struct ocdbt_entry *out,
                    struct err *e)
{
    uint32_t len = x->prefix + x->suffix;
    const unsigned char *suffix;
    char *key;

    if (x->prefix > (before ? before->key_len : 0) || len > OCDBT_MAX_KEY ||
        out->child_prefix > len)
        return err_set(e, EBADMSG, "the lengths of its keys are damaged");
    suffix = take_bytes(c, x->suffix, e);
    if (!suffix || unfold(c, len, e) < 0)
        return -e->code;
    key = arena_alloc(a, (size_t)len + 1);
    if (!key)
        return err_nomem(e);
    if (x->prefix > 0)
        memcpy(key, before->key, x->prefix);
    memcpy(key + x->prefix, suffix, x->suffix);
    out->key = key;
    out->key_len = len;
    if (before && !ascends(before, out))
        return err_set(e, EBADMSG, "its keys are out of order");
    return 0;
}

static int take_keys(struct arena *a, struct cursor *c, bool leaf,
                     struct ocdbt_entry *entry, size_t n, struct err *e)
{
    struct key_lengths *lengths = arena_array(a, n, sizeof *lengths);

    if (!lengths)
        return err_nomem(e);
    TRY(take_key_lengths(c, leaf, lengths, entry, n, e));
    for (size_t i = 0; i < n; i++)
        TRY(make_key(a, c, &lengths[i], i ? &entry[i - 1] : NULL, &entry[i], e));
    return 0;
}

static int take_children(struct cursor *c, size_t files, struct ocdbt_entry *entry,
                         size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++)
        TRY(take_file_number(c, files, &entry[i].place, e));
    for (size_t i = 0; i < n; i++)
        TRY(take_varint(c, UINT64_MAX, "offset", &entry[i].place.offset, e));
    for (size_t i = 0; i < n; i++) {
        TRY(take_varint(c, UINT64_MAX, "length", &entry[i].place.length, e));
        TRY(check_place(&entry[i].place, e));
    }
    return skip_varints(c, 3 * n, e); /* statistics of the subtrees */
}

static int take_kinds(struct cursor *c, struct ocdbt_entry *entry, size_t n,
                      struct err *e)
{
    for (size_t i = 0; i < n; i++)
        TRY(take_varint(c, UINT64_MAX, "length", &entry[i].place.length, e));
    for (size_t i = 0; i < n; i++) {
        unsigned kind = 0;

        TRY(take_byte(c, &kind, e));
        if (kind > 1)
            return err_set(e, EBADMSG, "a value of kind %u", kind);
        entry[i].is_inline = kind == 0;
        if (kind == 0 && entry[i].place.length > OCDBT_MAX_INLINE)
            return err_set(e, EBADMSG, "a value of %" PRIu64 " bytes in the node",
                           entry[i].place.length);
    }
    return 0;
}

static int take_values(struct cursor *c, size_t files, struct ocdbt_entry *entry,
                       size_t n, struct err *e)
{
    TRY(take_kinds(c, entry, n, e));
    for (size_t i = 0; i < n; i++)
        if (!entry[i].is_inline)
            TRY(take_file_number(c, files, &entry[i].place, e));
    for (size_t i = 0; i < n; i++)
        if (!entry[i].is_inline) {
            TRY(take_varint(c, UINT64_MAX, "offset", &entry[i].place.offset, e));
            TRY(check_place(&entry[i].place, e));
        }
    for (size_t i = 0; i < n; i++) {
        if (!entry[i].is_inline)
            continue;
        entry[i].place.offset = c->pos;
        if (!take_bytes(c, (size_t)entry[i].place.length, e))
            return -e->code;
    }
    return 0;
}

int ocdbt_node_parse(struct arena *a, const void *data, size_t len,
                     const struct ocdbt_file *base, struct ocdbt_node *out,
                     struct err *e)
{
    const struct ocdbt_file transitive = {base->path, base->base_len, 0};
    struct ocdbt_entry *entry;
    struct cursor c;

    *out = (struct ocdbt_node){0};
    if (open_envelope(a, data, len, MAGIC_NODE, &c, &out->plain, e) < 0 ||
        take_byte(&c, &out->height, e) < 0 ||
        take_files(a, &c, &transitive, &out->file, &out->files, e) < 0 ||
        /* A length of the key, and one of the value or a file, offset and length. */
        take_count(&c, OCDBT_MAX_ENTRIES, 2, "a list of keys", &out->entries, e) < 0)
        return -e->code;
    if (out->entries == 0)
        return err_set(e, EBADMSG, "it has no keys");
    entry = arena_array(a, out->entries, sizeof *entry);
    if (!entry)
        return err_nomem(e);
    out->entry = entry;
    TRY(take_keys(a, &c, out->height == 0, entry, out->entries, e));
    TRY(out->height == 0 ? take_values(&c, out->files, entry, out->entries, e)
                         : take_children(&c, out->files, entry, out->entries, e));
    return at_end(&c, e);
}
