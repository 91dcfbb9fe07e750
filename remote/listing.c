/* SPDX-License-Identifier: MIT */
/* remote/listing.c - the names, sizes and first bytes of one directory of a source. */
#include "remote/listing.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "remote/archives.h"
#include "remote/store.h"

enum {
    /* Zarr's flat layout puts a file a chunk into one directory; ten times the largest
     * that was seen, about 1.5 GB of memory. */
    MAX_ENTRIES = 8000000,
    HEAD_MIN = 4096, /* one page is read anyway, and most markers are shorter */
};

/* What was read of an entry so far. */
struct extra {
    char *head;
    size_t head_len;
    bool head_whole; /* all of the file, or all that a made-up one has */
    struct listing *sub;
};

struct item {
    struct listing_entry pub;
    struct extra *extra; /* NULL for most */
};

struct listing {
    struct store *store; /* NULL: made up by a test */
    char *path, *name;
    struct arena *names;
    struct item *items;
    size_t count, cap;
    bool sorted;
    struct listing *above;           /* whose subdirectory it is, or NULL */
    struct listing_trouble *trouble; /* NULL: none */
    void *kept;                      /* see listing_keep() */
    bool skips_junk;
};

/* The last part of the path; the root is called as its directory is. */
static char *name_of(const struct store *store, const char *path)
{
    const char *text = path[0] || !store ? path : store->dir ? store->dir : store->url;
    size_t len = strlen(text), start;

    if (!path[0] && store && !store->dir && store->file)
        len -= MIN(len, strlen(store->file) + 1);
    for (start = len; start > 0 && text[start - 1] != '/'; start--)
        ;
    return strndup(text + start, len - start);
}

int listing_new(struct store *store, const char *path, struct listing **out,
                struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = calloc(1, sizeof *l);

    if (!l)
        return err_nomem(e);
    l->store = store;
    l->sorted = true;
    l->path = strdup(path);
    l->name = name_of(store, path);
    l->names = arena_new((size_t)MAX_ENTRIES * (NAME_MAX + 17));
    if (!l->path || !l->name || !l->names)
        return err_nomem(e);
    *out = steal(&l);
    return 0;
}

static void extra_free(struct extra *x)
{
    if (!x)
        return;
    free(x->head);
    listing_free(x->sub);
    free(x);
}

void listing_free(struct listing *l)
{
    if (!l)
        return;
    for (size_t i = 0; i < l->count; i++)
        extra_free(l->items[i].extra);
    free(l->items);
    free(l->kept);
    free(l->trouble);
    arena_free(l->names);
    free(l->name);
    free(l->path);
    free(l);
}

void listing_freep(struct listing **l)
{
    listing_free(*l);
    *l = NULL;
}

size_t listing_count(const struct listing *l)
{
    return l->count;
}

const struct listing_entry *listing_at(const struct listing *l, size_t i)
{
    return &l->items[i].pub;
}

const char *listing_path(const struct listing *l)
{
    return l->path;
}

const char *listing_name(const struct listing *l)
{
    return l->name;
}

static int item_compare(const void *a, const void *b)
{
    const struct item *x = a, *y = b;

    return strcmp(x->pub.name, y->pub.name);
}

static struct item *find_item(const struct listing *l, const char *name)
{
    struct item key = {.pub.name = name};

    if (l->count == 0)
        return NULL;
    if (l->sorted)
        return bsearch(&key, l->items, l->count, sizeof key, item_compare);
    for (size_t i = 0; i < l->count; i++)
        if (strcmp(l->items[i].pub.name, name) == 0)
            return &l->items[i];
    return NULL;
}

const struct listing_entry *listing_find(const struct listing *l, const char *name)
{
    const struct item *item = find_item(l, name);

    return item ? &item->pub : NULL;
}

