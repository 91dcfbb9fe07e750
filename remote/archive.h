/* SPDX-License-Identifier: MIT */
/* remote/archive.h - one tar archive: its members, and their bytes as sources. */
#ifndef UFS_REMOTE_ARCHIVE_H
#define UFS_REMOTE_ARCHIVE_H

#include "remote/listing.h"

struct archive;
struct err;
struct source;
struct store;
struct tar;

/*
 * Reads the headers of a tar file, plain or gzip; `st` is the file's own, whose rights and
 * times its members get. -EBADMSG when it is neither. One reference.
 */
int archive_open(struct source *src, const struct entry_stat *st, struct archive **out,
                 struct err *e);
struct archive *archive_get(struct archive *a);
void archive_put(struct archive *a); /* NULL is fine */
void archive_putp(struct archive **a);

const struct tar *archive_tar(const struct archive *a);
bool archive_is_packed(const struct archive *a);

/* Is it still made from the file that has this identity? */
bool archive_is_of(const struct archive *a, const struct file_id *id);

/* `path` of a member or of a directory; "": the archive itself, as a directory. */
int archive_stat(const struct archive *a, const char *path, struct entry_stat *out,
                 struct err *e);

/* Appends the entries of directory `path` to a listing; -ENOTDIR, -ENOENT. */
int archive_list(const struct archive *a, const char *path, struct listing *l,
                 struct err *e);

/* A regular file's bytes; `name` is for messages. */
int archive_source(const struct archive *a, const char *path, const char *name,
                   struct source **out, struct err *e);

#endif
