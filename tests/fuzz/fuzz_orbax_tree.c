/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_orbax_tree.c - any bytes as Orbax's _METADATA and _sharding. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/orbax/orbax_tree.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

static int on_leaf(void *user, const struct orbax_leaf *leaf, struct err *e)
{
    size_t *count = user;

    require(strlen(leaf->name) <= leaf->len, "name", e);
    require((leaf->kind == ORBAX_EMPTY) == (leaf->value != NULL), "value", e);
    require(leaf->kind == ORBAX_OTHER || leaf->type, "type", e);
    (*count)++;
    return 0;
}

/* What is said to be a member's text is JSON. */
static void check_members(const char *text, size_t size)
{
    struct orbax_member m[2] = {{.name = "custom_metadata"}, {.name = "use_zarr3"}};
    struct err e = {0};

    orbax_members(text, size, m, ARRAY_SIZE(m));
    for (size_t i = 0; i < ARRAY_SIZE(m); i++) {
        CLEANUP(json_freep) struct json *doc = NULL;

        if (!m[i].value)
            continue;
        require(m[i].value > text && m[i].value + m[i].len <= text + size, "range", &e);
        require(json_parse(m[i].value, m[i].len, NULL, &doc, &e) == 0 ||
                    e.code == EBADMSG,
                "member", &e);
    }
}

static void check_mesh(const char *text, size_t size)
{
    CLEANUP(buf_release) struct buf mesh = {.max = 255};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err e = {0};

    if (orbax_mesh(text, size, &mesh))
        require(json_parse(mesh.data, mesh.len, NULL, &doc, &e) == 0 ||
                    strstr(e.text, "twice"),
                "mesh", &e);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE char *text = malloc(size + 1);
    struct err e = {0};
    size_t count = 0;
    int rc;

    if (!text)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    rc = orbax_tree_each(text, size, on_leaf, &count, &e);
    require(rc == 0 || rc == -EBADMSG, "tree", &e);
    check_members(text, size);
    check_mesh(text, size);
    return 0;
}
