/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_dirs.c - the directories that are zarr arrays. */
#include "index/formats/orbax/orbax_dirs.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/formats/zarr/zarr_array.h"
#include "remote/listing.h"

enum {
    MAX_LEVELS = 16, /* of directories: a module's name may hold slashes */
};

bool orbax_is_group(const char *text, size_t len)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err unread = {0};
    const char *type;

    return json_parse(text, len, NULL, &doc, &unread) == 0 &&
           json_string(json_get(doc, "node_type"), &type) && strcmp(type, "group") == 0;
}

/* ---- a walk over directories, without recursion ---- */

struct level {
    struct listing *l;
    size_t next; /* entry to go on with */
    size_t path; /* bytes of the path up to this directory */
};

struct walk {
    struct level *level;
    unsigned depth, max;
    char path[PATH_MAX]; /* of the entry at hand */
};

static int walk_begin(struct walk *w, struct listing *l, unsigned max, struct err *e)
{
    *w = (struct walk){.level = calloc(max, sizeof *w->level), .max = max, .depth = 1};
    if (!w->level)
        return err_nomem(e);
    w->level[0].l = l;
    return 0;
}

/* The next entry, its path in w->path; NULL: none is left. */
static const struct listing_entry *walk_next(struct walk *w)
{
    while (w->depth > 0) {
        struct level *at = &w->level[w->depth - 1];
        const struct listing_entry *entry;
        size_t len;

        if (at->next == listing_count(at->l)) {
            w->depth--;
            continue;
        }
        entry = listing_at(at->l, at->next++);
        w->path[at->path] = '\0';
        len = strlen(entry->name);
        if (len + at->path + 1 < sizeof w->path) {
            memcpy(w->path + at->path, entry->name, len + 1);
            return entry;
        }
    }
    return NULL;
}

static struct listing *walk_here(const struct walk *w)
{
    return w->level[w->depth - 1].l;
}

/* Goes into the directory that walk_next() has given. */
static int walk_enter(struct walk *w, struct listing *l, struct err *e)
{
    size_t len = strlen(w->path);

    if (w->depth == w->max)
        return err_set(e, EFBIG, "%.200s: more than %u levels of directories", w->path,
                       w->max);
    if (len + 2 > sizeof w->path)
        return 0;
    w->path[len] = '/';
    w->path[len + 1] = '\0';
    w->level[w->depth++] = (struct level){.l = l, .path = len + 1};
    return 0;
}

/* ---- arrays ---- */

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

static bool is_group(struct listing *l)
{
    CLEANUP_FREE char *text = NULL;
    struct err unread = {0};
    size_t len;

    return listing_read(l, "zarr.json", ZARR_MAX_JSON, &text, &len, &unread) == 0 &&
           orbax_is_group(text, len);
}

static int each_in(struct walk *w, orbax_dir_fn *fn, void *user, struct err *e)
{
    const struct listing_entry *entry;

    while ((entry = walk_next(w))) {
        struct listing *sub;
        bool zarr3;
        int rc;

        if (entry->st.kind != ENTRY_DIR || entry->st.is_link)
            continue;
        sub = listing_sub(walk_here(w), entry->name);
        if (!sub)
            continue;
        zarr3 = has_file(sub, "zarr.json") && !is_group(sub);
        rc = zarr3 || has_file(sub, ".zarray") ? fn(user, w->path, sub, zarr3, e)
                                               : walk_enter(w, sub, e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int orbax_dirs_each(struct listing *l, orbax_dir_fn *fn, void *user, struct err *e)
{
    bool zarr3 = has_file(l, "zarr.json") && !is_group(l);
    struct walk w;
    int rc;

    /* A tree of one leaf, whose path has no parts. */
    if (zarr3 || has_file(l, ".zarray"))
        return fn(user, "", l, zarr3, e);
    rc = walk_begin(&w, l, MAX_LEVELS, e);
    if (rc == 0)
        rc = each_in(&w, fn, user, e);
    free(w.level);
    return rc;
}
