/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle.c - the machine of the data-only unpickler. */
#include "index/formats/pickle/pickle.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include "base/err.h"
#include "base/interrupt.h"
#include "index/formats/pickle/pickle_priv.h"
#include "remote/source.h"

/* SECURITY: a file within these is read in seconds; real ones stay far below. */
static const struct pickle_limits defaults = {
    .opcodes = 50000000,
    .nodes = 20000000,
    .bytes = 1 << 30,
    .depth = 1000,
    .name = 64 << 10,
};

enum {
    HIGHEST_PROTOCOL = 5,
    FIRST_STACK = 64,
    LOOK_EVERY = 1 << 16, /* opcodes, whether time is up */
    MAX_TAKEN = 16,       /* tuples in one another; real calls have three */
};

struct machine {
    struct pickle *p;
    struct pinput in;
    struct pickle_options opt; /* limits filled in */
    struct pmemo memo;
    struct pv *stack;
    size_t depth, stack_cap;
    size_t *mark; /* stack depths */
    size_t nmarks;
    struct buf line, text; /* arguments that are text */
    struct pop op;
    uint64_t pairs; /* that calls were looked through for: they count as opcodes */
    bool stopped;
    struct err *e;
};

/* Stack. What lies under the topmost mark is out of reach. */

static size_t floor_of(const struct machine *m)
{
    return m->nmarks > 0 ? m->mark[m->nmarks - 1] : 0;
}

static int underflow(struct machine *m)
{
    return err_set(m->e, EBADMSG, "the stack has too few values for opcode 0x%02x",
                   m->op.code);
}

/* The n topmost values, or NULL with an error. */
static struct pv *top(struct machine *m, size_t n)
{
    if (m->depth - floor_of(m) >= n)
        return m->stack + m->depth - n;
    underflow(m);
    return NULL;
}

static int push(struct machine *m, struct pv v)
{
    if (m->depth == m->stack_cap) {
        size_t cap = m->stack_cap * 2;
        struct pv *stack;

        if (cap * sizeof *stack > m->opt.limits.bytes)
            return err_set(m->e, EBADMSG, "a stack of over %zu values", m->depth);
        stack = realloc(m->stack, cap * sizeof *stack);
        if (!stack)
            return err_nomem(m->e);
        m->stack = stack;
        m->stack_cap = cap;
    }
    m->stack[m->depth++] = v;
    return 0;
}

/* Drops the n topmost values and their references. */
static void drop(struct machine *m, size_t n)
{
    while (n-- > 0)
        pv_unref(m->p, m->stack[--m->depth]);
}

static int op_mark(struct machine *m)
{
    if (m->nmarks == m->opt.limits.depth)
        return err_set(m->e, EBADMSG, "marks nested %zu deep", m->nmarks);
    m->mark[m->nmarks++] = m->depth;
    return 0;
}

/* Takes the topmost mark off; *first is where the values above it start. */
static int pop_mark(struct machine *m, size_t *first)
{
    if (m->nmarks == 0)
        return err_set(m->e, EBADMSG, "opcode 0x%02x without a mark", m->op.code);
    *first = m->mark[--m->nmarks];
    return 0;
}

static int op_pop(struct machine *m)
{
    if (m->nmarks > 0 && floor_of(m) == m->depth) { /* as Python: takes a mark, too */
        m->nmarks--;
        return 0;
    }
    if (!top(m, 1))
        return -m->e->code;
    drop(m, 1);
    return 0;
}

static int op_pop_mark(struct machine *m)
{
    size_t first = 0;

    TRY(pop_mark(m, &first));
    drop(m, m->depth - first);
    return 0;
}

static int op_dup(struct machine *m)
{
    const struct pv *v = top(m, 1);

    return v ? push(m, pv_ref(*v)) : -m->e->code;
}

/* Immediate values. */

static int op_none(struct machine *m)
{
    return push(m, (struct pv){.kind = PV_NONE});
}

static int op_bool(struct machine *m)
{
    return push(m, (struct pv){.kind = PV_BOOL, .b = m->op.code == OP_NEWTRUE});
}

static int op_int(struct machine *m)
{
    return push(m, (struct pv){.kind = PV_INT, .i = (int64_t)m->op.arg});
}

