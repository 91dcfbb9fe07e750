/* SPDX-License-Identifier: MIT */
/* index/formats/walk.c - all checkpoints of a tree, without those that are parts. */
#include "index/formats/scan.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/log.h"
#include "base/vec.h"
#include "index/formats/scan_priv.h"

enum {
    PARTS_MEMORY = 1 << 24,
    /*
     * A server may name directories without end, each of which costs a question or several.
     * So many are looked at, and for each checkpoint that is found some more. Disks end.
     */
    LEVELS_MAX = 64, /* of directories in each other */
    DIRS_MAX = 4000,
    DIRS_A_CHECKPOINT = 100,
    LOCAL_DIRS_MAX = 20000000,
};

/* A checkpoint above: some directories below it are its parts, and no checkpoints. */
struct above {
    struct above *next;
    char *path;
    bool asked;
    char **part;
    size_t nparts;
};

struct waiting {
    char *path;
    unsigned level;
    struct above *above; /* the nearest checkpoint above, or NULL */
};

struct walk {
    struct scanner *s;
    struct above *all;
    struct waiting *stack;
    size_t count, cap;
    unsigned level;    /* of the directory that is looked at */
    uint64_t looked;   /* directories so far, */
    uint64_t left;     /* and how many more may be */
    bool started;      /* the first directory was read */
    struct err unread; /* the first file that may be a checkpoint, or part of one */
    int (*fn)(void *user, const char *dir, const char *file,
              const struct format_driver *d);
    unfinished_fn *unfinished; /* or NULL */
    void *user;
};

static void walk_release(struct walk *w)
{
    for (struct above *x = w->all, *next; x; x = next) {
        next = x->next;
        for (size_t i = 0; i < x->nparts; i++)
            free(x->part[i]);
        free(x->part);
        free(x->path);
        free(x);
    }
    while (w->count > 0)
        free(w->stack[--w->count].path);
    free(w->stack);
}

static int unread(struct walk *w, const struct err *why)
{
    if (!w->unread.code)
        w->unread = *why;
    return 0;
}

static int too_deep(struct walk *w, const char *path)
{
    struct err e = {0};

    err_set(&e, EFBIG, "%.60s...: more than %d directories in each other", path,
            LEVELS_MAX);
    err_hint(&e, "what lies deeper was not looked at: name a directory further down");
    return unread(w, &e);
}

/* A directory in the one that is looked at. */
static int push(struct walk *w, const char *path, struct above *above, struct err *e)
{
    if (scanner_store(w->s)->remote && w->level == LEVELS_MAX)
        return too_deep(w, path);
    if (!VEC_ROOM(w->stack, w->count, w->cap))
        return err_nomem(e);
    w->stack[w->count] = (struct waiting){strdup(path), w->level, above};
    return w->stack[w->count].path ? (w->count++, 0) : err_nomem(e);
}

static int push_dirs(struct walk *w, const struct listing *l, const struct place *p,
                     const char *path, struct above *above, struct err *e)
{
    for (size_t i = listing_count(l); i-- > 0;) { /* the stack turns them round */
        const struct listing_entry *entry = listing_at(l, i);
        char below[PATH_MAX];

        if (entry->st.kind != ENTRY_DIR || entry->st.is_link ||
            place_hides(p, entry->name))
            continue;
        if (store_join(path, entry->name, below, sizeof below) < 0)
            log_msg(LOG_FORMAT, LOG_WARN, "%s/%s: the path is too long", path,
                    entry->name);
        else
            TRY(push(w, below, above, e));
    }
    return 0;
}

static int note_hidden(void *user, const char *name, bool part)
{
    struct above *x = user;
    char **grown;

    (void)part; /* arrays of zarr are hidden, and no part */
    grown = reallocarray(x->part, x->nparts + 1, sizeof *grown);
    if (!grown)
        return -ENOMEM;
    x->part = grown;
    x->part[x->nparts] = strdup(name);
    return x->part[x->nparts] ? (x->nparts++, 0) : -ENOMEM;
}

/* Which directories are parts only a scan can tell; what fails has none that we know. */
static void ask_parts(struct walk *w, struct above *x)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(PARTS_MEMORY);
    struct checkpoint_info info;
    struct err e = {0};

    x->asked = true;
    if (!a || scanner_get(w->s, x->path, NULL, a, &info, &e) < 0 ||
        catalog_hidden(scanner_catalog(w->s), info.id, note_hidden, x, &e) < 0)
        log_err(LOG_FORMAT, &e);
}

static bool is_part(struct walk *w, struct above *x, const char *path)
{
    size_t skip = x->path[0] ? strlen(x->path) + 1 : 0;

    if (!x->asked)
        ask_parts(w, x);
    for (size_t i = 0; i < x->nparts; i++) {
        size_t n = strlen(x->part[i]);

        if (strncmp(path + skip, x->part[i], n) == 0 &&
            (path[skip + n] == '/' || path[skip + n] == '\0'))
            return true;
    }
    return false;
}

