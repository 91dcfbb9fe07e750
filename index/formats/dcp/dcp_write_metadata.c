/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_write_metadata.c - .metadata, as torch 2.3 to 2.15 unpickle it. */
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/dcp/dcp_write.h"
#include "index/formats/pickle/pickle_write.h"
#include "index/formats/torch/torch_zip_write.h"

static const char module[] = "torch.distributed.checkpoint.metadata";

/* Texts that come again and again: written once, then from the memo. */
enum word {
    FQN,
    INDEX,
    OFFSET,
    OFFSETS,
    SIZES,
    PATH,
    LENGTH,
    PROPERTIES,
    SIZE,
    CHUNKS,
    WORDS
};

static const char *const words[WORDS] = {
    "fqn",           "index",  "offset",     "offsets", "sizes",
    "relative_path", "length", "properties", "size",    "chunks",
};

/* Numbers in the memo, each one more than it is: 0 is none. */
struct pickling {
    const struct dcp_writing *w;
    struct pickler p;
    uint32_t word[WORDS], type[DTYPE_COUNT];
    uint32_t *key;  /* of each tensor, then of each object */
    uint32_t *file; /* by dcp_file_of() */
};

static void put_word(struct pickling *x, enum word word)
{
    if (x->word[word]) {
        pickle_again(&x->p, x->word[word] - 1);
        return;
    }
    pickle_string(&x->p, words[word]);
    x->word[word] = pickle_remember(&x->p) + 1;
}

/* An instance without a call of its __init__; its state follows. */
static void begin_object(struct pickling *x, const char *from, const char *class)
{
    pickle_global(&x->p, from, class);
    pickle_empty_tuple(&x->p);
    pickle_new(&x->p);
}

static void begin_state(struct pickling *x, const char *from, const char *class)
{
    begin_object(x, from, class);
    pickle_dict(&x->p);
    pickle_mark(&x->p);
}

static void end_state(struct pickling *x)
{
    pickle_set(&x->p);
    pickle_build(&x->p);
}

/* ---- state_dict_metadata ---- */

/*
 * The state is a tuple of five: later versions, which know a sixth (strides), take it too.
 */
static void put_properties(struct pickling *x, enum dtype d)
{
    struct pickler *p = &x->p;

    if (x->type[d]) {
        pickle_again(p, x->type[d] - 1);
        return;
    }
    begin_object(x, module, "TensorProperties");
    pickle_mark(p);
    pickle_global(p, "torch", torch_name_of_dtype(d));
    pickle_global(p, "torch.serialization", "_get_layout");
    pickle_mark(p);
    pickle_string(p, "torch.strided");
    pickle_tuple(p);
    pickle_reduce(p);
    pickle_bool(p, false); /* requires_grad */
    pickle_global(p, module, "_MEM_FORMAT_ENCODING");
    pickle_mark(p);
    pickle_int(p, 0); /* contiguous */
    pickle_tuple(p);
    pickle_reduce(p);
    pickle_bool(p, false); /* pin_memory */
    pickle_tuple(p);
    pickle_build(p);
    x->type[d] = pickle_remember(p) + 1;
}

static void put_chunks(struct pickling *x, size_t i, const struct shape *units)
{
    struct dcp_share box;

    pickle_list(&x->p);
    pickle_mark(&x->p);
    for (uint64_t n = 0; n < dcp_shares(&x->w->cut, i, units); n++) {
        dcp_share(&x->w->cut, i, units, n, &box);
        begin_state(x, module, "ChunkStorageMetadata");
        put_word(x, OFFSETS);
        pickle_torch_size(&x->p, box.start, units->nd);
        put_word(x, SIZES);
        pickle_torch_size(&x->p, box.size, units->nd);
        end_state(x);
    }
    pickle_append(&x->p);
}

static int put_tensor(struct pickling *x, size_t i, struct err *e)
{
    const struct layout_tensor *t = &x->w->in->tensor[x->w->cut.chosen[i]];
    struct shape units;

    TRY(shape_units(&t->shape, t->dtype, &units, e));
    pickle_text(&x->p, t->key, t->key_len);
    x->key[i] = pickle_remember(&x->p);
    begin_state(x, module, "TensorStorageMetadata");
    put_word(x, PROPERTIES);
    put_properties(x, t->dtype);
    put_word(x, SIZE);
    pickle_torch_size(&x->p, units.dim, units.nd);
    put_word(x, CHUNKS);
    put_chunks(x, i, &units);
    end_state(x);
    return 0;
}

static int put_state_dict(struct pickling *x, struct err *e)
{
    const struct dcp_writing *w = x->w;
    int ret = 0;

    pickle_string(&x->p, "state_dict_metadata");
    pickle_dict(&x->p);
    pickle_mark(&x->p);
    for (size_t i = 0; ret == 0 && i < w->cut.count; i++)
        ret = put_tensor(x, i, e);
    for (size_t i = 0; ret == 0 && i < w->objects; i++) {
        const struct layout_object *o = &w->in->object[w->object[i]];

        pickle_text(&x->p, o->key, o->key_len);
        x->key[w->cut.count + i] = pickle_remember(&x->p);
        begin_object(x, module, "BytesStorageMetadata");
    }
    pickle_set(&x->p);
    return ret;
}

