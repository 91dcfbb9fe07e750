/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_dcp_metadata.c - any bytes as a .metadata: its tables hold together. */
#include <stdio.h>

#include "base/err.h"
#include "index/formats/dcp/dcp_metadata.h"
#include "index/shape.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static void check_shape(const struct dcp_names *n, uint32_t shape)
{
    uint32_t nd;

    if (shape == DCP_NO_SHAPE || shape == DCP_BAD_SHAPE)
        return;
    require(shape < n->shapes.count, "a shape that is not there");
    dcp_shape(n, shape, &nd);
    require(nd <= SHAPE_MAX_DIMS, "too many dimensions");
}

static void check_tensor(const struct dcp_metadata *m, const struct dcp_tensor *t)
{
    check_shape(m->names, t->size);
    if (t->bad)
        return;
    require(t->size < DCP_BAD_SHAPE, "a good tensor without a size");
    require(dtype_bits((enum dtype)t->dtype) > 0, "a good tensor without a type");
    require((uint64_t)t->first + t->count <= m->nchunks, "chunks that are not there");
    for (uint32_t i = 0; i < t->count; i++) {
        check_shape(m->names, m->chunk[t->first + i].start);
        check_shape(m->names, m->chunk[t->first + i].size);
    }
}

static void check_stored(const struct dcp_metadata *m, uint32_t key, uint32_t start)
{
    const struct dcp_stored *s = dcp_stored_find(m, key, start);
    size_t len;

    if (!s)
        return;
    intern_get(&m->names->paths, s->path, &len);
    require(s->path < m->names->paths.count, "a path that is not there");
    require(s->bad != DCP_BAD_TRANSFORM || s->word < m->names->words.count,
            "a word that is not there");
}

/* Returns how many chunks all entries have. */
static uint64_t check_tables(const struct dcp_metadata *m)
{
    uint64_t chunks = 0;

    for (uint32_t i = 0; i < m->nentries; i++) {
        const struct dcp_entry *e = &m->entry[i];
        size_t len;

        intern_get(&m->names->keys, e->key, &len);
        require(e->wrapper <= len, "a wrapper longer than its key");
        check_stored(m, e->key, DCP_NO_SHAPE);
        if (e->tensor == DCP_OBJECT)
            continue;
        require(e->tensor < m->ntensors, "a tensor that is not there");
        check_tensor(m, &m->tensor[e->tensor]);
        if (m->tensor[e->tensor].bad)
            continue;
        chunks += m->tensor[e->tensor].count;
        for (uint32_t k = 0; k < m->tensor[e->tensor].count; k++)
            check_stored(m, e->key, m->chunk[m->tensor[e->tensor].first + k].start);
    }
    return chunks;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dcp_names names = {0};
    struct dcp_metadata *m = NULL;
    struct source *s = NULL;
    struct err e = {0};
    char name[128];
    int rc;

    dcp_metadata_sniff(data, size, name, sizeof name);
    if (source_from_memory(data, size, false, "fuzz", &s, &e) < 0)
        abort();
    rc = dcp_metadata_load(s, &names, &m, &e);
    require(rc == -e.code, "a code that is not the error's");
    require(rc < 0 || check_tables(m) <= size, "more chunks than bytes");
    dcp_metadata_free(m);
    dcp_names_release(&names);
    source_put(s);
    return 0;
}
