/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_zarr.c - Megatron Core's zarr backend: a directory a tensor. */
#include "index/formats/megatron/megatron.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/formats/torch/torch_file.h"
#include "index/sink.h"

enum { MAX_ZARRAY = 64 << 10 }; /* real ones have 300 bytes */

static const char ZARRAY[] = ".zarray";

struct zarr {
    const struct scan_context *c;
    struct sink *sink;
    struct megatron_facts *facts;
};

/* What is wrong with the text makes an array that cannot be read. */
static int read_array(struct listing *dir, struct megatron_array *out, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len;

    if (listing_read(dir, ZARRAY, MAX_ZARRAY, &text, &len, &why) == 0)
        return megatron_array_parse(text, len, out, e);
    if (safetensors_stops_scan(why.code)) {
        *e = why;
        return -e->code;
    }
    *out = (struct megatron_array){.shape.nd = 1};
    snprintf(out->why, sizeof out->why, "its .zarray: %.180s", why.text);
    return 0;
}

/* ---- chunks ---- */

/* "2.0.1", the place of a chunk in the grid; "0" where there is one element. */
static void chunk_name(const struct megatron_array *a, const uint64_t *at,
                       struct buf *out)
{
    for (uint32_t k = 0; k < a->shape.nd; k++)
        buf_addf(out, "%s%" PRIu64, k ? "." : "", at[k]);
    if (a->shape.nd == 0)
        buf_addc(out, '0');
}

/* Chunks along each dimension and in all; UINT64_MAX: more than could be. */
static uint64_t grid_of(const struct megatron_array *a, uint64_t *grid)
{
    uint64_t n = 1;

    for (uint32_t k = 0; k < a->shape.nd; k++) {
        grid[k] = a->shape.dim[k] / a->chunk.dim[k] +
                  (a->shape.dim[k] % a->chunk.dim[k] != 0);
        if (mul_overflows(n, grid[k], &n))
            return UINT64_MAX;
    }
    return n;
}

static bool next_chunk(const struct megatron_array *a, const uint64_t *grid,
                       uint64_t *at)
{
    for (uint32_t k = a->shape.nd; k-- > 0;) {
        if (++at[k] < grid[k])
            return true;
        at[k] = 0;
    }
    return false;
}

/* After sink_fault(), which fails only for lack of memory. */
static int faulted(int r, struct err *e)
{
    return r < 0 ? err_nomem(e) : 1;
}

/* The file of the chunk; 1: the tensor has a fault. */
static int check_chunk_file(struct zarr *z, const char *dir,
                            const struct megatron_array *a, const char *name,
                            uint32_t *file, struct err *e)
{
    CLEANUP(buf_release) struct buf path = {0};
    struct file_id id;

    buf_addf(&path, "%s/%s", dir, name);
    if (buf_failed(&path))
        return err_nomem(e);
    if (sink_file(z->sink, path.data, path.len, file, e) < 0)
        return -e->code;
    if (!sink_file_id(z->sink, *file, &id))
        return faulted(
            sink_fault(z->sink, "chunk %s is missing: the save was not finished", name),
            e);
    if (id.size != a->bytes)
        return faulted(sink_fault(z->sink,
                                  "chunk %s has %" PRIu64
                                  " bytes where all have %" PRIu64,
                                  name, id.size, a->bytes),
                       e);
    return 0;
}

/* A chunk at the edge is stored whole: what lies beyond the shape is of no use. */
static int report_chunk(struct zarr *z, const char *dir, const struct megatron_array *a,
                        const uint64_t *at, struct err *e)
{
    CLEANUP(buf_release) struct buf name = {0};
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS];
    struct chunk c = {.start = start,
                      .size = size,
                      .step = a->step,
                      .flags = a->big_endian ? CHUNK_SWAP : 0,
                      .length = a->bytes};
    int r;

    chunk_name(a, at, &name);
    if (buf_failed(&name))
        return err_nomem(e);
    r = check_chunk_file(z, dir, a, name.data, &c.file, e);
    if (r != 0)
        return r;
    for (uint32_t k = 0; k < a->shape.nd; k++) {
        start[k] = at[k] * a->chunk.dim[k];
        size[k] = MIN(a->chunk.dim[k], a->shape.dim[k] - start[k]);
    }
    if (memcmp(size, a->chunk.dim, a->shape.nd * sizeof *size) == 0)
        c.step = NULL;
    return sink_chunk(z->sink, &c, e);
}

static int report_chunks(struct zarr *z, const struct listing *dir,
                         const struct megatron_array *a, struct err *e)
{
    uint64_t grid[SHAPE_MAX_DIMS], at[SHAPE_MAX_DIMS] = {0};
    uint64_t n = grid_of(a, grid), files = listing_count(dir);
    int r = 0;

    if (n == 0)
        return 0;
    if (n > files)
        return faulted(sink_fault(z->sink,
                                  "it has %" PRIu64
                                  " chunks, and there are only %" PRIu64
                                  " files: the save was not finished",
                                  n, files),
                       e);
    do {
        r = report_chunk(z, listing_name(dir), a, at, e);
    } while (r == 0 && next_chunk(a, grid, at));
    return r < 0 ? r : 0;
}

