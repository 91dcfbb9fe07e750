/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle_priv.h - what the files of the unpickler share: nodes, input, memo. */
#ifndef UFS_INDEX_FORMATS_PICKLE_PRIV_H
#define UFS_INDEX_FORMATS_PICKLE_PRIV_H

#include "base/base.h"
#include "base/buf.h"
#include "index/formats/pickle/pickle.h"

struct err;
struct source;

/*
 * Memory (pickle_mem.c): small pieces in size classes of 16 bytes, cut from slabs, large
 * ones by malloc on a list. Freeing all needs no walk over nodes, so cycles cannot leak
 * past pickle_free().
 */
enum { PMEM_GRAIN = 16, PMEM_SMALL = 512, PMEM_CLASSES = PMEM_SMALL / PMEM_GRAIN + 1 };

struct pmem_slab;
struct pmem_large;

struct pmem {
    struct pmem_slab *slabs;
    struct pmem_large *large;
    char *at; /* free part of the newest slab */
    size_t room;
    void *free[PMEM_CLASSES];
    uint64_t used, limit; /* bytes taken from malloc */
};

/*
 * NULL with -EBADMSG (over the limit) or -ENOMEM. The same `size` goes to pmem_free and
 * pmem_resize, which leaves the old memory as it was when it fails.
 */
void *pmem_alloc(struct pmem *m, size_t size, struct err *e);
void pmem_free(struct pmem *m, void *p, size_t size);
void *pmem_resize(struct pmem *m, void *p, size_t old_size, size_t size, struct err *e);
void pmem_release(struct pmem *m);

/*
 * Nodes (pickle_node.c), reference-counted. `next` links nodes that wait to be freed, so
 * freeing needs no recursion.
 */
struct pnode {
    union {
        struct {
            uint32_t refs;
            uint32_t
                hash; /* of STR, BYTES, BIGINT, TUPLE, FROZENSET, GLOBAL; 0: not yet */
        };
        struct pnode *next;
    };
    uint32_t len; /* bytes, items or pairs */
    uint8_t kind; /* enum pv_kind */
    uint8_t flags;
};

enum pnode_flags {
    PNODE_UNHASHABLE = 1, /* a bytearray, or a tuple that holds something unhashable */
    PNODE_BUILT = 2,      /* an object that got its state */
    PNODE_TAKEN = 4,      /* a call, a state or a fold has looked at what is in it */
    PNODE_PINNED = 8,     /* a dict whose pairs were folded: it stays to the end */
};

struct pn_bytes {
    struct pnode node;
    char data[];
};

struct pn_tuple {
    struct pnode node;
    struct pv item[];
};

/* List, set, frozenset (one value an item) and dict (key and value). */
struct pn_table {
    struct pnode node;
    struct pv *item;
    uint32_t
        *index;   /* open addressing: position + 1; NULL while small, and for lists */
    uint32_t cap; /* items or pairs that `item` has room for */
    uint32_t index_cap;
};

struct pn_global {
    struct pnode node; /* len: of the module */
    uint32_t name_len;
    uint32_t fold; /* number of its fold + 1, 0: none */
    char text[];   /* "module\0name\0" */
};

struct pn_object {
    struct pnode node;
    struct pnode *class, *args;         /* args: always a tuple */
    struct pnode *kwargs, *list, *dict; /* NULL: absent */
    struct pv state;
};

struct pn_persid {
    struct pnode node;
    struct pv arg;
};

/* What an object turns into in place when its fold took it while others refer to it. */
struct pn_record {
    struct pnode node;
    uint64_t record;
};

struct pickle {
    struct pmem mem;
    struct pv root;
    uint64_t nodes, max_nodes; /* alive */
    uint64_t seed; /* of the hashes, so that no file can aim at collisions */
};

static inline bool pv_has_node(struct pv v)
{
    const unsigned immediate =
        1U << PV_NONE | 1U << PV_BOOL | 1U << PV_INT | 1U << PV_FLOAT | 1U << PV_RECORD;

    return !(immediate >> v.kind & 1U);
}

/* A value that points to an object which became a record since is that record. */
static inline struct pv pv_norm(struct pv v)
{
    if (v.kind == PV_OBJECT && v.node->kind == PV_RECORD)
        return (struct pv){
            .kind = PV_RECORD,
            .record = ((const struct pn_record *)(const void *)v.node)->record};
    return v;
}

