/* SPDX-License-Identifier: MIT */
/* remote/bucket.h - writing to an object store: objects, and uploads in parts. */
#ifndef UFS_REMOTE_BUCKET_H
#define UFS_REMOTE_BUCKET_H

#include "base/base.h"
#include "base/buf.h"

struct err;
struct bucket;

/*
 * A bucket of S3, or of what speaks its REST interface (2006-03-01: AWS, MinIO, Ceph,
 * Google Cloud Storage's XML API with keys for interoperability). Keys are decoded, without
 * a leading slash. Any thread, several at once; every call waits for its answer, after the
 * tries of remote/http.h. What `tag` says is kept with an object as metadata.
 */

/*
 * s3://BUCKET/PREFIX or gs://BUCKET/PREFIX: *prefix is what stands behind the bucket,
 * decoded, without slashes at its ends (malloc'd, may be ""). -ENOTSUP: nothing is saved
 * to URLs of another scheme.
 */
int bucket_open(const char *url, struct bucket **out, char **prefix, struct err *e);
void bucket_close(struct bucket *b); /* NULL is fine */

/* Is it the URL of a place that can be saved to? */
bool bucket_is_url(const char *url);

/* "s3://BUCKET", for messages. */
const char *bucket_url(const struct bucket *b);

/* ---- objects ---- */

struct bucket_object {
    const char *key, *etag;
    uint64_t size;
};

/*
 * Calls fn for each object whose key begins with `prefix` ("" or "a/b/"), in any order, until
 * it returns what is not 0. That, or an error.
 */
typedef int bucket_object_fn(void *user, const struct bucket_object *o);
int bucket_list(struct bucket *b, const char *prefix, bucket_object_fn *fn, void *user,
                struct err *e);

/* The object's tag, "" when it has none. -ENOENT. */
int bucket_tag(struct bucket *b, const char *key, struct buf *tag, uint64_t *size,
               struct err *e);

/* At most `max` bytes. -ENOENT, -EFBIG. */
int bucket_get(struct bucket *b, const char *key, size_t max, struct buf *out,
               struct err *e);

/*
 * What an object gets beside its bytes. `absent`: only where there is none of this name:
 * -EEXIST (a store that has no conditional writes does it without).
 */
struct bucket_put {
    const char *tag; /* or NULL */
    bool absent;
};
int bucket_put(struct bucket *b, const char *key, const void *data, size_t len,
               const struct bucket_put *how, struct err *e);

/*
 * The store copies an object of this bucket by itself. On failure there may be anything under
 * the new name, as some stores take it for an empty object: it is to be written then.
 */
int bucket_copy(struct bucket *b, const char *from, const char *to, struct err *e);

/* 0 also when there was none. */
int bucket_delete(struct bucket *b, const char *key, struct err *e);

/* ---- in parts ---- */

enum { BUCKET_ID_MAX = 2048, BUCKET_ETAG_MAX = 256 };

/* Begins an upload: its id, appended. */
int bucket_create(struct bucket *b, const char *key, const char *tag, struct buf *id,
                  struct err *e);

/* Part `number` (from 1), in the place of one that was there. -ENOENT: no such upload. */
int bucket_part(struct bucket *b, const char *key, const char *id, unsigned number,
                const void *data, size_t len, struct err *e);

struct bucket_part {
    unsigned number;
    const char *etag;
    uint64_t size;
};

/* The parts that are there, by number. -ENOENT: no such upload (any more). */
typedef int bucket_part_fn(void *user, const struct bucket_part *p);
int bucket_parts(struct bucket *b, const char *key, const char *id, bucket_part_fn *fn,
                 void *user, struct err *e);

/*
 * The object appears, of these parts, which are all. -ENOENT: no such upload; -EEXIST:
 * as for bucket_put().
 */
int bucket_complete(struct bucket *b, const char *key, const char *id,
                    const struct bucket_part *part, size_t parts, bool absent,
                    struct err *e);

/* 0 also when there was none. */
int bucket_abort(struct bucket *b, const char *key, const char *id, struct err *e);

/* Uploads that were begun and neither completed nor aborted, of keys with this prefix ("a/b/"). */
struct bucket_upload {
    const char *key, *id;
};
typedef int bucket_upload_fn(void *user, const struct bucket_upload *u);
int bucket_uploads(struct bucket *b, const char *prefix, bucket_upload_fn *fn,
                   void *user, struct err *e);

#endif