static int op_binfloat(struct machine *m)
{
    uint64_t bits = __builtin_bswap64(m->op.arg); /* stored big-endian */
    struct pv v = {.kind = PV_FLOAT};

    memcpy(&v.f, &bits, sizeof v.f);
    return push(m, v);
}

/* Strings and numbers with a body. */

static int push_bytes(struct machine *m, enum pv_kind kind, const char *data,
                      size_t len)
{
    struct pn_bytes *n;

    TRY(pnode_bytes(m->p, kind, len, &n, m->e));
    if (len > 0)
        memcpy(n->data, data, len);
    return push(m, pv_of_node(&n->node));
}

/* The body of an opcode as a node; longer than the window it is read straight into it. */
static int body(struct machine *m, enum pv_kind kind, struct pn_bytes **n)
{
    TRY(pnode_bytes(m->p, kind, m->op.arg, n, m->e));
    return pinput_copy(&m->in, (*n)->data, (*n)->node.len, m->e);
}

static int op_unicode_body(struct machine *m)
{
    struct pn_bytes *n;

    TRY(body(m, PV_STR, &n));
    if (!ptext_is_utf8(n->data, n->node.len, true))
        return err_set(m->e, EBADMSG, "a string that is not UTF-8");
    return push(m, pv_of_node(&n->node));
}

/* Python 2's str is text where it can be: torch reads it as UTF-8, too. */
static int op_string_body(struct machine *m)
{
    struct pn_bytes *n;

    TRY(body(m, PV_BYTES, &n));
    if (ptext_is_utf8(n->data, n->node.len, false))
        n->node.kind = PV_STR;
    return push(m, pv_of_node(&n->node));
}

static int op_bytes_body(struct machine *m)
{
    struct pn_bytes *n;

    TRY(body(m, PV_BYTES, &n));
    if (m->op.code == OP_BYTEARRAY8)
        n->node.flags |= PNODE_UNHASHABLE;
    return push(m, pv_of_node(&n->node));
}

static int op_long_body(struct machine *m)
{
    unsigned char le[4096];
    struct pv v;

    if (m->op.arg > sizeof le)
        return err_set(m->e, EBADMSG, "an integer of %" PRIu64 " bytes", m->op.arg);
    TRY(pinput_copy(&m->in, le, (size_t)m->op.arg, m->e));
    TRY(ptext_long(m->p, le, (size_t)m->op.arg, &v, m->e));
    return push(m, v);
}

/* Text arguments. */

static int read_line(struct machine *m, uint64_t max)
{
    buf_clear(&m->line);
    m->line.max = (size_t)MIN(max, m->opt.limits.bytes);
    if (buf_adds(&m->line, "") < 0)
        return err_nomem(m->e);
    return pinput_line(&m->in, &m->line, m->e);
}

static int op_int_line(struct machine *m)
{
    struct pv v = {.kind = PV_BOOL};
    size_t len;

    TRY(read_line(m, PTEXT_MAX_DIGITS + 2));
    len = m->line.len;
    if (m->op.code == OP_INT && len == 2 && m->line.data[0] == '0' &&
        (m->line.data[1] == '0' || m->line.data[1] == '1')) {
        v.b = m->line.data[1] == '1'; /* how protocol 1 spells a bool */
        return push(m, v);
    }
    if (m->op.code == OP_LONG && len > 0 && m->line.data[len - 1] == 'L')
        len--;
    TRY(ptext_int(m->p, m->line.data, len, &v, m->e));
    return push(m, v);
}

static int op_float_line(struct machine *m)
{
    struct pv v = {.kind = PV_FLOAT};

    TRY(read_line(m, PTEXT_MAX_DIGITS));
    TRY(ptext_float(m->line.data, m->line.len, &v.f, m->e));
    return push(m, v);
}

static int op_string_line(struct machine *m)
{
    bool text;

    TRY(read_line(m, UINT64_MAX));
    TRY(ptext_string(&m->line, m->e));
    text = ptext_is_utf8(m->line.data, m->line.len, false);
    return push_bytes(m, text ? PV_STR : PV_BYTES, m->line.data, m->line.len);
}

static int op_unicode_line(struct machine *m)
{
    buf_clear(&m->text);
    m->text.max = (size_t)m->opt.limits.bytes;
    TRY(read_line(m, UINT64_MAX));
    TRY(ptext_unicode(&m->line, &m->text, m->e));
    return push_bytes(m, PV_STR, m->text.data, m->text.len);
}

