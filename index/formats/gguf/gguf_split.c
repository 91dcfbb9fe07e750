/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf_split.c - models in several GGUF files: NAME-0000K-of-0000N.gguf. */
#include "index/formats/gguf/gguf_split.h"

#include <ctype.h>
#include <string.h>

#include "remote/listing.h"

enum { DIGITS = 5 };

static const char suffix[] = ".gguf";
static const char of[] = "-of-";

bool gguf_is_named(const char *name)
{
    size_t len = strlen(name);

    return len > strlen(suffix) && strcmp(name + len - strlen(suffix), suffix) == 0;
}

static bool take_digits(const char *p, uint32_t *out)
{
    *out = 0;
    for (size_t i = 0; i < DIGITS; i++) {
        if (!isdigit((unsigned char)p[i]))
            return false;
        *out = *out * 10 + (uint32_t)(p[i] - '0');
    }
    return true;
}

bool gguf_split_parse(const char *name, struct gguf_split *out)
{
    size_t tail = 1 + DIGITS + strlen(of) + DIGITS + strlen(suffix), len = strlen(name);
    const char *p = name + len - tail;

    *out = (struct gguf_split){0};
    if (len <= tail || !gguf_is_named(name) || *p != '-' ||
        !take_digits(p + 1, &out->k) || strncmp(p + 1 + DIGITS, of, strlen(of)) != 0 ||
        !take_digits(p + 1 + DIGITS + strlen(of), &out->n))
        return false;
    out->stem = len - tail;
    return out->k >= 1 && out->k <= out->n;
}

bool gguf_split_same(const char *a, const struct gguf_split *x, const char *b,
                     const struct gguf_split *y)
{
    return x->n == y->n && x->stem == y->stem && memcmp(a, b, x->stem) == 0;
}

const char *gguf_split_only(const struct listing *l, struct gguf_split *out,
                            uint32_t *present)
{
    const char *first = NULL;

    *present = 0;
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct gguf_split s;

        if (entry->st.kind != ENTRY_FILE || !gguf_is_named(entry->name))
            continue;
        if (!gguf_split_parse(entry->name, &s) ||
            (first && !gguf_split_same(first, out, entry->name, &s)))
            return NULL;
        ++*present;
        if (!first) {
            first = entry->name;
            *out = s;
        }
    }
    return first;
}
