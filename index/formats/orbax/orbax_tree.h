/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_tree.h - _METADATA: which leaves a saved tree has. */
#ifndef UFS_INDEX_FORMATS_ORBAX_ORBAX_TREE_H
#define UFS_INDEX_FORMATS_ORBAX_ORBAX_TREE_H

#include "base/base.h"

struct buf;
struct err;

enum orbax_kind {
    ORBAX_ARRAY,  /* an array of the store */
    ORBAX_SCALAR, /* a Python number, kept as an array without dimensions */
    ORBAX_STRING, /* its text is in _strings.json */
    ORBAX_EMPTY,  /* None or an empty container: `value` is its JSON */
    ORBAX_OTHER,  /* of a handler of somebody's own */
};

struct orbax_leaf {
    const char *name; /* its path joined with dots: also its name in the store */
    size_t len;
    enum orbax_kind kind;
    const char *type;  /* as it stands there; NULL: nothing does */
    const char *value; /* ORBAX_EMPTY */
    bool not_stored;   /* skip_deserialize: there is no value anywhere */
};

/*
 * Calls fn for each leaf of the file's text, in its order; what the leaf points to lasts
 * as long as the call. Errors of fn are returned; -EBADMSG when the text is no such JSON.
 * Memory is that of one leaf: there may be a hundred thousand.
 */
typedef int orbax_leaf_fn(void *user, const struct orbax_leaf *leaf, struct err *e);
int orbax_tree_each(const char *text, size_t len, orbax_leaf_fn *fn, void *user,
                    struct err *e);

/* A member of the outermost object; `value` points into the text, NULL: there is none. */
struct orbax_member {
    const char *name;
    const char *value;
    size_t len;
};

/*
 * Finds n members in the text of a JSON document that may be too large for a tree. Of a
 * text that is damaged those are found that stand before the damage, and false comes back.
 */
bool orbax_members(const char *text, size_t len, struct orbax_member *m, size_t n);

/*
 * The mesh that arrays were sharded over, out of _sharding's text, as a JSON object
 * {"x": 4, "y": 2}; false: it names none.
 */
bool orbax_mesh(const char *text, size_t len, struct buf *out);

#endif
