/* SPDX-License-Identifier: MIT */
/* base/guard.h - copying out of a mapping whose file somebody may cut meanwhile. */
#ifndef UFS_BASE_GUARD_H
#define UFS_BASE_GUARD_H

#include "base/base.h"

/* Installs the SIGBUS handler of the process; once, before the first guarded call. */
int guard_install(void);

/* Is it ours that handles SIGBUS now? A library that installs none must not touch mappings. */
bool guard_installed(void);

/*
 * Calls fn(user). When it touches a mapped page that is gone (SIGBUS) the call is left
 * there and -EIO is returned; otherwise what fn returned. fn must hold no lock and own
 * nothing while it touches mappings: leaving it runs no cleanup.
 */
int guard_run(int (*fn)(void *user), void *user);

#endif