static inline struct pv pv_of_node(struct pnode *n)
{
    return (struct pv){.kind = n->kind, .node = n};
}

static inline struct pv pv_ref(struct pv v)
{
    v = pv_norm(v);
    if (pv_has_node(v))
        v.node->refs++;
    return v;
}

/* Frees nodes whose last reference went, and what only they held. */
void pnode_release(struct pickle *p, struct pnode *n);

static inline void pv_unref(struct pickle *p, struct pv v)
{
    if (pv_has_node(v) && --v.node->refs == 0)
        pnode_release(p, v.node);
}

/*
 * New nodes with one reference. References given are moved in. After a failure (-ENOMEM,
 * -EBADMSG past a limit) here or below the pickle is only good for pickle_free().
 */
int pnode_bytes(struct pickle *p, enum pv_kind kind, uint64_t len,
                struct pn_bytes **out, struct err *e);
int pnode_tuple(struct pickle *p, const struct pv *items, size_t n, struct pv *out,
                struct err *e);
int pnode_table(struct pickle *p, enum pv_kind kind, struct pv *out, struct err *e);
int pnode_global(struct pickle *p, const char *module, size_t module_len,
                 const char *name, size_t name_len, struct pv *out, struct err *e);
int pnode_object(struct pickle *p, struct pnode *class, struct pnode *args,
                 struct pnode *kwargs, struct pv *out, struct err *e);
int pnode_persid(struct pickle *p, struct pv arg, struct pv *out, struct err *e);

/* Turns an object into a record where it stands. */
void pnode_fold(struct pickle *p, struct pnode *object, uint64_t record);

/* Adding to tables (pickle_table.c). Values are moved in. -EBADMSG: no key can be that. */
int ptable_append(struct pickle *p, struct pnode *list, const struct pv *items,
                  size_t n, struct err *e);
int ptable_add(struct pickle *p, struct pnode *set, const struct pv *items, size_t n,
               struct err *e);
int ptable_set(struct pickle *p, struct pnode *dict, const struct pv *pairs,
               size_t npairs, struct err *e);

/* Hash of a value as a key; false: unhashable. */
bool pv_hash(const struct pickle *p, struct pv v, uint32_t *hash);
uint32_t phash_tuple(struct pickle *p, const struct pv *items, size_t n,
                     uint8_t *flags);

/* The bytes as a stream (pickle_input.c). */
struct pinput {
    struct source *src;
    uint64_t base, len; /* the pickle lies within [base, base + len) */
    unsigned char *window;
    size_t cap, pos, fill;
    uint64_t start; /* of the window, from base */
};

int pinput_init(struct pinput *in, struct source *src, uint64_t off, uint64_t len,
                struct err *e);
void pinput_release(struct pinput *in);
void pinput_rewind(struct pinput *in);

static inline uint64_t pinput_tell(const struct pinput *in)
{
    return in->start + in->pos;
}

static inline uint64_t pinput_left(const struct pinput *in)
{
    return in->len - pinput_tell(in);
}

int pinput_copy(struct pinput *in, void *dst, size_t n, struct err *e);
int pinput_skip(struct pinput *in, uint64_t n, struct err *e);

/* Appends a text argument without its newline; `out` NULL: skips it. */
int pinput_line(struct pinput *in, struct buf *out, struct err *e);

/* What follows an opcode. */
enum parg {
    PARG_BAD, /* no opcode, or one that is refused */
    PARG_NONE,
    PARG_U1,
    PARG_U2,
    PARG_U4,
    PARG_S4,
    PARG_U8,
    PARG_BODY1, /* a length of 1, 4 or 8 bytes and so many bytes */
    PARG_BODY4,
    PARG_BODY4S, /* signed: negative is refused */
    PARG_BODY8,
    PARG_LINE,
    PARG_LINES /* two of them */
};

struct pop {
    uint64_t at;  /* of the opcode, from base */
    uint64_t arg; /* number (sign-extended), or length of the body */
    uint8_t code;
    uint8_t parg;
};

/*
 * Decodes an opcode with its number; body and lines stay to be read. Lengths (also of
 * frames) are compared with what is left.
 */
int pinput_op(struct pinput *in, struct pop *op, struct err *e);

/* Which memo entries are fetched at all, and their values (pickle_memo.c). */
struct pidset {
    uint64_t *bits;
    size_t words;
    uint32_t *sparse; /* open addressing, 0: empty */
    size_t sparse_cap, sparse_used;
    uint32_t *rank; /* after pidset_freeze: ones before each group of words */
    size_t ndense;
};

