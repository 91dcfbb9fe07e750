/* SPDX-License-Identifier: MIT */
/* fs/guard.h - a server that is killed takes its connection to the kernel with it. */
#ifndef UFS_FS_GUARD_H
#define UFS_FS_GUARD_H

#include <stdint.h>
#include <sys/types.h>

/*
 * A thread of the server may wait in the kernel for a page (fs/around.c) that another program
 * has locked until the server has filled it. When the server is killed then, that thread
 * cannot end, and the connection stays as long as it: all who use the mount would wait for
 * ever. So a process of its own, which has nothing open of the server, ends the connection
 * when the server has died. It takes /sys/fs/fuse/connections, where systemd mounts that.
 */
struct guard {
    pid_t pid; /* 0: there is none */
};

/* By the main thread. Without a guard the mount is as good. */
void guard_begin(struct guard *g, uint64_t device);

/* The connection is gone. */
void guard_end(struct guard *g);

#endif
