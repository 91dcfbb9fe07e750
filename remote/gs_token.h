/* SPDX-License-Identifier: MIT */
/* remote/gs_token.h - what lets requests into Google's storage: a token, or HMAC keys. */
#ifndef UFS_REMOTE_GS_TOKEN_H
#define UFS_REMOTE_GS_TOKEN_H

#include "base/base.h"
#include "base/buf.h"
#include "remote/credentials.h"

struct err;
struct gs_token;
struct http;

/*
 * `http` is borrowed. The first of these that is there: GS_NO_SIGN_REQUEST, a token of the
 * environment, HMAC keys, a file of credentials (remote/gs_account.h), the instance.
 */
int gs_token_new(struct http *http, struct gs_token **out, struct err *e);
void gs_token_free(struct gs_token *t); /* NULL is fine */

/*
 * Appends "Bearer TOKEN" to *header, or sets *keys to HMAC keys (borrowed, from the
 * environment), or neither: anonymous. Tokens of files and instances are asked for anew before
 * they expire. Any thread.
 */
int gs_token_get(struct gs_token *t, struct buf *header, struct aws_keys *keys,
                 struct err *e);

/* The server refused it: asks anew. Is it another one? */
bool gs_token_renew(struct gs_token *t);

#endif
