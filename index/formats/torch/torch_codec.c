/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_codec.c - finds a tensor's elements in a torch.save blob of a shard. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <zstd.h>

#include "base/checked.h"
#include "base/err.h"
#include "index/formats/torch/torch_zip.h"
#include "index/formats/zstd_fail.h"
#include "remote/decoded.h"
#include "remote/source.h"

enum {
    WHOLE_MAX = 64 << 10, /* blobs up to here are fetched in one read */
    END_BYTES = 4096,     /* of others head and tail: all but the elements is there */
    WINDOW_LOG_MAX = 27   /* 128 MiB; ZStandard() of torch writes at most 23 */
};

/* A source whose first and last bytes are at hand already. */
struct ends {
    struct source source;
    struct source *inner; /* borrowed */
    size_t head, tail;
    unsigned char *bytes; /* head, then tail */
};

static int ends_read(struct source *s, uint64_t off, size_t len, void *dst,
                     struct err *e)
{
    struct ends *x = container_of(s, struct ends, source);
    uint64_t tail = s->size - x->tail;

    if (off + len <= x->head)
        memcpy(dst, x->bytes + off, len);
    else if (off >= tail)
        memcpy(dst, x->bytes + x->head + (off - tail), len);
    else
        return source_read(x->inner, off, len, dst, e);
    return 0;
}

static void ends_close(struct source *s)
{
    struct ends *x = container_of(s, struct ends, source);

    source_put(x->inner);
    free(x->bytes);
    free(x);
}

static const struct source_ops ends_ops = {
    .name = "ends",
    .read = ends_read,
    .close = ends_close,
};

/* Fetches both ends of the window in one go. */
static int ends_fetch(struct ends *x, struct err *e)
{
    uint64_t size = x->inner->size;
    struct source_range r[2] = {
        {.off = 0, .len = x->head, .dst = x->bytes},
        {.off = size - x->tail, .len = x->tail, .dst = x->bytes + x->head},
    };

    return source_read_many(x->inner, r, x->tail > 0 ? 2 : 1, e);
}

/* Takes the reference of `inner`. */
static int ends_open(struct source *inner, struct source **out, struct err *e)
{
    struct ends *x = calloc(1, sizeof *x);

    if (!x || source_init(&x->source, &ends_ops, inner->name, inner->size, e) < 0) {
        free(x);
        source_put(inner);
        return err_nomem(e);
    }
    x->inner = inner;
    x->head = (size_t)MIN(inner->size, (uint64_t)WHOLE_MAX);
    if (x->head < inner->size) {
        x->head = END_BYTES;
        x->tail = END_BYTES;
    }
    x->bytes = malloc(x->head + x->tail + 1);
    if ((x->bytes ? ends_fetch(x, e) : err_nomem(e)) < 0) {
        source_put(&x->source);
        return -e->code;
    }
    *out = &x->source;
    return 0;
}

/* The item that the blob holds, and the byte of the shard where the blob starts. */
struct item {
    struct torch_tensor tensor;
    struct shape units;
    uint64_t base; /* of the blob */
};

static int open_item(struct source *src, uint64_t off, uint64_t len, struct item *item,
                     struct err *e)
{
    CLEANUP(torch_zip_freep) struct torch_zip *zip = NULL;
    CLEANUP(source_putp) struct source *ends = NULL;
    struct source *window;
    struct pv root;
    int rc;

    TRY(source_window(src, off, len, &window, e));
    TRY(ends_open(window, &ends, e));
    TRY(torch_zip_open(ends, 0, len, &zip, e));
    root = torch_zip_root(zip);
    rc = torch_zip_tensor(zip, &root, &item->tensor, e);
    if (rc == 0)
        return err_set(e, EBADMSG, "%s: the blob holds no tensor", src->name);
    item->base = off;
    if (rc < 0)
        return rc;
    return shape_units(&item->tensor.shape, item->tensor.dtype, &item->units, e);
}

static int check_dtype(const struct item *item, const struct chunk_tensor *t,
                       struct err *e)
{
    if (item->tensor.dtype != t->dtype)
        return err_set(e, EBADMSG, "stored as %s where the metadata says %s",
                       dtype_name(item->tensor.dtype), dtype_name(t->dtype));
    return 0;
}

static int shape_mismatch(const struct item *item, const struct shape *want,
                          struct err *e)
{
    struct buf text = {.max = 1024};

