/* SPDX-License-Identifier: MIT */
/* remote/sigv4.h - AWS Signature Version 4 of a request, in its headers. */
#ifndef UFS_REMOTE_SIGV4_H
#define UFS_REMOTE_SIGV4_H

#include <time.h>

#include "base/base.h"
#include "base/buf.h"

struct err;

/* A request without a body, and a body that is not signed, by their hashes. */
#define SIGV4_EMPTY "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
#define SIGV4_UNSIGNED "UNSIGNED-PAYLOAD"

enum { SIGV4_DATE_SIZE = sizeof "20150830T123600Z" };

struct sigv4_header {
    const char *name, *value;
};

/*
 * What is signed: exactly what goes over the wire. The path begins with '/' and is
 * percent-encoded (http_encode()); it is taken as it is, neither normalised nor encoded once
 * more, which is the rule of S3, and no difference for a path of "/". The query is encoded
 * too, in any order, "" or NULL when there is none. The headers are those that are signed,
 * in any order and case, and must hold host and x-amz-date; names that are there twice are
 * one header with two values.
 */
struct sigv4_request {
    const char *method, *path, *query;
    const struct sigv4_header *headers;
    size_t nheaders;
    const char *payload_hash; /* SHA-256 of the body in hex, or one of the above */
};

struct sigv4_scope {
    const char *key_id, *secret;
    const char *region, *service;
    const char *date; /* as x-amz-date has it */
};

/* The text of x-amz-date. */
void sigv4_date(time_t now, char dst[SIGV4_DATE_SIZE]);

/* 64 hex digits and a NUL. */
int sigv4_hash(const void *data, size_t len, char hex[65], struct err *e);

/*
 * Appends the value of the header Authorization. -EINVAL for a request that cannot be
 * signed (no host), -ENOMEM, -EIO when libcrypto has no SHA-256.
 */
int sigv4_sign(const struct sigv4_scope *scope, const struct sigv4_request *request,
               struct buf *dst, struct err *e);

/* The two texts on the way, for tests and for debugging a store that disagrees. */
int sigv4_canonical(const struct sigv4_request *request, struct buf *dst,
                    struct buf *signed_headers, struct err *e);

#endif
