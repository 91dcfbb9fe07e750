/* SPDX-License-Identifier: MIT */
/* fs/permit.h - may who asks read, on the source, what a file of the mount is made of? */
#ifndef UFS_FS_PERMIT_H
#define UFS_FS_PERMIT_H

#include "fs/request.h"

struct permits;

/*
 * What the kernel said lately, so that a file of thousands of shards is not judged anew for
 * every open: for FRESH_NS, as a checkpoint counts as unchanged.
 */
int permits_new(struct permits **out, struct err *e);
void permits_free(struct permits *p); /* NULL is fine */

/*
 * All of these: 0, -EACCES, or what else the source says now. Always 0 for requests of our
 * own, of the server's user, of root with its capabilities, and for what comes from a
 * server: that was fetched with the rights of who mounted it. The kernel judges as the caller
 * where the server is root; else modes do, and an ACL grants nothing. Not uid=, gid=, umask=:
 * they are what is shown.
 */

/*
 * May r->ino, a file inside this checkpoint, be opened for reading: every file that its
 * bytes come from, and the metadata file that stands with them? Of reports: all files.
 */
int permit_open(const struct request *r, const struct generation *gen, struct err *e);

/* May a directory inside it be listed: the metadata file be read? */
int permit_list(const struct request *r, const struct generation *gen, struct err *e);

/* A file or directory of the source; `dev`, `inode`: that it has to be, or 0. */
int permit_node(const struct request *r, const char *path, uint64_t dev, uint64_t inode,
                struct err *e);

/*
 * Parts of a checkpoint whose side files are shown beside them, and whether the caller may list
 * these parts: a name of the source is listed to those alone who could list it there. Zero:
 * all. The parts are those of `shown`.
 */
struct permit_parts {
    bool asked;
    size_t count;
    struct permit_part {
        const char *part;
        bool may;
    } * at;
};
int permit_parts(const struct request *r, const struct node *dir,
                 struct snapshot *snapshot, struct permit_parts *out, struct err *e);
void permit_parts_release(struct permit_parts *p);
bool permit_lists(const struct permit_parts *p, const char *part); /* NULL: no part */

#endif
