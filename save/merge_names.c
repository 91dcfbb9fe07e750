/* SPDX-License-Identifier: MIT */
/* save/merge_names.c - what tensors are called, in all the ways in which a file may name them. */
#include <string.h>
#include <xxhash.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/names.h"
#include "save/merge_priv.h"

/* The hash of a text of some kind, and what it stands for. */
struct name_slot {
    XXH128_hash_t hash;
    size_t entry; /* and one more; 0: free */
};

static XXH128_hash_t hash_of(enum tag tag, const char *text, size_t len)
{
    return XXH3_128bits_withSeed(text, len, (uint64_t)tag);
}

static struct name_slot *slot_at(const struct merge *m, XXH128_hash_t h)
{
    size_t i = h.low64 & (m->slots - 1);

    while (m->slot[i].entry && !XXH128_isEqual(m->slot[i].hash, h))
        i = (i + 1) & (m->slots - 1);
    return &m->slot[i];
}

static int names_grow(struct merge *m, struct err *e)
{
    struct name_slot *was = m->slot;
    size_t old = m->slots;

    m->slots = old ? 2 * old : 1024;
    m->slot = calloc(m->slots, sizeof *m->slot);
    if (!m->slot) {
        m->slot = was;
        m->slots = old;
        return err_nomem(e);
    }
    for (size_t i = 0; i < old; i++)
        if (was[i].entry)
            *slot_at(m, was[i].hash) = was[i];
    free(was);
    return 0;
}

size_t merge_find(const struct merge *m, enum tag tag, const char *text, size_t len)
{
    const struct name_slot *s;

    if (!m->slots)
        return NOT_THERE;
    s = slot_at(m, hash_of(tag, text, len));
    return s->entry ? s->entry - 1 : NOT_THERE;
}

/* The first one to have a name keeps it. */
int merge_name(struct merge *m, enum tag tag, const char *text, size_t len,
               size_t entry, struct err *e)
{
    XXH128_hash_t h = hash_of(tag, text, len);
    struct name_slot *s;

    if (2 * (m->names + 1) > m->slots)
        TRY(names_grow(m, e));
    s = slot_at(m, h);
    if (s->entry) {
        m->meet |= tag == TAG_MODEL && s->entry != entry + 1;
        return 0;
    }
    *s = (struct name_slot){.hash = h, .entry = entry + 1};
    m->names++;
    return 0;
}

/* Names from here on may be cut, or be in one directory what they are not in another. */
enum { LONG_NAME = NAME_MAX_BYTES - 16 };

static const char npy_end[] = ".npy";

/* Its file in tree/, by parts, without the end. */
static int tree_name(const struct layout_tensor *t, struct buf *out)
{
    const char *part;
    size_t pos = 0, len;
    int ret = 0;

    while (ret == 0 && key_part(t->key, t->key_len, &pos, &part, &len)) {
        bool leaf = part + len == t->key + t->key_len;

        ret = name_of_part(part, len, leaf, out);
        if (!leaf)
            buf_addc(out, '/');
    }
    return ret == 0 ? buf_failed(out) : ret;
}

/* A long key is cut elsewhere where `.npy` has to follow. */
static int name_long(struct merge *m, size_t i, struct err *e)
{
    CLEANUP(buf_release) struct buf file = {0}, tree = {0};
    const struct layout_tensor *t = &m->entry[i].t;

    if (name_of_key(t->key, t->key_len, npy_end, &file) < 0 || tree_name(t, &tree) < 0)
        return err_nomem(e);
    TRY(merge_name(m, TAG_FILE, file.data, file.len - strlen(npy_end), i, e));
    return merge_name(m, TAG_TREE, tree.data, tree.len - strlen(npy_end), i, e);
}

/* All that this tensor is called: its key, in its view, its files in raw/ and tensors/. */
int merge_name_entry(struct merge *m, size_t i, struct err *e)
{
    CLEANUP(buf_release) struct buf file = {0};
    const struct layout_tensor *t = &m->entry[i].t;
    int ret = merge_name(m, TAG_KEY, t->key, t->key_len, i, e);

    if (ret == 0 && t->role == ROLE_MODEL) {
        size_t len;
        const char *own = layout_own_name(t, &len);

        ret = merge_name(m, TAG_MODEL, own, len, i, e);
    }
    if (ret == 0 && t->role == ROLE_OPTIMIZER)
        ret = merge_name(m, TAG_OPTIMIZER, t->key, t->key_len, i, e);
    if (ret == 0 && name_of_key(t->key, t->key_len, "", &file) < 0)
        ret = err_nomem(e);
    if (ret == 0)
        ret = merge_name(m, TAG_FILE, file.data, file.len, i, e);
    return ret == 0 && file.len > LONG_NAME ? name_long(m, i, e) : ret;
}

int merge_entry(struct merge *m, const struct entry *x, size_t *out, struct err *e)
{
    struct entry *grown;

    if (!VEC_ROOM(m->entry, m->entries, m->cap))
        return err_nomem(e);
    grown = &m->entry[m->entries];
    *grown = *x;
    grown->t.key = arena_memdup(m->arena, x->t.key, x->t.key_len);
    if (!grown->t.key)
        return err_nomem(e);
    *out = m->entries++;
    return merge_name_entry(m, *out, e);
}