/* Adds `id`; `at`: opcodes before it cost so many bytes. 1: new, 0: was there. */
int pidset_add(struct pidset *s, uint32_t id, uint64_t at, struct err *e);
void pidset_release(struct pidset *s);

struct pmemo {
    struct pidset fetched, put;
    struct pv *slot;
    size_t nslots;
    uint64_t count; /* distinct ids so far */
};

int pmemo_freeze(struct pmemo *m, struct err *e);
int pmemo_put(struct pickle *p, struct pmemo *m, uint64_t id, uint64_t at, struct pv v,
              struct err *e);
/* A new reference; false when it was never put. */
bool pmemo_get(struct pickle *p, struct pmemo *m, uint64_t id, struct pv *out);
void pmemo_release(struct pickle *p, struct pmemo *m);

/* Arguments that are text (pickle_text.c). */
int ptext_int(struct pickle *p, const char *s, size_t len, struct pv *out,
              struct err *e);
int ptext_float(const char *s, size_t len, double *out, struct err *e);
int ptext_string(struct buf *line, struct err *e); /* unescapes in place */
int ptext_unicode(const struct buf *line, struct buf *out, struct err *e);
/* A memo number: decimal, 32 bits. */
int ptext_memo_id(const char *s, size_t len, uint64_t *out, struct err *e);
/* Little-endian two's complement. */
int ptext_long(struct pickle *p, const unsigned char *le, size_t n, struct pv *out,
               struct err *e);
/* UTF-8, or UTF-8 with lone surrogates (Python's surrogatepass). */
bool ptext_is_utf8(const char *s, size_t len, bool surrogates);

/* Digits of an integer, as Python's own default limit: conversion is quadratic. */
enum { PTEXT_MAX_DIGITS = 4300 };

enum pickle_opcode {
    OP_MARK = '(',
    OP_STOP = '.',
    OP_POP = '0',
    OP_POP_MARK = '1',
    OP_DUP = '2',
    OP_FLOAT = 'F',
    OP_INT = 'I',
    OP_BININT = 'J',
    OP_BININT1 = 'K',
    OP_LONG = 'L',
    OP_BININT2 = 'M',
    OP_NONE = 'N',
    OP_BINPERSID = 'Q',
    OP_REDUCE = 'R',
    OP_STRING = 'S',
    OP_BINSTRING = 'T',
    OP_SHORT_BINSTRING = 'U',
    OP_UNICODE = 'V',
    OP_BINUNICODE = 'X',
    OP_APPEND = 'a',
    OP_BUILD = 'b',
    OP_GLOBAL = 'c',
    OP_DICT = 'd',
    OP_EMPTY_DICT = '}',
    OP_APPENDS = 'e',
    OP_GET = 'g',
    OP_BINGET = 'h',
    OP_INST = 'i',
    OP_LONG_BINGET = 'j',
    OP_LIST = 'l',
    OP_EMPTY_LIST = ']',
    OP_OBJ = 'o',
    OP_PUT = 'p',
    OP_BINPUT = 'q',
    OP_LONG_BINPUT = 'r',
    OP_SETITEM = 's',
    OP_TUPLE = 't',
    OP_EMPTY_TUPLE = ')',
    OP_SETITEMS = 'u',
    OP_BINFLOAT = 'G',
    OP_PROTO = 0x80,
    OP_NEWOBJ = 0x81,
    OP_TUPLE1 = 0x85,
    OP_TUPLE2 = 0x86,
    OP_TUPLE3 = 0x87,
    OP_NEWTRUE = 0x88,
    OP_NEWFALSE = 0x89,
    OP_LONG1 = 0x8a,
    OP_LONG4 = 0x8b,
    OP_BINBYTES = 'B',
    OP_SHORT_BINBYTES = 'C',
    OP_SHORT_BINUNICODE = 0x8c,
    OP_BINUNICODE8 = 0x8d,
    OP_BINBYTES8 = 0x8e,
    OP_EMPTY_SET = 0x8f,
    OP_ADDITEMS = 0x90,
    OP_FROZENSET = 0x91,
    OP_NEWOBJ_EX = 0x92,
    OP_STACK_GLOBAL = 0x93,
    OP_MEMOIZE = 0x94,
    OP_FRAME = 0x95,
    OP_BYTEARRAY8 = 0x96
};

#endif
