/* SPDX-License-Identifier: MIT */
/* base/confine.h - a process that reads strangers' bytes gives up what it does not need for it. */
#ifndef UFS_BASE_CONFINE_H
#define UFS_BASE_CONFINE_H

#include "base/base.h"

/* What the kernel can be asked to hold us to. Bits. */
enum confinement {
    /*
     * No program is started, no process forked, no socket of a network made and nothing
     * connected to; no ptrace, mount, namespace, kernel module, io_uring or BPF. For all
     * threads, by seccomp: these calls fail with EPERM.
     */
    CONFINE_CALLS = 1,
    /*
     * No file is written, made, renamed or removed but below certain directories; what is
     * open stays so. For the calling thread and those that it starts, by Landlock: EACCES.
     * Neither can such a thread mount or unmount.
     */
    CONFINE_FILES = 2,
};

/* What this build and this kernel have. */
unsigned confine_available(void);

/*
 * Asks for it, for good: children have it too. `writable` are the directories of
 * CONFINE_FILES, ended by NULL (one that is not there is left out). Returns what holds from
 * now on, 0 where nothing can be had: it is a second wall, and nobody is kept from reading
 * for want of it. UNSHARD_CONFINE=0 in the environment asks for nothing.
 */
unsigned confine(unsigned what, const char *const *writable);

#endif
