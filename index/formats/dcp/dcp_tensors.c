/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_tensors.c - reports the tensors of a DCP checkpoint and their chunks. */
#include "index/formats/dcp/dcp_scan.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "base/vec.h"
#include "index/formats/flat_boxes.h"
#include "index/formats/dcp/torch_dcp.h"
#include "index/names.h"
#include "index/sink.h"
#include "remote/store.h"

/* A tensor on its way to the sink. */
struct work {
    struct dcp_scan *s;
    const struct dcp_ref *ref;       /* the ranks that have it, lowest first */
    const struct dcp_tensor *tensor; /* as the lowest rank tells it */
    struct sink_tensor sink;
    struct shape shape;
    uint32_t whole;      /* DCP_NO_SHAPE, or the shape of what is stored flattened */
    struct shape block;  /* of which each cell of the stored tensor is the elements */
    struct dcp_box *box; /* in s->box */
    size_t nbox;
    bool broken; /* has a fault: more chunks are of no use */
    struct err *e;
};

/* "[4, 6]" appended to the scratch text. */
static void add_shape(struct dcp_scan *s, uint32_t shape)
{
    const int64_t *dim;
    uint32_t nd;

    if (shape == DCP_NO_SHAPE || shape == DCP_BAD_SHAPE) {
        buf_adds(&s->text, "an unknown place");
        return;
    }
    dim = dcp_shape(&s->names, shape, &nd);
    for (uint32_t k = 0; k < nd; k++)
        buf_addf(&s->text, "%s%" PRId64, k ? ", " : "[", dim[k]);
    buf_adds(&s->text, nd ? "]" : "[]");
}

static const char *shape_text(struct dcp_scan *s, uint32_t shape)
{
    buf_clear(&s->text);
    add_shape(s, shape);
    return s->text.data ? s->text.data : "";
}

static const char *word_text(const struct dcp_scan *s, uint32_t word, int *len)
{
    size_t n;
    const char *text = intern_get(&s->names.words, word, &n);

    *len = (int)MIN(n, 256);
    return text;
}

/* After sink_fault(), which fails only for lack of memory. */
static int broken(struct work *w, int r)
{
    w->broken = true;
    return r < 0 ? err_nomem(w->e) : 0;
}

/* A fault of the whole tensor. */
static int tensor_fault(struct work *w, const char *what)
{
    return broken(w, sink_fault(w->s->sink, "%s", what));
}

static int chunk_fault(struct work *w, const struct dcp_box *box, const char *why)
{
    const char *at = shape_text(w->s, box->chunk.start);

    return broken(w, sink_fault(w->s->sink, "chunk at %s: %s", at, why));
}

/* What the metadata itself says wrong of the tensor. */
static int report_bad(struct work *w)
{
    struct sink *sink = w->s->sink;
    const char *word = "";
    int len = 0;

    if (w->tensor->bad == DCP_BAD_CLASS || w->tensor->bad == DCP_BAD_DTYPE)
        word = word_text(w->s, w->tensor->word, &len);
    switch (w->tensor->bad) {
    case DCP_BAD_CLASS:
        return sink_fault(
            w->s->sink, "its metadata is of class %.*s, neither a tensor nor an object",
            len, word);
    case DCP_BAD_DTYPE:
        return broken(
            w, sink_fault(sink, "element type %.*s is not supported", len, word));
    case DCP_BAD_LAYOUT:
        return tensor_fault(w, "not a strided tensor");
    case DCP_BAD_SIZE:
        return tensor_fault(w, "its size is no list of at most 64 integers");
    case DCP_BAD_CHUNKS:
        return tensor_fault(w, "its chunks are no list of ChunkStorageMetadata");
    default:
        return tensor_fault(w, "it has no TensorProperties");
    }
}

/*
 * The shape that is shown. Torch counts pairs of 4-bit elements; impossible dimensions
 * become 0 (the tensor then has a fault).
 */
static void set_shape(struct work *w)
{
    uint32_t nd, shape = w->whole == DCP_NO_SHAPE ? w->tensor->size : w->whole;
    const int64_t *dim;

    w->shape = (struct shape){0};
    if (shape == DCP_NO_SHAPE || shape == DCP_BAD_SHAPE)
        return;
    dim = dcp_shape(&w->s->names, shape, &nd);
    w->shape.nd = nd;
    for (uint32_t k = 0; k < nd; k++)
        w->shape.dim[k] = dim[k] < 0 ? 0 : (uint64_t)dim[k];
    if (w->tensor->dtype == DTYPE_F4 && nd > 0 && w->shape.dim[nd - 1] <= INT64_MAX / 2)
        w->shape.dim[nd - 1] *= 2;
}

