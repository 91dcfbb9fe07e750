/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_manifest.c - any bytes as a manifest: its directories hold safe names. */
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "remote/manifest.h"
#include "remote/store.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct walk {
    const struct manifest *m;
    char dir[8192];
    unsigned depth;
};

static int check_entry(void *user, const char *name, bool is_dir, uint64_t size)
{
    struct walk *w = user;
    size_t len = strlen(w->dir);

    (void)size;
    if (!store_name_is_safe(name, strlen(name)) || strchr(name, '/')) {
        fprintf(stderr, "a name that is not safe\n");
        abort();
    }
    if (!is_dir || w->depth == 8 || len + strlen(name) + 2 > sizeof w->dir)
        return 0;
    w->depth++;
    snprintf(w->dir + len, sizeof w->dir - len, "%s%s", len ? "/" : "", name);
    if (manifest_list(w->m, w->dir, check_entry, w) != 0) {
        fprintf(stderr, "a directory that is not there\n");
        abort();
    }
    w->dir[len] = '\0';
    w->depth--;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct manifest *m = NULL;
    struct err e = {0};

    if (manifest_parse((const char *)data, size, &m, &e) == 0)
        manifest_list(m, "", check_entry, &(struct walk){.m = m});
    manifest_put(m);
    return 0;
}
