/* SPDX-License-Identifier: MIT */
/* remote/manifest.c - the list of a directory's files for servers that show none. */
#include "remote/manifest.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/json.h"
#include "base/vec.h"
#include "remote/http.h"
#include "remote/store.h"

enum {
    FILES_MAX = 16000000,
    DEPTH_MAX =
        64, /* of directories: deeper than any checkpoint, and links may circle */
};

struct manifest {
    atomic_uint refs;
    struct arena *arena;
    struct manifest_file *file; /* sorted */
    size_t count, cap;
};

/* ---- reading ---- */

struct manifest *manifest_get(struct manifest *m)
{
    atomic_fetch_add(&m->refs, 1);
    return m;
}

void manifest_put(struct manifest *m)
{
    if (!m || atomic_fetch_sub(&m->refs, 1) > 1)
        return;
    arena_free(m->arena);
    free(m->file);
    free(m);
}

void manifest_putp(struct manifest **m)
{
    manifest_put(*m);
}

static int add_file(struct manifest *m, const char *path, uint64_t size, struct err *e)
{
    if (m->count == m->cap) {
        size_t cap = m->cap ? 2 * m->cap : 64;
        struct manifest_file *grown =
            cap > FILES_MAX ? NULL : reallocarray(m->file, cap, sizeof *grown);

        if (!grown)
            return cap > FILES_MAX ? err_set(e, EFBIG, "more than %d files", FILES_MAX)
                                   : err_nomem(e);
        m->file = grown;
        m->cap = cap;
    }
    m->file[m->count] = (struct manifest_file){
        .path = arena_memdup(m->arena, path, strlen(path)), .size = size};
    return m->file[m->count++].path ? 0 : err_nomem(e);
}

/* Each part short enough for a name. */
static bool parts_fit(const char *path)
{
    for (size_t len; *path; path += len + (path[len] == '/')) {
        len = strcspn(path, "/");
        if (len > NAME_MAX)
            return false;
    }
    return true;
}

static int take_member(void *user, const char *key, size_t len,
                       const struct json *value, struct err *e)
{
    CLEANUP(buf_release) struct buf path = {.max = PATH_MAX};
    uint64_t size;

    if (!json_u64(value, &size))
        return err_set(e, EBADMSG, "the size of %.200s is no size", key);
    if (http_decode(key, len, &path) < 0 || !path.data ||
        !store_name_is_safe(path.data, path.len) || !parts_fit(path.data))
        return err_set(e, EBADMSG, "%.200s is no path below the manifest's directory",
                       key);
    return add_file(user, path.data, size, e);
}

/* Directories together with what is in them: '/' comes before all else. */
static int compare(const void *a, const void *b)
{
    const struct manifest_file *x = a, *y = b;
    const unsigned char *p = (const unsigned char *)x->path;
    const unsigned char *q = (const unsigned char *)y->path;

    while (*p && *p == *q) {
        p++;
        q++;
    }
    return (*p == '/' ? 1 : *p ? *p + 1 : 0) - (*q == '/' ? 1 : *q ? *q + 1 : 0);
}

int manifest_parse(const char *text, size_t len, struct manifest **out, struct err *e)
{
    CLEANUP(manifest_putp) struct manifest *m = calloc(1, sizeof *m);
    const struct json_limits limits = {.bytes = MANIFEST_BYTES_MAX,
                                       .values = FILES_MAX + 16};
    int rc;

    if (m)
        atomic_init(&m->refs, 1);
    if (!m || !(m->arena = arena_new(MANIFEST_BYTES_MAX)))
        return err_nomem(e);
    rc = json_each_member_of(text, len, &limits, "files", take_member, m, e);
    if (rc < 0)
        return err_wrap(e, "%s", MANIFEST_NAME);
    if (m->count > 1)
        qsort(m->file, m->count, sizeof *m->file, compare);
    *out = steal(&m);
    return 0;
}

/* Is the file below the directory? 0, or the length of what stands before its rest. */
static size_t below(const struct manifest_file *f, const char *dir, size_t len)
{
    if (len == 0)
        return 0;
    return strncmp(f->path, dir, len) == 0 && f->path[len] == '/' ? len + 1 : 0;
}

