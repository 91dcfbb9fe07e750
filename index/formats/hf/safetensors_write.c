/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_write.c - how safetensors files and sets of them are laid out. */
#include "index/formats/hf/safetensors_write.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/object_value.h"
#include "index/key_text.h"

enum { ALIGNMENT = 64, HEADER_MAX = 100000000 /* what the library reads */ };

static const char plain_metadata[] = "{\"format\":\"pt\"}";

bool safetensors_takes(const struct layout_tensor *t, size_t cut)
{
    static const char metadata[] = "__metadata__";
    const char *name = t->key + cut;
    size_t len = t->key_len - cut;

    return dtype_in_safetensors(t->dtype) && object_text_is_utf8(name, len) &&
           (len != sizeof metadata - 1 || memcmp(name, metadata, len) != 0);
}

/* ---- one file ---- */

struct order {
    const struct layout_input *in;
};

static int by_size_and_name(const void *a, const void *b, void *user)
{
    const struct order *o = user;
    const struct safetensors_entry *x = a, *y = b;
    unsigned bits_x = dtype_bits(o->in->tensor[x->tensor].dtype),
             bits_y = dtype_bits(o->in->tensor[y->tensor].dtype);
    int c;

    if (bits_x != bits_y)
        return bits_x > bits_y ? -1 : 1;
    c = memcmp(x->name, y->name, MIN(x->name_len, y->name_len));
    return c ? c : (x->name_len > y->name_len) - (x->name_len < y->name_len);
}

/* Elements along each axis: of the tensor, or of a box, which has as many axes. */
static void entry_shape(const struct layout_tensor *t,
                        const struct safetensors_entry *x, struct shape *out)
{
    *out = t->shape;
    for (uint32_t k = 0; x->size && k < out->nd; k++)
        out->dim[k] = x->size[k];
    if (x->size && out->nd && dtype_bits(t->dtype) % 8 != 0)
        /* a unit is a byte of packed elements */
        out->dim[out->nd - 1] = out->dim[out->nd - 1] * 8 / dtype_bits(t->dtype);
    if (x->flat) {
        uint64_t elements = 1;

        for (uint32_t k = 0; k < out->nd; k++)
            elements *= out->dim[k]; /* of a tensor whose bytes are counted */
        *out = (struct shape){.nd = 1, .dim = {elements}};
    }
}

static int add_entry(const struct layout_input *in, const struct safetensors_entry *x,
                     uint64_t *at, struct buf *header, struct err *e)
{
    const struct layout_tensor *t = &in->tensor[x->tensor];
    struct shape shape;
    uint64_t bytes, end;
    char text[200];

    if (!dtype_in_safetensors(t->dtype))
        return err_set(e, ENOTSUP, "%s: safetensors has no %s",
                       key_text(text, sizeof text, x->name, x->name_len),
                       dtype_name(t->dtype));
    entry_shape(t, x, &shape);
    TRY(shape_bytes(&shape, t->dtype, &bytes, e));
    if (add_overflows(*at, bytes, &end))
        return err_set(e, EFBIG, "over 2^64 bytes");
    if (header->len > 1)
        buf_addc(header, ',');
    buf_add_json(header, x->name, x->name_len);
    buf_addf(header, ":{\"dtype\":\"%s\",\"shape\":", dtype_name(t->dtype));
    shape_format(&shape, header);
    buf_addf(header, ",\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", *at, end);
    *at = end;
    return 0;
}

static int put_header(struct layout_file *f, struct buf *header, struct err *e)
{
    unsigned char length[8];

    buf_addc(header, '}');
    while ((layout_file_at(f) + sizeof length + header->len) % ALIGNMENT != 0)
        buf_addc(header, ' ');
    if (buf_failed(header))
        return err_set(e, -buf_failed(header), "a header of more than %d bytes",
                       HEADER_MAX);
    for (unsigned i = 0; i < sizeof length; i++)
        length[i] = (unsigned char)(header->len >> 8 * i);
    TRY(layout_bytes(f, length, sizeof length, e));
    return layout_bytes(f, header->data, header->len, e);
}

int safetensors_write(struct layout_file *f, const struct layout_input *in,
                      struct safetensors_entry *entry, size_t n, const char *metadata,
                      struct err *e)
{
    CLEANUP(buf_release) struct buf header = {.max = HEADER_MAX};
    struct order order = {.in = in};
    uint64_t at = 0;
    int ret = 0;

    if (n > 1)
        qsort_r(entry, n, sizeof *entry, by_size_and_name, &order);
    buf_addc(&header, '{');
    if (metadata)
        buf_addf(&header, "\"__metadata__\":%s", metadata);
    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = add_entry(in, &entry[i], &at, &header, e);
    if (ret == 0)
        ret = put_header(f, &header, e);
    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = layout_box(f, in, entry[i].tensor, entry[i].start, entry[i].size, e);
    return ret;
}

