/* SPDX-License-Identifier: MIT */
/* index/catalog_view.h - rows of views: the one safetensors file of a role. */
#ifndef UFS_INDEX_CATALOG_VIEW_H
#define UFS_INDEX_CATALOG_VIEW_H

#include "index/catalog_tensor.h"
#include "index/view.h"

/* Builds a view within the transaction that is open on n (view.c). */
int view_build(struct conn *n, const struct checkpoint_info *cp, enum view_kind kind,
               enum view_prefix prefix, struct err *e);

/* 1: found; 0: not built yet. A view without members has size 0. */
int view_row_get(struct conn *n, int64_t checkpoint, enum view_kind kind,
                 enum view_prefix prefix, struct arena *a, struct view_info *out,
                 struct err *e);

/* Blocks of a view are not there: -ESTALE when it is gone, else the index is damaged. */
int view_missing(struct conn *n, int64_t view, struct err *e);

/* An id for a new view. */
int view_row_id(struct conn *n, int64_t *id, struct err *e);
int view_row_put(struct conn *n, int64_t checkpoint, enum view_prefix prefix,
                 const struct view_info *v, uint64_t members, struct err *e);

/* Blocks of the header (all but the last of VIEW_BLOCK bytes), and of the members. */
enum { VIEW_BLOCK = 1 << 16 };
enum view_table { VIEW_HEADERS, VIEW_MEMBERS };
int view_block_put(struct conn *n, enum view_table table, int64_t view, uint32_t number,
                   const void *data, size_t len, struct err *e);
/* 1, or 0: there is none. The bytes replace what is in out. */
int view_block_get(struct conn *n, enum view_table table, int64_t view, uint32_t number,
                   struct buf *out, struct err *e);
int view_blocks_delete(struct conn *n, int64_t view, struct err *e);

/*
 * Tensors of a role. `drop` leading bytes of a key are left out of its name: by the row
 * (wrapper) when `by_wrapper`. With `sorted`: by size of element, descending, then name.
 */
struct view_order {
    enum role role;
    bool sorted, by_wrapper;
    bool modules; /* names are without what wrappers of modules left in them */
    size_t drop;
};

int view_tensors(struct conn *n, int64_t checkpoint, const struct view_order *order,
                 int (*fn)(void *user, const struct tensor_row *t), void *user,
                 struct err *e);

/*
 * The longest wrapper of the role's tensors, whether all of them have this one, and whether
 * wrappers of modules left parts in some names.
 */
int view_wrapper(struct conn *n, int64_t checkpoint, enum role role, uint64_t *out,
                 bool *same, bool *modules, struct err *e);

/*
 * The file that may be served as a whole and holds exactly the `tensors` of the role, each
 * as one piece under its own key. 1 and its number and size, or 0.
 */
int view_whole_file(struct conn *n, int64_t checkpoint, enum role role,
                    uint64_t tensors, uint32_t *number, uint64_t *size, struct err *e);

/* Mode and time of a view that is a file without tensors. */
int view_file_attributes(struct conn *n, int64_t checkpoint, uint32_t number,
                         struct view_info *out, struct err *e);

/* Adds a warning that is not there yet. */
int view_warning(struct conn *n, int64_t checkpoint, const char *code, const char *text,
                 struct err *e);

#endif