static int make_room(struct listing *l, struct err *e)
{
    size_t cap = l->cap ? l->cap * 2 : 32;
    struct item *items;

    if (l->count < l->cap)
        return 0;
    if (l->count >= MAX_ENTRIES)
        return err_set(e, EFBIG, "more than %d entries", MAX_ENTRIES);
    items = reallocarray(l->items, cap, sizeof *items);
    if (!items)
        return err_nomem(e);
    l->items = items;
    l->cap = cap;
    return 0;
}

static struct extra *extra_of(struct item *item)
{
    if (!item->extra)
        item->extra = calloc(1, sizeof *item->extra);
    return item->extra;
}

static int set_head(struct item *item, const void *head, size_t len, bool whole)
{
    struct extra *x = extra_of(item);
    char *copy = malloc(len + 1);

    if (!x || !copy) {
        free(copy);
        return -ENOMEM;
    }
    memcpy(copy, head, len);
    copy[len] = '\0';
    free(x->head);
    x->head = copy;
    x->head_len = len;
    x->head_whole = whole;
    return 0;
}

static const char junk[] = "._"; /* AppleDouble, RFC 1740 */

static bool is_junk(const char *name, const struct entry_stat *st)
{
    return st->kind == ENTRY_FILE && strncmp(name, junk, sizeof junk - 1) == 0;
}

