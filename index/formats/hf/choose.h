/* SPDX-License-Identifier: MIT */
/* index/formats/hf/choose.h - which files of a directory are the model, and why. */
#ifndef UFS_INDEX_FORMATS_HF_CHOOSE_H
#define UFS_INDEX_FORMATS_HF_CHOOSE_H

#include "base/base.h"
#include "index/formats/hf/safetensors_layout.h"
#include "index/formats/torch/torch_layout.h"

struct err;
struct listing;
struct shape;
struct sink;

enum hf_family { HF_SAFETENSORS, HF_TORCH };

/* What was found out about a candidate; in the order in which it is preferred. */
enum hf_state {
    HF_WHOLE,       /* so far as it was looked at */
    HF_PARTIAL,     /* files are missing or damaged, or their shapes are wrong */
    HF_PLACEHOLDER, /* its tensors have no elements: DeepSpeed's ZeRO-3 leaves such files */
    HF_ABSENT,      /* an index that names no file that is there */
};

/* Files that may be the model. Names are borrowed from the listing. */
struct hf_candidate {
    enum hf_family family;
    const char *main;
    struct safetensors_layout safetensors; /* of its family, */
    struct torch_layout torch;             /* or this one */
    enum hf_state state;
    bool looked;             /* into each file, not only at names */
    uint64_t files;          /* that belong to it */
    uint64_t tensors, empty; /* where it was looked: all, and those of shape [0] */
    char why[320];           /* for a state other than whole, in words */
};

enum { HF_CANDIDATES = 24 };

struct hf_choice {
    struct hf_candidate candidate[HF_CANDIDATES]; /* in transformers' order */
    size_t count;
    const struct hf_candidate *best; /* NULL: nothing may be a model */
    /* What each family's driver would read: of its best candidate, else an adapter, ... */
    struct safetensors_layout safetensors;
    struct torch_layout torch;
};

/*
 * All candidates of the directory, compared: a whole one wins over one that is not, and
 * among whole ones the first in transformers' order. Where there is only one, its files are
 * not looked into. The answer is kept with the listing, and never NULL.
 */
const struct hf_choice *hf_choose(struct listing *l);

/*
 * Looks into the files of the best one, where that was not done: what stands beside it may
 * be better. Returns its state.
 */
enum hf_state hf_choice_look(struct listing *l);

/* A tensor of a candidate's file; `shape` NULL: it is damaged. Below 0 ends it. */
typedef int hf_tensor_fn(void *user, const char *key, size_t len,
                         const struct shape *shape, struct err *e);

/* Calls fn for each tensor of the best one's files. */
int hf_choice_each(struct listing *l, hf_tensor_fn *fn, void *user, struct err *e);

/* What stands beside the best one proves that it is not whole, for this reason. */
void hf_choice_doubt(struct listing *l, const char *fmt, ...) PRINTF(2, 3);

/*
 * Reports to the sink why the best one is the model (sink_rule) and what was passed over,
 * whose files are watched.
 */
int hf_choice_report(struct listing *l, struct sink *sink, struct err *e);

/* The same where something else is the model: all candidates are passed over, and hidden. */
int hf_choice_pass(struct listing *l, const char *better, struct sink *sink,
                   struct err *e);

#endif
