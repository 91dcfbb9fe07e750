/* SPDX-License-Identifier: MIT */
/* remote/s3_list.h - the answers of ListObjectsV2: one page of a directory. */
#ifndef UFS_REMOTE_S3_LIST_H
#define UFS_REMOTE_S3_LIST_H

#include <time.h>

#include "base/base.h"
#include "base/buf.h"

struct err;

/* What one page says. Zero is ready; s3_page_release() frees. */
struct s3_page {
    size_t objects;     /* seen, with directories */
    bool marker;        /* an object called like the directory itself, "a/b/" */
    struct buf next;    /* the token to go on with; empty: it was the last page */
    struct buf names;   /* the texts of the entries */
    struct buf entries; /* struct s3_entry */
};

struct s3_entry {
    size_t name, etag; /* where they begin in `names`; etag SIZE_MAX: none */
    uint64_t size;
    time_t modified;
    bool is_dir;
};

void s3_page_release(struct s3_page *p);

/*
 * Reads the body of an answer to a listing of `prefix` ("" or "a/b/") with delimiter "/".
 * Names are decoded where the answer says that they are encoded, and come without the prefix
 * and without the slash at the end. -EBADMSG: no such listing, a key outside the prefix,
 * a number that is none, a page that goes on without a token.
 */
int s3_page_read(const void *data, size_t len, const char *prefix, struct s3_page *out,
                 struct err *e);

static inline size_t s3_page_count(const struct s3_page *p)
{
    return p->entries.len / sizeof(struct s3_entry);
}

static inline const struct s3_entry *s3_page_at(const struct s3_page *p, size_t i)
{
    return (const struct s3_entry *)(const void *)p->entries.data + i;
}

#endif