/* ---- a model in one file or several ---- */

struct set {
    const struct layout_input *in;
    struct layout *out;
    const char *stem; /* "model", "adapter_model" */
    struct safetensors_entry *entry;
    size_t entries;
    size_t *first; /* entry of each shard, and one behind the last */
    bool *kept;    /* of each shard: it stays as it arrived */
    size_t shards;
    uint64_t total;
    bool index; /* of a single file too */
};

/* What the model names itself; other roles have no place in a model's directory. */
static void choose_entry(struct set *s, size_t i)
{
    struct safetensors_entry *entry = &s->entry[s->entries++];

    *entry = (struct safetensors_entry){.tensor = i};
    entry->name = layout_own_name(&s->in->tensor[i], &entry->name_len);
}

static int choose_entries(struct set *s, struct err *e)
{
    static const char *const role[] = {"model", "optimizer", "other"};
    size_t left[3] = {0};
    char what[80];

    s->entry = calloc(s->in->tensors + 1, sizeof *s->entry);
    if (!s->entry)
        return err_nomem(e);
    for (size_t i = 0; i < s->in->tensors; i++) {
        const struct layout_tensor *t = &s->in->tensor[i];

        if (t->role != ROLE_MODEL)
            left[t->role]++;
        else if (safetensors_takes(t, t->wrapper))
            choose_entry(s, i);
        else
            TRY(layout_loss(s->out, LOSS_TENSOR, t->key, t->key_len, e));
    }
    for (unsigned r = ROLE_OPTIMIZER; r <= ROLE_OTHER; r++) {
        int n = snprintf(what, sizeof what, "%s (%zu tensors)", role[r], left[r]);

        if (left[r])
            TRY(layout_loss(s->out, LOSS_ROLE, what, (size_t)n, e));
    }
    for (size_t i = 0; i < s->in->objects; i++)
        TRY(layout_loss(s->out, LOSS_OBJECT, s->in->object[i].key,
                        s->in->object[i].key_len, e));
    return 0;
}

static const struct layout_tensor *entry_tensor(const struct set *s, size_t i)
{
    return &s->in->tensor[s->entry[i].tensor];
}

/* How many entries from the i-th on are of its batch. */
static size_t batch_entries(const struct set *s, size_t i)
{
    size_t n = 1;

    while (i + n < s->entries &&
           entry_tensor(s, i + n)->batch == entry_tensor(s, i)->batch)
        n++;
    return n;
}

/* Its file can be kept byte for byte: nothing in it was left out, renamed or replaced. */
static bool stays(const struct set *s, size_t i, uint64_t max)
{
    const struct layout_batch *b = entry_tensor(s, i)->batch;
    size_t n = batch_entries(s, i);
    uint64_t total, bytes;
    struct err ignored = {0};

    if (!b || !b->header || b->tensors != n)
        return false;
    total = b->header_len;
    for (size_t k = i; k < i + n; k++) {
        const struct layout_tensor *t = entry_tensor(s, k);

        if (t->wrapper || shape_bytes(&t->shape, t->dtype, &bytes, &ignored) < 0)
            return false;
        total += bytes; /* of a file that is there */
    }
    return total <= max;
}

/*
 * Tensors go to shards in order of their names; a shard ends with a batch, or where the next
 * tensor would make it too large (huggingface_hub.split_torch_state_dict_into_shards).
 */
static int cut_shards(struct set *s, uint64_t max, struct err *e)
{
    const struct layout_batch *batch = NULL;
    uint64_t filled = 0, bytes;
    bool kept = false;

    s->first = calloc(s->entries + 2, sizeof *s->first);
    s->kept = calloc(s->entries + 2, sizeof *s->kept);
    if (!s->first || !s->kept)
        return err_nomem(e);
    for (size_t i = 0; i < s->entries; i++) {
        const struct layout_tensor *t = &s->in->tensor[s->entry[i].tensor];

        TRY(shape_bytes(&t->shape, t->dtype, &bytes, e));
        if (s->shards == 0 || t->batch != batch ||
            (!kept && filled > 0 && (bytes > max || filled > max - bytes))) {
            kept = t->batch != batch ? stays(s, i, max) : kept;
            s->kept[s->shards] = kept;
            s->first[s->shards++] = i;
            batch = t->batch;
            filled = 0;
        }
        filled += bytes;
        s->total += bytes;
    }
    s->first[s->shards] = s->entries;
    return 0;
}

static void shard_name(const struct set *s, size_t i, char dst[100])
{
    if (s->shards == 1)
        snprintf(dst, 100, "%s.safetensors", s->stem);
    else
        snprintf(dst, 100, "%s-%05zu-of-%05zu.safetensors", s->stem, i + 1, s->shards);
}

