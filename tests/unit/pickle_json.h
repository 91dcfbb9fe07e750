/* SPDX-License-Identifier: MIT */
/* tests/unit/pickle_json.h - pickles in literals, and what they hold as JSON text. */
#ifndef UFS_TESTS_UNIT_PICKLE_JSON_H
#define UFS_TESTS_UNIT_PICKLE_JSON_H

#include "tests/unit/unit.h"

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/pickle/pickle.h"
#include "index/formats/torch/torch_zip.h"
#include "remote/source.h"

/* A literal that may hold NUL, and its length. */
#define LIT(text) text, sizeof(text) - 1

/* Loads a pickle from memory; the source may go, the graph does not need it. */
static inline int pickle_from(const void *data, size_t len,
                              const struct pickle_options *options, struct pickle **out,
                              uint64_t *used, struct err *e)
{
    CLEANUP(source_putp) struct source *s = NULL;

    if (source_from_memory(data, len, false, "test.pkl", &s, e) < 0)
        return -e->code;
    return pickle_load(s, 0, len, options, out, used, e);
}

/* The graph as JSON; the caller frees it. */
static inline char *pickle_json(const struct pickle *p)
{
    struct buf out = {0};
    struct pv root = pickle_root(p);
    struct err e = {0};

    if (object_to_json(NULL, &root, 0, NULL, NULL, &out, &e) < 0)
        fail_msg("object_to_json: %s", e.text);
    return buf_steal(&out, NULL);
}

#endif