/* ---- planner_data ---- */

static void put_planner(struct pickling *x)
{
    const struct dcp_writing *w = x->w;

    pickle_string(&x->p, "planner_data");
    if (w->how->no_paths) {
        pickle_none(&x->p);
        return;
    }
    pickle_dict(&x->p);
    pickle_mark(&x->p);
    for (size_t i = 0; i < w->cut.count; i++) {
        pickle_again(&x->p, x->key[i]);
        dcp_path_tensor(w, &w->in->tensor[w->cut.chosen[i]], &x->p);
    }
    for (size_t i = 0; i < w->objects; i++) {
        pickle_again(&x->p, x->key[w->cut.count + i]);
        dcp_path_object(w, &w->in->object[w->object[i]], &x->p);
    }
    pickle_set(&x->p);
}

/* ---- storage_data ---- */

/* `index` is a hint that nobody needs, and takes no part in comparisons. */
static void put_index(struct pickling *x, uint32_t key, const struct dcp_share *box,
                      uint32_t nd)
{
    begin_state(x, module, "MetadataIndex");
    put_word(x, FQN);
    pickle_again(&x->p, key);
    put_word(x, INDEX);
    pickle_none(&x->p);
    put_word(x, OFFSET);
    if (box)
        pickle_torch_size(&x->p, box->start, nd);
    else
        pickle_none(&x->p);
    end_state(x);
}

static void put_file(struct pickling *x, uint32_t rank, uint32_t number)
{
    uint32_t *known = &x->file[dcp_file_of(&x->w->cut, rank, number)];
    char name[32];

    if (*known) {
        pickle_again(&x->p, *known - 1);
        return;
    }
    dcp_file_name(rank, number, name);
    pickle_string(&x->p, name);
    *known = pickle_remember(&x->p) + 1;
}

static void put_info(struct pickling *x, uint32_t rank, uint32_t number,
                     const struct dcp_placed *at)
{
    begin_state(x, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    put_word(x, PATH);
    put_file(x, rank, number);
    put_word(x, OFFSET);
    pickle_int(&x->p, (int64_t)at->at);
    put_word(x, LENGTH);
    pickle_int(&x->p, (int64_t)at->len);
    end_state(x);
}

static int put_storage(struct pickling *x, struct err *e)
{
    const struct dcp_writing *w = x->w;
    const struct dcp_placed *at = w->placed;
    struct dcp_share box;
    struct shape units;

    pickle_string(&x->p, "storage_data");
    pickle_dict(&x->p);
    pickle_mark(&x->p);
    for (size_t i = 0; i < w->cut.count; i++) {
        const struct layout_tensor *t = &w->in->tensor[w->cut.chosen[i]];

        TRY(shape_units(&t->shape, t->dtype, &units, e));
        for (uint64_t n = 0; n < dcp_shares(&w->cut, i, &units); n++) {
            dcp_share(&w->cut, i, &units, n, &box);
            put_index(x, x->key[i], &box, units.nd);
            put_info(x, box.rank, box.number, at++);
        }
    }
    for (size_t i = 0; i < w->objects; i++) {
        put_index(x, x->key[w->cut.count + i], NULL, 0);
        put_info(x, 0, 0, at++);
    }
    pickle_set(&x->p);
    return 0;
}

/* ---- all of it ---- */

static int put_all(struct pickling *x, struct err *e)
{
    pickle_begin(&x->p);
    begin_state(x, module, "Metadata");
    TRY(put_state_dict(x, e));
    put_planner(x);
    TRY(put_storage(x, e));
    pickle_string(&x->p, "storage_meta");
    pickle_none(&x->p);
    pickle_string(&x->p, "version"); /* from torch 2.5 on; earlier ones do not mind */
    pickle_string(&x->p, "1.0.0");
    end_state(x);
    pickle_end(&x->p);
    return buf_failed(&x->p.out)
               ? err_set(e, -buf_failed(&x->p.out), ".metadata of more than 1 GiB")
               : 0;
}

int dcp_write_metadata(const struct dcp_writing *w, struct err *e)
{
    struct pickling x = {.w = w};
    struct arena *a = layout_arena(w->out);
    struct layout_file *f;
    char path[80];
    int ret;

    dcp_path(w, ".metadata", path, sizeof path);
    x.key = arena_array(a, w->cut.count + w->objects + 1, sizeof *x.key);
    x.file = arena_array(a, dcp_files(&w->cut), sizeof *x.file);
    ret = x.key && x.file ? put_all(&x, e) : err_nomem(e);
    if (ret == 0)
        ret = layout_file_new(w->out, path, 1, &f, e);
    if (ret == 0)
        ret = layout_bytes(f, x.p.out.data, x.p.out.len, e);
    pickle_release(&x.p);
    return ret;
}
