/* SPDX-License-Identifier: MIT */
/* base/yaml_tree.h - YAML of configuration files as a tree of JSON: libyaml underneath, with limits. */
#ifndef UFS_BASE_YAML_TREE_H
#define UFS_BASE_YAML_TREE_H

#include "base/json.h"

/*
 * Parses one document of YAML in UTF-8 and gives its tree, for json_free(). Plain scalars
 * are what PyYAML takes them for (YAML 1.1): null, truths (yes, no, on, off too), decimal
 * integers and floats; numbers in any other notation, and all that is quoted, are strings.
 * Other tags than those of YAML itself say nothing: their value is the node's, scalars are
 * strings. Refused, with the line in the message: aliases (a few bytes can stand for any
 * number of nodes), keys that are no scalars, a key twice in one mapping, a second
 * document, more than 16 MiB, 64 levels or 1,000,000 nodes. -EBADMSG, -ENOMEM.
 */
int yaml_parse(const char *text, size_t len, struct json **out, struct err *e);

#endif
