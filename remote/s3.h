/* SPDX-License-Identifier: MIT */
/* remote/s3.h - one bucket of S3, or of what speaks its REST interface, and its objects. */
#ifndef UFS_REMOTE_S3_H
#define UFS_REMOTE_S3_H

#include "base/base.h"
#include "base/buf.h"
#include "remote/http.h"

struct err;
struct s3;
struct store;
struct store_options;

/*
 * s3://BUCKET/KEY and gs://BUCKET/KEY. As in AWS's own tools the key is taken literally:
 * no byte of it is percent-decoded.
 *
 * Where s3:// is: aws_endpoint() or AWS in aws_region() (us-east-1 when nobody says). The
 * bucket is part of the host's name at AWS, where it can be, and of the path elsewhere,
 * unless the profile's s3.addressing_style says path or virtual.
 * AWS_USE_DUALSTACK_ENDPOINT and AWS_USE_FIPS_ENDPOINT are followed. A directory bucket (S3
 * Express) is at the host of its zone, in the region that its name tells.
 *
 * gs:// is Google's XML interface: $STORAGE_EMULATOR_HOST or storage.googleapis.com. Let in
 * by the first of: a token in $GOOGLE_OAUTH_ACCESS_TOKEN or $CLOUDSDK_AUTH_ACCESS_TOKEN,
 * HMAC keys in $GS_ACCESS_KEY_ID and $GS_SECRET_ACCESS_KEY, the instance's service account
 * (its metadata server, unless $NO_GCE_CHECK is true), nothing.
 *
 * What is asked of objects carries the key that customer_key_load() finds.
 */

/*
 * Makes one, and asks nothing yet. *key (malloc'd) is what stands behind the bucket without
 * slashes at its end. -EINVAL: the URL. `http` is borrowed.
 */
int s3_new(const char *url, struct http *http, struct s3 **out, char **key,
           struct err *e);

/*
 * Asks for the bucket, and takes the region that the answer tells: S3 tells it with every
 * status, also to who may not list it (HeadBucket in its API reference). Requests to a
 * bucket of another region than aws_region() fail before. -ENOENT: there is no such bucket.
 */
int s3_locate(struct s3 *s, struct err *e);
void s3_free(struct s3 *s); /* NULL is fine */

/* "s3://BUCKET", for messages. */
const char *s3_shown(const struct s3 *s);

/* What names this bucket, whoever asks: its place and name. */
const char *s3_identity(const struct s3 *s);

/* Does the store compare Content-MD5 with what came? A directory bucket refuses it. */
bool s3_takes_md5(const struct s3 *s);

/*
 * Appends the URL of an object, of the bucket for "". `query` is encoded, without its '?',
 * or NULL.
 */
int s3_url(struct s3 *s, const char *key, const char *query, struct buf *out,
           struct err *e);

/*
 * How requests to that URL are let in; auth_user is the struct s3. They are signed by
 * s3_sign(): those to a directory bucket by the keys of a session that the user's own keys
 * have made, with their bodies' hashes.
 */
extern const struct http_auth s3_auth;

/*
 * The code in an error's body ("NoSuchUpload") into dst, "" when there is none that could
 * be one.
 */
void s3_error_code(const struct http_answer *a, char *dst, size_t size);

/* Adds to an error what the user can do about it: -EACCES without credentials. */
int s3_explain(struct s3 *s, struct err *e);

/*
 * A store of what is below KEY, or of the one object KEY. -ENOENT: there is neither.
 */
int s3_open(const char *url, const struct store_options *options, struct store **out,
            struct err *e);

#endif
