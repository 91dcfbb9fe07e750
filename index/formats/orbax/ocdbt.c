/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/ocdbt.c - walks the B+tree of an OCDBT store's newest version. */
#include "index/formats/orbax/ocdbt.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/keyset.h"
#include "base/vec.h"
#include "index/formats/orbax/ocdbt_node.h"

enum {
    MAX_DEPTH = 255 + 1, /* heights have one byte */
    MAX_VALUES = 10 * 1000 * 1000,
    KEPT_MEMORY = 1 << 30,   /* keys and literal values */
    NODE_MEMORY = 512 << 20, /* of one node: 64 MiB decoded, its keys unfolded */
    /* What was decoded: 1 GiB is 10 million keys of 100 bytes. */
    MAX_NODES = 2 * 1000 * 1000,
    MAX_BYTES = 1 << 30,
};

struct ocdbt {
    struct arena *kept;
    struct ocdbt_value *value;
    size_t count, cap;
};

/* A node on the way from the root to where the walk is. */
struct frame {
    struct arena *memory;
    struct ocdbt_node node;
    char *prefix; /* of all its keys */
    size_t prefix_len;
    size_t next; /* the entry to go on with */
    uint32_t file;
    uint64_t offset, length;
};

struct walk {
    const struct ocdbt_io *io;
    struct ocdbt *o;
    struct frame *stack; /* MAX_DEPTH */
    unsigned depth;
    struct buf key;  /* the key at hand */
    struct buf last; /* the last value's */
    bool any;
    uint64_t nodes, bytes;
    uint64_t stored, unfolded; /* bytes of nodes in their files; of all values' keys */
    struct keyset seen;        /* nodes, by where they begin */
};

/* A node to be read, and what its parent says of it. */
struct child {
    const struct ocdbt_file *file;
    uint64_t offset, length;
    unsigned height;
    const char *prefix, *min; /* of its keys; the least one that it may hold */
    size_t prefix_len, min_len;
};

static int compare_keys(const char *a, size_t a_len, const char *b, size_t b_len)
{
    size_t n = MIN(a_len, b_len);
    int order = n > 0 ? memcmp(a, b, n) : 0;

    return order ? order : (a_len > b_len) - (a_len < b_len);
}

static void frame_release(struct frame *f)
{
    arena_freep(&f->memory);
    *f = (struct frame){0};
}

/* The prefix and an entry's key, in w->key. */
static int whole_key(struct walk *w, const struct frame *f,
                     const struct ocdbt_entry *entry, struct err *e)
{
    buf_clear(&w->key);
    buf_add(&w->key, f->prefix, f->prefix_len);
    buf_add(&w->key, entry->key, entry->key_len);
    if (buf_failed(&w->key))
        return err_nomem(e);
    if (w->key.len > OCDBT_MAX_KEY)
        return err_set(e, EBADMSG, "a key of %zu bytes", w->key.len);
    return 0;
}

/* ---- nodes ---- */

static int check_node(struct walk *w, const struct frame *f, const struct child *c,
                      struct err *e)
{
    if (f->node.height != c->height)
        return err_set(e, EBADMSG, "its height is %u, its parent says %u",
                       f->node.height, c->height);
    TRY(whole_key(w, f, &f->node.entry[0], e));
    if (compare_keys(w->key.data, w->key.len, c->min, c->min_len) < 0)
        return err_set(e, EBADMSG, "its first key is before the one of its parent");
    return 0;
}

static int spend(struct walk *w, uint64_t stored, uint64_t bytes, struct err *e)
{
    w->nodes++;
    w->bytes += bytes;
    w->stored += stored;
    if (w->nodes > MAX_NODES || w->bytes > MAX_BYTES)
        return err_set(e, EFBIG, "a tree of more than %d nodes or %d bytes of them",
                       MAX_NODES, MAX_BYTES);
    return 0;
}

static int load_node(struct walk *w, const struct child *c, struct frame *f,
                     struct err *e)
{
    unsigned char *data;

