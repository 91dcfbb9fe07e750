/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_zarr.c - Megatron Core's zarr backend: a directory a tensor. */
#include "index/formats/megatron/megatron.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/zarr/zarr_dir.h"
#include "index/sink.h"

static const char ZARRAY[] = ".zarray";

struct zarr {
    const struct scan_context *c;
    struct sink *sink;
    struct megatron_facts *facts;
};

/* No chunk is left out by a save that ended, whatever fill_value says. */
static int report_array(struct zarr *z, const struct listing *dir, struct err *e)
{
    const char *key = listing_name(dir);
    const struct zarr_dir d = {
        .store = z->c->store,
        .root = z->c->dir,
        .path = key,
        .metadata = ZARRAY,
        .all_chunks_needed = true,
    };
    const struct sink_tensor t = {
        .key = key,
        .key_len = strlen(key),
        .role = megatron_role(key, strlen(key)),
    };
    struct zarr_array a;

    return zarr_dir_report(&d, &t, z->sink, &a, e);
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
            cell_of_file(key, entry->name, &name, &cell)) {
            TRY(write_name(key, &cell, last, &name, e));
            TRY(report_object(z, key, entry->name, name.data, e));
        }
    }
    return 0;
}

/* ---- directories ---- */

enum content {
    CONTENT_OTHER,
    CONTENT_ARRAY,
    CONTENT_OBJECTS,
    CONTENT_LOCKS,
    CONTENT_CHUNKS, /* of an array whose .zarray is lost */
};

/* "0", "0.3": numbers and dots. */
static bool is_chunk(const char *name)
{
    return name[0] && strspn(name, "0123456789.") == strlen(name) && name[0] != '.';
}

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
    for (size_t i = 0; i < listing_count(dir); i++)
        if (is_chunk(listing_at(dir, i)->name))
            return CONTENT_CHUNKS;
    return CONTENT_OTHER;
}

static int report_dir(struct zarr *z, struct listing *dir, struct err *e)
{
    enum content content = content_of(dir);

    if (content == CONTENT_OTHER)
        return 0;
    TRY(sink_hide(z->sink, listing_name(dir), false, e));
    switch (content) {
    case CONTENT_ARRAY:
        return report_array(z, dir, e);
    case CONTENT_OBJECTS:
        return report_objects(z, dir, e);
    case CONTENT_CHUNKS:
        if (sink_warning(z->sink, "missing-file",
                         "%s/.zarray is missing: its chunks cannot be read without it",
                         listing_name(dir)) < 0)
            return err_nomem(e);
        break;
    case CONTENT_LOCKS:
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
        TRY(report_dir(&z, dir, e));
    }
    return 0;
}
