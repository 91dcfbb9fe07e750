/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_legacy.c - the five pickles of an old torch.save, and its storages. */
#include "index/formats/torch/torch_legacy.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/keyset.h"
#include "base/vec.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_zip.h"
#include "remote/source.h"

enum {
    PROTOCOL = 1001,
    COUNT_BYTES = 8, /* before the elements of each storage */
    COUNTS_AT_ONCE = 1024
};

/* 0x1950a86a20f9469cfc6c, as the unpickler gives it and as protocols spell it. */
static const char magic_digits[] = "119547037146038801333356";
static const unsigned char magic_long1[] = {0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46,
                                            0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19};
static const char magic_text[] = "L119547037146038801333356L\n";

struct storage {
    const char *key; /* in the graph */
    size_t key_len;
    unsigned size; /* bytes of what it counts */
    uint64_t count;
    uint64_t data; /* byte of the first element, once it is known */
    bool found, clash;
};

struct torch_legacy {
    struct storage *storage; /* by key */
    size_t count, cap;
};

bool torch_legacy_magic(const void *head, size_t len)
{
    const unsigned char *p = head;

    if (len >= 2 && p[0] == 0x80) /* PROTO */
        p += 2, len -= 2;
    if (len >= 9 && p[0] == 0x95) /* FRAME, from protocol 4 on */
        p += 9, len -= 9;
    return (len >= sizeof magic_long1 &&
            memcmp(p, magic_long1, sizeof magic_long1) == 0) ||
           (len >= sizeof magic_text - 1 &&
            memcmp(p, magic_text, sizeof magic_text - 1) == 0);
}

/* ---- the pickles ---- */

struct reader {
    struct source *src;
    uint64_t at; /* of the next pickle */
};

static int next_pickle(struct reader *r, const char *what, struct pickle **out,
                       struct err *e)
{
    uint64_t used = 0;

    if (pickle_load(r->src, r->at, r->src->size - r->at, NULL, out, &used, e) < 0)
        return err_wrap(e, "%s, %s at byte %" PRIu64, r->src->name, what, r->at);
    r->at += used;
    return 0;
}

static int not_torch(const struct source *s, const char *why, struct err *e)
{
    return err_set(e, EBADMSG, "%s: %s", s->name, why);
}

static int read_magic(struct reader *r, struct err *e)
{
    unsigned char head[TORCH_HEAD];
    size_t len = (size_t)MIN(r->src->size, (uint64_t)sizeof head);

    TRY(source_read(r->src, 0, len, head, e));
    switch (torch_sniff(head, len)) {
    case TORCH_LEGACY:
        return 0;
    case TORCH_TAR:
        err_set(e, ENOTSUP,
                "%s: the tar format of PyTorch before 0.1.10 is not supported",
                r->src->name);
        return err_hint(e, "load it with an old PyTorch and save it again");
    case TORCH_NOT:
    case TORCH_ZIP:
    case TORCH_MAYBE:
        break;
    }
    return err_set(e, ENOTSUP,
                   "%s: neither a zip nor the legacy format of torch.save: it does not "
                   "begin with their magic numbers",
                   r->src->name);
}

static int check_magic(struct reader *r, struct err *e)
{
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    const char *digits;
    struct pv v;
    size_t len;

    TRY(next_pickle(r, "magic number", &p, e));
    v = pickle_root(p);
    if (v.kind != PV_BIGINT)
        return not_torch(r->src, "no magic number", e);
    digits = pv_bytes(&v, &len);
    if (len != strlen(magic_digits) || memcmp(digits, magic_digits, len) != 0)
        return not_torch(r->src, "another magic number", e);
    return 0;
}

static int check_protocol(struct reader *r, struct err *e)
{
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    uint64_t version;
    struct pv v;

    TRY(next_pickle(r, "protocol version", &p, e));
    v = pickle_root(p);
    if (!pv_u64(&v, &version))
        return not_torch(r->src, "a protocol version that is no number", e);
    if (version != PROTOCOL)
        return err_set(e, ENOTSUP,
                       "%s: protocol version %" PRIu64 ", only %d is supported",
                       r->src->name, version, PROTOCOL);
    return 0;
}

