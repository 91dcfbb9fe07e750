/* SPDX-License-Identifier: MIT */
/* base/confine.c - seccomp and Landlock, as far as this kernel has them. */
#include "base/confine.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef UFS_HAVE_SECCOMP
#include <seccomp.h>
#endif

/* A sanitizer forks and traces its own process to look for leaks. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UFS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define UFS_SANITIZED 1
#endif
#endif

static bool is_wanted(void)
{
#ifdef UFS_SANITIZED
    return false;
#else
    const char *text = getenv("UNSHARD_CONFINE");

    return !text || strcmp(text, "0") != 0;
#endif
}

/* ---- calls ---- */

#ifdef UFS_HAVE_SECCOMP

/* What no reading of files needs, and what would lead around the other rules. */
static const int refused[] = {
    SCMP_SYS(execve),
    SCMP_SYS(execveat),
    SCMP_SYS(fork),
    SCMP_SYS(vfork),
    SCMP_SYS(connect),
    SCMP_SYS(bind),
    SCMP_SYS(listen),
    SCMP_SYS(ptrace),
    SCMP_SYS(process_vm_readv),
    SCMP_SYS(process_vm_writev),
    SCMP_SYS(pidfd_getfd),
    SCMP_SYS(kcmp),
    SCMP_SYS(mount),
    SCMP_SYS(move_mount),
    SCMP_SYS(open_tree),
    SCMP_SYS(fsopen),
    SCMP_SYS(fsmount),
    SCMP_SYS(mount_setattr),
    SCMP_SYS(pivot_root),
    SCMP_SYS(chroot),
    SCMP_SYS(unshare),
    SCMP_SYS(setns),
    SCMP_SYS(open_by_handle_at),
    SCMP_SYS(io_uring_setup),
    SCMP_SYS(io_uring_enter),
    SCMP_SYS(io_uring_register),
    SCMP_SYS(bpf),
    SCMP_SYS(perf_event_open),
    SCMP_SYS(userfaultfd),
    SCMP_SYS(keyctl),
    SCMP_SYS(add_key),
    SCMP_SYS(request_key),
    SCMP_SYS(init_module),
    SCMP_SYS(finit_module),
    SCMP_SYS(delete_module),
    SCMP_SYS(kexec_load),
    SCMP_SYS(kexec_file_load),
    SCMP_SYS(reboot),
    SCMP_SYS(swapon),
    SCMP_SYS(swapoff),
};

/*
 * Threads are made by clone() with CLONE_THREAD; clone3() has its flags in memory, where no
 * filter sees them, so that it is said not to be there and libc takes the other one.
 */
static bool add_rules(scmp_filter_ctx filter)
{
    for (size_t i = 0; i < ARRAY_SIZE(refused); i++)
        if (seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), refused[i], 0) < 0)
            return false;
    return seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), SCMP_SYS(clone), 1,
                            SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_THREAD, 0)) == 0 &&
           seccomp_rule_add(filter, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0) == 0 &&
           seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), SCMP_SYS(socket), 1,
                            SCMP_A0(SCMP_CMP_NE, AF_UNIX)) == 0 &&
           seccomp_attr_set(filter, SCMP_FLTATR_CTL_TSYNC, 1) == 0;
}

static bool confine_calls(void)
{
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ALLOW);
    bool held = filter && add_rules(filter) && seccomp_load(filter) == 0;

    seccomp_release(filter);
    return held;
}

static bool has_calls(void)
{
    return prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0;
}

#else

static bool confine_calls(void)
{
    (void)with_rings;
    return false;
}

static bool has_calls(void)
{
    return false;
}

#endif

/* ---- files ---- */

/*
 * linux/landlock.h as of its seventh version, which libraries' headers do not have yet. The
 * kernel takes a shorter ruleset than it knows, and a longer one when the rest is zero.
 */
struct ruleset {
    uint64_t files, net, scoped;
};

struct beneath {
    uint64_t allowed;
    int32_t dir;
} __attribute__((packed));

enum { LANDLOCK_VERSION = 1, LANDLOCK_BENEATH = 1 };

enum {
    FILES_EXECUTE = 1 << 0,
    FILES_WRITE = 1 << 1,
    FILES_CHANGE_NAMES = 0x1ff << 4, /* remove and make: directory, file, link, ... */
    FILES_REFER = 1 << 13,           /* version 2 */
    FILES_TRUNCATE = 1 << 14,        /* 3 */
    FILES_DEVICE = 1 << 15,          /* 5 */
    NET_TCP = 3,                     /* 4: bind, connect */
    SCOPED_ALL = 3,                  /* 6: abstract sockets, signals */
};

static int landlock_version(void)
{
    long version = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_VERSION);

    return version > 0 ? (int)version : 0;
}

static uint64_t writing(int version)
{
    uint64_t rights = FILES_WRITE | FILES_CHANGE_NAMES;

    if (version >= 2)
        rights |= FILES_REFER;
    if (version >= 3)
        rights |= FILES_TRUNCATE;
    return rights;
}

static void allow_below(int ruleset, const char *dir, int version)
{
    CLEANUP_FD int fd = open(dir, O_PATH | O_CLOEXEC);
    const struct beneath rule = {.allowed = writing(version), .dir = fd};

    if (fd >= 0)
        syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_BENEATH, &rule, 0);
}

static bool confine_files(const char *const *writable)
{
    int version = landlock_version();
    const struct ruleset rules = {.files = writing(version) | FILES_EXECUTE |
                                           (version >= 5 ? FILES_DEVICE : 0),
                                  .net = version >= 4 ? NET_TCP : 0,
                                  .scoped = version >= 6 ? SCOPED_ALL : 0};
    CLEANUP_FD int fd = -1;

    if (!version)
        return false;
    fd = (int)syscall(SYS_landlock_create_ruleset, &rules, sizeof rules, 0);
    if (fd < 0)
        return false;
    for (; writable && *writable; writable++)
        allow_below(fd, *writable, version);
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           syscall(SYS_landlock_restrict_self, fd, 0) == 0;
}

unsigned confine_available(void)
{
    unsigned what = 0;

    if (!is_wanted())
        return 0;
    if (has_calls())
        what |= CONFINE_CALLS;
    if (landlock_version())
        what |= CONFINE_FILES;
    return what;
}

/* Files first: its own calls are those of a program that is not confined yet. */
unsigned confine(unsigned what, const char *const *writable)
{
    unsigned held = 0;

    if (!is_wanted())
        return 0;
    if (what & CONFINE_FILES && confine_files(writable))
        held |= CONFINE_FILES;
    if (what & CONFINE_CALLS && confine_calls())
        held |= CONFINE_CALLS;
    return held;
}
