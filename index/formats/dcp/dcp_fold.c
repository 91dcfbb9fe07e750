/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_fold.c - the classes of a .metadata, each folded into a table's row. */
#include "index/formats/dcp/dcp_fold.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/torch/torch_zip.h"
#include "index/shape.h"

#define METADATA "torch.distributed.checkpoint.metadata"
#define OLD_METADATA                                                                   \
    "torch.distributed._shard.checkpoint.metadata" /* before torch 2.0 */
#define PLANNER "torch.distributed.checkpoint.planner"
#define MCORE "megatron.core.dist_checkpointing.strategies.torch"

/* PV_RECORD: kind in the upper byte; for properties also the dtype and what is bad. */
enum { KIND_SHIFT = 56, BAD_SHIFT = 48, DTYPE_SHIFT = 40 };

/* Names of a class that dcp_stored and dcp_tensor can refer to: 24 bits. */
enum { MAX_WORDS = 1 << 24 };

static uint64_t record(enum dcp_fold_kind kind, uint32_t row)
{
    return (uint64_t)kind << KIND_SHIFT | row;
}

static bool is_record(const struct pv *v, enum dcp_fold_kind kind)
{
    return v->kind == PV_RECORD && v->record >> KIND_SHIFT == (uint64_t)kind;
}

bool dcp_folded(const struct pv *v, enum dcp_fold_kind kind, uint32_t *row)
{
    if (!is_record(v, kind))
        return false;
    *row = (uint32_t)v->record;
    return true;
}

/* The table with room for one more row of `size` bytes, or NULL. */
static void *room(void *rows, uint32_t count, uint32_t *cap, size_t size, struct err *e)
{
    uint32_t want = *cap ? *cap + *cap / 2 : 64;

    if (count < *cap)
        return rows;
    if (count >= INTERN_MAX / 2) {
        err_set(e, EBADMSG, "more than %" PRIu32 " entries", count);
        return NULL;
    }
    rows = reallocarray(rows, want, size);
    if (rows)
        *cap = want;
    else
        err_nomem(e);
    return rows;
}

static int intern_failed(int code, struct err *e)
{
    if (code == -ENOMEM)
        return err_nomem(e);
    return err_set(e, EBADMSG, "too many different names or shapes");
}

/* Numbers a word; when there are too many of them, by the first one. */
static int word_of(struct dcp_loader *l, const char *text, size_t len, uint32_t *word,
                   struct err *e)
{
    int r = intern_add(&l->m->names->words, text, len, word);

    if (r < 0)
        return intern_failed(r, e);
    if (*word >= MAX_WORDS)
        *word = 0;
    return 0;
}

/* "module.name" of a class, or a word for what has none. */
static int class_word(struct dcp_loader *l, const struct pv *v, uint32_t *word,
                      struct err *e)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct pv class = v->kind == PV_OBJECT ? pv_class(v) : *v;
    const char *module, *name;

    if (pv_global(&class, &module, &name))
        buf_addf(&b, "%s.%s", module, name);
    else
        buf_adds(&b, "no class");
    if (buf_failed(&b))
        return err_nomem(e);
    return word_of(l, b.data, b.len, word, e);
}

/* Shapes. */

/* The items of a tuple or list, when all are integers and not too many. */
static bool dims_of(const struct pv *v, int64_t *dim, size_t *nd)
{
    *nd = pv_count(v);
    if (*nd > SHAPE_MAX_DIMS)
        return false;
    for (size_t i = 0; i < *nd; i++) {
        struct pv item = pv_at(v, i);

        if (item.kind != PV_INT)
            return false;
        dim[i] = item.i;
    }
    return true;
}

int dcp_shape_of(struct dcp_loader *l, const struct pv *v, uint32_t *shape,
                 struct err *e)
{
    int64_t dim[SHAPE_MAX_DIMS];
    size_t nd;
    int r;

