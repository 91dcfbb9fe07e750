/* SPDX-License-Identifier: MIT */
/* cli/doctor_checks.c - FUSE, the cache directory, limits and devices of this machine. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "base/buf.h"
#include "base/confine.h"
#include "base/fsutil.h"
#include "base/local_socket.h"
#include "base/thread.h"
#include "cli/doctor.h"
#include "fs/mount.h"
#include "gpu/device.h"

/* Shards of a large checkpoint that are open at once. */
enum { FILES_ENOUGH = 4096 };

/* ---- FUSE ---- */

/* A program of $PATH, or NULL. */
static char *find_program(const char *name, char path[PATH_MAX])
{
    const char *at = getenv("PATH");

    while (at && *at) {
        size_t len = strcspn(at, ":");

        if (snprintf(path, PATH_MAX, "%.*s/%s", (int)len, at, name) < PATH_MAX &&
            access(path, X_OK) == 0)
            return path;
        at += len + (at[len] == ':');
    }
    return NULL;
}

static bool allows_other(void)
{
    FILE *f = fopen("/etc/fuse.conf", "re");
    char line[256];
    bool found = false;

    while (f && fgets(line, sizeof line, f))
        found |= strncmp(line, "user_allow_other", 16) == 0;
    if (f)
        fclose(f);
    return found;
}

static void check_helper(struct doctor *d)
{
    char path[PATH_MAX];
    struct stat st;

    if (geteuid() == 0)
        return; /* mounts by itself */
    if (!find_program("fusermount3", path))
        doctor_tell(d, DOCTOR_PROBLEM, "fuse", "install fuse3",
                    "fusermount3 is not in PATH: only root can mount");
    else if (stat(path, &st) == 0 && (st.st_uid != 0 || !(st.st_mode & S_ISUID)))
        doctor_tell(d, DOCTOR_PROBLEM, "fuse", "reinstall fuse3",
                    "%s is not setuid root: it cannot mount", path);
    if (!allows_other())
        doctor_tell(d, DOCTOR_NOTE, "fuse",
                    "write user_allow_other into /etc/fuse.conf if they should",
                    "other users cannot be let into a mount (allow_other)");
}

/* Everything works without; mapped files are slower. */
static void check_passthrough(struct doctor *d)
{
    CLEANUP(buf_release) struct buf dir = {.max = PATH_MAX};
    struct err ignored = {0};
    bool known = cache_dir(d->c->opt.cache_dir, &dir, &ignored) == 0;
    const char *lacks = fs_passthrough_lacks(known ? dir.data : NULL);

    if (lacks)
        doctor_tell(
            d, DOCTOR_NOTE, "passthrough", NULL,
            "the server of a mount reads all files (materialize= would take %s)",
            lacks);
    else
        doctor_tell(d, DOCTOR_FINE, "passthrough", NULL,
                    "the kernel can read side files, and copies (materialize=), by "
                    "itself: .unshard/counters.json of a mount says whether it does");
}

void doctor_fuse(struct doctor *d)
{
    CLEANUP_FD int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

    if (fd >= 0)
        doctor_tell(d, DOCTOR_FINE, "fuse", NULL, "/dev/fuse opens; libfuse %s",
                    fs_fuse_version());
    else
        doctor_tell(d, DOCTOR_PROBLEM, "fuse",
                    errno == ENOENT
                        ? "load the module fuse; for a container: --device /dev/fuse "
                          "--cap-add SYS_ADMIN"
                        : "ask who runs this machine for access",
                    "/dev/fuse: %s: nothing can be mounted, all else works",
                    strerror(errno));
    check_helper(d);
    check_passthrough(d);
}

/* ---- the cache directory ---- */

static void check_room(struct doctor *d, const char *dir)
{
    struct statvfs fs;
    char size[16];

    if (statvfs(dir, &fs) < 0)
        return;
    out_size((uint64_t)fs.f_bavail * fs.f_frsize, size);
    if (fs.f_flag & ST_RDONLY || access(dir, W_OK) < 0)
        doctor_tell(d, DOCTOR_NOTE, "cache", "name another by cache_dir=",
                    "%s cannot be written: indexes are kept in memory", dir);
    else if ((uint64_t)fs.f_bavail * fs.f_frsize < (uint64_t)1 << 30)
        doctor_tell(d, DOCTOR_NOTE, "cache", "`unshard cache clear` makes room",
                    "%s has %s free: little for decoded pieces", dir, size);
    else
        doctor_tell(d, DOCTOR_FINE, "cache", NULL, "%s, %s free", dir, size);
}