static int read_system(struct reader *r, bool *big_endian, struct err *e)
{
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    struct pv v, little;

    TRY(next_pickle(r, "system information", &p, e));
    v = pickle_root(p);
    if (v.kind != PV_DICT || !pv_dict_get(&v, "little_endian", &little) ||
        little.kind != PV_BOOL)
        return not_torch(r->src, "no system information", e);
    *big_endian = !little.b;
    return 0;
}

/* ---- the storages that the graph names ---- */

/* A walk over everything that the graph holds, each node once. */
struct search {
    struct torch_legacy *t;
    struct pv *stack;
    size_t count, cap;
    struct keyset seen;
    struct keyset views; /* the names of views, and what was told of them */
};

static void search_release(struct search *w)
{
    free(w->stack);
    keyset_release(&w->seen);
    keyset_release(&w->views);
}

static int push(struct search *w, struct pv v, struct err *e)
{
    uintptr_t id = pv_identity(&v);
    int rc;

    if (!id || v.kind == PV_STR || v.kind == PV_BYTES || v.kind == PV_BIGINT ||
        v.kind == PV_GLOBAL)
        return 0;
    rc = keyset_add(&w->seen, &id, sizeof id);
    if (rc <= 0)
        return rc < 0 ? err_nomem(e) : 0;
    if (!VEC_ROOM(w->stack, w->count, w->cap))
        return err_nomem(e);
    w->stack[w->count++] = v;
    return 0;
}

static int push_object(struct search *w, const struct pv *v, struct err *e)
{
    const struct pv parts[] = {pv_class(v), pv_args(v),       pv_kwargs(v),
                               pv_state(v), pv_list_items(v), pv_dict_items(v)};

    for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
        TRY(push(w, parts[i], e));
    return 0;
}

static int push_children(struct search *w, const struct pv *v, struct err *e)
{
    if (v->kind == PV_OBJECT)
        return push_object(w, v, e);
    if (v->kind == PV_PERSID)
        return push(w, pv_persid(v), e);
    for (size_t i = 0; i < pv_count(v); i++) {
        if (v->kind == PV_DICT) {
            TRY(push(w, pv_key_at(v, i), e));
            TRY(push(w, pv_value_at(v, i), e));
        }
        if (v->kind != PV_DICT)
            TRY(push(w, pv_at(v, i), e));
    }
    return 0;
}

/* Other persistent ids (the source of modules) name no storage. */
static int note_storage(struct torch_legacy *t, const struct pv *v, struct err *e)
{
    struct pv id = pv_persid(v), tag, class, key, count;
    struct torch_class c;
    struct storage s = {0};

    if (id.kind != PV_TUPLE || pv_count(&id) < 5)
        return 0;
    tag = pv_at(&id, 0);
    class = pv_at(&id, 1);
    key = pv_at(&id, 2);
    count = pv_at(&id, 4);
    if (!pv_str_is(&tag, "storage") || key.kind != PV_STR ||
        !torch_storage_class(&class, &c) || !pv_u64(&count, &s.count))
        return 0;
    s.key = pv_bytes(&key, &s.key_len);
    s.size = c.size;
    if (!VEC_ROOM(t->storage, t->count, t->cap))
        return err_nomem(e);
    t->storage[t->count++] = s;
    return 0;
}

static int compare_keys(const void *a, const void *b)
{
    const struct storage *x = a, *y = b;
    int order = memcmp(x->key, y->key, MIN(x->key_len, y->key_len));

    return order ? order : (x->key_len > y->key_len) - (x->key_len < y->key_len);
}

/* 1: new, 0: it was there. */
static int add_view(struct search *w, const struct buf *text, struct err *e)
{
    int rc = buf_failed(text) ? -ENOMEM : keyset_add(&w->views, text->data, text->len);

    return rc < 0 ? err_nomem(e) : rc;
}

static void add_text(struct buf *to, const struct pv *v)
{
    size_t len;
    const char *text = pv_bytes(v, &len);

    buf_addf(to, "%zu ", len);
    buf_add(to, text, len);
}

/*
 * ('storage', class, key, location, count, (name, offset, count)): torch makes a view when
 * its name comes first, and takes it for all others of that name.
 */