/* Containers. */

static int push_table(struct machine *m, enum pv_kind kind)
{
    struct pv v;

    TRY(pnode_table(m->p, kind, &v, m->e));
    return push(m, v);
}

static int op_empty(struct machine *m)
{
    switch (m->op.code) {
    case OP_EMPTY_LIST:
        return push_table(m, PV_LIST);
    case OP_EMPTY_DICT:
        return push_table(m, PV_DICT);
    default:
        return push_table(m, PV_SET);
    }
}

static int push_tuple(struct machine *m, size_t n)
{
    struct pv v;

    TRY(pnode_tuple(m->p, m->stack + m->depth - n, n, &v, m->e));
    m->depth -= n;
    return push(m, v);
}

static int op_tuple(struct machine *m)
{
    size_t first = 0;

    if (m->op.code == OP_EMPTY_TUPLE)
        return push_tuple(m, 0);
    TRY(pop_mark(m, &first));
    return push_tuple(m, m->depth - first);
}

static int op_tuple_n(struct machine *m)
{
    size_t n = (size_t)m->op.code - OP_TUPLE1 + 1;

    return top(m, n) ? push_tuple(m, n) : -m->e->code;
}

/* Pairs above `first` that the caller takes go, the others move down. */
static int fold_pairs(struct machine *m, const struct pnode *dict, size_t first)
{
    size_t kept = first;

    for (size_t i = first; i < m->depth; i += 2) {
        struct pv key = pv_norm(m->stack[i]), value = pv_norm(m->stack[i + 1]);
        int rc = m->opt.fold_pair(m->opt.user, (uintptr_t)dict, &key, &value, m->e);

        if (rc < 0)
            return rc;
        if (rc > 0) {
            pv_unref(m->p, m->stack[i]);
            pv_unref(m->p, m->stack[i + 1]);
        } else {
            m->stack[kept++] = m->stack[i];
            m->stack[kept++] = m->stack[i + 1];
        }
    }
    m->depth = kept;
    return 0;
}

/* The number of a dict of which pairs were folded is not to be another one's later. */
static void pin(struct pnode *dict)
{
    if (dict->flags & PNODE_PINNED)
        return;
    dict->flags |= PNODE_PINNED;
    dict->refs++;
}

/* Moves the values from `first` on into a list, set or dict. */
static int fill(struct machine *m, struct pnode *table, size_t first)
{
    const struct pv *v = m->stack + first;
    size_t n = m->depth - first;

    if (table->kind == PV_DICT && m->opt.fold_pair && n % 2 == 0) {
        TRY(fold_pairs(m, table, first));
        if (m->depth - first < n)
            pin(table);
        n = m->depth - first;
    }
    m->depth = first;
    if (table->kind == PV_LIST)
        return ptable_append(m->p, table, v, n, m->e);
    if (table->kind != PV_DICT)
        return ptable_add(m->p, table, v, n, m->e);
    if (n % 2)
        return err_set(m->e, EBADMSG, "a key without a value");
    return ptable_set(m->p, table, v, n / 2, m->e);
}

/* LIST, DICT, FROZENSET: all above the mark. */
static int op_collect(struct machine *m)
{
    enum pv_kind kind = m->op.code == OP_LIST   ? PV_LIST
                        : m->op.code == OP_DICT ? PV_DICT
                                                : PV_FROZENSET;
    struct pv table;
    size_t first = 0;

    TRY(pop_mark(m, &first));
    TRY(pnode_table(m->p, kind, &table, m->e));
    TRY(fill(m, table.node, first));
    return push(m, table);
}

/* What an object was given by APPEND or SETITEM, made when it gets the first. */
static struct pnode *object_items(struct machine *m, struct pnode *n, enum pv_kind kind)
{
    struct pn_object *o = container_of(n, struct pn_object, node);
    struct pnode **slot = kind == PV_DICT ? &o->dict : &o->list;
    struct pv table;

    if (!*slot && pnode_table(m->p, kind, &table, m->e) == 0)
        *slot = table.node;
    return *slot;
}

/* The table that values from `first` on are for: the value under them, or its items. */
static struct pnode *target(struct machine *m, size_t first, enum pv_kind kind)
{
    struct pv v;

