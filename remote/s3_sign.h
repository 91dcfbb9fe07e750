/* SPDX-License-Identifier: MIT */
/* remote/s3_sign.h - a request to S3 that is signed as it goes out. */
#ifndef UFS_REMOTE_S3_SIGN_H
#define UFS_REMOTE_S3_SIGN_H

#include "base/base.h"
#include "remote/sigv4.h"

struct aws_keys;
struct err;
struct http_try;

struct s3_signing {
    const struct aws_keys *keys;
    const char *region, *service;
    const char *token_header; /* what the keys' token is sent as */
    bool hash_body;           /* sign the body through TLS too */
    const struct sigv4_header
        *more; /* which the try has already, to be signed as well */
    size_t nmore;
};

/*
 * Adds the headers of a signature to a try. All headers of the request that begin with
 * x-amz- are signed, and the hash of a body, where it is `body` and goes without TLS or
 * `hash_body` says so; else the body is not signed.
 */
int s3_sign(struct http_try *t, const struct s3_signing *how, struct err *e);

#endif
