/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_yaml.c - any text: the YAML reader refuses it or gives a whole tree. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/yaml_tree.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

/* Members are of objects only, and found by their names. */
static void check_children(const struct json *v, const struct err *e)
{
    size_t n = 0;

    for (const struct json *child = json_first(v); child; child = json_next(child)) {
        const char *key = json_key(child);

        require(!!key == (json_kind(v) == JSON_OBJECT), "key", e);
        require(!key || json_get(v, key) == child, "a member by its name", e);
        n++;
    }
    require(n == json_count(v), "count", e);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE char *text = malloc(size ? size : 1); /* no byte more than there is */
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err e = {0};
    int r;

    if (!text)
        return 0;
    if (size > 0)
        memcpy(text, data, size);
    r = yaml_parse(text, size, &doc, &e);
    require(r == 0 || r == -EBADMSG, "yaml_parse", &e);
    require((r == 0) == !!doc, "a tree where there is no error", &e);
    if (!doc)
        return 0;
    check_children(doc, &e);
    for (const struct json *v = json_first(doc); v; v = json_next(v))
        check_children(v, &e);
    return 0;
}