/*
 * Megatron Core 0.8 to 0.15: a tensor of shape [X, Y] whose ranks have blocks of [x, y] is
 * stored with shape [X/x, Y/y, x*y], the elements of each block flat in the last axis.
 */
static bool find_block(struct work *w)
{
    struct err ignored = {0};
    const int64_t *stored, *whole;
    uint32_t nd, whole_nd;
    uint64_t count;

    if (w->whole == DCP_BAD_SHAPE || w->tensor->dtype == DTYPE_F4)
        return false;
    stored = dcp_shape(&w->s->names, w->tensor->size, &nd);
    whole = dcp_shape(&w->s->names, w->whole, &whole_nd);
    if (nd != whole_nd + 1)
        return false;
    w->block.nd = whole_nd;
    for (uint32_t k = 0; k < whole_nd; k++) {
        if (whole[k] < 0 || stored[k] == 0 || whole[k] % stored[k] != 0)
            return false;
        w->block.dim[k] = (uint64_t)(whole[k] / stored[k]);
    }
    return shape_elements(&w->block, &count, &ignored) == 0 &&
           count == (uint64_t)stored[whole_nd];
}

static int check_flattened(struct work *w)
{
    const char *size;

    if (find_block(w))
        return 0;
    size = shape_text(w->s, w->tensor->size);
    return broken(w, sink_fault(w->s->sink,
                                "stored with size %s, which is no reformulation of the "
                                "tensor's own shape",
                                size));
}

/* Are size and dtype such that chunks can be looked at? */
static int check_tensor(struct work *w)
{
    const int64_t *dim;
    uint32_t nd;

    if (w->tensor->bad)
        return report_bad(w);
    dim = dcp_shape(&w->s->names, w->tensor->size, &nd);
    for (uint32_t k = 0; k < nd; k++) {
        if (dim[k] < 0 || (w->tensor->dtype == DTYPE_F4 && dim[k] > INT64_MAX / 2))
            return broken(w, sink_fault(w->s->sink, "a tensor of size %s cannot be",
                                        shape_text(w->s, w->tensor->size)));
    }
    if (w->tensor->dtype == DTYPE_F4 && nd == 0)
        return tensor_fault(w, "a single float4_e2m1fn_x2 has no shape in elements");
    return w->whole == DCP_NO_SHAPE ? 0 : check_flattened(w);
}

/* A chunk's box as the sink wants it; a fault when it is none. */
static int box_of(struct work *w, const struct dcp_box *box, uint64_t *start,
                  uint64_t *size)
{
    const int64_t *from, *dims;
    uint32_t nd, nfrom, ndims;

    if (box->chunk.start >= DCP_BAD_SHAPE || box->chunk.size >= DCP_BAD_SHAPE)
        return tensor_fault(w,
                            "a chunk whose offsets or sizes are no lists of integers");
    dcp_shape(&w->s->names, w->tensor->size, &nd);
    from = dcp_shape(&w->s->names, box->chunk.start, &nfrom);
    dims = dcp_shape(&w->s->names, box->chunk.size, &ndims);
    if (nfrom != nd || ndims != nd)
        return chunk_fault(w, box, "it has not as many dimensions as the tensor");
    for (uint32_t k = 0; k < nd; k++) {
        if (from[k] < 0 || dims[k] < 0)
            return chunk_fault(w, box, "negative offset or size");
        start[k] = (uint64_t)from[k];
        size[k] = (uint64_t)dims[k];
    }
    return 0;
}

static bool is_empty(const uint64_t *size, uint32_t nd)
{
    for (uint32_t k = 0; k < nd; k++)
        if (size[k] == 0)
            return true;
    return false;
}

/* Bytes of a box, UINT64_MAX when they are too many. */
static uint64_t box_bytes(const struct chunk *c, uint32_t nd, enum dtype dtype)
{
    uint64_t n = dtype_unit(dtype);

    for (uint32_t k = 0; k < nd; k++)
        if (__builtin_mul_overflow(n, c->size[k], &n))
            return UINT64_MAX;
    return n;
}