    if (first <= floor_of(m)) {
        underflow(m);
        return NULL;
    }
    v = pv_norm(m->stack[first - 1]);
    if (pv_has_node(v) && v.node->flags & PNODE_TAKEN) {
        err_set(m->e, EBADMSG, "items for what was used before they came");
        return NULL;
    }
    if (v.kind == kind)
        return v.node;
    if (v.kind == PV_OBJECT)
        return object_items(m, v.node, kind == PV_SET ? PV_LIST : kind);
    err_set(m->e, EBADMSG, "opcode 0x%02x on something that takes no items",
            m->op.code);
    return NULL;
}

static int add_to(struct machine *m, size_t first, enum pv_kind kind)
{
    struct pnode *table = target(m, first, kind);

    return table ? fill(m, table, first) : -m->e->code;
}

static int op_append(struct machine *m)
{
    return top(m, 2) ? add_to(m, m->depth - 1, PV_LIST) : -m->e->code;
}

static int op_setitem(struct machine *m)
{
    return top(m, 3) ? add_to(m, m->depth - 2, PV_DICT) : -m->e->code;
}

/* APPENDS, SETITEMS, ADDITEMS: all above the mark. */
static int op_add_many(struct machine *m)
{
    enum pv_kind kind = m->op.code == OP_APPENDS    ? PV_LIST
                        : m->op.code == OP_SETITEMS ? PV_DICT
                                                    : PV_SET;
    size_t first = 0;

    TRY(pop_mark(m, &first));
    return add_to(m, first, kind);
}

/* Names, calls and state. */

static bool is_callable(struct pv v)
{
    return v.kind == PV_GLOBAL || v.kind == PV_OBJECT || v.kind == PV_PERSID;
}

/* Which fold is for this class; decided once, when the name is read. */
static uint32_t fold_of(const struct machine *m, const char *module, const char *name)
{
    for (size_t i = 0; i < m->opt.nfold; i++) {
        if (strcmp(m->opt.fold[i].module, module) == 0 &&
            strcmp(m->opt.fold[i].name, name) == 0)
            return (uint32_t)i + 1;
    }
    return 0;
}

static int make_global(struct machine *m, const char *module, size_t module_len,
                       const char *name, size_t name_len, struct pv *out)
{
    uint64_t max = m->opt.limits.name;
    struct pn_global *g;

    if (module_len > max || name_len > max)
        return err_set(m->e, EBADMSG, "a class name over %" PRIu64 " bytes", max);
    TRY(pnode_global(m->p, module, module_len, name, name_len, out, m->e));
    g = container_of(out->node, struct pn_global, node);
    g->fold = fold_of(m, g->text, g->text + module_len + 1);
    return 0;
}

/* The two lines of GLOBAL and INST. */
static int read_global(struct machine *m, struct pv *out)
{
    size_t len;

    buf_clear(&m->text);
    m->text.max = (size_t)m->opt.limits.name;
    TRY(read_line(m, m->opt.limits.name));
    if (buf_add(&m->text, m->line.data, m->line.len) < 0)
        return err_nomem(m->e);
    len = m->text.len;
    TRY(read_line(m, m->opt.limits.name));
    if (!ptext_is_utf8(m->text.data, len, false) ||
        !ptext_is_utf8(m->line.data, m->line.len, false))
        return err_set(m->e, EBADMSG, "a class name that is not UTF-8");
    return make_global(m, m->text.data, len, m->line.data, m->line.len, out);
}

static int op_global(struct machine *m)
{
    struct pv v;

    TRY(read_global(m, &v));
    return push(m, v);
}

static int op_stack_global(struct machine *m)
{
    const struct pv *v = top(m, 2);
    struct pv global;
    const char *text[2];
    size_t len[2];

    if (!v)
        return -m->e->code;
    if (v[0].kind != PV_STR || v[1].kind != PV_STR)
        return err_set(m->e, EBADMSG, "a class name that is no string");
    text[0] = pv_bytes(&v[0], &len[0]);
    text[1] = pv_bytes(&v[1], &len[1]);
    TRY(make_global(m, text[0], len[0], text[1], len[1], &global));
    drop(m, 2);
    return push(m, global);
}

/*
 * A tensor has the shape that its list had when it was made, whatever the list gets later;
 * here the list is looked at in the end. So what was looked at in a file's own order stays
 * as it is, else the file is refused. Tuples are looked into, each once.
 */
