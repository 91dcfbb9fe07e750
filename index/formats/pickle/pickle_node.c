/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle_node.c - nodes of an unpickled graph, and how they are looked at. */
#include "index/formats/pickle/pickle_priv.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/err.h"

/* Nodes count their bytes or items in 32 bits. */
static const uint64_t MAX_LEN = UINT32_MAX - 1;

static struct pn_bytes *as_bytes(struct pnode *n)
{
    return container_of(n, struct pn_bytes, node);
}

static struct pn_tuple *as_tuple(struct pnode *n)
{
    return container_of(n, struct pn_tuple, node);
}

static struct pn_table *as_table(struct pnode *n)
{
    return container_of(n, struct pn_table, node);
}

static struct pn_global *as_global(struct pnode *n)
{
    return container_of(n, struct pn_global, node);
}

static struct pn_object *as_object(struct pnode *n)
{
    return container_of(n, struct pn_object, node);
}

static struct pn_persid *as_persid(struct pnode *n)
{
    return container_of(n, struct pn_persid, node);
}

/* A node with one reference, or NULL with an error. */
static void *node_new(struct pickle *p, enum pv_kind kind, size_t size, struct err *e)
{
    struct pnode *n;

    if (p->nodes >= p->max_nodes) {
        err_set(e, EBADMSG, "more than %" PRIu64 " objects", p->max_nodes);
        return NULL;
    }
    n = pmem_alloc(&p->mem, size, e);
    if (!n)
        return NULL;
    p->nodes++;
    *n = (struct pnode){.kind = (uint8_t)kind};
    n->refs = 1;
    return n;
}

int pnode_bytes(struct pickle *p, enum pv_kind kind, uint64_t len,
                struct pn_bytes **out, struct err *e)
{
    if (len > MAX_LEN)
        return err_set(e, EBADMSG, "a string of %" PRIu64 " bytes", len);
    *out = node_new(p, kind, sizeof(struct pn_bytes) + len, e);
    if (!*out)
        return -e->code;
    (*out)->node.len = (uint32_t)len;
    return 0;
}

int pnode_tuple(struct pickle *p, const struct pv *items, size_t n, struct pv *out,
                struct err *e)
{
    struct pn_tuple *t;

    if (n > MAX_LEN / sizeof(struct pv))
        return err_set(e, EBADMSG, "a tuple of %zu items", n);
    t = node_new(p, PV_TUPLE, sizeof *t + n * sizeof *items, e);
    if (!t)
        return -e->code;
    t->node.len = (uint32_t)n;
    for (size_t i = 0; i < n; i++)
        t->item[i] = items[i];
    t->node.hash = phash_tuple(p, items, n, &t->node.flags);
    *out = pv_of_node(&t->node);
    return 0;
}

int pnode_table(struct pickle *p, enum pv_kind kind, struct pv *out, struct err *e)
{
    struct pn_table *t;

    t = node_new(p, kind, sizeof *t, e);
    if (!t)
        return -e->code;
    t->item = NULL;
    t->index = NULL;
    t->cap = t->index_cap = 0;
    *out = pv_of_node(&t->node);
    return 0;
}

int pnode_global(struct pickle *p, const char *module, size_t module_len,
                 const char *name, size_t name_len, struct pv *out, struct err *e)
{
    struct pn_global *g;

    if (memchr(module, '\0', module_len) || memchr(name, '\0', name_len))
        return err_set(e, EBADMSG, "a class name that holds NUL");
    g = node_new(p, PV_GLOBAL, sizeof *g + module_len + name_len + 2, e);
    if (!g)
        return -e->code;
    g->node.len = (uint32_t)module_len;
    g->name_len = (uint32_t)name_len;
    g->fold = 0;
    memcpy(g->text, module, module_len);
    g->text[module_len] = '\0';
    memcpy(g->text + module_len + 1, name, name_len);
    g->text[module_len + 1 + name_len] = '\0';
    *out = pv_of_node(&g->node);
    return 0;
}

int pnode_object(struct pickle *p, struct pnode *class, struct pnode *args,
                 struct pnode *kwargs, struct pv *out, struct err *e)
{
    struct pn_object *o;

    o = node_new(p, PV_OBJECT, sizeof *o, e);
    if (!o)
        return -e->code;
    o->class = class;
    o->args = args;
    o->kwargs = kwargs;
    o->list = o->dict = NULL;
    o->state = (struct pv){.kind = PV_NONE};
    *out = pv_of_node(&o->node);
    return 0;
}