struct indexed {
    const struct safetensors_entry *entry;
    size_t shard;
};

static int by_name(const void *a, const void *b)
{
    const struct safetensors_entry *x = ((const struct indexed *)a)->entry,
                                   *y = ((const struct indexed *)b)->entry;
    int c = memcmp(x->name, y->name, MIN(x->name_len, y->name_len));

    return c ? c : (x->name_len > y->name_len) - (x->name_len < y->name_len);
}

/* In order of names, as the library writes it. */
static struct indexed *list_names(const struct set *s)
{
    struct indexed *list = calloc(s->entries + 1, sizeof *list);

    for (size_t k = 0; list && k < s->shards; k++)
        for (size_t i = s->first[k]; i < s->first[k + 1]; i++)
            list[i] = (struct indexed){.entry = &s->entry[i], .shard = k};
    if (list && s->entries > 1)
        qsort(list, s->entries, sizeof *list, by_name);
    return list;
}

/* Before the shards sort their entries. */
static int put_index(struct set *s, struct err *e)
{
    CLEANUP_FREE struct indexed *list = list_names(s);
    CLEANUP(buf_release) struct buf text = {0};
    struct layout_file *f;
    char name[100];

    if (!list)
        return err_nomem(e);
    if (s->shards == 1 && !s->index)
        return 0;
    buf_addf(&text,
             "{\n  \"metadata\": {\n    \"total_size\": %" PRIu64
             "\n  },\n  \"weight_map\": {",
             s->total);
    for (size_t i = 0; i < s->entries; i++) {
        shard_name(s, list[i].shard, name);
        buf_adds(&text, i ? ",\n    " : "\n    ");
        buf_add_json(&text, list[i].entry->name, list[i].entry->name_len);
        buf_addf(&text, ": \"%s\"", name);
    }
    buf_adds(&text, "\n  }\n}\n");
    if (buf_failed(&text))
        return err_nomem(e);
    snprintf(name, sizeof name, "%s.safetensors.index.json", s->stem);
    TRY(layout_file_new(s->out, name, 1, &f, e));
    return layout_bytes(f, text.data, text.len, e);
}

static int by_place(const void *a, const void *b, void *user)
{
    const struct set *s = user;
    const struct safetensors_entry *x = a, *y = b;
    uint64_t p = s->in->tensor[x->tensor].batch_at,
             q = s->in->tensor[y->tensor].batch_at;

    return (p > q) - (p < q);
}

/* The file as it arrived: its tensors cover its data without a hole. */
static int put_kept(struct set *s, struct safetensors_entry *entry, size_t n,
                    struct layout_file *f, struct err *e)
{
    const struct layout_batch *b = s->in->tensor[entry->tensor].batch;
    int ret = layout_bytes(f, b->header, b->header_len, e);

    if (n > 1)
        qsort_r(entry, n, sizeof *entry, by_place, s);
    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = layout_box(f, s->in, entry[i].tensor, NULL, NULL, e);
    return ret;
}

static int put_shard(struct set *s, size_t k, struct layout_file *f, struct err *e)
{
    struct safetensors_entry *entry = s->entry + s->first[k];
    size_t n = s->first[k + 1] - s->first[k];

    return s->kept[k] ? put_kept(s, entry, n, f, e)
                      : safetensors_write(f, s->in, entry, n, plain_metadata, e);
}

static int put_shards(struct set *s, struct err *e)
{
    int ret = 0;

    for (size_t k = 0; ret == 0 && k < s->shards; k++) {
        struct layout_file *f;
        char name[100];

        shard_name(s, k, name);
        ret = layout_file_new(s->out, name, 0, &f, e);
        if (ret == 0)
            ret = put_shard(s, k, f, e);
    }
    return ret;
}

static int layout_hf(const struct layout_input *in, const struct layout_options *o,
                     struct layout *out, struct err *e)
{
    struct set s = {.in = in,
                    .out = out,
                    .stem = in->adapter ? "adapter_model" : "model",
                    .index = o->index && !in->adapter};
    int ret;

    if (o->ranks > 1 || o->mesh[0] || o->codec)
        return err_set(e, EINVAL,
                       "hf: whole tensors are written, without ranks, mesh or codec");
    ret = choose_entries(&s, e);
    if (ret == 0)
        ret = cut_shards(&s, o->max_shard_size ? o->max_shard_size : SAFETENSORS_SHARD,
                         e);
    if (ret == 0)
        ret = put_index(&s, e);
    if (ret == 0)
        ret = put_shards(&s, e);
    free(s.entry);
    free(s.first);
    free(s.kept);
    return ret;
}

const struct format_writer writer_hf = {
    .name = "hf",
    .title = "Hugging Face safetensors, in shards",
    .layout = layout_hf,
};