static int take(struct machine *m, struct pv v, unsigned depth)
{
    int rc = 0;

    v = pv_norm(v);
    if (!pv_has_node(v) || v.node->flags & PNODE_TAKEN)
        return 0;
    if (depth == MAX_TAKEN)
        return err_set(m->e, EBADMSG, "more than %d tuples in one another for a call",
                       MAX_TAKEN);
    if (v.kind == PV_TUPLE || v.kind == PV_LIST || v.kind == PV_SET ||
        v.kind == PV_DICT || v.kind == PV_OBJECT)
        v.node->flags |= PNODE_TAKEN;
    for (size_t i = 0, n = v.kind == PV_TUPLE ? pv_count(&v) : 0; rc == 0 && i < n; i++)
        rc = take(m, pv_at(&v, i), depth + 1);
    return rc;
}

/* What a fold saw of an object: its state, and what is in there. */
static int take_values(struct machine *m, const struct pv *state)
{
    size_t n = state->kind == PV_DICT ? pv_count(state) : 0;
    int rc = state->kind == PV_TUPLE ? take(m, *state, 0) : 0;

    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = take(m, pv_value_at(state, i), 0);
    return rc;
}

static bool is_of_torch(struct pv class)
{
    const char *module, *name;

    return pv_global(&class, &module, &name) && strncmp(module, "torch", 5) == 0 &&
           (module[5] == '\0' || module[5] == '.');
}

/* Offers the object on top of the stack to its fold. */
static int try_fold(struct machine *m, bool built)
{
    struct pv *v = &m->stack[m->depth - 1];
    struct pv class = pv_class(v), state;
    const struct pickle_fold *f;
    uint64_t record = 0;
    uint32_t number;
    int rc;

    number = class.kind == PV_GLOBAL
                 ? container_of(class.node, struct pn_global, node)->fold
                 : 0;
    if (number == 0)
        return 0;
    f = &m->opt.fold[number - 1];
    if (f->without_state == built)
        return 0;
    rc = f->fold(m->opt.user, v, &record, m->e);
    if (rc <= 0)
        return rc;
    state = pv_state(v);
    TRY(take_values(m, &state));
    if (v->node->refs > 1)
        pnode_fold(m->p, v->node, record);
    pv_unref(m->p, *v);
    *v = (struct pv){.kind = PV_RECORD, .record = record};
    return 0;
}

static int push_object(struct machine *m, struct pv class, struct pv args,
                       struct pnode *kwargs)
{
    struct pv v;

    if (is_of_torch(class))
        TRY(take(m, args, 0));
    TRY(pnode_object(m->p, class.node, args.node, kwargs, &v, m->e));
    TRY(push(m, v));
    return try_fold(m, false);
}

/* Python 2 calls OrderedDict with a list of its pairs; Python 3 sets them one by one. */
static bool is_pairs_call(struct machine *m, const struct pv *class,
                          const struct pv *args, struct pv *pairs)
{
    if (m->op.code != OP_REDUCE || !pv_is(class, "collections", "OrderedDict") ||
        pv_count(args) != 1)
        return false;
    *pairs = pv_at(args, 0);
    if (pairs->kind != PV_LIST)
        return false;
    m->pairs += pv_count(pairs);
    for (size_t i = 0; i < pv_count(pairs); i++) {
        struct pv pair = pv_at(pairs, i);

        if ((pair.kind != PV_LIST && pair.kind != PV_TUPLE) || pv_count(&pair) != 2)
            return false;
    }
    return true;
}

/* The object on top gets the pairs as SETITEMS would give them. */
static int give_pairs(struct machine *m, const struct pv *pairs)
{
    size_t first = m->depth;

    for (size_t i = 0; i < pv_count(pairs); i++) {
        struct pv pair = pv_at(pairs, i);

        TRY(push(m, pv_ref(pv_at(&pair, 0))));
        TRY(push(m, pv_ref(pv_at(&pair, 1))));
    }
    return add_to(m, first, PV_DICT);
}

static int call_with_pairs(struct machine *m, struct pv class, struct pv args,
                           const struct pv *pairs)
{
    struct pv none;

    TRY(pnode_tuple(m->p, NULL, 0, &none, m->e));
    TRY(push_object(m, class, none, NULL));
    TRY(give_pairs(m, pairs));
    pv_unref(m->p, args);
    return 0;
}

