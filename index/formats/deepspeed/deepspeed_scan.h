/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_scan.h - one save while it is scanned. */
#ifndef UFS_INDEX_FORMATS_DEEPSPEED_DEEPSPEED_SCAN_H
#define UFS_INDEX_FORMATS_DEEPSPEED_DEEPSPEED_SCAN_H

#include "base/base.h"
#include "base/buf.h"
#include "base/keyset.h"
#include "index/formats/deepspeed/deepspeed.h"
#include "index/formats/deepspeed/deepspeed_cut.h"
#include "index/formats/deepspeed/deepspeed_files.h"
#include "index/formats/format.h"
#include "index/formats/pickle/pickle.h"
#include "index/formats/torch/torch_file.h"
#include "index/shape.h"

struct arena;

enum {
    DS_MAX_STATES = 32, /* names of optimizer states; Adam has three */
    DS_MASTER = 0,      /* the slot of the weights themselves, before the states */
};

/* A parameter as model states tell it. Name and sizes live as long as the scan. */
struct ds_param {
    const char *name;
    size_t len;
    const uint64_t *dim; /* nd of them */
    uint32_t nd;
    uint32_t group; /* its list in param_shapes */
    uint64_t elements;
    uint64_t at;     /* stages 1, 2: element of the group; 3: of a rank's sub-groups */
    uint64_t dealt;  /* stages 1, 2: where it lay before the group was dealt out */
    bool elsewhere;  /* an earlier pipeline stage has it too */
    uint32_t joined; /* AutoEP: sets of ranks whose experts are one tensor, or 0 */
};

/* Where a one-dimensional tensor of an optimizer file lies. */
enum ds_flat_kind { DS_FLAT_NONE, DS_FLAT_VECTOR, DS_FLAT_SCALAR, DS_FLAT_PACKED };

struct ds_flat {
    uint64_t at;    /* byte of the file */
    uint64_t count; /* elements */
    uint8_t kind, dtype, flags;
};

/* A layer of experts. */
struct ds_experts {
    const char *layer; /* the name before the experts */
    size_t len;
    uint64_t local; /* experts of a rank */
    uint64_t total; /* of all */
    uint64_t sets;  /* ranks that have different ones */
};

/* A layer that AutoEP replaced: PREFIX.w1, .w2 and .w3. */
struct ds_autoep {
    const char *prefix; /* len bytes, not ended */
    size_t len;
    uint64_t total, local, sets; /* experts of all, of a rank; ranks that have others */
    const char *why;             /* not NULL: they cannot be joined */
};

/* One optimizer file. */
struct ds_rank {
    const char *path;
    uint32_t file;
    struct ds_flat *flat; /* [group * nslots + slot] */
};

/* One model-parallel rank: its parameters, and the ranks that share the optimizer. */
struct ds_part {
    uint32_t mp;
    struct torch_file model;     /* model states of its first rank; stays open */
    struct pv root, module;      /* module: PV_NONE, or a dict */
    const struct ds_file *files; /* of model states */
    size_t nmodels;              /* one, or one a rank */
    const struct ds_file *optim; /* nranks of them */
    struct ds_param *param;      /* in the order of param_shapes */
    size_t nparams;
    const struct ds_param **by_name;
    struct ds_param *frozen;
    const struct ds_param **frozen_by_name;
    size_t nfrozen;
    struct ds_flat *fragment; /* stage 3: [rank * nfrozen + i] */
    uint32_t *fragment_file;  /* stage 3: by rank */
    bool quantised;           /* stage 3: frozen ones may be codes without scales */
    uint32_t nlists;          /* of param_shapes */
    bool has_shapes;

