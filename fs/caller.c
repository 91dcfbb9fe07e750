/* SPDX-License-Identifier: MIT */
/* fs/caller.c - acting on the source as the process that sent a request. */
#include "fs/caller.h"

#include <errno.h>
#include <linux/capability.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>

#define FUSE_USE_VERSION 314
#include <fuse_lowlevel.h>

#include "base/err.h"
#include "base/log.h"
#include "base/vec.h"

/*
 * All by plain system calls: glibc's wrappers change every thread of the process, which is
 * what POSIX asks of them.
 */

enum { MOST_GROUPS = 65536 }; /* NGROUPS_MAX of the kernel */

#define NOBODY_ELSE ((uint32_t)-1) /* no id: setfsuid(2) only tells what there is */

/* The kernel's CAP_FS_SET: what setfsuid(2) takes from who is not root. */
#define FILE_CAPABILITIES                                                              \
    (1ull << CAP_CHOWN | 1ull << CAP_MKNOD | 1ull << CAP_DAC_OVERRIDE |                \
     1ull << CAP_DAC_READ_SEARCH | 1ull << CAP_FOWNER | 1ull << CAP_FSETID |           \
     1ull << CAP_LINUX_IMMUTABLE | 1ull << CAP_MAC_OVERRIDE)

/* ---- capabilities ---- */

static int capabilities_get(pid_t tid, struct __user_cap_data_struct data[2])
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3,
                                            .pid = tid};

    return syscall(SYS_capget, &head, data) < 0 ? -errno : 0;
}

static uint64_t effective_of(const struct __user_cap_data_struct data[2])
{
    return (uint64_t)data[1].effective << 32 | data[0].effective;
}

static int set_effective(uint64_t effective)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];

    TRY(capabilities_get(0, data));
    data[0].effective = (uint32_t)effective;
    data[1].effective = (uint32_t)(effective >> 32);
    return syscall(SYS_capset, &head, data) < 0 ? -errno : 0;
}

static uint64_t capabilities_in_files(pid_t tid)
{
    struct __user_cap_data_struct data[2];

    return capabilities_get(tid, data) < 0 ? 0 : effective_of(data) & FILE_CAPABILITIES;
}

/* Of a caller that is root: where it cannot be told, all. */
static uint64_t root_capabilities(pid_t tid)
{
    return tid > 0 ? capabilities_in_files(tid) : FILE_CAPABILITIES;
}

/* ---- groups ---- */

static int add_group(struct caller *c, gid_t group, size_t *room)
{
    if (!VEC_ROOM(c->groups, c->ngroups, *room))
        return -ENOMEM;
    c->groups[c->ngroups++] = group;
    return 0;
}

/* "4 24 1000 \n": true when all of it was numbers. */
static int parse_groups(const char *text, struct caller *c)
{
    size_t room = 0;

    for (;;) {
        char *end;
        unsigned long id;
        int rc;

        text += strspn(text, " \t\n");
        if (!*text)
            return 0;
        errno = 0;
        id = strtoul(text, &end, 10);
        if (end == text || errno || id >= NOBODY_ELSE || c->ngroups == MOST_GROUPS)
            return -EINVAL;
        rc = add_group(c, (gid_t)id, &room);
        if (rc < 0)
            return rc;
        text = end;
    }
}

/* The last of the four numbers of "Uid:" and "Gid:" is the one that counts for files. */
static bool is_id(const char *text, uint32_t id)
{
    unsigned real, effective, saved, files;

    return sscanf(text, "%u %u %u %u", &real, &effective, &saved, &files) == 4 &&
           files == id;
}

/* 0 where the lines say that the thread is still who asked, and which groups it has. */
static int read_status(FILE *f, struct caller *c)
{
    CLEANUP_FREE char *line = NULL;
    bool same_uid = false, same_gid = false;
    size_t room = 0;

    while (getline(&line, &room, f) > 0) {
        if (strncmp(line, "Uid:", 4) == 0)
            same_uid = is_id(line + 4, c->uid);
        else if (strncmp(line, "Gid:", 4) == 0)
            same_gid = is_id(line + 4, c->gid);
        else if (strncmp(line, "Groups:", 7) == 0)
            return same_uid && same_gid ? parse_groups(line + 7, c) : -ESRCH;
    }
    return -ESRCH;
}

