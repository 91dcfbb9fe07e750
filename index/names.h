/* SPDX-License-Identifier: MIT */
/* index/names.h - keys, roles and the file names that keys get in the mount. */
#ifndef UFS_INDEX_NAMES_H
#define UFS_INDEX_NAMES_H

#include "base/base.h"
#include "base/buf.h"
#include "index/sink.h"

/* The longest file name that a kernel takes. */
enum { NAME_MAX_BYTES = 255 };

/*
 * The role of a tensor: by part (directory or file of the checkpoint, NULL: none) where
 * that tells, else by the key's first dotted parts, as CONTRACT.md, "Words", says.
 */
enum role role_of(const char *part, const char *key, size_t key_len);

const char *role_name(enum role r); /* "model", "optimizer", "other" */

/*
 * Appends the file name of a key in tensors/ and raw/: '/', '%', control bytes, DEL,
 * invalid UTF-8 and a leading dot become %XX, an empty key "%empty"; then `suffix` (".npy"
 * or ""). What would pass 255 bytes is cut at a character and ends in '~' and the first
 * 16 hex digits of the key's SHA-256, before the suffix. Different keys give different
 * names. 0 or -ENOMEM.
 */
int name_of_key(const char *key, size_t len, const char *suffix, struct buf *out);

/*
 * The same for one dotted part of tree/: as a directory (`leaf` false; a trailing ".npy"
 * writes its dot as %2E) or as a file (leaf: with ".npy").
 */
int name_of_part(const char *part, size_t len, bool leaf, struct buf *out);

/*
 * The parts that wrappers of modules left inside a name (_orig_mod of torch.compile,
 * _checkpoint_wrapped_module, _fsdp_wrapped_module, module of DDP). The last part is the
 * parameter's own.
 */
bool name_has_modules(const char *name, size_t len);

/* Appends the name without them. */
int name_without_modules(const char *name, size_t len, struct buf *out);

/* The next dotted part of key at *pos; false at the end. An empty key has one empty part. */
bool key_part(const char *key, size_t len, size_t *pos, const char **part,
              size_t *part_len);

#endif