    /* Of the optimizer files; nranks is 0 where there are none, or some are lost. */
    uint32_t nranks, ngroups, nslots;
    bool incomplete;  /* of what ranks saved not all files are there */
    const char *lost; /* what is missing: no master is read; NULL: nothing */
    size_t *first;    /* stages 1, 2: the first parameter of each group */
    uint64_t *length; /* stages 1, 2: elements of each group, with gaps */
    uint64_t *begin;  /* stage 3: where each sub-group begins on a rank */
    uint64_t *count;  /* of each group: ranks that it is cut over */
    bool *stated;     /* of each group: the first rank has a state of it */
    const char *slot[DS_MAX_STATES];
    bool table[DS_MAX_STATES];  /* of the slot: no state of parameters */
    struct ds_experts *experts; /* one a layer of experts; nexperts of them */
    size_t nexperts;
    struct ds_autoep *autoep; /* nautoep of them */
    size_t nautoep;
    struct ds_rank *rank;
};

/* A layer of a pipeline that is a tied module: its names in the optimizer. */
struct ds_tied {
    uint32_t layer;
    const char *name; /* "tied_modules.KEY.", len bytes, not ended */
    size_t len;
};

struct ds_scan {
    const struct scan_context *c;
    struct sink *sink;
    const struct deepspeed_how *how;
    struct deepspeed_told *told;
    struct listing *listing; /* of the directory */
    struct arena *arena;
    struct ds_files files;
    struct ds_part *part; /* arena; nparts of them */
    size_t nparts;
    uint32_t tensor;       /* ranks whose pieces are joined by the notes; 1: none are */
    struct ds_notes notes; /* where there are several of them */
    bool universal;
    bool slices;           /* a universal one of several tensor-parallel ranks */
    int stage;             /* of ZeRO */
    struct keyset seen;    /* NAMEs that were reported */
    struct keyset buffers; /* NAMEs of buffer_names, of a pipeline */
    struct keyset own;     /* uint32_t: layers that have something called N.KEY */
    struct ds_tied *tied;  /* ntied of them, each of another layer */
    size_t ntied;
    struct buf key;
    const struct err *damage; /* see ds_each_file_or_damage() */
};

/* ---- deepspeed_graph.c: values of a pickle ---- */

/* The value of a key of a dict or OrderedDict. */
bool ds_get(const struct pv *mapping, const char *key, struct pv *out);

/* The same for one that is there and not None. */
bool ds_get_some(const struct pv *mapping, const char *key, struct pv *out);

/*
 * The same for a setting of ZeRO's, in the configuration that model states have. A training
 * script that gave the name of a file left no more than that name there.
 */
bool ds_zero_option(const struct pv *root, const char *key, struct pv *out);

/* A non-negative int, or the int of an Enum (REDUCE of its class on it). */
bool ds_number(const struct pv *v, uint64_t *out);

/*
 * torch.Size, or a tuple or list, of non-negative ints into the parameter. -EBADMSG for
 * what is no shape or has more elements than can be counted.
 */
int ds_shape(struct arena *a, const struct pv *v, struct ds_param *out, struct err *e);

/* A text for messages, NUL-terminated and short. */
const char *ds_text(const char *name, size_t len, char *dst, size_t size);

/* ---- deepspeed_model.c: model states ---- */

/* Opens the model states of one model-parallel rank and takes what they tell. */
int ds_model_open(struct ds_scan *s, struct ds_part *p, struct err *e);

/* A parameter by its name, or NULL; the same for frozen ones. */
const struct ds_param *ds_param_find(const struct ds_part *p, const char *name,
                                     size_t len);
const struct ds_param *ds_frozen_find(const struct ds_part *p, const char *name,
                                      size_t len);

/* Makes by_name of the parameters; -EBADMSG where two have one name. */
int ds_params_index(struct ds_scan *s, struct ds_part *p, struct err *e);

/* ---- deepspeed_notes.c: where there are no param_shapes ---- */

/*
 * Takes the parameters of stages 1 and 2 from the notes of all ranks, with the shapes that
 * model states have; p->has_shapes stays false where these do not tell all.
 */