/*
 * A torch zip is always longer than its data, so only what has exactly the data's length
 * can be a tensor of a safetensors image: no other file is read here.
 */
static int find_in_image(struct work *w, const struct dcp_box *box,
                         const struct dcp_stored *stored, struct chunk *c,
                         struct err *e)
{
    const struct sink_tensor *t = &w->sink;
    struct dcp_file *file = &w->s->file[stored->path];
    struct shape units = {.nd = w->shape.nd};
    struct dcp_image_want want = {.dtype = t->dtype, .box = &units};
    struct err why = {0};
    int r;

    if (stored->zstd || stored->length != box_bytes(c, units.nd, t->dtype))
        return 0;
    memcpy(units.dim, c->size, units.nd * sizeof *c->size);
    want.key = intern_get(&w->s->names.keys, w->ref->key, &want.key_len);
    r = dcp_image_find(w->s, stored, &want, &c->offset, &why);
    if (r == -ENOMEM)
        return err_nomem(e);
    if (r < 0)
        return chunk_fault(w, box, why.text);
    if (r == 0)
        return 0;
    /* The image has one tensor of a name: what was written first is lost. */
    if (file->image_key == w->ref->key + 1)
        return chunk_fault(w, box,
                           "a safetensors image holds only one chunk of a tensor");
    file->image_key = w->ref->key + 1;
    c->encoding = CHUNK_PLAIN;
    return 0;
}

/* The boxes of a flat range of one block; `first` and `count` are elements of it. */
static int report_range(struct work *w, struct chunk *c, const uint64_t *cell,
                        uint64_t first, uint64_t count, struct err *e)
{
    int64_t step[SHAPE_MAX_DIMS];
    struct flat_boxes boxes;
    struct flat_box box;

    if (!flat_boxes_begin(&boxes, &w->block, first, first + count))
        return tensor_fault(w, "a chunk that reaches past the end of its block");
    for (uint32_t k = 0; k < w->block.nd; k++)
        step[k] = (int64_t)boxes.stride[k];
    while (flat_boxes_next(&boxes, &box)) {
        for (uint32_t k = 0; k < w->block.nd; k++)
            box.start[k] += cell[k] * w->block.dim[k];
        c->start = box.start;
        c->size = box.size;
        c->first = box.first;
        c->step = step;
        TRY(sink_chunk(w->s->sink, c, e));
    }
    return 0;
}

/* A chunk of a flattened tensor: part of one cell of the leading axes. */
static int report_flat(struct work *w, const struct dcp_box *box, struct chunk *c,
                       struct err *e)
{
    const uint64_t *start = c->start, *size = c->size;
    uint32_t nd = w->block.nd, stored_nd;
    const int64_t *stored = dcp_shape(&w->s->names, w->tensor->size, &stored_nd);

    for (uint32_t k = 0; k < nd; k++) {
        if (size[k] != 1)
            return chunk_fault(w, box, "it spans several blocks");
        if (start[k] >= (uint64_t)stored[k])
            return chunk_fault(w, box, "it lies outside of the tensor");
    }
    if (size[nd] > UINT64_MAX - start[nd])
        return chunk_fault(w, box, "it lies outside of the tensor");
    return report_range(w, c, start, start[nd], size[nd], e);
}

static int report_chunk(struct work *w, const struct dcp_box *box,
                        const struct dcp_stored *stored, struct chunk *c, struct err *e)
{
    CLEANUP(buf_release) struct buf why = {0};
    const char *fault = dcp_stored_fault(w->s, stored, &why);
    const struct dcp_file *file;

    if (fault)
        return chunk_fault(w, box, fault);
    TRY(dcp_file_register(w->s, stored->path, &file, e));
    if (!file->safe) {
        buf_adds(&why, "file name ");
        dcp_path_text(w->s, stored->path, &why);
        buf_adds(&why, " is no path within the checkpoint");
        return chunk_fault(w, box, buf_failed(&why) ? "bad file name" : why.data);
    }
    c->file = file->number;
    c->encoding = stored->zstd ? CHUNK_TORCH_ZIP_ZSTD : CHUNK_TORCH_ZIP;
    c->offset = stored->offset;
    c->length = stored->length;
    w->s->zstd |= stored->zstd;
    if (w->whole != DCP_NO_SHAPE)
        return report_flat(w, box, c, e);
    TRY(find_in_image(w, box, stored, c, e));
    return w->broken ? 0 : sink_chunk(w->s->sink, c, e);
}

