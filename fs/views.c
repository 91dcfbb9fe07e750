/* SPDX-License-Identifier: MIT */
/* fs/views.c - the names of one tensor in a stage: raw/, tensors/, tree/, and files that have all of a role. */
#include "fs/views.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "fs/slot.h"
#include "save/incoming.h"

enum { TENSOR_MEMORY = 16 << 20 };

/* One that is asked for, and what was found in its way. */
struct look {
    struct fs *fs;
    const struct stage *s;
    const struct staged *self; /* or NULL */
    uint64_t order;            /* of its last close; 0: it is not staged */
    enum role role;            /* of its tensors */
    bool base;                 /* adapters are files as others */
    bool in_raw;               /* names in the directory that is looked at are raw/'s */
    const struct staged *found;
    int failed;
    struct err *e;
};

/* Of one that was opened and not written there is nothing to lose. */
static uint64_t order_of(const struct staged *n)
{
    return n->came->copied ? 0 : n->order;
}

static bool is_later(const struct look *l, const struct staged *x)
{
    return x != l->self && (x->changing > 0 || order_of(x) > l->order);
}

/* The tensor of the checkpoint that has this name in raw/ or tensors/; -ENOENT: it is new. */
static int tensor_of(const struct look *l, const char *name, bool npy, struct arena *a,
                     struct tensor_info *out, struct err *e)
{
    return catalog_tensor_by_name(l->fs->catalog, l->s->slot->info.id, name, npy, a,
                                  out, e);
}

/* A name that came to one of the directories of single tensors, or was removed there. */
static void see_tensor(void *user, struct staged *x)
{
    struct look *l = user;
    CLEANUP(arena_freep) struct arena *a = NULL;
    struct err why = {0};
    struct tensor_info t;
    int rc;

    if (l->found || l->failed || x->kind == STAGED_DIR || !is_later(l, x))
        return;
    if (x->kind == STAGED_GONE && strcmp(x->parent->name, "tensors") != 0)
        return;
    a = arena_new(TENSOR_MEMORY);
    rc = a ? tensor_of(l, x->name, !l->in_raw, a, &t, &why) : err_nomem(&why);
    if (rc == 0 && t.role == l->role)
        l->found = x;
    if (rc < 0 && rc != -ENOENT) {
        l->failed = rc;
        *l->e = why;
    }
}

/* A file that has all of a role. */
static void see_whole(void *user, struct staged *x)
{
    struct look *l = user;
    char path[PATH_MAX];
    enum role role;

    if (!l->found && x->kind == STAGED_FILE && is_later(l, x) &&
        staged_path(x, path, sizeof path) == 0 &&
        incoming_kind_beside(path, l->base) == INCOMING_SAFETENSORS &&
        incoming_is_whole(path, &role) && role == l->role)
        l->found = x;
}

static void see_in(struct look *l, const char *name,
                   void (*see)(void *user, struct staged *x))
{
    const struct staged *dir = staged_find(l->s->root, name);

    l->in_raw = strcmp(name, "raw") == 0;
    if (dir && dir->kind == STAGED_DIR)
        staged_each(dir, see, l);
}

static void see_one(struct look *l, const char *dir_name, const char *name)
{
    const struct staged *dir = staged_find(l->s->root, dir_name);
    struct staged *x = dir && dir->kind == STAGED_DIR ? staged_find(dir, name) : NULL;

    if (x && x->kind != STAGED_DIR && is_later(l, x) && !l->found &&
        (x->kind == STAGED_FILE || strcmp(dir_name, "tensors") == 0))
        l->found = x;
}

/* By the names of one tensor, and files that have it among others. */
static int look_for_tensor(struct look *l, const char *name, bool npy, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(TENSOR_MEMORY);
    struct err why = {0};
    struct tensor_info t;
    int rc = a ? tensor_of(l, name, npy, a, &t, &why) : err_nomem(&why);

    if (rc == -ENOENT)
        return 0;
    if (rc < 0) {
        *e = why;
        return rc;
    }
    l->role = t.role;
    see_one(l, "tensors", t.name_npy);
    see_one(l, "tree", t.name_npy);
    see_one(l, "raw", t.name);
    staged_each(l->s->root, see_whole, l);
    see_in(l, "optimizer", see_whole);
    return 0;
}

/* By all names of a role's tensors. */
static int look_for_role(struct look *l)
{
    see_in(l, "tensors", see_tensor);
    see_in(l, "tree", see_tensor);
    see_in(l, "raw", see_tensor);
    staged_each(l->s->root, see_whole, l);
    see_in(l, "optimizer", see_whole);
    return l->failed;
}

static int refuse(const struct look *l, const char *path, struct err *e)
{
    char other[PATH_MAX] = "";

    staged_path(l->found, other, sizeof other);
    err_set(e, EBUSY, "%s/%s: %s, of the same tensors, %s and is not published yet",
            l->s->path, path, other,
            l->found->kind == STAGED_GONE ? "was removed"
            : l->found->changing > 0      ? "is being written"
                                          : "was written");
    return err_hint(e, "publish that first (sync DIR), or write all of it anew");
}

/* In new directories of tree/: what is there is opened by its name in tensors/. */
static bool is_deep(const char *path)
{
    return strchr(strchr(path, '/') + 1, '/') != NULL;
}

int views_check(struct fs *fs, const struct staged *dir, const char *name,
                const struct staged *n, struct err *e)
{
    bool file = n && n->kind == STAGED_FILE;
    struct look l = {
        .fs = fs, .s = dir->stage, .self = n, .order = file ? order_of(n) : 0, .e = e};
    enum incoming_kind kind;
    char path[PATH_MAX];
    size_t len;
    int rc = 0;

    /* Who writes it all anew just now will be the last. */
    if (!l.s->slot || (file && n->since == STAGED_ALL_NEW && n->changing > 0))
        return 0;
    if (staged_path(dir, path, sizeof path) < 0)
        return -ENAMETOOLONG;
    len = strlen(path);
    if (snprintf(path + len, sizeof path - len, "%s%s", len ? "/" : "", name) >=
        (int)(sizeof path - len))
        return -ENAMETOOLONG;
    l.base = !l.s->slot->info.adapter;
    kind = incoming_kind_beside(path, l.base);
    if ((kind == INCOMING_NPY && !is_deep(path)) || kind == INCOMING_RAW)
        rc = look_for_tensor(&l, name, kind == INCOMING_NPY, e);
    else if (kind == INCOMING_SAFETENSORS && incoming_is_whole(path, &l.role))
        rc = look_for_role(&l);
    return rc < 0 ? rc : l.found ? refuse(&l, path, e) : 0;
}