int pnode_persid(struct pickle *p, struct pv arg, struct pv *out, struct err *e)
{
    struct pn_persid *n;

    n = node_new(p, PV_PERSID, sizeof *n, e);
    if (!n)
        return -e->code;
    n->arg = arg;
    *out = pv_of_node(&n->node);
    return 0;
}

/* Drops one reference; the last one puts the node on the list of those to free. */
static void drop(struct pnode *n, struct pnode **dead)
{
    if (n && --n->refs == 0) {
        n->next = *dead;
        *dead = n;
    }
}

static void drop_values(const struct pv *v, size_t n, struct pnode **dead)
{
    for (size_t i = 0; i < n; i++) {
        if (pv_has_node(v[i]))
            drop(v[i].node, dead);
    }
}

static void drop_object(const struct pn_object *o, struct pnode **dead)
{
    drop(o->class, dead);
    drop(o->args, dead);
    drop(o->kwargs, dead);
    drop(o->list, dead);
    drop(o->dict, dead);
    drop_values(&o->state, 1, dead);
}

static void free_table(struct pickle *p, struct pn_table *t, struct pnode **dead)
{
    size_t width = t->node.kind == PV_DICT ? 2 : 1;

    drop_values(t->item, t->node.len * width, dead);
    pmem_free(&p->mem, t->item, t->cap * width * sizeof(struct pv));
    pmem_free(&p->mem, t->index, t->index_cap * sizeof *t->index);
    pmem_free(&p->mem, t, sizeof *t);
}

static void free_node(struct pickle *p, struct pnode *n, struct pnode **dead)
{
    p->nodes--;
    switch ((enum pv_kind)n->kind) {
    case PV_STR:
    case PV_BYTES:
    case PV_BIGINT:
        pmem_free(&p->mem, n, sizeof(struct pn_bytes) + n->len);
        break;
    case PV_TUPLE:
        drop_values(as_tuple(n)->item, n->len, dead);
        pmem_free(&p->mem, n, sizeof(struct pn_tuple) + n->len * sizeof(struct pv));
        break;
    case PV_LIST:
    case PV_SET:
    case PV_FROZENSET:
    case PV_DICT:
        free_table(p, as_table(n), dead);
        break;
    case PV_GLOBAL:
        pmem_free(&p->mem, n,
                  sizeof(struct pn_global) + n->len + as_global(n)->name_len + 2);
        break;
    case PV_OBJECT:
        drop_object(as_object(n), dead);
        pmem_free(&p->mem, n, sizeof(struct pn_object));
        break;
    case PV_RECORD:
        pmem_free(&p->mem, n, sizeof(struct pn_object));
        break;
    case PV_PERSID:
        drop_values(&as_persid(n)->arg, 1, dead);
        pmem_free(&p->mem, n, sizeof(struct pn_persid));
        break;
    case PV_NONE:
    case PV_BOOL:
    case PV_INT:
    case PV_FLOAT:
        assert(false); /* immediate values have no node */
    }
}

static void free_list(struct pickle *p, struct pnode *dead)
{
    while (dead) {
        struct pnode *n = dead;

        dead = n->next;
        free_node(p, n, &dead);
    }
}

void pnode_release(struct pickle *p, struct pnode *n)
{
    n->next = NULL;
    free_list(p, n);
}

void pnode_fold(struct pickle *p, struct pnode *object, uint64_t record)
{
    struct pn_object parts = *as_object(object);
    struct pnode *dead = NULL;

    _Static_assert(sizeof(struct pn_record) <= sizeof(struct pn_object),
                   "in its place");
    object->kind = PV_RECORD; /* first: the parts may refer to the object itself */
    container_of(object, struct pn_record, node)->record = record;
    drop_object(&parts, &dead);
    free_list(p, dead);
}

void pickle_free(struct pickle *p)
{
    if (!p)
        return;
    pmem_release(&p->mem);
    free(p);
}

void pickle_freep(struct pickle **p)
{
    pickle_free(*p);
    *p = NULL;
}

struct pv pickle_root(const struct pickle *p)
{
    return pv_norm(p->root);
}

const char *pv_bytes(const struct pv *v, size_t *len)
{
    assert(v->kind == PV_STR || v->kind == PV_BYTES || v->kind == PV_BIGINT);
    *len = v->node->len;
    return as_bytes(v->node)->data;
}

