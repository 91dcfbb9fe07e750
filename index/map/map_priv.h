/* SPDX-License-Identifier: MIT */
/* index/map/map_priv.h - a parsed map, as the files of this folder see it. */
#ifndef UFS_INDEX_MAP_PRIV_H
#define UFS_INDEX_MAP_PRIV_H

#include "index/map/map.h"
#include "index/map/pattern.h"
#include "index/shape.h"

struct arena;
struct json;

/* Expressions (index/map/expr.h) are kept as text: shapes are known per tensor only. */
enum op_kind {
    OP_CUT,
    OP_UNSTACK,
    OP_TRANSPOSE,
    OP_DEINTERLEAVE,
    OP_INTERLEAVE,
    OP_SHIFT
};

struct map_op {
    enum op_kind kind;
    uint32_t axis;
    const char *from, *to; /* cut: first element, first one left out */
    const char *as;        /* unstack, shift: the name that the index gets */
    const char *of, *by;   /* shift: the name of a number, and what is added to it */
    const char *groups, *block; /* (de)interleave: NULL: 1 */
    const uint32_t *order;      /* transpose; NULL: reversed */
    uint32_t norder;
};

/* A share of an axis: what it becomes (split) or comes from (join). */
struct map_part {
    const char *key;  /* template or pattern */
    const char *rows; /* of each group; NULL: an equal share */
};

/* "config.NAME" is one of these texts. */
struct map_text {
    const char *name;
    const char *const *choice;
    size_t nchoice;
    bool or_none; /* null among them: or there is no such text */
};

/* A checkpoint with these texts, and for which `when` is not 0, is refused. */
struct map_refusal {
    const struct map_text *text;
    size_t ntext;
    const char *when; /* an expression, or NULL */
    const char *why;
};

/* Results of this name have this shape: an expression per axis. */
struct map_shape {
    const char *of;
    const char *const *dim;
    size_t ndim;
};

enum rule_kind { RULE_TO, RULE_SPLIT, RULE_DROP, RULE_REFUSE, RULE_JOIN, RULE_STACK };

struct map_rule {
    unsigned number; /* from 1, as people count */
    enum rule_kind kind;
    const char *const *from; /* patterns; of a join the parts have them */
    size_t nfrom;
    const struct map_op *op;
    size_t nop;
    const char *to;     /* template */
    const char *refuse; /* why no checkpoint that has such a tensor is taken */
    uint32_t axis;      /* of split, join and stack */
    const char *groups;
    const char *by; /* stack: the name that gives the index */
    const struct map_part *part;
    size_t npart;
    enum dtype cast;  /* DTYPE_NONE: as it is */
    unsigned roles;   /* bits 1 << enum role */
    const char *when; /* an expression: not of models for which it is 0; or NULL */
    const struct map_text *text; /* of those alone whose config.json has all of these */
    size_t ntext;
    bool optional;
};

struct map_variable {
    const char *name;
    const char *const *choice; /* expressions; the first one that has a value counts */
    size_t nchoice;
};

enum map_other { OTHER_KEEP, OTHER_DROP, OTHER_REFUSE };

struct map {
    struct arena *arena; /* all else */
    const char *name;
    const struct map_rule *rule;
    size_t nrule;
    const struct map_variable *variable;
    size_t nvariable;
    const struct map_text *models; /* the families that it is for; NULL: not told */
    const struct map_refusal *refusal;
    size_t nrefusal;
    const struct map_shape *shape;
    size_t nshape;
    enum map_other other;
    enum dtype cast; /* of every tensor of role model of another float type */
    bool wants_config;
    bool module_weights; /* where a tensor has a 16-bit copy, that is the model's */
};

/* Is it of a type that a cast changes? */
bool map_casts(enum dtype from, enum dtype to);

#endif