    shape_format(&item->units, &text);
    buf_adds(&text, " where the metadata says ");
    shape_format(want, &text);
    err_set(e, EBADMSG, "stored with shape %s",
            buf_failed(&text) ? "(many dimensions)" : text.data);
    buf_release(&text);
    return -e->code;
}

static bool is_contiguous(const struct item *item)
{
    uint64_t unit = 1;

    for (uint32_t k = item->units.nd; k-- > 0;) {
        if (item->units.dim[k] == 0)
            return true;
        if (item->units.dim[k] > 1 && (uint64_t)item->tensor.stride[k] != unit)
            return false;
        unit *= item->units.dim[k]; /* within the storage: checked with the tensor */
    }
    return true;
}

static bool is_empty(const struct chunk *c, uint32_t nd)
{
    for (uint32_t k = 0; k < nd; k++) {
        if (c->size[k] == 0)
            return true;
    }
    return false;
}

/* One dimension of an item, and which of its indices a box reaches. */
struct reach {
    uint64_t row_major; /* units to the next index */
    __int128 low, high;
};

/*
 * Dimension k of a box goes along one dimension of the item: its step in row-major units
 * becomes one in units of the storage. False: it goes along none.
 */
static bool storage_step(const struct chunk *c, uint32_t k, const struct item *item,
                         struct reach *reach, int64_t *step)
{
    uint64_t n = *step < 0 ? -(uint64_t)*step : (uint64_t)*step;
    int64_t indices;
    uint32_t j = 0;

    while (j < item->units.nd && (item->units.dim[j] == 1 || reach[j].row_major > n))
        j++;
    if (j == item->units.nd || n % reach[j].row_major != 0)
        return false;
    indices = (int64_t)(n / reach[j].row_major) * (*step < 0 ? -1 : 1);
    *(indices < 0 ? &reach[j].low : &reach[j].high) +=
        (__int128)(c->size[k] - 1) * indices;
    return !__builtin_mul_overflow(indices, item->tensor.stride[j], step);
}

/*
 * A box cut out of an item that is stored in another order (transposed): its address
 * counts row-major units, which are turned into the item's own strides. A range that runs
 * on from row to row has none.
 */
static int place_cut(const struct chunk *c, uint32_t nd, const struct item *item,
                     int64_t *step, int64_t *first, struct err *e)
{
    struct reach reach[SHAPE_MAX_DIMS];
    uint64_t unit = 1, left = c->first;
    bool whole = true;

    for (uint32_t j = item->units.nd; j-- > 0;) {
        reach[j].row_major = unit;
        unit *= item->units.dim[j]; /* the product was checked with the tensor */
    }
    *first = 0;
    for (uint32_t j = 0; j < item->units.nd; j++) {
        reach[j].low = reach[j].high = left / reach[j].row_major;
        *first += (int64_t)reach[j].low * item->tensor.stride[j];
        left %= reach[j].row_major;
    }
    for (uint32_t k = 0; k < nd; k++)
        whole &= c->size[k] == 1 || storage_step(c, k, item, reach, &step[k]);
    for (uint32_t j = 0; j < item->units.nd; j++)
        whole &= reach[j].low >= 0 && reach[j].high < item->units.dim[j];
    if (!whole)
        return err_set(e, ENOTSUP, "a flat range of a tensor that is not contiguous");
    return 0;
}

/*
 * Unit strides of the box in the item, and its first element. A chunk without an address
 * of its own is the item, with the item's strides. One with an address counts row-major
 * units of the item, which is the same as units of the storage only where the item is
 * contiguous.
 */
static int place_steps(const struct chunk *c, const struct chunk_tensor *t,
                       const struct item *item, int64_t *step, int64_t *first,
                       struct err *e)
{
    bool is_item = !c->step && c->first == 0;
    struct shape want = {.nd = is_item ? t->units->nd : c->whole_nd};
    uint64_t units = 0;

    if (want.nd > 0)
        memcpy(want.dim, is_item ? c->size : c->whole, want.nd * sizeof *want.dim);
    if ((is_item || c->whole) && !shape_equal(&want, &item->units))
        return shape_mismatch(item, &want, e);
    *first = (int64_t)c->first;
    want.nd = t->units->nd;
    if (is_item) {
        memcpy(step, item->tensor.stride, want.nd * sizeof *step);
        return 0;
    }
    TRY(shape_elements(&item->units, &units, e));
    TRY(chunk_steps(c, want.nd, units, step, e));
    return is_contiguous(item) || is_empty(c, want.nd)
               ? 0
               : place_cut(c, want.nd, item, step, first, e);
}

