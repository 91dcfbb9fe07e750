/* SPDX-License-Identifier: MIT */
/* cli/side_files.c - the files that a mount shows beside a checkpoint's tensors. */
#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "base/keyset.h"
#include "base/vec.h"
#include "cli/cli.h"
#include "remote/store.h"

enum { NAMES_MEMORY = 64 << 20 };

/* Names relative to the checkpoint that its mount does not show, sorted; its parts. */
struct hidden {
    struct arena *arena;
    const char *dir; /* the checkpoint's, in the store */
    const char **name, **part;
    size_t names, parts, names_cap, parts_cap;
    struct keyset given; /* names that were given to the caller */
};

static int add(struct arena *a, const char ***list, size_t *n, size_t *cap,
               const char *name)
{
    if (!VEC_ROOM(*list, *n, *cap))
        return -ENOMEM;
    (*list)[*n] = arena_memdup(a, name, strlen(name));
    return (*list)[*n] ? ((*n)++, 0) : -ENOMEM;
}

static int note_hidden(void *user, const char *name, bool part)
{
    struct hidden *h = user;
    int ret = add(h->arena, &h->name, &h->names, &h->names_cap, name);

    return ret == 0 && part ? add(h->arena, &h->part, &h->parts, &h->parts_cap, name)
                            : ret;
}

/* Storage files below the checkpoint's directory, as fs/generation.c has them. */
static int note_file(void *user, const struct catalog_file *f)
{
    struct hidden *h = user;
    size_t len = strlen(h->dir);
    const char *name = f->path + len + (len > 0);

    if (strncmp(f->path, h->dir, len) != 0 || (len && f->path[len] != '/') ||
        !f->storage || !strchr(name, '/'))
        return 0;
    return add(h->arena, &h->name, &h->names, &h->names_cap, name);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static bool hides(const struct hidden *h, const char *name)
{
    return h->names && bsearch(&name, h->name, h->names, sizeof name, by_name);
}

static void hidden_release(struct hidden *h)
{
    free(h->name);
    free(h->part);
    keyset_release(&h->given);
    arena_free(h->arena);
}

static int read_hidden(struct cli *c, struct reading *s,
                       const struct checkpoint_info *info, struct hidden *h)
{
    int ret;

    h->arena = arena_new(NAMES_MEMORY);
    if (!h->arena)
        return err_nomem(&c->err);
    h->dir = info->path;
    ret = catalog_hidden(s->catalog, info->id, note_hidden, h, &c->err);
    if (ret == 0)
        ret = catalog_files(s->catalog, info->id, note_file, h, &c->err);
    if (ret == -ENOMEM && !c->err.code)
        return err_nomem(&c->err);
    if (ret == 0 && h->names)
        qsort(h->name, h->names, sizeof *h->name, by_name);
    return ret;
}

/* The shown files of one directory: the checkpoint's own (part ""), or a part's. */
static int each_of(struct cli *c, struct reading *s, const struct checkpoint_info *info,
                   struct hidden *h, const char *part, side_file_fn *fn, void *user)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    char dir[PATH_MAX], inside[PATH_MAX], path[PATH_MAX];
    int ret;

    if (store_join(info->path, part, dir, sizeof dir) < 0)
        return 0;
    ret = s->store->ops->list(s->store, dir, &l, &c->err);
    for (size_t i = 0; ret == 0 && i < listing_count(l); i++) {
        const struct listing_entry *e = listing_at(l, i);

        if (e->st.kind != ENTRY_FILE || (info->file && !strcmp(info->file, e->name)) ||
            store_join(part, e->name, inside, sizeof inside) < 0 || hides(h, inside) ||
            store_join(dir, e->name, path, sizeof path) < 0)
            continue;
        ret = keyset_add(&h->given, e->name, strlen(e->name));
        if (ret == 1)
            ret = fn(user, e->name, path);
        else if (ret < 0)
            ret = err_nomem(&c->err);
    }
    return ret;
}

int cli_side_files(struct cli *c, struct reading *s, const struct checkpoint_info *info,
                   side_file_fn *fn, void *user)
{
    CLEANUP(hidden_release) struct hidden h = {0};
    int ret;

    if (s->store->file) /* its directory is not the checkpoint's alone */
        return 0;
    ret = read_hidden(c, s, info, &h);
    if (ret == 0)
        ret = each_of(c, s, info, &h, "", fn, user);
    for (size_t i = 0; ret == 0 && i < h.parts; i++)
        ret = each_of(c, s, info, &h, h.part[i], fn, user);
    return ret;
}