    *shape = v->kind == PV_NONE ? DCP_NO_SHAPE : DCP_BAD_SHAPE;
    if (dcp_folded(v, DCP_FOLD_SHAPE, shape))
        return 0;
    if ((v->kind != PV_TUPLE && v->kind != PV_LIST) || !dims_of(v, dim, &nd))
        return 0;
    r = intern_add(&l->m->names->shapes, dim, nd * sizeof *dim, shape);
    return r < 0 ? intern_failed(r, e) : 0;
}

/* Size(dims), or Size() for no dimensions. */
static int fold_size(void *user, const struct pv *object, uint64_t *out, struct err *e)
{
    struct dcp_loader *l = user;
    struct pv args = pv_args(object);
    uint32_t shape;

    if (pv_count(&args) > 0) {
        struct pv dims = pv_at(&args, 0);

        TRY(dcp_shape_of(l, &dims, &shape, e));
    } else {
        int r = intern_add(&l->m->names->shapes, "", 0, &shape);

        if (r < 0)
            return intern_failed(r, e);
    }
    *out = record(DCP_FOLD_SHAPE, shape == DCP_NO_SHAPE ? DCP_BAD_SHAPE : shape);
    return 1;
}

/* A member of a state dict; PV_NONE when it is absent. */
static struct pv member(const struct pv *object, const char *name)
{
    struct pv state = pv_state(object), v;

    if (state.kind != PV_DICT || !pv_dict_get(&state, name, &v))
        v = (struct pv){.kind = PV_NONE};
    return v;
}

/* TensorProperties. */

/* _get_layout("torch.strided") */
static bool is_strided(const struct pv *layout)
{
    struct pv args, name;

    if (layout->kind != PV_OBJECT ||
        !pv_is(layout, "torch.serialization", "_get_layout"))
        return false;
    args = pv_args(layout);
    if (pv_count(&args) != 1)
        return false;
    name = pv_at(&args, 0);
    return pv_str_is(&name, "torch.strided");
}

/*
 * The state is the tuple (dtype, layout, requires_grad, memory format, pin_memory) in
 * torch 2.3, with strides of one shard behind since 2.8 or so; a dict is taken as well.
 */
static bool properties_of(const struct pv *object, struct pv *dtype, struct pv *layout)
{
    struct pv state = pv_state(object);

    if (state.kind == PV_TUPLE && pv_count(&state) >= 2) {
        *dtype = pv_at(&state, 0);
        *layout = pv_at(&state, 1);
        return true;
    }
    *dtype = member(object, "dtype");
    *layout = member(object, "layout");
    return state.kind == PV_DICT;
}

static int fold_properties(void *user, const struct pv *object, uint64_t *out,
                           struct err *e)
{
    struct pv dtype, layout;
    enum dcp_bad bad = DCP_GOOD;
    enum dtype type = DTYPE_NONE;
    uint32_t word = 0;

    if (!properties_of(object, &dtype, &layout))
        bad = DCP_BAD_PROPERTIES;
    else if ((type = torch_dtype(&dtype)) == DTYPE_NONE)
        bad = DCP_BAD_DTYPE;
    else if (!is_strided(&layout))
        bad = DCP_BAD_LAYOUT;
    if (bad == DCP_BAD_DTYPE)
        TRY(class_word(user, &dtype, &word, e));
    *out = record(DCP_FOLD_PROPERTIES, word) | (uint64_t)bad << BAD_SHIFT |
           (uint64_t)type << DTYPE_SHIFT;
    return 1;
}

/* ChunkStorageMetadata. */

static int add_chunk(struct dcp_loader *l, struct dcp_chunk chunk, struct err *e)
{
    struct dcp_metadata *m = l->m;
    struct dcp_chunk *rows = room(m->chunk, m->nchunks, &l->chunks, sizeof chunk, e);

    if (!rows)
        return -e->code;
    m->chunk = rows;
    rows[m->nchunks++] = chunk;
    return 0;
}

static int fold_chunk(void *user, const struct pv *object, uint64_t *out, struct err *e)
{
    struct dcp_loader *l = user;
    struct pv offsets = member(object, "offsets"), sizes = member(object, "sizes");
    struct dcp_chunk chunk;

    TRY(dcp_shape_of(l, &offsets, &chunk.start, e));
    TRY(dcp_shape_of(l, &sizes, &chunk.size, e));
    TRY(add_chunk(l, chunk, e));
    *out = record(DCP_FOLD_CHUNK, l->m->nchunks - 1);
    return 1;
}

