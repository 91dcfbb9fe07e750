/* SPDX-License-Identifier: MIT */
/* index/map/map_work.h - a running filter, and what is being made of a tensor by it. */
#ifndef UFS_INDEX_MAP_WORK_H
#define UFS_INDEX_MAP_WORK_H

#include "index/map/boxes.h"
#include "index/map/map_priv.h"
#include "index/map/quantised.h"

/* A tensor of the source that a rule has taken. */
struct taken {
    struct sink_taken t; /* in the filter's arena */
    const struct map_rule *rule;
    size_t part; /* of a join */
    struct captures captures;
};

struct filter {
    struct sink_filter base;
    const struct map *map;
    struct json *config; /* or NULL */
    struct json
        *source; /* settings that the checkpoint has, when the scan is done; or NULL */
    struct arena *arena;
    struct taken *taken;
    size_t ntaken, cap;
    size_t *used; /* tensors a rule has taken */
    bool *off;    /* is this rule one of other models ("when")? */
    bool casts;
    struct quantised quantised; /* looked at where something is cast */
    uint64_t bytes;             /* of the tensors that rules were run on so far */
    uint64_t unstacked;         /* tensors that "unstack" has made of them */
    size_t left; /* tensors of the model that no rule names, and some of their keys */
    char left_name[3][120];
};

/* What is being made of one or more tensors of the source. */
struct work {
    struct filter *f;
    struct sink *sink;
    const struct map_rule *rule;   /* NULL: only a cast */
    const struct sink_taken *like; /* part, dtype, role of the result */
    struct boxes boxes;
    struct captures captures;
    const char *fault;     /* of the source, or NULL */
    const char *fault_key; /* whose it is */
};

/* The boxes of a taken tensor, to work on; in the arena. */
int work_load(struct arena *a, const struct taken *t, struct work *w, struct err *e);

/* All operations of the rule, then "to" or "split": reports one tensor or many. */
int work_run(struct work *w, struct err *e);

/* One operation; none that makes several tensors of one. */
int work_op(struct work *w, const struct map_op *op, struct err *e);

/* Reports the tensor under the name that the template gives, or its own (NULL). */
int work_put(const struct work *w, const char *name, struct err *e);

/* The number of an expression for this axis. */
int work_count(const struct work *w, uint32_t axis, const char *text, uint64_t absent,
               uint64_t *out, struct err *e);

/* -EINVAL: the tensor has no such axis. */
int work_axis(const struct work *w, uint32_t axis, struct err *e);

/* All tensors of a rule that brings several together (join, stack). */
int group_put_all(struct filter *f, struct sink *s, const struct map_rule *rule,
                  struct err *e);

#endif
