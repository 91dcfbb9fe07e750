/* SPDX-License-Identifier: MIT */
/* index/fault_groups.c - faults of many tensors by their cause: one missing shard is one line. */
#include "index/fault_groups.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/vec.h"
#include "index/key_text.h"

/* A number that stands alone: an offset, a size, a count; digits of a name are none. */
static size_t number_at(const char *text, const char *at)
{
    size_t n = strspn(at, "0123456789");
    bool starts = at == text || strchr(" (+[", at[-1]);

    return starts && n > 0 && (!at[n] || strchr(" ,;:)]+", at[n])) ? n : 0;
}

/* The same for all texts of one cause: they differ in places and sizes only. */
static uint64_t cause_of(const char *text)
{
    char cause[1200];
    size_t n = 0, skip;

    for (const char *p = text; *p && n < sizeof cause - 1; p += skip ? skip : 1) {
        skip = number_at(text, p);
        cause[n++] = skip ? '#' : *p;
    }
    return XXH3_64bits(cause, n);
}

static struct fault_group *find(struct fault_groups *g, uint64_t hash)
{
    if (g->last < g->n && g->at[g->last].hash == hash)
        return &g->at[g->last];
    for (g->last = 0; g->last < g->n; g->last++)
        if (g->at[g->last].hash == hash)
            return &g->at[g->last];
    return NULL;
}

/* A new cause; the last one there is room for takes all others. */
static struct fault_group *add(struct fault_groups *g, uint64_t hash, const char *text)
{
    if (g->n == FAULT_CAUSES)
        return &g->at[g->n - 1];
    if (!VEC_ROOM(g->at, g->n, g->cap))
        return NULL;
    g->at[g->n] = (struct fault_group){.hash = hash};
    snprintf(g->at[g->n].text, sizeof g->at[g->n].text, "%s",
             g->n + 1 == FAULT_CAUSES ? "other causes" : text);
    return &g->at[g->n++];
}

int fault_groups_add(struct fault_groups *g, const char *key, size_t key_len,
                     const char *text)
{
    uint64_t hash = cause_of(text);
    struct fault_group *group = find(g, hash);

    if (!group)
        group = add(g, hash, text);
    if (!group)
        return -ENOMEM;
    if (group->count < FAULT_NAMES)
        key_text(group->name[group->count], sizeof group->name[0], key, key_len);
    group->count++;
    return 0;
}

const char *fault_group_line(const struct fault_group *g, char *dst, size_t size)
{
    size_t len;

    if (g->count == 1) {
        snprintf(dst, size, "%s: %s", g->name[0], g->text);
        return dst;
    }
    len = (size_t)snprintf(dst, size, "%" PRIu64 " tensors: %s (", g->count, g->text);
    for (size_t i = 0; i < FAULT_NAMES && i < g->count && len < size; i++)
        len +=
            (size_t)snprintf(dst + len, size - len, "%s%s", i ? ", " : "", g->name[i]);
    if (len < size)
        snprintf(dst + len, size - len, "%s)", g->count > FAULT_NAMES ? ", ..." : "");
    return dst;
}

void fault_groups_release(struct fault_groups *g)
{
    free(g->at);
    *g = (struct fault_groups){0};
}
