/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_object_pickle.c - any text as a value of objects.json: what is pickled can be unpickled. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/object_pickle.h"
#include "index/formats/pickle/pickle.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

static bool none_for_tensor(void *user, const char *key, struct pickler *p)
{
    (void)user;
    pickle_none(p);
    return key[0] != '-';
}

static void check(const uint8_t *data, size_t size, bool with)
{
    const struct object_pickle_how how = {.tensor = none_for_tensor};
    const struct pickle_options options = {0};
    struct pickler p = {0};
    struct pickle *back = NULL;
    struct source *s = NULL;
    struct err e = {0};
    uint64_t used = 0;
    int rc;

    pickle_begin(&p);
    rc = with ? object_pickle_with((const char *)data, size, &how, &p, &e)
              : object_pickle((const char *)data, size, &p, &e);
    require(rc == 0 || rc == 1 || rc == -EBADMSG || rc == -ENOMEM || rc == -EFBIG,
            "code", &e);
    pickle_end(&p);
    if (rc == 1 && !buf_failed(&p.out)) {
        require(source_from_memory(p.out.data, p.out.len, false, "p", &s, &e) == 0,
                "source", &e);
        rc = pickle_load(s, 0, s->size, &options, &back, &used, &e);
        require(rc == 0 && used == p.out.len, "it does not come back", &e);
    }
    pickle_free(back);
    source_put(s);
    pickle_release(&p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > 1 << 16)
        return 0;
    check(data, size, false);
    check(data, size, true);
    return 0;
}
