/* SPDX-License-Identifier: MIT */
/* remote/customer_key.h - the key of the user's own under which a store encrypts objects. */
#ifndef UFS_REMOTE_CUSTOMER_KEY_H
#define UFS_REMOTE_CUSTOMER_KEY_H

#include "base/base.h"
#include "remote/sigv4.h"

struct customer_key;
struct err;

/*
 * The key in the file that $UNSHARD_CUSTOMER_KEY names: 32 bytes, or their base64 (as `aws s3
 * cp --sse-c-key` and gcloud's --decryption-keys take it). *out NULL: there is none.
 * -EBADMSG: no such key. customer_key_free() wipes it.
 */
int customer_key_load(bool google, struct customer_key **out, struct err *e);
void customer_key_free(struct customer_key *k); /* NULL is fine */

/*
 * The headers that a request for an object, for its metadata or for a part of it has: S3's
 * x-amz-server-side-encryption-customer-*, Google's x-goog-encryption-* (their references:
 * "SSE-C", "Customer-supplied encryption keys"). Borrowed from the key; NULL key: none.
 */
enum { CUSTOMER_KEY_HEADERS = 3 };
size_t customer_key_headers(const struct customer_key *k,
                            struct sigv4_header dst[CUSTOMER_KEY_HEADERS]);

#endif
