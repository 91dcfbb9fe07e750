/* SPDX-License-Identifier: MIT */
/* cli/suggest.c - the nearest name, by letters that differ. */
#include "cli/suggest.h"

#include <string.h>

enum { LETTERS_PER_SLIP = 4 }; /* one slip in as many letters is a typing mistake */

/* One row of Damerau's table (optimal string alignment) behind the other. */
unsigned suggest_distance(const char *a, size_t alen, const char *b, size_t blen,
                          unsigned limit)
{
    unsigned rows[3][SUGGEST_MAX + 1];

    if (alen > SUGGEST_MAX || blen > SUGGEST_MAX ||
        (alen > blen ? alen - blen : blen - alen) > limit)
        return limit + 1;
    for (size_t j = 0; j <= blen; j++)
        rows[0][j] = (unsigned)j;
    for (size_t i = 1; i <= alen; i++) {
        unsigned *row = rows[i % 3], least;
        const unsigned *above = rows[(i + 2) % 3], *before = rows[(i + 1) % 3];

        row[0] = least = (unsigned)i;
        for (size_t j = 1; j <= blen; j++) {
            unsigned d = above[j - 1] + (a[i - 1] != b[j - 1]);

            d = MIN(d, MIN(above[j], row[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d = MIN(d, before[j - 2] + 1);
            row[j] = d;
            least = MIN(least, d);
        }
        if (least > limit)
            return limit + 1;
    }
    return MIN(rows[alen % 3][blen], limit + 1);
}

void suggest_begin(struct suggestion *s, const char *wanted, size_t len)
{
    *s = (struct suggestion){.wanted = wanted, .len = len};
    s->limit = (unsigned)MIN(len, (size_t)SUGGEST_MAX) / LETTERS_PER_SLIP + 1;
    s->distance = s->limit + 1;
}

/* "emb.weight" in "model.emb.weight". */
static bool has_part(const char *name, size_t len, const char *part, size_t part_len)
{
    const char *at = part_len ? memmem(name, len, part, part_len) : NULL;

    return at && (at == name || at[-1] == '.' || at[-1] == '/') &&
           (at + part_len == name + len || at[part_len] == '.' || at[part_len] == '/');
}

void suggest_try(struct suggestion *s, const char *name, size_t len)
{
    unsigned d;

    if (s->distance == 0 || len > SUGGEST_MAX)
        return;
    d = has_part(name, len, s->wanted, s->len)
            ? 0
            : suggest_distance(s->wanted, s->len, name, len, s->distance - 1);
    if (d >= s->distance)
        return;
    s->distance = d;
    memcpy(s->best, name, len);
    s->best[len] = '\0';
}

const char *suggest_found(const struct suggestion *s)
{
    return s->distance <= s->limit ? s->best : NULL;
}