/*
 * Empty chunks are normal (a rank beyond the last row) and cover nothing: their file is
 * registered, so that it is hidden and no stale one, but need not be whole.
 */
static int report_empty(struct work *w, const struct dcp_stored *stored, struct err *e)
{
    const struct dcp_file *file;

    return stored && !stored->bad ? dcp_file_register(w->s, stored->path, &file, e) : 0;
}

static int report_box(struct work *w, const struct dcp_box *box, struct err *e)
{
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS];
    struct chunk c = {.start = start, .size = size};
    const struct dcp_stored *stored;

    TRY(box_of(w, box, start, size));
    if (w->broken)
        return 0;
    stored = dcp_stored_find(w->s->part[box->part].m, w->ref->key, box->chunk.start);
    if (is_empty(size, w->shape.nd + (w->whole != DCP_NO_SHAPE)))
        return report_empty(w, stored, e);
    if (!stored)
        return chunk_fault(w, box, "storage_data has no entry for it");
    return report_chunk(w, box, stored, &c, e);
}

/* By box, then part. */
static int compare_boxes(const void *a, const void *b)
{
    const struct dcp_box *x = a, *y = b;

    if (x->chunk.start != y->chunk.start)
        return x->chunk.start < y->chunk.start ? -1 : 1;
    if (x->chunk.size != y->chunk.size)
        return x->chunk.size < y->chunk.size ? -1 : 1;
    return x->part < y->part ? -1 : x->part > y->part;
}

static int grow_boxes(struct dcp_scan *s, size_t n, struct err *e)
{
    return VEC_ROOM_FOR(s->box, n, s->box_cap) ? 0 : err_nomem(e);
}

/* The same box from several ranks is a replica: the lowest rank's is taken. */
static void drop_replicas(struct work *w)
{
    size_t kept = 0;

    qsort(w->box, w->nbox, sizeof *w->box, compare_boxes);
    for (size_t i = 0; i < w->nbox; i++) {
        const struct dcp_box *last = kept ? &w->box[kept - 1] : NULL;

        if (last && last->chunk.start == w->box[i].chunk.start &&
            last->chunk.size == w->box[i].chunk.size && last->part != w->box[i].part)
            w->s->replicas++;
        else
            w->box[kept++] = w->box[i];
    }
    w->nbox = kept;
}

/* The chunks of all ranks that have the tensor. */
static int collect_boxes(struct work *w, size_t nrefs, struct err *e)
{
    for (size_t i = 0; i < nrefs; i++) {
        const struct dcp_metadata *m = dcp_part_of(w->s, &w->ref[i]);
        const struct dcp_tensor *t = &m->tensor[dcp_entry_of(w->s, &w->ref[i])->tensor];

        TRY(grow_boxes(w->s, w->nbox + t->count, e));
        for (uint32_t k = 0; k < t->count; k++)
            w->s->box[w->nbox++] =
                (struct dcp_box){m->chunk[t->first + k], w->ref[i].part};
    }
    w->box = w->s->box;
    if (nrefs > 1)
        drop_replicas(w);
    return 0;
}

static int report_boxes(struct work *w, size_t nrefs, struct err *e)
{
    TRY(collect_boxes(w, nrefs, e));
    for (size_t i = 0; i < w->nbox && !w->broken; i++)
        TRY(report_box(w, &w->box[i], e));
    return 0;
}

static int report(struct work *w, size_t nrefs, struct err *e)
{
    struct sink *sink = w->s->sink;
    int r = sink_tensor_begin(sink, &w->sink, e);

    if (r == -EEXIST) {
        *e = (struct err){0};
        return dcp_warned(sink_warning(sink, "duplicate-key", "%.*s: shown only once",
                                       (int)MIN(w->sink.key_len, 256), w->sink.key),
                          e);
    }
    if (r < 0)
        return r;
    TRY(check_tensor(w));
    if (!w->broken)
        TRY(report_boxes(w, nrefs, e));
    return sink_tensor_end(sink, e);
}

static int role_of_key(const struct dcp_scan *s, const char *key, size_t len)
{
    return s->how->role_of ? s->how->role_of(key, len) : s->how->role;
}