/* TensorStorageMetadata. */

/* Are the list's chunks rows first, first + 1, ... of the table, as they are folded? */
static bool chunks_in_row(const struct pv *list, uint32_t *first)
{
    for (size_t i = 0, n = pv_count(list); i < n; i++) {
        struct pv item = pv_at(list, i);
        uint32_t row;

        if (!dcp_folded(&item, DCP_FOLD_CHUNK, &row))
            return false;
        if (i == 0)
            *first = row;
        if (row != *first + i)
            return false;
    }
    return true;
}

/* Appends copies of chunks that are used a second time (a list shared by the memo). */
static int copy_chunks(struct dcp_loader *l, const struct pv *list,
                       struct dcp_tensor *t, struct err *e)
{
    t->first = l->m->nchunks;
    for (size_t i = 0, n = pv_count(list); i < n; i++) {
        struct pv item = pv_at(list, i);
        uint32_t row;

        if (!dcp_folded(&item, DCP_FOLD_CHUNK, &row)) {
            t->bad = DCP_BAD_CHUNKS;
            return 0;
        }
        if (l->m->nchunks >= l->bytes)
            return err_set(e, EBADMSG,
                           "%" PRIu32 " chunks or more in a file of %" PRIu64 " bytes",
                           l->m->nchunks, l->bytes);
        TRY(add_chunk(l, l->m->chunk[row], e));
    }
    return 0;
}

static int take_chunks(struct dcp_loader *l, const struct pv *list,
                       struct dcp_tensor *t, struct err *e)
{
    if (list->kind != PV_LIST && list->kind != PV_TUPLE) {
        t->bad = DCP_BAD_CHUNKS;
        return 0;
    }
    t->count = (uint32_t)pv_count(list);
    return chunks_in_row(list, &t->first) ? 0 : copy_chunks(l, list, t, e);
}

static int add_tensor(struct dcp_loader *l, const struct dcp_tensor *t, uint32_t *row,
                      struct err *e)
{
    struct dcp_metadata *m = l->m;
    struct dcp_tensor *rows = room(m->tensor, m->ntensors, &l->tensors, sizeof *t, e);

    if (!rows)
        return -e->code;
    m->tensor = rows;
    *row = m->ntensors++;
    rows[*row] = *t;
    return 0;
}

static int fold_tensor(void *user, const struct pv *object, uint64_t *out,
                       struct err *e)
{
    struct dcp_loader *l = user;
    struct pv properties = member(object, "properties");
    struct pv size = member(object, "size"), chunks = member(object, "chunks");
    struct dcp_tensor t = {.bad = DCP_BAD_PROPERTIES};
    uint32_t row = 0;

    if (is_record(&properties, DCP_FOLD_PROPERTIES)) {
        t.bad = (uint8_t)(properties.record >> BAD_SHIFT);
        t.dtype = (uint8_t)(properties.record >> DTYPE_SHIFT);
        t.word = (uint32_t)properties.record;
    }
    TRY(dcp_shape_of(l, &size, &t.size, e));
    if (t.size == DCP_NO_SHAPE || t.size == DCP_BAD_SHAPE)
        t.bad = DCP_BAD_SIZE;
    if (!t.bad)
        TRY(take_chunks(l, &chunks, &t, e));
    TRY(add_tensor(l, &t, &row, e));
    *out = record(DCP_FOLD_TENSOR, row);
    return 1;
}

bool dcp_is_object(const struct pv *v)
{
    return v->kind == PV_OBJECT && (pv_is(v, METADATA, "BytesStorageMetadata") ||
                                    pv_is(v, OLD_METADATA, "BytesStorageMetadata"));
}

int dcp_tensor_of(struct dcp_loader *l, const struct pv *v, uint32_t *tensor,
                  struct err *e)
{
    struct dcp_tensor t = {.bad = DCP_BAD_CLASS, .size = DCP_BAD_SHAPE};