static int note_view(struct search *w, const struct pv *v, struct err *e)
{
    CLEANUP(buf_release) struct buf name = {0}, all = {0};
    struct pv id = pv_persid(v), view, part[4];
    int fresh, other;

    if (id.kind != PV_TUPLE || pv_count(&id) < 6)
        return 0;
    view = pv_at(&id, 5);
    if (view.kind != PV_TUPLE || pv_count(&view) != 3)
        return 0;
    for (size_t i = 0; i < 3; i++)
        part[i] = pv_at(&view, i);
    part[3] = pv_at(&id, 2);
    if (part[0].kind != PV_STR || part[1].kind != PV_INT || part[2].kind != PV_INT ||
        part[3].kind != PV_STR)
        return err_set(e, EBADMSG, "a view of a storage without a name");
    add_text(&name, &part[0]);
    add_text(&all, &part[0]);
    add_text(&all, &part[3]);
    buf_addf(&all, "%" PRId64 " %" PRId64, part[1].i, part[2].i);
    fresh = add_view(w, &name, e);
    other = fresh < 0 ? fresh : add_view(w, &all, e);
    if (other > 0 && !fresh)
        return err_set(e, EBADMSG, "two views of storages with one name");
    return MIN(other, 0);
}

/* One of each key; ids that do not agree about it make it worthless. */
static void merge_storages(struct torch_legacy *t)
{
    size_t n = 0;

    if (t->count > 0)
        qsort(t->storage, t->count, sizeof *t->storage, compare_keys);
    for (size_t i = 0; i < t->count; i++) {
        struct storage *last = n > 0 ? &t->storage[n - 1] : NULL, *s = &t->storage[i];

        if (last && compare_keys(last, s) == 0)
            last->clash =
                last->clash || last->size != s->size || last->count != s->count;
        else
            t->storage[n++] = *s;
    }
    t->count = n;
}

static int find_storages(struct torch_legacy *t, const struct pickle *graph,
                         struct err *e)
{
    CLEANUP(search_release) struct search w = {.t = t};

    TRY(push(&w, pickle_root(graph), e));
    while (w.count > 0) {
        struct pv v = w.stack[--w.count];

        if (v.kind == PV_PERSID) {
            TRY(note_storage(t, &v, e));
            TRY(note_view(&w, &v, e));
        }
        TRY(push_children(&w, &v, e));
    }
    merge_storages(t);
    return 0;
}

static struct storage *find_key(const struct torch_legacy *t, const struct pv *key)
{
    struct storage want = {0};

    if (key->kind != PV_STR || t->count == 0)
        return NULL;
    want.key = pv_bytes(key, &want.key_len);
    return bsearch(&want, t->storage, t->count, sizeof want, compare_keys);
}

/* ---- where they are ---- */

/* Storages in the order of the file. */
struct order {
    struct storage **s;
    size_t count;
};

/* Without a storage's size nothing behind it could be found: then the file is refused. */
static int read_order(const struct torch_legacy *t, const struct source *src,
                      const struct pv *keys, struct order *out, struct err *e)
{
    size_t n = pv_count(keys);

    if (keys->kind != PV_LIST)
        return not_torch(src, "no list of storages", e);
    out->s = calloc(n + 1, sizeof *out->s);
    if (!out->s)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++) {
        struct pv key = pv_at(keys, i);
        struct storage *s = find_key(t, &key);

        if (!s)
            return not_torch(src, "a storage that no tensor uses, of unknown size", e);
        if (s->clash)
            return not_torch(src, "a storage of two types or sizes", e);
        if (s->found)
            return not_torch(src, "a storage twice", e);
        s->found = true;
        out->s[out->count++] = s;
    }
    for (size_t i = 0; i < t->count; i++)
        t->storage[i].found = false; /* until its count was seen */
    return 0;
}

/* Puts storages one behind the other; what does not fit the file is cut off the order. */
static void lay_out(struct order *o, uint64_t at, uint64_t size)
{
    for (size_t i = 0; i < o->count; i++) {
        struct storage *s = o->s[i];
        uint64_t bytes;

        if (mul_overflows(s->count, s->size, &bytes) ||
            range_outside(at, COUNT_BYTES, size) ||
            range_outside(at + COUNT_BYTES, bytes, size)) {
            o->count = i;
            return;
        }
        s->data = at + COUNT_BYTES;
        at = s->data + bytes;
    }
}

