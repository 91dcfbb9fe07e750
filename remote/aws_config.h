/* SPDX-License-Identifier: MIT */
/* remote/aws_config.h - the settings that AWS's tools share: ~/.aws/config, credentials. */
#ifndef UFS_REMOTE_AWS_CONFIG_H
#define UFS_REMOTE_AWS_CONFIG_H

#include "base/base.h"

struct aws_config;
struct err;

enum aws_file {
    AWS_FILE_CREDENTIALS, /* [NAME] is a profile */
    /* [default] and [profile NAME] are; [services NAME] is kept too */
    AWS_FILE_CONFIG,
};

/* Without any settings; NULL: out of memory. */
struct aws_config *aws_config_new(void);
void aws_config_free(struct aws_config *c); /* NULL is fine */
void aws_config_freep(struct aws_config **c);

/*
 * Adds a file's settings, as botocore's configloader.py reads them: `key = value` below
 * [sections], '#' and ';' begin a comment line, keys in any case. A line that is
 * indented more than the key above it is, where that has no value, a setting within
 * that key, asked for as "s3.endpoint_url"; else it goes on with that value behind a
 * line feed. What was added first stays: add the credentials file before the config
 * file.
 *
 * -EBADMSG with the line's number: neither of these, a key twice in a section (so which of
 * two secrets?), NUL; -EFBIG when it is larger than such a file can sensibly be.
 */
int aws_config_add(struct aws_config *c, enum aws_file kind, const char *text,
                   size_t len, struct err *e);

/*
 * Both files, where $AWS_SHARED_CREDENTIALS_FILE and $AWS_CONFIG_FILE say or below ~/.aws.
 * One that is not there is an empty one.
 */
int aws_config_load(struct aws_config **out, struct err *e);

/* The setting of a profile, or NULL. Valid until the next add or free. */
const char *aws_config_get(const struct aws_config *c, const char *profile,
                           const char *key);

/* The same, of the file that has the setting `beside`: what belongs together is not mixed. */
const char *aws_config_get_beside(const struct aws_config *c, const char *profile,
                                  const char *key, const char *beside);

/*
 * The URL of a service's endpoint in the [services NAME] that the profile names, or NULL:
 * service "s3" or "sts".
 */
const char *aws_config_service_endpoint(const struct aws_config *c, const char *profile,
                                        const char *service);

bool aws_config_has_profile(const struct aws_config *c, const char *profile);

#endif
