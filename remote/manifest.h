/* SPDX-License-Identifier: MIT */
/* remote/manifest.h - the list of a directory's files for servers that show none. */
#ifndef UFS_REMOTE_MANIFEST_H
#define UFS_REMOTE_MANIFEST_H

#include "base/buf.h"

struct err;
struct manifest;
struct store;

/*
 * In the directory that it tells of: {"unshard_manifest": 1, "files": {PATH: SIZE, ...}}.
 * Paths are percent-encoded, as in a URL, so that names of any bytes are JSON.
 */
#define MANIFEST_NAME "unshard-manifest.json"
enum { MANIFEST_BYTES_MAX = 512 << 20 };

struct manifest_file {
    const char *path; /* decoded */
    uint64_t size;
};

/* -EBADMSG: it is none, or has names that cannot be a path below its directory. */
int manifest_parse(const char *text, size_t len, struct manifest **out, struct err *e);
struct manifest *manifest_get(struct manifest *m); /* one more reference */
void manifest_put(struct manifest *m);             /* NULL is fine */
void manifest_putp(struct manifest **m);

/*
 * What is directly in the directory `path` ("" the root): calls fn with each name once, in
 * order. -ENOENT: nothing is in there. Stops at and returns what is not 0.
 */
typedef int manifest_entry_fn(void *user, const char *name, bool is_dir, uint64_t size);
int manifest_list(const struct manifest *m, const char *path, manifest_entry_fn *fn,
                  void *user);

/*
 * The manifest of all regular files of a store but manifests; *files: how many. What is
 * no regular file (and links that lead out) is counted in *others.
 */
int manifest_make(struct store *s, struct buf *out, uint64_t *files, uint64_t *others,
                  struct err *e);

#endif