static int new_above(struct walk *w, const char *path, struct above **out,
                     struct err *e)
{
    struct above *x = calloc(1, sizeof *x);

    if (!x)
        return err_nomem(e);
    x->path = strdup(path);
    x->next = w->all;
    w->all = x;
    *out = x;
    return x->path ? 0 : err_nomem(e);
}

static int tell_place(struct walk *w, const char *path, const struct place *p,
                      const char *only)
{
    int rc = 0;

    w->left += p->kind == PLACE_CHECKPOINT || p->nfiles ? DIRS_A_CHECKPOINT : 0;
    if (p->kind == PLACE_PLAIN && p->unfinished[0] && w->unfinished)
        return w->unfinished(w->user, path, p->unfinished);
    if (p->kind == PLACE_CHECKPOINT)
        return w->fn(w->user, path, only, p->driver);
    for (size_t i = 0; rc == 0 && i < p->nfiles; i++)
        rc = w->fn(w->user, path, p->files[i].name, p->files[i].driver);
    return rc;
}

/* What cannot be read is told and left out, but for where the walk starts. */
static int list_dir(struct walk *w, const char *path, struct listing **out,
                    struct err *e)
{
    struct store *store = scanner_store(w->s);
    struct err failed = {0};

    if (store->ops->list(store, path, out, &failed) == 0)
        return 0;
    if (!w->started || failed.code == ENOMEM) {
        return err_copy(e, &failed);
    }
    if (failed.code == EACCES || failed.code == EPERM) /* somebody else's */
        log_msg(LOG_FORMAT, LOG_INFO, "%s", failed.text);
    else if (failed.code != ENOENT) /* gone meanwhile */
        log_err(LOG_FORMAT, &failed);
    return 0;
}

/* A part is no checkpoint by itself; what lies in it and is none of its pieces may be. */
static int push_apart(struct walk *w, const struct listing *l, const char *path,
                      struct err *e)
{
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        char below[PATH_MAX];

        if (entry->st.kind == ENTRY_DIR && !entry->st.is_link &&
            place_is_apart(entry->name) &&
            store_join(path, entry->name, below, sizeof below) == 0)
            TRY(push(w, below, NULL, e));
    }
    return 0;
}

/* One directory, and those in it on the stack. */
static int visit(struct walk *w, const char *path, struct above *above, struct err *e)
{
    const char *only = path[0] ? NULL : scanner_store(w->s)->file;
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP(place_release) struct place place = {0};
    int rc = list_dir(w, path, &l, e);

    if (rc == 0 && l)
        rc = place_of(l, only, &place, e);
    if (rc < 0 || !l)
        return rc;
    if (above && place.kind != PLACE_PLAIN && is_part(w, above, path))
        return push_apart(w, l, path, e);
    if (place.trouble)
        unread(w, place.trouble);
    rc = tell_place(w, path, &place, only);
    if (rc != 0 || only)
        return rc;
    if (place.kind == PLACE_CHECKPOINT)
        TRY(new_above(w, path, &above, e));
    return push_dirs(w, l, &place, path, above, e);
}

/* It is the reason whatever else was not read. */
static int too_many(const struct walk *w, const char *path, struct err *e)
{
    const struct store *store = scanner_store(w->s);

    err_set(e, EFBIG, "%s%s%s: too many directories: after %" PRIu64 " there are more",
            store->url, path[0] ? "/" : "", path, w->looked);
    err_hint(e, "name one that has fewer below it");
    return -EFBIG;
}

int scanner_walk(struct scanner *s, const char *path,
                 int (*fn)(void *user, const char *dir, const char *file,
                           const struct format_driver *d),
                 void *user, struct err *e)
{
    return scanner_walk_all(s, path, fn, NULL, user, e);
}

int scanner_walk_all(struct scanner *s, const char *path,
                     int (*fn)(void *user, const char *dir, const char *file,
                               const struct format_driver *d),
                     unfinished_fn *unfinished, void *user, struct err *e)
{
    bool remote = scanner_store(s)->remote;
    CLEANUP(walk_release)
    struct walk w = {.s = s,
                     .left = remote ? DIRS_MAX : LOCAL_DIRS_MAX,
                     .fn = fn,
                     .unfinished = unfinished,
                     .user = user};
    int rc = push(&w, path, NULL, e);

    while (rc == 0 && w.count > 0) {
        struct waiting next = w.stack[--w.count];
        CLEANUP_FREE char *dir = next.path;

        if (w.left-- == 0)
            return too_many(&w, path, e);
        w.looked++;
        w.level = next.level + 1;
        rc = visit(&w, dir, next.above, e);
        w.started = true;
    }
    if (rc == 0 && w.unread.code)
        *e = w.unread;
    return rc == 0 ? -w.unread.code : rc;
}
