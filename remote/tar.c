/* SPDX-License-Identifier: MIT */
/* remote/tar.c - the members of a tar archive as byte ranges of it. */
#include "remote/tar.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "remote/store.h"
#include "remote/tar_header.h"

enum {
    MAX_MEMBERS = 1000 * 1000, /* zarr in a tar: a file a chunk */
    MAX_MEMORY = 512 << 20,    /* of names */
    MAX_EXTRA = 1 << 20,       /* bytes of a long name or of pax records */
};

struct tar {
    struct arena *names;
    struct tar_member *member;
    size_t count, cap, doubles;
    bool ended;
};

/* What was read before a member about it. */
struct reader {
    struct tar *t;
    tar_read_fn *fn;
    void *user;
    uint64_t pos, size;
    struct buf path, extra;
    struct tar_pax pax;
    bool has_long_name;
};

void tar_free(struct tar *t)
{
    if (!t)
        return;
    arena_free(t->names);
    free(t->member);
    free(t);
}

size_t tar_count(const struct tar *t)
{
    return t->count;
}

const struct tar_member *tar_at(const struct tar *t, size_t i)
{
    return &t->member[i];
}

size_t tar_doubles(const struct tar *t)
{
    return t->doubles;
}

bool tar_is_ended(const struct tar *t)
{
    return t->ended;
}

