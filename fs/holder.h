/* SPDX-License-Identifier: MIT */
/* fs/holder.h - the process that keeps a mount's tensors in device memory (-o gpu=N). */
#ifndef UFS_FS_HOLDER_H
#define UFS_FS_HOLDER_H

#include <sys/types.h>

struct err;
struct fs;

/*
 * Starts `unshard hold` for the mount's source, index and map: a process of its own, so that
 * nothing of CUDA is in this one and its end touches nobody's reads. What it has to say (no
 * driver, no such device) goes to `log_fd`. It ends with the thread that calls this, however
 * that ends, or by holder_stop(). Call on the main thread.
 */
int holder_start(const struct fs *fs, int log_fd, pid_t *out, struct err *e);

/* Ends it, waits. 0 is fine. */
void holder_stop(pid_t holder);

#endif