bool pv_str_is(const struct pv *v, const char *text)
{
    size_t len = strlen(text);

    return v->kind == PV_STR && v->node->len == len &&
           memcmp(as_bytes(v->node)->data, text, len) == 0;
}

size_t pv_count(const struct pv *v)
{
    switch ((enum pv_kind)v->kind) {
    case PV_TUPLE:
    case PV_LIST:
    case PV_SET:
    case PV_FROZENSET:
    case PV_DICT:
        return v->node->len;
    case PV_NONE:
    case PV_BOOL:
    case PV_INT:
    case PV_BIGINT:
    case PV_FLOAT:
    case PV_STR:
    case PV_BYTES:
    case PV_GLOBAL:
    case PV_OBJECT:
    case PV_PERSID:
    case PV_RECORD:
        break;
    }
    return 0;
}

struct pv pv_at(const struct pv *v, size_t i)
{
    assert(v->kind != PV_DICT && i < pv_count(v));
    if (v->kind == PV_TUPLE)
        return pv_norm(as_tuple(v->node)->item[i]);
    return pv_norm(as_table(v->node)->item[i]);
}

struct pv pv_key_at(const struct pv *v, size_t i)
{
    assert(v->kind == PV_DICT && i < v->node->len);
    return pv_norm(as_table(v->node)->item[2 * i]);
}

struct pv pv_value_at(const struct pv *v, size_t i)
{
    assert(v->kind == PV_DICT && i < v->node->len);
    return pv_norm(as_table(v->node)->item[2 * i + 1]);
}

bool pv_dict_get(const struct pv *dict, const char *key, struct pv *out)
{
    if (dict->kind != PV_DICT)
        return false;
    for (size_t i = 0; i < dict->node->len; i++) {
        struct pv k = as_table(dict->node)->item[2 * i];

        if (pv_str_is(&k, key)) {
            *out = pv_value_at(dict, i);
            return true;
        }
    }
    return false;
}

bool pv_global(const struct pv *v, const char **module, const char **name)
{
    const struct pn_global *g;

    if (v->kind != PV_GLOBAL)
        return false;
    g = as_global(v->node);
    *module = g->text;
    *name = g->text + g->node.len + 1;
    return true;
}

bool pv_is(const struct pv *v, const char *module, const char *name)
{
    struct pv class = v->kind == PV_OBJECT ? pv_class(v) : *v;
    const char *m, *n;

    return pv_global(&class, &m, &n) && strcmp(m, module) == 0 && strcmp(n, name) == 0;
}

/* A part of an object, which may be absent. */
static struct pv part(struct pnode *n)
{
    if (!n)
        return (struct pv){.kind = PV_NONE};
    if (n->kind == PV_RECORD) /* a class that was an object and is folded */
        return pv_norm((struct pv){.kind = PV_OBJECT, .node = n});
    return pv_of_node(n);
}

struct pv pv_class(const struct pv *v)
{
    assert(v->kind == PV_OBJECT);
    return part(as_object(v->node)->class);
}

struct pv pv_args(const struct pv *v)
{
    assert(v->kind == PV_OBJECT);
    return part(as_object(v->node)->args);
}

struct pv pv_kwargs(const struct pv *v)
{
    assert(v->kind == PV_OBJECT);
    return part(as_object(v->node)->kwargs);
}

struct pv pv_state(const struct pv *v)
{
    assert(v->kind == PV_OBJECT);
    return pv_norm(as_object(v->node)->state);
}

struct pv pv_list_items(const struct pv *v)
{
    assert(v->kind == PV_OBJECT);
    return part(as_object(v->node)->list);
}

struct pv pv_dict_items(const struct pv *v)
{
    assert(v->kind == PV_OBJECT);
    return part(as_object(v->node)->dict);
}

struct pv pv_persid(const struct pv *v)
{
    assert(v->kind == PV_PERSID);
    return pv_norm(as_persid(v->node)->arg);
}

bool pv_u64(const struct pv *v, uint64_t *out)
{
    if (v->kind != PV_INT || v->i < 0)
        return false;
    *out = (uint64_t)v->i;
    return true;
}

uintptr_t pv_identity(const struct pv *v)
{
    return pv_has_node(*v) ? (uintptr_t)v->node : 0;
}
