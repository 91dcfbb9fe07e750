/* SPDX-License-Identifier: MIT */
/* remote/kept_keys.h - keys that expire, fetched anew before they do. */
#ifndef UFS_REMOTE_KEPT_KEYS_H
#define UFS_REMOTE_KEPT_KEYS_H

#include <time.h>

#include "base/base.h"

struct err;
struct kept_keys;

/* Owned strings; id NULL: anonymous, requests go unsigned. */
struct aws_keys {
    char *id, *secret, *token; /* token NULL: none */
    time_t expires;            /* 0: never */
};

void aws_keys_release(struct aws_keys *k);
int aws_keys_copy(const struct aws_keys *from, struct aws_keys *to, struct err *e);

/* Fetches keys from where they come from; called without any lock, by one thread at once. */
typedef int fetch_keys_fn(void *user, struct aws_keys *out, struct err *e);

/* Fetches nothing yet. NULL: no memory. */
struct kept_keys *kept_keys_new(fetch_keys_fn *fetch, void *user);
void kept_keys_free(struct kept_keys *k); /* NULL is fine */

/*
 * A copy of the keys, fetched at the first call and again before they expire. Any thread;
 * one of them fetches, the others go on with what there is as long as it is valid.
 */
int kept_keys_get(struct kept_keys *k, struct aws_keys *out, struct err *e);

/* The server refused them: fetches anew. Are they other ones than before? */
bool kept_keys_renew(struct kept_keys *k);

#endif