/* REDUCE, NEWOBJ: class and arguments. NEWOBJ_EX: and keywords. */
static int op_call(struct machine *m)
{
    size_t n = m->op.code == OP_NEWOBJ_EX ? 3 : 2;
    const struct pv *v = top(m, n);
    struct pv class, args, pairs, kwargs = {.kind = PV_NONE};

    if (!v)
        return -m->e->code;
    class = pv_norm(v[0]);
    args = v[1];
    if (n == 3)
        kwargs = v[2];
    if (!is_callable(class))
        return err_set(m->e, EBADMSG, "a call of something that is no class");
    if (args.kind != PV_TUPLE || (n == 3 && kwargs.kind != PV_DICT))
        return err_set(m->e, EBADMSG, "a call whose arguments are no tuple");
    m->depth -= n;
    if (is_pairs_call(m, &class, &args, &pairs))
        return call_with_pairs(m, class, args, &pairs);
    return push_object(m, class, args, n == 3 ? kwargs.node : NULL);
}

/* Makes a tuple of the values from `first` on and pushes an object of `class`. */
static int call_above(struct machine *m, struct pv class, size_t first)
{
    struct pv args;

    TRY(pnode_tuple(m->p, m->stack + first, m->depth - first, &args, m->e));
    m->depth = first;
    return push_object(m, class, args, NULL);
}

static int op_inst(struct machine *m)
{
    struct pv class;
    size_t first = 0;

    TRY(read_global(m, &class));
    TRY(pop_mark(m, &first));
    return call_above(m, class, first);
}

static int op_obj(struct machine *m)
{
    struct pv class;
    size_t first = 0;

    TRY(pop_mark(m, &first));
    if (m->depth == first)
        return underflow(m);
    class = pv_norm(m->stack[first]);
    if (!is_callable(class))
        return err_set(m->e, EBADMSG, "a call of something that is no class");
    TRY(call_above(m, class, first + 1));
    m->stack[first] = m->stack[first + 1]; /* over the class, which the object holds */
    m->depth = first + 1;
    return 0;
}

/* A state put on a class itself: keeps both as an object of that class. */
static int wrap_global(struct machine *m, struct pv *at)
{
    struct pv args, v;

    TRY(pnode_tuple(m->p, NULL, 0, &args, m->e));
    TRY(pnode_object(m->p, at->node, args.node, NULL, &v, m->e));
    *at = v;
    return 0;
}

static int op_build(struct machine *m)
{
    struct pv *v = top(m, 2), state;
    struct pn_object *o;

    if (!v)
        return -m->e->code;
    v[0] = pv_norm(v[0]);
    state = v[1];
    m->depth--;
    if (v->kind == PV_GLOBAL)
        TRY(wrap_global(m, v));
    if (v->kind != PV_OBJECT && v->kind != PV_RECORD)
        return err_set(m->e, EBADMSG, "a state for something that is no object");
    if (v->kind == PV_RECORD || v->node->flags & PNODE_BUILT)
        return err_set(m->e, EBADMSG, "a second state for one object");
    v->node->flags |= PNODE_BUILT;
    o = container_of(v->node, struct pn_object, node);
    o->state = state;
    if (state.kind == PV_DICT) /* copied into the object: what comes later is not */
        state.node->flags |= PNODE_TAKEN;
    return try_fold(m, true);
}

static int op_persid(struct machine *m)
{
    struct pv *v = top(m, 1);

    return v ? pnode_persid(m->p, *v, v, m->e) : -m->e->code;
}

/* Memo. */

static int memo_id(struct machine *m, uint64_t *id)
{
    *id = m->op.arg;
    if (m->op.code != OP_PUT && m->op.code != OP_GET)
        return 0;
    TRY(read_line(m, 32));
    return ptext_memo_id(m->line.data, m->line.len, id, m->e);
}

static int op_put(struct machine *m)
{
    const struct pv *v = top(m, 1);
    uint64_t id;

    if (!v || memo_id(m, &id) < 0)
        return -m->e->code;
    TRY(pmemo_put(m->p, &m->memo, id, m->op.at, *v, m->e));
    return 0;
}

static int op_memoize(struct machine *m)
{
    const struct pv *v = top(m, 1);

    if (!v)
        return -m->e->code;
    TRY(pmemo_put(m->p, &m->memo, m->memo.count, m->op.at, *v, m->e));
    return 0;
}