static int report_array(struct zarr *z, struct listing *dir, struct err *e)
{
    const char *key = listing_name(dir);
    struct sink_tensor t = {.key = key, .key_len = strlen(key)};
    struct megatron_array a;
    char path[PATH_MAX];
    int r;

    if (store_join(key, ZARRAY, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", key);
    /* First watched, then read: one that is replaced in between is read anew. */
    if (sink_watch(z->sink, path, e) < 0 || read_array(dir, &a, e) < 0)
        return -e->code;
    t.dtype = a.dtype == DTYPE_NONE ? DTYPE_U8 : a.dtype;
    t.shape = &a.shape;
    t.role = megatron_role(t.key, t.key_len);
    if (sink_tensor_begin(z->sink, &t, e) < 0)
        return -e->code;
    r = a.why[0] ? faulted(sink_fault(z->sink, "%s", a.why), e)
                 : report_chunks(z, dir, &a, e);
    return r < 0 ? r : sink_tensor_end(z->sink, e);
}

/* ---- objects ---- */

/* Names like "shard_0.1_2.2.pt". */
static bool cell_of_file(const char *dir, const char *file, struct buf *name,
                         struct megatron_cell *out)
{
    size_t len = strlen(file);

    if (len < 4 || strcmp(file + len - 3, ".pt") != 0)
        return false;
    buf_clear(name);
    buf_addf(name, "%s/%.*s", dir, (int)(len - 3), file);
    return !buf_failed(name) && megatron_cell(name->data, name->len, out);
}

/* The size that old versions cut off is told by the largest of the offsets. */
static uint64_t last_size(const struct listing *dir, const char *key)
{
    CLEANUP(buf_release) struct buf name = {0};
    struct megatron_cell cell;
    uint64_t size = 0;

    for (size_t i = 0; i < listing_count(dir); i++)
        if (cell_of_file(key, listing_at(dir, i)->name, &name, &cell))
            size = MAX(size, cell.offset[cell.n - 1] + 1);
    return size;
}

/* The whole name of a cell. */
static int write_name(const char *key, const struct megatron_cell *cell, uint64_t last,
                      struct buf *out, struct err *e)
{
    buf_clear(out);
    buf_addf(out, "%s/shard_", key);
    for (size_t k = 0; k < cell->n; k++)
        buf_addf(out, "%s%" PRIu64, k ? "." : "", cell->offset[k]);
    for (size_t k = 0; k < cell->n; k++)
        buf_addf(out, "%s%" PRIu64, k ? "." : "_",
                 k + 1 == cell->n && cell->size[k] == 0 ? last : cell->size[k]);
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int report_object(struct zarr *z, const char *dir, const char *file,
                         const char *name, struct err *e)
{
    const struct torch_report how = {.role = ROLE_OTHER, .object = name};
    char path[PATH_MAX];

    if (store_join(dir, file, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir, file);
    megatron_learn_cell(z->facts, name, strlen(name));
    return torch_file_report(z->c, z->sink, path, &how, e);
}

static int report_objects(struct zarr *z, const struct listing *dir, struct err *e)
{
    const char *key = listing_name(dir);
    uint64_t last = last_size(dir, key);
    CLEANUP(buf_release) struct buf name = {0};
    struct megatron_cell cell;

    for (size_t i = 0; i < listing_count(dir); i++) {
        const struct listing_entry *entry = listing_at(dir, i);

        if (entry->st.kind == ENTRY_FILE &&
            cell_of_file(key, entry->name, &name, &cell) &&
            (write_name(key, &cell, last, &name, e) < 0 ||
             report_object(z, key, entry->name, name.data, e) < 0))
            return -e->code;
    }
    return 0;
}

/* ---- directories ---- */

enum content { CONTENT_OTHER, CONTENT_ARRAY, CONTENT_OBJECTS, CONTENT_LOCKS };

/*
 * Ranks that wrote parts of one chunk locked files in "KEY.sync", among them an empty
 * .zarray.
 */
static bool is_locks(const struct listing *dir)
{
    const char *name = listing_name(dir);
    size_t len = strlen(name);

    for (size_t i = 0; i < listing_count(dir); i++)
        if (listing_at(dir, i)->st.id.size > 0)
            return false;
    return len > 5 && strcmp(name + len - 5, ".sync") == 0;
}

static enum content content_of(const struct listing *dir)
{
    CLEANUP(buf_release) struct buf name = {0};
    struct megatron_cell cell;

    if (is_locks(dir))
        return CONTENT_LOCKS;
    if (listing_find(dir, ZARRAY))
        return CONTENT_ARRAY;
    for (size_t i = 0; i < listing_count(dir); i++)
        if (cell_of_file("x", listing_at(dir, i)->name, &name, &cell))
            return CONTENT_OBJECTS;
    return CONTENT_OTHER;
}

static int report_dir(struct zarr *z, struct listing *dir, struct err *e)
{
    enum content content = content_of(dir);

    if (content == CONTENT_OTHER)
        return 0;
    if (sink_hide(z->sink, listing_name(dir), false, e) < 0)
        return -e->code;
    switch (content) {
    case CONTENT_ARRAY:
        return report_array(z, dir, e);
    case CONTENT_OBJECTS:
        return report_objects(z, dir, e);
    case CONTENT_LOCKS:
        break;
    case CONTENT_OTHER:
        break;
    }
    return 0;
}

int megatron_zarr_report(const struct scan_context *c, struct sink *sink,
                         struct megatron_facts *facts, struct err *e)
{
    struct zarr z = {.c = c, .sink = sink, .facts = facts};
    const struct listing *l = c->listing;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct listing *dir =
            entry->st.kind == ENTRY_DIR ? listing_sub(c->listing, entry->name) : NULL;

        if (entry->st.kind != ENTRY_DIR)
            continue;
        if (!dir)
            return err_set(e, EIO, "%s cannot be listed", entry->name);
        if (report_dir(&z, dir, e) < 0)
            return -e->code;
    }
    return 0;
}