    if (c->length > OCDBT_MAX_PLAIN)
        return err_set(e, EBADMSG, "a node of %" PRIu64 " bytes, at most %d are read",
                       c->length, OCDBT_MAX_PLAIN);
    f->memory = arena_new(NODE_MEMORY);
    data = f->memory ? arena_alloc(f->memory, (size_t)c->length + 1) : NULL;
    f->prefix = data ? arena_memdup(f->memory, c->prefix, c->prefix_len) : NULL;
    if (!f->prefix)
        return err_nomem(e);
    f->prefix_len = c->prefix_len;
    f->offset = c->offset;
    f->length = c->length;
    TRY(w->io->read(w->io->user, f->file, c->offset, (size_t)c->length, data, e));
    TRY(ocdbt_node_parse(f->memory, data, (size_t)c->length, c->file, &f->node, e));
    TRY(spend(w, c->length, arena_used(f->memory), e));
    return check_node(w, f, c, e);
}

/*
 * A node has one place in a version's tree. Few that lead to one another could stand for
 * any number of keys.
 */
static int check_new(struct walk *w, const struct frame *f, const struct child *c,
                     struct err *e)
{
    const uint64_t place[2] = {f->file, c->offset};
    int rc = keyset_add(&w->seen, place, sizeof place);

    if (rc < 0)
        return err_nomem(e);
    return rc == 0 ? err_set(e, EBADMSG, "two places of the tree lead to it") : 0;
}

/* Reads the node and puts it on the stack; its parent stays below it. */
static int push(struct walk *w, const struct child *c, struct err *e)
{
    struct frame *f = &w->stack[w->depth];

    if (w->depth == MAX_DEPTH)
        return err_set(e, EBADMSG, "a tree of more than %d levels", MAX_DEPTH);
    *f = (struct frame){0};
    w->depth++; /* also what fails half-way is released */
    if (w->io->file(w->io->user, c->file->path, c->file->len, &f->file, e) < 0 ||
        check_new(w, f, c, e) < 0 || load_node(w, c, f, e) < 0)
        return err_wrap(
            e, "%.200s, bytes %" PRIu64 "+%" PRIu64 " (B+tree node of height %u)",
            c->file->path, c->offset, c->length, c->height);
    return 0;
}

/* ---- values ---- */

static struct ocdbt_value *add_value(struct ocdbt *o)
{
    if (!VEC_ROOM(o->value, o->count, o->cap))
        return NULL;
    return &o->value[o->count++];
}

static int place_value(struct walk *w, const struct frame *f,
                       const struct ocdbt_entry *entry, struct ocdbt_value *out,
                       struct err *e)
{
    const struct ocdbt_place *p = &entry->place;

    if (!entry->is_inline) {
        const struct ocdbt_file *file = &f->node.file[p->file];

        out->offset = p->offset;
        out->length = p->length;
        return w->io->file(w->io->user, file->path, file->len, &out->file, e);
    }
    out->file = f->file;
    out->offset = f->offset;
    out->length = f->length;
    if (f->node.plain) {
        out->literal_len = (uint32_t)p->length;
        out->literal =
            arena_memdup(w->o->kept, f->node.plain + p->offset, (size_t)p->length);
        return out->literal ? 0 : err_nomem(e);
    }
    out->offset += p->offset; /* the node is stored as it is */
    out->length = p->length;
    return 0;
}

static int keep_value(struct walk *w, const struct frame *f,
                      const struct ocdbt_entry *entry, struct err *e)
{
    struct ocdbt_value *v;

    TRY(whole_key(w, f, entry, e));
    if (w->any && compare_keys(w->last.data, w->last.len, w->key.data, w->key.len) >= 0)
        return err_set(e, EBADMSG, "keys of two nodes are out of order");
    if (w->o->count == MAX_VALUES)
        return err_set(e, EFBIG, "more than %d keys", MAX_VALUES);
    w->unfolded += w->key.len; /* with what the nodes above share */
    if (w->unfolded > ocdbt_unfolded_max(w->stored))
        return err_set(e, EFBIG, "keys are too long for the size of the tree");
    v = add_value(w->o);
    if (!v)
        return err_nomem(e);
    *v = (struct ocdbt_value){.key_len = (uint32_t)w->key.len};
    v->key = arena_memdup(w->o->kept, w->key.data, w->key.len);
    if (!v->key)
        return err_nomem(e);
    buf_clear(&w->last);
    w->any = true;
    if (buf_add(&w->last, w->key.data, w->key.len) < 0)
        return err_nomem(e);
    return place_value(w, f, entry, v, e);
}