static int op_get(struct machine *m)
{
    struct pv v;
    uint64_t id;

    TRY(memo_id(m, &id));
    if (!pmemo_get(m->p, &m->memo, id, &v))
        return err_set(m->e, EBADMSG, "memo entry %" PRIu64 " was never set", id);
    return push(m, v);
}

/* The frame of it all. */

static int op_proto(struct machine *m)
{
    if (m->op.arg > HIGHEST_PROTOCOL)
        return err_set(m->e, EBADMSG, "pickle protocol %" PRIu64, m->op.arg);
    return 0;
}

/* Frames help readers that buffer; opcodes and arguments follow each other without them. */
static int op_frame(struct machine *m)
{
    (void)m;
    return 0;
}

static int op_stop(struct machine *m)
{
    if (m->nmarks > 0)
        return err_set(m->e, EBADMSG, "the pickle ends with %zu open marks", m->nmarks);
    if (!top(m, 1))
        return -m->e->code;
    m->p->root = m->stack[--m->depth];
    m->stopped = true;
    return 0;
}

static int (*const run[256])(struct machine *m) = {
    [OP_MARK] = op_mark,
    [OP_STOP] = op_stop,
    [OP_POP] = op_pop,
    [OP_POP_MARK] = op_pop_mark,
    [OP_DUP] = op_dup,
    [OP_FLOAT] = op_float_line,
    [OP_INT] = op_int_line,
    [OP_BININT] = op_int,
    [OP_BININT1] = op_int,
    [OP_LONG] = op_int_line,
    [OP_BININT2] = op_int,
    [OP_NONE] = op_none,
    [OP_BINPERSID] = op_persid,
    [OP_REDUCE] = op_call,
    [OP_STRING] = op_string_line,
    [OP_BINSTRING] = op_string_body,
    [OP_SHORT_BINSTRING] = op_string_body,
    [OP_UNICODE] = op_unicode_line,
    [OP_BINUNICODE] = op_unicode_body,
    [OP_APPEND] = op_append,
    [OP_BUILD] = op_build,
    [OP_GLOBAL] = op_global,
    [OP_DICT] = op_collect,
    [OP_EMPTY_DICT] = op_empty,
    [OP_APPENDS] = op_add_many,
    [OP_GET] = op_get,
    [OP_BINGET] = op_get,
    [OP_INST] = op_inst,
    [OP_LONG_BINGET] = op_get,
    [OP_LIST] = op_collect,
    [OP_EMPTY_LIST] = op_empty,
    [OP_OBJ] = op_obj,
    [OP_PUT] = op_put,
    [OP_BINPUT] = op_put,
    [OP_LONG_BINPUT] = op_put,
    [OP_SETITEM] = op_setitem,
    [OP_TUPLE] = op_tuple,
    [OP_EMPTY_TUPLE] = op_tuple,
    [OP_SETITEMS] = op_add_many,
    [OP_BINFLOAT] = op_binfloat,
    [OP_PROTO] = op_proto,
    [OP_NEWOBJ] = op_call,
    [OP_TUPLE1] = op_tuple_n,
    [OP_TUPLE2] = op_tuple_n,
    [OP_TUPLE3] = op_tuple_n,
    [OP_NEWTRUE] = op_bool,
    [OP_NEWFALSE] = op_bool,
    [OP_LONG1] = op_long_body,
    [OP_LONG4] = op_long_body,
    [OP_BINBYTES] = op_bytes_body,
    [OP_SHORT_BINBYTES] = op_bytes_body,
    [OP_SHORT_BINUNICODE] = op_unicode_body,
    [OP_BINUNICODE8] = op_unicode_body,
    [OP_BINBYTES8] = op_bytes_body,
    [OP_EMPTY_SET] = op_empty,
    [OP_ADDITEMS] = op_add_many,
    [OP_FROZENSET] = op_collect,
    [OP_NEWOBJ_EX] = op_call,
    [OP_STACK_GLOBAL] = op_stack_global,
    [OP_MEMOIZE] = op_memoize,
    [OP_FRAME] = op_frame,
    [OP_BYTEARRAY8] = op_bytes_body,
};

