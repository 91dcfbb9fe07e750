/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_integrity.c - changes one digest of integrity.json. */
#include "index/formats/megatron/megatron_integrity.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

enum { DIGITS = 64 };

static int unknown(struct err *e)
{
    return err_set(e, ENOTSUP, "digests are not as Megatron Core writes them");
}

static size_t skip_blanks(const char *text, size_t len, size_t at)
{
    while (at < len && strchr(" \t\r\n", text[at]) && text[at])
        at++;
    return at;
}

/* Where the value of `"name": "OLD"` stands; 0: nowhere. */
static size_t find_digest(const char *text, size_t len, const char *name,
                          const char *old)
{
    size_t n = strlen(name);

    for (size_t i = 0; i + n + 2 < len; i++) {
        size_t at = i + n + 2;

        if (text[i] != '"' || memcmp(text + i + 1, name, n) != 0 ||
            text[i + 1 + n] != '"')
            continue;
        at = skip_blanks(text, len, at);
        if (at == len || text[at] != ':')
            continue;
        at = skip_blanks(text, len, at + 1) + 1;
        if (at + DIGITS < len && text[at - 1] == '"' &&
            memcmp(text + at, old, DIGITS) == 0 && text[at + DIGITS] == '"')
            return at;
    }
    return 0;
}

int megatron_integrity_set(char *text, size_t len, const char *name, const char *hex,
                           struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    const char *algorithm, *old;
    const struct json *file;
    size_t at;

    TRY(json_parse(text, len, &json_python, &doc, e));
    file = json_get(json_get(doc, "files"), name);
    if (!file)
        return 0;
    if (!json_string(json_get(doc, "algorithm"), &algorithm) ||
        strcmp(algorithm, "sha256") != 0 || !json_string(file, &old) ||
        strlen(old) != DIGITS)
        return unknown(e);
    at = find_digest(text, len, name, old);
    if (at == 0)
        return unknown(e);
    memcpy(text + at, hex, DIGITS);
    return 0;
}
