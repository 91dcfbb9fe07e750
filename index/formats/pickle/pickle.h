/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle.h - a data-only unpickler: builds nodes, never calls anything. */
#ifndef UFS_INDEX_FORMATS_PICKLE_H
#define UFS_INDEX_FORMATS_PICKLE_H

#include "base/base.h"

struct err;
struct source;
struct pickle;
struct pnode;

/*
 * Nothing in a pickle is looked up, imported or called. GLOBAL gives a name; REDUCE,
 * NEWOBJ, NEWOBJ_EX, INST and OBJ give an object node {class, args, kwargs}; BUILD puts a
 * state on it; APPEND(S), SETITEM(S) and ADDITEMS fill lists, dicts and sets or the
 * items of an object. What it means is the caller's business, by exact (module, name).
 */
enum pv_kind {
    PV_NONE,
    PV_BOOL,
    PV_INT,    /* fits int64 */
    PV_BIGINT, /* decimal text in a string node */
    PV_FLOAT,
    /*
     * UTF-8; lone surrogates are kept as Python's surrogatepass gives them. Python 2's str
     * (STRING, BINSTRING) is PV_STR where it is UTF-8, else PV_BYTES.
     */
    PV_STR,
    PV_BYTES, /* bytes and bytearray */
    PV_TUPLE,
    PV_LIST,
    PV_SET,
    PV_FROZENSET,
    /*
     * Items in file order; a key again replaces the value, as Python does. Objects and
     * frozensets are equal only to themselves, records by number.
     */
    PV_DICT,
    PV_GLOBAL, /* module, name */
    PV_OBJECT, /* class, args, kwargs, state, list items, dict items */
    PV_PERSID, /* argument of BINPERSID */
    PV_RECORD  /* what a fold put in an object's place */
};

/* A value, 16 bytes. Nodes belong to the pickle. */
struct pv {
    uint8_t kind;
    union {
        bool b;
        int64_t i;
        double f;
        uint64_t record;
        struct pnode *node;
    };
};

/*
 * Makes memory of a large pickle small while it is read: after BUILD (or, with
 * `without_state`, after REDUCE/NEWOBJ) of an object of this class, fold looks at it and
 * may put a record number in its place; the object and what only it holds are freed.
 * Return 1: folded (*record is set), 0: keep the object, negative errno: refuse the file.
 * A state or items for a record are an error, and so are items that come later for what
 * the state held. What fold is given holds only until it returns.
 */
struct pickle_fold {
    const char *module, *name;
    bool without_state;
    int (*fold)(void *user, const struct pv *object, uint64_t *record, struct err *e);
};

struct pickle_limits {
    uint64_t opcodes; /* 0: 50,000,000 */
    uint64_t nodes;   /* alive at once; 0: 20,000,000 */
    uint64_t bytes;   /* memory of nodes and strings; 0: 1 GiB */
    uint32_t depth;   /* of marks; 0: 1000 */
    uint64_t name;    /* bytes of a module or class name; 0: 64 KiB */
};

struct pickle_options {
    const struct pickle_fold *fold; /* nfold of them */
    size_t nfold;
    /*
     * The same for large dicts, optional: sees each pair before it is put into a dict
     * (`dict` is its pv_identity, which no other dict gets) or among an object's items.
     * Return 1: taken, the dict never gets the pair; 0: keep it; negative errno: refuse
     * the file.
     */
    int (*fold_pair)(void *user, uintptr_t dict, const struct pv *key,
                     const struct pv *value, struct err *e);
    void *user;
    struct pickle_limits limits;
};

/*
 * Reads one pickle (protocols 0 to 5) that starts at `off` of the source and ends at STOP
 * within `len` bytes; *used says how long it was. It is read as a stream, twice (the first
 * pass finds which memo entries are ever fetched), so memory is that of the nodes alone.
 * -EBADMSG with the byte offset for anything that is no well-formed pickle, an unknown
 * opcode, EXT*, PERSID, out-of-band buffers, or past a limit. The numbers inside are as
 * hostile as the code: nothing is allocated by a declared length before it was compared
 * with the bytes that are left.
 */
int pickle_load(struct source *s, uint64_t off, uint64_t len,
                const struct pickle_options *options, struct pickle **out,
                uint64_t *used, struct err *e);

void pickle_free(struct pickle *p); /* no recursion on depth; NULL is fine */
void pickle_freep(struct pickle **p);

struct pv pickle_root(const struct pickle *p);

/* PV_STR, PV_BYTES, PV_BIGINT: bytes, not NUL-terminated. */
const char *pv_bytes(const struct pv *v, size_t *len);
bool pv_str_is(const struct pv *v, const char *text);

/* PV_TUPLE, PV_LIST, PV_SET, PV_FROZENSET: items. */
size_t pv_count(const struct pv *v);
struct pv pv_at(const struct pv *v, size_t i);

/* PV_DICT: pairs; pv_count gives how many. */
struct pv pv_key_at(const struct pv *v, size_t i);
struct pv pv_value_at(const struct pv *v, size_t i);
/* The value of a str key of a dict, or false. Linear. */
bool pv_dict_get(const struct pv *dict, const char *key, struct pv *out);

/* PV_GLOBAL, or the class of a PV_OBJECT when that is a global: exact comparison. */
bool pv_is(const struct pv *v, const char *module, const char *name);
/* PV_GLOBAL: "module" and "name"; false for other kinds. NUL-terminated. */
bool pv_global(const struct pv *v, const char **module, const char **name);

/* PV_OBJECT. Absent parts are PV_NONE. args is a PV_TUPLE. */
struct pv pv_class(const struct pv *v);
struct pv pv_args(const struct pv *v);
struct pv pv_kwargs(const struct pv *v);
struct pv pv_state(const struct pv *v);
struct pv pv_list_items(const struct pv *v); /* PV_LIST or PV_NONE: APPEND(S) on it */
struct pv pv_dict_items(const struct pv *v); /* PV_DICT or PV_NONE: SETITEM(S) on it */

/* PV_PERSID: its argument. */
struct pv pv_persid(const struct pv *v);

/* True and the number for PV_INT >= 0 (PV_BOOL is no number). */
bool pv_u64(const struct pv *v, uint64_t *out);

/* A mark for walks (cycle detection): identity of the node, 0 for immediate values. */
uintptr_t pv_identity(const struct pv *v);

#endif