static int read_groups(pid_t tid, struct caller *c)
{
    char path[64];
    FILE *f;
    int rc;

    if (tid <= 0)
        return 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)tid);
    f = fopen(path, "re");
    if (!f)
        return 0;
    rc = read_status(f, c);
    fclose(f);
    c->has_groups = rc == 0;
    if (rc < 0)
        c->ngroups = 0;
    return rc == -ENOMEM ? rc : 0;
}

/* From a server that is root, by user, group or what a container took. */
static bool differs_from_root(const struct caller *c)
{
    return c->uid != 0 || c->gid != getegid() ||
           capabilities_in_files(0) & ~c->capabilities;
}

int caller_of(const struct fuse_ctx *ctx, struct caller *out, struct err *e)
{
    *out = (struct caller){.uid = ctx->uid, .gid = ctx->gid};
    if (ctx->uid == NOBODY_ELSE || ctx->gid == NOBODY_ELSE)
        return err_set(e, EACCES, "the kernel does not tell which user asks");
    if (ctx->uid == 0)
        out->capabilities = root_capabilities(ctx->pid);
    out->acts = geteuid() == 0 && differs_from_root(out);
    out->is_other = out->acts || (geteuid() != 0 && ctx->uid != geteuid() &&
                                  !(out->capabilities & 1ull << CAP_DAC_READ_SEARCH));
    if (out->is_other && read_groups(ctx->pid, out) < 0) {
        caller_release(out);
        return err_nomem(e);
    }
    return 0;
}

void caller_release(struct caller *c)
{
    free(c->groups);
    *c = (struct caller){0};
}

/* ---- there and back ---- */

/* These two tell no error: one asks what came of it. */
static bool set_user(uid_t uid)
{
    syscall(SYS_setfsuid, uid);
    return (uid_t)syscall(SYS_setfsuid, NOBODY_ELSE) == uid;
}

static bool set_group(gid_t gid)
{
    syscall(SYS_setfsgid, gid);
    return (gid_t)syscall(SYS_setfsgid, NOBODY_ELSE) == gid;
}

static int save_groups(struct caller_saved *saved)
{
    long n = syscall(SYS_getgroups, 0, NULL);

    if (n < 0)
        return -errno;
    saved->groups = calloc((size_t)n + 1, sizeof *saved->groups);
    if (!saved->groups)
        return -ENOMEM;
    n = syscall(SYS_getgroups, n, saved->groups);
    saved->ngroups = (int)n;
    return n < 0 ? -errno : 0;
}

static int save_own(struct caller_saved *saved)
{
    struct __user_cap_data_struct data[2];

    TRY(capabilities_get(0, data));
    saved->effective = effective_of(data);
    saved->uid = (uid_t)syscall(SYS_setfsuid, NOBODY_ELSE);
    saved->gid = (gid_t)syscall(SYS_setfsgid, NOBODY_ELSE);
    return save_groups(saved);
}

static int refused(const struct caller *c, int code, struct err *e)
{
    err_set(e, code, "act as user %u, group %u: %s", (unsigned)c->uid, (unsigned)c->gid,
            strerror(code));
    return err_hint(e,
                    "the server needs CAP_SETUID and CAP_SETGID to serve other users");
}

/* The capabilities last: they are what the rest is allowed by. */
int caller_enter(const struct caller *c, struct caller_saved *saved, struct err *e)
{
    int rc;

    *saved = (struct caller_saved){0};
    if (!c->acts)
        return 0;
    rc = save_own(saved);
    if (rc == 0 && syscall(SYS_setgroups, c->ngroups, c->groups) < 0)
        rc = -errno;
    if (rc < 0) {
        caller_leave(saved);
        return refused(c, -rc, e);
    }
    saved->entered = true;
    rc = set_group(c->gid) && set_user(c->uid)
             ? set_effective(c->capabilities & saved->effective)
             : -EPERM;
    if (rc < 0) {
        caller_leave(saved);
        return refused(c, -rc, e);
    }
    return 0;
}

/* Its own user may always be set again, and gives the capabilities for the rest. */
static bool go_back(const struct caller_saved *saved)
{
    return set_user(saved->uid) && set_group(saved->gid) &&
           set_effective(saved->effective) == 0 &&
           syscall(SYS_setgroups, (size_t)saved->ngroups, saved->groups) == 0;
}

void caller_leave(struct caller_saved *saved)
{
    if (saved->entered && !go_back(saved)) {
        log_msg(LOG_FS, LOG_ERROR, "the server cannot be its own user again: %s",
                strerror(errno));
        abort();
    }
    free(saved->groups);
    *saved = (struct caller_saved){0};
}
