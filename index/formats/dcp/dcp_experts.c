/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_experts.c - experts whose biases their saver lost, told by names. */
#include "index/formats/dcp/dcp_experts.h"

#include <ctype.h>
#include <string.h>

enum { MAX_DIGITS = 9 }; /* of an expert's number */

/* "weight12" or "weight12_w" gives 13; 0: it is no such name. */
static uint64_t numbered(const char *name, size_t len, const char *word)
{
    size_t n = strlen(word), at = n;
    uint64_t number = 0;

    if (len <= n || memcmp(name, word, n) != 0)
        return 0;
    while (at < len && at - n < MAX_DIGITS && isdigit((unsigned char)name[at]))
        number = number * 10 + (uint64_t)(name[at++] - '0');
    if (at == n)
        return 0;
    if (at + 2 == len && name[at] == '_' &&
        (name[at + 1] == 'w' || name[at + 1] == 'v'))
        at = len;
    return at == len ? number + 1 : 0;
}

void dcp_experts_note(struct dcp_experts *x, const char *key, size_t len)
{
    static const char mark[] = ".mlp.experts.linear_fc";
    const char *at = memmem(key, len, mark, sizeof mark - 1);
    size_t left = at ? len - (size_t)(at - key) - (sizeof mark - 1) : 0;
    uint64_t weights, biases;

    if (left < 2)
        return;
    at += sizeof mark - 1;
    if (at[1] != '.')
        return;
    weights = numbered(at + 2, left - 2, "weight");
    biases = numbered(at + 2, left - 2, "bias");
    x->weights = MAX(x->weights, weights);
    x->biases = MAX(x->biases, biases);
}
