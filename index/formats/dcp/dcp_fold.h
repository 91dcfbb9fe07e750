/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_fold.h - the classes of a .metadata, each folded into a table's row. */
#ifndef UFS_INDEX_FORMATS_DCP_FOLD_H
#define UFS_INDEX_FORMATS_DCP_FOLD_H

#include "index/formats/dcp/dcp_metadata.h"
#include "index/formats/pickle/pickle.h"

struct err;

/* What the dicts told of a key so far. */
struct dcp_key {
    uint32_t entry;   /* + 1 */
    uint32_t wrapper; /* bytes */
    uint32_t whole;   /* shape + 1 */
};

/* What is at work while a .metadata is read; the folds' `user`. */
struct dcp_loader {
    struct dcp_metadata *m;
    uint64_t bytes; /* of the file */
    /* Room in the tables of `m`. */
    uint32_t entries, tensors, chunks, stored, indexes;
    /* The dicts whose pairs were taken as they were read (pv_identity), 0: none yet. */
    uintptr_t state_dict, planner, storage;
    struct dcp_key *key; /* by number of the key */
    uint32_t keys;       /* room */
    /* The row for values of storage_data that are no _StorageInfo. */
    bool has_bad_info;
    uint32_t bad_info;
};

/* What a PV_RECORD stands for: the kind in its upper byte, a number below. */
enum dcp_fold_kind {
    DCP_FOLD_SHAPE = 1, /* torch.Size */
    DCP_FOLD_PROPERTIES,
    DCP_FOLD_CHUNK,
    DCP_FOLD_TENSOR,
    DCP_FOLD_INDEX,
    DCP_FOLD_STORED,
    DCP_FOLD_PLAN, /* a rank's plan of its save, or a piece of one: not used */
};

/* Is it a record of this kind? Its row then. */
bool dcp_folded(const struct pv *v, enum dcp_fold_kind kind, uint32_t *row);

/* An index whose fqn is no string. */
enum { DCP_NO_KEY = 0xffffffffu };

extern const struct pickle_fold dcp_folds[];
extern const size_t dcp_nfolds;

/* The number of a PV_STR as a key. */
int dcp_key_of(struct dcp_loader *l, const struct pv *v, uint32_t *key, struct err *e);

/* Is it the class of non-tensor values? */
bool dcp_is_object(const struct pv *v);

/* A value of state_dict_metadata: the tensor's row, DCP_OBJECT, or a row that is bad. */
int dcp_tensor_of(struct dcp_loader *l, const struct pv *v, uint32_t *tensor,
                  struct err *e);

/* The number of a torch.Size, a plain tuple or list; DCP_NO_SHAPE for None. */
int dcp_shape_of(struct dcp_loader *l, const struct pv *v, uint32_t *shape,
                 struct err *e);

/* A value of storage_data: its row, or one that is bad. */
int dcp_stored_of(struct dcp_loader *l, const struct pv *v, uint32_t *stored,
                  struct err *e);

int dcp_add_entry(struct dcp_loader *l, const struct dcp_entry *entry, struct err *e);

#endif
