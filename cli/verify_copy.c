/* SPDX-License-Identifier: MIT */
/* cli/verify_copy.c - full copies of sharded tensors, compared with what the shards give. */
#include "cli/verify_copy.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "index/formats/hf/safetensors_header.h"
#include "remote/source.h"
#include "remote/store.h"

enum {
    MEMORY = 64 << 20, /* of the names of the files, and of one tensor */
    WINDOW = 4 << 20,
    SMALL = 4096, /* read without --deep: enough for the 0-d ones that torch zeroes */
};

/* The copies of a checkpoint: statements of the index end before files are read. */
struct list {
    struct arena *arena;
    const char **path;
    size_t count, cap;
};

struct compare {
    struct cli *c;
    struct reading *s;
    int64_t checkpoint;
    void (*tell)(void *user, const char *key, size_t key_len, const char *why);
    void *user;
    struct copy_totals *totals;
    char *window[2]; /* malloc, WINDOW each */
};

static int note_file(void *user, const struct catalog_file *f)
{
    struct list *l = user;
    const char **grown;

    if (!f->copy)
        return 0;
    if (l->count == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 16;
        grown = arena_array(l->arena, l->cap, sizeof *grown);
        if (!grown)
            return -ENOMEM;
        if (l->count > 0)
            memcpy(grown, l->path, l->count * sizeof *grown);
        l->path = grown;
    }
    l->path[l->count] = arena_memdup(l->arena, f->path, strlen(f->path));
    return l->path[l->count] ? (l->count++, 0) : -ENOMEM;
}

static void differ(struct compare *k, const struct safetensors_tensor *t,
                   const char *why)
{
    k->totals->differ++;
    k->tell(k->user, t->name, t->name_len, why);
}

/* The first byte in which they differ, or -1; `e` when one of them cannot be read. */
static int64_t first_difference(struct compare *k, struct reader *r, struct source *src,
                                uint64_t off, struct err *e)
{
    uint64_t size = reader_size(r);

    for (uint64_t at = 0; at < size; at += WINDOW) {
        size_t len = (size_t)MIN(size - at, (uint64_t)WINDOW);

        if (reader_read(r, at, len, k->window[0], e) < 0 ||
            source_read(src, off + at, len, k->window[1], e) < 0)
            return -1;
        for (size_t i = 0; i < len; i++)
            if (k->window[0][i] != k->window[1][i])
                return (int64_t)(at + i);
    }
    return -1;
}

static void compare_bytes(struct compare *k, const struct tensor_info *info,
                          struct source *src, const struct safetensors_tensor *t,
                          uint64_t off)
{
    CLEANUP(reader_closep) struct reader *r = NULL;
    char why[1300], text[1200];
    struct err e = {0};
    int64_t at = -1;

    if (reader_open_tensor(&k->s->env, k->checkpoint, info->ord, false, &r, &e) == 0)
        at = first_difference(k, r, src, off, &e);
    k->totals->compared++;
    if (e.code)
        snprintf(why, sizeof why, "cannot be compared with its copy: %s",
                 err_line(&e, text, sizeof text));
    else if (at >= 0)
        snprintf(why, sizeof why,
                 "the shards and the full copy in %s differ from byte %" PRId64 " on",
                 src->name, at);
    else
        return;
    differ(k, t, why);
}

static void compare_tensor(struct compare *k, struct arena *a, struct source *src,
                           const struct safetensors_header *h,
                           const struct safetensors_tensor *t)
{
    struct tensor_info info;
    struct shape shape;
    struct err e = {0};
    char why[1300];

    k->totals->tensors++;
    safetensors_shape(t, &shape);
    if (catalog_tensor_by_key(k->s->catalog, k->checkpoint, t->name, t->name_len, a,
                              &info, &e) < 0 ||
        info.fault)
        return; /* the scan has told what is missing */
    if (!shape_equal(&shape, &info.shape)) {
        snprintf(why, sizeof why, "the full copy in %s has another shape", src->name);
        differ(k, t, why);
    } else if (t->dtype != info.dtype) {
        k->totals->other++;
    } else if (k->c->opt.deep || info.bytes <= SMALL) {
        compare_bytes(k, &info, src, t, h->data + t->begin);
    }
}

/* A copy that cannot be read was told by the scan: it changes nothing of the model. */
static int compare_file(struct compare *k, const char *path)
{
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    CLEANUP(source_putp) struct source *src = NULL;
    struct store *store = k->s->store;
    struct err e = {0};

    if (store->ops->open(store, path, &src, &e) < 0 ||
        safetensors_read(src, 0, src->size, &h, &e) < 0)
        return e.code == ENOMEM ? err_nomem(&k->c->err) : 0;
    for (size_t i = 0; i < h.count; i++) {
        CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);

        if (!a)
            return err_nomem(&k->c->err);
        compare_tensor(k, a, src, &h, &h.tensor[i]);
    }
    return 0;
}

int verify_copies(struct cli *c, struct reading *s, int64_t checkpoint,
                  void (*tell)(void *user, const char *key, size_t key_len,
                               const char *why),
                  void *user, struct copy_totals *out)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);
    CLEANUP_FREE char *first = malloc(WINDOW), *second = malloc(WINDOW);
    struct list l = {.arena = a};
    struct compare k = {.c = c,
                        .s = s,
                        .checkpoint = checkpoint,
                        .tell = tell,
                        .user = user,
                        .totals = out,
                        .window = {first, second}};
    int ret;

    *out = (struct copy_totals){0};
    if (c->opt.mapping.map)
        return 0; /* a name may mean something else there: files tell without a map */
    if (!a || !first || !second)
        return err_nomem(&c->err);
    ret = catalog_files(s->catalog, checkpoint, note_file, &l, &c->err);
    if (ret == -ENOMEM && !c->err.code)
        return err_nomem(&c->err);
    for (size_t i = 0; ret == 0 && i < l.count; i++)
        ret = compare_file(&k, l.path[i]);
    return ret;
}