static bool is_model(const struct dcp_scan *s, const char *key, size_t len)
{
    int role = role_of_key(s, key, len);

    return (role < 0 ? role_of(s->how->part, key, len) : (enum role)role) == ROLE_MODEL;
}

/* Steps, losses and EMA copies beside the wrapper that has the model. */
static bool is_beside(const struct dcp_scan *s, const char *key, size_t len)
{
    return s->has_wrapper && (s->how->role_of || s->how->role < 0) &&
           is_model(s, key, len);
}

void dcp_find_wrapper(struct dcp_scan *s)
{
    for (uint32_t p = 0; p < s->nparts && !s->how->no_wrapper; p++) {
        const struct dcp_metadata *m = s->part[p].m;

        for (uint32_t i = 0; i < m->nentries && !s->has_wrapper; i++) {
            size_t len;
            const char *key = intern_get(&s->names.keys, m->entry[i].key, &len);

            s->has_wrapper = m->entry[i].tensor != DCP_OBJECT &&
                             m->entry[i].wrapper > 0 && is_model(s, key, len);
        }
    }
}

/* `key` NULL: the entry's own, with its wrapper and role. */
static int report_as(struct dcp_scan *s, const struct dcp_ref *ref, size_t nrefs,
                     const struct buf *key, struct err *e)
{
    const struct dcp_metadata *m = dcp_part_of(s, ref);
    const struct dcp_entry *entry = dcp_entry_of(s, ref);
    struct work w = {.s = s,
                     .ref = ref,
                     .tensor = &m->tensor[entry->tensor],
                     .whole = entry->whole,
                     .e = e};
    size_t len;
    const char *own = intern_get(&s->names.keys, entry->key, &len);

    set_shape(&w);
    w.sink = (struct sink_tensor){
        .key = key ? key->data : own,
        .key_len = key ? key->len : len,
        .part = s->how->part,
        .wrapper = key || s->how->no_wrapper ? 0 : entry->wrapper,
        .modules = !key && !s->how->no_wrapper,
        .dtype = w.tensor->dtype,
        .shape = &w.shape,
        .role = key ? ROLE_OTHER : role_of_key(s, own, len),
    };
    if (!key && s->how->on_tensor)
        s->how->on_tensor(s->how->user, own, len, &w.shape);
    if (!key && w.sink.wrapper == 0 && is_beside(s, own, len))
        w.sink.role = ROLE_OTHER;
    return report(&w, nrefs, e);
}

/* Do both ranks speak of the same tensor? */
static bool same_tensor(const struct dcp_scan *s, const struct dcp_ref *a,
                        const struct dcp_ref *b)
{
    const struct dcp_tensor *x = &dcp_part_of(s, a)->tensor[dcp_entry_of(s, a)->tensor];
    const struct dcp_tensor *y = &dcp_part_of(s, b)->tensor[dcp_entry_of(s, b)->tensor];

    return x->size == y->size && x->dtype == y->dtype && x->bad == y->bad &&
           dcp_entry_of(s, a)->whole == dcp_entry_of(s, b)->whole;
}

/*
 * Ranks that disagree on size or dtype each have a plain tensor of their own under the
 * key: it is shown as "__3.metadata:KEY".
 */
static int report_own(struct dcp_scan *s, const struct dcp_ref *ref, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    size_t len;
    const char *own = intern_get(&s->names.keys, ref->key, &len);

    buf_addf(&key, "%s:", s->part[ref->part].name);
    buf_add(&key, own, len);
    if (buf_failed(&key))
        return err_nomem(e);
    return report_as(s, ref, 1, &key, e);
}

int dcp_report_tensor(struct dcp_scan *s, const struct dcp_ref *ref, size_t n,
                      struct err *e)
{
    CLEANUP_FREE struct dcp_ref *same = NULL;
    size_t nsame = 1;

    if (n == 1)
        return report_as(s, ref, 1, NULL, e);
    same = reallocarray(NULL, n, sizeof *same);
    if (!same)
        return err_nomem(e);
    same[0] = ref[0];
    for (size_t i = 1; i < n; i++)
        if (same_tensor(s, &ref[0], &ref[i]))
            same[nsame++] = ref[i];
        else
            TRY(report_own(s, &ref[i], e));
    return report_as(s, same, nsame, NULL, e);
}
