/* SPDX-License-Identifier: MIT */
/* base/local_socket.h - stream sockets of the Unix domain between processes of one user. */
#ifndef UFS_BASE_LOCAL_SOCKET_H
#define UFS_BASE_LOCAL_SOCKET_H

#include "base/base.h"
#include "base/buf.h"

struct err;

/*
 * The directory for sockets of ours, 0700: $XDG_RUNTIME_DIR/unshardfs where that is this
 * user's alone, else `fallback` (NULL: -ENOENT).
 */
int local_socket_dir(const char *fallback, struct buf *out, struct err *e);

/*
 * A socket that listens at `path`, which may be longer than sockets' names can be. What is
 * left there of a process that is gone is taken away; -EADDRINUSE: somebody listens.
 */
int local_listen(const char *path, int *out, struct err *e);

/*
 * The next caller who is this user or root; others are sent away. It waits for answers
 * `seconds` at most. -EAGAIN: nobody (left) there; -EINVAL: the listener was shut down.
 */
int local_accept(int listener, unsigned seconds, int *out);

/* A connection to a server who is this user or root (-EPERM). */
int local_connect(const char *path, unsigned seconds, int *out, struct err *e);

/* All of it, with a descriptor (-1: none) beside the first byte. 0 or -errno. */
int local_send(int fd, const void *data, size_t len, int passed);

/*
 * Exactly `len` bytes: -ECONNRESET when the other side ends before. `passed` (or NULL)
 * takes one descriptor, close-on-exec, or is -1; any others are closed.
 */
int local_receive(int fd, void *dst, size_t len, int *passed);

/* Removes sockets `prefix`*.sock in `dir` whose process is gone. */
void local_sweep(const char *dir, const char *prefix);

#endif
