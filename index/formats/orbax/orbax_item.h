/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_item.h - one directory that Orbax saved a tree of arrays in. */
#ifndef UFS_INDEX_FORMATS_ORBAX_ORBAX_ITEM_H
#define UFS_INDEX_FORMATS_ORBAX_ORBAX_ITEM_H

#include "base/base.h"

struct err;
struct listing;
struct orbax_member;
struct orbax_told;
struct scan_context;
struct sink;

/* For bids, and of the directories of a step. */
enum orbax_dir {
    ORBAX_NONE,
    ORBAX_UNFINISHED, /* a tree, or processes' parts of one, without its data's index */
    ORBAX_TREE,       /* _METADATA (or, until 0.5, a file `checkpoint`) and arrays */
    ORBAX_STORE,      /* arrays in an OCDBT store, and nothing else */
    ORBAX_JSON,       /* one file with JSON, beside marks */
};

/* What the directory is, by its names; *file: of ORBAX_JSON. */
enum orbax_dir orbax_dir_kind(struct listing *l, const char **file);

/* Has the name that Orbax gives the stores of single processes? */
bool orbax_is_process(const char *name);

struct orbax_item {
    const char *dir;  /* relative to the checkpoint's directory; "": itself */
    const char *part; /* sink_tensor.part; NULL: the main one. Names its objects too */
};

/*
 * Python's JSON (NaN is no JSON) of a file, as objects.json spells it; the caller frees
 * *text. What was read is not checked.
 */
int orbax_read_json(struct listing *l, const char *name, size_t max, char **text,
                    size_t *len, struct err *e);

/* Reports a member of such a text as an object, unless it says nothing: null, {}, []. */
int orbax_member_object(struct sink *sink, const char *key, size_t key_len,
                        const struct orbax_member *m, struct err *e);

/* What is found on the way. Zero at the start; several items add up. */
struct orbax_told {
    bool ocdbt, zarr3;
    uint64_t processes;
    char mesh[256]; /* JSON object, or "" */
};

/*
 * Reports all arrays, numbers and texts of the item and hides its files. Errors are those
 * of the store: nothing of the item can then be trusted.
 */
int orbax_item_report(const struct scan_context *c, struct sink *sink,
                      const struct orbax_item *item, struct orbax_told *told,
                      struct err *e);

#endif
