/* SPDX-License-Identifier: MIT */
/* remote/credentials.h - the keys that AWS requests are signed with, and their renewal. */
#ifndef UFS_REMOTE_CREDENTIALS_H
#define UFS_REMOTE_CREDENTIALS_H

#include "base/base.h"
#include "remote/kept_keys.h"

struct aws_config;
struct credentials;
struct err;
struct http;

/* $AWS_PROFILE, $AWS_DEFAULT_PROFILE or "default". */
const char *aws_profile(void);

/* $AWS_REGION, $AWS_DEFAULT_REGION or the profile's; NULL: none is set. */
const char *aws_region(const struct aws_config *config);

/*
 * Where a service ("s3", "sts") is when it is not at AWS: $AWS_ENDPOINT_URL_S3 or
 * $AWS_ENDPOINT_URL_STS, $AWS_ENDPOINT_URL, the profile's [services] section, the profile's
 * endpoint_url; NULL: nobody says, or AWS_IGNORE_CONFIGURED_ENDPOINT_URLS (or the profile)
 * says that none of these counts. The order is that of "Service-specific endpoints" in
 * AWS's SDK guide.
 */
const char *aws_endpoint(const struct aws_config *config, const char *service);

/*
 * The chain, in the order of botocore's (credentials.py), the first that has something
 * decides:
 *  - AWS_NO_SIGN_REQUEST=1: anonymous;
 *  - AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN;
 *  - web identity (AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN, or the profile's), then
 *    the profile's keys, then its credential_process. A profile with a role to assume or
 *    with AWS SSO is refused (-EACCES) where botocore would use these;
 *  - the container's endpoint (AWS_CONTAINER_CREDENTIALS_*), then the instance's (IMDSv2,
 *    unless AWS_EC2_METADATA_DISABLED);
 *  - anonymous.
 * Files are read anew at each renewal. What is asked for by name and fails is an error,
 * never a reason to try the next.
 *
 * `http` is borrowed; `region` is for the token service and may be NULL.
 */
int credentials_new(struct http *http, const char *region, struct credentials **out,
                    struct err *e);
void credentials_free(struct credentials *c); /* NULL is fine */

/* As kept_keys_get() and kept_keys_renew(). */
int credentials_get(struct credentials *c, struct aws_keys *out, struct err *e);
bool credentials_renew(struct credentials *c);

#endif