static int keep_values(struct walk *w, const struct frame *f, struct err *e)
{
    for (size_t i = 0; i < f->node.entries; i++)
        if (keep_value(w, f, &f->node.entry[i], e) < 0)
            return err_wrap(e, "B+tree node at byte %" PRIu64, f->offset);
    return 0;
}

/* ---- the walk ---- */

/* Down to the next child of an inner node. */
static int descend(struct walk *w, struct frame *f, struct err *e)
{
    const struct ocdbt_entry *entry = &f->node.entry[f->next++];
    CLEANUP_FREE char *key = NULL;
    struct child c = {
        .file = &f->node.file[entry->place.file],
        .offset = entry->place.offset,
        .length = entry->place.length,
        .height = f->node.height - 1,
        .prefix_len = f->prefix_len + entry->child_prefix,
    };

    TRY(whole_key(w, f, entry, e));
    if (w->any && compare_keys(w->last.data, w->last.len, w->key.data, w->key.len) >= 0)
        return err_set(e, EBADMSG, "keys of a node go past those of its parent");
    c.min_len = w->key.len;
    key = malloc(c.min_len + 1);
    if (!key)
        return err_nomem(e);
    memcpy(key, w->key.data, c.min_len);
    c.prefix = c.min = key;
    return push(w, &c, e);
}

static int step(struct walk *w, struct err *e)
{
    struct frame *f = &w->stack[w->depth - 1];

    if (f->node.height > 0 && f->next < f->node.entries)
        return descend(w, f, e);
    if (f->node.height == 0)
        TRY(keep_values(w, f, e));
    frame_release(f);
    w->depth--;
    return 0;
}

static int walk_tree(struct walk *w, const struct ocdbt_manifest *m, struct err *e)
{
    const struct child root = {
        .file = &m->file,
        .offset = m->offset,
        .length = m->length,
        .height = m->height,
        .prefix = "",
        .min = "",
    };
    int rc = push(w, &root, e);

    while (rc == 0 && w->depth > 0)
        rc = step(w, e);
    while (w->depth > 0)
        frame_release(&w->stack[--w->depth]);
    return rc;
}

int ocdbt_open(const struct ocdbt_manifest *m, const struct ocdbt_io *io,
               struct ocdbt **out, struct err *e)
{
    CLEANUP(ocdbt_freep) struct ocdbt *o = calloc(1, sizeof *o);
    struct walk w = {.io = io, .o = o, .stack = calloc(MAX_DEPTH, sizeof *w.stack)};
    int rc = 0;

    if (!o || !w.stack || !(o->kept = arena_new(KEPT_MEMORY)) ||
        buf_adds(&w.key, "") < 0 || buf_adds(&w.last, "") < 0)
        rc = err_nomem(e);
    else if (!m->empty)
        rc = walk_tree(&w, m, e);
    buf_release(&w.key);
    buf_release(&w.last);
    keyset_release(&w.seen);
    free(w.stack);
    if (rc == 0)
        *out = steal(&o);
    return rc;
}

void ocdbt_free(struct ocdbt *o)
{
    if (!o)
        return;
    arena_freep(&o->kept);
    free(o->value);
    free(o);
}

void ocdbt_freep(struct ocdbt **o)
{
    ocdbt_free(*o);
}

size_t ocdbt_count(const struct ocdbt *o)
{
    return o->count;
}

const struct ocdbt_value *ocdbt_at(const struct ocdbt *o, size_t i)
{
    return &o->value[i];
}

size_t ocdbt_lower_bound(const struct ocdbt *o, const char *key, size_t len)
{
    size_t low = 0, high = o->count;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (compare_keys(o->value[mid].key, o->value[mid].key_len, key, len) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}
