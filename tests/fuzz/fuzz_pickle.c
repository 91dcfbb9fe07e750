/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_pickle.c - any bytes as a pickle: it loads or not, and gives sound JSON. */
#include <errno.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/pickle/pickle.h"
#include "index/formats/torch/torch_zip.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

/* Looks at all that a fold may look at, keeps every third object and refuses none. */
static int fold(void *user, const struct pv *object, uint64_t *record, struct err *e)
{
    uint64_t *count = user;
    struct pv args = pv_args(object), state = pv_state(object), v;

    for (size_t i = 0; i < pv_count(&args); i++) {
        v = pv_at(&args, i);
        require(v.kind <= PV_RECORD, "argument", e);
    }
    pv_dict_get(&state, "x", &v);
    *record = ++*count;
    return *count % 3 != 0;
}

static const struct pickle_fold folds[] = {
    {"f", "A", false, fold},
    {"f", "B", true, fold},
    {"torch", "Size", true, fold},
    {"collections", "OrderedDict", false, fold},
};

/* Whatever was loaded is JSON that a strict reader takes. */
static void check_json(const struct pickle *p)
{
    const struct json_limits limits = {.depth = 256, .nul_ok = true};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct pv root = pickle_root(p);
    struct buf out = {0};
    struct err e = {0};

    require(object_to_json(NULL, &root, 2000, NULL, NULL, &out, &e) == 0, "JSON", &e);
    require(json_parse(out.data, out.len, &limits, &doc, &e) == 0, out.data, &e);
    buf_release(&out);
}

static void check(struct source *s, const struct pickle_options *options)
{
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    struct err e = {0};
    uint64_t used = 0;
    int rc = pickle_load(s, 0, s->size, options, &p, &used, &e);

    require(rc == 0 || rc == -EBADMSG, "pickle_load", &e);
    require(rc < 0 || (used > 0 && used <= s->size), "used", &e);
    if (rc == 0)
        check_json(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP(source_putp) struct source *s = NULL;
    uint64_t count = 0;
    const struct pickle_options folding = {
        .fold = folds,
        .nfold = ARRAY_SIZE(folds),
        .user = &count,
        .limits = {.opcodes = 100000, .nodes = 1000, .bytes = 1 << 20, .depth = 20},
    };
    struct err e = {0};

    if (source_from_memory(data, size, false, "fuzz", &s, &e) < 0)
        return 0;
    check(s, NULL);
    check(s, &folding);
    return 0;
}