    if (dcp_folded(v, DCP_FOLD_TENSOR, tensor))
        return 0;
    if (dcp_is_object(v)) {
        *tensor = DCP_OBJECT;
        return 0;
    }
    TRY(class_word(l, v, &t.word, e));
    return add_tensor(l, &t, tensor, e);
}

int dcp_add_entry(struct dcp_loader *l, const struct dcp_entry *entry, struct err *e)
{
    struct dcp_metadata *m = l->m;
    struct dcp_entry *rows = room(m->entry, m->nentries, &l->entries, sizeof *entry, e);

    if (!rows)
        return -e->code;
    m->entry = rows;
    rows[m->nentries++] = *entry;
    return 0;
}

/* MetadataIndex. */

int dcp_key_of(struct dcp_loader *l, const struct pv *v, uint32_t *key, struct err *e)
{
    const char *text;
    size_t len;
    int r;

    text = pv_bytes(v, &len);
    r = intern_add(&l->m->names->keys, text, len, key);
    return r < 0 ? intern_failed(r, e) : 0;
}

static int add_index(struct dcp_loader *l, const struct dcp_index *index, uint32_t *row,
                     struct err *e)
{
    struct dcp_metadata *m = l->m;
    struct dcp_index *rows = room(m->index, m->nindex, &l->indexes, sizeof *index, e);

    if (!rows)
        return -e->code;
    m->index = rows;
    *row = m->nindex++;
    rows[*row] = *index;
    return 0;
}

/* `index` is a hint of a position and takes no part in equality. */
static int fold_index(void *user, const struct pv *object, uint64_t *out, struct err *e)
{
    struct dcp_loader *l = user;
    struct pv fqn = member(object, "fqn"), offset = member(object, "offset");
    struct dcp_index index = {.key = DCP_NO_KEY};
    uint32_t row = 0;

    if (fqn.kind == PV_STR)
        TRY(dcp_key_of(l, &fqn, &index.key, e));
    TRY(dcp_shape_of(l, &offset, &index.start, e));
    TRY(add_index(l, &index, &row, e));
    *out = record(DCP_FOLD_INDEX, row);
    return 1;
}

/* _StorageInfo. */

static int path_of(struct dcp_loader *l, const struct pv *v, struct dcp_stored *s,
                   struct err *e)
{
    const char *text = "";
    size_t len = 0;
    int r;

    if (v->kind == PV_STR)
        text = pv_bytes(v, &len);
    else
        s->bad = DCP_BAD_PATH;
    r = intern_add(&l->m->names->paths, text, len, &s->path);
    return r < 0 ? intern_failed(r, e) : 0;
}

/* All descriptors as one word: "stream.zstd/1, rot13". */
static int join_descriptors(struct dcp_loader *l, const struct pv *list,
                            struct dcp_stored *s, struct err *e)
{
    CLEANUP(buf_release) struct buf b = {0};
    uint32_t word;

    for (size_t i = 0, n = pv_count(list); i < n && b.len < 256; i++) {
        struct pv item = pv_at(list, i);
        size_t len = 0;
        const char *text = item.kind == PV_STR ? pv_bytes(&item, &len) : "";

        buf_addf(&b, "%s%.*s", i ? ", " : "", (int)MIN(len, 256), text);
    }
    if (buf_failed(&b))
        return err_nomem(e);
    TRY(word_of(l, b.data, b.len, &word, e));
    s->word = word & (MAX_WORDS - 1);
    return 0;
}

/* What was done to the blob when it was written; usually nothing, and no member at all. */
static int transform_of(struct dcp_loader *l, const struct pv *list,
                        struct dcp_stored *s, struct err *e)
{
    struct pv only;

    if (list->kind == PV_NONE)
        return 0;
    if (list->kind == PV_LIST || list->kind == PV_TUPLE) {
        if (pv_count(list) == 0)
            return 0;
        only = pv_at(list, 0);
        if (pv_count(list) == 1 && pv_str_is(&only, "stream.zstd/1")) {
            s->zstd = 1;
            return 0;
        }
    }
    s->bad = DCP_BAD_TRANSFORM;
    return join_descriptors(l, list, s, e);
}

