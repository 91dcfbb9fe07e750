/* SPDX-License-Identifier: MIT */
/* remote/hub_tree.h - names and answers of the Hugging Face Hub's interface. */
#ifndef UFS_REMOTE_HUB_TREE_H
#define UFS_REMOTE_HUB_TREE_H

#include "base/base.h"
#include "base/buf.h"

struct err;

/* hf://[datasets/|spaces/]ORG/NAME[@REVISION][/PATH] in its parts, decoded. */
struct hub_name {
    const char *kind; /* "models", "datasets", "spaces" */
    char *repo;       /* "ORG/NAME", or "NAME" of an old one */
    char *revision;   /* "main" where none is given */
    char *path;       /* without slashes at its ends, "" for the root */
};

/*
 * A revision ends at the next '/', but for refs/pr/N and refs/convert/NAME; any other one
 * with a slash has it as %2F (huggingface_hub 0.34, hf_file_system.py). -EINVAL.
 */
int hub_name_parse(const char *url, struct hub_name *out, struct err *e);
void hub_name_release(struct hub_name *n);

struct hub_entry {
    const char *name; /* within its directory */
    const char *oid;  /* git's hash of it, or of what Git LFS has: SHA-256 */
    uint64_t size;
    bool is_dir;
};

/*
 * Reads one page of GET /api/KIND/REPO/tree/COMMIT/DIR and calls fn for each file and
 * directory directly in `dir`. -EBADMSG: no such page, a path outside of dir.
 */
typedef int hub_entry_fn(void *user, const struct hub_entry *entry, struct err *e);
int hub_tree_read(const char *text, size_t len, const char *dir, hub_entry_fn *fn,
                  void *user, struct err *e);

/*
 * The URL of the next page in a header `Link: <URL>; rel="next", ...`: 1 and it is appended,
 * or 0: there is none. -EBADMSG.
 */
int hub_next_page(const char *link, struct buf *out, struct err *e);

/* Is this a commit: 40 hex digits (64 in a repository with SHA-256)? */
bool hub_is_commit(const char *text);

#endif