size_t tar_lower_bound(const struct tar *t, const char *name)
{
    size_t lo = 0, hi = t->count;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (strcmp(t->member[mid].name, name) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool tar_sniff(const void *head, size_t len)
{
    struct tar_header h;
    struct err ignored = {0};

    return len >= TAR_BLOCK && tar_header_parse(head, &h, &ignored) == 1;
}

/* ---- members ---- */

/* Absolute, or with a ".." anywhere. */
static bool leads_out(const char *name)
{
    if (name[0] == '/')
        return true;
    for (size_t len; *name; name += len + (name[len] == '/')) {
        len = strcspn(name, "/");
        if (len == 2 && memcmp(name, "..", 2) == 0)
            return true;
    }
    return false;
}

/* "./a//b/" is "a/b". Works in place. */
static void clean_name(struct buf *name)
{
    char *from = name->data, *to = name->data;

    while (*from) {
        size_t len = strcspn(from, "/");

        if (len > 0 && !(len == 1 && *from == '.')) {
            if (to > name->data)
                *to++ = '/';
            memmove(to, from, len);
            to += len;
        }
        from += len + (from[len] == '/');
    }
    *to = '\0';
    name->len = (size_t)(to - name->data);
}

static int make_room(struct tar *t, struct err *e)
{
    size_t cap = t->cap ? t->cap * 2 : 64;
    struct tar_member *grown;

    if (t->count < t->cap)
        return 0;
    if (t->count >= MAX_MEMBERS)
        return err_set(e, EFBIG, "more than %d members", MAX_MEMBERS);
    grown = reallocarray(t->member, cap, sizeof *grown);
    if (!grown)
        return err_nomem(e);
    t->member = grown;
    t->cap = cap;
    return 0;
}

static int add_member(struct reader *r, enum entry_kind kind, uint64_t size,
                      struct err *e)
{
    struct tar_member m = {.kind = kind, .off = r->pos, .size = size};

    if (r->path.len >= PATH_MAX)
        return err_set(e, ENAMETOOLONG, "a member whose name is too long");
    if (leads_out(r->path.data))
        return err_set(e, EBADMSG, "member \"%.200s\" leads out of the archive",
                       r->path.data);
    clean_name(&r->path);
    if (r->path.len == 0)
        return 0; /* "./": the root */
    TRY(make_room(r->t, e));
    m.name = arena_memdup(r->t->names, r->path.data, r->path.len);
    if (!m.name)
        return err_set(e, EFBIG, "names of members take too much memory");
    r->t->member[r->t->count++] = m;
    return 0;
}

/* By name; later ones of one name behind. */
static int compare(const void *a, const void *b)
{
    const struct tar_member *x = a, *y = b;
    int order = strcmp(x->name, y->name);

    return order ? order : (x->off > y->off) - (x->off < y->off);
}

/* Of those with one name the last one stays. */
static void drop_doubles(struct tar *t)
{
    size_t kept = 0;

    if (t->count > 1)
        qsort(t->member, t->count, sizeof *t->member, compare);
    for (size_t i = 0; i < t->count; i++) {
        if (kept > 0 && strcmp(t->member[kept - 1].name, t->member[i].name) == 0) {
            t->doubles += t->member[i].kind != ENTRY_DIR;
            kept--;
        }
        t->member[kept++] = t->member[i];
    }
    t->count = kept;
}

int tar_check_size(const struct tar *t, uint64_t size, struct err *e)
{
    for (size_t i = 0; i < t->count; i++)
        if (range_outside(t->member[i].off, t->member[i].size, size))
            return err_set(e, EBADMSG,
                           "member \"%.200s\" ends behind the archive's %" PRIu64
                           " bytes",
                           t->member[i].name, size);
    return 0;
}

/* No file is also a directory. */
static int check_tree(const struct tar *t, struct err *e)
{
    char below[PATH_MAX + 1];

    for (size_t i = 0; i < t->count; i++) {
        const struct tar_member *m = &t->member[i];
        size_t len = strlen(m->name), next;

        if (m->kind == ENTRY_DIR)
            continue;
        memcpy(below, m->name, len);
        memcpy(below + len, "/", 2);
        next = tar_lower_bound(t, below);
        if (next < t->count && strncmp(t->member[next].name, below, len + 1) == 0)
            return err_set(e, EBADMSG, "member \"%.200s\" is a file and a directory",
                           m->name);
    }
    return 0;
}

/* ---- headers ---- */

static int take(struct reader *r, size_t len, void *dst, size_t *got, struct err *e)
{
    int rc = r->fn(r->user, r->pos, len, dst, got, e);

    r->pos += *got;
    return rc;
}

/* Bytes of a member up to the next block. */
static int skip(struct reader *r, uint64_t size, struct err *e)
{
    uint64_t end;

    if (add_overflows(r->pos, size, &end) || end > r->size || end > INT64_MAX)
        return err_set(e, EBADMSG, "a member ends behind the archive");
    r->pos = MIN((end + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK, r->size);
    return 0;
}

/* A long name or pax records, which stand as a member of their own. */
static int read_extra(struct reader *r, uint64_t size, struct err *e)
{
    uint64_t start = r->pos;
    size_t got = 0;
    void *dst;

    if (size > MAX_EXTRA)
        return err_set(e, EFBIG, "a name or record of more than a MiB");
    buf_clear(&r->extra);
    dst = buf_grow(&r->extra, (size_t)size);
    if (!dst)
        return err_nomem(e);
    TRY(take(r, (size_t)size, dst, &got, e));
    if (got < size)
        return err_set(e, EBADMSG, "it is cut off");
    r->pos = start;
    return skip(r, size, e);
}

/*
 * Of two headers that tell one thing of one member some readers take the first and others
 * the last: no writer makes that.
 */
static int told_twice(struct err *e)
{
    return err_set(e, EBADMSG, "a member whose name or size is told twice");
}

static int read_long_name(struct reader *r, uint64_t size, struct err *e)
{
    if (r->has_long_name || r->pax.has_path)
        return told_twice(e);
    TRY(read_extra(r, size, e));
    buf_clear(&r->path);
    buf_add(&r->path, r->extra.data, strnlen(r->extra.data, r->extra.len));
    r->has_long_name = true;
    return buf_failed(&r->path) ? err_nomem(e) : 0;
}

static int read_pax(struct reader *r, uint64_t size, struct err *e)
{
    const struct tar_pax had = r->pax;
    struct tar_pax now = {0};

    TRY(read_extra(r, size, e));
    TRY(tar_pax_parse(r->extra.data, r->extra.len, &now, &r->path, e));
    if ((now.has_path && (had.has_path || r->has_long_name)) ||
        (now.has_size && had.has_size))
        return told_twice(e);
    r->pax.has_path |= now.has_path;
    r->pax.has_size |= now.has_size;
    r->pax.is_sparse |= now.is_sparse;
    r->pax.size = now.has_size ? now.size : had.size;
    return 0;
}

/* Records for all members that follow: nobody puts sizes or names there. */
static int read_global(struct reader *r, uint64_t size, struct err *e)
{
    CLEANUP(buf_release) struct buf path = {0};
    struct tar_pax pax = {0};

    TRY(read_extra(r, size, e));
    TRY(tar_pax_parse(r->extra.data, r->extra.len, &pax, &path, e));
    if (pax.has_path || pax.has_size || pax.is_sparse)
        return err_set(e, ENOTSUP, "a name or size for all members is not supported");
    return 0;
}

static int read_member(struct reader *r, const struct tar_header *h, struct err *e)
{
    uint64_t size = r->pax.has_size ? r->pax.size : h->size;
    enum entry_kind kind = ENTRY_FILE;

    if (!r->pax.has_path && !r->has_long_name) {
        buf_clear(&r->path);
        if (buf_adds(&r->path, h->name) < 0)
            return err_nomem(e);
    }
    if (r->pax.is_sparse || h->type == 'S')
        return err_set(e, ENOTSUP, "member \"%.200s\" is sparse: that is not supported",
                       r->path.data);
    if (h->type == '5' ||
        (h->type == '0' && r->path.len > 0 && r->path.data[r->path.len - 1] == '/'))
        kind = ENTRY_DIR;
    else if (h->type != '0' && h->type != '7')
        kind = ENTRY_OTHER;
    if (kind == ENTRY_DIR && h->type == '0' && size > 0)
        return err_set(e, EBADMSG, "member \"%.200s\" is a directory with bytes",
                       r->path.data);
    if (kind == ENTRY_OTHER || h->type == '5')
        size = 0; /* links may tell the size of what they lead to */
    TRY(add_member(r, kind, size, e));
    r->has_long_name = false;
    r->pax = (struct tar_pax){0};
    return skip(r, size, e) < 0 ? err_wrap(e, "member \"%.200s\"", r->path.data) : 0;
}

/* What was told of a member that does not come. */
static int check_told(const struct reader *r, struct err *e)
{
    if (r->has_long_name || r->pax.has_path || r->pax.has_size || r->pax.is_sparse)
        return err_set(e, EBADMSG, "a name or size without a member");
    return 0;
}

static int read_label(struct reader *r, uint64_t size, struct err *e)
{
    TRY(check_told(r, e));
    return read_extra(r, size, e);
}

static int read_one(struct reader *r, const struct tar_header *h, struct err *e)
{
    switch (h->type) {
    case 'L':
        return read_long_name(r, h->size, e);
    case 'K': /* the long target of a link */
        return read_extra(r, h->size, e);
    case 'V': /* the archive's own name */
        return read_label(r, h->size, e);
    case 'x':
    case 'X': /* Solaris */
        return read_pax(r, h->size, e);
    case 'g':
        return read_global(r, h->size, e);
    case '0':
    case '1':
    case '2':
    case '3':
    case '4':
    case '5':
    case '6':
    case '7':
    case 'S':
        return read_member(r, h, e);
    case 'M':
    case 'D':
    default:
        return err_set(
            e, ENOTSUP,
            "a member of type '%c' (volumes, dumps, unknown) is not supported",
            h->type >= ' ' && h->type <= '~' ? h->type : '?');
    }
}

static int read_all(struct reader *r, struct err *e)
{
    for (;;) {
        unsigned char block[TAR_BLOCK];
        struct tar_header h;
        uint64_t at = r->pos;
        size_t got = 0;
        int rc = take(r, sizeof block, block, &got, e);

        if (rc < 0)
            return rc;
        if (got == 0)
            return check_told(r, e);
        if (got < sizeof block)
            return err_set(e, EBADMSG, "byte %" PRIu64 ": it is cut off", at);
        rc = tar_header_parse(block, &h, e);
        if (rc == 0) {
            r->t->ended = true;
            return check_told(r, e);
        }
        if (rc < 0 || read_one(r, &h, e) < 0)
            return err_wrap(e, "byte %" PRIu64, at);
    }
}

int tar_read(tar_read_fn *fn, void *user, uint64_t size, struct tar **out,
             struct err *e)
{
    struct reader r = {.fn = fn, .user = user, .size = size};
    int rc;

    r.t = calloc(1, sizeof *r.t);
    if (!r.t)
        return err_nomem(e);
    r.t->names = arena_new(MAX_MEMORY);
    rc = r.t->names ? read_all(&r, e) : err_nomem(e);
    buf_release(&r.path);
    buf_release(&r.extra);
    if (rc == 0) {
        drop_doubles(r.t);
        rc = check_tree(r.t, e);
    }
    if (rc < 0)
        tar_free(r.t);
    else
        *out = r.t;
    return rc;
}
