/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_json_object.c - any text as a JSON file: JSON stays JSON, $type is ours. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/json_object.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { DEPTH = 60 }; /* of the text: what stands for a number is one deeper */

static void require(bool holds, const char *what, const char *text)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, text);
        abort();
    }
}

/* Members that are called $type stand only where we put them: with a text of ours. */
static void check_ours(const struct json *v, const char *text, unsigned depth)
{
    const struct json *type = json_get(v, "$type");
    const char *word;

    if (json_kind(v) == JSON_OBJECT && type) {
        require(json_string(type, &word), "a $type that is no text", text);
        require(strcmp(word, "int") == 0 || strcmp(word, "float") == 0, "whose $type",
                text);
        require(json_count(v) == 2 && json_get(v, "value"), "a $type of more", text);
    }
    for (const struct json *child = json_first(v); child && depth < DEPTH + 2;
         child = json_next(child))
        check_ours(child, text, depth + 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct json_limits strict = {.depth = DEPTH};
    struct buf out = {.max = 64 << 20};
    struct json *before = NULL, *after = NULL;
    struct err e = {0};
    int rc = json_to_object((const char *)data, size, &out, &e), was, is;

    require(rc == 0 || rc == -EFBIG, "code", e.text);
    if (rc == 0) {
        was = json_parse((const char *)data, size, &strict, &before, &e);
        is = json_parse(out.data ? out.data : "", out.len, NULL, &after, &e);
        require(was < 0 || is == 0, "JSON that is none any more", e.text);
        if (was == 0)
            require(json_kind(before) == JSON_NUMBER ||
                        json_kind(before) == json_kind(after),
                    "kind", out.data);
        if (is == 0)
            check_ours(after, out.data, 0);
    }
    json_free(before);
    json_free(after);
    buf_release(&out);
    return 0;
}