/* The first entry of which the name is not before this text; all are sorted. */
static size_t first_from(const struct listing *l, const char *text)
{
    size_t low = 0, high = l->count;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (strcmp(l->items[mid].pub.name, text) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

void listing_skip_junk(struct listing *l, bool skip)
{
    l->skips_junk = skip;
    for (size_t i = first_from(l, junk);
         i < l->count && strncmp(l->items[i].pub.name, junk, sizeof junk - 1) == 0; i++)
        if (l->items[i].pub.st.is_junk)
            l->items[i].pub.st.kind = skip ? ENTRY_OTHER : ENTRY_FILE;
}

int listing_add(struct listing *l, const char *name, const struct entry_stat *st,
                const void *head, size_t head_len, struct err *e)
{
    struct item *item;
    char *copy;

    TRY(make_room(l, e));
    copy = arena_memdup(l->names, name, strlen(name));
    if (!copy)
        return err_nomem(e);
    item = &l->items[l->count];
    *item = (struct item){.pub = {.name = copy, .st = *st}};
    item->pub.st.is_junk = is_junk(copy, st);
    if (head &&
        set_head(item, head, head_len, !l->store || head_len >= st->id.size) < 0) {
        extra_free(item->extra);
        return err_nomem(e);
    }
    l->sorted = l->sorted &&
                (l->count == 0 || strcmp(l->items[l->count - 1].pub.name, copy) < 0);
    l->count++;
    return 0;
}

void listing_adopt(struct listing *l, struct store *store)
{
    l->store = store;
}

void listing_sort(struct listing *l)
{
    size_t kept = 0;

    if (l->sorted)
        return;
    qsort(l->items, l->count, sizeof *l->items, item_compare);
    /* A directory that changes while it is read may give a name twice. */
    for (size_t i = 0; i < l->count; i++) {
        if (kept > 0 && item_compare(&l->items[kept - 1], &l->items[i]) == 0)
            extra_free(l->items[i].extra);
        else
            l->items[kept++] = l->items[i];
    }
    l->count = kept;
    l->sorted = true;
}

int listing_add_sub(struct listing *l, const char *name, struct listing *sub,
                    struct err *e)
{
    CLEANUP(listing_freep) struct listing *owned = sub;
    const struct entry_stat st = {.kind = ENTRY_DIR, .mode = 0755};
    struct item *item = find_item(l, name);

    if (!item) {
        TRY(listing_add(l, name, &st, NULL, 0, e));
        item = &l->items[l->count - 1];
    }
    if (!extra_of(item))
        return err_nomem(e);
    listing_free(item->extra->sub);
    owned->above = l;
    item->extra->sub = steal(&owned);
    return 0;
}

/* Opens an entry and makes sure that it is still the file that was listed. */
static int open_entry(struct listing *l, const struct item *item, struct source **out,
                      struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    char path[PATH_MAX];

    if (!l->store)
        return err_set(e, EIO, "%s: a made-up file has no more bytes", item->pub.name);
    if (store_join(l->path, item->pub.name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: name too long", item->pub.name);
    TRY(l->store->ops->open(l->store, path, &src, e));
    if (!file_id_equal(&src->id, &item->pub.st.id))
        return source_stale(path, &item->pub.st.id, &src->id, e);
    *out = steal(&src);
    return 0;
}

/* The regular file of that name. */
static int find_file(const struct listing *l, const char *name, struct item **out,
                     struct err *e)
{
    struct item *item = find_item(l, name);

    if (!item)
        return err_set(e, ENOENT, "%s: %s", name, strerror(ENOENT));
    if (item->pub.st.kind == ENTRY_DIR)
        return err_set(e, EISDIR, "%s: %s", name, strerror(EISDIR));
    if (item->pub.st.kind != ENTRY_FILE)
        return err_set(e, EINVAL, "%s: not a regular file", name);
    *out = item;
    return 0;
}

/* ---- what could not be read ---- */

static void note_trouble(struct listing *l, const char *name, int rc,
                         const struct err *e)
{
    const struct item *item = find_item(l, name);
    char path[PATH_MAX];

    if (!source_is_trouble(rc) && rc != -EACCES && rc != -EPERM)
        return;
    if (store_join(l->path, name, path, sizeof path) < 0)
        return;
    for (; l; l = l->above) {
        if (l->trouble || !(l->trouble = malloc(sizeof *l->trouble)))
            continue;
        l->trouble->err = *e;
        l->trouble->is_dir = item && item->pub.st.kind == ENTRY_DIR;
        memcpy(l->trouble->path, path, strlen(path) + 1);
    }
}

const struct listing_trouble *listing_trouble(const struct listing *l)
{
    return l->trouble;
}

bool listing_denied(const struct listing_trouble *t)
{
    return t->err.code == EACCES || t->err.code == EPERM;
}

/* Reads the first bytes, at least `len` where the file has them, and keeps them. */
static int fetch_head(struct listing *l, struct item *item, size_t len, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP_FREE char *head = NULL;
    int rc = open_entry(l, item, &src, e);

    if (rc < 0)
        return rc;
    len = MIN(MAX(len, HEAD_MIN), src->size);
    head = malloc(len + 1);
    if (!head)
        return err_nomem(e);
    TRY(source_read(src, 0, len, head, e));
    return set_head(item, head, len, len == src->size) < 0 ? err_nomem(e) : 0;
}

static bool head_serves(const struct item *item, size_t len)
{
    const struct extra *x = item->extra;

    return x && x->head && (x->head_whole || x->head_len >= len);
}

int listing_peek(struct listing *l, const char *name, void *dst, size_t len,
                 size_t *got)
{
    struct err e = {0};
    struct item *item = NULL;
    int rc = find_file(l, name, &item, &e);

    if (rc == 0 && !head_serves(item, len))
        rc = fetch_head(l, item, len, &e);
    if (rc < 0) {
        note_trouble(l, name, rc, &e);
        return rc;
    }
    *got = MIN(len, item->extra->head_len);
    memcpy(dst, item->extra->head, *got);
    return 0;
}

static int read_whole(struct source *src, size_t max, char **data, size_t *len,
                      struct err *e)
{
    CLEANUP_FREE char *all = NULL;
    int rc;

    if (src->size > max)
        return err_set(e, EFBIG, "%s: %" PRIu64 " bytes, at most %zu are taken",
                       src->name, src->size, max);
    all = malloc(src->size + 1);
    if (!all)
        return err_nomem(e);
    rc = source_read(src, 0, src->size, all, e);
    if (rc == 0)
        rc = source_check(src, e); /* else half of it may be newer than the rest */
    if (rc < 0)
        return rc;
    all[src->size] = '\0';
    *len = src->size;
    *data = steal(&all);
    return 0;
}

/* What is known of it already serves, where that is all of it. */
static int open_whole(struct listing *l, const struct item *item, struct source **out,
                      struct err *e)
{
    const struct extra *x = item->extra;

    if (head_serves(item, SIZE_MAX))
        return source_from_memory(x->head, x->head_len, false, item->pub.name, out, e);
    return open_entry(l, item, out, e);
}

int listing_read(struct listing *l, const char *name, size_t max, char **data,
                 size_t *len, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    struct item *item = NULL;
    int rc = find_file(l, name, &item, e);

    if (rc < 0)
        return rc;
    rc = open_whole(l, item, &src, e);
    if (rc == 0)
        rc = read_whole(src, max, data, len, e);
    note_trouble(l, name, rc, e);
    return rc;
}

int listing_open(struct listing *l, const char *name, struct source **out,
                 struct err *e)
{
    struct item *item = NULL;
    int rc = find_file(l, name, &item, e);

    if (rc < 0)
        return rc;
    rc = open_whole(l, item, out, e);
    note_trouble(l, name, rc, e);
    return rc;
}

int listing_open_link(struct listing *l, const char *name, struct source **out,
                      struct err *e)
{
    char path[PATH_MAX];

    if (!l->store || store_join(l->path, name, path, sizeof path) < 0)
        return err_set(e, EINVAL, "%s: not a link of a source", name);
    return l->store->ops->open(l->store, path, out, e);
}

void *listing_kept(const struct listing *l)
{
    return l->kept;
}

void listing_keep(struct listing *l, void *conclusion)
{
    free(l->kept);
    l->kept = conclusion;
}

static bool may_be_listed(const struct item *item)
{
    return item->pub.st.kind == ENTRY_DIR ||
           (item->pub.st.kind == ENTRY_FILE && archive_is_named(item->pub.name));
}

struct listing *listing_sub(struct listing *l, const char *name)
{
    struct item *item = find_item(l, name);
    struct err e = {0};
    char path[PATH_MAX];

    if (!item || !may_be_listed(item) || !extra_of(item))
        return NULL;
    if (!item->extra->sub && l->store &&
        store_join(l->path, name, path, sizeof path) == 0) {
        int rc = l->store->ops->list(l->store, path, &item->extra->sub, &e);

        /* The root of a file system has one that only root may read, and nothing in it. */
        if (rc < 0 && strcmp(name, "lost+found") != 0)
            note_trouble(l, name, rc, &e);
        else if (rc == 0)
            item->extra->sub->above = l;
    }
    if (item->extra->sub)
        listing_skip_junk(item->extra->sub, l->skips_junk);
    return item->extra->sub;
}

struct listing *listing_below(struct listing *l, const char *path)
{
    char name[NAME_MAX + 1];

    while (l && *path) {
        size_t len = strcspn(path, "/");

        if (len > NAME_MAX)
            return NULL;
        memcpy(name, path, len);
        name[len] = '\0';
        l = listing_sub(l, name);
        path += len + (path[len] == '/');
    }
    return l;
}

bool listing_look(const struct listing *l, const char *path, struct entry_stat *out)
{
    struct err ignored = {0};

    return l->store && l->store->ops->stat(l->store, path, out, &ignored) == 0;
}

bool listing_marked(const struct listing *l, const char *name, unsigned levels)
{
    char dir[PATH_MAX], path[PATH_MAX];
    struct entry_stat st;

    if (listing_find(l, name))
        return true;
    snprintf(dir, sizeof dir, "%s", l->path);
    while (l->store && levels-- > 0 && dir[0]) {
        char *slash = strrchr(dir, '/');

        *(slash ? slash : dir) = '\0';
        if (store_join(dir, name, path, sizeof path) == 0 && listing_look(l, path, &st))
            return true;
    }
    return false;
}