/* The first file that is in the directory or sorts after all that is. */
static size_t first_in(const struct manifest *m, const char *dir, size_t len)
{
    char key[PATH_MAX];
    const struct manifest_file probe = {.path = key};
    size_t lo = 0, hi = m->count;

    if (len == 0 || len + 2 > sizeof key)
        return len == 0 ? 0 : m->count;
    memcpy(key, dir, len);
    memcpy(key + len, "/", 2);
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (compare(&m->file[mid], &probe) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

int manifest_list(const struct manifest *m, const char *path, manifest_entry_fn *fn,
                  void *user)
{
    size_t len = strlen(path), skip = len ? len + 1 : 0;
    char last[NAME_MAX + 1] = "";
    bool any = false;
    int rc = 0;

    for (size_t i = first_in(m, path, len); rc == 0 && i < m->count; i++) {
        const struct manifest_file *f = &m->file[i];
        char name[NAME_MAX + 1];
        size_t n;

        if (below(f, path, len) != skip)
            break;
        n = strcspn(f->path + skip, "/");
        memcpy(name, f->path + skip, n);
        name[n] = '\0';
        if (any && strcmp(name, last) == 0 && f->path[skip + n])
            continue;
        memcpy(last, name, n + 1);
        any = true;
        rc = fn(user, name, f->path[skip + n] == '/', f->size);
    }
    return rc == 0 && !any && len ? -ENOENT : rc;
}

/* ---- making ---- */

/* Directories that wait to be listed. */
struct walk {
    struct store *store;
    struct buf *out;
    char **dir;
    size_t count, cap;
    uint64_t files, others;
};

static unsigned depth_of(const char *path)
{
    unsigned depth = 0;

    for (; *path; path++)
        depth += *path == '/';
    return depth;
}

static int add_dir(struct walk *w, const char *path, struct err *e)
{
    if (depth_of(path) > DEPTH_MAX)
        return err_set(e, ELOOP, "%s: more than %d directories deep", path, DEPTH_MAX);
    if (!VEC_ROOM(w->dir, w->count, w->cap))
        return err_nomem(e);
    w->dir[w->count] = strdup(path);
    return w->dir[w->count] ? (w->count++, 0) : err_nomem(e);
}

static int add_line(struct walk *w, const char *path, uint64_t size)
{
    buf_adds(w->out, w->files++ ? ",\n  \"" : "\n  \"");
    http_encode(path, true, w->out);
    return buf_addf(w->out, "\": %" PRIu64, size);
}

static int take_entry(struct walk *w, const char *dir,
                      const struct listing_entry *entry, struct err *e)
{
    char path[PATH_MAX];

    if (strcmp(entry->name, MANIFEST_NAME) == 0)
        return 0;
    if (store_join(dir, entry->name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir,
                       entry->name);
    if (entry->st.kind == ENTRY_DIR)
        return add_dir(w, path, e);
    if (entry->st.kind == ENTRY_OTHER || !store_name_is_safe(path, strlen(path))) {
        w->others++;
        return 0;
    }
    return add_line(w, path, entry->st.id.size) < 0 ? err_nomem(e) : 0;
}

static int take_dir(struct walk *w, const char *dir, struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    int rc = w->store->ops->list(w->store, dir, &l, e);

    for (size_t i = 0; rc == 0 && i < listing_count(l); i++)
        rc = take_entry(w, dir, listing_at(l, i), e);
    return rc;
}

int manifest_make(struct store *s, struct buf *out, uint64_t *files, uint64_t *others,
                  struct err *e)
{
    struct walk w = {.store = s, .out = out};
    int rc = add_dir(&w, "", e);

    buf_adds(out, "{\"unshard_manifest\": 1, \"files\": {");
    while (rc == 0 && w.count > 0) {
        CLEANUP_FREE char *dir = w.dir[--w.count];

        rc = take_dir(&w, dir, e);
    }
    while (w.count > 0)
        free(w.dir[--w.count]);
    free(w.dir);
    buf_adds(out, "\n}}\n");
    if (rc == 0 && buf_failed(out) < 0)
        rc = err_nomem(e);
    *files = w.files;
    *others = w.others;
    return rc;
}
