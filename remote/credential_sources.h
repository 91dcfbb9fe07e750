/* SPDX-License-Identifier: MIT */
/* remote/credential_sources.h - the places that keys come from, one function each. */
#ifndef UFS_REMOTE_CREDENTIAL_SOURCES_H
#define UFS_REMOTE_CREDENTIAL_SOURCES_H

#include "base/buf.h"
#include "remote/credentials.h"

struct aws_config;
struct http_answer;

/* What all of them go by; borrowed. */
struct key_context {
    struct http *http;
    const struct aws_config *config;
    const char *region; /* NULL: none is set */
};

/* 1: `out` has the keys; 0: nobody asked for this place; or an error. */
int keys_from_environment(struct aws_keys *out, struct err *e);
int keys_from_container(const struct key_context *k, struct aws_keys *out,
                        struct err *e);
int keys_from_instance(const struct key_context *k, struct aws_keys *out,
                       struct err *e);

/* AssumeRoleWithWebIdentity with the token in `token_file`. Names are for messages. */
int keys_from_web_identity(const struct key_context *k, const char *role,
                           const char *session, const char *token_file,
                           struct aws_keys *out, struct err *e);

/* Runs the user's own command (without a shell) and reads the JSON that it writes. */
int keys_from_process(const char *command, struct aws_keys *out, struct err *e);

/*
 * Keys from the XML of a service that hands them out: in Credentials of a result
 * (AssumeRoleWithWebIdentity of STS, CreateSession of S3). `who` is for messages. Returns 1,
 * or an error: -EACCES with the code that came in their place.
 */
int keys_from_answer(const struct http_answer *answer, const char *who,
                     struct aws_keys *out, struct err *e);

/*
 * Keys from a JSON object with AccessKeyId, SecretAccessKey, Expiration and a member
 * called `token`. -EBADMSG.
 */
int keys_from_json(const char *text, size_t len, const char *token,
                   struct aws_keys *out, struct err *e);

/* The text of a small file without blanks at its end: a token, or JSON. Never empty. */
int secret_file_read(const char *path, struct buf *out, struct err *e);

/*
 * May this URL be told a secret? https, loopback, and the addresses at which ECS and EKS
 * hand out keys (botocore's utils.py, ContainerMetadataFetcher).
 */
bool url_is_private(const char *url);

/*
 * Splits a command as Python's shlex does: blanks, '', "" and backslashes; nothing is
 * replaced. *words ends in NULL and is one allocation: free(*words). -EINVAL: a quote
 * that does not end, or no word at all.
 */
int command_split(const char *command, char ***words, struct err *e);

#endif
