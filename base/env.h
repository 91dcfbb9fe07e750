/* SPDX-License-Identifier: MIT */
/* base/env.h - numbers from the environment. */
#ifndef UFS_BASE_ENV_H
#define UFS_BASE_ENV_H

/* A number of seconds, 0 to INT32_MAX. What is no such number is as if it was not there. */
unsigned env_seconds(const char *variable, unsigned otherwise);

#endif
