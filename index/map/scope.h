/* SPDX-License-Identifier: MIT */
/* index/map/scope.h - what names in a map's expressions mean for one tensor. */
#ifndef UFS_INDEX_MAP_SCOPE_H
#define UFS_INDEX_MAP_SCOPE_H

#include "index/map/map_priv.h"

/*
 * "dim": elements of the axis that is worked on; "config.a.b": a number of config.json
 * (true is 1); "source.a": one of the settings that the checkpoint has; else a captured number or a variable of the map.
 */
struct scope {
    const struct map *map;
    const struct json *config; /* or NULL */
    const struct json *source; /* settings of the checkpoint, or NULL: not known yet */
    const struct captures *captures;
    uint64_t dim;
    unsigned depth; /* of variables that name variables */
    unsigned looked_up;
};

/*
 * A number of elements. `text` NULL: `absent`. -EINVAL where it is negative; else as
 * expr_eval.
 */
int scope_count(struct scope *s, const char *text, uint64_t absent, uint64_t *out,
                struct err *e);

/* The same for any number, negative ones too. */
int scope_number(struct scope *s, const char *text, int64_t *out, struct err *e);

/* The text of "config.a.b" or "source.a.b", or NULL. */
const char *scope_text(const struct scope *s, const char *name);

/* Is it one of these texts? */
bool scope_has_text(const struct scope *s, const struct map_text *t);

#endif