/* Where the elements are in `src`, of which the blob is bytes [off, off + len). */
static int resolve_in(struct source *src, uint64_t off, uint64_t len,
                      const struct chunk *c, const struct chunk_tensor *t,
                      struct chunk_place *out, struct err *e)
{
    unsigned unit = dtype_unit(t->dtype);
    struct item item;
    int64_t first = 0;

    TRY(open_item(src, off, len, &item, e));
    TRY(check_dtype(&item, t, e));
    TRY(place_steps(c, t, &item, out->step, &first, e));
    for (uint32_t k = 0; k < t->units->nd; k++) {
        if (__builtin_mul_overflow(out->step[k], (int64_t)unit, &out->step[k]))
            return err_set(e, EBADMSG, "a stride over 2^63 bytes");
    }
    out->base = item.base + item.tensor.data;
    if (!is_empty(c, t->units->nd)) /* then both lie within the storage */
        out->base += (item.tensor.storage_offset + (uint64_t)first) * unit;
    out->flags = (uint8_t)(item.tensor.flags | c->flags);
    out->src = source_get(src);
    return 0;
}

static int place_error(const struct source *shard, const struct chunk *c,
                       const struct chunk_tensor *t, struct err *e)
{
    return err_wrap(e, "%s, bytes %" PRIu64 "+%" PRIu64 ", tensor %.*s", shard->name,
                    c->offset, c->length, (int)MIN(t->key_len, (size_t)256), t->key);
}

static int check_range(const struct source *shard, const struct chunk *c, struct err *e)
{
    if (range_outside(c->offset, c->length, shard->size))
        return err_set(e, EBADMSG, "the file has only %" PRIu64 " bytes", shard->size);
    return 0;
}

static int resolve_plain(struct source *shard, const struct chunk *c,
                         const struct chunk_tensor *t, struct decoded_cache *decoded,
                         struct chunk_place *out, struct err *e)
{
    (void)decoded;
    if (check_range(shard, c, e) < 0 ||
        resolve_in(shard, c->offset, c->length, c, t, out, e) < 0)
        return place_error(shard, c, t, e);
    return 0;
}

struct zstd_run {
    struct source *in;
    uint64_t in_at;
    int fd;
    uint64_t limit, written;
    ZSTD_DCtx *ctx;
    unsigned char *in_buf, *out_buf;
    size_t in_cap, out_cap;
};

/* Decodes what is in `input`; *left becomes 0 when the frame has ended. */
static int zstd_step(struct zstd_run *z, ZSTD_inBuffer *input, size_t *left,
                     struct err *e)
{
    for (;;) {
        ZSTD_outBuffer output = {z->out_buf, z->out_cap, 0};

        *left = ZSTD_decompressStream(z->ctx, &output, input);
        if (ZSTD_isError(*left))
            return zstd_fail(*left, e);
        if (output.pos > z->limit - z->written)
            return err_set(e, EFBIG, "zstd: more than %" PRIu64 " bytes come out",
                           z->limit);
        TRY(write_all(z->fd, z->out_buf, output.pos, e));
        z->written += output.pos;
        if (*left == 0 || (input->pos == input->size && output.pos < output.size))
            return 0;
    }
}

/* Does another frame begin at z->in_at? */
static int zstd_next(const struct zstd_run *z, unsigned n, bool *more, struct err *e)
{
    unsigned char head[ZSTD_MAGIC_BYTES] = {0};
    uint64_t rest = z->in->size - z->in_at;

    if (rest >= sizeof head)
        TRY(source_read(z->in, z->in_at, sizeof head, head, e));
    *more = zstd_goes_on(head, rest, n);
    if (rest > 0 && !*more)
        return err_set(e, EBADMSG, "zstd: %" PRIu64 " bytes after the frame", rest);
    return 0;
}