int ds_notes_read(struct ds_scan *s, struct ds_part *p, struct err *e);

/* ---- deepspeed_probe.c: whether masters are those of the model's copy ---- */

enum { DS_PROBE = 64 }; /* elements that are compared at a time */

/* Elements one behind the other. `path` is NULL: there are none that can be read so. */
struct ds_place {
    const char *path;
    uint32_t file;
    uint64_t at, count;
    enum dtype dtype;
};

/* Are both of types that ds_probe() compares? */
bool ds_probe_can(const struct ds_place *master, const struct ds_place *copy);

/*
 * Reads `n` elements of each, DS_PROBE at most, from `first` and `from` on. 1: the copy's are
 * the masters', rounded to its type; 0: they are others.
 */
int ds_probe(struct ds_scan *s, const struct ds_place *master, uint64_t first,
             const struct ds_place *copy, uint64_t from, size_t n, struct err *e);

/*
 * Reads `n` elements of each, DS_PROBE at most, from the beginning. 1: half of them or more
 * are nearly the same, as copies are that went on apart, or they are no floating point
 * numbers of 16 or 32 bits; 0: they are others.
 */
int ds_probe_alike(struct ds_scan *s, const struct ds_place *a,
                   const struct ds_place *b, size_t n, struct err *e);

/* ---- deepspeed_batch.c: many files ---- */

/*
 * Registers, loads (in parallel) and closes each file, and calls fn on the scan's thread
 * while it is open, in order. Paths live as long as the scan.
 */
typedef int ds_file_fn(void *user, size_t i, const struct torch_file *f, struct err *e);
int ds_each_file(struct ds_scan *s, const struct ds_file *files, size_t n,
                 ds_file_fn *fn, void *user, struct err *e);

/* The same; fn sees a damaged file without its graph (zip NULL): ds_scan.damage says why. */
int ds_each_file_or_damage(struct ds_scan *s, const struct ds_file *files, size_t n,
                           ds_file_fn *fn, void *user, struct err *e);

/* ---- deepspeed_entry.c: a part of a file's object, as it is ---- */

struct ds_entry {
    const struct torch_file *f;
    const char *path;     /* of the value in the object; "" for the whole */
    const char *prefix;   /* before the paths of tensors */
    int role;             /* of the tensors */
    struct keyset *taken; /* paths of tensors to leave out, or NULL */
    uint64_t tensors;     /* reported */
};

/* Reports the tensors. */
int ds_entry_tensors(struct ds_scan *s, struct ds_entry *x, struct pv v, struct err *e);

/* Reports the value as the object KEY (after deepspeed_how.object). */
int ds_entry_object(struct ds_scan *s, struct ds_entry *x, const char *key,
                    const struct pv *v, struct err *e);

/* ---- deepspeed_optim.c: optimizer states ---- */

/* Reads all optimizer files of the part, and reports what in them belongs to no parameter. */
int ds_optim_read(struct ds_scan *s, struct ds_part *p, struct err *e);

/* ---- deepspeed_layout.c: which elements are which parameter's ---- */

/* Sets ds_param.at once the first rank is read. `dict`: its optimizer_state_dict. */
int ds_layout_begin(struct ds_scan *s, struct ds_part *p, const struct pv *dict,
                    struct err *e);

/*
 * Which groups of the first rank those of another rank are, into order[0..ngroups), by the
 * names in its param_slice_mappings. `counts`: its partition_count, a list of ngroups.
 * -ENOTSUP: it does not tell, or they are others.
 */
int ds_layout_order(const struct ds_scan *s, const struct ds_part *p,
                    const struct pv *dict, const struct pv *counts, uint32_t *order,
                    struct err *e);

/*
 * Compares with param_slice_mappings, in which newer versions note which elements of which
 * parameter each rank has. Ranks come in order. `order`: of the rank's groups, or NULL.
 */
