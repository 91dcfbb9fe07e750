/* SPDX-License-Identifier: MIT */
/* fs/amend.c - what is remembered of a directory follows single names that change. */
#include "fs/amend.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "fs/node.h"
#include "fs/tree.h"
#include "index/formats/scan.h"
#include "save/staging.h"

/*
 * Is the file none that a format knows by its name or its first bytes? Asked of it alone: what
 * makes something of it together with others is seen by the next look at all of them, within
 * the second in which changes show.
 */
static bool is_plain(struct fs *fs, const struct node *dir,
                     const struct shown_entry *entry)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct err ignored = {0};
    struct place place;
    bool plain;

    if (listing_new(fs->store, dir->path, &l, &ignored) < 0 ||
        listing_add(l, entry->name, &entry->st, NULL, 0, &ignored) < 0 ||
        place_of(l, NULL, &place, &ignored) < 0)
        return false;
    plain = place.kind == PLACE_PLAIN && !place.trouble;
    place_release(&place);
    return plain;
}

/* What the name shows: *gone: nothing. False: that takes a look at the whole directory. */
static bool look(struct fs *fs, struct node *dir, struct shown_entry *out, bool *gone)
{
    char path[PATH_MAX];
    struct err ignored = {0};
    int rc = store_join(dir->path, out->name, path, sizeof path) < 0
                 ? -ENAMETOOLONG
                 : fs->store->ops->stat(fs->store, path, &out->st, &ignored);

    *gone = rc == -ENOENT;
    if (rc < 0)
        return *gone;
    if (out->st.is_link || out->st.kind == ENTRY_OTHER || staging_is_named(out->name))
        return false;
    out->kind = out->st.kind == ENTRY_DIR ? SHOWN_DIR : SHOWN_FILE;
    *gone = tree_hides(fs, dir, out->name);
    return out->kind == SHOWN_DIR || is_plain(fs, dir, out);
}

void amend_name(struct fs *fs, const char *dir, const char *name)
{
    struct shown_entry entry = {.name = name};
    struct node_snapshots s;
    bool gone = false, seen;

    nodes_snapshots(fs, dir, &s);
    seen = !s.dir || look(fs, s.dir, &entry, &gone);
    for (size_t i = 0; seen && s.dir && i < s.count; i++)
        shown_change(s.shown[i], name, gone ? NULL : &entry, s.turn);
    if (!seen)
        nodes_look_again(fs, dir);
    nodes_snapshots_put(fs, &s);
}

void amend_path(struct fs *fs, const char *path)
{
    const char *slash = strrchr(path, '/');
    CLEANUP_FREE char *dir = strndup(path, slash ? (size_t)(slash - path) : 0);

    if (dir)
        amend_name(fs, dir, slash ? slash + 1 : path);
}
