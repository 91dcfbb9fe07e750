/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_gguf.c - any bytes as a GGUF header: its values are JSON. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/formats/gguf/gguf_header.h"
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

static int on_value(void *user, const char *key, size_t len, const char *json,
                    size_t json_len, struct err *e)
{
    const struct json_limits limits = {.nul_ok = true};
    CLEANUP(json_freep) struct json *doc = NULL;

    (void)user;
    require(len > 0 && !memchr(key, '\0', len), "key");
    require(json_parse(json, json_len, &limits, &doc, e) == 0, "not JSON");
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP(source_putp) struct source *s = NULL;
    struct gguf_header h;
    struct err e = {0};
    int rc;

    if (source_from_memory(data, size, false, "fuzz", &s, &e) < 0)
        return 0;
    rc = gguf_header_read(s, on_value, NULL, &h, &e);
    require(rc == 0 || rc == -EBADMSG || rc == -ENOTSUP || rc == -EFBIG, e.text);
    require(rc < 0 || gguf_sniff(data, size), "not recognised");
    for (size_t i = 0; i < h.count; i++)
        require(h.tensor[i].name_len > 0 && h.tensor[i].nd <= GGUF_MAX_DIMS, "tensor");
    gguf_header_release(&h);
    return 0;
}