int ds_layout_compare(const struct ds_scan *s, const struct ds_part *p, uint32_t r,
                      const uint32_t *order, const struct pv *dict, struct err *e);

/* Refuses what does not fit exactly, once all ranks are read. */
int ds_layout_end(const struct ds_scan *s, const struct ds_part *p, struct err *e);

/* How many sets of ranks hold a group's parameters: 1, for experts as many as share them. */
uint32_t ds_sets(const struct ds_part *p, uint32_t group);

/* ---- deepspeed_tensors.c: flat groups as tensors ---- */

/*
 * A piece of a tensor: elements [begin, begin + count) of it, row by row, lie at byte `at` of a
 * file.
 */
struct ds_piece {
    uint32_t file;
    uint64_t at, begin, count;
    uint8_t flags;
};

/* Adds a piece to the tensor that was begun at the sink. */
int ds_add_piece(struct ds_scan *s, const struct shape *shape, enum dtype dtype,
                 const struct ds_piece *piece, struct err *e);

/* Where a parameter lies: pieces of it, in any order. `struct ds_runs r = {0}`. */
struct ds_runs {
    struct ds_piece *piece; /* malloc */
    size_t count, cap;
};

int ds_runs_add(struct ds_runs *r, const struct ds_piece *piece, struct err *e);
void ds_runs_release(struct ds_runs *r);

/*
 * Adds the pieces of a part's own parameter in a slot, which are of that type. What lacks or
 * does not fit is a fault of the tensor that was begun at the sink.
 */
int ds_runs_collect(struct ds_scan *s, const struct ds_part *p,
                    const struct ds_param *x, uint32_t slot, enum dtype dtype,
                    struct ds_runs *out, struct err *e);

/* The group that tells which states and types a parameter has; NULL: there is none. */
const struct ds_flat *ds_first_flat(struct ds_scan *s, const struct ds_part *p,
                                    const struct ds_param *x, uint32_t slot);

/* Sizes of a parameter as the sink wants them. */
void ds_shape_of(const struct ds_param *x, struct shape *out);

/*
 * Begins a tensor; where its key is taken already, as FILE:KEY. `file` is the path of the
 * file that the key is of.
 */
int ds_begin(struct ds_scan *s, const char *file, const struct sink_tensor *t,
             struct err *e);

/* Masters, and optimizer states, of all parameters of a part. */
int ds_report_masters(struct ds_scan *s, struct ds_part *p, struct err *e);
int ds_report_states(struct ds_scan *s, struct ds_part *p, struct err *e);

/* The master of `x` under another name, unless that is reported already. */
int ds_report_alias(struct ds_scan *s, const struct ds_part *p,
                    const struct ds_param *x, const char *name, size_t len,
                    struct err *e);

/* ---- deepspeed_frozen.c: parameters that are not trained ---- */

/* Also what else the model states of other ranks than the first hold (stage 3). */
int ds_report_frozen(struct ds_scan *s, struct ds_part *p, struct err *e);

/*
 * Stage 3: reads the parts of all ranks, and reports what else their model states hold; for
 * ds_frozen_runs().
 */
int ds_frozen_read(struct ds_scan *s, struct ds_part *p, struct err *e);

/* The type of the i-th frozen parameter, F32 where nothing of it is there. */
enum dtype ds_frozen_type(const struct ds_part *p, size_t i);

/* Adds its pieces; faults are those of the tensor begun. */
int ds_frozen_runs(struct ds_scan *s, const struct ds_part *p, size_t i,
                   struct ds_runs *out, struct err *e);

/* Stage 3: the frozen `x` under another name, unless that is reported already. */
int ds_report_frozen_alias(struct ds_scan *s, const struct ds_part *p,
                           const struct ds_param *x, const char *name, size_t len,
                           struct err *e);

/* ---- deepspeed_experts.c: names of experts ---- */

