/* SPDX-License-Identifier: MIT */
/* lib/client.h - what struct unshard is, for the files of this room. */
#ifndef UFS_LIB_CLIENT_H
#define UFS_LIB_CLIENT_H

#include <pthread.h>

#include "base/err.h"
#include "lib/origin.h"
#include "lib/unshard.h"

struct device;

enum { CLIENT_DEVICES = 64 }; /* more than any machine has */

struct unshard {
    struct origin *origin;
    pthread_mutex_t lock;
    struct device *device[CLIENT_DEVICES]; /* by ordinal, opened when needed; guarded */
};

/* The words of an error for a caller (error may be NULL). Returns -e->code. */
int client_fail(const struct err *e, char *error);

/* The device of this number, opened now or before; it stays until close. -ENODEV. */
int client_device(struct unshard *u, int ordinal, struct device **out, struct err *e);

#endif