void doctor_cache(struct doctor *d)
{
    CLEANUP(buf_release) struct buf dir = {.max = PATH_MAX};
    CLEANUP(buf_release) struct buf sockets = {.max = PATH_MAX};
    struct err e = {0};
    char line[1400];

    if (cache_dir(d->c->opt.cache_dir, &dir, &e) < 0) {
        doctor_tell(d, DOCTOR_NOTE, "cache", NULL, "%s: indexes are kept in memory",
                    err_line(&e, line, sizeof line));
        return;
    }
    check_room(d, dir.data);
    if (local_socket_dir(dir.data, &sockets, &e) == 0)
        doctor_tell(d, DOCTOR_FINE, "sockets", NULL, "%s", sockets.data);
}

/* ---- limits ---- */

void doctor_limits(struct doctor *d)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    struct rlimit files;
    char size[16];

    if (getrlimit(RLIMIT_NOFILE, &files) == 0)
        doctor_tell(d, files.rlim_max < FILES_ENOUGH ? DOCTOR_NOTE : DOCTOR_FINE,
                    "limits",
                    files.rlim_max < FILES_ENOUGH ? "raise `ulimit -Hn`" : NULL,
                    "%" PRIu64 " open files at most, as many as shards of a checkpoint",
                    (uint64_t)files.rlim_max);
    doctor_tell(d, DOCTOR_FINE, "machine", NULL, "%u processors, %s of memory",
                thread_processors(), out_size((uint64_t)pages * (uint64_t)page, size));
}

/* ---- confinement ---- */

void doctor_confine(struct doctor *d)
{
    unsigned has = confine_available();
    const char *off = getenv("UNSHARD_CONFINE");

    if (off && strcmp(off, "0") == 0)
        doctor_tell(d, DOCTOR_NOTE, "confine", "unset UNSHARD_CONFINE",
                    "off: UNSHARD_CONFINE=0");
    else if (has == (CONFINE_CALLS | CONFINE_FILES))
        doctor_tell(
            d, DOCTOR_FINE, "confine", NULL,
            "commands that read local sources start no programs, reach no network "
            "(seccomp), write to their cache only (Landlock)");
    else
        doctor_tell(d, DOCTOR_NOTE, "confine",
                    has & CONFINE_CALLS
                        ? "Linux 5.13 or later, booted with lsm=landlock"
                        : "build with libseccomp, on a kernel with it",
                    "commands that read local sources are held by %s only",
                    has & CONFINE_CALLS   ? "seccomp"
                    : has & CONFINE_FILES ? "Landlock"
                                          : "their own care");
}

/* ---- devices ---- */

static void tell_device(struct doctor *d, int n)
{
    struct device_info i;
    struct device *opened = NULL;
    struct err e = {0};
    const struct device_options o = {.ordinal = n};
    char size[16], line[1400], link[96] = "";

    if (device_describe(NULL, n, &i, &e) < 0) {
        doctor_tell(d, DOCTOR_PROBLEM, "gpu", NULL, "cuda:%d: %s", n,
                    err_line(&e, line, sizeof line));
        return;
    }
    if (i.link_generation)
        snprintf(link, sizeof link, ", PCIe %d x%d now (at most %d x%d)",
                 i.link_generation, i.link_width, i.link_generation_max,
                 i.link_width_max);
    doctor_tell(d, DOCTOR_FINE, "gpu", NULL,
                "cuda:%d: %s, compute capability %d.%d, %s, %04x:%02x:%02x%s", n,
                i.name, i.major, i.minor, out_size(i.memory, size), i.pci_domain,
                i.pci_bus, i.pci_device, link);
    if (device_open(&o, &opened, &e) < 0)
        doctor_tell(d, DOCTOR_PROBLEM, "gpu", NULL, "cuda:%d cannot be used: %s", n,
                    err_line(&e, line, sizeof line));
    device_close(opened);
}

void doctor_gpu(struct doctor *d)
{
    struct device_info i;
    struct err e = {0};
    char line[1400];
    int count = 0;

    if (device_count(NULL, &count, &e) < 0 || count == 0) {
        doctor_tell(d, DOCTOR_NOTE, "gpu", NULL, "none: %s",
                    e.code ? err_line(&e, line, sizeof line)
                           : "the driver sees no device");
        return;
    }
    if (device_describe(NULL, 0, &i, &e) == 0)
        doctor_tell(d, DOCTOR_FINE, "gpu", NULL, "driver of CUDA %d.%d",
                    i.driver / 1000, i.driver % 1000 / 10);
    for (int n = 0; n < count; n++)
        tell_device(d, n);
}
