/* SPDX-License-Identifier: MIT */
/* save/merge_priv.h - what the parts of a merge share. */
#ifndef UFS_SAVE_MERGE_PRIV_H
#define UFS_SAVE_MERGE_PRIV_H

#include "base/keyset.h"
#include "save/merge.h"

struct arena;
struct hf_index;
struct name_slot;
struct save_input;
struct source;

#define NOT_THERE SIZE_MAX

struct entry {
    struct layout_tensor t;
    bool old;       /* of the checkpoint that is there */
    bool dead;      /* replaced, or removed */
    bool faulty;    /* old, and cannot be read */
    uint32_t ord;   /* old: in the index; also of what was written over an old one: */
    bool over;      /* then that was */
    enum dtype was; /* of this dtype, */
    struct shape was_shape;
    bool was_faulty;
    size_t file; /* else: of the spec, */
    struct incoming_data data;
};

/* What a text stands for. */
enum tag {
    TAG_KEY = 'k',
    TAG_MODEL = 'm',
    TAG_OPTIMIZER = 'o',
    TAG_FILE = 'f', /* in raw/ or tensors/, without `.npy` */
    TAG_TREE = 't', /* the same in tree/, of long keys */
    TAG_PATH = 'p', /* of a file that came: its number, and no entry */
};

struct merge {
    struct merge_spec spec;
    struct arena *arena;
    struct entry *entry;
    size_t entries, cap;
    size_t there; /* the first so many are, or were, of the checkpoint that is there */
    struct keyset whole;    /* keys that .npy files have */
    struct name_slot *slot; /* texts of all kinds */
    size_t slots, names;
    bool replaced[3]; /* roles of which a whole came */
    bool loose[3];    /* roles of which tensors came by themselves */
    bool adapter, changes, base;
    bool meet; /* without their wrappers two keys are one: none is dropped */
    struct layout_batch *batch; /* of each file */
    bool *wanted;               /* old tensors by ord */
    size_t olds;
    struct checkpoint_info info;
    struct save_input *input; /* the old ones that stay */
    struct layout_input in;
    struct layout_tensor *tensor;
    size_t *from; /* of each tensor written: its entry, or that of the input */
    struct err *e;
};

/* Does what is written depend on nothing but the files, now and before? */
static inline bool merge_is_new(const struct merge *m)
{
    return !m->spec.checkpoint || m->spec.made_by;
}

/* The entry (or file) that a text stands for, or NOT_THERE. */
size_t merge_find(const struct merge *m, enum tag tag, const char *text, size_t len);
/* The first one to have a name keeps it. */
int merge_name(struct merge *m, enum tag tag, const char *text, size_t len,
               size_t entry, struct err *e);
/* All that this tensor is called: its key, in its view, its file in raw/. */
int merge_name_entry(struct merge *m, size_t i, struct err *e);
/* A new entry; its key is copied. */
int merge_entry(struct merge *m, const struct entry *x, size_t *out, struct err *e);

/* A file that came as a source; what is wrong with it, as -EINVAL with its name. */
int merge_open(const struct merge *m, size_t file, struct source **out, struct err *e);
int merge_bad_file(const struct merge_file *f, struct err *e);

/* The tensors of a file of each kind, put into the place of those before. */
int merge_take_safetensors(struct merge *m, size_t file, struct err *e);
int merge_take_npy(struct merge *m, size_t file, struct err *e);
int merge_note_npy(struct merge *m, size_t file, struct err *e); /* all, before that */
int merge_take_raw(struct merge *m, size_t file, struct err *e);

/* Are the sets complete that the file is of, and those that an index names? */
int merge_check_set(const struct merge *m, const struct merge_file *f, struct err *e);
int merge_check_index(struct merge *m, size_t file, struct err *e);

#endif