/* Counts the experts of groups that only some ranks share. -ENOTSUP: not DeepSpeed's names. */
int ds_experts_count(struct ds_scan *s, struct ds_part *p, struct err *e);

/*
 * The name that a parameter has on the ranks of one set: experts are numbered from 0 on
 * each rank. `out` is emptied first.
 */
int ds_expert_name(const struct ds_part *p, const struct ds_param *x, uint32_t set,
                   struct buf *out, struct err *e);

/* ---- deepspeed_autoep.c: experts of a rank in one tensor ---- */

/* What model states tell of layers that AutoEP replaced. */
int ds_autoep_take(struct ds_scan *s, struct ds_part *p, struct err *e);

/* The layer whose w1, w2 or w3 has that name, or NULL. */
const struct ds_autoep *ds_autoep_find(const struct ds_part *p, const char *name,
                                       size_t len);

/* How much of "PREFIX.w1.12", one expert's, is the name of all; 0: it is no such name. */
size_t ds_autoep_whole(const struct ds_part *p, const char *name, size_t len);

/* Sets ds_param.joined of such a weight. 1: it is one; 0: it is none. */
int ds_autoep_join(const struct ds_part *p, struct ds_param *x, struct err *e);

/* ---- deepspeed_module.c: the copy that the model computed with ---- */

/* Notes a NAME. 1: it is new, 0: it was reported already, -ENOMEM. */
int ds_see(struct ds_scan *s, const char *name, size_t len, struct err *e);

/* Names that share a tensor with another one. */
int ds_report_tied(struct ds_scan *s, struct ds_part *p, struct err *e);

/* Tensors of a dict {NAME: tensor} of a file, and what else is in it. */
int ds_report_module(struct ds_scan *s, const struct torch_file *f,
                     const struct pv *dict, struct err *e);

/*
 * The same for a layer of a pipeline, whose keys are layer_NN/KEY. Of role model where there
 * is no master called N.KEY, or tied_modules.X.KEY for the layer of X.
 */
int ds_report_layer(struct ds_scan *s, const struct torch_file *f, uint32_t layer,
                    struct err *e);

/* ---- deepspeed_tied.c: layers of a pipeline that are tied modules ---- */

/* Notes a layer's number where NAME begins with one, as "2.weight" does. */
int ds_own_layer(struct ds_scan *s, const char *name, size_t len, struct err *e);

/* Finds them, once buffer_names and the optimizer's files are read. */
int ds_tied_find(struct ds_scan *s, struct err *e);

/* The tied module that a layer is, or NULL. */
const struct ds_tied *ds_tied_of(const struct ds_scan *s, uint32_t layer);

/* What of the dict is no tensor. */
int ds_module_objects(struct ds_scan *s, const struct torch_file *f,
                      const struct pv *dict, struct err *e);

/* ---- deepspeed_join.c: pieces of tensor-parallel ranks ---- */

/* Everything of the parts of one pipeline stage, s->tensor of them from `p` on. */
int ds_join_stage(struct ds_scan *s, struct ds_part *p, struct err *e);

/* Masters and states of one stage, cut as deepspeed_how.rule says. */
int ds_join_states(struct ds_scan *s, struct ds_part *p, struct err *e);

/* -ENOTSUP: patterns of the notes are no parameter's, as after a change of names. */
int ds_join_end(struct ds_scan *s, struct err *e);

/* ---- deepspeed_objects.c: what is no tensor of the model ---- */

/* Of the first rank's model states: all of it. */
int ds_model_objects(struct ds_scan *s, const struct ds_part *p, struct err *e);

/* Of other ranks': what the user's script saved; their keys begin with "FILE:". */
int ds_rank_objects(struct ds_scan *s, const struct torch_file *f, struct err *e);

/* ---- deepspeed_universal.c: what ds_to_universal.py makes ---- */

/* Reports the files below zero/; the parts are open. */
int ds_universal_report(struct ds_scan *s, struct err *e);

#endif
