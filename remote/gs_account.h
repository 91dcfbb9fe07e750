/* SPDX-License-Identifier: MIT */
/* remote/gs_account.h - tokens of Google for who has a file of credentials. */
#ifndef UFS_REMOTE_GS_ACCOUNT_H
#define UFS_REMOTE_GS_ACCOUNT_H

#include <time.h>

#include "base/base.h"

struct err;
struct http;
struct http_answer;

/*
 * A token for the account that the file is of, read anew each time: a service account's key
 * (`service_account`), what `gcloud auth application-default login` leaves
 * (`authorized_user`), another account by the right to act as it
 * (`impersonated_service_account`), or somebody else's identity, whose token is in a file or
 * at a URL (`external_account`). Fields and requests are those of google-auth 2.63.
 *
 * *token is owned by the caller and secret. -ENOTSUP names a kind that is not read, -EACCES
 * what the token server has against it, -EBADMSG a file that is none.
 */
int gs_account_token(struct http *http, const char *path, char **token, time_t *expires,
                     struct err *e);

/* Takes access_token and expires_in of an answer's JSON. -EBADMSG, never quoting it. */
int gs_token_take(const struct http_answer *a, char **token, time_t *expires,
                  struct err *e);

#endif