/* True until a count is not what the object says: nothing behind it is where it seems. */
static int check_counts(struct source *src, struct storage *const *s, size_t n,
                        bool *right, struct err *e)
{
    unsigned char count[COUNTS_AT_ONCE][COUNT_BYTES];
    struct source_range r[COUNTS_AT_ONCE];

    for (size_t i = 0; i < n; i++)
        r[i] = (struct source_range){s[i]->data - COUNT_BYTES, COUNT_BYTES, count[i]};
    TRY(source_read_many(src, r, n, e));
    for (size_t i = 0; i < n && *right; i++) {
        *right = get_le64(count[i]) == s[i]->count;
        s[i]->found = *right;
    }
    return 0;
}

static int place_storages(struct torch_legacy *t, struct reader *r, struct err *e)
{
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    struct order o = {0};
    bool right = true;
    struct pv keys;
    int rc;

    TRY(next_pickle(r, "list of storages", &p, e));
    keys = pickle_root(p);
    rc = read_order(t, r->src, &keys, &o, e);
    if (rc == 0)
        lay_out(&o, r->at, r->src->size);
    for (size_t i = 0; rc == 0 && right && i < o.count; i += COUNTS_AT_ONCE)
        rc = check_counts(r->src, o.s + i, MIN(o.count - i, (size_t)COUNTS_AT_ONCE),
                          &right, e);
    free(o.s);
    return rc;
}

static void legacy_freep(struct torch_legacy **t)
{
    torch_legacy_free(*t);
}

int torch_legacy_open(struct source *s, struct torch_legacy **out,
                      struct pickle **graph, uint64_t *len, bool *big_endian,
                      struct err *e)
{
    CLEANUP(legacy_freep) struct torch_legacy *t = calloc(1, sizeof *t);
    CLEANUP(pickle_freep) struct pickle *object = NULL;
    struct reader r = {.src = s};

    if (!t)
        return err_nomem(e);
    TRY(read_magic(&r, e));
    TRY(check_magic(&r, e));
    TRY(check_protocol(&r, e));
    TRY(read_system(&r, big_endian, e));
    *len = r.at;
    TRY(next_pickle(&r, "object", &object, e));
    *len = r.at - *len;
    TRY(find_storages(t, object, e));
    TRY(place_storages(t, &r, e));
    *graph = steal(&object);
    *out = steal(&t);
    return 0;
}

void torch_legacy_free(struct torch_legacy *t)
{
    if (!t)
        return;
    free(t->storage);
    free(t);
}

/* ---- one storage ---- */

/* (key, offset, count): files of before 1.0 have typed parts of a storage. */
static int apply_view(const struct storage *s, const struct pv *view, uint64_t *data,
                      uint64_t *bytes, struct err *e)
{
    struct pv offset, count;
    uint64_t first, n;

    if (view->kind == PV_NONE)
        return 0;
    if (view->kind != PV_TUPLE || pv_count(view) != 3)
        return err_set(e, EBADMSG, "a view of a storage that is no triple");
    offset = pv_at(view, 1);
    count = pv_at(view, 2);
    if (!pv_u64(&offset, &first) || !pv_u64(&count, &n) ||
        range_outside(first, n, s->count))
        return err_set(e, EBADMSG, "a view that reaches past its storage");
    *data += first * s->size;
    *bytes = n * s->size;
    return 0;
}

int torch_legacy_find(const struct torch_legacy *t, const struct pv *id, uint64_t *data,
                      uint64_t *bytes, struct err *e)
{
    struct pv key = pv_at(id, 2), view = {.kind = PV_NONE};
    const struct storage *s = find_key(t, &key);

    if (!s)
        return err_set(e, EBADMSG, "its storage is not in the file");
    if (!s->found)
        return err_set(e, EBADMSG,
                       "the file ends before its storage, or is damaged before it");
    *data = s->data;
    *bytes = s->count * s->size; /* within the file: no overflow */
    if (pv_count(id) > 5)
        view = pv_at(id, 5);
    return apply_view(s, &view, data, bytes, e);
}
