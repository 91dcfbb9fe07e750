/* SPDX-License-Identifier: MIT */
/* index/map/map.h - tensors under another framework's names and shapes, as a file says. */
#ifndef UFS_INDEX_MAP_MAP_H
#define UFS_INDEX_MAP_MAP_H

#include "base/base.h"
#include "index/sink.h"

struct err;
struct map;

/*
 * Parses a map (unshard-maps(5)). `name` is for messages. -EINVAL with the rule and what
 * is wrong with it; -ENOTSUP for a version that is not known.
 */
int map_parse(const char *name, const char *text, size_t len, struct map **out,
              struct err *e);

/* A map that only casts tensors of role model and floating-point type. */
int map_parse_cast(enum dtype to, struct map **out, struct err *e);

/*
 * The map that comes with the program under this name ("megatron-to-hf"), or NULL.
 * map_shipped_name gives the names, NULL behind the last.
 */
const char *map_shipped(const char *name);
const char *map_shipped_name(size_t i);

void map_free(struct map *m); /* NULL is fine */
void map_freep(struct map **m);

/* Does it ask for values of config.json? */
bool map_wants_config(const struct map *m);

/* Does it cast? Then a quantised model is refused: see map_filter_own_config(). */
bool map_has_cast(const struct map *m);

/*
 * A filter for one scan. `config` is the text of a config.json (or NULL), from which
 * "config.NAME" takes its values; it is parsed here. Map and filter are used by one
 * thread at a time each; a map may serve many filters at once.
 */
int map_filter_new(const struct map *m, const char *config, size_t config_len,
                   struct sink_filter **out, struct err *e);

/*
 * The checkpoint's own config.json, which may say that it is quantised. Text that cannot
 * be read says nothing.
 */
void map_filter_own_config(struct sink_filter *f, const char *text, size_t len);
void map_filter_free(struct sink_filter *f); /* NULL is fine */
void map_filter_freep(struct sink_filter **f);

#endif