/* First pass, one opcode: notes what is fetched from the memo, skips the rest. */
static int survey_op(struct machine *m)
{
    struct pinput *in = &m->in;
    uint64_t id;

    switch (m->op.code) {
    case OP_GET:
    case OP_BINGET:
    case OP_LONG_BINGET:
        TRY(memo_id(m, &id));
        TRY(pidset_add(&m->memo.fetched, (uint32_t)id, m->op.at, m->e));
        return 0;
    case OP_STOP:
        m->stopped = true;
        return 0;
    default:
        break;
    }
    if (m->op.parg == PARG_LINE)
        return pinput_line(in, NULL, m->e);
    if (m->op.parg == PARG_LINES) {
        TRY(pinput_line(in, NULL, m->e));
        return pinput_line(in, NULL, m->e);
    }
    if (m->op.parg >= PARG_BODY1 && m->op.parg <= PARG_BODY8)
        return pinput_skip(in, m->op.arg, m->e);
    return 0;
}

static int run_op(struct machine *m)
{
    return run[m->op.code](m);
}

/* One pass over the pickle, to STOP. */
static int pass(struct machine *m, int (*each)(struct machine *))
{
    uint64_t count = 0;

    m->stopped = false;
    pinput_rewind(&m->in);
    while (!m->stopped) {
        if (++count + m->pairs > m->opt.limits.opcodes)
            return err_set(m->e, EBADMSG, "more than %" PRIu64 " opcodes",
                           m->opt.limits.opcodes);
        if (count % LOOK_EVERY == 0)
            TRY(interrupt_check_late(m->e));
        TRY(pinput_op(&m->in, &m->op, m->e));
        TRY(each(m));
    }
    return 0;
}

static int run_passes(struct machine *m)
{
    if (pass(m, survey_op) < 0 || pmemo_freeze(&m->memo, m->e) < 0 ||
        pass(m, run_op) < 0)
        return m->e->code == EBADMSG ? err_wrap(m->e, "%s: pickle, byte %" PRIu64,
                                                m->in.src->name, m->in.base + m->op.at)
                                     : -m->e->code;
    return 0;
}

static struct pickle_limits with_defaults(struct pickle_limits l)
{
    return (struct pickle_limits){
        .opcodes = l.opcodes ? l.opcodes : defaults.opcodes,
        .nodes = l.nodes ? l.nodes : defaults.nodes,
        /* References are counted in 32 bits and each takes 8 bytes or more. */
        .bytes = MIN(l.bytes ? l.bytes : defaults.bytes, UINT64_C(16) << 30),
        .depth = l.depth ? l.depth : defaults.depth,
        .name = MIN(l.name ? l.name : defaults.name, UINT64_C(1) << 30),
    };
}

static int machine_init(struct machine *m, const struct pickle_options *options,
                        struct err *e)
{
    if (options)
        m->opt = *options;
    m->opt.limits = with_defaults(m->opt.limits);
    m->e = e;
    m->mark = malloc(m->opt.limits.depth * sizeof *m->mark);
    m->stack = malloc(FIRST_STACK * sizeof *m->stack);
    m->stack_cap = FIRST_STACK;
    m->p = calloc(1, sizeof *m->p);
    if (!m->mark || !m->stack || !m->p)
        return err_nomem(e);
    m->p->mem.limit = m->opt.limits.bytes;
    m->p->max_nodes = m->opt.limits.nodes;
    if (getrandom(&m->p->seed, sizeof m->p->seed, 0) != (ssize_t)sizeof m->p->seed)
        return err_set(e, errno, "random numbers for hashes");
    return 0;
}

/* `loaded`: what the stack and the memo still hold goes; else the pickle goes as a whole. */
static void machine_release(struct machine *m, bool loaded)
{
    if (loaded) {
        drop(m, m->depth);
    } else {
        pickle_free(m->p);
        m->p = NULL;
    }
    pmemo_release(m->p, &m->memo);
    pinput_release(&m->in);
    buf_release(&m->line);
    buf_release(&m->text);
    free(m->stack);
    free(m->mark);
}

int pickle_load(struct source *s, uint64_t off, uint64_t len,
                const struct pickle_options *options, struct pickle **out,
                uint64_t *used, struct err *e)
{
    struct machine m = {0};
    int rc = machine_init(&m, options, e);

    if (rc == 0)
        rc = pinput_init(&m.in, s, off, len, e);
    if (rc == 0)
        rc = run_passes(&m);
    if (rc == 0) {
        *out = m.p;
        if (used)
            *used = pinput_tell(&m.in);
    }
    machine_release(&m, rc == 0);
    return rc;
}