/* One frame from z->in_at on, which moves behind it. */
static int zstd_frame(struct zstd_run *z, struct err *e)
{
    uint64_t size = z->in->size;
    size_t left = 1;

    while (left != 0) {
        size_t n = (size_t)MIN((uint64_t)z->in_cap, size - z->in_at);
        ZSTD_inBuffer input = {z->in_buf, n, 0};

        if (n == 0)
            return err_set(e, EBADMSG, "zstd: the frame is cut");
        TRY(source_read(z->in, z->in_at, n, z->in_buf, e));
        TRY(zstd_step(z, &input, &left, e));
        z->in_at += input.pos;
    }
    return 0;
}

static int zstd_decode(struct zstd_run *z, struct err *e)
{
    bool more = true;

    for (unsigned n = 1; more; n++) {
        TRY(zstd_frame(z, e));
        TRY(zstd_next(z, n, &more, e));
    }
    return 0;
}

/* decode_fn: frames, and nothing else. */
static int zstd_to_file(void *user, struct source *in, int fd, uint64_t limit,
                        uint64_t *size, struct err *e)
{
    struct zstd_run z = {
        .in = in,
        .fd = fd,
        .limit = limit,
        .ctx = ZSTD_createDCtx(),
        .in_cap = ZSTD_DStreamInSize(),
        .out_cap = ZSTD_DStreamOutSize(),
    };
    int rc;

    (void)user;
    z.in_buf = malloc(z.in_cap);
    z.out_buf = malloc(z.out_cap);
    if (!z.ctx || !z.in_buf || !z.out_buf)
        rc = err_nomem(e);
    else if (ZSTD_isError(
                 ZSTD_DCtx_setParameter(z.ctx, ZSTD_d_windowLogMax, WINDOW_LOG_MAX)))
        rc = err_set(e, EINVAL, "zstd: window limit");
    else
        rc = zstd_decode(&z, e);
    ZSTD_freeDCtx(z.ctx);
    free(z.in_buf);
    free(z.out_buf);
    *size = z.written;
    return rc;
}

/* The zip archive that comes out of the frame. */
static int open_decoded(struct source *shard, const struct chunk *c,
                        struct decoded_cache *decoded, struct source **out,
                        struct err *e)
{
    CLEANUP(source_putp) struct source *window = NULL;
    struct decoded_key key = decoded_key_of(shard, c->offset, c->length, c->encoding);

    if (!decoded)
        return err_set(e, ENOTSUP, "compressed, and there is no place to decode it");
    TRY(check_range(shard, c, e));
    TRY(source_window(shard, c->offset, c->length, &window, e));
    TRY(decoded_get(decoded, &key, window, 0, zstd_to_file, NULL, out, e));
    return 0;
}

static int resolve_decoded(struct source *shard, const struct chunk *c,
                           const struct chunk_tensor *t, struct decoded_cache *decoded,
                           struct chunk_place *out, struct err *e)
{
    CLEANUP(source_putp) struct source *plain = NULL;

    TRY(open_decoded(shard, c, decoded, &plain, e));
    out->decoded = true;
    return resolve_in(plain, 0, plain->size, c, t, out, e);
}

static int resolve_zstd(struct source *shard, const struct chunk *c,
                        const struct chunk_tensor *t, struct decoded_cache *decoded,
                        struct chunk_place *out, struct err *e)
{
    if (resolve_decoded(shard, c, t, decoded, out, e) < 0)
        return place_error(shard, c, t, e);
    return 0;
}

static int verify_plain(struct source *shard, const struct chunk *c,
                        struct decoded_cache *decoded, struct chunk_look *look,
                        struct err *e)
{
    (void)decoded;
    TRY(check_range(shard, c, e));
    return torch_zip_checksums(shard, c->offset, c->length, look, e);
}

static int verify_zstd(struct source *shard, const struct chunk *c,
                       struct decoded_cache *decoded, struct chunk_look *look,
                       struct err *e)
{
    CLEANUP(source_putp) struct source *plain = NULL;

    TRY(open_decoded(shard, c, decoded, &plain, e));
    return torch_zip_checksums(plain, 0, plain->size, look, e);
}

const struct chunk_codec codec_torch_zip = {
    .encoding = CHUNK_TORCH_ZIP,
    .name = "torch-zip",
    .resolve = resolve_plain,
    .verify = verify_plain,
};

const struct chunk_codec codec_torch_zip_zstd = {
    .encoding = CHUNK_TORCH_ZIP_ZSTD,
    .name = "torch-zip-zstd",
    .decodes = true,
    .resolve = resolve_zstd,
    .verify = verify_zstd,
};