static int add_stored(struct dcp_loader *l, const struct dcp_stored *s, uint32_t *row,
                      struct err *e)
{
    struct dcp_metadata *m = l->m;
    struct dcp_stored *rows = room(m->stored, m->nstored, &l->stored, sizeof *s, e);

    if (!rows)
        return -e->code;
    m->stored = rows;
    *row = m->nstored++;
    rows[*row] = *s;
    return 0;
}

static int fold_stored(void *user, const struct pv *object, uint64_t *out,
                       struct err *e)
{
    struct dcp_loader *l = user;
    struct pv path = member(object, "relative_path"), offset = member(object, "offset");
    struct pv length = member(object, "length");
    struct pv transform = member(object, "transform_descriptors");
    struct dcp_stored s = {0};
    uint32_t row = 0;

    TRY(path_of(l, &path, &s, e));
    TRY(transform_of(l, &transform, &s, e));
    if (!pv_u64(&length, &s.length))
        s.bad = DCP_BAD_LENGTH;
    if (!pv_u64(&offset, &s.offset))
        s.bad = DCP_BAD_OFFSET;
    TRY(add_stored(l, &s, &row, e));
    *out = record(DCP_FOLD_STORED, row);
    return 1;
}

static int fold_stored_olmo(void *user, const struct pv *object, uint64_t *out,
                            struct err *e)
{
    struct dcp_loader *l = user;

    l->m->olmo = true;
    return fold_stored(user, object, out, e);
}

int dcp_stored_of(struct dcp_loader *l, const struct pv *v, uint32_t *stored,
                  struct err *e)
{
    struct dcp_stored bad = {.bad = DCP_BAD_INFO};

    if (dcp_folded(v, DCP_FOLD_STORED, stored))
        return 0;
    if (!l->has_bad_info) {
        int r = intern_add(&l->m->names->paths, "", 0, &bad.path);

        if (r < 0)
            return intern_failed(r, e);
        TRY(add_stored(l, &bad, &l->bad_info, e));
        l->has_bad_info = true;
    }
    *stored = l->bad_info;
    return 0;
}

/*
 * Megatron Core keeps every rank's plan beside the metadata, which repeats it: usually
 * more than all the rest.
 */
static int fold_plan(void *user, const struct pv *object, uint64_t *out, struct err *e)
{
    (void)user;
    (void)object;
    (void)e;
    *out = record(DCP_FOLD_PLAN, 0);
    return 1;
}

/*
 * TensorProperties moved in torch 2.3, all of DCP in 2.0; older files name the old
 * place, and have the same members. OLMo-core has a writer of its own, whose record has
 * the same members.
 */
const struct pickle_fold dcp_folds[] = {
    {"torch", "Size", true, fold_size},
    {METADATA, "TensorProperties", false, fold_properties},
    {"torch.distributed._shard.sharded_tensor.metadata", "TensorProperties", false,
     fold_properties},
    {METADATA, "ChunkStorageMetadata", false, fold_chunk},
    {METADATA, "TensorStorageMetadata", false, fold_tensor},
    {METADATA, "MetadataIndex", false, fold_index},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo", false, fold_stored},
    {OLD_METADATA, "ChunkStorageMetadata", false, fold_chunk},
    {OLD_METADATA, "TensorStorageMetadata", false, fold_tensor},
    {OLD_METADATA, "MetadataIndex", false, fold_index},
    {"torch.distributed._shard.checkpoint.filesystem", "_StorageInfo", false,
     fold_stored},
    {"olmo_core.distributed.checkpoint.filesystem", "_StorageInfo", false,
     fold_stored_olmo},
    {PLANNER, "WriteItem", false, fold_plan},
    {PLANNER, "TensorWriteData", false, fold_plan},
    {PLANNER, "SavePlan", false, fold_plan},
    {MCORE, "MCoreSavePlan", false, fold_plan},
};
const size_t dcp_nfolds = ARRAY_SIZE(dcp_folds);
